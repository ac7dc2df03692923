"""Read translation pairs from files, filter them, and detect swapped languages."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, zip_longest
from pathlib import Path

from qkv.data.documents import read_utf8_lines
from qkv.data.pair_split import Pair
from qkv.data.text_sources import ProgressCallback, TextSource, open_raw_and_decompressed, parse_single_file_source
from qkv.errors import InputError

_MIN_RATIO_LENGTH = 12  # characters; length ratios of shorter sentences are meaningless (`Go!`, `¡Váyase!`)
_SAMPLE_SIZE = 2000  # number of pairs whose words are sufficient to identify the languages


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
