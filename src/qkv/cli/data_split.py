"""The `qkv data split` command."""

import json
from pathlib import Path
from typing import Annotated

import typer

from qkv.cli.output import print_status


def split(
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE",
            help="Files with one translation pair per line: source, tab, target. Can be compressed (.gz or .xz).",
        ),
    ],
    *,
    dev: Annotated[int, typer.Option(min=0, help="Number of pairs in the development set.")] = 2000,
    test: Annotated[int, typer.Option(min=0, help="Number of pairs in the test set.")] = 3000,
    out: Annotated[
        Path,
        typer.Option(metavar="FOLDER", help="Output folder for train.tsv, dev.tsv and test.tsv. Must be new or empty."),
    ],
    random: Annotated[
        bool,
        typer.Option("--random", help="Assign each pair at random, even if pairs in different sets share a sentence."),
    ] = False,
    seed: Annotated[int, typer.Option(min=0, help="Random seed.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Split translation pairs into training, development and test sets without leakage.

    Pairs that are connected by shared sentences are assigned to the same set. Sentences are compared on both the source
    and the target side, ignoring case and punctuation. With --random, each pair is assigned individually, and the
    fraction of development and test pairs that share a sentence with the training set is printed.

    \b
    Examples:
      qkv data split spa-eng.tsv --dev 2000 --test 3000 --out es-en
      qkv data split spa-eng.tsv --random --out leaky
    """
    from qkv.cli.tokenizer import check_output_folder
    from qkv.data.file_io import convert_os_errors_to_disk_error, write_atomically
    from qkv.data.pair_files import PairFile, leakage, split_pairs

    check_output_folder(out)
    all_pairs = [pair for file in files for pair in PairFile(source=file).read()]
    pairs = [pair for pair in all_pairs if all(pair)]
    if len(pairs) < len(all_pairs):
        print_status(f"ignored {len(all_pairs) - len(pairs):,} pairs with an empty side")
    parts = split_pairs(pairs, n_dev=dev, n_test=test, seed=seed, by_component=not random)
    with convert_os_errors_to_disk_error(out, 0):
        out.mkdir(parents=True, exist_ok=True)
    summary = {}
    for name, indices in (("train", parts.train), ("dev", parts.dev), ("test", parts.test)):
        write_atomically(out / f"{name}.tsv", "".join("\t".join(pairs[i]) + "\n" for i in indices).encode())
        shared = None if name == "train" else leakage(pairs, indices, parts.train)
        summary[name] = {"pairs": len(indices)} | ({} if shared is None else {"shared_with_train": shared})
    if as_json:
        print(json.dumps({"folder": str(out), **summary}))
        return
    for name, counts in summary.items():
        shared = counts.get("shared_with_train")
        leakage_note = "" if shared is None else f"  {shared:.1%} share a sentence with the training set"
        print(f"{out / f'{name}.tsv'}  {counts['pairs']:,} pairs{leakage_note}")
