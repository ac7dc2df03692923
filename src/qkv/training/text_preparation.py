"""Prepare text data: resolve files, train or load the tokenizer, and write token stores."""

from collections.abc import Callable
from pathlib import Path

from qkv.choices import SpecialTokenStyle
from qkv.config import Recipe
from qkv.data import TokenSource, TokenStore, is_unfinished, parse_text_sources, prepare_store, read_text_chunks
from qkv.data.text_sources import ProgressCallback
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
