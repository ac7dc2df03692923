"""`qkv data split`: pairs into training, dev and test, so that no sentence is in two of them."""

import json
from pathlib import Path
from typing import Annotated

import typer


def split(
    files: Annotated[list[Path], typer.Argument(metavar="FILE", help="source⇥target a line; .xz and .gz too.")],
    *,
    dev: Annotated[int, typer.Option(min=0, help="Pairs to choose settings by.")] = 2000,
    test: Annotated[int, typer.Option(min=0, help="Pairs to measure by, once.")] = 3000,
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="New or empty; gets train.tsv, dev.tsv, test.tsv.")],
    random: Annotated[bool, typer.Option("--random", help="Pair by pair, whatever they share.")] = False,
    seed: Annotated[int, typer.Option(min=0, help="Of the order in which they are drawn.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Split translation pairs by connected component: pairs that share a sentence stay together.

    Sentences are compared without capitals and punctuation, on both sides. With --random pairs are divided one by
    one; how many of dev and test then share a sentence with training is said.

    \b
    Examples:
      qkv data split spa-eng.tsv --dev 2000 --test 3000 --out es-en
      qkv data split spa-eng.tsv --random --out leaky
    """
    from qkv.cli.progress import say
    from qkv.cli.tokenizer import refuse_used
    from qkv.data.file_io import convert_disk_errors, write_atomically
    from qkv.data.pair_files import PairFile
    from qkv.data.pair_split import leakage, split_pairs

    refuse_used(out)
    read = [pair for file in files for pair in PairFile(source=file).read()]
    pairs = [pair for pair in read if all(pair)]
    if len(pairs) < len(read):
        say(f"{len(read) - len(pairs):,} pairs with an empty side are left out")
    parts = split_pairs(pairs, n_dev=dev, n_test=test, seed=seed, by_component=not random)
    with convert_disk_errors(out, 0):
        out.mkdir(parents=True, exist_ok=True)
    found = {}
    for name, numbers in (("train", parts.train), ("dev", parts.dev), ("test", parts.test)):
        write_atomically(out / f"{name}.tsv", "".join("\t".join(pairs[i]) + "\n" for i in numbers).encode())
        shared = None if name == "train" else leakage(pairs, numbers, parts.train)
        found[name] = {"pairs": len(numbers)} | ({} if shared is None else {"shared_with_train": shared})
    if as_json:
        print(json.dumps({"folder": str(out), **found}))
        return
    for name, counts in found.items():
        shared = counts.get("shared_with_train")
        said = "" if shared is None else f"  {shared:.1%} share a sentence with training"
        print(f"{out / f'{name}.tsv'}  {counts['pairs']:,} pairs{said}")
