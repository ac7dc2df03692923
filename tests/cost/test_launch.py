"""The kernels of a step add up to its FLOPs and bytes."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qkv.choices import Kernel
from qkv.config import RNNConfig, Seq2SeqConfig, preset
from qkv.cost import Phase, Precision, Workload, estimate, flops, launches, operations
from tests.cost.drawn import FAMILIES


@pytest.mark.parametrize("family", FAMILIES)
def test_they_add_up_to_the_step_s_flops(family):
    @settings(max_examples=15)
    @given(FAMILIES[family], st.sampled_from(Kernel), st.booleans(), st.sampled_from(Precision))
    def check(config, kernel, checkpointing, dtype):
        source = 5 if isinstance(config, Seq2SeqConfig | RNNConfig) else None
        shape = {"batch": 2, "length": 7, "source_length": source, "kernel": kernel, "dtype": dtype}
        work = Workload(**shape, mode="train", checkpointing=checkpointing)
        made = launches(operations(config, work), work)
        found = flops(config, work)
        assert sum(one.flops for one in made) == found.total
        assert sum(one.flops for one in made if one.phase is Phase.FORWARD) == found.forward
        assert all(one.calls > 0 for one in made)

    check()


@pytest.mark.parametrize("dtype", Precision)
@pytest.mark.parametrize("kernel", Kernel)
def test_rows_and_launches_move_the_same_bytes(dtype, kernel):
    found = estimate("t5-small", batch=2, length=16, source_length=11, kernel=kernel, dtype=dtype, mode="train")
    way = kernel.value.replace("plain", "unfused")
    forward, backward = getattr(found.traffic, way), getattr(found.traffic, f"backward_{way}")
    rows = found.rows()
    assert sum(row[f"bytes_{way}"] for row in rows) == forward
    assert sum(row[f"backward_bytes_{way}"] for row in rows) == backward
    assert sum(one.n_bytes for one in found.launches) == found.traffic.total(kernel)


def test_a_matrix_product_moves_its_three_matrices_once_forward_and_each_twice_backward():
    n, d = 7, 768
    (row,) = (row for row in estimate("gpt2", length=n, mode="train").rows() if row["operation"] == "logits")
    one, other, result = n * d, d * 50257, n * 50257
    assert row["bytes_fused"] == 4 * (one + other + result)
    # dX = dY·Wᵀ and dW = Xᵀ·dY; the table is tied, so its gradient is written with the embedding's.
    assert row["backward_bytes_fused"] == 4 * (result + other + one + result + one)


def test_a_fused_backward_reads_five_tensors_and_writes_three():
    n, d = 64, 768
    found = estimate("gpt2", length=n, mode="train")
    (back,) = (one for one in found.launches if one.name == "attention" and one.phase is Phase.BACKWARD)
    assert (back.bytes_read, back.bytes_written) == (4 * 5 * n * d, 4 * 3 * n * d)
    assert len(back.products) == 5
    assert back.flops == 12 * 5 * 2 * n * n * d


def test_what_bounds_an_operation_depends_on_the_device():
    found = estimate("gpt2", batch=8, length=1024, dtype="bfloat16", mode="train")
    bound = {row["operation"]: row["bound_by"] for row in found.rows(peak=1e15, bandwidth=4.8e12)}
    assert (bound["expand"], bound["norm"]) == ("compute", "memory")
    slow = {row["bound_by"] for row in found.rows(peak=1e15, bandwidth=1e9)}
    assert slow == {"memory"}
    (head,) = (one for one in found.launches if one.name == "logits" and one.phase is Phase.FORWARD)
    assert head.bound_by(peak=1e15, bandwidth=4.8e12) == "compute"
    assert head.intensity == pytest.approx(head.flops / head.n_bytes)


def test_mixed_precision_casts_each_weight_once_a_pass():
    config = preset("gpt2", attention_bias=False, feed_forward_bias=False)
    casts = [
        one for one in estimate(config, length=8, dtype="mixed", mode="train").launches if one.name.startswith("cast")
    ]
    weights = 12 * 12 * 768**2 + 768 * 50257
    assert sum(one.n_bytes for one in casts) == 6 * weights
    assert not [one for one in estimate(config, length=8, mode="train").launches if one.name.startswith("cast")]
