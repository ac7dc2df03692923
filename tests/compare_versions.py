"""Check that two versions of qkv compute the same numbers.

For each version, this script trains every model family for 50 steps on the CPU, runs every shipped model on 50 inputs
and converts models to and from the other formats. It then compares the losses, outputs and converted tensors exactly.
It runs the command line in a subprocess, so a version only has to be importable from its source folder.

    python tests/compare_versions.py --base /path/to/other/checkout [--llama2c stories260K.bin]
"""

import argparse
import hashlib
import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import tomli_w
from safetensors import safe_open

ROOT = Path(__file__).resolve().parent.parent
STEPS = 50

# Keys and flags of version 0.1 that have been renamed since, used for checkouts that still have the old names.
OLD_KEYS = {
    "vocab_size": "vocabulary_size", "seq_len": "length", "eval_every": "evaluate_every",
    "eval_batches": "evaluate_batches", "ema_decay": "averaging", "min_lr_ratio": "final_learning_rate",
    "keep_checkpoints": "keep", "feed_forward_bias": "feedforward_bias", "validation_fraction": "validation_share",
}  # fmt: skip
OLD_FLAGS = {"--max-new-tokens": "--max-new", "--dtype": "--numbers"}

WHO = ["the old man", "a little girl", "my brother", "the black cat", "our teacher", "a red bird", "the king"]
DID = ["found", "saw", "lost", "wanted", "carried", "painted", "forgot"]
WHAT = ["a small boat", "the green door", "two apples", "an old letter", "the river", "a yellow hat", "his bread"]
QUIEN = ["El gato negro", "Mi hermana", "El profesor", "La niña", "Nuestro vecino", "Ana", "El rey"]
HACE = ["quiere", "busca", "vende", "ha perdido", "no entiende", "pinta", "come"]
QUE = ["la casa blanca.", "un libro viejo.", "dos manzanas.", "el pan.", "la puerta verde.", "una carta.", "la mesa."]
PROMPTS = [" ".join(words).capitalize() for words in itertools.islice(itertools.product(WHO, DID, WHAT[:2]), 50)]
SPANISH = [" ".join(words) for words in itertools.islice(itertools.product(QUIEN, HACE, QUE[:2]), 50)]
MASKED = [f"{text.rsplit(' ', 1)[0]} [MASK]." for text in PROMPTS]
REVIEWS = [f"{who} {did} {what}: {verdict}." for (who, did, what), verdict in zip(
    itertools.product(WHO[:5], DID[:5], WHAT[:2]), itertools.cycle(["a joy", "dull", "moving", "far too long", "fine"])
)]  # fmt: skip

TRAINING = {
    "steps": STEPS, "batch_size": 8, "micro_batch_size": 4, "seq_len": 32, "warmup_steps": 5, "optimizer": "muon",
    "min_lr_ratio": 0.0, "eval_every": 25, "save_every": 25, "seed": 3,
}  # fmt: skip
PAIRS_TRAINING = {**TRAINING, "label_smoothing": 0.1, "ema_decay": 0.9}
ATTENTION = {"context_length": 64, "d_model": 48, "n_heads": 4, "dropout": 0.1}
RECIPES: dict[str, dict[str, Any]] = {
    "gpt": {
        "family": "gpt",
        "tokenizer": {"vocab_size": 300},
        "model": {
            **ATTENTION,
            "n_layers": 2,
            "positions": "rotary",
            "norm": "rms",
            "gated": True,
            "activation": "silu",
        },
        "data": {"train": ["text.txt"], "validation": ["held-out.txt"]},
        "training": TRAINING,
    },
    "bert": {
        "family": "bert",
        "tokenizer": {"path": "bert-tokenizer/tokenizer.json", "vocab_size": 7680},
        "model": {**ATTENTION, "n_layers": 2},
        "data": {"train": ["text.txt"], "validation": ["held-out.txt"]},
        "training": {**TRAINING, "optimizer": "adamw"},
    },
    "seq2seq": {
        "family": "seq2seq",
        "tokenizer": {"vocab_size": 300},
        "model": {**ATTENTION, "n_encoder_layers": 2, "n_decoder_layers": 1, "feed_forward_bias": False},
        "data": {"train": ["pairs.tsv"], "validation": ["held-out.tsv"]},
        "training": PAIRS_TRAINING,
    },
    "rnn": {
        "family": "rnn",
        "tokenizer": {"vocab_size": 300},
        "model": {"context_length": 64, "d_model": 48, "dropout": 0.1, "tie_embeddings": True},
        "data": {"train": ["pairs.tsv"], "validation": ["held-out.tsv"]},
        "training": {**PAIRS_TRAINING, "optimizer": "adamw"},
    },
}


