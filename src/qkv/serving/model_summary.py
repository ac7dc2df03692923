"""What is said of a model before it is asked anything, from its config alone."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from qkv.choices import AttentionKind, ScoreKind
from qkv.config import BERTConfig, GPTConfig, ModelConfig, RNNConfig, Seq2SeqConfig
from qkv.cost import count_parameters
from qkv.zoo import CARD, read_card

if TYPE_CHECKING:
    from qkv.serving.model_registry import Open

_OF_BLOCKS = ["neuron", "residual"]
ROOMY = 128
"""A context in which every example fits, whatever the tokenizer: none has so many characters."""


def described(one: "Open", config: ModelConfig, *, count: Callable[[str], int]) -> dict[str, Any]:
    """`count`: how many tokens the model makes of a text; asked only where its context is small."""
    run = one.run
    name = one.id.rstrip("/").rpartition("/")[2] or one.id
    examples = _examples(config, name)
    has_card = one.place is not None and (one.place / CARD).is_file()
    return {
        "id": one.id,
        "name": name,
        "source": one.source,
        "family": config.family,
        "summary": read_card(one.place).summary if has_card and one.place is not None else "",
        "stacks": block_stacks(config),
        "context_length": config.context_length,
        "vocab_size": config.vocab_size,
        "d_model": config.d_model,
        "parameters": count_parameters(config).total,
        "positions": "none" if isinstance(config, RNNConfig) else config.positions,
        "takes_second": {"bert": "pair", "gpt": None}.get(config.family, "translation"),
        "tasks": _tasks(config),
        "views": [*_views(config), *(["timeline"] if run is not None else [])],
        "checkpoints": [{"id": f"{one.id}@{step}", "step": step} for step in (run.checkpoint_steps() if run else [])],
        "best": int(run.best_checkpoint().name.removeprefix("step-")) if run else None,
        "classes": list(_classes(config)),
        "examples": examples if config.context_length >= ROOMY else _fitting(examples, config.context_length, count),
        "error": None,
    }


def block_stacks(config: ModelConfig) -> list[dict[str, Any]]:
    match config:
        case GPTConfig() | BERTConfig():
            found = [(AttentionKind.SELF, config.n_layers, config.n_heads)]
        case Seq2SeqConfig():
            decoder = [(stack, config.n_decoder_layers, config.n_heads) for stack in (AttentionKind.DECODER, AttentionKind.CROSS)]
            found = [(AttentionKind.ENCODER, config.n_encoder_layers, config.n_heads), *decoder]
        case RNNConfig():
            found = [] if config.attention is ScoreKind.NONE else [(AttentionKind.CROSS, 1, 1)]
    return [{"stack": stack, "layers": layers, "heads": heads} for stack, layers, heads in found]


def _tasks(config: ModelConfig) -> list[str]:
    match config:
        case GPTConfig():
            return ["generate"] if config.causal else []
        case BERTConfig():
            has = {"fill": config.masked_lm_head, "classify": config.n_classes is not None, "embed": True}
            return [task for task, is_there in has.items() if is_there]
        case Seq2SeqConfig() | RNNConfig():
            return ["translate"]


def _views(config: ModelConfig) -> list[str]:
    of_attention = ["heads", "head", "map", "compare"]
    match config:
        case GPTConfig():
            return [*of_attention, *_OF_BLOCKS, "lens", "it", "embeddings", *_tasks(config), "cost"]
        case BERTConfig():
            lens = ["lens"] if config.masked_lm_head else []
            return [*of_attention, *_OF_BLOCKS, *lens, "it", "embeddings", "cost"]
        case Seq2SeqConfig():
            return [*of_attention, *_OF_BLOCKS, "lens", "embeddings", "translate", "cost"]
        case RNNConfig():
            looks = [] if config.attention is ScoreKind.NONE else of_attention
            return [*looks, "lens", "embeddings", "translate", "cost"]


def _classes(config: ModelConfig) -> tuple[str, ...]:
    if not isinstance(config, BERTConfig):
        return ()
    return config.class_names or tuple(str(number) for number in range(config.n_classes or 0))


_IT = "The animal didn't cross the street because it was too {}."


def _examples(config: ModelConfig, name: str) -> list[dict[str, Any]]:
    """Of a translator in the language that its name begins with: es-en reads Spanish."""
    match config:
        case GPTConfig():
            texts = [
                ("Once upon a time, there was a little girl named Lily. She had a red ball. Lily", "a story goes on"),
                ("The cat sat on the mat. The dog sat on the rug. The cat sat on the", "a pattern comes again"),
                *((_IT.format(end), "what does it refer to?") for end in ("tired", "wide")),
            ]
        case BERTConfig():
            masked = [("The cat [MASK] on the mat.", "a word to fill")] if config.masked_lm_head else []
            texts = [*masked, *((_IT.format(end), "what does it refer to?") for end in ("tired", "wide"))]
        case Seq2SeqConfig() | RNNConfig() if name.startswith("es"):
            texts = [
                ("El gato negro duerme en la casa blanca.", "adjectives change places"),
                ("Nunca he visto una casa tan grande.", "a subject to add"),
                ("No me gusta el café frío.", "who likes whom"),
            ]
        case Seq2SeqConfig() | RNNConfig():
            texts = [("The cat sat on the mat.", "a sentence"), ("I have never seen such a big house.", "word order")]
    return [{"text": text, "second": None, "about": about} for text, about in texts]


def _fitting(examples: list[dict[str, Any]], room: int, count: Callable[[str], int]) -> list[dict[str, Any]]:
    """Those that leave a quarter of the context free, to go on in; else the first one's beginning, which says so."""
    most = 3 * room // 4
    fitting = [one for one in examples if count(one["text"]) <= most]
    if fitting:
        return fitting
    words = examples[0]["text"].split(" ")
    n = next((n for n in range(len(words), 1, -1) if count(" ".join(words[:n])) <= most), 1)
    return [{**examples[0], "text": " ".join(words[:n]), "about": f"{examples[0]['about']} (cut to fit {room} tokens)"}]
