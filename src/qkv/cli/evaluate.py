"""The `qkv evaluate` command."""

import json
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from qkv.choices import BackendName
from qkv.cli.options import BackendOption, DeviceOption, DeviceOptions, ModelArgument
from qkv.cli.output import format_table, sequential_progress_bars, track_progress
from qkv.errors import InputError

if TYPE_CHECKING:
    from qkv.tasks import LanguageModel, TextEncoder

DEFAULT_NUM_BEAMS = 5
CLASS_METRICS = ("precision", "recall", "f1")


def evaluate(
    model: ModelArgument,
    *,
    text: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="PATH",
            help="Text file for a GPT or BERT. Documents are separated by <|endoftext|> lines. Can be given multiple "
            "times.",
        ),
    ] = None,
    pairs: Annotated[
        Path | None, typer.Option(help="File with one translation pair per line: source, tab, target.")
    ] = None,
    labeled: Annotated[
        Path | None,
        typer.Option(help="File with labeled texts, in the format of `qkv finetune --data`."),
    ] = None,
    truncate: Annotated[
        bool,
        typer.Option(
            "--truncate",
            help="Truncate texts that exceed the context length instead of failing. Requires --labeled.",
        ),
    ] = False,
    against: Annotated[
        str | None, typer.Option(metavar="MODEL", help="Model to compare with. Requires --pairs.")
    ] = None,
    beam: Annotated[
        int | None,
        typer.Option(min=1, help="Number of beams (default: 5). A single beam is greedy decoding. Requires --pairs."),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Use only the first N documents (GPT) or pairs.")] = None,
    int8: Annotated[
        bool, typer.Option("--int8", help="Quantize MODEL to int8 (CPU only). The model of --against is not quantized.")
    ] = False,
    device: DeviceOption = "auto",
    backend: BackendOption = BackendName.AUTO,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Evaluate a model on held-out data.

    \b
    GPT (--text)                     loss, perplexity and bits per byte
    BERT (--text)                    masked-language-modeling and next-sentence accuracy
    Translator (--pairs)             BLEU and chrF
    Fine-tuned BERT (--labeled)      accuracy, F1, Matthews correlation and metrics per
                                     class, or the metrics of multi-label and regression
                                     models

    For a GPT, each document is scored separately. Bits per byte is the negative log2 probability of all tokens,
    including the end of each document, divided by the number of UTF-8 bytes of the documents without surrounding
    whitespace. Documents longer than the context are split into overlapping windows. In each window except the first,
    only the second half is scored. For a BERT, every evaluation uses the same masked tokens and sentence pairs.

    \b
    Examples:
      qkv evaluate run --text held-out.txt
      qkv evaluate run --text held-out.txt --limit 100 --json
      qkv evaluate bert --text reviews.txt[-500:]
      qkv evaluate es-en --pairs test.tsv --against es-en-rnn
      qkv evaluate sentiment --labeled dev.tsv
    """
    _check_one_dataset({"--text": text, "--pairs": pairs, "--labeled": labeled})
    if truncate and labeled is None:
        raise InputError("--truncate requires --labeled")
    device_options = DeviceOptions(device=device, int8=int8, backend=backend)
    if pairs is not None:
        from qkv.cli.evaluate_pairs import evaluate_pairs

        evaluate_pairs(
            model,
            pairs=pairs,
            against=against,
            beam=beam or DEFAULT_NUM_BEAMS,
            limit=limit,
            device_options=device_options,
            as_json=as_json,
        )
        return
    if against is not None:
        raise InputError("--against requires --pairs")
    if beam is not None:
        raise InputError(f"--beam {beam} requires --pairs")
    if labeled is not None:
        if limit is not None:
            raise InputError("--limit cannot be combined with --labeled")
        result = _evaluate_labeled(model, labeled, truncate=truncate, device_options=device_options)
    else:
        result = _evaluate_text(model, text or [], limit=limit, device_options=device_options)
    _print_metrics(result, as_json=as_json)


def _check_one_dataset(datasets: Mapping[str, object]) -> None:
    flags = [flag for flag, value in datasets.items() if value is not None]
    if not flags:
        raise InputError(
            "no evaluation data: use --text FILE for a GPT or BERT, --pairs FILE for a translator, or --labeled FILE "
            "for a fine-tuned BERT"
        )
    if len(flags) > 1:
        raise InputError(f"{' and '.join(flags)} cannot be combined")


def _evaluate_text(
    model: str, files: list[Path], *, limit: int | None, device_options: DeviceOptions
) -> dict[str, float | int | None]:
    from qkv.tasks import LanguageModel, TextEncoder

    match task := device_options.load_task_and_print_remarks(model):
        case LanguageModel():
            return _evaluate_language_model(task, files, limit=limit)
        case TextEncoder():
            if limit is not None:
                raise InputError(
                    "--limit with --text requires a GPT; to select the first 100 documents of a file, use FILE[:100]"
                )
            if "fill" not in task.capabilities:
                raise InputError(
                    f"{model}: must have a masked-language-modeling head, got a model that supports only "
                    f"{', '.join(task.capabilities)}"
                )
            return _evaluate_masked_language_model(task, files)
        case _:
            raise InputError(f"{model}: the evaluation of a translator requires --pairs")


def _evaluate_labeled(model: str, file: Path, *, truncate: bool, device_options: DeviceOptions) -> dict[str, Any]:
    from qkv.data.labeled_texts import ColumnNames
    from qkv.tasks import TextEncoder
    from qkv.tasks.evaluation import evaluate_classifier

    task = device_options.load_task_as_and_print_remarks(TextEncoder, model)
    return evaluate_classifier(task, file, columns=ColumnNames(), truncate=truncate)


def _print_metrics(result: Mapping[str, Any], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(result))
        return
    classes = result.get("classes", [])
    # For two classes, F1 is the score of the second class, so the name of that class is printed.
    metrics = {
        f"f1 of {classes[1]['class']}" if name == "f1" else name: value
        for name, value in result.items()
        if name != "classes"
    }
    width = max(map(len, metrics)) + 2
    for name, value in metrics.items():
        print(f"{name:{width}}{value:,.4f}" if isinstance(value, float) else f"{name:{width}}{value:,}")
    if classes:
        rows = [
            [entry["class"], f"{entry['rows']:,}", *(f"{entry[name]:.4f}" for name in CLASS_METRICS)]
            for entry in classes
        ]
        print("\n".join(["", *format_table(("class", "rows", *CLASS_METRICS), rows)]))


def _evaluate_language_model(
    task: "LanguageModel", files: list[Path], *, limit: int | None
) -> dict[str, float | int | None]:
    from qkv.data import read_documents
    from qkv.training.loop import EvaluationResult

    documents = islice(read_documents(files), limit)
    scores = list(track_progress(task.score_documents(documents), "documents"))
    if not scores:
        raise InputError("--text must contain at least 1 document, got 0")
    total = EvaluationResult(
        loss_sum=sum(score.loss_sum for score in scores),
        n_targets=sum(score.n_targets for score in scores),
        n_bytes=sum(score.n_bytes or 0 for score in scores),
    )
    return {
        "documents": len(scores),
        "tokens": total.n_targets,
        "bytes": total.n_bytes,
        "loss": total.loss,
        "perplexity": total.perplexity,
        "bits_per_byte": total.bits_per_byte,
    }


def _evaluate_masked_language_model(task: "TextEncoder", files: list[Path]) -> dict[str, float | int | None]:
    from qkv.training.bert import evaluate_bert_pretraining

    with sequential_progress_bars() as progress:
        result = evaluate_bert_pretraining(task.model, task.tokenizer, files, progress=progress)
    return {"masked_tokens": result.n_targets, **result.metrics}
