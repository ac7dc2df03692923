"""Load models from a single file: llama.cpp's `.gguf` or llama2.c's `.bin`, which has a separate tokenizer file."""

from pathlib import Path

from qkv.errors import QKVError, WeightsError
from qkv.weights.checkpoint_folder import raise_pickle_error
from qkv.weights.gguf_file import GGUF_MAGIC, read_gguf
from qkv.weights.llama2c import has_plausible_llama2c_header, read_llama2c
from qkv.weights.model_loader import ModelBundle, check_token_ids_within_vocabulary


def load_gguf_or_llama2c(file: Path) -> ModelBundle:
    """Load a GGUF or llama2.c file. The format is detected from the first bytes, not from the file name."""
    try:
        if _read_first_bytes(file, len(GGUF_MAGIC)) == GGUF_MAGIC:
            loaded = read_gguf(file)
        elif has_plausible_llama2c_header(file):
            loaded = read_llama2c(file)
        elif file.suffix in {".bin", ".pt", ".pth", ".ckpt"}:
            raise_pickle_error(file)
        else:
            raise WeightsError(f"{file}: expected a .gguf file, a llama2.c .bin file or a folder with config.json")
    except OSError as error:
        raise WeightsError(f"{file}: cannot be read: {error.strerror}") from None
    except QKVError as error:
        is_named = str(error).startswith((str(file), str(file.parent)))
        raise error if is_named else type(error)(f"{file}: {error}") from None
    check_token_ids_within_vocabulary(loaded, file)
    return loaded


def _read_first_bytes(file: Path, n: int) -> bytes:
    with file.open("rb") as stream:
        return stream.read(n)
