"""How does a translator leave for CTranslate2, which runs it faster than torch does?

Its folder holds `model.bin`, a vocabulary and, for those who call it, our tokenizer.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from qkv.choices import Activation, HeadLayout, NormKind, NormPosition, PositionKind, Role
from qkv.config import GPTConfig, Seq2SeqConfig
from qkv.errors import ConfigError, InputError, MissingExtraError
from qkv.models import GPT, Seq2Seq
from qkv.models.seq2seq import Side
from qkv.nn import Attention, Block, LayerNorm, RelativeBias, RMSNorm
from qkv.text import Tokenizer, tokenizer_files
from qkv.weights.folder import making
from qkv.weights.models import SOURCE_TOKENIZER, Loaded
from qkv.weights.save import Numbers, beginning, new_folder

if TYPE_CHECKING:
    from ctranslate2.specs import TransformerSpec

ACTIVATIONS = {
    Activation.RELU: "RELU",
    Activation.GELU: "GELU",
    Activation.GELU_TANH: "GELUTanh",
    Activation.SILU: "SWISH",
}
POSITIONS = (PositionKind.SINUSOIDAL, PositionKind.LEARNED, PositionKind.RELATIVE)
NEVER = -1e9
"""Added to the logit of what no text may hold."""


def save_ct2(loaded: Loaded, target: Path, *, numbers: Numbers = Numbers.F32) -> list[str]:
    """A new folder for `ctranslate2.Translator`; what its user must know comes back as remarks."""
    model, tokenizer = loaded.model, loaded.tokenizer
    if not isinstance(model, Seq2Seq):
        raise InputError(f"--to ct2 takes encoder–decoder Transformers, not a {model.config.family}")
    if tokenizer is None:
        raise InputError("--to ct2 needs the model's tokenizer: CTranslate2 speaks in tokens, and there is none")
    _check(model.config)
    spec = _spec(model, loaded.decoding.never)
    source = loaded.source_tokenizer or tokenizer
    spec.register_source_vocabulary(vocabulary(source, model.config.source_vocab_size))
    spec.register_target_vocabulary(vocabulary(tokenizer, model.config.vocab_size))
    words: Any = spec.config
    words.layer_norm_epsilon = model.config.norm_eps
    _set_words(words, tokenizer, first=beginning(loaded).get("decoder_start_token_id"))
    spec.validate()
    spec.optimize(quantization="float16" if numbers is Numbers.F16 else None)
    files = tokenizer_files(tokenizer)
    if loaded.source_tokenizer is not None:
        files[SOURCE_TOKENIZER] = loaded.source_tokenizer.backend.to_str()
    with making(new_folder(target), sum(one.numel() * 4 for one in model.parameters())) as aside:
        spec.save(str(aside))
        for name, text in files.items():
            (aside / name).write_text(text, encoding="utf-8")
    then = loaded.decoding.then
    return [] if then is None else [f"every text must begin with {tokenizer.token(then)}: give it as target_prefix"]


def _check(config: Seq2SeqConfig) -> None:
    """Refuse a shape that CTranslate2 does not have, with all settings that do not fit."""
    fits = {
        "head_layout": config.head_layout is HeadLayout.SPLIT,
        "n_kv_heads": config.n_kv_heads == config.n_heads,
        "d_head": config.d_head * config.n_heads == config.d_model,
        "d_value": config.d_value == config.d_head,
        "output_projection": config.output_projection,
        "sliding_window": config.sliding_window is None,
        "d_patch": config.d_patch is None,
        "positions": config.positions in POSITIONS,
        "final_norm": not config.final_norm or config.norm_position is NormPosition.PRE,
    }
    lost = [f"{name}={getattr(config, name)}" for name, is_fitting in fits.items() if not is_fitting]
    if lost:
        raise ConfigError(f"CTranslate2 cannot have {', '.join(lost)}")


def _spec(model: Seq2Seq, never: frozenset[int]) -> "TransformerSpec":
    specs = _library().specs
    config = model.config
    spec = specs.TransformerSpec.from_config(
        (config.n_encoder_layers, config.n_decoder_layers),
        config.n_heads,
        pre_norm=config.norm_position is NormPosition.PRE,
        no_final_norm=not config.final_norm,
        activation=getattr(specs.Activation, ACTIVATIONS[config.activation]),
        layernorm_embedding=config.embedding_norm,
        relative_attention_bias=config.positions is PositionKind.RELATIVE,
        ffn_glu=config.gated,
        rms_norm=config.norm is NormKind.RMS,
    )
    for given, side in ((spec.encoder, model.encoder), (spec.decoder, model.decoder)):
        fill_side(given, side, config)
    spec.encoder.embeddings[0].weight = array(model.encoder.embedding.token.weight)
    spec.decoder.embeddings.weight = array(model.decoder.embedding.token.weight)
    spec.decoder.projection.weight = array(model.unembedding.weight)
    bias = model.unembedding.bias
    if bias is not None or never:
        values = np.zeros(config.vocab_size, np.float32) if bias is None else array(bias).copy()
        values[sorted(never)] = NEVER
        spec.decoder.projection.bias = values
    if config.scale_logits:
        spec.decoder.scale_outputs = config.d_model**-0.5
    return spec


def fill_side(spec: Any, side: Side | GPT, config: Seq2SeqConfig | GPTConfig) -> None:  # noqa: ANN401 - it has no types
    """An encoder, a decoder, or a GPT, all but its token table."""
    spec.scale_embeddings = side.embedding.scale
    if side.embedding.position is not None:
        # Whatever they are made of, positions are one vector each that is added.
        nothing = torch.zeros(1, config.context_length, config.d_model)
        places = side.embedding.position(nothing, torch.arange(config.context_length)[None])
        spec.position_encodings.encodings = array(places[0])
    if side.embedding.norm is not None:
        _fill_norm(spec.layernorm_embedding, side.embedding.norm)
    if isinstance(side.final_norm, LayerNorm | RMSNorm):
        _fill_norm(spec.layer_norm, side.final_norm)
    for given, block in zip(spec.layer, side.blocks, strict=True):
        assert isinstance(block, Block)
        _fill_attention(given.self_attention, block.attention, block.attention_norm, side.relation)
        if block.cross is not None:
            _fill_attention(given.attention, block.cross, block.cross_norm, None)
        feedforward = block.feedforward
        _fill_norm(given.ffn.layer_norm, block.feedforward_norm)
        _fill_linear(given.ffn.linear_0, feedforward.expand if feedforward.gate is None else feedforward.gate)
        if feedforward.gate is not None:
            _fill_linear(given.ffn.linear_0_noact, feedforward.expand)
        _fill_linear(given.ffn.linear_1, feedforward.contract)


def _fill_attention(spec: Any, part: Attention, norm: nn.Module, relation: nn.Module | None) -> None:  # noqa: ANN401
    _fill_norm(spec.layer_norm, norm)
    spec.queries_scale = part.scale
    own = [part.query, part.key, part.value]
    # Self-attention has one matrix for all three, cross-attention one for the queries and one for the source.
    for given, linears in zip(spec.linear, [own] if len(spec.linear) == 2 else [own[:1], own[1:]], strict=False):
        _fill_linear(given, *linears)
    assert isinstance(part.output, nn.Linear)
    _fill_linear(spec.linear[-1], part.output)
    if isinstance(relation, RelativeBias):
        spec.relative_attention_bias = array(relation.table.weight)
        spec.relative_attention_max_distance = np.dtype("int32").type(relation.max_distance)


def _fill_linear(spec: Any, *linears: nn.Linear) -> None:  # noqa: ANN401
    spec.weight = array(torch.cat([one.weight for one in linears]))
    biases: list[Tensor | None] = [one.bias for one in linears]
    given = [one for one in biases if one is not None]
    if given:
        spec.bias = array(torch.cat(given))


def _fill_norm(spec: Any, norm: nn.Module) -> None:  # noqa: ANN401
    assert isinstance(norm, LayerNorm | RMSNorm)
    spec.gamma = array(norm.weight)
    if isinstance(norm, LayerNorm):
        spec.beta = array(torch.zeros_like(norm.weight) if norm.bias is None else norm.bias)


def array(tensor: Tensor) -> NDArray[np.float32]:
    return tensor.detach().float().cpu().contiguous().numpy()


def vocabulary(tokenizer: Tokenizer, n_rows: int) -> list[str]:
    """A token a row; rows that no token has get a name that no text spells."""
    known = [tokenizer.token(i) for i in range(min(n_rows, tokenizer.vocab_size))]
    return [token or f"<id {i}>" for i, token in enumerate([*known, *[""] * (n_rows - len(known))])]


def _set_words(config: Any, tokenizer: Tokenizer, *, first: int | None) -> None:  # noqa: ANN401
    """Which tokens begin, end and stand for what is unknown."""
    end = tokenizer.token(tokenizer.id_of(Role.END))
    unknown = tokenizer.find(Role.UNKNOWN)
    config.eos_token = end
    config.unk_token = end if unknown is None else tokenizer.token(unknown)
    config.decoder_start_token = config.bos_token = end if first is None else tokenizer.token(first)


def _library() -> Any:  # noqa: ANN401 - it has no types
    try:
        import ctranslate2
    except ImportError:
        raise MissingExtraError("--to ct2 needs ctranslate2: pip install 'qkv[formats]'") from None
    return ctranslate2
