"""Export translation models to CTranslate2, which runs them faster than torch.

An exported folder contains `model.bin` and the vocabularies. It also contains our tokenizer files because CTranslate2
itself does not tokenize text.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from qkv.choices import Activation, HeadCombination, NormKind, NormPosition, PositionKind, SpecialToken
from qkv.config import GPTConfig, Seq2SeqConfig
from qkv.errors import ConfigError, InputError, MissingExtraError
from qkv.models import Seq2Seq
from qkv.models.stack import Stack
from qkv.nn import Attention, Block
from qkv.nn.norm import LayerNorm, RMSNorm
from qkv.nn.positions import RelativeBias
from qkv.text import Tokenizer, tokenizer_files
from qkv.weights.checkpoint_folder import create_folder_atomically
from qkv.weights.model_loader import SOURCE_TOKENIZER, ModelBundle
from qkv.weights.save import StorageDType, published_seq2seq_generation_settings, require_nonexistent_folder

if TYPE_CHECKING:
    from ctranslate2.specs import TransformerSpec

CT2_ACTIVATIONS = {
    Activation.RELU: "RELU",
    Activation.GELU: "GELU",
    Activation.GELU_TANH: "GELUTanh",
    Activation.SILU: "SWISH",
}
CT2_POSITIONS = (PositionKind.SINUSOIDAL, PositionKind.LEARNED, PositionKind.RELATIVE)
SUPPRESSED_LOGIT_BIAS = -1e9
"""The logit bias for tokens that must never be generated."""


def save_ct2(bundle: ModelBundle, target: Path, *, dtype: StorageDType = StorageDType.F32) -> list[str]:
    """Save a translation model to a new folder that `ctranslate2.Translator` can load.

    Returns notes for the user, such as a required target prefix.
    """
    model, tokenizer = bundle.model, bundle.tokenizer
    if not isinstance(model, Seq2Seq):
        raise InputError(f"--to ct2 only supports encoder–decoder Transformers, got {model.config.family}")
    if tokenizer is None:
        raise InputError(
            "--to ct2 requires a model with a tokenizer because CTranslate2 models read and write tokens instead of ids"
        )
    _check_ct2_support(model.config)
    spec = build_ct2_spec(model, bundle.generation_config.suppressed_ids)
    source = bundle.source_tokenizer or tokenizer
    spec.register_source_vocabulary(ct2_vocabulary(source, model.config.source_vocab_size))
    spec.register_target_vocabulary(ct2_vocabulary(tokenizer, model.config.vocab_size))
    spec_config: Any = spec.config
    spec_config.layer_norm_epsilon = model.config.norm_eps
    _set_special_tokens(
        spec_config, tokenizer, start_id=published_seq2seq_generation_settings(bundle).get("decoder_start_token_id")
    )
    spec.validate()
    spec.optimize(quantization="float16" if dtype is StorageDType.F16 else None)
    files = tokenizer_files(tokenizer)
    if bundle.source_tokenizer is not None:
        files[SOURCE_TOKENIZER] = bundle.source_tokenizer.backend.to_str()
    with create_folder_atomically(
        require_nonexistent_folder(target), sum(parameter.numel() * 4 for parameter in model.parameters())
    ) as temporary:
        spec.save(str(temporary))
        for name, text in files.items():
            (temporary / name).write_text(text, encoding="utf-8")
    forced_bos_id = bundle.generation_config.forced_bos_id
    return (
        []
        if forced_bos_id is None
        else [f"every output must start with {tokenizer.id_to_token(forced_bos_id)}; pass this token as target_prefix"]
    )


def _check_ct2_support(config: Seq2SeqConfig) -> None:
    """Raise an error that lists the settings that CTranslate2 does not support, if there are any."""
    supported = {
        "head_combination": config.head_combination is HeadCombination.SPLIT,
        "n_kv_heads": config.n_kv_heads == config.n_heads,
        "d_head": config.d_head * config.n_heads == config.d_model,
        "d_value": config.d_value == config.d_head,
        "output_projection": config.output_projection,
        "sliding_window": config.sliding_window is None,
        "d_patch": config.d_patch is None,
        "norm": config.norm in (NormKind.LAYER, NormKind.RMS),
        "positions": config.positions in CT2_POSITIONS,
        "final_norm": not config.final_norm or config.norm_position is NormPosition.PRE,
    }
    unsupported = [f"{name}={getattr(config, name)}" for name, is_supported in supported.items() if not is_supported]
    if unsupported:
        raise ConfigError(f"CTranslate2 does not support {', '.join(unsupported)}")


def build_ct2_spec(model: Seq2Seq, suppressed_ids: frozenset[int]) -> "TransformerSpec":
    specs = _import_ctranslate2().specs
    config = model.config
    spec = specs.TransformerSpec.from_config(
        (config.n_encoder_layers, config.n_decoder_layers),
        config.n_heads,
        pre_norm=config.norm_position is NormPosition.PRE,
        no_final_norm=not config.final_norm,
        activation=getattr(specs.Activation, CT2_ACTIVATIONS[config.activation]),
        layernorm_embedding=config.embedding_norm,
        relative_attention_bias=config.positions is PositionKind.RELATIVE,
        ffn_glu=config.gated,
        rms_norm=config.norm is NormKind.RMS,
    )
    for stack_spec, stack in ((spec.encoder, model.encoder), (spec.decoder, model.decoder)):
        fill_stack_spec_except_token_embedding(stack_spec, stack, config)
    spec.encoder.embeddings[0].weight = to_numpy(model.encoder.embedding.token.weight)
    spec.decoder.embeddings.weight = to_numpy(model.decoder.embedding.token.weight)
    spec.decoder.projection.weight = to_numpy(model.unembedding.weight)
    bias = model.unembedding.bias
    if bias is not None or suppressed_ids:
        values = np.zeros(config.vocab_size, np.float32) if bias is None else to_numpy(bias).copy()
        values[sorted(suppressed_ids)] = SUPPRESSED_LOGIT_BIAS
        spec.decoder.projection.bias = values
    if config.scale_logits:
        spec.decoder.scale_outputs = config.d_model**-0.5
    return spec


def fill_stack_spec_except_token_embedding(
    spec: Any,  # noqa: ANN401 - the package has no types
    stack: Stack,
    config: Seq2SeqConfig | GPTConfig,
) -> None:
    """Copy all weights except the token embedding from an encoder, a decoder or a GPT to a CTranslate2 spec."""
    spec.scale_embeddings = stack.embedding.scale
    if stack.embedding.position is not None:
        # All supported kinds of position embedding are exported as a table of vectors.
        zeros = torch.zeros(1, config.context_length, config.d_model)
        position_embedding = stack.embedding.position(zeros, torch.arange(config.context_length)[None])
        spec.position_encodings.encodings = to_numpy(position_embedding[0])
    if stack.embedding.norm is not None:
        _fill_norm(spec.layernorm_embedding, stack.embedding.norm)
    if isinstance(stack.final_norm, LayerNorm | RMSNorm):
        _fill_norm(spec.layer_norm, stack.final_norm)
    for layer_spec, block in zip(spec.layer, stack.blocks, strict=True):
        assert isinstance(block, Block)
        _fill_attention_and_norm(
            layer_spec.self_attention, block.attention, block.attention_norm, stack.relative_positions
        )
        if block.cross_attention is not None:
            _fill_attention_and_norm(layer_spec.attention, block.cross_attention, block.cross_attention_norm, None)
        feed_forward = block.feed_forward
        _fill_norm(layer_spec.ffn.layer_norm, block.feed_forward_norm)
        _fill_concatenated_linears(
            layer_spec.ffn.linear_0, feed_forward.up_proj if feed_forward.gate_proj is None else feed_forward.gate_proj
        )
        if feed_forward.gate_proj is not None:
            _fill_concatenated_linears(layer_spec.ffn.linear_0_noact, feed_forward.up_proj)
        _fill_concatenated_linears(layer_spec.ffn.linear_1, feed_forward.down_proj)


def _fill_attention_and_norm(
    spec: Any,  # noqa: ANN401
    attention: Attention,
    norm: nn.Module,
    relative_positions: nn.Module | None,
) -> None:
    _fill_norm(spec.layer_norm, norm)
    spec.queries_scale = attention.scale
    projections = [attention.q_proj, attention.k_proj, attention.v_proj]
    # Self-attention uses a single matrix. Cross-attention uses one matrix for the queries and another one for the
    # keys and values.
    groups = [projections] if len(spec.linear) == 2 else [projections[:1], projections[1:]]
    for linear_spec, linears in zip(spec.linear, groups, strict=False):
        _fill_concatenated_linears(linear_spec, *linears)
    assert isinstance(attention.out_proj, nn.Linear)
    _fill_concatenated_linears(spec.linear[-1], attention.out_proj)
    if isinstance(relative_positions, RelativeBias):
        spec.relative_attention_bias = to_numpy(relative_positions.table.weight)
        spec.relative_attention_max_distance = np.dtype("int32").type(relative_positions.max_distance)


def _fill_concatenated_linears(spec: Any, *linears: nn.Linear) -> None:  # noqa: ANN401
    spec.weight = to_numpy(torch.cat([linear.weight for linear in linears]))
    optional_biases: list[Tensor | None] = [linear.bias for linear in linears]
    biases = [bias for bias in optional_biases if bias is not None]
    if biases:
        spec.bias = to_numpy(torch.cat(biases))


def _fill_norm(spec: Any, norm: nn.Module) -> None:  # noqa: ANN401
    assert isinstance(norm, LayerNorm | RMSNorm)
    spec.gamma = to_numpy(norm.weight)
    if isinstance(norm, LayerNorm):
        spec.beta = to_numpy(torch.zeros_like(norm.weight) if norm.bias is None else norm.bias)


def to_numpy(tensor: Tensor) -> NDArray[np.float32]:
    return tensor.detach().float().cpu().contiguous().numpy()


def ct2_vocabulary(tokenizer: Tokenizer, vocab_size: int) -> list[str]:
    """Return the token for each id. Ids without a token get a placeholder that does not occur in real text."""
    tokens = [tokenizer.id_to_token(i) for i in range(min(vocab_size, tokenizer.vocab_size))]
    return [token or f"<id {i}>" for i, token in enumerate([*tokens, *[""] * (vocab_size - len(tokens))])]


def _set_special_tokens(config: Any, tokenizer: Tokenizer, *, start_id: int | None) -> None:  # noqa: ANN401
    """Set the start, end and unknown tokens in a CTranslate2 config."""
    end = tokenizer.id_to_token(tokenizer.special_id(SpecialToken.EOS))
    unknown = tokenizer.find_special_id(SpecialToken.UNK)
    config.eos_token = end
    config.unk_token = end if unknown is None else tokenizer.id_to_token(unknown)
    config.decoder_start_token = config.bos_token = end if start_id is None else tokenizer.id_to_token(start_id)


def _import_ctranslate2() -> Any:  # noqa: ANN401 - the package has no types
    try:
        import ctranslate2
    except ImportError:
        raise MissingExtraError("--to ct2 requires ctranslate2; install it with: pip install 'qkv[formats]'") from None
    return ctranslate2
