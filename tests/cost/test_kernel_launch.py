"""The kernel launches of a step sum to its FLOPs and bytes."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qkv.choices import AttentionKernel
from qkv.config import RNNConfig, Seq2SeqConfig, preset
from qkv.cost import Phase, Precision, Workload, count_flops, estimate, list_kernel_launches, list_operations
from tests.cost.config_strategies import FAMILIES


@pytest.mark.parametrize("family", FAMILIES)
def test_launches_sum_to_the_flops_of_the_step(family):
    @settings(max_examples=15)
    @given(FAMILIES[family], st.sampled_from(AttentionKernel), st.booleans(), st.sampled_from(Precision))
    def check(config, kernel, checkpointing, dtype):
        source = 5 if isinstance(config, Seq2SeqConfig | RNNConfig) else None
        shape = {"batch_size": 2, "seq_len": 7, "source_len": source, "kernel": kernel, "dtype": dtype}
        workload = Workload(**shape, mode="train", activation_checkpointing=checkpointing)
        launches = list_kernel_launches(list_operations(config, workload), workload)
        result = count_flops(config, workload)
        assert sum(op.flops for op in launches) == result.total
        assert sum(op.flops for op in launches if op.phase is Phase.FORWARD) == result.forward
        assert all(op.n_kernels > 0 for op in launches)

    check()


@pytest.mark.parametrize("dtype", Precision)
@pytest.mark.parametrize("kernel", AttentionKernel)
def test_operation_rows_and_launches_move_the_same_bytes(dtype, kernel):
    result = estimate("t5-small", batch_size=2, seq_len=16, source_len=11, kernel=kernel, dtype=dtype, mode="train")
    suffix = kernel.value.replace("eager", "unfused")
    forward, backward = (getattr(result.traffic, f"{direction}_{suffix}") for direction in ("forward", "backward"))
    rows = result.operation_rows()
    assert sum(row[f"bytes_{suffix}"] for row in rows) == forward
    assert sum(row[f"backward_bytes_{suffix}"] for row in rows) == backward
    assert sum(op.n_bytes for op in result.launches) == result.traffic.total(kernel)


def test_a_matmul_moves_its_three_matrices_in_the_forward_and_in_both_backward_matmuls():
    n, d = 7, 768
    (row,) = (row for row in estimate("gpt2", seq_len=n, mode="train").operation_rows() if row["operation"] == "logits")
    x, weight, output = n * d, d * 50257, n * 50257
    assert row["bytes_fused"] == 4 * (x + weight + output)
    # dX = dY·Wᵀ and dW = Xᵀ·dY. The weight is tied, so its gradient is written with that of the embedding.
    assert row["backward_bytes_fused"] == 4 * (output + weight + x + output + x)


def test_the_fused_backward_pass_reads_five_tensors_and_writes_three():
    n, d = 64, 768
    result = estimate("gpt2", seq_len=n, mode="train")
    (backward,) = (op for op in result.launches if op.name == "attention" and op.phase is Phase.BACKWARD)
    assert (backward.bytes_read, backward.bytes_written) == (4 * 5 * n * d, 4 * 3 * n * d)
    assert len(backward.matmuls) == 5
    assert backward.flops == 12 * 5 * 2 * n * n * d


def test_the_limiting_resource_depends_on_the_device():
    result = estimate("gpt2", batch_size=8, seq_len=1024, dtype="bfloat16", mode="train")
    bound = {row["operation"]: row["bound_by"] for row in result.operation_rows(peak=1e15, bandwidth=4.8e12)}
    assert (bound["up_proj"], bound["norm"]) == ("compute", "memory")
    slow = {row["bound_by"] for row in result.operation_rows(peak=1e15, bandwidth=1e9)}
    assert slow == {"memory"}
    (head,) = (op for op in result.launches if op.name == "logits" and op.phase is Phase.FORWARD)
    assert head.bound_by(peak=1e15, bandwidth=4.8e12) == "compute"
    assert head.intensity == pytest.approx(head.flops / head.n_bytes)


def test_mixed_precision_casts_each_weight_once_per_pass():
    config = preset("gpt2", attention_bias=False, feed_forward_bias=False)
    casts = [
        op for op in estimate(config, seq_len=8, dtype="mixed", mode="train").launches if op.name.startswith("cast")
    ]
    weights = 12 * 12 * 768**2 + 768 * 50257
    assert sum(op.n_bytes for op in casts) == 6 * weights
    assert not [op for op in estimate(config, seq_len=8, mode="train").launches if op.name.startswith("cast")]
