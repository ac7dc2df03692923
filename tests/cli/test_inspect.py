"""`qkv inspect`: views as tables, JSON and figures; interventions and errors."""

import json
import re
import shutil
import sys
from functools import partial

import pytest

from qkv.choices import AttentionStack, ViewKind
from qkv.inspection import EdgeMask, HeadAblation, classify_heads, coreference, prepare_input, run_with_cache
from qkv.inspection.interventions import describe_intervention
from qkv.tasks import load
from tests.cli.answers import assert_only_error
from tests.inspection.examples import example_task
from tests.tasks.small_bert import save_bert
from tests.tasks.small_gpt import save_task, small_gpt

TEXT = "The cat sat on the mat, and it slept by the dog."
NEEDS = {
    ViewKind.COREFERENCE: ["--candidates", "cat,mat"],
    ViewKind.EFFECT: ["--ablate-head", "1.2", "--mask-edge", "it:cat"],
}
VIEWS = [view for view in ViewKind if view is not ViewKind.TIMELINE]


@pytest.fixture
def command(command):
    return partial(command, "inspect")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_task(small_gpt(), tmp_path_factory.mktemp("model") / "small")


@pytest.fixture(scope="module")
def translator(tmp_path_factory):
    return save_task(example_task("seq2seq"), tmp_path_factory.mktemp("model") / "translator")


@pytest.mark.parametrize("view", VIEWS)
def test_every_view_has_a_table_and_json(command, folder, view):
    table = command(folder, TEXT, "--view", view, *NEEDS.get(view, []))
    assert table.status == 0, table.err
    assert len(table.out.splitlines()) > 4
    result = json.loads(command(folder, TEXT, "--view", view, "--json", *NEEDS.get(view, [])).out)
    assert (result["view"], result["text"]) == (view, TEXT)


def test_views_of_two_texts_are_separated_by_a_blank_line(command, folder):
    first, second = (command(folder, text, "--view", "map").out for text in (TEXT, "the dog"))
    assert first.rstrip("\n") + "\n" == first
    assert command(folder, TEXT, "the dog", "--view", "map").out == f"{first}\n{second}"


def test_the_columns_of_the_coreference_view_are_explained(command, folder):
    assert "nats" in command(folder, TEXT, "--view", "coreference", *NEEDS[ViewKind.COREFERENCE]).out
    last = TEXT.partition("it")[0] + "it"
    assert "nats" not in command(folder, last, "--view", "coreference", *NEEDS[ViewKind.COREFERENCE]).out


def test_values_are_those_of_the_python_api(command, folder):
    task = load(folder)
    result = json.loads(command(folder, TEXT, "--json").out)
    view = classify_heads(run_with_cache(task.model, prepare_input(task, TEXT)))
    assert result["scores"][1][2] == pytest.approx(view.scores[1, 2].tolist())
    assert result["error"] < 1e-5
    expected = coreference(task, TEXT, pronoun="it", candidates=["cat", "mat"])
    result = json.loads(command(folder, TEXT, "--view", "coreference", "--candidates", "cat,mat", "--json").out)
    assert result["knock_out"] == pytest.approx(expected.knock_out)
    assert expected.verdict[1:] in command(
        folder, TEXT, "--view", "coreference", "--candidates", "cat,mat"
    ).out.replace("\n", " ")


def test_the_output_of_an_ablated_head_is_zero(command, folder):
    result = json.loads(command(folder, TEXT, "--view", "residual", "--ablate-head", "0.1", "--json").out)
    assert max(result["head_norms"][0][1]) == 0
    assert min(result["head_norms"][0][0]) > 0


def test_a_masked_edge_has_weight_zero_and_the_sink_can_be_excluded(command, folder):
    tokens = prepare_input(load(folder), TEXT).sequence
    query, key = tokens.find_last_occurrence("it")[-1], tokens.find_last_occurrence("cat")[-1]
    result = json.loads(command(folder, TEXT, "--view", "map", "--layer", 1, "--mask-edge", "it:cat", "--json").out)
    assert result["weights"][query][key] == 0
    result = json.loads(command(folder, TEXT, "--view", "map", "--no-sink", "--words", "--json").out)
    assert result["keys"][:2] == ["The", "cat"]
    assert result["weights"][3][0] == 0
    assert sum(result["weights"][3]) == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("view", ["map", "heads"])
