"""Compute the translation metrics BLEU and chrF with sacrebleu."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from qkv.errors import InputError, MissingExtraError

N_BOOTSTRAP_SAMPLES = 1000
"""Default number of bootstrap samples."""
SOURCE_LENGTH_LIMITS = (5, 10, 20, 40)
"""Upper limits of the source length buckets, in words. The last bucket has no upper limit."""


@dataclass(frozen=True, kw_only=True)
class MetricScore:
    """Corpus-level score for a metric. `low` and `high` are the bounds of its 95 % bootstrap confidence interval."""

    score: float
    low: float | None
    high: float | None
    signature: str
    p_value: float | None = None
    """p-value from a paired bootstrap test against the first system."""


def score_translations(
    translations: Sequence[str], references: Sequence[str], *, n_bootstrap_samples: int = N_BOOTSTRAP_SAMPLES
) -> dict[str, MetricScore]:
    """Compute BLEU and chrF for translations. If `n_bootstrap_samples` is 0, confidence intervals are omitted."""
    _check_equal_nonzero_counts(translations, references)
    scores = {}
    for name, metric in _create_bleu_and_chrf().items():
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


def compare_with_first_system(
    systems: Mapping[str, Sequence[str]], references: Sequence[str], *, n_bootstrap_samples: int = N_BOOTSTRAP_SAMPLES
) -> dict[str, dict[str, MetricScore]]:
    """Compute the metrics for each system, with p-values from paired bootstrap tests against the first system."""
    for translations in systems.values():
        _check_equal_nonzero_counts(translations, references)
    metrics = _create_bleu_and_chrf()
    from sacrebleu.significance import PairedTest

    named = [(name, list(translations)) for name, translations in systems.items()]
    test = PairedTest(named, metrics, references=[list(references)], test_type="bs", n_samples=n_bootstrap_samples)  # pyright: ignore[reportArgumentType]
    signatures, results = test()
    # sacrebleu returns results under its own names (chrF2), in the order of the metrics.
    result_names = dict(zip(metrics, (name for name in results if name != "System"), strict=True))
    return {
        system: {
            name: _score_from_paired_test(results[result_name], index, str(signatures[result_name]))
            for name, result_name in result_names.items()
        }
        for index, system in enumerate(systems)
    }


def bleu_by_source_length(
    sources: Sequence[str], translations: Sequence[str], references: Sequence[str]
) -> list[dict[str, Any]]:
    """Compute BLEU separately for each bucket of source lengths, measured in whitespace-separated words."""
    _check_equal_nonzero_counts(translations, references)
    _check_equal_nonzero_counts(translations, sources, "sources")
    buckets: dict[int, list[int]] = {}
    for index, source in enumerate(sources):
        n_words = len(source.split())
        buckets.setdefault(sum(n_words > limit for limit in SOURCE_LENGTH_LIMITS), []).append(index)
    table = []
    for bucket in sorted(buckets):
        indices = buckets[bucket]
        bleu = _create_bleu_and_chrf()["BLEU"].corpus_score(
            [translations[i] for i in indices], [[references[i] for i in indices]]
        )
        first = SOURCE_LENGTH_LIMITS[bucket - 1] + 1 if bucket else 1
        words = f"{first}–{SOURCE_LENGTH_LIMITS[bucket]}" if bucket < len(SOURCE_LENGTH_LIMITS) else f"{first}+"
        table.append({"words": words, "sentences": len(indices), "bleu": bleu.score})
    return table


def scores_to_dict(scores: Mapping[str, MetricScore]) -> dict[str, Any]:
    """Convert scores to dictionaries, omitting fields that are None."""
    return {name: {k: v for k, v in asdict(score).items() if v is not None} for name, score in scores.items()}


def _score_from_paired_test(results: Sequence[Any], index: int, signature: str) -> MetricScore:
    result, is_equal = results[index], results[index].score == results[0].score
    return MetricScore(
        score=result.score,
        low=None if result.ci is None else float(result.mean - result.ci),
        high=None if result.ci is None else float(result.mean + result.ci),
        signature=signature,
        # For two systems with equal scores, sacrebleu returns the smallest possible p-value, 1/(samples + 1).
        p_value=1.0 if index and is_equal else result.p_value,
    )


def _check_equal_nonzero_counts(
    translations: Sequence[str], other_texts: Sequence[str], name: str = "references"
) -> None:
    if len(translations) != len(other_texts) or not other_texts:
        raise InputError(
            f"the numbers of translations ({len(translations)}) and {name} ({len(other_texts)}) "
            "must be equal and positive"
        )


def _create_bleu_and_chrf() -> dict[str, Any]:
    try:
        from sacrebleu.metrics.bleu import BLEU
        from sacrebleu.metrics.chrf import CHRF
    except ImportError:
        raise MissingExtraError("BLEU and chrF require sacrebleu; install it with: pip install 'qkv[eval]'") from None
    return {"BLEU": BLEU(), "chrF": CHRF()}
