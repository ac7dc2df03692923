"""Sentences and their translations, out of files: read, cleaned, and checked for swapped sides."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, zip_longest
from pathlib import Path

from qkv.data.documents import read_lines
from qkv.data.pair_split import Pair
from qkv.data.sources import Progress, Source, one_file, open_source
from qkv.errors import InputError

_LEAST = 12  # characters: below, a ratio of lengths says nothing (`Go!`, `¡Váyase!`)
_SAMPLE = 2000  # pairs whose words tell one language from another


@dataclass(frozen=True, kw_only=True)
class PairFile:
    """Source⇥target a line; or, with a target, one language a file, line by line."""

    source: Path
    target: Path | None = None

    @classmethod
    def beside(cls, source: Path, target_ending: str | None) -> "PairFile":
        """corpus.es, and corpus.en beside it; compression stays: corpus.es.xz, corpus.en.xz."""
        if target_ending is None:
            return cls(source=source)
        ending = Source(str(source)).ending
        stem, _, compression = source.name.rpartition(ending) if ending else (source.name, "", "")
        target = source.with_name(stem + target_ending + compression)
        if not target.is_file():
            raise InputError(f"{target}: there is no such file; it should hold the targets of {source}")
        return cls(source=source, target=target)

    def read(self, progress: Progress | None = None) -> Iterator[Pair]:
        """Every line's pair, in order, white space at its ends taken off; sides may be empty."""
        return self._tabbed(progress) if self.target is None else self._aligned(self.target, progress)

    def _tabbed(self, progress: Progress | None) -> Iterator[Pair]:
        for number, line in enumerate(_lines(self.source, progress), 1):
            source, tab, target = line.partition("\t")
            if line.strip() and not tab:
                raise InputError(f"{self.source}: line {number}: has 1 column; a pair has 2, source⇥target")
            # Further columns, such as Tatoeba's names of authors, are not part of the pair.
            yield source.strip(), target.partition("\t")[0].strip()

    def _aligned(self, target: Path, progress: Progress | None) -> Iterator[Pair]:
        for number, (one, other) in enumerate(zip_longest(_lines(self.source, progress), _lines(target, None)), 1):
            if one is None or other is None:
                short, long = (self.source, target) if one is None else (target, self.source)
                raise InputError(f"{short}: has {number - 1} lines, {long} has more; they must be aligned")
            yield one.strip(), other.strip()


class Cleaner:
    """Passes on what is worth learning from, and counts what is not; sees all files of a corpus one after another."""

    def __init__(self, *, max_ratio: float) -> None:
        self.max_ratio = max_ratio
        self.dropped: Counter[str] = Counter()
        self._seen: set[int] = set()

    def __call__(self, pairs: Iterable[Pair]) -> Iterator[Pair]:
        for pair in pairs:
            if (reason := self._reason(pair)) is None:
                yield pair
            else:
                self.dropped[reason] += 1

    def _reason(self, pair: Pair) -> str | None:
        low, high = sorted(map(len, pair))
        if low == 0:
            return "empty"
        if high > self.max_ratio * max(low, _LEAST):
            return "uneven"
        key = hash(pair)  # two of a million pairs meet in 64 bits once in 10⁷ corpora
        if key in self._seen:
            return "repeated"
        self._seen.add(key)
        return None


def refuse_swapped(first: Sequence[Pair], second: Iterable[Pair], *, name: str) -> None:
    """An error where the second file's sources speak the language of the first one's targets, and the other way."""
    sources, targets = (_words(first, side) for side in (0, 1))
    sample = sample_of(second)
    is_swapped = all(
        _share(words := _words(sample, side), crossed) > 2 * _share(words, own)
        for side, own, crossed in ((0, sources, targets), (1, targets, sources))
    )
    if is_swapped:
        raise InputError(f"{name}: its sources are in the language of the other files' targets: are its sides swapped?")


def sample_of(pairs: Iterable[Pair]) -> list[Pair]:
    """Enough of them to know the two languages by."""
    return list(islice(pairs, _SAMPLE))


def _words(pairs: Iterable[Pair], side: int) -> Counter[str]:
    return Counter(word for pair in pairs for word in pair[side].split())


def _share(words: Counter[str], known: Counter[str]) -> float:
    """How many of the words are among the known ones."""
    return sum(n for word, n in words.items() if word in known) / max(1, words.total())


def _lines(path: Path, progress: Progress | None) -> Iterator[str]:
    source = one_file(path)
    with open_source(source) as (opened, stream):
        for number, line in enumerate(read_lines(source.name, stream)):
            if progress is not None and number % 1024 == 0:
                progress(opened.n_bytes, source.size)
            yield line
