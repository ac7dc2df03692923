"""NumPy reference of position embeddings: sinusoids, rotations, ALiBi slopes and T5 buckets."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

Array = np.ndarray
Settings = Mapping[str, Any]


def sinusoid(position: int, d: int, style: str) -> list[float]:
    first = 1 if style == "interleaved-from-one" else 0
    pairs = [
        (math.sin(position / 10000 ** (2 * i / d)), math.cos(position / 10000 ** (2 * i / d)))
        for i in range(first, first + d // 2)
    ]
    if style == "halves":
        return [sine for sine, _ in pairs] + [cosine for _, cosine in pairs]
    return [number for pair in pairs for number in pair]


def rotate(s: Settings, x: Array, positions: list[int]) -> Array:
    """Rotate dimensions i and i + d/2 as one complex number by position · theta^(−2i/d)."""
    half = x.shape[1] // 2
    angles = np.outer(
        positions, [_scale_frequency(s["rope_scaling"], s["rope_theta"] ** (-i / half)) for i in range(half)]
    )
    turned = (x[:, :half] + 1j * x[:, half:]) * np.exp(1j * angles)
    return np.concatenate([turned.real, turned.imag], axis=1)


def _scale_frequency(scaling: Settings | None, frequency: float) -> float:
    """Scale a frequency. Llama 3.1's rule divides it fully only if its wavelength is long."""
    if scaling is None:
        return frequency
    slow, context = frequency / scaling["factor"], scaling["original_context_length"]
    if context is None:
        return slow
    wave_length = 2 * math.pi / frequency
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    if wave_length > context / low:
        return slow
    if wave_length < context / high:
        return frequency
    share = (context / wave_length - low) / (high - low)
    return (1 - share) * slow + share * frequency


def slopes(n_heads: int) -> list[float]:
    """A geometric sequence that ends at 2^−8 for a power of two, else filled up from twice as many heads."""
    if n_heads & (n_heads - 1) == 0:
        return [2 ** (-8 * i / n_heads) for i in range(1, n_heads + 1)]
    below = 1 << (n_heads.bit_length() - 1)
    return (slopes(below) + slopes(2 * below)[::2])[:n_heads]


def bucket(s: Settings, ahead: int, *, is_bidirectional: bool) -> int:
    n = s["relative_buckets"] // (2 if is_bidirectional else 1)
    first = n if is_bidirectional and ahead > 0 else 0
    distance = abs(ahead) if is_bidirectional else max(0, -ahead)
    exact = n // 2
    if distance < exact:
        return first + distance
    growth = math.log(distance / exact) / math.log(s["relative_max_distance"] / exact)
    return first + min(n - 1, exact + math.floor(growth * (n - exact)))
