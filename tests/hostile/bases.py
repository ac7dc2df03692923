"""Good files of every kind that can be given to a command, and the command that opens each."""

import gzip
import json
import lzma
import random
import shutil
import struct
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from qkv.choices import TokenizerKind
from qkv.text import train_tokenizer
from qkv.training import open_run
from qkv.weights.gguf_file import write_gguf
from qkv.weights.model_loader import ModelBundle
from qkv.weights.save import StorageDType, save_hf, save_int8, save_native
from tests.data.pair_corpus import reversed_pairs
from tests.faults.families import RECIPES, prepare_small_run, write_data
from tests.hostile.mutations import changed_bytes, changed_json, changed_safetensors
from tests.serving.explorer_client import tasks
from tests.training import classifiers
from tests.training.runs import copy_run, train_until_signal, build_cpu_trainer
from tests.weights.loaded_models import byte_level, random_model
from tests.weights.published_translators import t5
from tests.weights.test_llama2c import write_pieces, written

Change = Callable[[bytes, random.Random], bytes]
LLAMA = "llama, 2 queries a key"
GENERATE = ("generate", "x", "The cat", "-n", "1")
FILL = ("fill", "x", "the [MASK]")
TRANSLATE = ("translate", "x", "uno", "--beam", "1", "--max-new", "2")
RESUME = ("train", "--resume", "x", "--device", "cpu")


@dataclass(frozen=True, kw_only=True)
class Base:
    """A folder with one thing to be opened, named `x…`, and what may be changed in it."""

    make: Callable[[Path], None]
    command: tuple[str, ...]
    changes: dict[str, Change]
    """Which files (patterns, relative to the folder), and how each is changed."""


def _either(data: bytes, chance: random.Random) -> bytes:
    return (changed_json if chance.random() < 0.75 else changed_bytes)(data, chance)


def _header(data: bytes, chance: random.Random) -> bytes:
    return changed_bytes(data, chance, within=4096)


def _lines(data: bytes, chance: random.Random) -> bytes:
    """A text with something in it that no text has."""
    at = chance.randrange(len(data))
    bad = chance.choice((b"\xff\xfe", b"\x00", b"\xc3", b"\xed\xa0\x80", b"\xf5\x80\x80\x80", b"\t\t\t", b'{"', b"\r"))
    return data[:at] + bad + data[at:] if chance.random() < 0.7 else changed_bytes(data, chance)


MODEL = {"x/config.json": _either, "x/tokenizer_config.json": _either, "x/*.safetensors": changed_safetensors}
OURS = {**MODEL, "x/tokenizer.json": _either}
PUBLISHED = {**OURS, "x/generation_config.json": _either, "x/model.safetensors.index.json": _either}


def _shards(folder: Path) -> None:
    save_hf(random_model(LLAMA), folder / "x")
    tensors = load_file(folder / "x" / "model.safetensors")
    (folder / "x" / "model.safetensors").unlink()
    (folder / "x" / "manifest.json").unlink()
    names, index = sorted(tensors), {}
    for i, part in enumerate((names[::2], names[1::2])):
        file = f"model-{i + 1:05d}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, folder / "x" / file, metadata={"format": "pt"})
        index |= dict.fromkeys(part, file)
    (folder / "x" / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))


def _own(family: str, *, int8: bool = False) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        task = tasks()[family]
        model = deepcopy(task.model).float()  # of a copy, for other tests have the same task
        (save_int8 if int8 else save_native)(ModelBundle(model, task.tokenizer), folder / "x")

    return make


def _sentences(folder: Path) -> None:
    """sentence-transformers' folder."""
    tokenizer = classifiers.small_tokenizer()
    model = classifiers.small_bert(tokenizer, sentence_embedding={"pooling": "mean", "normalize": True})
    save_hf(ModelBundle(model.eval(), tokenizer), folder / "x")


def _run(folder: Path) -> None:
    """A run that has one checkpoint and two steps to go."""
    made = prepare_small_run(folder / "made", "gpt")
    copy_run(made, folder / "x", steps=5, save_every=3, eval_every=5)
    train_until_signal(build_cpu_trainer(open_run(folder / "x")), 3)
    shutil.rmtree(folder / "made")


def _recipe(family: str) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        write_data(folder, family)
        (folder / "a.toml").rename(folder / "x.toml")

    return make


def _labelled(name: str, pack: Callable[[bytes], bytes] = bytes) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        classifiers.model_folder(folder / "bert", class_names=("bad", "good"))
        rows = classifiers.reviews(40)
        if ".jsonl" in name:
            text = "".join(json.dumps({"text": text, "label": label}) + "\n" for text, label in rows)
        else:
            between = "\t" if ".tsv" in name else ","
            text = "".join(f"{text}{between}{label}\n" for text, label in [("text", "label"), *rows])
        (folder / name).write_bytes(pack(text.encode()))

    return make


def _text(name: str, pack: Callable[[bytes], bytes] = bytes) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        words = "The cat sat on the mat. El niño comió.\n" * 20
        text = "".join(json.dumps({"text": words}) + "\n" for _ in range(3)) if ".jsonl" in name else words
        (folder / name).write_bytes(pack(text.encode()))
        tokenizer = train_tokenizer(TokenizerKind.CHARACTER, [words], vocab_size=60)
        (folder / "tokenizer.json").write_text(tokenizer.backend.to_str())

    return make


