"""`qkv look`: every view as a table, as JSON, as a picture; mistakes in one line."""

import json
import shutil
import sys
from functools import partial

import pytest

from qkv.choices import ViewKind
from qkv.inspection import classify_heads, coreference, prepare_input, run_with_cache
from qkv.tasks import load
from tests.inspection.examples import task
from tests.tasks.small_bert import saved_bert
from tests.tasks.small_gpt import saved, small_task

TEXT = "The cat sat on the mat, and it slept by the dog."
NEEDS = {ViewKind.IT: ["--candidates", "cat,mat"], ViewKind.EFFECT: ["--off", "1.2", "--cut", "it:cat"]}
VIEWS = [view for view in ViewKind if view is not ViewKind.TIMELINE]


@pytest.fixture
def command(command):
    return partial(command, "look")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return saved(small_task(), tmp_path_factory.mktemp("model") / "small")


@pytest.fixture(scope="module")
def translator(tmp_path_factory):
    return saved(task("seq2seq"), tmp_path_factory.mktemp("model") / "translator")


@pytest.mark.parametrize("view", VIEWS)
def test_every_view_has_a_table_and_json(command, folder, view):
    table = command(folder, TEXT, "--view", view, *NEEDS.get(view, []))
    assert table.status == 0, table.err
    assert len(table.out.splitlines()) > 4
    said = json.loads(command(folder, TEXT, "--view", view, "--json", *NEEDS.get(view, [])).out)
    assert (said["view"], said["text"]) == (view, TEXT)


def test_no_empty_line_is_last_and_one_stands_between_two_texts(command, folder):
    one, other = (command(folder, text, "--view", "map").out for text in (TEXT, "the dog"))
    assert one.endswith("explanation.\n")
    assert command(folder, TEXT, "the dog", "--view", "map").out == f"{one}\n{other}"


def test_the_columns_of_it_are_explained(command, folder):
    shown = " ".join(command(folder, TEXT, "--view", "it", *NEEDS[ViewKind.IT]).out.split())
    assert "the change of log p (nats) of what follows when 'it' may not look at the word: below 0" in shown
    last = TEXT.partition("it")[0] + "it"
    assert "nats" not in command(folder, last, "--view", "it", *NEEDS[ViewKind.IT]).out


def test_numbers_are_those_of_the_library(command, folder):
    one = load(folder)
    said = json.loads(command(folder, TEXT, "--json").out)
    view = classify_heads(run_with_cache(one.model, prepare_input(one, TEXT)))
    assert said["scores"][1][2] == pytest.approx(view.scores[1, 2].tolist())
    assert said["error"] < 1e-5
    found = coreference(one, TEXT, pronoun="it", candidates=["cat", "mat"])
    said = json.loads(command(folder, TEXT, "--view", "it", "--candidates", "cat,mat", "--json").out)
    assert said["knock_out"] == pytest.approx(found.knock_out)
    assert found.verdict[1:] in command(folder, TEXT, "--view", "it", "--candidates", "cat,mat").out.replace("\n", " ")


def test_a_head_that_is_off_writes_nothing(command, folder):
    said = json.loads(command(folder, TEXT, "--view", "residual", "--off", "0.1", "--json").out)
    assert max(said["head_norms"][0][1]) == 0
    assert min(said["head_norms"][0][0]) > 0


def test_a_cut_look_has_weight_zero_and_the_sink_can_be_left_out(command, folder):
    own = prepare_input(load(folder), TEXT).sequence
    query, key = own.find_word("it")[-1], own.find_word("cat")[-1]
    said = json.loads(command(folder, TEXT, "--view", "map", "--layer", 1, "--cut", "it:cat", "--json").out)
    assert said["weights"][query][key] == 0
    said = json.loads(command(folder, TEXT, "--view", "map", "--no-sink", "--words", "--json").out)
    assert said["keys"][:2] == ["The", "cat"]
    assert said["weights"][3][0] == 0
    assert sum(said["weights"][3]) == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("view", ["map", "heads"])
def test_a_view_of_a_changed_model_says_what_was_changed(command, folder, monkeypatch, tmp_path, view):
    own = prepare_input(load(folder), TEXT).sequence.labels
    changes = ["self, layer 0: head 1 off", f"self: 5 {own[5]} may not look at 2 {own[2]}"]
    given = [folder, TEXT, "--view", view, "--off", "0.1", "--cut", "5:2"]
    assert command(*given).out.startswith(f"Changed: {'; '.join(changes)}.\n")
    assert "Changed" not in command(*given[:4]).out
    assert json.loads(command(*given, "--json").out)["changes"] == changes
    titles = []
    monkeypatch.setattr("qkv.inspection.figures.save_figure", lambda drawn, _: titles.append(drawn.get_suptitle()))
    command(*given, "--plot", tmp_path / "a.png")
    assert " ".join(titles[0].split()).startswith(" ".join([TEXT, *changes]))
    assert max(len(line) for line in titles[0].splitlines()) < 90


def test_a_cut_into_the_future_is_said_to_change_nothing(command, folder):
    answer = command(folder, TEXT, "--view", "effect", "--cut", "2:5", "--cut", "5:2")
    assert answer.status == 0
    assert answer.err == "qkv: --cut 2:5 changes nothing: token 2 never looks at 5, which comes after it\n"


def test_a_line_of_json_for_each_line_of_standard_input(command, folder, monkeypatch, tmp_path):
    (tmp_path / "in.txt").write_text("the cat\nthe dog sat\n")
    with (tmp_path / "in.txt").open() as stream:
        monkeypatch.setattr(sys, "stdin", stream)
        answer = command(folder, "--view", "lens", "--json")
    assert [json.loads(line)["text"] for line in answer.out.splitlines()] == ["the cat", "the dog sat"]


