"""Run decoding in qkv on a GPU in the same way as `qkv generate --device cuda`."""

from typing import Any

import torch

import qkv
from benchmarks.engines.decode_workload import GenerateFunction
from benchmarks.engines.gpu_decode_workload import Workload, serve_gpu_decoding
from qkv.config import SamplingConfig
from qkv.engines import decode_engine
from qkv.generation import generate
from qkv.models import GPT

GREEDY = SamplingConfig(temperature=0)


def build(_work: Workload, model: GPT, _options: dict[str, Any]) -> tuple[Any, dict[str, str]]:
    def prepare(is_timed: bool) -> GenerateFunction:  # noqa: FBT001
        if is_timed:
            model.to(torch.bfloat16)
        return lambda prompts, n: [
            text.new_ids for text in generate(model, prompts, max_new=n, sampling=GREEDY, create_engine=decode_engine)
        ]

    return prepare, {"qkv": qkv.__version__}


if __name__ == "__main__":
    serve_gpu_decoding(build)
