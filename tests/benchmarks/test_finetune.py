"""Jobs of the fine-tuning benchmark, and the averaging of seeds."""

from pathlib import Path

from benchmarks.finetune import FinetuneSettings, Row, average_seeds, list_jobs

SETTINGS = FinetuneSettings(model="bert", minilm="minilm", data=Path(), epochs=None)


def make_row(mean, **others):
    settings = {"task": "sst2", "engine": "pre-trained", "labels": 100, "measure": "accuracy", "spread": 0.0}
    return Row(**settings | {"seeds": 1, "parameters": 7, "seconds": 2.0} | others, mean=mean)


def test_seeds_are_averaged_per_engine_and_number_of_labels():
    rows = average_seeds(
        [make_row(0.6), make_row(0.8), make_row(0.9, engine="MiniLM"), make_row(0.7, labels=1000), make_row(0.7)]
    )
    assert [(row.engine, row.labels, row.seeds) for row in rows] == [
        ("pre-trained", 100, 3),
        ("MiniLM", 100, 1),
        ("pre-trained", 1000, 1),
    ]
    assert abs(rows[0].mean - 0.7) < 1e-12
    assert abs(rows[0].spread - 0.1) < 1e-12


def test_with_all_labels_only_the_two_compared_engines_have_all_seeds():
    result = [job for job in list_jobs(SETTINGS, 3) if job.task == "sst2" and job.n_train_rows is None]
    assert sorted((job.engine, job.seed) for job in result) == [
        ("MiniLM", 0),
        ("bag of words", 0),
        *(("from scratch", seed) for seed in range(3)),
        *(("pre-trained", seed) for seed in range(3)),
    ]
