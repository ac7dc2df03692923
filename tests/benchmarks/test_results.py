"""Rows, notes and sections of the results."""

import re

from benchmarks.engine import Engine
from benchmarks.engines.next_token_workload import Workload
from benchmarks.machine import describe_load
from benchmarks.results import Report, append
from benchmarks.runner import BestTimes, Comparison
from benchmarks.training_speed import notes, rows

WORK = Workload(
    n_layers=3, n_heads=1, d_model=5, vocab_size=7, context_length=11, bias=False, batch=2, length=11, threads=2
)
CHOSEN = [Engine(name="qkv", module="", is_ours=True), Engine(name="peer", module=""), Engine(name="gone", module="")]


def make_comparison():
    return Comparison(
        best={"qkv": BestTimes(wall=2.0, cpu=3.0), "peer": BestTimes(wall=3.0, cpu=6.0)},
        missing={"gone": "not installed"},
        ceilings={1: {"flops": 1e9, "bytes": 3e9}, 2: {"flops": 5980 * 110, "bytes": 4e9}},
    )


def make_report(**changes):
    defaults = {
        "name": "n",
        "description": "w",
        "columns": ["a", "b"],
        "rows": [["x", "1"]],
        "notes": ["t"],
        "versions": {},
    }
    return Report(**{**defaults, "load": 0.0, **changes})


def test_a_row_has_speed_times_speedups_and_utilization():
    # 22 tokens per step, 10 steps; 6·(12·3·25 + 35) + 6·3·5·11 = 6,600 FLOPs per token
    assert WORK.flops_per_token == 6600
    ours, peer = rows(CHOSEN, make_comparison(), WORK, steps=10)
    assert ours == ["qkv", "110", "200.0", "300.0", "–", "–", "110%"]
    assert peer == ["peer", "73", "300.0", "600.0", "1.50", "2.00", "74%"]


def test_missing_and_failed_engines_are_listed_in_the_notes():
    comparison = make_comparison()
    comparison.failed["other"] = "it broke"
    lines = notes(comparison, WORK)
    text = "\n".join(lines)
    assert "gone: not installed" in text
    assert "other: it broke" in text
    assert re.search(r"2 threads: 0 GFLOP/s .* 4\.0 GB/s", text)


def test_sections_are_appended(tmp_path):
    path = tmp_path / "RESULTS.md"
    append(make_report(name="first"), path)
    append(make_report(name="second"), path)
    text = path.read_text()
    assert text.startswith("# Results")
    assert text.count("# Results") == 1
    assert re.findall(r"^## (\w+), \d{4}-\d\d-\d\d$", text, re.MULTILINE) == ["first", "second"]
    assert "| a | b |\n| --- | ---: |\n| x | 1 |" in text


def test_a_section_has_versions_and_the_load():
    text = make_report(versions={"torch": "2.13"}, load=3.0).text()
    assert "torch 2.13" in text
    assert "busy" in text
    assert "load 3.0" in text
    assert "idle" in describe_load(0.1)
