"""Tests for classification and regression metrics against their definitions and hand-computed values."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from qkv.choices import ProblemType
from qkv.training.task_metrics import (
    accuracy,
    compute_task_metrics,
    confusion_matrix,
    f1_per_class,
    matthews_correlation,
    pearson_correlation,
    per_class_report,
    spearman_correlation,
)

TARGETS = np.array([0, 0, 0, 1, 1, 2, 2, 2])
PREDICTIONS = np.array([0, 0, 1, 1, 1, 2, 0, 2])
MATRIX = confusion_matrix(PREDICTIONS, TARGETS, n_classes=3)


def test_the_confusion_matrix_has_true_classes_as_rows():
    assert MATRIX.tolist() == [[2, 1, 0], [0, 2, 0], [1, 0, 2]]


def test_class_metrics_match_hand_computed_values():
    assert accuracy(MATRIX) == 6 / 8
    assert f1_per_class(MATRIX) == pytest.approx([2 / 3, 4 / 5, 4 / 5])
    assert matthews_correlation(
        confusion_matrix(np.array([1, 1, 0, 1]), np.array([1, 0, 0, 1]), n_classes=2)
    ) == pytest.approx(3**-0.5)


def test_the_report_has_precision_and_recall_of_each_class():
    matrix = np.array([[3, 2, 0], [1, 7, 0], [0, 0, 0]])
    first, second, absent = per_class_report(matrix, ("a", "b", "c"))
    assert first == {"class": "a", "rows": 5, "precision": 3 / 4, "recall": 3 / 5, "f1": pytest.approx(2 / 3)}
    assert (second["precision"], second["recall"]) == (7 / 9, 7 / 8)
    assert absent == {"class": "c", "rows": 0, "precision": 0.0, "recall": 0.0, "f1": 0.0}


def test_the_binary_f1_is_that_of_the_second_class():
    metrics = compute_task_metrics(
        ProblemType.SINGLE_LABEL, np.array([1, 1, 0, 1]), np.array([1, 0, 0, 1]), n_classes=2
    )
    assert list(metrics) == ["accuracy", "f1", "f1_macro", "mcc"]
    assert metrics["f1"] == pytest.approx(4 / 5)
    assert metrics["f1_macro"] == pytest.approx((4 / 5 + 2 / 3) / 2)


def test_multi_label_f1_is_computed_micro_and_macro():
    targets = np.array([[1, 0, 1], [0, 0, 1], [1, 1, 0]])
    predictions = np.array([[1, 0, 0], [0, 0, 1], [1, 0, 0]])
    metrics = compute_task_metrics(ProblemType.MULTI_LABEL, predictions, targets, n_classes=3)
    assert metrics == pytest.approx({"f1_micro": 6 / 8, "f1_macro": (1 + 0 + 2 / 3) / 3, "exact_match": 1 / 3})


def test_regression_is_measured_by_correlation_and_absolute_error():
    metrics = compute_task_metrics(
        ProblemType.REGRESSION, np.array([1.0, 2.0, 4.0]), np.array([2.0, 4.0, 5.0]), n_classes=1
    )
    assert metrics == pytest.approx({"pearson": 0.9285714, "spearman": 1.0, "absolute_error": 4 / 3})


def test_equal_values_share_their_ranks():
    assert spearman_correlation(np.array([1.0, 1.0, 2.0, 3.0]), np.array([1.0, 2.0, 3.0, 4.0])) == pytest.approx(
        0.9486833
    )


@pytest.mark.parametrize("correlation", [pearson_correlation, spearman_correlation])
def test_a_constant_has_zero_correlation(correlation):
    assert correlation(np.ones(5), np.arange(5.0)) == 0.0


def test_constant_predictions_have_zero_matthews_correlation():
    assert matthews_correlation(confusion_matrix(np.zeros(5, int), np.array([0, 1, 0, 1, 1]), n_classes=2)) == 0.0


classes = arrays(np.int64, 29, elements=st.integers(0, 4))


@given(classes, classes)
def test_matthews_is_the_correlation_of_one_hot_matrices(predictions, targets):
    x, y = np.eye(5)[predictions], np.eye(5)[targets]
    x, y = x - x.mean(0), y - y.mean(0)
    scale = np.sqrt((x * x).sum() * (y * y).sum())
    expected = (x * y).sum() / scale if scale > 1e-9 else 0.0
    assert matthews_correlation(confusion_matrix(predictions, targets, n_classes=5)) == pytest.approx(
        expected, abs=1e-9
    )


@given(classes, classes)
def test_metrics_do_not_depend_on_class_order(predictions, targets):
    permutation = np.array([3, 0, 4, 1, 2])
    before = compute_task_metrics(ProblemType.SINGLE_LABEL, predictions, targets, n_classes=5)
    assert compute_task_metrics(
        ProblemType.SINGLE_LABEL, permutation[predictions], permutation[targets], n_classes=5
    ) == pytest.approx(before)


values = arrays(np.float64, 17, elements=st.integers(-9, 9).map(float))


@given(values, values)
def test_spearman_is_invariant_to_monotonic_transforms(a, b):
    assert spearman_correlation(a**3, b) == pytest.approx(spearman_correlation(a, b))
    assert pearson_correlation(3 * a + 7, b) == pytest.approx(pearson_correlation(a, b))
    if a.std() and b.std():
        assert pearson_correlation(a, b) == pytest.approx(np.corrcoef(a, b)[0, 1])
