"""Split translation pairs into training, dev and test sets without shared sentences.

Collections such as Tatoeba contain many translations of the same sentence. In a random split, one side of many test
pairs also occurs in the training set. Therefore, the pairs are split by connected component of the graph whose nodes
are sentences and whose edges are pairs.
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
    """Indices of the pairs in each set, in their original order."""

    train: Indices
    dev: Indices
    test: Indices


def normalize_sentence(text: str) -> str:
    """Remove case and punctuation so that `Come on!` and `come on` become equal."""
    return _NON_LETTERS.sub(" ", text.casefold()).strip() or text.strip()


def split_pairs(
    pairs: Sequence[Pair], *, n_dev: int, n_test: int, seed: int = 0, by_component: bool = True
) -> PairSplit:  # fmt: skip
    """Split pairs into a dev set of `n_dev` pairs, a test set of `n_test` pairs and a training set with the rest.

    If the components are too large for an exact split, the dev and test sets may be smaller than requested, but they
    have at least half of the requested size. With `by_component=False`, the split is random. `leakage` measures the
    resulting overlap.
    """
    n = len(pairs)
    if n_dev + n_test >= n:
        raise InputError(
            f"{n} pairs are too few for {n_dev} dev pairs, {n_test} test pairs and at least 1 training pair"
        )
    group = connected_components(pairs) if by_component else np.arange(n)
    sizes = np.bincount(group)
    part = np.zeros(len(sizes), np.int8)
    requested = {1: n_dev, 2: n_test}
    remaining = dict(requested)
    # The largest component is always used for training because it may contain most of the pairs.
    largest = int(sizes.argmax())
    for number in Permutation(len(sizes), seed)(np.arange(len(sizes))):
        for part_id, n_left in remaining.items():
            if sizes[number] <= n_left and (number != largest or not by_component):
                part[number] = part_id
                remaining[part_id] = n_left - int(sizes[number])
                break
        if not any(remaining.values()):
            break
    if any(2 * remaining[part_id] > requested[part_id] for part_id in requested):
        raise InputError(
            f"cannot split {n} pairs into {n_dev} dev and {n_test} test pairs: the pairs form "
            f"{len(sizes)} groups without common sentences, and the largest group has {sizes[largest]} pairs"
        )
    pair_parts = part[group]
    train, dev, test = (np.flatnonzero(pair_parts == part_id) for part_id in (0, 1, 2))
    return PairSplit(train=train, dev=dev, test=test)


def connected_components(pairs: Sequence[Pair]) -> Indices:
    """Return the connected component to which each pair belongs. Pairs that share a sentence are connected."""
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


def leakage(pairs: Sequence[Pair], test: Indices, train: Indices) -> float:
    """Return the fraction of test pairs that share a (normalized) sentence with a training pair."""
    training_sentences = {normalize_sentence(text) for index in train for text in pairs[index]}
    n_leaked = sum(any(normalize_sentence(text) in training_sentences for text in pairs[index]) for index in test)
    return n_leaked / max(1, len(test))
