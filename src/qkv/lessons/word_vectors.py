"""Which words lie near each other, and does a word lie at one place?"""

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from qkv.inspection import record
from qkv.inspection.word_map import plot_word_map
from qkv.lessons.console import print_matrix, print_section, print_table, print_text
from qkv.lessons.figure_style import DrawFigure
from qkv.tasks import LanguageModel, load_as
from qkv.tasks.word_vectors import WordVectors, locate_tokens, word_ids, word_vectors

GROUPS = {
    "people": ["mom", "dad", "boy", "girl", "king", "queen"],
    "animals": ["dog", "cat", "bird", "fish"],
    "colours": ["red", "blue", "green", "yellow"],
    "doing": ["ran", "walked", "jumped", "flew"],
    "feelings": ["happy", "sad", "angry", "excited"],
}
WORDS = [word for words in GROUPS.values() for word in words]
COMPARED = ["mom", "dad", "dog", "cat", "red", "blue", "ran"]
WORD = "light"
SENTENCES = {"lamp": "She turned on the light", "lamp too": "He turned off the light", "not heavy": "It was very light"}


def lesson(seed: int) -> DrawFigure:  # noqa: ARG001 - nothing here is left to chance
    task = load_as(LanguageModel, "stories")
    print_section("Static: each token has one row in the model's table")
    print_text(f"""The shipped model `stories` has learnt {task.model.config.vocab_size:,} rows of
        {task.model.config.d_model} numbers. Nobody told it what a dog is; it only guessed next words.""")
    found = word_vectors(task, COMPARED)
    print_text("Cosine (1: same direction, 0: nothing in common):")
    print_matrix(found.cosine, rows=COMPARED, columns=COMPARED, corner="cos")
    print_text("Euclidean distance (0: the same vector):")
    print_matrix(found.euclidean, rows=COMPARED, columns=COMPARED, corner="‖a−b‖")
    _nearest(task)
    _in_context(task)
    everyone = word_vectors(task, WORDS)
    return lambda: plot_word_map(
        everyone.vectors, WORDS, groups=[group for group, words in GROUPS.items() for _ in words],
        title="Words of `stories`: rows of its token table, in the two directions they spread most",
    )  # fmt: skip


def _nearest(task: LanguageModel) -> None:
    print_section("The nearest words of the whole table, by cosine and by Euclid")
    rows = task.model.embedding.token.weight.detach()
    # Whole words alone: a blank before, letters after.
    names = [task.tokenizer.id_to_token(number) for number in range(task.tokenizer.vocab_size)]
    whole = [i for i, name in enumerate(names) if name[0:1] == "Ġ" and name[1:].isalpha() and len(name) > 3]
    among = rows[whole]
    for_each = []
    for word in ("dog", "happy", "blue", "ran", "two"):
        own = rows[word_ids(task.tokenizer, word)].mean(0)
        by_cosine = F.cosine_similarity(own[None], among).topk(5).indices[1:]
        by_distance = (among - own).norm(dim=-1).topk(5, largest=False).indices[1:]
        for_each.append([word, *(" ".join(names[whole[i]][1:] for i in best) for best in (by_cosine, by_distance))])
    print_table(["word", "by cosine", "by distance"], for_each)
    lengths = among.norm(dim=-1)
    print_text(f"""Cosine leaves the length out. Half of these {len(whole):,} words' rows are between
        {lengths.quantile(0.25):.2f} and {lengths.quantile(0.75):.2f} long, so both lists hold much the same words.""")


def _in_context(task: LanguageModel) -> None:
    print_section(f"Contextual: one word, “{WORD}”, in different sentences")
    for name, sentence in SENTENCES.items():
        print(f"  {name:10} {sentence}")
    print()
    places = ["embedding.tokens", *(f"blocks.{layer}.resid_post" for layer in range(task.model.config.n_layers))]
    at = {name: _at_each_place(task, sentence, places) for name, sentence in SENTENCES.items()}
    rows = []
    for number, place in enumerate(places):
        found = WordVectors(
            words=list(at), is_contextual=[True] * len(at), vectors=torch.stack([v[number] for v in at.values()])
        )
        near, far = ((found.cosine[0, other].item(), found.euclidean[0, other].item()) for other in (1, 2))
        rows.append([place, near[0], far[0], near[1], far[1]])
    print_table(["after", "cos: lamps", "lamp, not heavy", "Euclid: lamps", "lamp, not heavy"], rows, digits=3)
    print_text("""In the table the word is one vector, whatever it means: cosine 1, distance 0. Each block mixes in what stands
        before it. The two lamps stay together, the other sense moves away. A GPT sees the words before alone; a BERT
        would see those after it as well.""")


def _at_each_place(task: LanguageModel, sentence: str, places: list[str]) -> Float[Tensor, "place d_model"]:
    start = sentence.rindex(WORD)
    ids, (position,) = locate_tokens(task.tokenizer, sentence, start, start + len(WORD))
    with record(task.model, *places) as trace, torch.no_grad():
        task.model(torch.tensor([ids]))
    return torch.stack([trace[place][0, position] for place in places])
