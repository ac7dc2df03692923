"""Many clients at once, in short: whatever is answered, it is an answer. `load.py` says how to ask for the whole."""

import pytest

from tests.serving.explorer_client import tasks
from tests.serving.load_generator import Models, Seen, run
from tests.tasks.small_gpt import saved


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("load")
    made = {name: str(saved(tasks()[name], folder / name)) for name in ("gpt", "bert", "seq2seq")}
    return Models(gpt=made["gpt"], bert=made["bert"], translator=made["seq2seq"], given=tuple(made.values()))


def test_many_clients_get_an_answer_each_and_health_always_does(models):
    found = run(n_clients=20, n_visits=5, models=models)
    answers = found["answers"]
    assert set(answers) <= {200, 429, 503, "health 200"}
    assert sum(n for status, n in answers.items() if status != "health 200") >= 20 * 5
    assert answers[200] > 0
    assert answers["health 200"] == found["health_asked"] > 0
    assert found["errors"] == {}, "a connection was broken"
    assert found["said"] == []


def test_a_report_takes_its_figures_from_after_the_warm_up():
    seen = Seen(
        health=[0.001 * n for n in range(1, 201)], memory=[(n, 1000 if n < 20 else 200 + n) for n in range(101)]
    )
    report = seen.report(100)
    assert (report["health_p50_ms"], report["health_p99_ms"]) == (101.0, 199.0)
    assert report["memory_growth_percent"] == pytest.approx(100 * (296.5 / 223.5 - 1), abs=0.01)
