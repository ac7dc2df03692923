"""Names, titles and lectures of all lessons."""

from dataclasses import dataclass

LECTURES = {
    "A": "Quick Intro: Attention Heads and Transformer Layers",
    "B": "Attention and Transformer Basics",
    "C": "Implementing attention",
    "D": "Transformers – Part 2",
    "E": "Self-Attention; Transformer language models; their cost",
}
"""Titles of the five lectures, keyed by lecture letter."""


@dataclass(frozen=True, kw_only=True)
class LessonInfo:
    """A lesson's description, which `qkv lesson` lists."""

    name: str
    title: str
    lectures: tuple[str, ...]
    mission_rows: tuple[str, ...]
    """Rows of docs/mission.md that the lesson covers.

    The first number of each row is its topic: 1 attention, 2 inputs, 3 blocks, 4 GPT, 6 translation, 7 toy tasks,
    8 inspection, 9 cost.
    """

    @property
    def module(self) -> str:
        """The name of the module in this package that contains the lesson."""
        return self.name.replace("-", "_")


def _describe_lesson(name: str, lectures: str, mission_rows: str, title: str) -> LessonInfo:
    return LessonInfo(name=name, title=title, lectures=tuple(lectures), mission_rows=tuple(mission_rows.split()))


_LESSONS_IN_ORDER = (
    _describe_lesson("soft-dictionary", "CE", "1.1", "A soft dictionary: a lookup that always returns a value"),
    _describe_lesson("why-sqrt-d", "BE", "1.2", "Why attention scores are divided by √d"),
    _describe_lesson("walkthrough", "B", "1.9", "One attention computation, step by step"),
    _describe_lesson("shapes", "CDE", "1.4 1.11", "Tensor shapes, and computing all queries at once"),
    _describe_lesson("heat-maps", "DE", "1.10", "Scores, masks and probabilities: a 12 × 12 and a 5 × 5 example"),
    _describe_lesson("wrong-masks", "AE", "1.7", "The correct causal mask and three incorrect ones"),
    _describe_lesson("no-causal-mask", "DE", "1.8", "A language model without a causal mask"),
    _describe_lesson("head-layouts", "BCE", "1.5 1.6", "Multi-head attention: head layouts and their parameter counts"),
    _describe_lesson("one-hot", "AD", "2.1", "An embedding: a product with a one-hot vector, computed by table lookup"),
    _describe_lesson("positions", "BDE", "2.2", "Position encodings"),
    _describe_lesson("word-vectors", "B", "2.3", "Similarity of static and contextual word vectors"),
    _describe_lesson("no-positions", "BDE", "2.5", "A Transformer without position encodings ignores word order"),
    _describe_lesson("layernorm-geometry", "E", "3.2", "The geometry of LayerNorm"),
    _describe_lesson("vanishing-gradients", "BE", "3.6", "Vanishing gradients across layers and across positions"),
    _describe_lesson(
        "causal-and-bidirectional", "AB", "3.7", "The same block in GPT (causal) and BERT (bidirectional)"
    ),
    _describe_lesson("residual-stream", "D", "3.5 8.4", "The residual stream of one token"),
    _describe_lesson(
        "who-sees-whom", "BCE", "3.3 6.2", "Which positions can attend to which: encoder, decoder, cross-attention"
    ),
    _describe_lesson("toy-head-5", "A", "7.1", "The toy task with five tokens"),
    _describe_lesson("toy-head-7", "A", "7.2", "The toy task with seven tokens: one head learns to use context"),
    _describe_lesson("generate", "E", "4.2", "Text generation: how the probabilities change with each token"),
    _describe_lesson("kv-cache", "E", "4.3", "The KV cache: the same text with much less computation"),
    _describe_lesson("head-patterns", "D", "8.1", "Attention patterns of the heads of a trained model"),
    _describe_lesson("what-it-refers-to", "ABD", "8.2", "What *it* refers to: four methods compared"),
    _describe_lesson("pictures", "B", "8.5", "Attention to image patches during caption generation"),
    _describe_lesson("cost", "CE", "9.1 9.2 9.3 9.4 9.5 9.6", "FLOPs and memory traffic of each operation of a model"),
    _describe_lesson("quiz", "AE", "10.1", "Quiz questions from the lectures, answered by computation"),
)

LESSONS: dict[str, LessonInfo] = {info.name: info for info in _LESSONS_IN_ORDER}
