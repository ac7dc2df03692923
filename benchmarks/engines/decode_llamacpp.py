"""Run llama.cpp with the same weights through the in-process server of xllamacpp.

The weights are in F32 or, with the option `int8`, in Q8_0.
"""

from itertools import count
from typing import Any

from benchmarks.engines.decode_workload import GenerateFunction, Workload, serve_decoding
from benchmarks.engines.protocol import MissingPeerError, temporary_folder
from qkv.choices import TokenizerKind
from qkv.text import train_tokenizer
from qkv.weights.gguf_file import write_gguf
from qkv.weights.model_loader import ModelBundle
from qkv.weights.save import StorageDType


def build(workload: Workload, options: dict[str, Any]) -> tuple[GenerateFunction, dict[str, str]]:
    try:
        import xllamacpp
    except ImportError:
        raise MissingPeerError("llama.cpp is not installed (pip install xllamacpp)") from None
    file = temporary_folder() / "model.gguf"
    # Prompts are ids, so any tokenizer works. Ids that the tokenizer lacks get placeholder names.
    tokenizer = train_tokenizer(TokenizerKind.BPE, ["some words, some words"], vocab_size=261)
    write_gguf(
        ModelBundle(workload.model(), tokenizer),
        file,
        dtype=StorageDType.Q8_0 if options.get("int8") else StorageDType.F32,
    )
    params = xllamacpp.CommonParams()
    params.model.path = str(file)
    params.n_parallel = workload.batch
    params.n_ctx = workload.batch * 256
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = workload.threads
    server = xllamacpp.Server(params)

    calls = count()

    def run(prompts: list[list[int]], n: int) -> list[list[int]]:
        """Generate tokens.

        The server returns ids only together with log probabilities, which take time to compute. Therefore only the
        first call, which is used for the check, requests them.
        """
        with_ids = {"logprobs": 1} if next(calls) == 0 else {}
        request = {"prompt": prompts, "max_tokens": n, "temperature": 0, "ignore_eos": True, "cache_prompt": False}
        response = server.handle_completions({**request, **with_ids})
        result = sorted(response["choices"], key=lambda choice: choice["index"])
        return [[token["id"] for token in choice["logprobs"]["content"]] for choice in result] if with_ids else []

    return run, {"xllamacpp": xllamacpp.__version__}


if __name__ == "__main__":
    serve_decoding(build)
