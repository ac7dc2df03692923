"""Compute the model summaries in the model list from configs, without loading weights."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from qkv.choices import AttentionStack, RNNAttentionScore
from qkv.config import BERTConfig, GPTConfig, ModelConfig, RNNConfig, Seq2SeqConfig
from qkv.cost import count_parameters
from qkv.zoo import CARD_FILE, read_model_card

if TYPE_CHECKING:
    from qkv.serving.model_registry import RegisteredModel

_TRANSFORMER_VIEWS = ["neuron", "residual"]
MIN_CONTEXT_FOR_EXAMPLES = 128
"""Context length at which every example fits, whatever the tokenizer, because no example has more characters."""


def summarize_model(
    loaded: "RegisteredModel", config: ModelConfig, *, count_tokens: Callable[[str], int]
) -> dict[str, Any]:
    """Return a model's summary for the response of `/api/models`.

    `count_tokens` returns the number of tokens in a text and is called only for models with a small context.
    """
    run = loaded.run
    name = loaded.id.rstrip("/").rpartition("/")[2] or loaded.id
    examples = _example_texts_by_family_and_language(config, name)
    has_card = loaded.path is not None and (loaded.path / CARD_FILE).is_file()
    is_small = config.context_length < MIN_CONTEXT_FOR_EXAMPLES
    return {
        "id": loaded.id,
        "name": name,
        "source": loaded.source,
        "family": config.family,
        "summary": read_model_card(loaded.path).summary if has_card and loaded.path is not None else "",
        "stacks": attention_stacks(config),
        "context_length": config.context_length,
        "vocab_size": config.vocab_size,
        "d_model": config.d_model,
        "n_parameters": count_parameters(config).total,
        "positions": "none" if isinstance(config, RNNConfig) else config.positions,
        "second_text": {"bert": "pair", "gpt": None}.get(config.family, "translation"),
        "tasks": _supported_tasks(config),
        "views": [*_supported_views(config), *(["timeline"] if run is not None else [])],
        "checkpoints": [
            {"id": f"{loaded.id}@{step}", "step": step} for step in (run.checkpoint_steps() if run else [])
        ],
        "best_step": int(run.best_or_latest_checkpoint().name.removeprefix("step-")) if run else None,
        "classes": list(_classifier_labels(config)),
        "examples": _filter_fitting_or_truncate_first(examples, config.context_length, count_tokens)
        if is_small
        else examples,
        "error": None,
    }


def attention_stacks(config: ModelConfig) -> list[dict[str, Any]]:
    """Return the attention stacks of a model and the number of layers and heads in each stack."""
    match config:
        case GPTConfig() | BERTConfig():
            stacks = [(AttentionStack.SELF, config.n_layers, config.n_heads)]
        case Seq2SeqConfig():
            stacks = [
                (AttentionStack.ENCODER, config.n_encoder_layers, config.n_heads),
                (AttentionStack.DECODER, config.n_decoder_layers, config.n_heads),
                (AttentionStack.CROSS, config.n_decoder_layers, config.n_heads),
            ]
        case RNNConfig():
            stacks = [] if config.attention is RNNAttentionScore.NONE else [(AttentionStack.CROSS, 1, 1)]
    return [{"stack": stack, "n_layers": n_layers, "n_heads": n_heads} for stack, n_layers, n_heads in stacks]


def _supported_tasks(config: ModelConfig) -> list[str]:
    match config:
        case GPTConfig():
            return ["generate"] if config.causal else []
        case BERTConfig():
            is_supported = {"fill": config.masked_lm_head, "classify": config.n_classes is not None, "embed": True}
            return [task for task, is_available in is_supported.items() if is_available]
        case Seq2SeqConfig() | RNNConfig():
            return ["translate"]


def _supported_views(config: ModelConfig) -> list[str]:
    attention_views = ["heads", "head", "map", "compare"]
    match config:
        case GPTConfig():
            tasks = _supported_tasks(config)
            return [*attention_views, *_TRANSFORMER_VIEWS, "lens", "coreference", "embeddings", *tasks, "cost"]
        case BERTConfig():
            lens = ["lens"] if config.masked_lm_head else []
            return [*attention_views, *_TRANSFORMER_VIEWS, *lens, "coreference", "embeddings", "cost"]
        case Seq2SeqConfig():
            return [*attention_views, *_TRANSFORMER_VIEWS, "lens", "embeddings", "translate", "cost"]
        case RNNConfig():
            has_attention = config.attention is not RNNAttentionScore.NONE
            return [*(attention_views if has_attention else []), "lens", "embeddings", "translate", "cost"]


def _classifier_labels(config: ModelConfig) -> tuple[str, ...]:
    if not isinstance(config, BERTConfig):
        return ()
    return config.class_names or tuple(str(index) for index in range(config.n_classes or 0))


_COREFERENCE_TEXT = "The animal didn't cross the street because it was too {}."


def _example_texts_by_family_and_language(config: ModelConfig, model_name: str) -> list[dict[str, Any]]:
    """Return example texts for a model.

    For a translation model such as es-en, the texts are in the language with which the model's name starts.
    """
    coreference = [(_COREFERENCE_TEXT.format(word), "what does it refer to?") for word in ("tired", "wide")]
    match config:
        case GPTConfig():
            texts = [
                ("Once upon a time, there was a little girl named Lily. She had a red ball. Lily", "continue a story"),
                ("The cat sat on the mat. The dog sat on the rug. The cat sat on the", "repeat a pattern"),
                *coreference,
            ]
        case BERTConfig():
            masked = [("The cat [MASK] on the mat.", "fill in a word")] if config.masked_lm_head else []
            texts = [*masked, *coreference]
        case Seq2SeqConfig() | RNNConfig() if model_name.startswith("es"):
            texts = [
                ("El gato negro duerme en la casa blanca.", "adjective order"),
                ("Nunca he visto una casa tan grande.", "missing subject"),
                ("No me gusta el café frío.", "subject and object swap"),
            ]
        case Seq2SeqConfig() | RNNConfig():
            texts = [("The cat sat on the mat.", "a sentence"), ("I have never seen such a big house.", "word order")]
    return [{"text": text, "second": None, "description": description} for text, description in texts]


def _filter_fitting_or_truncate_first(
    examples: list[dict[str, Any]], context_length: int, count_tokens: Callable[[str], int]
) -> list[dict[str, Any]]:
    """Return the examples that leave a quarter of the context free for new tokens.

    If there are no such examples, return the start of the first example and mention the truncation in its description.
    """
    limit = 3 * context_length // 4
    fitting = [example for example in examples if count_tokens(example["text"]) <= limit]
    if fitting:
        return fitting
    words = examples[0]["text"].split(" ")
    n = next((n for n in range(len(words), 1, -1) if count_tokens(" ".join(words[:n])) <= limit), 1)
    description = f"{examples[0]['description']} (truncated to fit {context_length} tokens)"
    return [{**examples[0], "text": " ".join(words[:n]), "description": description}]
