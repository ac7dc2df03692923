"""Our beam search, as `qkv translate` calls it."""

from typing import Any

from torch import Tensor

import qkv
from benchmarks.engines.beam_work import END, PAD, Translate, Work, serve_translation
from qkv.config import BeamConfig
from qkv.generation import translate
from qkv.generation.prepacked_weights import prepack_weights


def build(work: Work, _: dict[str, Any]) -> tuple[Translate, dict[str, str]]:
    model = work.model()
    packing = prepack_weights(model)

    def run(sources: Tensor, no_repeat: int | None) -> list[list[int]]:
        beam = BeamConfig(n_beams=work.n_beams, no_repeat_ngram_size=no_repeat)
        found = translate(
            model,
            sources.tolist(),
            start_id=PAD,
            max_new=[work.length] * len(sources),
            stop_ids=frozenset({END}),
            beam=beam,
            prepacked=packing,
        )
        return [best[0].ids for best in found]

    return run, {"qkv": qkv.__version__}


if __name__ == "__main__":
    serve_translation(build)
