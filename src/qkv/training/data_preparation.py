"""Prepare texts and sentence pairs: clean and split them, train a tokenizer and write the token stores."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path

from qkv.choices import SpecialTokenStyle
from qkv.config import PairsConfig, Recipe
from qkv.data import TokenSource, TokenStore, is_unfinished, parse_text_sources, prepare_store, read_text_chunks
from qkv.data.documents import ProgressCallback
from qkv.data.pair_files import (
    EmptyUnevenDuplicatePairFilter,
    Pair,
    PairFile,
    check_languages_not_swapped,
    split_pairs,
    take_sample,
)
from qkv.data.pair_store import SIDES, TEXTS_FILE, iterate_pair_texts, write_pair_texts_and_counts
from qkv.data.token_store import INDEX_FILE
from qkv.errors import ConfigError, InputError
from qkv.text import Tokenizer, load_tokenizer, train_tokenizer
from qkv.training.family import ProgressBars

TOKENIZER_CHARACTERS = 100_000_000
"""Maximum number of characters for training a tokenizer. More text slows down training but does not improve the
tokenizer."""


def resolve_data_files(patterns: tuple[str, ...], data_folder: Path) -> list[Path]:
    """Expand file patterns relative to the data folder.

    Raises `InputError` if a pattern matches no file.
    """
    files = []
    for pattern in patterns:
        path = data_folder / pattern
        matches = sorted(path.parent.glob(path.name)) if "*" in pattern else [path]
        if not matches:
            raise InputError(f"{path}: no file matches this path")
        files += matches
    parse_text_sources(files)
    return files


def prepare_text_stores(
    recipe: Recipe,
    folder: Path,
    data_folder: Path,
    *,
    specials: SpecialTokenStyle,
    write_store: Callable[[list[Path], Path, Tokenizer, ProgressCallback], object],
    progress: ProgressBars,
) -> None:
    """Prepare the tokenizer and the training and validation stores.

    Results of an interrupted call are reused.
    """
    files = resolve_data_files(recipe.data.train, data_folder)
    if (folder / "train" / "tokenizer.json").is_file():
        tokenizer = load_tokenizer(folder / "train")
    else:
        bar = progress("training the tokenizer")
        tokenizer = load_or_train_tokenizer(recipe, files, data_folder, specials=specials, progress=bar)
    write_store(files, folder / "train", tokenizer, progress("reading the text"))
    if recipe.data.validation:
        files = resolve_data_files(recipe.data.validation, data_folder)
        write_store(files, folder / "validation", tokenizer, progress("reading validation"))


def load_or_train_tokenizer(
    recipe: Recipe, files: list[Path], relative_to: Path, *, specials: SpecialTokenStyle, progress: ProgressCallback
) -> Tokenizer:
    """Load the tokenizer from the path in the recipe, relative to `relative_to`, or train a tokenizer on the files."""
    settings = recipe.tokenizer
    if settings.path is not None:
        tokenizer = load_tokenizer(relative_to / settings.path)
        n_ids = tokenizer.vocab_size
        if n_ids != settings.vocab_size:
            raise ConfigError(
                f"tokenizer.vocab_size must be {n_ids}, the size of {settings.path}, got {settings.vocab_size}"
            )
        return tokenizer
    texts = read_text_chunks(files, stop_after_characters=TOKENIZER_CHARACTERS, progress=progress)
    return train_tokenizer(
        settings.kind,
        texts,
        vocab_size=settings.vocab_size,
        style=specials,
        lowercase=settings.lowercase,
    )


def prepare_token_store(files: list[Path], folder: Path, tokenizer: Tokenizer, progress: ProgressCallback) -> None:
    """Tokenize the files into a token store. Finished stores and shards are reused."""
    if is_unfinished(folder) or not (folder / INDEX_FILE).exists():
        prepare_store(files, folder, tokenizer=tokenizer, progress=progress)


def open_token_splits(recipe: Recipe, stores: Path) -> tuple[TokenStore, TokenSource, TokenSource | None]:
    """Open the training store and return it along with the training and validation splits.

    Depending on the recipe, the validation split uses its own store, the end of the training store, or nothing.
    """
    store = TokenStore.open(stores / "train")
    if recipe.data.validation:
        return store, store, TokenStore.open(stores / "validation")
    if recipe.data.validation_fraction is None:
        return store, store, None
    boundary = round(store.n_tokens * (1 - recipe.data.validation_fraction))
    if not 0 < boundary < store.n_tokens:
        raise InputError(
            f"{', '.join(recipe.data.train)}: {store.n_tokens} tokens are not enough to hold out "
            f"{recipe.data.validation_fraction:.0%} for validation"
        )
    return store, store.slice(0, boundary), store.slice(boundary, store.n_tokens)


def get_pairs_config(recipe: Recipe) -> PairsConfig:
    assert recipe.pairs is not None  # guaranteed by the validation of Recipe
    return recipe.pairs


def write_clean_train_and_validation_pairs(
    recipe: Recipe, folder: Path, data_folder: Path, progress: ProgressCallback
) -> None:
    """Clean the sentence pairs and write them to the training and validation stores.

    The validation store is written first, so both stores are complete if the training store exists.
    """
    settings = get_pairs_config(recipe)
    train = _find_pair_files_by_pattern(recipe.data.train, data_folder, settings)
    validation = _find_pair_files_by_pattern(recipe.data.validation, data_folder, settings)
    if unknown := [name for name in settings.repeat if name not in train]:
        raise ConfigError(
            f"pairs.repeat contains the key '{unknown[0]}', which is not in data.train: {', '.join(train)}"
        )
    first = take_sample(next(iter(train.values()))[0].read())
    for file in chain.from_iterable((*train.values(), *validation.values())):
        check_languages_not_swapped(first, file.read(), name=str(file.source))
    cleaner = EmptyUnevenDuplicatePairFilter(max_length_ratio=settings.max_length_ratio)
    if validation:
        # Clean the validation pairs first so that the same cleaner then drops their duplicates from the training data.
        write_pair_texts_and_counts(
            _read_clean_pairs(validation, cleaner, progress), folder / "validation", dropped=cleaner.dropped
        )
        cleaner.dropped.clear()
    pairs = _read_clean_pairs(train, cleaner, progress)
    if recipe.data.validation_fraction is not None:
        pairs = _write_validation_and_return_train(
            pairs, recipe.data.validation_fraction, folder, seed=recipe.training.seed
        )
    write_pair_texts_and_counts(pairs, folder / "train", dropped=cleaner.dropped)


def _find_pair_files_by_pattern(
    patterns: tuple[str, ...], data_folder: Path, settings: PairsConfig
) -> dict[str, list[PairFile]]:
    return {
        pattern: [
            PairFile.from_source(path, settings.target_suffix) for path in resolve_data_files((pattern,), data_folder)
        ]
        for pattern in patterns
    }


def _read_clean_pairs(
    files: Mapping[str, list[PairFile]], cleaner: EmptyUnevenDuplicatePairFilter, progress: ProgressCallback
) -> dict[str, Iterable[Pair]]:
    """Read and clean the files lazily, one after the other."""

    def read_files(pair_files: list[PairFile]) -> Iterator[Pair]:
        return chain.from_iterable(cleaner(file.read(progress)) for file in pair_files)

    return {name: read_files(pair_files) for name, pair_files in files.items()}


def _write_validation_and_return_train(
    files: Mapping[str, Iterable[Pair]], fraction: float, folder: Path, *, seed: int
) -> dict[str, list[Pair]]:
    """Hold out a fraction of the pairs for validation and return the remaining pairs for training.

    The pairs are split by connected components so that no validation sentence occurs in the training data.
    """
    pairs_by_file = {name: list(pairs) for name, pairs in files.items()}
    all_pairs = list(chain.from_iterable(pairs_by_file.values()))
    n_held_out = round(fraction * len(all_pairs))
    if not 0 < n_held_out < len(all_pairs):
        raise InputError(f"{len(all_pairs)} pairs are not enough to hold out {fraction:.0%} for validation")
    split = split_pairs(all_pairs, n_dev=n_held_out, n_test=0, seed=seed)
    write_pair_texts_and_counts({"held out": [all_pairs[i] for i in split.dev]}, folder / "validation", dropped={})
    train_rows, remaining, first = set(split.train.tolist()), {}, 0
    for name, pairs in pairs_by_file.items():
        remaining[name] = [pair for i, pair in enumerate(pairs, first) if i in train_rows]
        first += len(pairs)
    return remaining


def load_or_train_pair_tokenizers(
    recipe: Recipe, folder: Path, relative_to: Path, progress: ProgressCallback
) -> dict[str, Tokenizer]:
    """Prepare the source and target tokenizers.

    Each tokenizer is taken from an interrupted earlier call, loaded from the path in the recipe (relative to
    `relative_to`), or trained on the pairs.
    """
    settings = get_pairs_config(recipe)
    is_joint = settings.source_vocab_size is None
    sizes = {"source": settings.source_vocab_size or 0, "target": recipe.tokenizer.vocab_size}
    tokenizers: dict[str, Tokenizer] = {}
    for side in SIDES:
        tokenizer_folder = folder / ("source" if is_joint else side)
        if (tokenizer_folder / "tokenizer.json").is_file():
            tokenizers[side] = load_tokenizer(tokenizer_folder)
        elif is_joint and tokenizers:
            tokenizers[side] = tokenizers["source"]
        elif recipe.tokenizer.path is not None and (is_joint or side == "target"):
            tokenizers[side] = load_tokenizer(relative_to / recipe.tokenizer.path)
        else:
            size = sizes["target" if is_joint else side]
            tokenizers[side] = _train_pair_tokenizer(recipe, folder, None if is_joint else side, size=size)
    n_ids = tokenizers["target"].vocab_size
    if recipe.tokenizer.path is not None and n_ids != recipe.tokenizer.vocab_size:
        raise ConfigError(
            f"tokenizer.vocab_size must be {n_ids}, the size of {recipe.tokenizer.path}, got "
            f"{recipe.tokenizer.vocab_size}"
        )
    progress(1, 1)
    return tokenizers


def _train_pair_tokenizer(recipe: Recipe, folder: Path, side: str | None, *, size: int) -> Tokenizer:
    settings = recipe.tokenizer
    # For a very large corpus, every n-th pair is sufficient.
    step = 1 + (folder / TEXTS_FILE).stat().st_size // (2 * TOKENIZER_CHARACTERS)
    texts = iterate_pair_texts(folder, side=side, repeat=get_pairs_config(recipe).repeat, step=step)
    return train_tokenizer(
        settings.kind,
        texts,
        vocab_size=size,
        style=SpecialTokenStyle.SEQ2SEQ,
        lowercase=settings.lowercase,
        add_prefix_space=True,
    )
