"""What does a language model learn when it may look at the word it is asked for?"""

import torch

from qkv.inspection import new_figure, record
from qkv.lessons import sentences
from qkv.lessons.console import print_matrix, print_section, print_table, print_text
from qkv.lessons.figure_style import BLACK, BLUE, RED, DrawFigure, Figure, label_axes
from qkv.models import GPT

N_STEPS = 200
PROMPT = "the cat sat on the"


def lesson(seed: int) -> DrawFigure:
    models = {
        "with the mask": sentences.tiny_gpt(causal=True, seed=seed),
        "without": sentences.tiny_gpt(causal=False, seed=seed),
    }
    print_section("Two equal models, one text, one switch")
    print_text(f"""The text: sentences such as “{sentences.words(sentences.draw(1)[0])}”, without end. The model: a GPT of
        {sum(p.numel() for p in models["without"].parameters()):,} parameters; causal is on in one, off in the
        other. X = the cat sat on the mat, Y = cat sat on the mat </s>: the word asked for at position t stands in
        the input at t + 1.""")
    losses = {name: sentences.train(model, n_steps=N_STEPS) for name, model in models.items()}
    shares = _compare(models, losses)
    _write(models)
    _look(models["without"])
    return lambda: _draw(losses, shares)


def _compare(models: dict[str, GPT], losses: dict[str, list[float]]) -> dict[str, float]:
    """Prints the losses; gives the share of real sentences among those each model writes."""
    print_section(f"Loss in training, nats a word ({N_STEPS} steps of 64 sentences)")
    steps = [1, 25, 50, 100, N_STEPS]
    print_table(
        ["", *(f"step {step}" for step in steps)],
        [[name, *(loss[s - 1] for s in steps)] for name, loss in losses.items()],
    )
    print_text(f"""Four of the six words asked for are a free choice among four, so no honest model can stay below
        4·ln 4/6 = {sentences.BEST_LOSS:.4f}. One did: it copies.""")
    fresh = sentences.draw(500)
    print_section("The same models at work, where the next word is not there yet")
    shares = {name: sentences.share_of_sentences(sentences.write(model, 500)) for name, model in models.items()}
    rows = []
    for name, model in models.items():
        with torch.no_grad():
            as_trained = sentences.loss_in_training(model, fresh).item()
        rows.append((name, as_trained, sentences.loss_in_use(model, fresh), f"{shares[name]:.1%}"))
    print_table(["", "loss as trained", "loss as used", "real sentences among 500 written"], rows)
    return shares


def _write(models: dict[str, GPT]) -> None:
    print_section("What they write, word by word from “the”")
    written = [[sentences.words(row) for row in sentences.write(model, 5)] for model in models.values()]
    for name, texts in zip(models, written, strict=True):
        print(f"  {name}:")
        for text in texts:
            print(f"    {text}")
        print()
    print_section(f"The next word after “{PROMPT}”")
    ids = torch.tensor([[sentences.VOCABULARY.index(word) for word in PROMPT.split()]])
    for name, model in models.items():
        best = model(ids)[0, -1].softmax(-1).topk(5)
        guesses = [
            f"{sentences.VOCABULARY[i]} {p:.2f}"
            for p, i in zip(best.values.tolist(), best.indices.tolist(), strict=True)
        ]
        print(f"  {name + ':':15}{', '.join(guesses)}")
    print()


def _look(cheat: GPT) -> None:
    print_section("Where the cheat looks: attention weights, the mean over heads and sentences")
    ids = sentences.draw(200)[:, :-1]
    with torch.no_grad(), record(cheat, "blocks.*.attention.weights") as seen:
        cheat(ids)
    layers = [seen[f"blocks.{i}.attention.weights"].mean((0, 1)) for i in range(cheat.config.n_layers)]
    ahead = [weights.diagonal(1).mean().item() for weights in layers]
    layer = ahead.index(max(ahead))
    n = ids.shape[1]
    print_text(f"Layer {layer}. On key t + 1 lies {ahead[layer]:.2f} on average; an even glance would give {1 / n:.2f}.")
    print_matrix(layers[layer], rows=[f"query {i}" for i in range(n)], columns=[f"key {i}" for i in range(n)])


def _draw(losses: dict[str, list[float]], shares: dict[str, float]) -> Figure:
    figure = new_figure(width=10.0, height=4.0)
    curves, bars = figure.subplots(1, 2, width_ratios=[3, 2])
    for (name, loss), colour, style in zip(losses.items(), (BLUE, RED), ("-", "--"), strict=True):
        curves.plot(range(1, N_STEPS + 1), loss, color=colour, linestyle=style, label=name)
    curves.axhline(sentences.BEST_LOSS, color=BLACK, linewidth=0.8, linestyle=":", label="best an honest model can do")
    curves.set_ylim(bottom=0)
    curves.legend(frameon=False)
    label_axes(curves, title="In training the cheat looks better", x="step", y="loss, nats a word")
    drawn = bars.bar(list(shares), [100 * share for share in shares.values()], color=[BLUE, RED])
    bars.bar_label(drawn, fmt="%.0f %%", padding=2)
    bars.set_ylim(0, 112)
    label_axes(bars, title="Writing alone, it is lost", x="", y="real sentences among 500 written, %")
    figure.suptitle("Without a mask a language model copies the next word and learns nothing")
    return figure
