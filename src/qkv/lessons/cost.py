"""What does a Transformer compute and move, row by row, and when does attention become the larger part?"""

from qkv.config import RNNConfig, preset
from qkv.cost import Estimate, estimate
from qkv.cost.devices import find_device
from qkv.cost.explanation import attention_crossover, compare_layer_costs
from qkv.cost.lecture_tables import ENCODER_DECODER_ERRATUM, LECTURE_ERRATA, count_attention_parameters, lecture_tables
from qkv.inspection.cost_figures import plot_cost
from qkv.lessons.console import print_section, print_slide_error, print_table, print_text
from qkv.lessons.figure_style import DrawFigure


def lesson(seed: int) -> DrawFigure:  # noqa: ARG001 - nothing here is left to chance
    _weights()
    for name, length in (("bert-base", 512), ("gpt2", 1024)):
        print_section(f"{name}: a whole sequence, b = 1, n = {length:,}, d = 768, h = 12, L = 12")
        _rows(estimate(preset(name), batch_size=1, seq_len=length, mode="forward"))
    print_text("Moved are numbers read and written, by operations that are not fused; F/byte: FLOPs a byte of float32.")
    for one in LECTURE_ERRATA:
        print_slide_error(one)
    print_section("gpt2: one decoding step at n = 1,024: every n² is n, every n is 1")
    step = estimate(preset("gpt2"), batch_size=1, seq_len=1024, mode="decode", dtype="float16")
    _rows(step)
    print_text(f"""The cache holds {step.memory.cache:,} bytes: 2·n·d·L numbers of 16 bits. A step does {step.intensity:.3g}
        FLOPs a byte it moves; a GPU could do hundreds, so it waits for its memory.""")
    _encoder_decoder()
    _against_rnn()
    return lambda: plot_cost(step, find_device("h200"))


def _weights() -> None:
    print_section("Count the weights: W_Q, W_K, W_V and W_O of every layer, 4·L·d²")
    shapes = [("gpt2", 12), ("gpt2-xl", 48), ("gpt3", 96)]
    print_table(["model", "L", "d", "4·L·d²", "all parameters"], [
        (name, n, preset(name).d_model, count_attention_parameters(preset(name), n),  # type: ignore[arg-type]
         estimate(preset(name), batch_size=1, seq_len=1).parameters.total)
        for name, n in shapes
    ])  # fmt: skip
    print_slide_error("C's line lacks the 4: every layer has four matrices of d×d.")


def _rows(one: Estimate) -> None:
    (made,) = lecture_tables(one)
    print_table(["operation", "E's O(·)", "FLOPs", "E's IO", "moved", "F/byte"], [
        (row.name, row.order, row.flops, row.io_order, row.elements, f"{row.intensity:.3g}")
        for row in (*made.rows, made.total)
    ])  # fmt: skip


def _encoder_decoder() -> None:
    print_section("An encoder–decoder: source m, target n")
    config, rows = preset("transformer-base"), []
    for m, n in ((64, 64), (128, 64), (512, 64), (64, 512)):
        (made,) = lecture_tables(estimate(config, batch_size=1, seq_len=n, source_len=m, mode="forward"))
        sums = [
            sum(row.flops for row in made.rows if row.name.startswith(start) and ("cross" in row.name) is cross)
            for start, cross in (("encoder", False), ("decoder", False), ("decoder", True))
        ]
        rows.append((m, n, *sums))
    print_table(["m", "n", "encoder: m²d + md²", "decoder: n²d + nd²", "cross: nmd + nd² + md²"], rows)
    print_slide_error(ENCODER_DECODER_ERRATUM)


def _against_rnn() -> None:
    d = 768
    print_section(f"One layer of width {d}: self-attention against a recurrence")
    names = [one.name for one in compare_layer_costs(1, d)]
    lengths = (64, 1024, 8192)
    compared = [compare_layer_costs(n, d) for n in lengths]
    print_table(["GFLOP of", "formula", *(f"n = {n:,}" for n in lengths), "steps"], [
        (name, compared[0][i].formula, *(row[i].flops / 1e9 for row in compared),
         "1" if compared[-1][i].sequential_steps == 1 else "n")
        for i, name in enumerate(names)
    ], digits=2)  # fmt: skip
    config = preset("gpt2")
    assert not isinstance(config, RNNConfig)
    found = attention_crossover(config)
    print_text(f"""E says n² dominates past n ≈ d. Counted exactly, scores and mix cost as much as the rest of a block of
        gpt2 from n = {found.executed:,} (6d), and from n = {found.useful:,} (12d) if only what the mask lets look
        counts: the rest is 24·d² a token, not d².""")
