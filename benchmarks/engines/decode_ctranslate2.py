"""Run the CTranslate2 `Generator` with the same weights in float32 or int8."""

from typing import Any

from benchmarks.engines.decode_workload import GenerateFunction, Workload, serve_decoding
from benchmarks.engines.protocol import MissingPeerError, temporary_folder
from qkv.weights.ctranslate2_export import fill_stack_spec_except_token_embedding, to_numpy


def build(workload: Workload, options: dict[str, Any]) -> tuple[GenerateFunction, dict[str, str]]:
    try:
        import ctranslate2
    except ImportError:
        raise MissingPeerError("ctranslate2 is not installed (pip install ctranslate2)") from None
    model = workload.model()
    specs = ctranslate2.specs
    spec = specs.TransformerDecoderModelSpec.from_config(
        workload.n_layers, workload.n_heads, pre_norm=True, activation=specs.Activation.GELUTanh
    )
    fill_stack_spec_except_token_embedding(spec.decoder, model, model.config)
    spec.decoder.embeddings.weight = to_numpy(model.embedding.token.weight)
    spec.decoder.projection.weight = to_numpy(model.unembedding.weight)
    spec.register_vocabulary([str(number) for number in range(workload.vocab_size)])
    config: Any = spec.config
    config.bos_token = config.eos_token = config.unk_token = "0"
    config.layer_norm_epsilon = model.config.norm_eps
    spec.validate()
    spec.optimize(quantization="int8" if options.get("int8") else None)
    folder = temporary_folder()
    spec.save(str(folder))
    peer = ctranslate2.Generator(
        str(folder),
        device="cpu",
        intra_threads=workload.threads,
        compute_type="int8" if options.get("int8") else "float32",
    )

    def run(prompts: list[list[int]], n: int) -> list[list[int]]:
        result = peer.generate_batch(
            [[str(number) for number in prompt] for prompt in prompts],
            max_length=n,
            min_length=n,
            sampling_topk=1,
            include_prompt_in_result=False,
            max_batch_size=0,
        )
        return [output.sequences_ids[0] for output in result]

    return run, {"ctranslate2": ctranslate2.__version__}


if __name__ == "__main__":
    serve_decoding(build)
