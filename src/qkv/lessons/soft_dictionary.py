"""What does a soft dictionary answer where a dict has no such key?"""

import torch

from qkv.inspection import new_figure
from qkv.lessons.console import max_abs_difference, print_matrix, print_section, print_table, print_text
from qkv.lessons.figure_style import BLUE, GREEN, ORANGE, SKY, DrawFigure, Figure, label_axes
from qkv.nn import SoftMemory, scaled_dot_product_attention

WINDS = {"north": (0.0, 1.0), "east": (1.0, 0.0), "south": (0.0, -1.0), "west": (-1.0, 0.0)}
DEGREES = {"north": 5.0, "east": 12.0, "south": 25.0, "west": 15.0}
LENGTHS = (0.0, 1.0, 3.0, 10.0, 100.0)

SLIDE_SHARES = (0.30, 0.50, 0.15, 0.05)
"""30 % and 50 % can be read on lecture E's figure; the two others are ours, to make a whole."""


def lesson(seed: int) -> DrawFigure:  # noqa: ARG001 - nothing is left to chance
    print_section("A dict has an answer for its own keys alone (lecture C)")
    print_text("Which weather comes with which wind? Keys are directions (east, north), values are degrees.")
    print_table(["key", "as a vector", "value"], [(wind, str(WINDS[wind]), DEGREES[wind]) for wind in WINDS], digits=1)
    memory = SoftMemory()
    for wind, direction in WINDS.items():
        memory[direction] = [DEGREES[wind]]
    try:
        print(DEGREES["south-east"])
    except KeyError as error:
        print(f"  dict:         degrees['south-east']       KeyError: {error}")
    print(f"  soft memory:  memory.lookup((1.0, -1.0))  {memory.lookup((1.0, -1.0)).item():.2f} degrees\n")

    by_length = _longer_queries(memory)
    _is_attention(memory)
    shares = _analogy()
    return lambda: _draw(by_length, shares)


def _longer_queries(memory: SoftMemory) -> torch.Tensor:
    print_section("The answer is a mix of all values; a longer query chooses more sharply")
    queries = [(length * 0.8, -length * 0.6) for length in LENGTHS]
    weights = torch.stack([memory.weights(query) for query in queries])
    print_text("The query points mostly east, partly south: (0.8, −0.6) × length. Weights = softmax(q·k/√2).")
    answers = [memory.lookup(query).item() for query in queries]
    print_table(
        ["length", *WINDS, "sum of weights", "answer"],
        [
            (f"{length:g}", *row.tolist(), row.sum().item(), answer)
            for length, row, answer in zip(LENGTHS, weights, answers, strict=True)
        ],
    )
    print_text("""Length 0 asks for nothing in particular and gets the mean. A very long query gets the value of the
        nearest key: the dict is the limit of the soft one. There is an answer for every query.""")
    return weights


def _is_attention(memory: SoftMemory) -> None:
    print_section("Many queries at once: this is attention")
    keys = torch.tensor(list(WINDS.values()))[None, None]
    values = torch.tensor(list(DEGREES.values()))[None, None, :, None]
    queries = torch.randn(1, 1, 1000, 2)
    one_by_one = torch.stack([memory.lookup(query) for query in queries[0, 0]])
    furthest = max_abs_difference(scaled_dot_product_attention(queries, keys, values)[0, 0], one_by_one)
    print_text(f"1000 random queries, one by one and as softmax(QKᵀ/√d)V: largest difference {furthest} degrees.")
    print_text("""Lecture C goes on with keys = values = the encoder's states: then the memory answers a decoder's state
        with a mix of encoder states.""")


def _analogy() -> torch.Tensor:
    print_section("Lecture E's figure: Query #9 mixes values #1 to #4")
    memory = SoftMemory()
    values = torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0], [1.0, 1.0, 1.0]])
    for key, value in zip(torch.eye(4), values, strict=True):
        memory[key] = value
    # softmax undoes log, and √4 undoes the scale: this query asks for exactly these shares.
    query = 2 * torch.tensor(SLIDE_SHARES).log()
    weights = memory.weights(query)
    answer = memory.lookup(query)
    print_matrix(
        torch.cat((weights[:, None], values, weights[:, None] * values), dim=1),
        rows=[f"value #{i}" for i in range(1, 5)],
        columns=["weight", "v[0]", "v[1]", "v[2]", "w·v[0]", "w·v[1]", "w·v[2]"],
    )
    print(f"  the answer, the sum of the last three columns: {[round(x, 2) for x in answer.tolist()]}\n")
    print_text("""Of the slide's percentages 30 % and 50 % can be read; the other two are ours. The query was worked out
        backwards from them: q = √d · log(share).""")
    return weights


def _draw(by_length: torch.Tensor, shares: torch.Tensor) -> Figure:
    figure = new_figure(width=10.0, height=4.0)
    left, right = figure.subplots(1, 2, width_ratios=[3, 2])
    colours = dict(zip(WINDS, (BLUE, ORANGE, GREEN, SKY), strict=True))
    for i, (wind, colour) in enumerate(colours.items()):
        places = [place + (i - 1.5) * 0.2 for place in range(len(LENGTHS))]
        left.bar(places, by_length[:, i].tolist(), width=0.2, color=colour, label=f"key {wind}")
    left.set_xticks(range(len(LENGTHS)), [f"{length:g}" for length in LENGTHS])
    left.legend(frameon=False)
    label_axes(left, title="A longer query (0.8, −0.6) chooses more sharply", x="length of the query", y="weight")
    bars = right.barh([f"value #{i}" for i in range(1, 5)], (100 * shares).tolist(), color=BLUE)
    right.bar_label(bars, fmt="%.0f %%", padding=3)
    right.set_xlim(0, 62)
    label_axes(right, title="Query #9 mixes four values", x="share of the answer, %", y="")
    figure.suptitle("A soft dictionary: the answer is a weighted sum of all values")
    return figure
