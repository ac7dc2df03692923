"""Metrics of a classifier on labeled texts."""

from itertools import pairwise

import pytest

from qkv.choices import ProblemType
from qkv.data.labeled_texts import ColumnNames
from qkv.errors import ContextLengthError, InputError
from qkv.tasks.evaluation import evaluate_classifier
from tests.tasks.small_bert import NAMES, small_bert

TEXTS = ["The cat sat on the mat", "the dog", "El niño comió", "x", "and the dog sat"]


def write_table(path, rows, header="text\tlabel"):
    path.write_text("\n".join([header, *("\t".join(row) for row in rows)]) + "\n")
    return path


def test_accuracy_and_per_class_rows(tmp_path):
    task = small_bert()
    labels = [answer.labels[0] for answer in task.classify(TEXTS)]
    wrong = NAMES[(NAMES.index(labels[0]) + 1) % 3]
    path = write_table(tmp_path / "rows.tsv", zip(TEXTS, [wrong, *labels[1:]], strict=True))
    metrics = evaluate_classifier(task, path, columns=ColumnNames())
    assert (metrics["rows"], metrics["accuracy"]) == (5, pytest.approx(0.8))
    assert [class_metrics["class"] for class_metrics in metrics["classes"]] == list(NAMES)
    assert sum(class_metrics["rows"] for class_metrics in metrics["classes"]) == 5


def test_regression_on_pairs(tmp_path):
    task = small_bert(class_names=None, n_classes=1, problem_type=ProblemType.REGRESSION)
    pairs = list(pairwise(TEXTS))
    numbers = [answer.value for answer in task.classify(pairs)]
    rows = [(*pair, repr(2 * number + 1)) for pair, number in zip(pairs, numbers, strict=True)]
    metrics = evaluate_classifier(
        task, write_table(tmp_path / "rows.tsv", rows, "text_a\ttext_b\tscore"), columns=ColumnNames()
    )
    assert metrics["pearson"] == pytest.approx(1.0)


def test_multi_label_rows_may_have_no_label(tmp_path):
    task = small_bert(problem_type=ProblemType.MULTI_LABEL)
    rows = [(text, ",".join(answer.labels)) for text, answer in zip(TEXTS, task.classify(TEXTS), strict=True)]
    assert (
        evaluate_classifier(task, write_table(tmp_path / "rows.tsv", rows), columns=ColumnNames())["exact_match"] == 1.0
    )


def test_invalid_evaluations_raise(tmp_path):
    path = write_table(tmp_path / "rows.tsv", [("x", "good"), ("the cat " * 40, "bad")])
    with pytest.raises(ContextLengthError, match=r"text 2 has 8. tokens.*\b43\b"):
        evaluate_classifier(small_bert(), path, columns=ColumnNames())
    assert evaluate_classifier(small_bert(), path, columns=ColumnNames(), truncate=True)["rows"] == 2
    with pytest.raises(InputError, match=r"line 2.*'good'.*\b2\b.*a, b"):
        evaluate_classifier(small_bert(class_names=("a", "b")), path, columns=ColumnNames())
    with pytest.raises(InputError, match=r"classification head.*embed"):
        evaluate_classifier(small_bert(class_names=None), path, columns=ColumnNames())
