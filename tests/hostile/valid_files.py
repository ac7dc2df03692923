"""Valid files of all kinds that commands can open, and the mutations that are applied to them."""

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
from qkv.weights.save import StorageDType, save_hf, save_native, save_native_int8
from tests.data.pair_corpus import reversed_pairs
from tests.faults.families import RECIPES, prepare_small_run, write_data
from tests.hostile.mutations import mutate_bytes, mutate_json, mutate_safetensors
from tests.serving.explorer_client import tasks
from tests.training import classifiers
from tests.training.runs import build_cpu_trainer, copy_run, train_until_signal
from tests.weights.loaded_models import byte_level_tokenizer, random_model
from tests.weights.published_translators import t5
from tests.weights.test_llama2c import write_model, write_tokens

Mutation = Callable[[bytes, random.Random], bytes]
LLAMA = "llama, group size 2"
GENERATE = ("generate", "x", "The cat", "-n", "1")
FILL = ("fill", "x", "the [MASK]")
TRANSLATE = ("translate", "x", "uno", "--beam", "1", "--max-new-tokens", "2")
RESUME = ("train", "--resume", "x", "--device", "cpu")


@dataclass(frozen=True, kw_only=True)
class ValidFile:
    """A file or folder named `x…`, the command that opens it, and its mutations."""

    create: Callable[[Path], None]
    command: tuple[str, ...]
    mutations: dict[str, Mutation]
    """Mutations by file pattern, relative to the folder."""


def _mutate_json_or_bytes(data: bytes, generator: random.Random) -> bytes:
    return (mutate_json if generator.random() < 0.75 else mutate_bytes)(data, generator)


def _mutate_header(data: bytes, generator: random.Random) -> bytes:
    return mutate_bytes(data, generator, max_position=4096)


def _mutate_text(data: bytes, generator: random.Random) -> bytes:
    """Insert invalid bytes into a text."""
    position = generator.randrange(len(data))
    inserted = generator.choice(
        (b"\xff\xfe", b"\x00", b"\xc3", b"\xed\xa0\x80", b"\xf5\x80\x80\x80", b"\t\t\t", b'{"', b"\r")
    )
    return data[:position] + inserted + data[position:] if generator.random() < 0.7 else mutate_bytes(data, generator)


MODEL = {
    "x/config.json": _mutate_json_or_bytes,
    "x/tokenizer_config.json": _mutate_json_or_bytes,
    "x/*.safetensors": mutate_safetensors,
}
NATIVE = {**MODEL, "x/tokenizer.json": _mutate_json_or_bytes}
PUBLISHED = {
    **NATIVE,
    "x/generation_config.json": _mutate_json_or_bytes,
    "x/model.safetensors.index.json": _mutate_json_or_bytes,
}


def _create_sharded_llama(folder: Path) -> None:
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


def _create_native(family: str, *, int8: bool = False) -> Callable[[Path], None]:
    def create(folder: Path) -> None:
        task = tasks()[family]
        model = deepcopy(task.model).float()  # a copy, because other tests use the same model
        (save_native_int8 if int8 else save_native)(ModelBundle(model, task.tokenizer), folder / "x")

    return create


def _create_sentence_transformer(folder: Path) -> None:
    """Create a folder in the format of sentence-transformers."""
    tokenizer = classifiers.small_tokenizer()
    model = classifiers.small_bert(tokenizer, sentence_embedding={"pooling": "mean", "normalize": True})
    save_hf(ModelBundle(model.eval(), tokenizer), folder / "x")


def _create_run(folder: Path) -> None:
    """Create a run with one checkpoint and two remaining steps."""
    prepared = prepare_small_run(folder / "made", "gpt")
    copy_run(prepared, folder / "x", steps=5, save_every=3, eval_every=5)
    train_until_signal(build_cpu_trainer(open_run(folder / "x")), 3)
    shutil.rmtree(folder / "made")


