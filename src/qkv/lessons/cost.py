"""Lesson: the FLOPs and memory traffic of each operation of a Transformer, and when attention dominates."""

from qkv.config import RNNConfig, preset
from qkv.cost import Estimate, estimate
from qkv.cost.devices import find_device
from qkv.cost.explanation import attention_crossover, compare_attention_with_rnn_costs
from qkv.cost.lecture_tables import (
    ENCODER_DECODER_ERRATUM,
    LECTURE_ERRATA,
    count_attention_matrix_parameters,
    lecture_tables,
)
from qkv.inspection.cost_figures import plot_cost_overview
from qkv.lessons.console import print_section, print_slide_error, print_table, print_text
from qkv.lessons.figure_style import DrawFigure


def lesson(seed: int) -> DrawFigure:  # noqa: ARG001 - nothing is random
    _print_attention_parameter_counts()
    for name, length in (("bert-base", 512), ("gpt2", 1024)):
        print_section(f"{name}: a full sequence, b = 1, n = {length:,}, d = 768, h = 12, L = 12")
        _print_cost_per_operation(estimate(preset(name), batch_size=1, seq_len=length, mode="forward"))
    print_text(
        "The column “moved” counts the numbers that unfused operations read and write. The column “F/byte” contains "
        "the FLOPs per byte moved in float32."
    )
    for erratum in LECTURE_ERRATA:
        print_slide_error(erratum)
    print_section("gpt2: one decoding step at n = 1,024 (n² becomes n, and n becomes 1)")
    step = estimate(preset("gpt2"), batch_size=1, seq_len=1024, mode="decode", dtype="float16")
    _print_cost_per_operation(step)
    print_text(f"""The KV cache takes {step.memory.cache:,} bytes: 2·n·d·L values of 2 bytes each. A decoding
        step performs {step.intensity:.3g} FLOPs per byte moved. A GPU can perform hundreds of FLOPs per byte, so the
        speed of the step is limited by the memory bandwidth.""")
    _print_encoder_decoder_flops()
    _print_attention_and_rnn_flops()
    return lambda: plot_cost_overview(step, find_device("h200"))


def _print_attention_parameter_counts() -> None:
    print_section("Parameters of W_Q, W_K, W_V and W_O in all layers: 4·L·d²")
    shapes = [("gpt2", 12), ("gpt2-xl", 48), ("gpt3", 96)]
    print_table(["model", "L", "d", "4·L·d²", "all parameters"], [
        (name, n, preset(name).d_model, count_attention_matrix_parameters(preset(name), n),  # type: ignore[arg-type]
         estimate(preset(name), batch_size=1, seq_len=1).parameters.total)
        for name, n in shapes
    ])  # fmt: skip
    print_slide_error("The calculation in lecture C lacks a factor of 4. Every layer has four d×d matrices.")


def _print_cost_per_operation(cost: Estimate) -> None:
    (table,) = lecture_tables(cost)
    print_table(["operation", "lecture O(·)", "FLOPs", "lecture IO", "moved", "F/byte"], [
        (row.name, row.order, row.flops, row.io_order, row.unfused_elements, f"{row.intensity:.3g}")
        for row in (*table.rows, table.total)
    ])  # fmt: skip


def _print_encoder_decoder_flops() -> None:
    print_section("An encoder–decoder with source length m and target length n")
    config, rows = preset("transformer-base"), []
    for m, n in ((64, 64), (128, 64), (512, 64), (64, 512)):
        (table,) = lecture_tables(estimate(config, batch_size=1, seq_len=n, source_len=m, mode="forward"))
        sums = [
            sum(row.flops for row in table.rows if row.name.startswith(start) and ("cross" in row.name) is cross)
            for start, cross in (("encoder", False), ("decoder", False), ("decoder", True))
        ]
        rows.append((m, n, *sums))
    print_table(["m", "n", "encoder: m²d + md²", "decoder: n²d + nd²", "cross: nmd + nd² + md²"], rows)
    print_slide_error(ENCODER_DECODER_ERRATUM)


def _print_attention_and_rnn_flops() -> None:
    d = 768
    print_section(f"The cost of one layer of width {d}: self-attention and recurrence")
    names = [layer.name for layer in compare_attention_with_rnn_costs(1, d)]
    lengths = (64, 1024, 8192)
    costs_by_length = [compare_attention_with_rnn_costs(n, d) for n in lengths]
    print_table(["GFLOP", "formula", *(f"n = {n:,}" for n in lengths), "steps"], [
        (name, costs_by_length[0][i].formula, *(row[i].flops / 1e9 for row in costs_by_length),
         "1" if costs_by_length[-1][i].sequential_steps == 1 else "n")
        for i, name in enumerate(names)
    ], digits=2)  # fmt: skip
    config = preset("gpt2")
    assert not isinstance(config, RNNConfig)
    crossover = attention_crossover(config)
    print_text(f"""According to lecture E, the n² term dominates for n > d. However, the exact counts for a gpt2 block
        show that the scores and weighted sums cost as much as all other operations at n = {crossover.executed:,} (6d),
        or at n = {crossover.useful:,} (12d) if only unmasked pairs are counted. The reason is that the other operations
        cost 24·d² FLOPs per token, not d².""")
