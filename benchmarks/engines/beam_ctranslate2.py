"""CTranslate2's beam search with the same weights, in float32."""

from typing import Any

from torch import Tensor

from benchmarks.engines.beam_work import END, PAD, Translate, Work, serve_translation
from benchmarks.engines.speaking import MissingPeerError, scratch_folder
from qkv.weights.ctranslate2_export import build_ct2_spec


def build(work: Work, _: dict[str, Any]) -> tuple[Translate, dict[str, str]]:
    try:
        import ctranslate2
    except ImportError:
        raise MissingPeerError("ctranslate2 is not installed (pip install ctranslate2)") from None
    model = work.model()
    spec = build_ct2_spec(model, frozenset())
    tokens = [str(number) for number in range(work.vocab_size)]
    spec.register_source_vocabulary(tokens)
    spec.register_target_vocabulary(tokens)
    words: Any = spec.config
    words.layer_norm_epsilon = model.config.norm_eps
    words.decoder_start_token = words.bos_token = str(PAD)
    words.eos_token = words.unk_token = str(END)
    spec.validate()
    folder = scratch_folder()
    spec.save(str(folder))
    peer = ctranslate2.Translator(str(folder), device="cpu", intra_threads=work.threads, compute_type="float32")

    def run(sources: Tensor, no_repeat: int | None) -> list[list[int]]:
        found = peer.translate_batch(
            [[str(number) for number in row] for row in sources.tolist()],
            beam_size=work.n_beams,
            min_decoding_length=work.length,
            max_decoding_length=work.length,
            no_repeat_ngram_size=no_repeat or 0,
            max_batch_size=0,
        )
        return [[int(token) for token in one.hypotheses[0]] for one in found]

    return run, {"ctranslate2": ctranslate2.__version__}


if __name__ == "__main__":
    serve_translation(build)
