"""Lesson: generating text token by token, and how the probabilities change with each token."""

import torch
from torch import Tensor

from qkv.config import SamplingConfig
from qkv.generation import generate, generate_tokens, process_logits
from qkv.inspection import new_figure
from qkv.lessons.console import max_abs_difference, print_section, print_table, print_text
from qkv.lessons.figure_style import BLUE, ORANGE, DrawFigure, Figure, style_and_label_axes
from qkv.tasks import LanguageModel, load_as

GENERATION_PROMPT = "The cat sat"
N_NEW = 8
N_CANDIDATES = 6
SETTINGS = {
    "model": SamplingConfig(),
    "temp. 0.5": SamplingConfig(temperature=0.5),
    "temp. 2": SamplingConfig(temperature=2.0),
    "top-k 3": SamplingConfig(top_k=3),
    "top-p 0.8": SamplingConfig(top_p=0.8),
    "min-p 0.1": SamplingConfig(min_p=0.1),
    "typical 0.8": SamplingConfig(typical_p=0.8),
}


def lesson(seed: int) -> DrawFigure:
    task = load_as(LanguageModel, "stories")
    print_section(f"Greedy generation after “{GENERATION_PROMPT}”: the most likely token is appended at each step")
    print_text(f"""The model is `stories`, which has {sum(p.numel() for p in task.model.parameters()):,} parameters and
        was trained on short stories. At each step, the model assigns a probability to each of its
        {task.model.config.vocab_size:,} tokens. The selected token is appended to the input, and the model computes new
        probabilities. The symbol · represents a space.""")
    greedy_steps = [
        (step.sequence, step.logits.softmax(-1))
        for step in generate_tokens(
            task.model, [task.tokenize(GENERATION_PROMPT)], max_new=N_NEW, sampling=SamplingConfig(temperature=0)
        )
    ]
    ids = greedy_steps[-1][0].ids
    probabilities = torch.cat([row for _, row in greedy_steps])
    start = len(ids) - N_NEW
    print_table(
        ["step", "…text so far", "selected", "p", "next most likely"],
        [
            (
                i + 1,
                task.tokenizer.decode(ids[: start + i])[-22:],
                _display_token(task, ids[start + i]),
                float(row[ids[start + i]]),
                _format_runners_up(task, row),
            )
            for i, row in enumerate(probabilities)
        ],
        digits=3,
    )
    _print_probability_changes_by_new_token(task, ids)
    _print_sampling_effects_at_max_entropy(task, probabilities)
    _print_samples(task, seed)
    return lambda: _draw_top_token_probabilities(task, ids, probabilities)


def _display_token(task: LanguageModel, number: int) -> str:
    token = task.tokenizer.id_to_token(number)
    is_control = number in task.tokenizer.special_ids
    return token if is_control else task.tokenizer.decode([number]).replace(" ", "·").replace("\n", "⏎")


def _format_runners_up(task: LanguageModel, row: Tensor) -> str:
    best = row.topk(4)
    pairs = zip(best.values.tolist()[1:], best.indices.tolist()[1:], strict=True)
    return ", ".join(f"{_display_token(task, i)} {p:.3f}" for p, i in pairs)


def _print_probability_changes_by_new_token(task: LanguageModel, ids: list[int]) -> None:
    print_section("Which probabilities change when a token is appended")
    with torch.no_grad():
        before, after = (task.model(torch.tensor([ids[:n]]))[0].softmax(-1) for n in (len(ids) - 1, len(ids)))
    print_text(f"""According to lecture E, “the probabilities get revised upon adding a new token to the input”. This is
        true for the probabilities of the next token: between the last two steps, they change by up to
        {max_abs_difference(after[-1], before[-1])}. The probabilities at earlier positions do not change: they differ
        by at most {max_abs_difference(after[:-1], before)}, which is within rounding error. The causal mask hides the
        new token from earlier positions, so the keys and values of those positions can be cached (see `qkv lesson
        kv-cache`).""")


def _print_sampling_effects_at_max_entropy(task: LanguageModel, probabilities: Tensor) -> None:
    step = int((probabilities * probabilities.log()).nansum(-1).argmin())  # the step with the highest entropy
    row = probabilities[step]
    print_section(f"How sampling settings change the probabilities of step {step + 1}")
    processed = {name: process_logits(row.log()[None], config).softmax(-1)[0] for name, config in SETTINGS.items()}
    print_table(
        ["token", *SETTINGS],
        [
            (_display_token(task, i), *(float(distribution[i]) for distribution in processed.values()))
            for i in row.topk(N_CANDIDATES).indices.tolist()
        ],
        digits=3,
    )
    n_possible = [int((distribution > 0).sum()) for distribution in processed.values()]
    print_table(["", *SETTINGS], [("possible tokens", *n_possible)])
    print_text("""A temperature below 1 makes the distribution sharper, and a temperature above 1 makes it flatter.
        The filters (top-k, top-p, min-p and typical) remove tokens and renormalize the remaining probabilities.
        Temperature 0 selects the most likely token (argmax).""")


def _print_samples(task: LanguageModel, seed: int) -> None:
    print_section("Samples of at most 60 new tokens")
    sampling = SamplingConfig(temperature=1.0, seed=seed)
    prompts = [task.tokenize(GENERATION_PROMPT)] * 3 + [task.tokenize("The end. They lived happily ever")]
    for sequence in generate(task.model, prompts, max_new=60, sampling=sampling, stop_ids=task.stop_ids):
        text = " ".join(task.tokenizer.decode(sequence.ids).split())
        print_text(f"""{text} [{sequence.finish_reason.value if sequence.finish_reason else ""},
            {len(sequence.new_ids)} new tokens]""")


def _draw_top_token_probabilities(task: LanguageModel, ids: list[int], probabilities: Tensor) -> Figure:
    figure = new_figure(width=11.0, height=5.2)
    start = len(ids) - N_NEW
    for i, axes in enumerate(figure.subplots(2, N_NEW // 2, sharex=True).flat):
        best = probabilities[i].topk(N_CANDIDATES)
        numbers = best.indices.tolist()
        colors = [ORANGE if number == ids[start + i] else BLUE for number in numbers]
        bars = axes.barh(range(N_CANDIDATES), best.values.tolist(), color=colors)
        axes.bar_label(bars, fmt="%.2f", padding=2, fontsize="x-small")
        axes.set_yticks(range(N_CANDIDATES), [_display_token(task, number) for number in numbers])
        axes.invert_yaxis()
        axes.set_xlim(0, 1.2)
        axes.set_xticks([0, 0.5, 1])
        style_and_label_axes(axes, title=f"{i + 1}: …{task.tokenizer.decode(ids[: start + i])[-18:]}", x="", y="")
    figure.supxlabel("probability of the next token (orange: the selected token)", fontsize="medium")
    figure.suptitle("The probabilities change with each new token")
    return figure