def test_a_picture_is_drawn_and_standard_output_stays_empty(command, folder, tmp_path):
    for name in ("a.png", "a.svg", "a.pdf"):
        answer = command(folder, TEXT, "--view", "map", "--plot", tmp_path / name)
        assert (answer.status, answer.out) == (0, "")
        assert (tmp_path / name).stat().st_size > 5000


def test_a_bert_and_a_translator_are_looked_into_too(command, translator, tmp_path):
    bert = saved_bert(tmp_path / "bert")
    said = json.loads(command(bert, "the [MASK] sat", "--view", "lens", "--json").out)
    assert said["positions"][2] == "[MASK]"
    assert not said["predicts_next"]
    said = json.loads(command(translator, "the cat sat", "--target", "the dog", "--view", "map", "--json").out)
    assert len(said["keys"]) > 3
    assert "cross" in said["title"]
    said = json.loads(command(translator, "the cat", "--view", "heads", "--stack", "decoder", "--json").out)
    assert said["stack"] == "decoder"


def test_a_word_of_the_target_means_the_row_that_a_map_labels_with_it(command, translator):
    one = prepare_input(load(translator), "the cat sat", "the dog slept")
    given = [translator, "the cat sat", "--target", "the dog slept"]
    chosen, fed, key = one.generated.find_word("dog")[-1], one.sequence.find_word("dog")[-1], one.source.find_word("cat")[-1]
    cut = ["--cut", "dog:cat", "--stack", "cross"]
    said = json.loads(command(*given, "--view", "map", *cut, "--json").out)
    assert said["weights"][chosen][key] == 0
    assert said["queries"][chosen] == one.generated.labels[chosen]
    said = json.loads(command(*given, "--view", "effect", *cut, "--query", "dog", "--json").out)
    assert said["position"] == chosen
    label, at = one.generated.labels[chosen], one.source.labels[key]
    assert said["changes"] == [f"cross: {chosen} {label} may not look at {key} {at}"]
    table = command(*given, "--view", "effect", *cut, "--query", "dog").out
    assert f"Guesses at {label}, after {one.sequence.labels[chosen]}, before" in table
    for view, stack, place in [("neuron", ["--stack", "decoder"], fed), ("neuron", ["--stack", "cross"], chosen)]:
        assert json.loads(command(*given, "--view", view, *stack, "--query", "dog", "--json").out)["query"] == place
    said = json.loads(command(*given, "--view", "neuron", "--query", "cat", "--json").out)
    assert (said["stack"], said["query"]) == ("encoder", key)
    assert json.loads(command(*given, "--view", "logit", "--query", "dog", "--json").out)["position"] == chosen


def test_a_time_line_reads_the_text_with_every_checkpoint_of_a_run(command, folder, tmp_path):
    for step in (5, 11):
        shutil.copytree(folder, tmp_path / "run" / "checkpoints" / f"step-{step:08d}")
    answer = command(tmp_path / "run", TEXT, "--view", "timeline", "--json")
    assert json.loads(answer.out)["steps"] == [5, 11]
    assert "run: 2 checkpoints are left to look at; a recipe's training.keep_checkpoints says how many stay" in answer.err
    assert "induction" in command(tmp_path / "run", TEXT, "--view", "timeline").out
    assert command(tmp_path / "run", TEXT, "--view", "timeline", "--plot", tmp_path / "t.png").status == 0


def test_mistakes_are_one_line(command, folder, translator, tmp_path):
    headless = saved_bert(tmp_path / "headless", masked_lm_head=False)
    rnn = saved(task("rnn"), tmp_path / "rnn")
    for arguments, line in [
        ([folder, TEXT, "--view", "it"], "--candidates A,B names 0"),
        ([folder, TEXT, "--view", "effect"], "give at least 1 --off or --cut"),
        ([folder, TEXT, "--off", "1"], "--off 1: a head is written LAYER.HEAD"),
        ([folder, TEXT, "--off", "0.9"], "has 3 heads (0 … 2), head 9 was asked for"),
        ([folder, TEXT, "--off", "99.9"], "layer 99 is outside the 2 layers (0 … 1)"),
        ([headless, "a cat", "--view", "lens"], "no masked-word head, so there is no word that its layers could guess"),
        ([folder, TEXT, "--cut", "7"], "--cut 7: a look is written QUERY:KEY"),
        ([folder, TEXT, "--cut", "99:1"], "place 99 is outside the"),
        ([folder, TEXT, "--view", "map", "--layer", "2"], "layer 2 is outside the 2 layers"),
        ([folder, TEXT, "--view", "neuron", "--query", "zebra"], "the word 'zebra' is not in the text"),
        ([folder, TEXT, "--stack", "cross"], "no attention 'cross'"),
        ([folder, TEXT, "--view", "timeline"], "holds no checkpoints"),
        ([folder, "cat " * 99], "the model's context_length is 41"),
        ([folder, TEXT, TEXT, "--plot", tmp_path / "a.png"], "--plot draws one text; 2 were given"),
        ([folder, TEXT, "--plot", tmp_path / "a.gif"], "a.gif: the name must end in one of"),
        ([folder, TEXT, "--plot", tmp_path / "no" / "a.png"], "a.png: there is no folder"),
        ([rnn, "the cat", "--cut", "1:1"], "the looks of an RNN can be seen, not cut"),
        ([translator, "the cat", "--view", "it", "--candidates", "a,b"], "not of a translator"),
    ]:
        answer = command(*arguments)
        assert answer.status == 2, arguments
        assert line in answer.err, answer.err
        assert len(answer.err.splitlines()) == 1
