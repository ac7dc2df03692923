"""Read translation pairs from files, filter them, detect swapped languages, and split them without shared sentences.

Collections such as Tatoeba contain many translations of the same sentence. In a random split, one side of many test
pairs also occurs in the training set. Therefore, the pairs are split into training, dev and test sets by connected
component of the graph whose nodes are sentences and whose edges are pairs.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, zip_longest
from pathlib import Path

import numpy as np

from qkv.data.documents import (
    ProgressCallback,
    TextSource,
    open_raw_and_decompressed,
    parse_single_file_source,
    read_utf8_lines,
)
from qkv.data.sampler import Indices, Permutation
from qkv.errors import InputError

_MIN_RATIO_LENGTH = 12  # characters; length ratios of shorter sentences are meaningless (`Go!`, `¡Váyase!`)
_SAMPLE_SIZE = 2000  # number of pairs whose words are sufficient to identify the languages


Pair = tuple[str, str]
_NON_LETTERS = re.compile(r"[\W_]+")


@dataclass(frozen=True, kw_only=True)
class PairFile:
    """A file of tab-separated pairs, or two line-aligned files of source and target sentences."""

    source: Path
    target: Path | None = None

    @classmethod
    def from_source(cls, source: Path, target_suffix: str | None) -> "PairFile":
        """Find the target file for a source file, for example corpus.en.xz for corpus.es.xz."""
        if target_suffix is None:
            return cls(source=source)
        suffix = TextSource(str(source)).file_type
        stem, _, compression = source.name.rpartition(suffix) if suffix else (source.name, "", "")
        target = source.with_name(stem + target_suffix + compression)
        if not target.is_file():
            raise InputError(f"{target}: file not found; expected the target sentences of {source}")
        return cls(source=source, target=target)

    def read(self, progress: ProgressCallback | None = None) -> Iterator[Pair]:
        """Yield one pair per line, without surrounding whitespace. Either side may be empty."""
        return self._read_tab_separated(progress) if self.target is None else self._read_aligned(self.target, progress)

    def _read_tab_separated(self, progress: ProgressCallback | None) -> Iterator[Pair]:
        for number, line in enumerate(_read_lines_with_progress(self.source, progress), 1):
            source, tab, target = line.partition("\t")
            if line.strip() and not tab:
                raise InputError(
                    f"{self.source}: line {number}: expected 2 tab-separated columns (source, target), got 1"
                )
            # Ignore further columns, such as the attribution in Tatoeba files.
            yield source.strip(), target.partition("\t")[0].strip()

    def _read_aligned(self, target: Path, progress: ProgressCallback | None) -> Iterator[Pair]:
        for number, (source_line, target_line) in enumerate(
            zip_longest(_read_lines_with_progress(self.source, progress), _read_lines_with_progress(target, None)), 1
        ):
            if source_line is None or target_line is None:
                short, long = (self.source, target) if source_line is None else (target, self.source)
                raise InputError(
                    f"{short}: has only {number - 1} lines, but {long} has more; "
                    "both files must have the same number of lines"
                )
            yield source_line.strip(), target_line.strip()


class EmptyUnevenDuplicatePairFilter:
    """Filter that drops empty, uneven and duplicate pairs, and counts the dropped pairs by reason."""

    def __init__(self, *, max_length_ratio: float) -> None:
        self.max_length_ratio = max_length_ratio
        self.dropped: Counter[str] = Counter()
        self._pair_hashes: set[int] = set()

    def __call__(self, pairs: Iterable[Pair]) -> Iterator[Pair]:
        for pair in pairs:
            if (reason := self._rejection_reason(pair)) is None:
                self._pair_hashes.add(hash(pair))
                yield pair
            else:
                self.dropped[reason] += 1

    def _rejection_reason(self, pair: Pair) -> str | None:
        low, high = sorted(map(len, pair))
        if low == 0:
            return "empty"
        if high > self.max_length_ratio * max(low, _MIN_RATIO_LENGTH):
            return "uneven"
        # Among a million pairs, the probability of a collision between 64-bit hashes is about 10⁻⁷.
        return "repeated" if hash(pair) in self._pair_hashes else None


def check_languages_not_swapped(reference: Sequence[Pair], pairs: Iterable[Pair], *, name: str) -> None:
    """Raise `InputError` if the source and target languages in `pairs` are swapped relative to `reference`."""
    sources, targets = (_count_words(reference, side) for side in (0, 1))
    sample = take_sample(pairs)
    is_swapped = all(
        _shared_fraction(words := _count_words(sample, side), other_side) > 2 * _shared_fraction(words, same_side)
        for side, same_side, other_side in ((0, sources, targets), (1, targets, sources))
    )
    if is_swapped:
        raise InputError(f"{name}: the source and target languages appear to be swapped relative to the other files")


def take_sample(pairs: Iterable[Pair]) -> list[Pair]:
    """Take enough pairs to identify the two languages."""
    return list(islice(pairs, _SAMPLE_SIZE))


def _count_words(pairs: Iterable[Pair], side: int) -> Counter[str]:
    return Counter(word for pair in pairs for word in pair[side].split())


def _shared_fraction(words: Counter[str], vocabulary: Counter[str]) -> float:
    """Return the fraction of words that occur in the vocabulary."""
    return sum(n for word, n in words.items() if word in vocabulary) / max(1, words.total())


def _read_lines_with_progress(path: Path, progress: ProgressCallback | None) -> Iterator[str]:
    source = parse_single_file_source(path)
    with open_raw_and_decompressed(source) as (opened, stream):
        for number, line in enumerate(read_utf8_lines(source.name, stream)):
            if progress is not None and number % 1024 == 0:
                progress(opened.n_bytes, source.size)
            yield line


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
