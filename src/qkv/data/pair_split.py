"""Which pairs are for training and which for testing, so that no sentence is in both.

A collection such as Tatoeba holds many translations of one sentence. Divided pair by pair, a sentence of the test has
often been seen in training, in one language or the other. So pairs that share a sentence, be it by a chain of others,
stay together: they are one component of the graph whose nodes are sentences and whose edges are pairs.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from qkv.data.order import Permutation
from qkv.errors import InputError

Pair = tuple[str, str]
Numbers = NDArray[np.int64]

_NO_LETTER = re.compile(r"[\W_]+")


@dataclass(frozen=True, kw_only=True)
class Split:
    """Which pairs, by number, in the order they came."""

    train: Numbers
    dev: Numbers
    test: Numbers


def fold(text: str) -> str:
    """Without capitals and punctuation: `Come on!` and `come on` are one sentence."""
    return _NO_LETTER.sub(" ", text.casefold()).strip() or text.strip()


def split_pairs(
    pairs: Sequence[Pair], *, n_dev: int, n_test: int, seed: int = 0, by_component: bool = True
) -> Split:  # fmt: skip
    """Parts of so many pairs; of fewer, but at least half as many, where the components are too large to fit exactly.

    `by_component` False divides pair by pair, as most people do; `leak` says what that costs.
    """
    n = len(pairs)
    if n_dev + n_test >= n:
        raise InputError(f"{n} pairs cannot give {n_dev} for dev and {n_test} for test, and some for training")
    group = components(pairs) if by_component else np.arange(n)
    sizes = np.bincount(group)
    part = np.zeros(len(sizes), np.int8)
    asked = {1: n_dev, 2: n_test}
    room = dict(asked)
    # The largest component stays in training, where it may be most of everything.
    largest = int(sizes.argmax())
    for number in Permutation(len(sizes), seed)(np.arange(len(sizes))):
        for which, left in room.items():
            if sizes[number] <= left and (number != largest or not by_component):
                part[number] = which
                room[which] = left - int(sizes[number])
                break
        if not any(room.values()):
            break
    if any(2 * room[which] > asked[which] for which in asked):
        raise InputError(
            f"{n} pairs fall into {len(sizes)} components, the largest of {sizes[largest]} pairs: not even half of "
            f"{n_dev} for dev and {n_test} for test can be had of them"
        )
    of_pair = part[group]
    train, dev, test = (np.flatnonzero(of_pair == which) for which in (0, 1, 2))
    return Split(train=train, dev=dev, test=test)


def components(pairs: Sequence[Pair]) -> Numbers:
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
            node = sentences.setdefault(fold(text), len(parent))
            if node == len(parent):
                parent.append(node)
            nodes.append(node)
        parent[root(nodes[0])] = root(nodes[1])
        ends.append(nodes[0])
    return np.unique([root(node) for node in ends], return_inverse=True)[1].astype(np.int64)


def leak(pairs: Sequence[Pair], asked: Numbers, among: Numbers) -> float:
    """Share of the pairs `asked` with a sentence, folded, that also stands in a pair of `among`."""
    seen = {fold(text) for number in among for text in pairs[number]}
    n_leaked = sum(any(fold(text) in seen for text in pairs[number]) for number in asked)
    return n_leaked / max(1, len(asked))