class Version:
    """One checkout of qkv, run through its command line."""

    def __init__(self, root: Path, folder: Path) -> None:
        self.root, self.folder = root, folder
        files = (root / "src/qkv/config").glob("*.py")
        self.is_old = any("vocabulary_size:" in file.read_text(encoding="utf-8") for file in files)
        folder.mkdir()

    def run(self, *arguments: str, lines: list[str] | None = None) -> str:
        """Standard output of `qkv ARGUMENTS`; the last error line if the command refuses its input."""
        if self.is_old:
            arguments = tuple(OLD_FLAGS.get(each, each) for each in arguments)
        # One thread, because the order of a sum over threads may change its last bit.
        environment = {**os.environ, "PYTHONPATH": str(self.root / "src"), "OMP_NUM_THREADS": "1", "NO_COLOR": "1"}
        done = subprocess.run(
            [sys.executable, "-m", "qkv.cli", *arguments],
            cwd=self.folder, env=environment, input="\n".join(lines or []), capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode:
            raise RuntimeError(f"{self.root}: qkv {' '.join(arguments)}: exit {done.returncode}: {done.stderr[-400:]}")
        return done.stdout

    def losses(self, family: str) -> list[float]:
        """Training and validation losses of a short run, in the order in which they were logged."""
        recipe = _rename_keys(RECIPES[family], OLD_KEYS) if self.is_old else RECIPES[family]
        file = self.folder / f"{family}.toml"
        file.write_text(tomli_w.dumps(recipe), encoding="utf-8")
        write_corpus(self.folder, tokenizer=self.root / "src/qkv/zoo/bert")
        self.run("train", str(file), "--data", ".", "--out", family, "--device", "cpu")
        entries = [json.loads(line) for line in (self.folder / family / "metrics.jsonl").read_text().splitlines()]
        return [value for entry in entries for key, value in sorted(entry.items()) if "loss" in key]

    def converted(self, model: str, target: str, *options: str) -> dict[str, str]:
        """A hash for each tensor or file of a converted model."""
        out = self.folder / f"{Path(model).stem}-{target}-{''.join(options)}{'.gguf' if target == 'gguf' else ''}"
        self.run("convert", model, out.name, "--to", target, *options)
        files = sorted(out.rglob("*")) if out.is_dir() else [out]
        hashes: dict[str, str] = {}
        for file in files:
            if file.suffix == ".safetensors":
                with safe_open(file, "np") as tensors:
                    hashes |= {name: _sha(tensors.get_tensor(name).tobytes()) for name in tensors.keys()}  # noqa: SIM118
            elif file.suffix in (".bin", ".gguf"):
                hashes[file.name] = _sha(file.read_bytes())
        return hashes


def write_corpus(folder: Path, *, tokenizer: Path) -> None:
    """Write small texts and sentence pairs, the same for every version."""
    draw = random.Random(7)
    sentences = [f"{draw.choice(WHO)} {draw.choice(DID)} {draw.choice(WHAT)}." for _ in range(1500)]
    documents = [" ".join(sentences[i : i + 5]) for i in range(0, len(sentences), 5)]
    (folder / "text.txt").write_text("\n<|endoftext|>\n".join(documents[:-30]), encoding="utf-8")
    (folder / "held-out.txt").write_text("\n<|endoftext|>\n".join(documents[-30:]), encoding="utf-8")
    pairs = [f"{sentence}\t{' '.join(reversed(sentence.split()))}" for sentence in dict.fromkeys(sentences)]
    (folder / "pairs.tsv").write_text("\n".join(pairs[:-40]) + "\n", encoding="utf-8")
    (folder / "held-out.tsv").write_text("\n".join(pairs[-40:]) + "\n", encoding="utf-8")
    (folder / "bert-tokenizer").mkdir(exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / "bert-tokenizer" / name).write_bytes((tokenizer / name).read_bytes())


def checks(llama2c: Path | None) -> dict[str, Callable[[Version], Any]]:
    """Everything that is compared, by name."""
    greedy = ("--temperature", "0", "--max-new-tokens", "40")
    found: dict[str, Callable[[Version], Any]] = {
        f"{STEPS} losses of {family}": lambda v, family=family: v.losses(family) for family in RECIPES
    }
    found |= {
        "stories, greedy": lambda v: v.run("generate", "stories", *greedy, lines=PROMPTS),
        "stories, greedy, int8": lambda v: v.run("generate", "stories", *greedy, "--int8", lines=PROMPTS),
        "stories, sampled": lambda v: v.run("generate", "stories", "--seed", "5", lines=PROMPTS[:5]),
        "es-en, greedy": lambda v: v.run("translate", "es-en", "--beam", "1", lines=SPANISH),
        "es-en, beam 5": lambda v: v.run("translate", "es-en", "--alignment", lines=SPANISH),
        "es-en-rnn, greedy": lambda v: v.run("translate", "es-en-rnn", "--beam", "1", lines=SPANISH),
        "bert, filled masks": lambda v: v.run("fill", "bert", lines=MASKED),
        "sentiment, probabilities": lambda v: v.run("classify", "sentiment", lines=REVIEWS),
        "stories to Hugging Face": lambda v: v.converted("stories", "hf"),
        "bert to Hugging Face": lambda v: v.converted("bert", "hf"),
        "stories to GGUF f32": lambda v: v.converted("stories", "gguf", "--dtype", "f32"),
        "stories to GGUF q8_0": lambda v: v.converted("stories", "gguf", "--dtype", "q8_0"),
        "es-en to CTranslate2": lambda v: v.converted("es-en", "ct2"),
        "GGUF back, greedy": lambda v: v.run("generate", "stories-gguf---dtypef32.gguf", *greedy, lines=PROMPTS[:10]),
        "Hugging Face back, greedy": lambda v: v.run("generate", "stories-hf-", *greedy, lines=PROMPTS[:10]),
    }  # fmt: skip
    if llama2c is not None:
        file = str(llama2c.resolve())
        found["llama2.c, greedy"] = lambda v: v.run("generate", file, *greedy, lines=PROMPTS)
        found["llama2.c to Hugging Face"] = lambda v: v.converted(file, "hf")
    return found


def _rename_keys(settings: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    return {
        names.get(key, key): _rename_keys(value, names) if isinstance(value, Mapping) else value
        for key, value in settings.items()
    }


def _sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def main() -> int:
    """Compare two checkouts; the exit status is 1 if anything differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", type=Path, required=True, help="checkout of the version to compare with")
    parser.add_argument("--llama2c", type=Path, help="a llama2.c model with its tokenizer beside it")
    parser.add_argument("--only", default="", help="only run the checks whose name contains this text")
    options = parser.parse_args()
    n_different = 0
    with tempfile.TemporaryDirectory() as folder:
        old, new = (Version(root, Path(folder, name)) for root, name in ((options.base, "old"), (ROOT, "new")))
        for name, check in checks(options.llama2c).items():
            if options.only in name:
                before, after = check(old), check(new)
                assert before, name
                is_equal = before == after
                n_different += not is_equal
                print(f"{name:28} {len(before):6,} items  {'identical' if is_equal else 'DIFFERENT'}", flush=True)
                if not is_equal:
                    print("  before:", str(before)[:300], "\n  after: ", str(after)[:300])
    return int(n_different > 0)


if __name__ == "__main__":
    sys.exit(main())
