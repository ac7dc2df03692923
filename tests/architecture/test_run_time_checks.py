"""Annotations are checked at run time in the tests: wrong ranks, axes and types raise errors."""

import re

import pytest
import torch
from jaxtyping import TypeCheckError

from qkv.config import preset
from qkv.nn.norm import LayerNorm
from tests.architecture.paths import MODULES, relative


def test_a_wrong_rank_is_an_error():
    with pytest.raises(TypeCheckError, match="batch position d_model"):
        LayerNorm(7)(torch.zeros(3, 7))


def test_a_wrong_type_is_an_error():
    with pytest.raises(TypeCheckError, match="preset"):
        preset(3)


def test_a_correct_call_passes():
    assert LayerNorm(7)(torch.zeros(2, 3, 7)).shape == (2, 3, 7)


@pytest.mark.parametrize("path", MODULES, ids=relative)
def test_annotations_are_not_postponed(path):
    # jaxtyping requires annotations that are objects. Postponed annotations are strings and are not checked.
    source = path.read_text()
    assert not ("from __future__ import annotations" in source and re.search(r"jaxtyping|qkv\.tensors", source))


@pytest.mark.compiled
def test_compiled_tests_run_without_the_checks():
    assert LayerNorm(7)(torch.zeros(3, 7)).shape == (3, 7)
