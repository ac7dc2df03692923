"""Run beam search in qkv in the same way as `qkv translate`."""

from typing import Any

from torch import Tensor

import qkv
from benchmarks.engines.beam_workload import END, PAD, TranslateFunction, Workload, serve_translation
from qkv.config import BeamConfig
from qkv.engines import decode_engine
from qkv.generation import translate


def build(workload: Workload, _: dict[str, Any]) -> tuple[TranslateFunction, dict[str, str]]:
    model = workload.model()

    def run(sources: Tensor, no_repeat: int | None) -> list[list[int]]:
        beam = BeamConfig(n_beams=workload.n_beams, no_repeat_ngram_size=no_repeat)
        result = translate(
            model,
            sources.tolist(),
            start_id=PAD,
            max_new=[workload.length] * len(sources),
            stop_ids=frozenset({END}),
            beam=beam,
            create_engine=decode_engine,
        )
        return [best[0].ids for best in result]

    return run, {"qkv": qkv.__version__}


if __name__ == "__main__":
    serve_translation(build)