def _create_recipe(family: str) -> Callable[[Path], None]:
    def create(folder: Path) -> None:
        write_data(folder, family)
        (folder / "a.toml").rename(folder / "x.toml")

    return create


def _create_labeled_texts(name: str, compress: Callable[[bytes], bytes] = bytes) -> Callable[[Path], None]:
    def create(folder: Path) -> None:
        classifiers.model_folder(folder / "bert", class_names=("bad", "good"))
        rows = classifiers.reviews(40)
        if ".jsonl" in name:
            text = "".join(json.dumps({"text": text, "label": label}) + "\n" for text, label in rows)
        else:
            separator = "\t" if ".tsv" in name else ","
            text = "".join(f"{text}{separator}{label}\n" for text, label in [("text", "label"), *rows])
        (folder / name).write_bytes(compress(text.encode()))

    return create


def _create_text(name: str, compress: Callable[[bytes], bytes] = bytes) -> Callable[[Path], None]:
    def create(folder: Path) -> None:
        words = "The cat sat on the mat. El niño comió.\n" * 20
        text = "".join(json.dumps({"text": words}) + "\n" for _ in range(3)) if ".jsonl" in name else words
        (folder / name).write_bytes(compress(text.encode()))
        tokenizer = train_tokenizer(TokenizerKind.CHARACTER, [words], vocab_size=60)
        (folder / "tokenizer.json").write_text(tokenizer.backend.to_str())

    return create


def _create_pairs(folder: Path) -> None:
    (folder / "x.tsv").write_text("".join(f"{a}\t{b}\n" for a, b in reversed_pairs(60)))


def _create_training_pairs(folder: Path) -> None:
    write_data(folder, "seq2seq", steps=1, warmup_steps=0)


def _create_gguf(name: str, dtype: StorageDType) -> Callable[[Path], None]:
    return lambda folder: write_gguf(
        random_model(name, tokenizer=byte_level_tokenizer()), folder / "x.gguf", dtype=dtype
    )


def _create_llama2c(folder: Path) -> None:
    write_model(folder / "x.bin")
    write_tokens(folder / "tokenizer.bin", 263)


def _create_t5(folder: Path) -> None:
    torch.manual_seed(0)
    shape = {"d_model": 12, "d_kv": 6, "d_ff": 17, "num_layers": 2, "num_heads": 2}
    t5(folder / "x", shape=shape, tasks={"translation": {"prefix": "to English: "}})


TRAIN_RECIPE = ("train", "x.toml", "--data", ".", "--out", "new", "--dry-run", "--device", "cpu")
PREPARE = ("--out", "new", "--tokenizer", "tokenizer.json", "--workers", "1")
EVALUATE = ("evaluate", "bert", "--labeled")

