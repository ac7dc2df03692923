"""Which lines the fine-tuning benchmark has, and how seeds become one."""

from pathlib import Path

from benchmarks.finetune import Asked, Row, jobs, joined

ASKED = Asked(model="bert", minilm="minilm", data=Path(), epochs=None)


def row(mean, **others):
    settings = {"task": "sst2", "engine": "pre-trained", "labels": 100, "measure": "accuracy", "spread": 0.0}
    return Row(**settings | {"seeds": 1, "parameters": 7, "seconds": 2.0} | others, mean=mean)


def test_seeds_become_a_mean_and_a_spread_and_other_lines_stay_apart():
    rows = joined([row(0.6), row(0.8), row(0.9, engine="MiniLM"), row(0.7, labels=1000), row(0.7)])
    assert [(one.engine, one.labels, one.seeds) for one in rows] == [
        ("pre-trained", 100, 3), ("MiniLM", 100, 1), ("pre-trained", 1000, 1),
    ]  # fmt: skip
    assert abs(rows[0].mean - 0.7) < 1e-12
    assert abs(rows[0].spread - 0.1) < 1e-12


def test_with_all_labels_the_two_that_are_compared_have_all_seeds():
    found = [job for job in jobs(ASKED, 3) if job.task == "sst2" and job.n_labels is None]
    assert sorted((job.engine, job.seed) for job in found) == [
        ("MiniLM", 0), ("bag of words", 0), *(("from scratch", seed) for seed in range(3)),
        *(("pre-trained", seed) for seed in range(3)),
    ]  # fmt: skip
