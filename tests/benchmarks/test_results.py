"""A table of results: what a row, a note and a section say."""

import re

from benchmarks.engine import Engine
from benchmarks.engines.next_token_work import Work
from benchmarks.machine import load_remark
from benchmarks.results import Report, append
from benchmarks.runner import Best, Comparison
from benchmarks.training_speed import notes, rows

WORK = Work(
    n_layers=3, n_heads=1, d_model=5, vocab_size=7, context_length=11, bias=False, batch=2, length=11, threads=2
)
CHOSEN = [Engine(name="qkv", module="", is_ours=True), Engine(name="peer", module=""), Engine(name="gone", module="")]


def found():
    return Comparison(
        best={"qkv": Best(wall=2.0, cpu=3.0), "peer": Best(wall=3.0, cpu=6.0)},
        missing={"gone": "not installed"},
        ceilings={1: {"flops": 1e9, "bytes": 3e9}, 2: {"flops": 5980 * 110, "bytes": 4e9}},
    )


def report(**changes):
    given = {"name": "n", "what": "w", "columns": ["a", "b"], "rows": [["x", "1"]], "notes": ["t"], "versions": {}}
    return Report(**{**given, "load": 0.0, **changes})


def test_a_row_holds_speed_times_ratios_and_share():
    # 22 tokens a step, 10 steps; 6·(12·3·25 + 35) + 6·3·5·11 = 6,600 FLOP a token
    assert WORK.flops_a_token == 6600
    ours, peer = rows(CHOSEN, found(), WORK, steps=10)
    assert ours == ["qkv", "110", "200.0", "300.0", "–", "–", "110%"]
    assert peer == ["peer", "73", "300.0", "600.0", "1.50", "2.00", "74%"]


def test_what_is_missing_or_failed_stands_in_the_notes():
    comparison = found()
    comparison.failed["other"] = "it broke"
    said = notes(comparison, WORK)
    assert "Not here: gone: not installed." in said
    assert "Failed: other: it broke." in said
    assert "Ceiling, 2 threads: 0 GFLOP/s of matrix products, 4.0 GB/s read." in said


def test_sections_are_appended(tmp_path):
    path = tmp_path / "RESULTS.md"
    append(report(name="first"), path)
    append(report(name="second"), path)
    text = path.read_text()
    assert text.startswith("# Results")
    assert text.count("# Results") == 1
    assert re.findall(r"^## (\w+), \d{4}-\d\d-\d\d$", text, re.MULTILINE) == ["first", "second"]
    assert "| a | b |\n| --- | ---: |\n| x | 1 |" in text


def test_a_section_says_versions_and_a_busy_machine():
    text = report(versions={"torch": "2.13"}, load=3.0).text()
    assert "torch 2.13" in text
    assert "busy before the run (load 3.0" in text
    assert "quiet" in load_remark(0.1)