VALID_FILES = {
    "gpt, native": ValidFile(create=_create_native("gpt"), command=GENERATE, mutations=NATIVE),
    "gpt, int8": ValidFile(
        create=_create_native("gpt", int8=True), command=GENERATE, mutations={"x/*.safetensors": mutate_safetensors}
    ),
    "llama in two shards": ValidFile(create=_create_sharded_llama, command=GENERATE, mutations=PUBLISHED),
    "bert, native": ValidFile(create=_create_native("bert"), command=FILL, mutations=NATIVE),
    "bert, sentence-transformers": ValidFile(
        create=_create_sentence_transformer,
        command=("embed", "x", "the film"),
        mutations={
            **NATIVE,
            "x/modules.json": _mutate_json_or_bytes,
            "x/sentence_bert_config.json": _mutate_json_or_bytes,
            "x/1_Pooling/config.json": _mutate_json_or_bytes,
        },
    ),
    "seq2seq, native": ValidFile(create=_create_native("seq2seq"), command=TRANSLATE, mutations=NATIVE),
    "t5, Hugging Face": ValidFile(
        create=_create_t5,
        command=TRANSLATE,
        mutations={**MODEL, "x/generation_config.json": _mutate_json_or_bytes, "x/spiece.model": mutate_bytes},
    ),
    "rnn, native": ValidFile(create=_create_native("rnn"), command=TRANSLATE, mutations=NATIVE),
    "gguf, llama": ValidFile(
        create=_create_gguf(LLAMA, StorageDType.F16),
        command=("generate", "x.gguf", *GENERATE[2:]),
        mutations={"x.gguf": _mutate_header},
    ),
    "gguf, gpt2": ValidFile(
        create=_create_gguf("gpt2", StorageDType.Q8_0),
        command=("generate", "x.gguf", *GENERATE[2:]),
        mutations={"x.gguf": _mutate_header},
    ),
    "llama2.c": ValidFile(
        create=_create_llama2c,
        command=("generate", "x.bin", "a", *GENERATE[3:]),
        mutations={"x.bin": _mutate_header, "tokenizer.bin": mutate_bytes},
    ),
    "run, checkpoint": ValidFile(
        create=_create_run,
        command=RESUME,
        mutations={"x/checkpoints/*/manifest.json": _mutate_json_or_bytes, "x/checkpoints/*/*": mutate_bytes},
    ),
    "run, data": ValidFile(
        create=_create_run, command=RESUME, mutations={"x/recipe.toml": _mutate_text, "x/data/**/*": mutate_bytes}
    ),
    **{
        f"recipe, {family}": ValidFile(
            create=_create_recipe(family), command=TRAIN_RECIPE, mutations={"x.toml": _mutate_text}
        )
        for family in RECIPES
    },
    "labeled tsv": ValidFile(
        create=_create_labeled_texts("x.tsv"), command=(*EVALUATE, "x.tsv"), mutations={"x.tsv": _mutate_text}
    ),
    "labeled csv": ValidFile(
        create=_create_labeled_texts("x.csv"), command=(*EVALUATE, "x.csv"), mutations={"x.csv": _mutate_text}
    ),
    "labeled jsonl": ValidFile(
        create=_create_labeled_texts("x.jsonl"), command=(*EVALUATE, "x.jsonl"), mutations={"x.jsonl": _mutate_text}
    ),
    "labeled tsv.xz": ValidFile(
        create=_create_labeled_texts("x.tsv.xz", lzma.compress),
        command=(*EVALUATE, "x.tsv.xz"),
        mutations={"x.tsv.xz": mutate_bytes},
    ),
    "pairs": ValidFile(
        create=_create_pairs,
        command=("data", "split", "x.tsv", "--dev", "5", "--test", "5", "--out", "new"),
        mutations={"x.tsv": _mutate_text},
    ),
    "training pairs": ValidFile(
        create=_create_training_pairs,
        command=("train", "a.toml", "--data", ".", "--out", "new", "--device", "cpu"),
        mutations={"pairs.tsv": _mutate_text},
    ),
    "text": ValidFile(
        create=_create_text("x.txt"), command=("data", "prepare", "x.txt", *PREPARE), mutations={"x.txt": _mutate_text}
    ),
    "jsonl": ValidFile(
        create=_create_text("x.jsonl"),
        command=("data", "prepare", "x.jsonl", *PREPARE),
        mutations={"x.jsonl": _mutate_text},
    ),
    "text.gz": ValidFile(
        create=_create_text("x.txt.gz", gzip.compress),
        command=("data", "prepare", "x.txt.gz", *PREPARE),
        mutations={"x.txt.gz": mutate_bytes},
    ),
}


def read_safetensors_header(file: Path) -> tuple[dict, bytes]:
    """Return the header of a safetensors file and the bytes after it."""
    data = file.read_bytes()
    n = struct.unpack_from("<Q", data)[0]
    return json.loads(data[8 : 8 + n]), data[8 + n :]


def build_safetensors(header: bytes | dict, body: bytes, *, n: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if n is None else n) + text + body
