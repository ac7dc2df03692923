"""Files that somebody made with care: each is refused in one line that names the file and what is wrong in it."""

import json
import lzma
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.hostile.bases import BASES, header_of, with_header
from tests.hostile.opening import open_all

WEIGHTS, CONFIG, TOKENIZER = "x/model.safetensors", "x/config.json", "x/tokenizer.json"
INDEX = "x/model.safetensors.index.json"
SHARDS, OURS = "llama in two shards", "gpt, ours"


def tensor(**changes) -> Callable[[Path], None]:
    """The first tensor of the header says something else."""

    def spoil(folder: Path) -> None:
        header, body = header_of(folder / WEIGHTS)
        name = next(name for name in header if name != "__metadata__")
        header[name] = header[name] | changes
        (folder / WEIGHTS).write_bytes(with_header(header, body))

    return spoil


def first_bytes(data: bytes) -> Callable[[Path], None]:
    return lambda folder: (folder / WEIGHTS).write_bytes(data + (folder / WEIGHTS).read_bytes()[len(data) :])


def values(number: float) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        data = (folder / WEIGHTS).read_bytes()
        (folder / WEIGHTS).write_bytes(data[:-4] + struct.pack("<f", number))

    return spoil


def setting(file: str, **changes) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        settings = json.loads((folder / file).read_text())
        (folder / file).write_text(json.dumps(settings | changes))

    return spoil


def content(file: str, data: bytes) -> Callable[[Path], None]:
    return lambda folder: (folder / file).write_bytes(data)


def shard_named(name: str) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        index = json.loads((folder / INDEX).read_text())
        index["weight_map"][next(iter(index["weight_map"]))] = name
        (folder / INDEX).write_text(json.dumps(index))

    return spoil


def linked(file: str, target: str) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        (folder / file).unlink()
        (folder / file).symlink_to(target)

    return spoil


