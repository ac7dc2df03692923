"""llama.cpp, by xllamacpp's server inside this process, with the same weights: F32, or with `int8` Q8_0."""

from itertools import count
from typing import Any

from benchmarks.engines.decode_work import Work, Write, serve_decoding
from benchmarks.engines.speaking import MissingPeerError, scratch_folder
from qkv.choices import TokenizerKind
from qkv.text import train_tokenizer
from qkv.weights.gguf_file import write_gguf
from qkv.weights.model_loader import ModelBundle
from qkv.weights.save import StorageDType


def build(work: Work, options: dict[str, Any]) -> tuple[Write, dict[str, str]]:
    try:
        import xllamacpp
    except ImportError:
        raise MissingPeerError("llama.cpp is not installed (pip install xllamacpp)") from None
    file = scratch_folder() / "model.gguf"
    # Prompts come as ids, so that any tokenizer will do; ids that it lacks have made-up names.
    tokenizer = train_tokenizer(TokenizerKind.BPE, ["some words, some words"], vocab_size=261)
    write_gguf(ModelBundle(work.model(), tokenizer), file, dtype=StorageDType.Q8_0 if options.get("int8") else StorageDType.F32)
    asked = xllamacpp.CommonParams()
    asked.model.path = str(file)
    asked.n_parallel = work.batch
    asked.n_ctx = work.batch * 256
    asked.cpuparams.n_threads = asked.cpuparams_batch.n_threads = work.threads
    server = xllamacpp.Server(asked)

    calls = count()

    def run(prompts: list[list[int]], n: int) -> list[list[int]]:
        """Ids come with log p alone, which takes time: asked for at the first call, which is the check."""
        with_ids = {"logprobs": 1} if next(calls) == 0 else {}
        question = {"prompt": prompts, "max_tokens": n, "temperature": 0, "ignore_eos": True, "cache_prompt": False}
        answer = server.handle_completions({**question, **with_ids})
        found = sorted(answer["choices"], key=lambda one: one["index"])
        return [[each["id"] for each in one["logprobs"]["content"]] for one in found] if with_ids else []

    return run, {"xllamacpp": xllamacpp.__version__}


if __name__ == "__main__":
    serve_decoding(build)
