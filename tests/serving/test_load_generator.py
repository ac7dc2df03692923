"""A short load test. `load_generator.py` describes how to run the full one."""

import pytest

from tests.serving.explorer_client import tasks
from tests.serving.load_generator import LoadStatistics, Models, run_load_test
from tests.tasks.small_gpt import save_task


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("load")
    paths = {name: str(save_task(tasks()[name], folder / name)) for name in ("gpt", "bert", "seq2seq")}
    return Models(gpt=paths["gpt"], bert=paths["bert"], translator=paths["seq2seq"], paths=tuple(paths.values()))


def test_all_clients_get_a_response_and_health_always_succeeds(models):
    report = run_load_test(n_clients=20, n_requests=5, models=models)
    statuses = report["statuses"]
    assert set(statuses) <= {200, 429, 503, "health 200"}
    assert sum(n for status, n in statuses.items() if status != "health 200") >= 20 * 5
    assert statuses[200] > 0
    assert statuses["health 200"] == report["health_requests"] > 0
    assert report["errors"] == {}, "a connection was closed"
    assert report["stderr_errors"] == []


def test_the_report_ignores_memory_during_the_warm_up():
    statistics = LoadStatistics(
        health=[0.001 * n for n in range(1, 201)], memory=[(n, 1000 if n < 20 else 200 + n) for n in range(101)]
    )
    report = statistics.report(100)
    assert (report["health_p50_ms"], report["health_p99_ms"]) == (101.0, 199.0)
    assert report["memory_growth_percent"] == pytest.approx(100 * (296.5 / 223.5 - 1), abs=0.01)
