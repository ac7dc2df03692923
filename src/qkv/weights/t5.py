"""T5's published names and settings: version 1.0 (ReLU, tied) and 1.1 (gated GELU, untied)."""

from typing import Any

from qkv.choices import Activation, NormKind, NormPosition, PositionKind
from qkv.config import Seq2SeqConfig
from qkv.weights.names import NameTable, Rename, layers, linear
from qkv.weights.settings import Settings, activation_of, activation_word, written

SETTINGS = {
    "vocab_size": "vocab_size",
    "n_positions": "context_length",
    "d_model": "d_model",
    "d_kv": "d_head",
    "d_ff": "d_ff",
    "num_heads": "n_heads",
    "num_layers": "n_encoder_layers",
    "relative_attention_num_buckets": "relative_buckets",
    "relative_attention_max_distance": "relative_max_distance",
    "layer_norm_epsilon": "norm_eps",
    "dropout_rate": "dropout",
}


def read(given: Settings) -> Seq2SeqConfig:
    shape = {"context_length": 512, "norm_eps": 1e-6, **given.renamed(SETTINGS)}
    activation, gated = _feedforward(given)
    tied, scaled = _unembedding(given)
    return Seq2SeqConfig(
        n_decoder_layers=given.take("num_decoder_layers", shape.get("n_encoder_layers")),
        activation=activation,
        gated=gated,
        tie_embeddings=tied,
        scale_logits=scaled,
        positions=PositionKind.RELATIVE,
        norm=NormKind.RMS,
        norm_position=NormPosition.PRE,
        final_norm=True,
        attention_bias=False,
        feed_forward_bias=False,
        scale_scores=False,
        scale_embedding=False,
        **shape,
    )


def _feedforward(given: Settings) -> tuple[Activation, bool]:
    """`gated-gelu` means the tanh form, by T5's own rule; `gelu` alone the exact one."""
    said = str(given.take("feed_forward_proj", "relu"))
    word = "gelu_new" if said == "gated-gelu" else said.removeprefix("gated-")
    gated = said.startswith("gated-")
    given.expect({"dense_act_fn": word, "is_gated_act": gated})
    return activation_of("feed_forward_proj", word), gated


def _unembedding(given: Settings) -> tuple[bool, bool]:
    """Tied or not; scaled or not.

    `tie_word_embeddings=False` says both. Newer files say `scale_decoder_outputs` and always “tied”; whether
    there is a matrix apart is then told by the tensors alone.
    """
    tied = given.take("tie_word_embeddings", True)
    scaled = given.take("scale_decoder_outputs", tied)
    if not scaled and "lm_head.weight" in given.tensor_names:
        tied = False
    return tied, scaled


def write(config: Seq2SeqConfig) -> dict[str, Any]:
    word = activation_word(config.activation)
    if config.gated:
        word = "gated-gelu" if config.activation is Activation.GELU_TANH else f"gated-{word}"
    return {
        "architectures": ["T5ForConditionalGeneration"],
        "is_encoder_decoder": True,
        "feed_forward_proj": word,
        "num_decoder_layers": config.n_decoder_layers,
        "tie_word_embeddings": config.tie_embeddings,
        **written(config, SETTINGS),
    }


def names(config: Seq2SeqConfig) -> NameTable:
    own = _attention("layer.0", "SelfAttention", "attention")
    cross = _attention("layer.1", "EncDecAttention", "cross")
    sides = (
        ("encoder", config.n_encoder_layers, {**own, **_feedforward_parts("layer.1", gated=config.gated)}),
        ("decoder", config.n_decoder_layers, {**own, **cross, **_feedforward_parts("layer.2", gated=config.gated)}),
    )
    renames = [Rename("shared.weight", ("decoder.embedding.token.weight",))]
    for side, n_layers, parts in sides:
        renames += [
            Rename(f"{side}.embed_tokens.weight", (f"{side}.embedding.token.weight",)),
            # One table a side; theirs lies in the first layer and is handed on.
            Rename(
                f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias.weight",
                (f"{side}.relation.table.weight",),
            ),
            *layers(side + ".block.{}", side + ".blocks.{}", n_layers=n_layers, parts=parts),
            *linear(f"{side}.final_layer_norm", f"{side}.final_norm"),
        ]
    return NameTable(
        renames=[*renames, Rename("lm_head.weight", ("unembedding.weight",))],
        # An early conversion left a table in cross-attention that no code reads.
        ignored=(r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight",),
    )


def _attention(layer: str, name: str, ours: str) -> dict[str, str]:
    parts = {"q": "query", "k": "key", "v": "value", "o": "output"}
    return {
        **{f"{layer}.{name}.{theirs}": f"{ours}.{part}" for theirs, part in parts.items()},
        f"{layer}.layer_norm": f"{ours}_norm",
    }


def _feedforward_parts(layer: str, *, gated: bool) -> dict[str, str]:
    return {
        f"{layer}.DenseReluDense.{'wi_1' if gated else 'wi'}": "feedforward.expand",
        f"{layer}.DenseReluDense.wi_0": "feedforward.gate",
        f"{layer}.DenseReluDense.wo": "feedforward.contract",
        f"{layer}.layer_norm": "feedforward_norm",
    }
