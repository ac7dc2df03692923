"""Run beam search in CTranslate2 with the same weights in float32."""

from typing import Any

from torch import Tensor

from benchmarks.engines.beam_workload import END, PAD, TranslateFunction, Workload, serve_translation
from benchmarks.engines.protocol import MissingPeerError, temporary_folder
from qkv.weights.ctranslate2_export import build_ct2_spec


def build(workload: Workload, _: dict[str, Any]) -> tuple[TranslateFunction, dict[str, str]]:
    try:
        import ctranslate2
    except ImportError:
        raise MissingPeerError("ctranslate2 is not installed (pip install ctranslate2)") from None
    model = workload.model()
    spec = build_ct2_spec(model, frozenset())
    tokens = [str(number) for number in range(workload.vocab_size)]
    spec.register_source_vocabulary(tokens)
    spec.register_target_vocabulary(tokens)
    config: Any = spec.config
    config.layer_norm_epsilon = model.config.norm_eps
    config.decoder_start_token = config.bos_token = str(PAD)
    config.eos_token = config.unk_token = str(END)
    spec.validate()
    folder = temporary_folder()
    spec.save(str(folder))
    peer = ctranslate2.Translator(str(folder), device="cpu", intra_threads=workload.threads, compute_type="float32")

    def run(sources: Tensor, no_repeat: int | None) -> list[list[int]]:
        result = peer.translate_batch(
            [[str(number) for number in row] for row in sources.tolist()],
            beam_size=workload.n_beams,
            min_decoding_length=workload.length,
            max_decoding_length=workload.length,
            no_repeat_ngram_size=no_repeat or 0,
            max_batch_size=0,
        )
        return [[int(token) for token in output.hypotheses[0]] for output in result]

    return run, {"ctranslate2": ctranslate2.__version__}


if __name__ == "__main__":
    serve_translation(build)
