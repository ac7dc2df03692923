"""The mechanism: what fits is filled in, what does not is listed, ties are seen once."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from qkv.errors import WeightsError
from qkv.weights.name_mapping import NameTable, NameMapping, Layout, linear
from qkv.weights.state_dict import load_into, to_published_state

TABLE = NameTable(
    mappings=[
        NameMapping("body.joined", ("upper.weight", "lower.weight"), Layout.TRANSPOSED),
        NameMapping("body.table", ("table.weight",)),
        NameMapping("head.weight", ("head.weight",)),
        NameMapping("head.row", ("head.bias",), Layout.SINGLE_ROW),
        *linear_mappings("body.absent", "absent"),
    ],
    prefix="body.",
    legacy_suffixes={"tabula": "table"},
    ignored_patterns=(r"mask\.\d+",),
)


class Small(nn.Module):
    """Two matrices that are published as one, a table, and a head that may be the table."""

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


def test_pieces_of_a_joined_and_turned_tensor_go_to_their_places():
    model, values = Small(), tensors()
    assert load_into(model, values, TABLE) == []
    assert torch.equal(model.upper.weight, values["body.joined"].T[:3])
    assert torch.equal(model.lower.weight, values["body.joined"].T[3:])
    assert torch.equal(model.head.bias, values["head.row"][0])


def test_published_tensors_are_what_was_filled_in():
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
    with pytest.raises(WeightsError, match=f"{len(names)} missing: ") as caught:
        fill(Small(), values, TABLE)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors().items()}
    assert all(f"{name} {shapes[name]}" in str(caught.value) for name in names)


def test_an_unexpected_tensor_is_listed_with_its_shape():
    values = {**tensors(), "body.extra": torch.zeros(2, 3), "body.absent.bias": torch.zeros(4)}
    with pytest.raises(WeightsError, match=r"2 unexpected: body\.extra \(2, 3\), body\.absent\.bias \(4,\)"):
        fill(Small(), values, TABLE)


def test_a_misshapen_tensor_is_listed_with_both_shapes():
    values = {**tensors(), "head.row": torch.zeros(7), "body.table": torch.zeros(5, 7)}
    with pytest.raises(
        WeightsError,
        match=r"2 misshapen: body\.table is \(5, 7\), must be \(7, 5\), head\.row is \(7,\), must be \(1, 7\)",
    ):
        fill(Small(), values, TABLE)


def test_whole_numbers_are_no_weights():
    values = {**tensors(), "body.table": torch.zeros(7, 5, dtype=torch.int8)}
    with pytest.raises(WeightsError, match=r"1 not floating-point: body\.table is torch\.int8"):
        fill(Small(), values, TABLE)


def test_all_faults_are_told_at_once_and_nothing_is_changed():
    model = Small()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    values = {"body.table": torch.ones(7, 5), "head.weight": torch.ones(3), "extra": torch.ones(1)}
    with pytest.raises(WeightsError, match=r"1 unexpected: .*2 missing: .*1 misshapen: "):
        load_into(model, values, TABLE)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_a_long_list_is_cut_and_says_how_long_it_is():
    values = {**tensors(), **{f"extra.{i}": torch.ones(1) for i in range(23)}}
    with pytest.raises(WeightsError, match=r"23 unexpected: .*extra\.19 \(1,\) and 3 more$"):
        fill(Small(), values, TABLE)


@pytest.mark.parametrize("left_out", [None, "body.table", "head.weight"])
def test_a_tied_tensor_may_stand_under_either_name_or_both(left_out):
    model, values = Small(tied=True), tensors(tied=True)
    table = values["body.table"]
    values.pop(left_out, None)
    load_into(model, values, TABLE)
    assert model.head.weight is model.table.weight
    assert torch.equal(model.table.weight, table)
    assert to_published_state(model, TABLE).keys() == {"body.joined", "body.table", "head.row"}


def test_tied_tensors_that_differ_are_refused():
    with pytest.raises(WeightsError, match=r"1 tied in the model but different: body\.table and head\.weight"):
        fill(Small(tied=True), tensors(tied=False), TABLE)


def test_names_without_the_prefix_and_in_the_old_spelling_are_known():
    model, values = Small(), tensors()
    bare = {name.removeprefix("body."): tensor for name, tensor in values.items() if name != "body.table"}
    load_into(model, {**bare, "body.tabula": values["body.table"]}, TABLE)
    assert torch.equal(model.table.weight, values["body.table"])


def test_one_tensor_under_two_spellings_is_refused():
    values = {**tensors(), "table": torch.zeros(7, 5)}
    with pytest.raises(WeightsError, match=r"names one tensor twice: body\.table and table"):
        fill(Small(), values, TABLE)


def test_what_holds_nothing_learned_is_left_out_and_told():
    values = {**tensors(), "body.mask.3": torch.zeros(2, dtype=torch.bool), "mask.5": torch.zeros(1)}
    assert fill(Small(), values, TABLE) == ["body.mask.3", "mask.5"]


def test_a_parameter_without_a_published_name_is_refused():
    model = Small()
    model.more = nn.Linear(2, 3)
    with pytest.raises(WeightsError, match=r"2 of 7 parameters have no published name: more\.weight, more\.bias"):
        load_into(model, tensors(), TABLE)
    with pytest.raises(WeightsError, match="no published name"):
        to_published_state(model, TABLE)


def test_a_model_without_memory_cannot_be_filled():
    with torch.device("meta"):
        model = Small()
    with pytest.raises(WeightsError, match=r"5 parameters have no memory \(meta device\), upper\.weight the first"):
        load_into(model, tensors(), TABLE)


def test_values_take_the_models_own_precision():
    model = Small().double()
    values = tensors()
    load_into(model, {name: tensor.bfloat16() for name, tensor in values.items()}, TABLE)
    assert model.table.weight.dtype == torch.float64
    assert torch.equal(model.table.weight, values["body.table"].bfloat16().double())
