"""Which pairs are for training and which for testing, so that no sentence is in both.

A collection such as Tatoeba holds many translations of one sentence. Divided pair by pair, a sentence of the test has
often been seen in training, in one language or the other. So pairs that share a sentence, be it by a chain of others,
stay together: they are one component of the graph whose nodes are sentences and whose edges are pairs.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from qkv.data.keyed_random import Indices, Permutation
from qkv.errors import InputError

Pair = tuple[str, str]

_NON_LETTERS = re.compile(r"[\W_]+")


@dataclass(frozen=True, kw_only=True)
class PairSplit:
    """Which pairs, by number, in the order they came."""

    train: Indices
    dev: Indices
    test: Indices


def normalize_sentence(text: str) -> str:
    """Without capitals and punctuation: `Come on!` and `come on` are one sentence."""
    return _NON_LETTERS.sub(" ", text.casefold()).strip() or text.strip()


def split_pairs(
    pairs: Sequence[Pair], *, n_dev: int, n_test: int, seed: int = 0, by_component: bool = True
) -> PairSplit:  # fmt: skip
    """Parts of so many pairs; of fewer, but at least half as many, where the components are too large to fit exactly.

    `by_component` False divides pair by pair, as most people do; `leakage` says what that costs.
    """
    n = len(pairs)
    if n_dev + n_test >= n:
        raise InputError(f"{n} pairs cannot give {n_dev} for dev and {n_test} for test, and some for training")
    group = connected_components(pairs) if by_component else np.arange(n)
    sizes = np.bincount(group)
    part = np.zeros(len(sizes), np.int8)
    asked = {1: n_dev, 2: n_test}
    remaining = dict(asked)
    # The largest component stays in training, where it may be most of everything.
    largest = int(sizes.argmax())
    for number in Permutation(len(sizes), seed)(np.arange(len(sizes))):
        for part_id, n_left in remaining.items():
            if sizes[number] <= n_left and (number != largest or not by_component):
                part[number] = part_id
                remaining[part_id] = n_left - int(sizes[number])
                break
        if not any(remaining.values()):
            break
    if any(2 * remaining[part_id] > asked[part_id] for part_id in asked):
        raise InputError(
            f"{n} pairs fall into {len(sizes)} components, the largest of {sizes[largest]} pairs: not even half of "
            f"{n_dev} for dev and {n_test} for test can be had of them"
        )
    pair_parts = part[group]
    train, dev, test = (np.flatnonzero(pair_parts == part_id) for part_id in (0, 1, 2))
    return PairSplit(train=train, dev=dev, test=test)


def connected_components(pairs: Sequence[Pair]) -> Indices:
    """For each pair the number of its component."""
    sentences: dict[str, int] = {}
    parent: list[int] = []

    def root(node: int) -> int:
        while parent[node] != node:
            parent[node] = parent[parent[node]]
            node = parent[node]
        return node

    ends = []
    for pair in pairs:
        nodes = []
        for text in pair:
            node = sentences.setdefault(normalize_sentence(text), len(parent))
            if node == len(parent):
                parent.append(node)
            nodes.append(node)
        parent[root(nodes[0])] = root(nodes[1])
        ends.append(nodes[0])
    return np.unique([root(node) for node in ends], return_inverse=True)[1].astype(np.int64)


def leakage(pairs: Sequence[Pair], asked: Indices, train: Indices) -> float:
    """Share of the pairs `asked` with a sentence, folded, that also stands in a pair of `train`."""
    training_sentences = {normalize_sentence(text) for number in train for text in pairs[number]}
    n_leaked = sum(any(normalize_sentence(text) in training_sentences for text in pairs[number]) for number in asked)
    return n_leaked / max(1, len(asked))
