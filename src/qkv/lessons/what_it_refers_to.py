"""Lesson: what *it* refers to, according to attention and according to interventions."""

from qkv.inspection import CoreferenceView, coreference
from qkv.inspection.plot import plot_view
from qkv.lessons.console import print_section, print_table, print_text
from qkv.lessons.figure_style import DrawFigure
from qkv.tasks import LanguageModel, load_as

LAW = "The Law will never be perfect, but it's application should be just."
TIRED, WIDE = (f"The animal didn't cross the street because it was too {word}." for word in ("tired", "wide"))
EXAMPLES = ((TIRED, ("animal", "street")), (WIDE, ("animal", "street")), (LAW, ("Law", "perfect")))


def lesson(seed: int) -> DrawFigure:  # noqa: ARG001 - nothing is random
    task = load_as(LanguageModel, "stories")
    views = [coreference(task, text, pronoun="it", candidates=words) for text, words in EXAMPLES]
    print_text("""This lesson applies four methods to `stories`, a GPT. Each method has one column in the tables
        below.""")
    print_text("""The column “attention” contains the mean attention weight from *it* to the candidate over all layers
        and heads. The column “rollout” is based on the product of the attention matrices of all layers. The column
        “value-weighted” contains attention weights multiplied by the norms of the value vectors. These three columns
        exclude the attention sink.""")
    print_text("""For the column “knock-out”, attention from *it* to the candidate is masked in every layer. The column
        contains the resulting change in the log probability of the text after *it*. A negative value means that the
        model used this attention.""")
    for view in views:
        print_section(view.text)
        print_table(["candidate", *view.columns], _candidate_rows(view), digits=3)
        print_text(f"{view.verdict[:1].upper()}{view.verdict[1:]}.")
    tired, wide = views[:2]
    assert tired.knock_out is not None
    assert wide.knock_out is not None
    print_section("Two sentences that differ in one word")
    print_text(f"""The first three columns are the same for *tired* and *wide* because a GPT processes *it* before the
        last word. The knock-out column differs because it depends on the text after *it*. Masking attention to *animal*
        changes the log probability of this text by {tired.knock_out[0]:+.2f} nats with *tired* and by
        {wide.knock_out[0]:+.2f} nats with *wide*. Masking attention to *street* changes the log probability by
        {tired.knock_out[1]:+.2f} nats with *tired* and by {wide.knock_out[1]:+.2f} nats with *wide*.""")
    print_text("""A high attention weight on a word therefore does not prove that the pronoun refers to this word. The
        knock-out shows whether the model's predictions depend on attention to this word.""")
    return lambda: plot_view(wide)


def _candidate_rows(view: CoreferenceView) -> list[list[str | float]]:
    return [[word, *(values[i] for values in view.columns.values())] for i, word in enumerate(view.candidates)]
