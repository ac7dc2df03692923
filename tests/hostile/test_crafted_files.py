"""Maliciously crafted files raise a one-line error with the file name and the reason."""

import json
import lzma
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.hostile.command_runner import run_commands
from tests.hostile.valid_files import VALID_FILES, build_safetensors, read_safetensors_header

WEIGHTS, CONFIG, TOKENIZER = "x/model.safetensors", "x/config.json", "x/tokenizer.json"
INDEX = "x/model.safetensors.index.json"
SHARDS, NATIVE_GPT = "llama in two shards", "gpt, native"


def change_tensor(**changes) -> Callable[[Path], None]:
    """Change the entry of the first tensor in the header."""

    def modify(folder: Path) -> None:
        header, body = read_safetensors_header(folder / WEIGHTS)
        name = next(name for name in header if name != "__metadata__")
        header[name] = header[name] | changes
        (folder / WEIGHTS).write_bytes(build_safetensors(header, body))

    return modify


def replace_first_bytes(data: bytes) -> Callable[[Path], None]:
    return lambda folder: (folder / WEIGHTS).write_bytes(data + (folder / WEIGHTS).read_bytes()[len(data) :])


def replace_last_weight(number: float) -> Callable[[Path], None]:
    def modify(folder: Path) -> None:
        data = (folder / WEIGHTS).read_bytes()
        (folder / WEIGHTS).write_bytes(data[:-4] + struct.pack("<f", number))

    return modify


def change_json(file: str, **changes) -> Callable[[Path], None]:
    def modify(folder: Path) -> None:
        settings = json.loads((folder / file).read_text())
        (folder / file).write_text(json.dumps(settings | changes))

    return modify


def replace_content(file: str, data: bytes) -> Callable[[Path], None]:
    return lambda folder: (folder / file).write_bytes(data)


def rename_shard(name: str) -> Callable[[Path], None]:
    def modify(folder: Path) -> None:
        index = json.loads((folder / INDEX).read_text())
        index["weight_map"][next(iter(index["weight_map"]))] = name
        (folder / INDEX).write_text(json.dumps(index))

    return modify


def replace_with_link(file: str, target: str) -> Callable[[Path], None]:
    def modify(folder: Path) -> None:
        (folder / file).unlink()
        (folder / file).symlink_to(target)

    return modify


