"""How near are translations to what people wrote? BLEU and chrF, all of it sacrebleu's own."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from qkv.errors import InputError, MissingExtraError

N_BOOTSTRAP_SAMPLES = 1000
"""Samples of a bootstrap."""
SOURCE_LENGTH_LIMITS = (5, 10, 20, 40)
"""Words of the source at which a bucket ends; the last has no end."""


@dataclass(frozen=True, kw_only=True)
class MetricScore:
    """One metric of a whole corpus; `low` and `high` bound its 95 % interval by bootstrap over sentences."""

    score: float
    low: float | None
    high: float | None
    signature: str
    p_value: float | None = None
    """Against the first system, by paired bootstrap: how likely so great a difference is by chance."""


def score_translations(
    translations: Sequence[str], references: Sequence[str], *, n_bootstrap_samples: int = N_BOOTSTRAP_SAMPLES
) -> dict[str, MetricScore]:
    """BLEU and chrF by name; `n_bootstrap_samples` 0: without interval, in less time."""
    _check_equal_counts(translations, references)
    scores = {}
    for name, metric in _create_metrics().items():
        score = metric.corpus_score(list(translations), [list(references)], n_bootstrap=max(1, n_bootstrap_samples))
        spread = getattr(score, "_ci", None) if n_bootstrap_samples > 1 else None
        mean = getattr(score, "_mean", score.score)
        scores[name] = MetricScore(
            score=score.score,
            low=None if spread is None else float(mean - spread),
            high=None if spread is None else float(mean + spread),
            signature=str(metric.get_signature()),
        )
    return scores


def compare_systems(
    systems: Mapping[str, Sequence[str]], references: Sequence[str], *, n_bootstrap_samples: int = N_BOOTSTRAP_SAMPLES
) -> dict[str, dict[str, MetricScore]]:
    """Each system's metrics; from the second on with the p-value of a paired bootstrap against the first."""
    for translations in systems.values():
        _check_equal_counts(translations, references)
    metrics = _create_metrics()
    from sacrebleu.significance import PairedTest

    named = [(name, list(translations)) for name, translations in systems.items()]
    test = PairedTest(named, metrics, references=[list(references)], test_type="bs", n_samples=n_bootstrap_samples)  # pyright: ignore[reportArgumentType]
    signatures, results = test()
    # Its own names (chrF2) stand in the order in which the metrics were given.
    own_names = dict(zip(metrics, (name for name in results if name != "System"), strict=True))
    return {
        system: {
            name: _score_from_paired_test(results[own], place, str(signatures[own])) for name, own in own_names.items()
        }
        for place, system in enumerate(systems)
    }


def bleu_by_source_length(
    sources: Sequence[str], translations: Sequence[str], references: Sequence[str]
) -> list[dict[str, Any]]:
    """BLEU of the sentences whose source has so many words (parted by white space)."""
    _check_equal_counts(translations, references)
    _check_equal_counts(translations, sources, "sources")
    buckets: dict[int, list[int]] = {}
    for place, source in enumerate(sources):
        n_words = len(source.split())
        buckets.setdefault(sum(n_words > end for end in SOURCE_LENGTH_LIMITS), []).append(place)
    table = []
    for bucket in sorted(buckets):
        places = buckets[bucket]
        bleu = _create_metrics()["BLEU"].corpus_score(
            [translations[i] for i in places], [[references[i] for i in places]]
        )
        first = SOURCE_LENGTH_LIMITS[bucket - 1] + 1 if bucket else 1
        words = f"{first}–{SOURCE_LENGTH_LIMITS[bucket]}" if bucket < len(SOURCE_LENGTH_LIMITS) else f"{first}+"
        table.append({"words": words, "sentences": len(places), "bleu": bleu.score})
    return table


def scores_to_dict(scores: Mapping[str, MetricScore]) -> dict[str, Any]:
    return {name: {k: v for k, v in asdict(one).items() if v is not None} for name, one in scores.items()}


def _score_from_paired_test(results: Sequence[Any], place: int, signature: str) -> MetricScore:
    result, is_equal = results[place], results[place].score == results[0].score
    return MetricScore(
        score=result.score,
        low=None if result.ci is None else float(result.mean - result.ci),
        high=None if result.ci is None else float(result.mean + result.ci),
        signature=signature,
        # Of two equal systems sacrebleu says 1/(draws + 1), as if they could not be more different.
        p_value=1.0 if place and is_equal else result.p_value,
    )


def _check_equal_counts(translations: Sequence[str], others: Sequence[str], name: str = "references") -> None:
    if len(translations) != len(others) or not others:
        raise InputError(f"there are {len(translations)} translations for {len(others)} {name}")


def _create_metrics() -> dict[str, Any]:
    try:
        from sacrebleu.metrics.bleu import BLEU
        from sacrebleu.metrics.chrf import CHRF
    except ImportError:
        raise MissingExtraError("BLEU and chrF need sacrebleu: pip install 'qkv[eval]'") from None
    return {"BLEU": BLEU(), "chrF": CHRF()}
