"""Every bar of speed: the best beside the best, each among the engines of its group; the engines agree."""

from importlib.util import find_spec

import pytest
import torch

from benchmarks import bars
from benchmarks.bars import Bar, Group
from benchmarks.engine import Engine
from benchmarks.engines import encode_qkv, encode_transformers
from benchmarks.engines.encode_work import Work, mean, padded
from benchmarks.runner import Asked, Best, Comparison, Plan

ASKED = Asked(peers=None, repeats=3, threads=2, say=lambda _: None)
PLAN = Plan(work={}, check_steps=1, time_steps=1, tolerance=0.0, threads=2)
GROUP = Group(what="some work", engines=[Engine(name="qkv", module="")], plan=PLAN, bars=[], repeats=1)


def found(**best):
    times = {name: Best(wall=wall, cpu=2 * wall) for name, wall in best.items()}
    return Comparison(best=times, ceilings={2: {"flops": 100.0, "bytes": 10.0}})


def groups():
    return [*bars._decoding(2), bars._translating(ASKED, 2), *bars._training(ASKED, 2), *bars._encoding(2)]


def test_the_best_of_ours_stands_beside_the_best_of_the_peers():
    bar = Bar(row="X1", ours=("a", "b"), peers=("c", "d"), reach=1.5, n_bytes=5.0, n_flops=30.0)
    line = bars._line(bar, GROUP, found(a=4.0, b=2.0, c=7.0, d=3.0))
    assert (line.ratio, line.reach) == (1.5, 1.5)
    assert line.cells == ["2000", "3000", "1.50", "1.50", "1.5", "reached", "25%"]
    slower = bars._line(bar, GROUP, found(a=4.0, d=3.0))
    assert slower.cells[-2] == "**missed**"


@pytest.mark.parametrize("there", [{"a": 1.0}, {"c": 1.0}])
def test_a_bar_whose_peer_or_whose_own_engine_is_not_here_has_no_line(there):
    assert bars._line(Bar(row="X1", ours=("a",), peers=("c",), reach=1.0), GROUP, found(**there)) is None


def test_each_bar_names_engines_of_its_group_and_every_row_is_there():
    seen = set()
    for group in groups():
        names = {engine.name for engine in group.engines}
        for bar in group.bars:
            seen.add(bar.row)
            assert {*bar.ours, *bar.peers} <= names
    assert seen == {"C1", "C2", "C3", "C4", "C5", "C6", "T1", "T2", "E1", "E2"}


def test_mixed_lengths_fill_about_half_of_what_is_padded():
    works = [Work(**group.plan.work) for group in bars._encoding(2)]
    assert [round(work.fill, 1) for work in works] == [1.0, 1.0, 0.5]


def test_the_plot_holds_a_bar_for_every_line():
    lines = [bars._line(Bar(row="X1", peers=("c",), reach=1.5), GROUP, found(qkv=4.0, c=wall)) for wall in (5.0, 7.0)]
    assert bars._picture(lines).startswith(b"\x89PNG")


@pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")
@pytest.mark.parametrize("shortest", [11, 3])
def test_ours_and_hugging_faces_vectors_are_the_same(shortest):
    work = Work(
        n_texts=5, shortest=shortest, longest=11, batch=2, n_calls=1, threads=1, n_layers=2, n_heads=3, d_model=12,
        vocab_size=31,
    )  # fmt: skip
    ours, theirs = (one.build(work)[0](work.texts()) for one in (encode_qkv, encode_transformers))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


def test_padding_counts_for_nothing_in_a_mean():
    ids, attention_mask = padded([[3, 5, 7], [11]])
    assert ids.tolist() == [[3, 5, 7], [11, 0, 0]]
    assert mean(ids[..., None].float(), attention_mask).tolist() == [[5.0], [11.0]]
