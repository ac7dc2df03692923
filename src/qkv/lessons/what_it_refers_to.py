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
    print_text("""Four methods, applied to `stories`, a GPT. attention: the mean weight from *it* to the word over all
        layers and heads, without the attention sink. rollout: attention multiplied through the layers. value-weighted:
        weights multiplied by the norm of the value vectors. knock-out: attention from *it* to the word is masked in
        every layer, and the column shows the change of log p of the following text. A negative value means that the
        model used this attention.""")
    for view in views:
        print_section(view.text)
        print_table(["candidate", *view.columns], _candidate_rows(view), digits=3)
        print_text(f"{view.verdict[:1].upper()}{view.verdict[1:]}.")
    tired, wide = views[:2]
    assert tired.knock_out is not None
    assert wide.knock_out is not None
    print_section("Two sentences that differ in one word")
    print_text(f"""The first three columns are the same for *tired* and *wide*, because a GPT processes *it* before the
        deciding word. The following text makes the difference. If attention to *animal* is masked, the log probability
        of the rest changes by {tired.knock_out[0]:+.2f} nats with *tired* and by {wide.knock_out[0]:+.2f} with *wide*;
        if attention to *street* is masked, by {tired.knock_out[1]:+.2f} and {wide.knock_out[1]:+.2f}. The attention
        weight on a word therefore does not prove that the pronoun refers to it; the knock-out shows what the model
        uses.""")
    return lambda: plot_view(wide)


def _candidate_rows(view: CoreferenceView) -> list[list[str | float]]:
    return [[word, *(values[i] for values in view.columns.values())] for i, word in enumerate(view.candidates)]
