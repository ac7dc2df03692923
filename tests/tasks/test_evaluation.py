"""A classifier beside labelled texts: the measures of its own answers."""

from itertools import pairwise

import pytest

from qkv.choices import ProblemType
from qkv.data.labeled_texts import ColumnNames
from qkv.errors import ContextLengthError, InputError
from qkv.tasks.evaluation import evaluate_classifier
from tests.tasks.small_bert import NAMES, small_bert

TEXTS = ["The cat sat on the mat", "the dog", "El niño comió", "x", "and the dog sat"]


def table(path, rows, header="text\tlabel"):
    path.write_text("\n".join([header, *("\t".join(row) for row in rows)]) + "\n")
    return path


def test_right_answers_are_counted(tmp_path):
    task = small_bert()
    labels = [answer.labels[0] for answer in task.classify(TEXTS)]
    wrong = NAMES[(NAMES.index(labels[0]) + 1) % 3]
    path = table(tmp_path / "rows.tsv", zip(TEXTS, [wrong, *labels[1:]], strict=True))
    found = evaluate_classifier(task, path, columns=ColumnNames())
    assert (found["rows"], found["accuracy"]) == (5, pytest.approx(0.8))
    assert [one["class"] for one in found["classes"]] == list(NAMES)
    assert sum(one["rows"] for one in found["classes"]) == 5


def test_pairs_are_read_as_pairs_and_numbers_as_numbers(tmp_path):
    task = small_bert(class_names=None, n_classes=1, problem_type=ProblemType.REGRESSION)
    pairs = list(pairwise(TEXTS))
    numbers = [answer.number for answer in task.classify(pairs)]
    rows = [(*pair, repr(2 * number + 1)) for pair, number in zip(pairs, numbers, strict=True)]
    found = evaluate_classifier(
        task, table(tmp_path / "rows.tsv", rows, "text_a\ttext_b\tscore"), columns=ColumnNames()
    )
    assert found["pearson"] == pytest.approx(1.0)


def test_several_labels_may_be_none(tmp_path):
    task = small_bert(problem_type=ProblemType.MULTI_LABEL)
    rows = [(text, ",".join(answer.labels)) for text, answer in zip(TEXTS, task.classify(TEXTS), strict=True)]
    assert evaluate_classifier(task, table(tmp_path / "rows.tsv", rows), columns=ColumnNames())["exact_match"] == 1.0


def test_what_cannot_be_judged_is_refused_in_words(tmp_path):
    path = table(tmp_path / "rows.tsv", [("x", "good"), ("the cat " * 40, "bad")])
    with pytest.raises(ContextLengthError, match=r"text 2 has 8. tokens.*\b43\b"):
        evaluate_classifier(small_bert(), path, columns=ColumnNames())
    assert evaluate_classifier(small_bert(), path, columns=ColumnNames(), truncate=True)["rows"] == 2
    with pytest.raises(InputError, match=r"line 2.*'good'.*\b2\b.*a, b"):
        evaluate_classifier(small_bert(class_names=("a", "b")), path, columns=ColumnNames())
    with pytest.raises(InputError, match=r"classification head.*embed"):
        evaluate_classifier(small_bert(class_names=None), path, columns=ColumnNames())
