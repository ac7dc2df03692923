"""How does a language model write: token by token, its probabilities revised with each?"""

import torch
from torch import Tensor

from qkv.config import SamplingConfig
from qkv.generation import generate, generate_steps, process_logits
from qkv.inspection import new_figure
from qkv.lessons.console import max_abs_difference, print_section, print_table, print_text
from qkv.lessons.figure_style import BLUE, ORANGE, DrawFigure, Figure, label_axes
from qkv.tasks import LanguageModel, load_as

PROMPT = "The cat sat"
N_NEW = 8
N_SHOWN = 6
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
    print_section(f"“{PROMPT}” goes on: the likeliest token (argmax), fed back")
    print_text(f"""The model is `stories`: {sum(p.numel() for p in task.model.parameters()):,} parameters, trained on short
        stories. At each step every one of its {task.model.config.vocab_size:,} tokens gets a probability; the
        chosen one becomes part of the input, and all of them are revised. · is a blank.""")
    ids, chances = _write(task)
    start = len(ids) - N_NEW
    print_table(
        ["step", "…text so far", "chosen", "p", "the next likeliest"],
        [
            (i + 1, task.tokenizer.decode(ids[: start + i])[-22:], _word(task, ids[start + i]),
             float(row[ids[start + i]]), _next_best(task, row))
            for i, row in enumerate(chances)
        ],
        digits=3,
    )  # fmt: skip
    _what_is_revised(task, ids)
    _settings(task, chances)
    _until_the_end(task, seed)
    return lambda: _draw(task, ids, chances)


def _write(task: LanguageModel) -> tuple[list[int], Tensor]:
    """The text's ids, and the probabilities that each new one was chosen from."""
    greedy = generate_steps(task.model, [task.encode(PROMPT)], max_new=N_NEW, sampling=SamplingConfig(temperature=0))
    rows = [(step.sequence, step.logits.softmax(-1)) for step in greedy]
    return rows[-1][0].ids, torch.cat([row for _, row in rows])


def _word(task: LanguageModel, number: int) -> str:
    token = task.tokenizer.id_to_token(number)
    is_control = number in task.tokenizer.special_ids
    return token if is_control else task.tokenizer.decode([number]).replace(" ", "·").replace("\n", "⏎")


def _next_best(task: LanguageModel, row: Tensor) -> str:
    best = row.topk(4)
    pairs = zip(best.values.tolist()[1:], best.indices.tolist()[1:], strict=True)
    return ", ".join(f"{_word(task, i)} {p:.3f}" for p, i in pairs)


def _what_is_revised(task: LanguageModel, ids: list[int]) -> None:
    print_section("What a new token revises, and what not")
    with torch.no_grad():
        before, after = (task.model(torch.tensor([ids[:n]]))[0].softmax(-1) for n in (len(ids) - 1, len(ids)))
    print_text(f"""E: “the probabilities get revised upon adding a new token to the input”. Those of the next token do: between
        the last two steps they move by up to {max_abs_difference(after[-1], before[-1])}. Those at the earlier positions do
        not: they differ by at most {max_abs_difference(after[:-1], before)}, which is rounding if anything. The mask hides
        the new token from them; so their keys and values can be kept (`qkv lesson kv-cache`).""")


def _settings(task: LanguageModel, chances: Tensor) -> None:
    at = int((chances * chances.log()).nansum(-1).argmin())  # of greatest entropy: the most open choice
    row = chances[at]
    print_section(f"How settings revise the probabilities of one step ({at + 1}) before a token is drawn")
    revised = {name: process_logits(row.log()[None], config).softmax(-1)[0] for name, config in SETTINGS.items()}
    print_table(
        ["token", *SETTINGS],
        [(_word(task, i), *(float(one[i]) for one in revised.values())) for i in row.topk(N_SHOWN).indices.tolist()],
        digits=3,
    )
    open_ones = [int((one > 0).sum()) for one in revised.values()]
    print_table(["", *SETTINGS], [("still possible", *open_ones)])
    print_text("""A temperature below 1 sharpens, above 1 flattens. Filters take the unlikely away, and what they leave is
        scaled to 1 again. Temperature 0 would leave the likeliest alone: argmax.""")


def _until_the_end(task: LanguageModel, seed: int) -> None:
    print_section("Sampled, until the end token or the limit of 60")
    sampling = SamplingConfig(temperature=1.0, seed=seed)
    prompts = [task.encode(PROMPT)] * 3 + [task.encode("The end. They lived happily ever")]
    for text in generate(task.model, prompts, max_new=60, sampling=sampling, stop_ids=task.stop_ids):
        said = " ".join(task.tokenizer.decode(text.ids).split())
        print_text(f"{said} [{text.finish_reason.value if text.finish_reason else ''}, {len(text.new_ids)} new tokens]")


def _draw(task: LanguageModel, ids: list[int], chances: Tensor) -> Figure:
    figure = new_figure(width=11.0, height=5.2)
    start = len(ids) - N_NEW
    for i, axes in enumerate(figure.subplots(2, N_NEW // 2, sharex=True).flat):
        best = chances[i].topk(N_SHOWN)
        numbers = best.indices.tolist()
        colours = [ORANGE if number == ids[start + i] else BLUE for number in numbers]
        bars = axes.barh(range(N_SHOWN), best.values.tolist(), color=colours)
        axes.bar_label(bars, fmt="%.2f", padding=2, fontsize="x-small")
        axes.set_yticks(range(N_SHOWN), [_word(task, number) for number in numbers])
        axes.invert_yaxis()
        axes.set_xlim(0, 1.2)
        axes.set_xticks([0, 0.5, 1])
        label_axes(axes, title=f"{i + 1}: …{task.tokenizer.decode(ids[: start + i])[-18:]}", x="", y="")
    figure.supxlabel("probability of the next token (orange: the one chosen and fed back)", fontsize="medium")
    figure.suptitle("The probabilities are revised with each token added")
    return figure
