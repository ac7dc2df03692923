"""A recipe's texts made ready: files found, a tokenizer trained or loaded, ids in a token store."""

from collections.abc import Callable
from pathlib import Path

from qkv.choices import SpecialStyle
from qkv.config import Recipe
from qkv.data import TokenSource, TokenStore, find_sources, is_unfinished, prepare_store, read_texts
from qkv.data.sources import Progress
from qkv.data.store import INDEX_FILE
from qkv.errors import ConfigError, InputError
from qkv.text import Tokenizer, load_tokenizer, train_tokenizer
from qkv.training.family import Bars

TOKENIZER_CHARACTERS = 100_000_000
"""More text than this makes a tokenizer slower, not better."""


def resolve(patterns: tuple[str, ...], data_folder: Path) -> list[Path]:
    """Files that the patterns mean, relative to the data folder; a pattern that means none is an error."""
    found = []
    for pattern in patterns:
        path = data_folder / pattern
        matches = sorted(path.parent.glob(path.name)) if "*" in pattern else [path]
        if not matches:
            raise InputError(f"{path}: no file matches")
        found += matches
    find_sources(found)
    return found


def prepare_texts(
    recipe: Recipe,
    folder: Path,
    data_folder: Path,
    *,
    specials: SpecialStyle,
    make: Callable[[list[Path], Path, Tokenizer, Progress], object],
    progress: Bars,
) -> None:
    """A tokenizer, then a store for training and one for validation files; what a killed call finished is kept."""
    files = resolve(recipe.data.train, data_folder)
    if (folder / "train" / "tokenizer.json").is_file():
        tokenizer = load_tokenizer(folder / "train")
    else:
        bar = progress("training the tokenizer")
        tokenizer = recipe_tokenizer(recipe, files, data_folder, specials=specials, progress=bar)
    make(files, folder / "train", tokenizer, progress("reading the text"))
    if recipe.data.validation:
        files = resolve(recipe.data.validation, data_folder)
        make(files, folder / "validation", tokenizer, progress("reading validation"))


def recipe_tokenizer(
    recipe: Recipe, files: list[Path], data_folder: Path, *, specials: SpecialStyle, progress: Progress
) -> Tokenizer:
    """The one the recipe names, or one trained on the files."""
    settings = recipe.tokenizer
    if settings.path is not None:
        tokenizer = load_tokenizer(data_folder / settings.path)
        n_ids = tokenizer.vocab_size
        if n_ids != settings.vocab_size:
            raise ConfigError(f"tokenizer.vocab_size={settings.vocab_size}, but {settings.path} has {n_ids}")
        return tokenizer
    texts = read_texts(files, max_characters=TOKENIZER_CHARACTERS, progress=progress)
    return train_tokenizer(
        settings.kind,
        texts,
        vocab_size=settings.vocab_size,
        style=specials,
        lowercase=settings.lowercase,
    )


def make_store(files: list[Path], folder: Path, tokenizer: Tokenizer, progress: Progress) -> None:
    """What is finished is kept, whole stores and shards alike."""
    if is_unfinished(folder) or not (folder / INDEX_FILE).exists():
        prepare_store(files, folder, tokenizer=tokenizer, progress=progress)


def open_parts(recipe: Recipe, stores: Path) -> tuple[TokenStore, TokenSource, TokenSource | None]:
    """The training store, and what of it or beside it is for training and for validation."""
    store = TokenStore.open(stores / "train")
    if recipe.data.validation:
        return store, store, TokenStore.open(stores / "validation")
    if recipe.data.validation_share is None:
        return store, store, None
    cut = round(store.n_tokens * (1 - recipe.data.validation_share))
    if not 0 < cut < store.n_tokens:
        raise InputError(
            f"{', '.join(recipe.data.train)}: {store.n_tokens} tokens are too few to keep "
            f"{recipe.data.validation_share:.0%} of them apart"
        )
    return store, store.part(0, cut), store.part(cut, store.n_tokens)
