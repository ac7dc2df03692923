"""How near are translations to what people wrote? BLEU and chrF, all of it sacrebleu's own."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from qkv.errors import InputError, MissingExtraError

N_DRAWS = 1000
"""Samples of a bootstrap."""
LENGTHS = (5, 10, 20, 40)
"""Words of the source at which a bucket ends; the last has no end."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One metric of a whole corpus; `low` and `high` bound its 95 % interval by bootstrap over sentences."""

    score: float
    low: float | None
    high: float | None
    signature: str
    p_value: float | None = None
    """Against the first system, by paired bootstrap: how likely so great a difference is by chance."""


def closeness(translations: Sequence[str], references: Sequence[str], *, n_draws: int = N_DRAWS) -> dict[str, Measured]:
    """BLEU and chrF by name; `n_draws` 0: without interval, in less time."""
    _check(translations, references)
    found = {}
    for name, metric in _metrics().items():
        score = metric.corpus_score(list(translations), [list(references)], n_bootstrap=max(1, n_draws))
        spread = getattr(score, "_ci", None) if n_draws > 1 else None
        mean = getattr(score, "_mean", score.score)
        found[name] = Measured(
            score=score.score,
            low=None if spread is None else float(mean - spread),
            high=None if spread is None else float(mean + spread),
            signature=str(metric.get_signature()),
        )
    return found


def compared(
    systems: Mapping[str, Sequence[str]], references: Sequence[str], *, n_draws: int = N_DRAWS
) -> dict[str, dict[str, Measured]]:
    """Each system's metrics; from the second on with the p-value of a paired bootstrap against the first."""
    for translations in systems.values():
        _check(translations, references)
    metrics = _metrics()
    from sacrebleu.significance import PairedTest

    named = [(name, list(translations)) for name, translations in systems.items()]
    test = PairedTest(named, metrics, references=[list(references)], test_type="bs", n_samples=n_draws)  # pyright: ignore[reportArgumentType]
    signatures, results = test()
    # Its own names (chrF2) stand in the order in which the metrics were given.
    own_names = dict(zip(metrics, (name for name in results if name != "System"), strict=True))
    return {
        system: {name: _of_result(results[own], place, str(signatures[own])) for name, own in own_names.items()}
        for place, system in enumerate(systems)
    }


def by_length(sources: Sequence[str], translations: Sequence[str], references: Sequence[str]) -> list[dict[str, Any]]:
    """BLEU of the sentences whose source has so many words (parted by white space)."""
    _check(translations, references)
    _check(translations, sources, "sources")
    buckets: dict[int, list[int]] = {}
    for place, source in enumerate(sources):
        n_words = len(source.split())
        buckets.setdefault(sum(n_words > end for end in LENGTHS), []).append(place)
    table = []
    for bucket in sorted(buckets):
        places = buckets[bucket]
        bleu = _metrics()["BLEU"].corpus_score([translations[i] for i in places], [[references[i] for i in places]])
        first = LENGTHS[bucket - 1] + 1 if bucket else 1
        words = f"{first}–{LENGTHS[bucket]}" if bucket < len(LENGTHS) else f"{first}+"
        table.append({"words": words, "sentences": len(places), "bleu": bleu.score})
    return table


def as_dict(found: Mapping[str, Measured]) -> dict[str, Any]:
    return {name: {k: v for k, v in asdict(one).items() if v is not None} for name, one in found.items()}


def _of_result(results: Sequence[Any], place: int, signature: str) -> Measured:
    result, is_equal = results[place], results[place].score == results[0].score
    return Measured(
        score=result.score,
        low=None if result.ci is None else float(result.mean - result.ci),
        high=None if result.ci is None else float(result.mean + result.ci),
        signature=signature,
        # Of two equal systems sacrebleu says 1/(draws + 1), as if they could not be more different.
        p_value=1.0 if place and is_equal else result.p_value,
    )


def _check(translations: Sequence[str], others: Sequence[str], name: str = "references") -> None:
    if len(translations) != len(others) or not others:
        raise InputError(f"there are {len(translations)} translations for {len(others)} {name}")


def _metrics() -> dict[str, Any]:
    try:
        from sacrebleu.metrics.bleu import BLEU
        from sacrebleu.metrics.chrf import CHRF
    except ImportError:
        raise MissingExtraError("BLEU and chrF need sacrebleu: pip install 'qkv[eval]'") from None
    return {"BLEU": BLEU(), "chrF": CHRF()}
