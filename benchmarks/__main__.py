"""Command-line entry point of the benchmarks: `python -m benchmarks NAME`."""

import argparse
import sys
from importlib import import_module
from pathlib import Path

from benchmarks import results
from benchmarks.runner import BenchmarkOptions

BENCHMARKS = {
    "train-small": ("training_speed:train_small", 5, "training step of the small CPU model of nanoGPT, with peers"),
    "train-124m": ("training_speed:train_124m", 3, "training step of GPT-2 124M, with peers"),
    "train-gpu": ("gpu_training:train_gpu", 3, "training step of GPT-2 124M on a GPU, with nanoGPT"),
    "shakespeare-cpu": ("shakespeare:shakespeare_cpu", 1, "validation loss of qkv and nanoGPT after the same CPU time"),
    "batches": (
        "batches:batches",
        5,
        "speed of batch creation for BERT and translation on one core, in tokens per second",
    ),
    "cost": ("cost:cost", 1, "predicted and measured times of steps that the calibration did not use"),
    "embed": ("embedding:embed", 2, "sentence embeddings of all-MiniLM-L6-v2, with sentence-transformers"),
    "encode-gpu": (
        "gpu_encoding:encode_gpu",
        3,
        "BERT-base on a GPU with equal and with mixed text lengths, with transformers",
    ),
    "memory": ("memory:memory", 1, "predicted and measured peak memory of training steps"),
    "beam": ("beam:beam_single", 7, "translation of one sentence with beam 5, with peers"),
    "beam-batch": ("beam:beam_batch", 3, "translation of a batch of 16 sentences with beam 5"),
    "recurrence": ("recurrence:recurrence", 1, "time and sequential steps of an RNN and a Transformer, by length"),
    "growth": ("growth:growth", 1, "time and memory by length, batch size and layers, compared with `qkv.cost`"),
    "decode": ("decode:decode", 5, "decode step of GPT-2 124M, with transformers, CTranslate2 and llama.cpp"),
    "decode-small": ("decode:decode_small", 9, "decode step of 12 layers of width 64, dominated by call overhead"),
    "decode-batch": ("decode:decode_batch", 3, "decode step of GPT-2 124M with batch sizes 1, 2, 4, 8 and 16"),
    "decode-int8": (
        "decode:decode_int8",
        3,
        "decode step of GPT-2 124M in int8, with CTranslate2 and llama.cpp",
    ),
    "decode-gpu": ("gpu_decoding:decode_gpu", 3, "decode step on a GPU, with gpt-fast and transformers"),
    "cpu": ("cpu_targets:cpu", 3, "all speed targets on a CPU in one table and one plot"),
    "checkouts": ("checkouts:checkouts", 5, "speed of this checkout and of another one (--baseline DIR)"),
    "explorer": ("explorer:explorer", 3, "explorer page and BertViz: bytes, first paint, hover"),
}
"""Maps the name of each benchmark to its function (module:function), its default number of rounds and its description.
Modules are imported on demand because they require different libraries.
"""
RESULTS = Path(__file__).parent / "RESULTS.md"
PLOT_FOLDER = RESULTS.parent.parent / "docs" / "pictures"


def main(arguments: list[str] | None = None) -> int:
    """Run a benchmark and append its table to the results.

    Return 0 on success, or 1 if an installed engine failed or produced different outputs.

    Being slow is never a failure.
    """
    options = _parser().parse_args(arguments)
    target, rounds, _ = BENCHMARKS[options.name]
    module, function = target.split(":")
    measure = getattr(import_module(f"benchmarks.{module}"), function)
    repeats = rounds if options.repeats is None else options.repeats
    report = measure(
        BenchmarkOptions(
            peers=options.peers,
            repeats=repeats,
            threads=options.threads,
            log=_log,
            device=options.device,
            baseline=options.baseline,
            only=options.only,
            out=None if options.out.suffix == ".md" else options.out,
            dtype=options.dtype,
            refit=options.refit,
        )
    )
    is_file = options.out.suffix == ".md"
    out = options.out if is_file else options.out / RESULTS.name
    out.parent.mkdir(parents=True, exist_ok=True)
    results.append(report, out)
    results.write_plots(report, PLOT_FOLDER if out == RESULTS else out.parent)
    if not is_file:
        results.write_files(report, out.parent)
    sys.stdout.write(report.text())
    return 1 if any(note.startswith("Failed") for note in report.notes) else 0


def _log(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def _parser() -> argparse.ArgumentParser:
    descriptions = "\n".join(f"  {name:16} {description}" for name, (*_, description) in BENCHMARKS.items())
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Compare qkv with other libraries (peers) in one run.\n\nbenchmarks:\n" + descriptions,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", choices=list(BENCHMARKS), metavar="NAME")
    parser.add_argument(
        "--peers",
        type=Path,
        help="folder that contains clones of the peers: nanoGPT, joeynmt, gpt-fast",
    )
    parser.add_argument("--baseline", type=Path, help="checkout of qkv to compare with (checkouts)")
    parser.add_argument("--only", default="", help="run only the workloads that contain this text (checkouts)")
    parser.add_argument(
        "--repeats", type=int, help="number of rounds; the best time is reported (shakespeare-cpu: number of seeds)"
    )
    parser.add_argument("--threads", type=int, help="threads per engine (default: all cores; shakespeare-cpu: 1)")
    parser.add_argument(
        "--out",
        type=Path,
        default=RESULTS,
        help="file for the table, or folder for the table and all figures (default: benchmarks/RESULTS.md)",
    )
    parser.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        default="cpu",
        help="device for cost, growth, memory and recurrence; train-gpu, encode-gpu and decode-gpu require cuda",
    )
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="precision, for cost")
    parser.add_argument(
        "--refit",
        type=Path,
        metavar="FILE",
        help="predict the times of an earlier cost run again from its cost-measurements-….json, without measuring",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
