"""Synthetic calibration in which every kernel takes 1 µs plus 1 ns times the product of its sizes."""

from math import prod

from qkv.choices import Activation, NormKind
from qkv.cost.calibration import Calibration, LaunchOverhead, TimingTable, TimingTableBuilder

FIXED_SECONDS, SECONDS_PER_UNIT = 1e-6, 1e-9
ELEMENTWISE = (
    "add",
    "gate",
    "cast",
    "bias",
    "lookup",
    "softmax",
    "rotary",
    *(kind.value for kind in (*NormKind, *Activation)),
)


def _build_table(*axes, exponents=()):
    builder = TimingTableBuilder(axes=axes, exponents=exponents)
    for point in _grid_points(axes):
        builder.measured[point] = FIXED_SECONDS + SECONDS_PER_UNIT * prod(point)
    return builder.build()


def _grid_points(axes):
    return [()] if not axes else [(first, *rest) for first in axes[0] for rest in _grid_points(axes[1:])]


def make_calibration(kind="cpu", dtype="float32", device="synthetic"):
    sizes, n_elements = (1, 16, 256, 4096), (1, 2**10, 2**20)
    tables = {"stream": TimingTable(axes=((1,),), exponents=(0,), seconds=(1e-15,))}
    for pass_name in ("infer", "train"):
        tables |= {f"matmul.{pass_name}": _build_table(sizes, sizes, sizes)}
        tables |= {f"{name}.{pass_name}": _build_table(n_elements) for name in (*ELEMENTWISE, "loss", "fill", "update")}
        for name in ("causal-fused", "full-fused", "full-eager", "decode-fused", "decode-eager"):
            tables[f"{name}.{pass_name}"] = _build_table(sizes, sizes, (1, 64), exponents=(1, 2, 1))
        tables |= {
            f"{name}.{pass_name}": _build_table(sizes, sizes, sizes) for name in ("unidirectional", "bidirectional")
        }
        tables[f"misaligned.{pass_name}"] = TimingTable(
            axes=((1,), (1, 2, 4)), exponents=(0, 0), seconds=(4.0, 3.0, 2.0)
        )
        tables[f"lstm.{pass_name}"] = TimingTable(axes=((1,),), seconds=(1.0,))
    overhead_names = [
        f"{family}.{mode}"
        for family in ("gpt", "eager", "rotary", "bert", "seq2seq", "rnn")
        for mode in ("forward", "train", "train_forward", "train_gradients", "prefill", "decode")
    ]
    launch_overheads = {
        name: LaunchOverhead(base=1e-4, per_layer=1e-5, per_decoder_layer=2e-5) for name in overhead_names
    }
    return Calibration(
        device=device,
        kind=kind,
        dtype=dtype,
        n_threads=1,
        torch_version="2.13.0",
        duration=1.0,
        tables=tables,
        launch_overheads=launch_overheads,
    )
