"""Lesson: a language model without a causal mask copies the next word instead of predicting it."""

import torch

from qkv.inspection import new_figure, record
from qkv.lessons import sentences
from qkv.lessons.console import print_matrix, print_section, print_table, print_text
from qkv.lessons.figure_style import BLACK, BLUE, RED, DrawFigure, Figure, style_and_label_axes
from qkv.models import GPT

N_STEPS = 200
PROMPT = "the cat sat on the"


def lesson(seed: int) -> DrawFigure:
    models = {
        "causal mask": sentences.tiny_gpt(causal=True, seed=seed),
        "no mask": sentences.tiny_gpt(causal=False, seed=seed),
    }
    print_section("Two models that differ only in the causal mask")
    print_text(f"""The training data consists of random sentences such as
        “{sentences.ids_to_text(sentences.sample_sentences(1)[0])}”. Both models are GPTs with
        {sum(p.numel() for p in models["no mask"].parameters()):,} parameters; one has a causal mask, and the other does
        not. For the input X = the cat sat on the mat, the target is Y = cat sat on the mat </s>. The target at
        position t is therefore the input at position t + 1.""")
    losses = {name: sentences.train_gpt_on_sentences(model, n_steps=N_STEPS) for name, model in models.items()}
    valid_fractions = _print_losses_and_valid_fractions(models, losses)
    _print_sentences_and_predictions(models)
    _print_attention_to_next_token(models["no mask"])
    return lambda: _draw_comparison(losses, valid_fractions)


def _print_losses_and_valid_fractions(models: dict[str, GPT], losses: dict[str, list[float]]) -> dict[str, float]:
    """Print the losses and return the fraction of valid sentences that each model generates."""
    print_section(f"Training loss in nats per word ({N_STEPS} steps of 64 sentences)")
    steps = [1, 25, 50, 100, N_STEPS]
    print_table(
        ["", *(f"step {step}" for step in steps)],
        [[name, *(loss[s - 1] for s in steps)] for name, loss in losses.items()],
    )
    print_text(f"""Each of four of the six target words is chosen at random from four words. A model that does not see
        the target words therefore cannot reach a loss below 4·ln 4/6 = {sentences.BEST_LOSS:.4f}. The model without a
        mask reaches a lower loss because it copies the next word from its input.""")
    new_sentences = sentences.sample_sentences(500)
    print_section("The same models during generation, when the next word does not exist yet")
    valid_fractions = {
        name: sentences.valid_sentence_fraction(sentences.generate_sentences(model, 500))
        for name, model in models.items()
    }
    rows = []
    for name, model in models.items():
        with torch.no_grad():
            training_loss = sentences.loss_in_training(model, new_sentences).item()
        generation_loss = sentences.loss_in_generation(model, new_sentences)
        rows.append((name, training_loss, generation_loss, f"{valid_fractions[name]:.1%}"))
    print_table(["", "training loss", "loss in generation", "valid sentences among 500"], rows)
    return valid_fractions


def _print_sentences_and_predictions(models: dict[str, GPT]) -> None:
    print_section("Generated sentences")
    generated = [
        [sentences.ids_to_text(row) for row in sentences.generate_sentences(model, 5)] for model in models.values()
    ]
    for name, texts in zip(models, generated, strict=True):
        print(f"  {name}:")
        for text in texts:
            print(f"    {text}")
        print()
    print_section(f"Predictions after “{PROMPT}”")
    ids = torch.tensor([[sentences.SENTENCE_VOCABULARY.index(word) for word in PROMPT.split()]])
    for name, model in models.items():
        best = model(ids)[0, -1].softmax(-1).topk(5)
        predictions = [
            f"{sentences.SENTENCE_VOCABULARY[i]} {p:.2f}"
            for p, i in zip(best.values.tolist(), best.indices.tolist(), strict=True)
        ]
        print(f"  {name + ':':15}{', '.join(predictions)}")
    print()


def _print_attention_to_next_token(model: GPT) -> None:
    print_section("Attention weights of the model without a mask, averaged over heads and sentences")
    ids = sentences.sample_sentences(200)[:, :-1]
    with torch.no_grad(), record(model, "blocks.*.attention.weights") as cache:
        model(ids)
    layers = [cache[f"blocks.{i}.attention.weights"].mean((0, 1)) for i in range(model.config.n_layers)]
    next_token_weights = [weights.diagonal(1).mean().item() for weights in layers]
    layer = next_token_weights.index(max(next_token_weights))
    n = ids.shape[1]
    print_text(f"""In layer {layer}, the mean weight of query t on key t + 1 is {next_token_weights[layer]:.2f}. With
        uniform attention, this weight would be {1 / n:.2f}.""")
    print_matrix(layers[layer], rows=[f"query {i}" for i in range(n)], columns=[f"key {i}" for i in range(n)])


def _draw_comparison(losses: dict[str, list[float]], valid_fractions: dict[str, float]) -> Figure:
    figure = new_figure(width=10.0, height=4.0)
    curves, bars = figure.subplots(1, 2, width_ratios=[3, 2])
    for (name, loss), color, style in zip(losses.items(), (BLUE, RED), ("-", "--"), strict=True):
        curves.plot(range(1, N_STEPS + 1), loss, color=color, linestyle=style, label=name)
    curves.axhline(
        sentences.BEST_LOSS,
        color=BLACK,
        linewidth=0.8,
        linestyle=":",
        label="lowest possible loss without seeing the target",
    )
    curves.set_ylim(bottom=0)
    curves.legend(frameon=False)
    style_and_label_axes(curves, title="The training loss is lower without a mask", x="step", y="loss, nats per word")
    drawn_bars = bars.bar(
        list(valid_fractions), [100 * fraction for fraction in valid_fractions.values()], color=[BLUE, RED]
    )
    bars.bar_label(drawn_bars, fmt="%.0f%%", padding=2)
    bars.set_ylim(0, 112)
    style_and_label_axes(bars, title="Generation fails without a mask", x="", y="valid sentences (% of 500)")
    figure.suptitle("Without a causal mask, a language model copies the next word")
    return figure
