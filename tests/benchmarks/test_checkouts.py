from benchmarks import checkouts
from benchmarks.runner import BenchmarkOptions, BestTimes, Comparison


def test_the_times_of_gpu_cases_are_those_of_one_step(monkeypatch, tmp_path):
    (tmp_path / "src" / "qkv").mkdir(parents=True)

    def compare(engines, plan, **_):
        """Return what the engines report if a step takes 1 ms: one step for decoding, all timed steps otherwise."""
        seconds = 0.001 if engines[0].module.startswith("benchmarks.engines.gpu_decode") else 0.001 * plan.time_steps
        names = [engine.name for engine in engines]
        return Comparison(
            best={name: BestTimes(wall=seconds, cpu=seconds) for name in names},
            rounds={name: [seconds] for name in names},
        )

    monkeypatch.setattr(checkouts, "compare", compare)
    options = BenchmarkOptions(peers=None, repeats=1, threads=1, log=lambda _: None, device="cuda", baseline=tmp_path)
    rows = checkouts.checkouts(options).rows
    assert {row[0].split()[0]: row[1:3] for row in rows} == {key: ["1", "1"] for key in ("decode", "encode", "train")}