def replace_with_pickle(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    (folder / "x" / "pytorch_model.bin").write_bytes(b"\x80\x04cos\nsystem\n(S'touch owned'\ntR.")


def nest_deeply(file: str, n: int = 200_000) -> Callable[[Path], None]:
    return replace_content(file, b'{"a":' * n + b"1" + b"}" * n)


CRAFTED_FILES: dict[str, tuple[str, Callable[[Path], None], tuple[str, ...]]] = {
    "a header of 2^63 bytes": (NATIVE_GPT, replace_first_bytes(struct.pack("<Q", 2**63)), (WEIGHTS,)),
    "a header longer than the file": (NATIVE_GPT, replace_first_bytes(struct.pack("<Q", 2**40)), (WEIGHTS,)),
    "a header of no bytes": (NATIVE_GPT, replace_first_bytes(bytes(8)), (WEIGHTS,)),
    "overlapping offsets": (NATIVE_GPT, change_tensor(data_offsets=[4, 8]), (WEIGHTS,)),
    "offsets backwards": (NATIVE_GPT, change_tensor(data_offsets=[2**40, 0]), (WEIGHTS,)),
    "a shape of 2^60": (NATIVE_GPT, change_tensor(shape=[2**30, 2**30]), (WEIGHTS,)),
    "a shape that overflows": (NATIVE_GPT, change_tensor(shape=[2**63, 2**63]), (WEIGHTS,)),
    "a shape below zero": (NATIVE_GPT, change_tensor(shape=[-1, -7]), (WEIGHTS,)),
    "an unknown dtype": (NATIVE_GPT, change_tensor(dtype="F99"), (WEIGHTS,)),
    "an empty file of weights": (NATIVE_GPT, replace_content(WEIGHTS, b""), (WEIGHTS,)),
    "a weight that is NaN": (NATIVE_GPT, replace_last_weight(float("nan")), (": x", "not finite")),
    "a weight that is infinite": (NATIVE_GPT, replace_last_weight(float("inf")), (": x", "not finite")),
    "weights that are a pickle": (NATIVE_GPT, replace_with_pickle, ("pytorch_model.bin", "pickled")),
    "weights that are a link to a device": (NATIVE_GPT, replace_with_link(WEIGHTS, "/dev/zero"), (": x",)),
    "weights that are a link to themselves": (NATIVE_GPT, replace_with_link(WEIGHTS, "model.safetensors"), (": x",)),
    "10^15 rows": (NATIVE_GPT, change_json(CONFIG, vocab_size=10**15), (": x", "parameters")),
    "10^15 layers": (NATIVE_GPT, change_json(CONFIG, n_layers=10**15), (": x", "layers")),
    "10^15 positions": ("bert, native", change_json(CONFIG, context_length=10**15), (": x", "parameters")),
    "a width of 10^9": (NATIVE_GPT, change_json(CONFIG, d_model=10**9, n_heads=5, n_kv_heads=1), (": x",)),
    "a number of 400 digits": (NATIVE_GPT, change_json(CONFIG, vocab_size=10**400), (": x",)),
    "a window below zero": (NATIVE_GPT, change_json(CONFIG, sliding_window=-3), (": x", "sliding_window")),
    "no heads": (NATIVE_GPT, change_json(CONFIG, n_heads=0), (": x", "n_heads")),
    "NaN in the config": (NATIVE_GPT, change_json(CONFIG, dropout=float("nan")), (": x", "dropout")),
    "a config of nested lists": (NATIVE_GPT, replace_content(CONFIG, b"[" * 10**6), (CONFIG,)),
    "a config of nested objects": (NATIVE_GPT, nest_deeply(CONFIG), (CONFIG,)),
    "a config that is not UTF-8": (NATIVE_GPT, replace_content(CONFIG, b'{"family": "\xff"}'), (CONFIG,)),
    "a config that is a list": (NATIVE_GPT, replace_content(CONFIG, b"[]"), (CONFIG,)),
    "an unknown family": (NATIVE_GPT, change_json(CONFIG, family="../gpt"), (": x", "family")),
    "an unknown setting": (NATIVE_GPT, change_json(CONFIG, n_layerz=2), (": x", "n_layerz")),
    "rows of an rnn, 10^15": ("rnn, native", change_json(CONFIG, vocab_size=10**15), (": x", "parameters")),
    "layers of an rnn, 10^12": ("rnn, native", change_json(CONFIG, n_encoder_layers=10**12), (": x", "layers")),
    "rows of a bert, 10^15": ("bert, native", change_json(CONFIG, vocab_size=10**15), (": x", "parameters")),
    "layers of a translator, 10^12": (
        "seq2seq, native",
        change_json(CONFIG, n_decoder_layers=10**12),
        (": x", "layers"),
    ),
    "a shard above the folder": (SHARDS, rename_shard("../../etc/passwd"), (INDEX, "outside")),
    "a shard with an absolute path": (SHARDS, rename_shard("/etc/passwd"), (INDEX, "outside")),
    "a shard that is the folder": (SHARDS, rename_shard(".."), (": x",)),
    "a shard with NUL in its name": (SHARDS, rename_shard("a\0b"), (": x",)),
    "a shard that is not there": (SHARDS, rename_shard("model-00003-of-00002.safetensors"), ("model-00003",)),
    "an index of numbers": (SHARDS, replace_content(INDEX, b'{"weight_map": {"a": 1}}'), (INDEX, "weight_map")),
    "a tokenizer of nested objects": (NATIVE_GPT, nest_deeply(TOKENIZER), (TOKENIZER,)),
    "a tokenizer without a model": (NATIVE_GPT, change_json(TOKENIZER, model=None), (TOKENIZER, "model")),
    "an id of 2^63": (NATIVE_GPT, change_json(TOKENIZER, added_tokens=[{"id": 2**63, "content": "a"}]), (TOKENIZER,)),
    "a module path outside of the folder": (
        "bert, sentence-transformers",
        replace_content(
            "x/modules.json", b'[{"type": "a.Transformer", "path": "../.."}, {"type": "a.Pooling", "path": "/"}]'
        ),
        ("modules.json", "outside"),
    ),
    "a table of 20 MB of NUL in 3 KB": (
        "labeled tsv.xz",
        replace_content("x.tsv.xz", lzma.compress(b"text\tlabel\n" + bytes(20 * 2**20))),
        ("x.tsv.xz",),
    ),
    "a truncated table": (
        "labeled tsv.xz",
        replace_content("x.tsv.xz", lzma.compress(b"a" * 999)[:-20]),
        ("x.tsv.xz",),
    ),
    "one line of 10^7 characters": ("labeled tsv", replace_content("x.tsv", b"a" * 10**7), ("x.tsv",)),
    "a GGUF of 2^63 tensors": (
        "gguf, llama",
        replace_content("x.gguf", b"GGUF" + struct.pack("<IQQ", 3, 2**63 - 1, 2**63 - 1)),
        ("x.gguf",),
    ),
    "a recipe of nested lists": ("recipe, gpt", replace_content("x.toml", b"a=" + b"[" * 10**5), ("x.toml",)),
    "a manifest of nested objects": (
        "run, checkpoint",
        replace_content("x/checkpoints/step-00000003/manifest.json", b'{"files":' * 10**5),
        (": x",),
    ),
}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Run the commands for all crafted files."""
    folder, originals, commands = tmp_path_factory.mktemp("crafted"), {}, []
    for i, (base, modify, _) in enumerate(CRAFTED_FILES.values()):
        if base not in originals:
            originals[base] = tmp_path_factory.mktemp("base")
            VALID_FILES[base].create(originals[base])
        copy = folder / str(i)
        shutil.copytree(originals[base], copy)
        modify(copy)
        commands.append((copy, VALID_FILES[base].command))
    return dict(zip(CRAFTED_FILES, run_commands(commands), strict=True))


@pytest.mark.parametrize("name", CRAFTED_FILES)
def test_a_crafted_file_raises_a_one_line_error(name, results):
    assert results[name].find_fault(CRAFTED_FILES[name][2]) is None
    assert not results[name].out
