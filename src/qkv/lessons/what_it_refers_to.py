"""What does *it* refer to: does attention say so, and does the model use it?"""

from qkv.inspection import CoreferenceView, coreference
from qkv.inspection.plot import plot_view
from qkv.lessons.console import print_section, print_table, print_text
from qkv.lessons.figure_style import DrawFigure
from qkv.tasks import LanguageModel, load_as

LAW = "The Law will never be perfect, but it's application should be just."
TIRED, WIDE = (f"The animal didn't cross the street because it was too {word}." for word in ("tired", "wide"))
ASKED = ((TIRED, ("animal", "street")), (WIDE, ("animal", "street")), (LAW, ("Law", "perfect")))


def lesson(seed: int) -> DrawFigure:  # noqa: ARG001 - nothing here is chance
    task = load_as(LanguageModel, "stories")
    found = [coreference(task, text, pronoun="it", candidates=words) for text, words in ASKED]
    print_text("""Four answers of `stories`, a GPT. attention: mean weight of all layers and heads from *it* to the word, the
        sink left out. rollout: attention multiplied through the layers. value-weighted: by the length of what is
        really moved. knock-out: *it* may not look at the word, in any layer; the change of log p of all that
        follows. Negative: the model needed the look.""")
    for view in found:
        print_section(view.text)
        print_table(["candidate", *view.columns], _rows(view), digits=3)
        print_text(f"{view.verdict[:1].upper()}{view.verdict[1:]}.")
    tired, wide = found[:2]
    assert tired.knock_out is not None
    assert wide.knock_out is not None
    print_section("One word apart")
    print_text(f"""The first three columns are the same for *tired* and *wide*: a GPT reads *it* before the word that decides.
        What follows can tell. Without the look at *animal*, the rest with *tired* changes by
        {tired.knock_out[0]:+.2f} nats, with *wide* by {wide.knock_out[0]:+.2f}; without the look at *street* by
        {tired.knock_out[1]:+.2f} and {wide.knock_out[1]:+.2f}. So the weight on a word is no proof that the word
        is meant; the change is what the model does with it.""")
    return lambda: plot_view(wide)


def _rows(view: CoreferenceView) -> list[list[str | float]]:
    return [[word, *(values[i] for values in view.columns.values())] for i, word in enumerate(view.candidates)]