def pickled(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    (folder / "x" / "pytorch_model.bin").write_bytes(b"\x80\x04cos\nsystem\n(S'touch owned'\ntR.")


def deep(file: str, n: int = 200_000) -> Callable[[Path], None]:
    return content(file, b'{"a":' * n + b"1" + b"}" * n)


NASTY: dict[str, tuple[str, Callable[[Path], None], tuple[str, ...]]] = {
    "a header of 2^63 bytes": (OURS, first_bytes(struct.pack("<Q", 2**63)), (WEIGHTS,)),
    "a header longer than the file": (OURS, first_bytes(struct.pack("<Q", 2**40)), (WEIGHTS,)),
    "a header of no bytes": (OURS, first_bytes(bytes(8)), (WEIGHTS,)),
    "overlapping offsets": (OURS, tensor(data_offsets=[4, 8]), (WEIGHTS,)),
    "offsets backwards": (OURS, tensor(data_offsets=[2**40, 0]), (WEIGHTS,)),
    "a shape of 2^60": (OURS, tensor(shape=[2**30, 2**30]), (WEIGHTS,)),
    "a shape that overflows": (OURS, tensor(shape=[2**63, 2**63]), (WEIGHTS,)),
    "a shape below zero": (OURS, tensor(shape=[-1, -7]), (WEIGHTS,)),
    "numbers of a kind that is none": (OURS, tensor(dtype="F99"), (WEIGHTS,)),
    "an empty file of weights": (OURS, content(WEIGHTS, b""), (WEIGHTS,)),
    "a weight that is NaN": (OURS, values(float("nan")), (": x", "not finite")),
    "a weight that is infinite": (OURS, values(float("inf")), (": x", "not finite")),
    "weights that are a pickle": (OURS, pickled, ("pytorch_model.bin", "pickled")),
    "weights that are a link to a device": (OURS, linked(WEIGHTS, "/dev/zero"), (": x",)),
    "weights that are a link to themselves": (OURS, linked(WEIGHTS, "model.safetensors"), (": x",)),
    "10^15 rows": (OURS, setting(CONFIG, vocab_size=10**15), (": x", "parameters")),
    "10^15 layers": (OURS, setting(CONFIG, n_layers=10**15), (": x", "layers")),
    "10^15 positions": ("bert, ours", setting(CONFIG, context_length=10**15), (": x", "parameters")),
    "a width of 10^9": (OURS, setting(CONFIG, d_model=10**9, n_heads=5, n_kv_heads=1), (": x",)),
    "a number of 400 digits": (OURS, setting(CONFIG, vocab_size=10**400), (": x",)),
    "a window below zero": (OURS, setting(CONFIG, sliding_window=-3), (": x", "sliding_window")),
    "no heads": (OURS, setting(CONFIG, n_heads=0), (": x", "n_heads")),
    "NaN in the config": (OURS, setting(CONFIG, dropout=float("nan")), (": x", "dropout")),
    "a config of lists in lists": (OURS, content(CONFIG, b"[" * 10**6), (CONFIG,)),
    "a config of tables in tables": (OURS, deep(CONFIG), (CONFIG,)),
    "a config that is no UTF-8": (OURS, content(CONFIG, b'{"family": "\xff"}'), (CONFIG,)),
    "a config that is a list": (OURS, content(CONFIG, b"[]"), (CONFIG,)),
    "an unknown family": (OURS, setting(CONFIG, family="../gpt"), (": x", "family")),
    "an unknown setting": (OURS, setting(CONFIG, n_layerz=2), (": x", "n_layerz")),
    "rows of an rnn, 10^15": ("rnn, ours", setting(CONFIG, vocab_size=10**15), (": x", "parameters")),
    "layers of an rnn, 10^12": ("rnn, ours", setting(CONFIG, n_encoder_layers=10**12), (": x", "layers")),
    "rows of a bert, 10^15": ("bert, ours", setting(CONFIG, vocab_size=10**15), (": x", "parameters")),
    "layers of a translator, 10^12": ("seq2seq, ours", setting(CONFIG, n_decoder_layers=10**12), (": x", "layers")),
    "a shard above the folder": (SHARDS, shard_named("../../etc/passwd"), (INDEX, "outside")),
    "a shard with a whole path": (SHARDS, shard_named("/etc/passwd"), (INDEX, "outside")),
    "a shard that is the folder": (SHARDS, shard_named(".."), (": x",)),
    "a shard with NUL in its name": (SHARDS, shard_named("a\0b"), (": x",)),
    "a shard that is not there": (SHARDS, shard_named("model-00003-of-00002.safetensors"), ("model-00003",)),
    "an index of numbers": (SHARDS, content(INDEX, b'{"weight_map": {"a": 1}}'), (INDEX, "weight_map")),
    "a tokenizer of tables in tables": (OURS, deep(TOKENIZER), (TOKENIZER,)),
    "a tokenizer without a model": (OURS, setting(TOKENIZER, model=None), (TOKENIZER, "model")),
    "an id of 2^63": (OURS, setting(TOKENIZER, added_tokens=[{"id": 2**63, "content": "a"}]), (TOKENIZER,)),
    "a path out of a folder of sentences": (
        "bert, sentence-transformers",
        content("x/modules.json", b'[{"type": "a.Transformer", "path": "../.."}, {"type": "a.Pooling", "path": "/"}]'),
        ("modules.json", "outside"),
    ),
    "a table of 20 MB of NUL in 3 KB": (
        "labelled tsv.xz",
        content("x.tsv.xz", lzma.compress(b"text\tlabel\n" + bytes(20 * 2**20))),
        ("x.tsv.xz",),
    ),
    "a table that is half": ("labelled tsv.xz", content("x.tsv.xz", lzma.compress(b"a" * 999)[:-20]), ("x.tsv.xz",)),
    "one line of 10^7 characters": ("labelled tsv", content("x.tsv", b"a" * 10**7), ("x.tsv",)),
    "a GGUF of 2^63 tensors": (
        "gguf, llama", content("x.gguf", b"GGUF" + struct.pack("<IQQ", 3, 2**63 - 1, 2**63 - 1)), ("x.gguf",)
    ),
    "a recipe of tables in tables": ("recipe, gpt", content("x.toml", b"a=" + b"[" * 10**5), ("x.toml",)),
    "a manifest of tables in tables": (
        "run, checkpoint", content("x/checkpoints/step-00000003/manifest.json", b'{"files":' * 10**5), (": x",)
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """Of all of them, opened one after the other."""
    folder, made, places = tmp_path_factory.mktemp("nasty"), {}, []
    for i, (base, spoil, _) in enumerate(NASTY.values()):
        if base not in made:
            made[base] = tmp_path_factory.mktemp("base")
            BASES[base].make(made[base])
        place = folder / str(i)
        shutil.copytree(made[base], place)
        spoil(place)
        places.append((place, BASES[base].command))
    return dict(zip(NASTY, open_all(places), strict=True))


@pytest.mark.parametrize("name", NASTY)
def test_it_is_refused_in_one_line(name, outcomes):
    assert outcomes[name].fault(NASTY[name][2]) is None
    assert not outcomes[name].out
