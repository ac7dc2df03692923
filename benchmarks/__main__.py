"""`python -m benchmarks NAME`: arguments, the run, the table."""

import argparse
import sys
from importlib import import_module
from pathlib import Path

from benchmarks import results
from benchmarks.runner import Asked

BENCHMARKS = {
    "train-small": ("training_speed:train_small", 5, "a training step of nanoGPT's small CPU model, beside its peers"),
    "train-124m": ("training_speed:train_124m", 3, "a training step of GPT-2 124M, beside its peers"),
    "train-gpu": ("gpu_training:train_gpu", 3, "a training step of GPT-2 124M on a GPU, beside nanoGPT"),
    "shakespeare-cpu": ("shakespeare:shakespeare_cpu", 1, "validation loss after as many CPU seconds as nanoGPT took"),
    "batches": ("batches:batches", 5, "tokens per second of BERT's and translators' batches, made on one core"),
    "cost": ("cost:cost", 1, "predicted and measured times of models that the calibration did not see"),
    "embed": ("embedding:embed", 2, "sentence vectors of all-MiniLM-L6-v2, beside sentence-transformers"),
    "encode-gpu": ("gpu_encoding:encode_gpu", 3, "BERT-base on a GPU, equal and mixed lengths, beside transformers"),
    "memory": ("memory:memory", 1, "the most memory a training step holds, predicted and measured"),
    "beam": ("beam:beam_alone", 7, "one sentence translated with beam 5, beside transformers with the same weights"),
    "beam-batch": ("beam:beam_batch", 3, "sixteen at once"),
    "recurrence": ("recurrence:recurrence", 1, "RNN and Transformer by length: training, inference, sequential steps"),
    "growth": ("growth:growth", 1, "time and memory by length, batch and layers, beside what `cost` says"),
    "decode": ("decode:decode", 5, "one more token of GPT-2 124M, beside transformers, CTranslate2 and llama.cpp"),
    "decode-small": ("decode:decode_small", 9, "the same of 12 layers of width 64, where calls are all that costs"),
    "decode-batch": ("decode:decode_batch", 3, "GPT-2 124M with 1, 2, 4, 8 and 16 texts at once"),
    "decode-int8": (
        "decode:decode_int8",
        3,
        "GPT-2 124M in int8, 1 and 16 texts, beside float32 and CTranslate2's int8",
    ),
    "decode-gpu": ("gpu_decoding:decode_gpu", 3, "one more token on a GPU, beside gpt-fast and transformers"),
    "cpu": ("bars:cpu", 3, "every bar of speed on a CPU, all of the above in one table and one plot"),
    "explorer": ("explorer:explorer", 3, "the explorer's page beside BertViz: bytes, first paint, hover"),
}
"""Name: what measures (module:function, imported when it is asked for: each needs libraries of its own), rounds unless
said, what it is."""
RESULTS = Path(__file__).parent / "RESULTS.md"
PICTURES = RESULTS.parent.parent / "docs" / "pictures"


def main(arguments: list[str] | None = None) -> int:
    """0: measured. 1: an engine that is here failed or gave other outputs; slowness is never a failure."""
    asked = _parser().parse_args(arguments)
    place, rounds, _ = BENCHMARKS[asked.name]
    module, function = place.split(":")
    measure = getattr(import_module(f"benchmarks.{module}"), function)
    repeats = rounds if asked.repeats is None else asked.repeats
    report = measure(Asked(peers=asked.peers, repeats=repeats, threads=asked.threads, say=_say, device=asked.device))
    is_file = asked.out.suffix == ".md"
    out = asked.out if is_file else asked.out / RESULTS.name
    out.parent.mkdir(parents=True, exist_ok=True)
    results.append(report, out)
    results.write_pictures(report, PICTURES if out == RESULTS else out.parent)
    if not is_file:
        results.write_files(report, out.parent)
    sys.stdout.write(report.text())
    return 1 if any(note.startswith("Failed") for note in report.notes) else 0


def _say(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def _parser() -> argparse.ArgumentParser:
    described = "\n".join(f"  {name:16} {what}" for name, (*_, what) in BENCHMARKS.items())
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Ours beside the peers, in one run.\n\nbenchmarks:\n" + described,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", choices=list(BENCHMARKS), metavar="NAME")
    parser.add_argument(
        "--peers", type=Path, help="a folder that holds clones of peers, each under its name: nanoGPT, joeynmt"
    )
    parser.add_argument("--repeats", type=int, help="rounds, of which the best counts (for shakespeare-cpu: seeds)")
    parser.add_argument("--threads", type=int, help="for each engine; all cores (shakespeare-cpu: 1) unless said")
    parser.add_argument(
        "--out",
        type=Path,
        default=RESULTS,
        help="a file for the table, or a folder for it and all figures (benchmarks/RESULTS.md)",
    )
    parser.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        default="cpu",
        help="what `cost`, `growth`, `memory`, `recurrence` measure; NAME-gpu needs cuda",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
