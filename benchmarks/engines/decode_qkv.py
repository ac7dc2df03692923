"""Run decoding in qkv in the same way as `qkv generate`, either in float32 or with `--int8`."""

from typing import Any

import qkv
from benchmarks.engines.decode_workload import GenerateFunction, Workload, serve_decoding
from qkv.config import SamplingConfig
from qkv.engines import decode_engine, quantize_linears_to_int8
from qkv.generation import generate


def build(workload: Workload, options: dict[str, Any]) -> tuple[GenerateFunction, dict[str, str]]:
    model = workload.model()
    if options.get("int8"):
        quantize_linears_to_int8(model)
    greedy = SamplingConfig(temperature=0)

    def run(prompts: list[list[int]], n: int) -> list[list[int]]:
        return [
            text.new_ids for text in generate(model, prompts, max_new=n, sampling=greedy, create_engine=decode_engine)
        ]

    return run, {"qkv": qkv.__version__}


if __name__ == "__main__":
    serve_decoding(build)