def test_a_view_lists_the_interventions(command, folder, monkeypatch, tmp_path, view):
    model_input = prepare_input(load(folder), TEXT)
    interventions = [
        HeadAblation(stack=AttentionStack.SELF, layer=0, head=1),
        EdgeMask(stack=AttentionStack.SELF, query=5, key=2),
    ]
    changes = [describe_intervention(intervention, model_input) for intervention in interventions]
    arguments = [folder, TEXT, "--view", view, "--ablate-head", "0.1", "--mask-edge", "5:2"]
    assert command(*arguments).out.startswith(f"Interventions: {'; '.join(changes)}.\n")
    assert "Interventions" not in command(*arguments[:4]).out
    assert json.loads(command(*arguments, "--json").out)["changes"] == changes
    titles = []
    monkeypatch.setattr("qkv.inspection.figures.save_figure", lambda figure, _: titles.append(figure.get_suptitle()))
    command(*arguments, "--plot", tmp_path / "a.png")
    assert " ".join(titles[0].split()).startswith(" ".join([TEXT, *changes]))
    assert max(len(line) for line in titles[0].splitlines()) < 90


def test_masking_a_future_key_is_reported_as_ineffective(command, folder):
    answer = command(folder, TEXT, "--view", "effect", "--mask-edge", "2:5", "--mask-edge", "5:2")
    assert answer.status == 0
    assert re.fullmatch(r"qkv: --mask-edge 2:5 .*\n", answer.err)


def test_json_has_one_line_per_line_of_standard_input(command, folder, monkeypatch, tmp_path):
    (tmp_path / "in.txt").write_text("the cat\nthe dog sat\n")
    with (tmp_path / "in.txt").open() as stream:
        monkeypatch.setattr(sys, "stdin", stream)
        answer = command(folder, "--view", "logit-lens", "--json")
    assert [json.loads(line)["text"] for line in answer.out.splitlines()] == ["the cat", "the dog sat"]


def test_a_figure_is_saved_and_nothing_is_printed(command, folder, tmp_path):
    for name in ("a.png", "a.svg", "a.pdf"):
        answer = command(folder, TEXT, "--view", "map", "--plot", tmp_path / name)
        assert (answer.status, answer.out) == (0, "")
        assert (tmp_path / name).stat().st_size > 5000


def test_a_bert_and_a_translator_can_be_inspected(command, translator, tmp_path):
    bert = save_bert(tmp_path / "bert")
    result = json.loads(command(bert, "the [MASK] sat", "--view", "logit-lens", "--json").out)
    assert result["positions"][2] == "[MASK]"
    assert not result["predicts_next"]
    result = json.loads(command(translator, "the cat sat", "--target", "the dog", "--view", "map", "--json").out)
    assert len(result["keys"]) > 3
    assert "cross" in result["title"]
    result = json.loads(command(translator, "the cat", "--view", "heads", "--stack", "decoder", "--json").out)
    assert result["stack"] == "decoder"


