"""Speed targets compare the best engines of each side, and the encoding engines agree."""

from importlib.util import find_spec

import pytest
import torch

from benchmarks import cpu_targets
from benchmarks.cpu_targets import ComparisonGroup, SpeedTarget
from benchmarks.engine import Engine
from benchmarks.engines import encode_qkv, encode_transformers
from benchmarks.engines.encode_workload import Workload, mean_pool, pad_batch
from benchmarks.runner import BenchmarkOptions, BestTimes, Comparison, ComparisonPlan

OPTIONS = BenchmarkOptions(peers=None, repeats=3, threads=2, log=lambda _: None)
PLAN = ComparisonPlan(workload={}, check_steps=1, time_steps=1, tolerance=0.0, threads=2)
GROUP = ComparisonGroup(
    description="workload", engines=[Engine(name="qkv", module="")], plan=PLAN, targets=[], repeats=1
)


def make_comparison(**best):
    times = {name: BestTimes(wall=wall, cpu=2 * wall) for name, wall in best.items()}
    return Comparison(best=times, ceilings={2: {"flops": 100.0, "bytes": 10.0}})


def groups():
    return [
        *cpu_targets._decoding_groups(2),
        cpu_targets._translation_group(OPTIONS, 2),
        *cpu_targets._training_groups(OPTIONS, 2),
        *cpu_targets._encoding_groups(2),
    ]


def test_the_best_qkv_engine_is_compared_with_the_best_peer():
    target = SpeedTarget(row="X1", ours=("a", "b"), peers=("c", "d"), min_ratio=1.5, n_bytes=5.0, n_flops=30.0)
    reached = cpu_targets._compare_to_target(target, GROUP, make_comparison(a=4.0, b=2.0, c=7.0, d=3.0))
    assert (reached.ratio, reached.min_ratio) == (1.5, 1.5)
    assert reached.cells == ["2000", "3000", "1.50", "1.50", "1.5", "reached", "25%"]
    slower = cpu_targets._compare_to_target(target, GROUP, make_comparison(a=4.0, d=3.0))
    assert slower.cells[-2] == "**missed**"


@pytest.mark.parametrize("engines", [{"a": 1.0}, {"c": 1.0}])
def test_a_target_with_a_missing_engine_has_no_result(engines):
    assert (
        cpu_targets._compare_to_target(
            SpeedTarget(row="X1", ours=("a",), peers=("c",), min_ratio=1.0), GROUP, make_comparison(**engines)
        )
        is None
    )


def test_targets_refer_to_engines_of_their_group_and_cover_all_rows():
    rows = set()
    for group in groups():
        names = {engine.name for engine in group.engines}
        for target in group.targets:
            rows.add(target.row)
            assert {*target.ours, *target.peers} <= names
    assert rows == {"C1", "C2", "C3", "C4", "C5", "C6", "T1", "T2", "E1", "E2"}


def test_about_half_of_a_padded_batch_of_mixed_lengths_is_tokens():
    workloads = [Workload(**group.plan.workload) for group in cpu_targets._encoding_groups(2)]
    assert [round(workload.fill, 1) for workload in workloads] == [1.0, 1.0, 0.5]


def test_the_results_are_plotted():
    results = [
        cpu_targets._compare_to_target(
            SpeedTarget(row="X1", peers=("c",), min_ratio=1.5), GROUP, make_comparison(qkv=4.0, c=wall)
        )
        for wall in (5.0, 7.0)
    ]
    assert cpu_targets._plot_results(results).startswith(b"\x89PNG")


@pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")
@pytest.mark.parametrize("shortest", [11, 3])
def test_qkv_and_hugging_face_vectors_agree(shortest):
    workload = Workload(
        n_texts=5,
        shortest=shortest,
        longest=11,
        batch=2,
        n_calls=1,
        threads=1,
        n_layers=2,
        n_heads=3,
        d_model=12,
        vocab_size=31,
    )
    ours, theirs = (engine.build(workload)[0](workload.texts()) for engine in (encode_qkv, encode_transformers))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


def test_padding_is_excluded_from_the_mean():
    ids, attention_mask = pad_batch([[3, 5, 7], [11]])
    assert ids.tolist() == [[3, 5, 7], [11, 0, 0]]
    assert mean_pool(ids[..., None].float(), attention_mask).tolist() == [[5.0], [11.0]]
