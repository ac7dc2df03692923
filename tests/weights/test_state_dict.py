"""Tensors that match are loaded, all others are listed, and tied tensors are handled once."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from qkv.errors import WeightsError
from qkv.weights.model_loader import load_into, to_published_state
from qkv.weights.name_table import Layout, NameMapping, NameTable, weight_and_bias_mappings

TABLE = NameTable(
    mappings=[
        NameMapping("body.joined", ("upper.weight", "lower.weight"), Layout.TRANSPOSED),
        NameMapping("body.table", ("table.weight",)),
        NameMapping("head.weight", ("head.weight",)),
        NameMapping("head.row", ("head.bias",), Layout.SINGLE_ROW),
        *weight_and_bias_mappings("body.absent", "absent"),
    ],
    prefix="body.",
    legacy_suffixes={"tabula": "table"},
    ignored_patterns=(r"mask\.\d+",),
)


class Small(nn.Module):
    """Two matrices that are published as one, an embedding, and a head that may be tied to it."""

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.upper = nn.Linear(5, 3, bias=False)
        self.lower = nn.Linear(5, 2, bias=False)
        self.table = nn.Embedding(7, 5)
        self.head = nn.Linear(5, 7)
        if tied:
            self.head.weight = self.table.weight


def tensors(*, tied: bool = False) -> dict[str, torch.Tensor]:
    table = torch.randn(7, 5)
    return {
        "body.joined": torch.randn(5, 5),
        "body.table": table,
        "head.weight": table.clone() if tied else torch.randn(7, 5),
        "head.row": torch.randn(1, 7),
    }


def test_a_concatenated_and_transposed_tensor_is_split():
    model, values = Small(), tensors()
    assert load_into(model, values, TABLE) == []
    assert torch.equal(model.upper.weight, values["body.joined"].T[:3])
    assert torch.equal(model.lower.weight, values["body.joined"].T[3:])
    assert torch.equal(model.head.bias, values["head.row"][0])


def test_published_tensors_round_trip():
    model, values = Small(), tensors()
    load_into(model, values, TABLE)
    back = to_published_state(model, TABLE)
    assert back.keys() == values.keys()
    assert all(torch.equal(back[name], values[name]) for name in values)


def test_a_published_tensor_is_a_copy():
    model = Small()
    before = to_published_state(model, TABLE)["body.table"]
    with torch.no_grad():
        model.table.weight.add_(1)
    assert torch.equal(before + 1, model.table.weight)


@given(st.sets(st.sampled_from(sorted(tensors())), min_size=1))
def test_every_missing_tensor_is_listed_with_its_shape(names):
    values = {name: tensor for name, tensor in tensors().items() if name not in names}
    with pytest.raises(WeightsError, match=rf"\b{len(names)} missing") as caught:
        load_into(Small(), values, TABLE)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors().items()}
    assert all(f"{name} {shapes[name]}" in str(caught.value) for name in names)


def test_an_unexpected_tensor_is_listed_with_its_shape():
    values = {**tensors(), "body.extra": torch.zeros(2, 3), "body.absent.bias": torch.zeros(4)}
    with pytest.raises(WeightsError, match=r"body\.extra \(2, 3\), body\.absent\.bias \(4,\)"):
        load_into(Small(), values, TABLE)


def test_a_wrong_shape_is_listed_with_both_shapes():
    values = {**tensors(), "head.row": torch.zeros(7), "body.table": torch.zeros(5, 7)}
    with pytest.raises(
        WeightsError,
        match=r"body\.table .*\(5, 7\).*\(7, 5\), head\.row .*\(7,\).*\(1, 7\)",
    ):
        load_into(Small(), values, TABLE)


def test_integer_tensors_are_rejected():
    values = {**tensors(), "body.table": torch.zeros(7, 5, dtype=torch.int8)}
    with pytest.raises(WeightsError, match=r"body\.table .*torch\.int8"):
        load_into(Small(), values, TABLE)


def test_all_problems_are_listed_and_nothing_is_changed():
    model = Small()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    values = {"body.table": torch.ones(7, 5), "head.weight": torch.ones(3), "extra": torch.ones(1)}
    with pytest.raises(WeightsError, match=r"extra \(1,\).*body\.joined .*head\.row .*head\.weight .*\(3,\)"):
        load_into(model, values, TABLE)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_a_long_list_is_truncated_with_its_length():
    values = {**tensors(), **{f"extra.{i}": torch.ones(1) for i in range(23)}}
    with pytest.raises(WeightsError, match=r"\b23 .*extra\.19 \(1,\) .*\b3\b"):
        load_into(Small(), values, TABLE)


@pytest.mark.parametrize("omitted", [None, "body.table", "head.weight"])
def test_a_tied_tensor_may_have_either_name_or_both(omitted):
    model, values = Small(tied=True), tensors(tied=True)
    table = values["body.table"]
    values.pop(omitted, None)
    load_into(model, values, TABLE)
    assert model.head.weight is model.table.weight
    assert torch.equal(model.table.weight, table)
    assert to_published_state(model, TABLE).keys() == {"body.joined", "body.table", "head.row"}


def test_tied_tensors_that_differ_are_rejected():
    with pytest.raises(WeightsError, match=r"body\.table .*head\.weight"):
        load_into(Small(tied=True), tensors(tied=False), TABLE)


def test_names_without_prefix_and_with_legacy_suffix_are_accepted():
    model, values = Small(), tensors()
    canonical = {name.removeprefix("body."): tensor for name, tensor in values.items() if name != "body.table"}
    load_into(model, {**canonical, "body.tabula": values["body.table"]}, TABLE)
    assert torch.equal(model.table.weight, values["body.table"])


def test_one_tensor_under_two_names_is_rejected():
    values = {**tensors(), "table": torch.zeros(7, 5)}
    with pytest.raises(WeightsError, match=r"body\.table and table$"):
        load_into(Small(), values, TABLE)


def test_tensors_that_are_not_learned_are_ignored_and_returned():
    values = {**tensors(), "body.mask.3": torch.zeros(2, dtype=torch.bool), "mask.5": torch.zeros(1)}
    assert load_into(Small(), values, TABLE) == ["body.mask.3", "mask.5"]


def test_a_parameter_without_a_published_name_is_rejected():
    model = Small()
    model.more = nn.Linear(2, 3)
    with pytest.raises(WeightsError, match=r"2 of 7 .*more\.weight, more\.bias"):
        load_into(model, tensors(), TABLE)
    with pytest.raises(WeightsError, match=r"2 of 7 .*more\.weight"):
        to_published_state(model, TABLE)


def test_a_model_on_the_meta_device_is_rejected():
    with torch.device("meta"):
        model = Small()
    with pytest.raises(WeightsError, match=r"\b5 .*meta.*upper\.weight"):
        load_into(model, tensors(), TABLE)


def test_values_are_converted_to_the_dtype_of_the_model():
    model = Small().double()
    values = tensors()
    load_into(model, {name: tensor.bfloat16() for name, tensor in values.items()}, TABLE)
    assert model.table.weight.dtype == torch.float64
    assert torch.equal(model.table.weight, values["body.table"].bfloat16().double())
