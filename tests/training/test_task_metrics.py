"""Figures of answers against their definitions, written out slowly, and against numbers worked out by hand."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from qkv.choices import ProblemType
from qkv.training.task_metrics import (
    accuracy,
    confusion,
    f1_per_class,
    matthews_correlation,
    measure,
    pearson_correlation,
    per_class_report,
    spearman_correlation,
)

TRUTH = np.array([0, 0, 0, 1, 1, 2, 2, 2])
ANSWERS = np.array([0, 0, 1, 1, 1, 2, 0, 2])
TABLE = confusion_matrix(ANSWERS, TRUTH, n_classes=3)


def test_the_confusion_matrix_has_truth_in_its_rows():
    assert TABLE.tolist() == [[2, 1, 0], [0, 2, 0], [1, 0, 2]]


def test_the_figures_of_classes_are_those_worked_out_by_hand():
    assert accuracy(TABLE) == 6 / 8
    assert f1_per_class(TABLE) == pytest.approx([2 / 3, 4 / 5, 4 / 5])
    assert matthews_correlation(confusion(np.array([1, 1, 0, 1]), np.array([1, 0, 0, 1]), n_classes=2)) == pytest.approx(3**-0.5)


def test_of_each_class_precision_and_recall_are_told():
    table = np.array([[3, 2, 0], [1, 7, 0], [0, 0, 0]])
    first, second, absent = per_class_report(table, ("a", "b", "c"))
    assert first == {"class": "a", "rows": 5, "precision": 3 / 4, "recall": 3 / 5, "f1": pytest.approx(2 / 3)}
    assert (second["precision"], second["recall"]) == (7 / 9, 7 / 8)
    assert absent == {"class": "c", "rows": 0, "precision": 0.0, "recall": 0.0, "f1": 0.0}


def test_for_two_classes_f1_is_that_of_the_second():
    found = measure(ProblemType.SINGLE_LABEL, np.array([1, 1, 0, 1]), np.array([1, 0, 0, 1]), n_classes=2)
    assert list(found) == ["accuracy", "f1", "f1_macro", "mcc"]
    assert found["f1"] == pytest.approx(4 / 5)
    assert found["f1_macro"] == pytest.approx((4 / 5 + 2 / 3) / 2)


def test_several_labels_are_counted_together_and_each_for_itself():
    truth = np.array([[1, 0, 1], [0, 0, 1], [1, 1, 0]])
    answers = np.array([[1, 0, 0], [0, 0, 1], [1, 0, 0]])
    found = measure(ProblemType.MULTI_LABEL, answers, truth, n_classes=3)
    assert found == pytest.approx({"f1_micro": 6 / 8, "f1_macro": (1 + 0 + 2 / 3) / 3, "exact_match": 1 / 3})


def test_a_number_is_judged_by_correlation_and_distance():
    found = measure(ProblemType.REGRESSION, np.array([1.0, 2.0, 4.0]), np.array([2.0, 4.0, 5.0]), n_classes=1)
    assert found == pytest.approx({"pearson": 0.9285714, "spearman": 1.0, "absolute_error": 4 / 3})


def test_equal_values_share_their_ranks():
    assert spearman_correlation(np.array([1.0, 1.0, 2.0, 3.0]), np.array([1.0, 2.0, 3.0, 4.0])) == pytest.approx(0.9486833)


@pytest.mark.parametrize("figure", [pearson_correlation, spearman_correlation])
def test_a_constant_correlates_with_nothing(figure):
    assert figure(np.ones(5), np.arange(5.0)) == 0.0


def test_one_class_answered_throughout_has_no_matthews():
    assert matthews_correlation(confusion(np.zeros(5, int), np.array([0, 1, 0, 1, 1]), n_classes=2)) == 0.0


classes = arrays(np.int64, 29, elements=st.integers(0, 4))


@given(classes, classes)
def test_matthews_is_the_correlation_of_one_hot_tables(answers, truth):
    x, y = np.eye(5)[answers], np.eye(5)[truth]
    x, y = x - x.mean(0), y - y.mean(0)
    size = np.sqrt((x * x).sum() * (y * y).sum())
    expected = (x * y).sum() / size if size > 1e-9 else 0.0
    assert matthews_correlation(confusion_matrix(answers, truth, n_classes=5)) == pytest.approx(expected, abs=1e-9)


@given(classes, classes)
def test_renaming_the_classes_changes_no_figure(answers, truth):
    rename = np.array([3, 0, 4, 1, 2])
    before = measure(ProblemType.SINGLE_LABEL, answers, truth, n_classes=5)
    assert measure(ProblemType.SINGLE_LABEL, rename[answers], rename[truth], n_classes=5) == pytest.approx(before)


numbers = arrays(np.float64, 17, elements=st.integers(-9, 9).map(float))


@given(numbers, numbers)
def test_spearman_does_not_see_how_far_apart_values_are(a, b):
    assert spearman_correlation(a**3, b) == pytest.approx(spearman_correlation(a, b))
    assert pearson_correlation(3 * a + 7, b) == pytest.approx(pearson_correlation(a, b))
    if a.std() and b.std():
        assert pearson_correlation(a, b) == pytest.approx(np.corrcoef(a, b)[0, 1])