def _pairs(folder: Path) -> None:
    (folder / "x.tsv").write_text("".join(f"{a}\t{b}\n" for a, b in reversed_pairs(60)))


def _pairs_to_learn(folder: Path) -> None:
    write_data(folder, "seq2seq", steps=1, warmup_steps=0)


def _gguf(name: str, dtype: StorageDType) -> Callable[[Path], None]:
    return lambda folder: write_gguf(random_model(name, tokenizer=byte_level()), folder / "x.gguf", numbers=numbers)


def _llama2c(folder: Path) -> None:
    written(folder / "x.bin")
    write_pieces(folder / "tokenizer.bin", 263)


def _t5(folder: Path) -> None:
    torch.manual_seed(0)
    shape = {"d_model": 12, "d_kv": 6, "d_ff": 17, "num_layers": 2, "num_heads": 2}
    t5(folder / "x", shape=shape, tasks={"translation": {"prefix": "to English: "}})


TRAIN_RECIPE = ("train", "x.toml", "--data", ".", "--out", "new", "--dry-run", "--device", "cpu")
PREPARE = ("--out", "new", "--tokenizer", "tokenizer.json", "--workers", "1")
JUDGE = ("evaluate", "bert", "--labelled")

BASES = {
    "gpt, ours": Base(make=_own("gpt"), command=GENERATE, changes=OURS),
    "gpt, int8": Base(make=_own("gpt", int8=True), command=GENERATE, changes={"x/*.safetensors": changed_safetensors}),
    "llama in two shards": Base(make=_shards, command=GENERATE, changes=PUBLISHED),
    "bert, ours": Base(make=_own("bert"), command=FILL, changes=OURS),
    "bert, sentence-transformers": Base(
        make=_sentences, command=("embed", "x", "the film"),
        changes={
            **OURS, "x/modules.json": _either, "x/sentence_bert_config.json": _either,
            "x/1_Pooling/config.json": _either,
        },
    ),
    "seq2seq, ours": Base(make=_own("seq2seq"), command=TRANSLATE, changes=OURS),
    "t5, published": Base(
        make=_t5, command=TRANSLATE,
        changes={**MODEL, "x/generation_config.json": _either, "x/spiece.model": changed_bytes},
    ),
    "rnn, ours": Base(make=_own("rnn"), command=TRANSLATE, changes=OURS),
    "gguf, llama": Base(
        make=_gguf(LLAMA, StorageDType.F16), command=("generate", "x.gguf", *GENERATE[2:]), changes={"x.gguf": _header}
    ),
    "gguf, gpt2": Base(
        make=_gguf("gpt2", StorageDType.Q8_0), command=("generate", "x.gguf", *GENERATE[2:]), changes={"x.gguf": _header}
    ),
    "llama2.c": Base(
        make=_llama2c, command=("generate", "x.bin", "a", *GENERATE[3:]),
        changes={"x.bin": _header, "tokenizer.bin": changed_bytes},
    ),
    "run, checkpoint": Base(
        make=_run, command=RESUME,
        changes={"x/checkpoints/*/manifest.json": _either, "x/checkpoints/*/*": changed_bytes},
    ),
    "run, data": Base(make=_run, command=RESUME, changes={"x/recipe.toml": _lines, "x/data/**/*": changed_bytes}),
    **{
        f"recipe, {family}": Base(make=_recipe(family), command=TRAIN_RECIPE, changes={"x.toml": _lines})
        for family in RECIPES
    },
    "labelled tsv": Base(make=_labelled("x.tsv"), command=(*JUDGE, "x.tsv"), changes={"x.tsv": _lines}),
    "labelled csv": Base(make=_labelled("x.csv"), command=(*JUDGE, "x.csv"), changes={"x.csv": _lines}),
    "labelled jsonl": Base(make=_labelled("x.jsonl"), command=(*JUDGE, "x.jsonl"), changes={"x.jsonl": _lines}),
    "labelled tsv.xz": Base(
        make=_labelled("x.tsv.xz", lzma.compress), command=(*JUDGE, "x.tsv.xz"), changes={"x.tsv.xz": changed_bytes}
    ),
    "pairs": Base(
        make=_pairs, command=("data", "split", "x.tsv", "--dev", "5", "--test", "5", "--out", "new"),
        changes={"x.tsv": _lines},
    ),
    "pairs, learnt from": Base(
        make=_pairs_to_learn, command=("train", "a.toml", "--data", ".", "--out", "new", "--device", "cpu"),
        changes={"pairs.tsv": _lines},
    ),
    "text": Base(make=_text("x.txt"), command=("data", "prepare", "x.txt", *PREPARE), changes={"x.txt": _lines}),
    "jsonl": Base(make=_text("x.jsonl"), command=("data", "prepare", "x.jsonl", *PREPARE), changes={"x.jsonl": _lines}),
    "text.gz": Base(
        make=_text("x.txt.gz", gzip.compress), command=("data", "prepare", "x.txt.gz", *PREPARE),
        changes={"x.txt.gz": changed_bytes},
    ),
}  # fmt: skip


def header_of(file: Path) -> tuple[dict, bytes]:
    """A safetensors file's header, and the bytes after it."""
    data = file.read_bytes()
    n = struct.unpack_from("<Q", data)[0]
    return json.loads(data[8 : 8 + n]), data[8 + n :]


def with_header(header: bytes | dict, body: bytes, *, n: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if n is None else n) + text + body
