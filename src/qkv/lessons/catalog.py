"""Which lessons there are, and which lecture each follows."""

from dataclasses import dataclass

LECTURES = {
    "A": "Quick Intro: Attention Heads and Transformer Layers",
    "B": "Attention and Transformer Basics",
    "C": "Implementing attention",
    "D": "Transformers – Part 2",
    "E": "Self-Attention; Transformer language models; their cost",
}
"""The five lectures by the letter the lessons use."""


@dataclass(frozen=True, kw_only=True)
class LessonInfo:
    """What `qkv lesson` lists, known without running anything."""

    name: str
    title: str
    lectures: tuple[str, ...]
    rows: tuple[str, ...]
    """Numbers of the lectures' examples it works out.

    1 attention, 2 inputs, 3 blocks, 4 GPT, 6 translation, 7 toys, 8 looking inside, 9 cost."""

    @property
    def module(self) -> str:
        """The file in this folder, without its ending."""
        return self.name.replace("-", "_")


def _info(name: str, lectures: str, rows: str, title: str) -> LessonInfo:
    return LessonInfo(name=name, title=title, lectures=tuple(lectures), rows=tuple(rows.split()))


_IN_ORDER = (
    _info("soft-dictionary", "CE", "1.1", "A soft dictionary: a look-up that always has an answer"),
    _info("why-sqrt-d", "BE", "1.2", "Why scores are divided by √d"),
    _info("walkthrough", "B", "1.9", "One attention, step by step, in numbers"),
    _info("shapes", "CDE", "1.4 1.11", "The shape of everything, and all queries at once"),
    _info("heat-maps", "DE", "1.10", "Scores, mask, probabilities: 12 × 12 and 5 × 5"),
    _info("wrong-masks", "AE", "1.7", "One right mask and three wrong ones, compared and trained"),
    _info("no-causal-mask", "DE", "1.8", "Without a mask a language model cheats"),
    _info("head-layouts", "BCE", "1.5 1.6", "Many heads: three layouts and what each costs"),
    _info("one-hot", "AD", "2.1", "An embedding is a one-hot product, done by look-up"),
    _info("positions", "BDE", "2.2", "Telling a token where it stands"),
    _info("word-vectors", "B", "2.3", "Words as vectors: near and far, static and in context"),
    _info("no-positions", "BDE", "2.5", "Without positions there is no order"),
    _info("layernorm-geometry", "E", "3.2", "What LayerNorm does to keys, seen as geometry"),
    _info("vanishing-gradients", "BE", "3.6", "Gradients through depth and through distance"),
    _info("one-block", "AB", "3.7", "One block, two strategies: GPT and BERT by one switch"),
    _info("residual-stream", "D", "3.5 8.4", "One token's vector on its way through the blocks"),
    _info("who-sees-whom", "BCE", "3.3 6.2", "What each position may see: encoder, decoder, cross-attention"),
    _info("toy-head-5", "A", "7.1", "The toy task with five tokens"),
    _info("toy-head-7", "A", "7.2", "The toy task with seven tokens: one head learns context"),
    _info("generate", "E", "4.2", "Generating text: the probabilities are revised with each token"),
    _info("kv-cache", "E", "4.3", "The KV cache: the same text for a fraction of the work"),
    _info("head-patterns", "D", "8.1", "What the heads of a trained model look at"),
    _info("what-it-refers-to", "ABD", "8.2", "What *it* refers to: four answers, and whether they agree"),
    _info("pictures", "B", "8.5", "Where a model looks while it puts a picture into words"),
    _info("cost", "CE", "9.1 9.2 9.3 9.4 9.5 9.6", "What a model computes and moves, row by row"),
    _info("quiz", "AE", "10.1", "The lectures' quizzes, answered by computation"),
)

LESSONS: dict[str, LessonInfo] = {info.name: info for info in _IN_ORDER}
