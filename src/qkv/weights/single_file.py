"""A model in one file: llama.cpp's `.gguf`, or llama2.c's `.bin` with its tokenizer beside it."""

from pathlib import Path

from qkv.errors import QKVError, WeightsError
from qkv.weights.gguf_file import MAGIC, read_gguf
from qkv.weights.llama2c import looks_like_llama2c, read_llama2c
from qkv.weights.models import Loaded, check_vocabulary, refuse_pickle


def load_file_model(file: Path) -> Loaded:
    """The first bytes say which kind it is; the name says nothing that could be trusted."""
    try:
        if _first_bytes(file, len(MAGIC)) == MAGIC:
            loaded = read_gguf(file)
        elif looks_like_llama2c(file):
            loaded = read_llama2c(file)
        elif file.suffix in {".bin", ".pt", ".pth", ".ckpt"}:
            refuse_pickle(file)
        else:
            raise WeightsError(f"{file}: is neither a .gguf nor a llama2.c .bin; a model folder has config.json")
    except OSError as error:
        raise WeightsError(f"{file}: cannot be read: {error.strerror}") from None
    except QKVError as error:
        is_named = str(error).startswith((str(file), str(file.parent)))
        raise error if is_named else type(error)(f"{file}: {error}") from None
    check_vocabulary(loaded, file)
    return loaded


def _first_bytes(file: Path, n: int) -> bytes:
    with file.open("rb") as stream:
        return stream.read(n)
