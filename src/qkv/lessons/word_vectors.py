"""Lesson: similarity of static and contextual word vectors."""

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from qkv.inspection import record
from qkv.inspection.word_map import plot_word_map
from qkv.lessons.console import print_matrix, print_section, print_table, print_text
from qkv.lessons.figure_style import DrawFigure
from qkv.tasks import LanguageModel, load_as
from qkv.tasks.word_vectors import WordVectors, encode_and_locate_tokens, word_ids, word_vectors

GROUPS = {
    "people": ["mom", "dad", "boy", "girl", "king", "queen"],
    "animals": ["dog", "cat", "bird", "fish"],
    "colors": ["red", "blue", "green", "yellow"],
    "verbs": ["ran", "walked", "jumped", "flew"],
    "feelings": ["happy", "sad", "angry", "excited"],
}
WORDS = [word for words in GROUPS.values() for word in words]
COMPARED = ["mom", "dad", "dog", "cat", "red", "blue", "ran"]
WORD = "light"
SENTENCES = {"lamp": "She turned on the light", "lamp too": "He turned off the light", "not heavy": "It was very light"}


def lesson(seed: int) -> DrawFigure:  # noqa: ARG001 - nothing is random
    task = load_as(LanguageModel, "stories")
    print_section("Static vectors: each token has one row in the embedding table")
    print_text(f"""The shipped model `stories` learned an embedding table of {task.model.config.vocab_size:,} rows and
        {task.model.config.d_model} columns just by predicting the next token.""")
    vectors = word_vectors(task, COMPARED)
    print_text("Cosine similarity (1: the same direction, 0: orthogonal vectors):")
    print_matrix(vectors.cosine, rows=COMPARED, columns=COMPARED, corner="cos")
    print_text("Euclidean distance (0: the same vector):")
    print_matrix(vectors.euclidean, rows=COMPARED, columns=COMPARED, corner="‖a−b‖")
    _print_nearest_words_by_cosine_and_distance(task)
    _print_contextual_similarities_by_layer(task)
    all_vectors = word_vectors(task, WORDS)
    return lambda: plot_word_map(
        all_vectors.vectors, WORDS, groups=[group for group, words in GROUPS.items() for _ in words],
        title="Words of `stories`: rows of the embedding table, first two principal components",
    )  # fmt: skip


def _print_nearest_words_by_cosine_and_distance(task: LanguageModel) -> None:
    print_section("The nearest words by cosine similarity and by Euclidean distance")
    rows = task.model.embedding.token.weight.detach()
    # Only keep complete words, which are tokens that consist of a space followed by letters.
    names = [task.tokenizer.id_to_token(number) for number in range(task.tokenizer.vocab_size)]
    word_rows = [i for i, name in enumerate(names) if name[0:1] == "Ġ" and name[1:].isalpha() and len(name) > 3]
    candidates = rows[word_rows]
    table_rows = []
    for word in ("dog", "happy", "blue", "ran", "two"):
        vector = rows[word_ids(task.tokenizer, word)].mean(0)
        by_cosine = F.cosine_similarity(vector[None], candidates).topk(5).indices[1:]
        by_distance = (candidates - vector).norm(dim=-1).topk(5, largest=False).indices[1:]
        table_rows.append(
            [word, *(" ".join(names[word_rows[i]][1:] for i in best) for best in (by_cosine, by_distance))]
        )
    print_table(["word", "by cosine", "by distance"], table_rows)
    lengths = candidates.norm(dim=-1)
    print_text(f"""Cosine similarity ignores the lengths of the vectors. Half of the {len(word_rows):,} word vectors
        have similar lengths, between {lengths.quantile(0.25):.2f} and {lengths.quantile(0.75):.2f}, so cosine
        similarity and Euclidean distance mostly find the same words.""")


def _print_contextual_similarities_by_layer(task: LanguageModel) -> None:
    print_section(f"Contextual vectors: the word “{WORD}” in different sentences")
    for name, sentence in SENTENCES.items():
        print(f"  {name:10} {sentence}")
    print()
    taps = ["embedding.tokens", *(f"blocks.{layer}.resid_post" for layer in range(task.model.config.n_layers))]
    vectors_by_sense = {name: _states_of_studied_word(task, sentence, taps) for name, sentence in SENTENCES.items()}
    rows = []
    for layer, tap in enumerate(taps):
        vectors = WordVectors(
            words=list(vectors_by_sense),
            is_contextual=[True] * len(vectors_by_sense),
            vectors=torch.stack([states[layer] for states in vectors_by_sense.values()]),
        )
        near, far = ((vectors.cosine[0, other].item(), vectors.euclidean[0, other].item()) for other in (1, 2))
        rows.append([tap, near[0], far[0], near[1], far[1]])
    print_text("The table compares the vector in the sentence “lamp” with the vectors in the other two sentences.")
    print_table(["tap", "cos: lamp too", "cos: not heavy", "distance: lamp too", "distance: not heavy"], rows, digits=3)
    print_text(f"""In the embedding table, “{WORD}” has the same vector for every meaning, so the cosine similarity is 1
        and the distance is 0. Each block adds information from the preceding words. The two vectors for the meaning
        “lamp” stay close to each other, and the vector for the meaning “not heavy” moves away from them. A GPT only
        uses the preceding words; a BERT would also use the following words.""")


def _states_of_studied_word(task: LanguageModel, sentence: str, taps: list[str]) -> Float[Tensor, "tap d_model"]:
    start = sentence.rindex(WORD)
    ids, (position,) = encode_and_locate_tokens(task.tokenizer, sentence, start, start + len(WORD))
    with record(task.model, *taps) as cache, torch.no_grad():
        task.model(torch.tensor([ids]))
    return torch.stack([cache[tap][0, position] for tap in taps])