def test_a_word_of_the_translation_refers_to_the_row_that_the_map_labels_with_it(command, translator):
    model_input = prepare_input(load(translator), "the cat sat", "the dog slept")
    arguments = [translator, "the cat sat", "--target", "the dog slept"]
    chosen, fed, key = (
        model_input.generated.find_last_occurrence("dog")[-1],
        model_input.sequence.find_last_occurrence("dog")[-1],
        model_input.source.find_last_occurrence("cat")[-1],
    )
    mask = ["--mask-edge", "dog:cat", "--stack", "cross"]
    result = json.loads(command(*arguments, "--view", "map", *mask, "--json").out)
    assert result["weights"][chosen][key] == 0
    assert result["queries"][chosen] == model_input.generated.labels[chosen]
    result = json.loads(command(*arguments, "--view", "effect", *mask, "--query", "dog", "--json").out)
    assert result["position"] == chosen
    edge_mask = EdgeMask(stack=AttentionStack.CROSS, query=chosen, key=key)
    assert result["changes"] == [describe_intervention(edge_mask, model_input)]
    label = model_input.generated.labels[chosen]
    table = command(*arguments, "--view", "effect", *mask, "--query", "dog").out
    assert label in table.splitlines()[0]
    assert model_input.sequence.labels[chosen] in table.splitlines()[0]
    for view, stack, position in [("neuron", ["--stack", "decoder"], fed), ("neuron", ["--stack", "cross"], chosen)]:
        assert (
            json.loads(command(*arguments, "--view", view, *stack, "--query", "dog", "--json").out)["query"] == position
        )
    result = json.loads(command(*arguments, "--view", "neuron", "--query", "cat", "--json").out)
    assert (result["stack"], result["query"]) == ("encoder", key)
    assert (
        json.loads(command(*arguments, "--view", "logit-attribution", "--query", "dog", "--json").out)["position"]
        == chosen
    )


def test_a_timeline_has_every_checkpoint_of_a_run(command, folder, tmp_path):
    for step in (5, 11):
        shutil.copytree(folder, tmp_path / "run" / "checkpoints" / f"step-{step:08d}")
    answer = command(tmp_path / "run", TEXT, "--view", "timeline", "--json")
    assert json.loads(answer.out)["steps"] == [5, 11]
    assert all(part in answer.err for part in ("run: ", "2 checkpoints", "training.keep_checkpoints"))
    assert "induction" in command(tmp_path / "run", TEXT, "--view", "timeline").out
    assert command(tmp_path / "run", TEXT, "--view", "timeline", "--plot", tmp_path / "t.png").status == 0


def test_invalid_options_are_reported_in_one_line(command, folder, translator, tmp_path):
    headless = save_bert(tmp_path / "headless", masked_lm_head=False)
    rnn = save_task(example_task("rnn"), tmp_path / "rnn")
    for arguments, parts in [
        ([folder, TEXT, "--view", "coreference"], ["--candidates", "0"]),
        ([folder, TEXT, "--view", "effect"], ["--view effect", "--ablate-head", "--mask-edge"]),
        ([folder, TEXT, "--ablate-head", "1"], ["--ablate-head 1: ", "LAYER.HEAD"]),
        ([folder, TEXT, "--ablate-head", "0.9"], ["3 heads", "9"]),
        ([folder, TEXT, "--ablate-head", "99.9"], ["layer", "99", "2 layers"]),
        ([headless, "a cat", "--view", "logit-lens"], ["head"]),
        ([folder, TEXT, "--mask-edge", "7"], ["--mask-edge 7: ", "QUERY:KEY"]),
        ([folder, TEXT, "--mask-edge", "99:1"], ["position", "99"]),
        ([folder, TEXT, "--view", "map", "--layer", "2"], ["layer", "2 layers"]),
        ([folder, TEXT, "--view", "neuron", "--query", "zebra"], ["'zebra'"]),
        ([folder, TEXT, "--stack", "cross"], ["cross"]),
        ([folder, TEXT, "--view", "timeline"], [f"{folder}: ", "--view timeline"]),
        ([folder, "cat " * 99], ["context_length", "41"]),
        ([folder, TEXT, TEXT, "--plot", tmp_path / "a.png"], ["--plot", "1", "2"]),
        ([folder, TEXT, "--plot", tmp_path / "a.gif"], ["a.gif: ", ".png"]),
        ([folder, TEXT, "--plot", tmp_path / "no" / "a.png"], ["a.png: ", str(tmp_path / "no")]),
        ([rnn, "the cat", "--mask-edge", "1:1"], ["RNN"]),
        ([translator, "the cat", "--view", "coreference", "--candidates", "a,b"], ["GPT", "BERT"]),
    ]:
        assert_only_error(command(*arguments), *parts)
