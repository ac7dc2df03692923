"""A recipe's pairs made ready: cleaned, some held out, a vocabulary or two trained on them."""

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path

from qkv.choices import SpecialStyle
from qkv.config import PairsConfig, Recipe
from qkv.data.pair_split import Pair, split_pairs
from qkv.data.pair_store import SIDES, TEXTS_FILE, pair_texts, write_pairs
from qkv.data.pairs import Cleaner, PairFile, refuse_swapped, sample_of
from qkv.data.sources import Progress
from qkv.errors import ConfigError, InputError
from qkv.text import Tokenizer, load_tokenizer, train_tokenizer
from qkv.training.texts import TOKENIZER_CHARACTERS, resolve


def pairs_of(recipe: Recipe) -> PairsConfig:
    assert recipe.pairs is not None  # the recipe sees to it
    return recipe.pairs


def clean_pairs(recipe: Recipe, folder: Path, data_folder: Path, progress: Progress) -> None:
    """Write the pairs of validation, then those of training: whoever finds the second finds both."""
    settings = pairs_of(recipe)
    train = _files(recipe.data.train, data_folder, settings)
    validation = _files(recipe.data.validation, data_folder, settings)
    if unknown := [name for name in settings.repeat if name not in train]:
        raise ConfigError(f"pairs.repeat names '{unknown[0]}', which is not among data.train: {', '.join(train)}")
    first = sample_of(next(iter(train.values()))[0].read())
    for file in chain.from_iterable((*train.values(), *validation.values())):
        refuse_swapped(first, file.read(), name=str(file.source))
    cleaner = Cleaner(max_ratio=settings.max_ratio)
    if validation:
        # First, and by the same cleaner: what is validated on is then left out of training.
        write_pairs(_read(validation, cleaner, progress), folder / "validation", dropped=cleaner.dropped)
        cleaner.dropped.clear()
    pairs = _read(train, cleaner, progress)
    if recipe.data.validation_share is not None:
        pairs = _hold_out(pairs, recipe.data.validation_share, folder, seed=recipe.training.seed)
    write_pairs(pairs, folder / "train", dropped=cleaner.dropped)


def _files(patterns: tuple[str, ...], data_folder: Path, settings: PairsConfig) -> dict[str, list[PairFile]]:
    return {
        pattern: [PairFile.beside(path, settings.target_ending) for path in resolve((pattern,), data_folder)]
        for pattern in patterns
    }


def _read(files: Mapping[str, list[PairFile]], cleaner: Cleaner, progress: Progress) -> dict[str, Iterable[Pair]]:
    """Read when they are asked for, one file after another."""

    def read(many: list[PairFile]) -> Iterator[Pair]:
        return chain.from_iterable(cleaner(file.read(progress)) for file in many)

    return {name: read(many) for name, many in files.items()}


def _hold_out(files: Mapping[str, Iterable[Pair]], share: float, folder: Path, *, seed: int) -> dict[str, list[Pair]]:
    """Keep a share apart for validation, no sentence of which is in training; what is left for training."""
    read = {name: list(pairs) for name, pairs in files.items()}
    everything = list(chain.from_iterable(read.values()))
    n_held_out = round(share * len(everything))
    if not 0 < n_held_out < len(everything):
        raise InputError(f"{len(everything)} pairs are too few to keep {share:.0%} of them apart")
    split = split_pairs(everything, n_dev=n_held_out, n_test=0, seed=seed)
    write_pairs({"held out": [everything[i] for i in split.dev]}, folder / "validation", dropped={})
    kept, left, first = set(split.train.tolist()), {}, 0
    for name, pairs in read.items():
        left[name] = [pair for i, pair in enumerate(pairs, first) if i in kept]
        first += len(pairs)
    return left


def pair_tokenizers(recipe: Recipe, folder: Path, data_folder: Path, progress: Progress) -> dict[str, Tokenizer]:
    """Of each side: as a killed call left it, as the recipe names it, or trained on the pairs."""
    settings = pairs_of(recipe)
    is_joint = settings.source_vocab_size is None
    sizes = {"source": settings.source_vocab_size or 0, "target": recipe.tokenizer.vocab_size}
    made: dict[str, Tokenizer] = {}
    for side in SIDES:
        kept = folder / ("source" if is_joint else side)
        if (kept / "tokenizer.json").is_file():
            made[side] = load_tokenizer(kept)
        elif is_joint and made:
            made[side] = made["source"]
        elif recipe.tokenizer.path is not None and (is_joint or side == "target"):
            made[side] = load_tokenizer(data_folder / recipe.tokenizer.path)
        else:
            size = sizes["target" if is_joint else side]
            made[side] = _trained(recipe, folder, None if is_joint else side, size=size)
    n_ids = made["target"].vocab_size
    if recipe.tokenizer.path is not None and n_ids != recipe.tokenizer.vocab_size:
        raise ConfigError(
            f"tokenizer.vocab_size={recipe.tokenizer.vocab_size}, but {recipe.tokenizer.path} has {n_ids}"
        )
    progress(1, 1)
    return made


def _trained(recipe: Recipe, folder: Path, side: str | None, *, size: int) -> Tokenizer:
    settings = recipe.tokenizer
    # Of a very large corpus every n-th pair will do.
    step = 1 + (folder / TEXTS_FILE).stat().st_size // (2 * TOKENIZER_CHARACTERS)
    texts = pair_texts(folder, side=side, repeat=pairs_of(recipe).repeat, step=step)
    return train_tokenizer(
        settings.kind, texts, vocab_size=size, style=SpecialStyle.SEQ2SEQ, lowercase=settings.lowercase,
        spaced=True,
    )  # fmt: skip
