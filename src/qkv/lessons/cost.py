"""What does a Transformer compute and move, row by row, and when does attention become the larger part?"""

from qkv.config import RNNConfig, preset
from qkv.cost import Estimate, estimate
from qkv.cost.devices import find_device
from qkv.cost.lecture import ENCODER_DECODER_SLIP, SLIPS, attention_weights, lecture_tables
from qkv.cost.words import crossing, layers_compared
from qkv.inspection.cost_figures import cost_figure
from qkv.lessons.drawing import Draw
from qkv.lessons.printing import say, section, slip, table


def lesson(seed: int) -> Draw:  # noqa: ARG001 - nothing here is left to chance
    _weights()
    for name, length in (("bert-base", 512), ("gpt2", 1024)):
        section(f"{name}: a whole sequence, b = 1, n = {length:,}, d = 768, h = 12, L = 12")
        _rows(estimate(preset(name), batch=1, length=length, mode="forward"))
    say("Moved are numbers read and written, by operations that are not fused; F/byte: FLOPs a byte of float32.")
    for one in SLIPS:
        slip(one)
    section("gpt2: one decoding step at n = 1,024: every n² is n, every n is 1")
    step = estimate(preset("gpt2"), batch=1, length=1024, mode="decode", dtype="float16")
    _rows(step)
    say(f"""The cache holds {step.memory.cache:,} bytes: 2·n·d·L numbers of 16 bits. A step does {step.intensity:.3g}
        FLOPs a byte it moves; a GPU could do hundreds, so it waits for its memory.""")
    _encoder_decoder()
    _against_rnn()
    return lambda: cost_figure(step, find_device("h200"))


def _weights() -> None:
    section("Count the weights: W_Q, W_K, W_V and W_O of every layer, 4·L·d²")
    shapes = [("gpt2", 12), ("gpt2-xl", 48), ("gpt3", 96)]
    table(["model", "L", "d", "4·L·d²", "all parameters"], [
        (name, n, preset(name).d_model, attention_weights(preset(name), n),  # type: ignore[arg-type]
         estimate(preset(name), batch=1, length=1).parameters.total)
        for name, n in shapes
    ])  # fmt: skip
    slip("C's line lacks the 4: every layer has four matrices of d×d.")


def _rows(one: Estimate) -> None:
    (made,) = lecture_tables(one)
    table(["operation", "E's O(·)", "FLOPs", "E's IO", "moved", "F/byte"], [
        (row.name, row.order, row.flops, row.io_order, row.numbers, f"{row.intensity:.3g}")
        for row in (*made.rows, made.total)
    ])  # fmt: skip


def _encoder_decoder() -> None:
    section("An encoder–decoder: source m, target n")
    config, rows = preset("transformer-base"), []
    for m, n in ((64, 64), (128, 64), (512, 64), (64, 512)):
        (made,) = lecture_tables(estimate(config, batch=1, length=n, source_length=m, mode="forward"))
        sums = [
            sum(row.flops for row in made.rows if row.name.startswith(start) and ("cross" in row.name) is cross)
            for start, cross in (("encoder", False), ("decoder", False), ("decoder", True))
        ]
        rows.append((m, n, *sums))
    table(["m", "n", "encoder: m²d + md²", "decoder: n²d + nd²", "cross: nmd + nd² + md²"], rows)
    slip(ENCODER_DECODER_SLIP)


def _against_rnn() -> None:
    d = 768
    section(f"One layer of width {d}: self-attention against a recurrence")
    names = [one.name for one in layers_compared(1, d)]
    lengths = (64, 1024, 8192)
    compared = [layers_compared(n, d) for n in lengths]
    table(["GFLOP of", "formula", *(f"n = {n:,}" for n in lengths), "steps"], [
        (name, compared[0][i].formula, *(row[i].flops / 1e9 for row in compared),
         "1" if compared[-1][i].sequential_steps == 1 else "n")
        for i, name in enumerate(names)
    ], digits=2)  # fmt: skip
    config = preset("gpt2")
    assert not isinstance(config, RNNConfig)
    found = crossing(config)
    say(f"""E says n² dominates past n ≈ d. Counted exactly, scores and mix cost as much as the rest of a block of
        gpt2 from n = {found.executed:,} (6d), and from n = {found.useful:,} (12d) if only what the mask lets look
        counts: the rest is 24·d² a token, not d².""")
