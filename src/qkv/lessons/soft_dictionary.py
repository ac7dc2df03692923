"""Lesson: a soft dictionary returns a value for any query, unlike a dict."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from qkv.errors import InputError, ShapeError
from qkv.inspection import new_figure
from qkv.lessons.console import max_abs_difference, print_matrix, print_section, print_table, print_text
from qkv.lessons.figure_style import BLUE, GREEN, ORANGE, SKY, DrawFigure, Figure, style_and_label_axes
from qkv.nn import scaled_dot_product_attention

WINDS = {"north": (0.0, 1.0), "east": (1.0, 0.0), "south": (0.0, -1.0), "west": (-1.0, 0.0)}
DEGREES = {"north": 5.0, "east": 12.0, "south": 25.0, "west": 15.0}
QUERY_LENGTHS = (0.0, 1.0, 3.0, 10.0, 100.0)

SLIDE_SHARES = (0.30, 0.50, 0.15, 0.05)
"""Attention weights from the figure in lecture E, where 30% and 50% are legible. The other two values are chosen so
that the sum is 100%."""


Vector = Float[Tensor, " _"]
"""A key, query or value vector. Values may differ in width from keys."""


class SoftMemory:
    """Dictionary whose keys are vectors and whose lookup returns a mix of all values.

    >>> memory = SoftMemory()
    >>> memory[torch.tensor([1.0, 0.0])] = torch.tensor([10.0])
    >>> memory[torch.tensor([0.0, 1.0])] = torch.tensor([20.0])
    >>> memory.lookup(torch.tensor([0.0, 0.0]))
    tensor([15.])
    """

    def __init__(self, *, scaled: bool = True) -> None:
        """Create an empty memory. If `scaled` is true, scores are divided by √width, as in attention."""
        self.scaled = scaled
        self._keys: list[Vector] = []
        self._values: list[Vector] = []

    def __setitem__(self, key: Vector | Sequence[float], value: Vector | Sequence[float]) -> None:
        """Store a value for a key. As in a `dict`, storing an equal key replaces its value."""
        key, value = _to_nonempty_float_vector(key), _to_nonempty_float_vector(value)
        if self._keys:
            _check_width("key", key, len(self._keys[0]))
            _check_width("value", value, len(self._values[0]))
        for i, stored_key in enumerate(self._keys):
            if torch.equal(stored_key, key):
                self._values[i] = value
                return
        self._keys.append(key)
        self._values.append(value)

    def __len__(self) -> int:
        return len(self._keys)

    def weights(self, query: Vector | Sequence[float]) -> Float[Tensor, " entry"]:
        """Return the attention weight of each entry, in insertion order. The weights sum to 1."""
        if not self._keys:
            raise InputError("the memory has 0 entries, but a lookup requires at least 1")
        query = _to_nonempty_float_vector(query)
        _check_width("query", query, len(self._keys[0]))
        keys = torch.stack(self._keys)
        scores = keys @ query.to(keys.dtype)
        return torch.softmax(scores / len(query) ** 0.5 if self.scaled else scores, dim=0)

    def lookup(self, query: Vector | Sequence[float]) -> Vector:
        """Return the sum of all values, weighted by `weights(query)`."""
        weights = self.weights(query)
        values = torch.stack(self._values)
        return weights.to(values.dtype) @ values


def _to_nonempty_float_vector(numbers: Vector | Sequence[float]) -> Vector:
    vector = torch.as_tensor(numbers)
    if vector.ndim != 1 or len(vector) == 0:
        raise ShapeError(f"keys, values and queries must be non-empty vectors, got shape {tuple(vector.shape)}")
    return vector if vector.is_floating_point() else vector.to(torch.get_default_dtype())


def _check_width(name: str, vector: Vector, expected_width: int) -> None:
    if len(vector) != expected_width:
        raise ShapeError(f"the {name} has width {len(vector)}, but the memory stores width {expected_width}")


def lesson(seed: int) -> DrawFigure:  # noqa: ARG001 - nothing is random except the test queries
    print_section("A dict only has values for its own keys (lecture C)")
    print_text(
        "What is the temperature for each wind direction? The keys are directions, given as vectors (east, north), "
        "and the values are temperatures in degrees."
    )
    print_table(["key", "vector", "value"], [(wind, str(WINDS[wind]), DEGREES[wind]) for wind in WINDS], digits=1)
    memory = SoftMemory()
    for wind, direction in WINDS.items():
        memory[direction] = [DEGREES[wind]]
    try:
        print(DEGREES["south-east"])
    except KeyError as error:
        print(f"  dict:         degrees['south-east']       KeyError: {error}")
    print(f"  soft memory:  memory.lookup((1.0, -1.0))  {memory.lookup((1.0, -1.0)).item():.2f} degrees\n")

    weights_by_query_length = _print_weights_by_query_length(memory)
    _print_equality_with_attention(memory)
    slide_weights = _print_lecture_e_lookup_weights()
    return lambda: _draw_soft_dictionary(weights_by_query_length, slide_weights)


def _print_weights_by_query_length(memory: SoftMemory) -> torch.Tensor:
    print_section("The result is a mixture of all values; a longer query is more selective")
    queries = [(length * 0.8, -length * 0.6) for length in QUERY_LENGTHS]
    weights = torch.stack([memory.weights(query) for query in queries])
    print_text("Each query points mostly east and partly south: (0.8, −0.6) × length. The weights are softmax(q·k/√2).")
    results = [memory.lookup(query).item() for query in queries]
    print_table(
        ["length", *WINDS, "sum of weights", "result"],
        [
            (f"{length:g}", *row.tolist(), row.sum().item(), result)
            for length, row, result in zip(QUERY_LENGTHS, weights, results, strict=True)
        ],
    )
    print_text("""A query of length 0 returns the mean of all values. A very long query returns the value of the
        nearest key, so a dict is a limiting case of the soft dictionary. Every query returns a result.""")
    return weights


def _print_equality_with_attention(memory: SoftMemory) -> None:
    print_section("A lookup with many queries is attention")
    keys = torch.tensor(list(WINDS.values()))[None, None]
    values = torch.tensor(list(DEGREES.values()))[None, None, :, None]
    queries = torch.randn(1, 1, 1000, 2)
    results_one_by_one = torch.stack([memory.lookup(query) for query in queries[0, 0]])
    largest_difference = max_abs_difference(
        scaled_dot_product_attention(queries, keys, values)[0, 0], results_one_by_one
    )
    print_text(f"""For 1000 random queries, the results of separate lookups and of softmax(QKᵀ/√d)V differ by at most
        {largest_difference} degrees.""")
    print_text("""Lecture C then uses the encoder's hidden states as keys and values, so that each decoder state
        retrieves a mixture of encoder states.""")


def _print_lecture_e_lookup_weights() -> torch.Tensor:
    print_section("The figure of lecture E: query #9 mixes values #1 to #4")
    memory = SoftMemory()
    values = torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0], [1.0, 1.0, 1.0]])
    for key, value in zip(torch.eye(4), values, strict=True):
        memory[key] = value
    # The softmax cancels the log and √4 cancels the scale, so this query gives exactly these weights.
    query = 2 * torch.tensor(SLIDE_SHARES).log()
    weights = memory.weights(query)
    result = memory.lookup(query)
    print_matrix(
        torch.cat((weights[:, None], values, weights[:, None] * values), dim=1),
        rows=[f"value #{i}" for i in range(1, 5)],
        columns=["weight", "v[0]", "v[1]", "v[2]", "w·v[0]", "w·v[1]", "w·v[2]"],
    )
    print(f"  result (sums of the last three columns): {[round(x, 2) for x in result.tolist()]}\n")
    print_text("""On the slide, only 30% and 50% are legible. The other two weights are chosen so that the sum is 100%.
        The query is computed from the weights: q = √d · log(weight).""")
    return weights


def _draw_soft_dictionary(weights_by_query_length: torch.Tensor, slide_weights: torch.Tensor) -> Figure:
    figure = new_figure(width=10.0, height=4.0)
    left, right = figure.subplots(1, 2, width_ratios=[3, 2])
    colors = dict(zip(WINDS, (BLUE, ORANGE, GREEN, SKY), strict=True))
    for i, (wind, color) in enumerate(colors.items()):
        bar_positions = [group + (i - 1.5) * 0.2 for group in range(len(QUERY_LENGTHS))]
        left.bar(bar_positions, weights_by_query_length[:, i].tolist(), width=0.2, color=color, label=f"key {wind}")
    left.set_xticks(range(len(QUERY_LENGTHS)), [f"{length:g}" for length in QUERY_LENGTHS])
    left.legend(frameon=False)
    style_and_label_axes(
        left, title="A longer query (0.8, −0.6) is more selective", x="length of the query", y="weight"
    )
    bars = right.barh([f"value #{i}" for i in range(1, 5)], (100 * slide_weights).tolist(), color=BLUE)
    right.bar_label(bars, fmt="%.0f%%", padding=3)
    right.set_xlim(0, 62)
    style_and_label_axes(right, title="Query #9 mixes four values", x="weight, %", y="")
    figure.suptitle("A soft dictionary: the result is a weighted sum of all values")
    return figure
