"""A calibration made up of round numbers: every kernel takes 1 µs and 1 ns a unit of its sizes' product."""

from math import prod

from qkv.cost.calibration import Calibration, Measured, Overhead, Table

FLOOR, RATE = 1e-6, 1e-9
ELEMENTWISE = (
    "add",
    "gate",
    "cast",
    "bias",
    "layer",
    "rms",
    "look-up",
    "softmax",
    "rotation",
    "relu",
    "gelu",
    "gelu-tanh",
    "silu",
)


def _table(*axes, growth=()):
    measured = Measured(axes=axes, growth=growth)
    for table_point in _points(axes):
        measured.found[table_point] = FLOOR + RATE * prod(table_point)
    return measured.table()


def _points(axes):
    return [()] if not axes else [(first, *rest) for first in axes[0] for rest in _points(axes[1:])]


def made_up(kind="cpu", dtype="float32", device="made up"):
    sizes, wide = (1, 16, 256, 4096), (1, 2**10, 2**20)
    tables = {"stream": Table(axes=((1,),), growth=(0,), seconds=(1e-15,))}
    for road in ("infer", "train"):
        tables |= {f"product.{road}": _table(sizes, sizes, sizes)}
        tables |= {f"{name}.{road}": _table(wide) for name in (*ELEMENTWISE, "loss", "fill", "update")}
        for name in ("causal-fused", "full-fused", "full-plain", "step-fused", "step-plain"):
            tables[f"{name}.{road}"] = _table(sizes, sizes, (1, 64), growth=(1, 2, 1))
        tables |= {f"{name}.{road}": _table(sizes, sizes, sizes) for name in ("one-way", "two-way")}
        tables[f"odd.{road}"] = Table(axes=((1,), (1, 2, 4)), growth=(0, 0), seconds=(4.0, 3.0, 2.0))
        tables[f"lstm.{road}"] = Table(axes=((1,),), seconds=(1.0,))
    names = [
        f"{family}.{mode}"
        for family in ("gpt", "plain", "rotary", "bert", "seq2seq", "rnn")
        for mode in ("forward", "train", "train_forward", "train_gradients", "prefill", "decode")
    ]
    launches = {name: Overhead(once=1e-4, layer=1e-5, second_layer=2e-5) for name in names}
    return Calibration(
        device=device, kind=kind, dtype=dtype, threads=1, torch="2.13.0", took=1.0, tables=tables, launches=launches
    )  # fmt: skip
