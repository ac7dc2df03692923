"""`qkv translate` and `qkv evaluate --pairs`: one line for each line, in order."""

import json
import shutil
from copy import deepcopy
from functools import partial

import pytest
import torch

from qkv.choices import SpecialToken
from qkv.tasks import Translator
from tests.tasks.small_translator import backwards, saved, small_translator


@pytest.fixture
def command(command):
    return partial(command, stdin=b"")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return saved(small_translator(), tmp_path_factory.mktemp("model") / "small")


def test_lines_in_lines_out_blank_ones_too(command, folder):
    answer = command("translate", folder, "--beam", 2, stdin="uno dos\n\ntres\n")
    assert (answer.status, answer.out) == (0, "dos uno\n\ntres\n")


@pytest.mark.parametrize("option", [["--n-best", 2], ["--alignment"]])
def test_a_blank_line_is_blank_whatever_is_asked(command, folder, option):
    lines = command("translate", folder, "uno", " ", "dos", *option).out.splitlines()
    assert [line for line in lines if "\t" not in line] == [""]


def test_an_empty_argument_is_remarked_an_empty_line_of_a_file_is_not(command, folder):
    answer = command("translate", folder, "", "uno", "  ")
    assert (answer.status, answer.out) == (0, "\nuno\n\n")
    assert answer.err == "qkv: line 1: is empty\nqkv: line 3: is empty\n"
    assert command("translate", folder, stdin="uno\n\ndos\n").err == ""


def test_where_the_model_writes_nothing_it_is_said_for_which_line(command, tmp_path):
    task = small_translator()
    model, end = deepcopy(task.model), task.tokenizer.special_id(SpecialToken.EOS)
    last = model.decoder.blocks[-1].feed_forward_norm
    with torch.no_grad():  # whatever it reads, it ends at once
        last.weight.zero_()
        last.bias.copy_(99 * model.unembedding.weight[end])
    silent = saved(Translator(model, task.tokenizer), tmp_path / "silent")
    answer = command("translate", silent, stdin="-\n\nuno\n")
    assert (answer.status, answer.out) == (0, "-\n\n\n")
    assert answer.err == "qkv: line 3: the model wrote nothing for 'uno'\n"


def test_alignment_follows_a_tab(command, folder):
    text, _, links = command("translate", folder, "uno dos tres", "--alignment").out.rstrip("\n").partition("\t")
    (one,) = small_translator().translate_batch(["uno dos tres"], attention=True)
    assert (text, links) == ("tres dos uno", one.attention.to_pharaoh())
    assert len(links.split()) == 3


def test_json_holds_tokens_scores_and_the_n_best(command, folder):
    answer = command("translate", folder, "uno dos", "tres", "--n-best", 3, "--json")
    first, second = map(json.loads, answer.out.splitlines())
    assert (first["text"], second["text"]) == ("dos uno", "tres")
    assert "".join(first["tokens"][:-1]) == "dos uno"
    assert len(first["tokens"]) == len(first["log_probabilities"])
    assert [one["score"] for one in first["found"]] == sorted((one["score"] for one in first["found"]), reverse=True)
    plain = command("translate", folder, "uno dos", "--n-best", 3).out.splitlines()
    assert [line.split("\t")[1] for line in plain] == [one["text"] for one in first["found"]]


@pytest.mark.parametrize("ending", ["png", "svg", "pdf"])
def test_attention_is_drawn(command, folder, tmp_path, ending):
    picture = tmp_path / f"attention.{ending}"
    answer = command("translate", folder, "uno dos", "--plot", picture, *(["--layer", 1] if ending == "svg" else []))
    assert (answer.status, answer.out) == (0, "dos uno\n")
    assert picture.stat().st_size > 1000
    if ending == "svg":
        assert "layer 1, head 3" in picture.read_text()


def test_a_glossary_is_kept_to(command, folder, tmp_path):
    (tmp_path / "glossary.tsv").write_text("dos\tnueve\n")
    answer = command("translate", folder, "uno dos", "tres", "--glossary", tmp_path / "glossary.tsv")
    first, second = answer.out.splitlines()
    assert "nueve" in first
    assert second == "tres"


def test_mistakes_are_one_line_and_status_2(command, folder, tmp_path):
    (tmp_path / "bad.tsv").write_text("dos\t\n")
    for arguments, line in [
        (["uno", "--plot", "a.gif"], "a.gif: the name must end in one of .png .svg .pdf"),
        (["uno", "dos", "--plot", "a.png"], "--plot draws one text; 2 were given"),
        (["uno", "--layer", 1], "--layer 1 says what --plot draws"),
        (["uno", "--split", "--json"], "--split joins the translations"),
        (["uno", "--alignment", "--n-best", 2], "--alignment is of the best translation, --n-best 2 asks for more"),
        (["uno", "--plot", "a.png", "--n-best", 2], "--plot is of the best translation, --n-best 2 asks for more"),
        (["uno", "--plot", "nowhere/a.png"], "nowhere/a.png: there is no folder nowhere"),
        (["uno", "--glossary", tmp_path / "bad.tsv"], "bad.tsv: entry 1 has a blank side"),
        (["uno " * 99], "the model's context_length is 37"),
    ]:
        answer = command("translate", folder, *arguments)
        assert (answer.status, answer.out) == (2, "")
        assert line in answer.err
        assert len(answer.err.splitlines()) == 1


def test_pairs_are_evaluated_alone_and_against_another(command, folder, tmp_path):
    sources = ["uno dos", "tres", "cuatro cinco uno dos", "nueve ocho"] * 3
    lines = "".join(f"{source}\t{backwards(source)}\n" for source in sources)
    (tmp_path / "pairs.tsv").write_text(lines + "seis\t\n")
    answer = command("evaluate", folder, "--pairs", tmp_path / "pairs.tsv", "--beam", 2)
    assert "12 pairs, beam 2" in answer.out
    assert "tok:13a" in answer.out
    assert "95 % interval" in answer.out
    assert "1 of 13 lines have a blank side" in answer.err
    both = command("evaluate", folder, "--pairs", tmp_path / "pairs.tsv", "--against", folder, "--json", "--limit", 12)
    first, second = json.loads(both.out)["systems"].values()
    assert first["BLEU"]["score"] == second["BLEU"]["score"] == pytest.approx(100)
    assert second["BLEU"]["p_value"] > 0.5
    assert [row["words"] for row in first["by_length"]] == ["1–5"]


def test_evaluate_wants_texts_or_pairs(command, folder):
    answer = command("evaluate", folder)
    expected = (
        "qkv: error: judge it by what? --text FILE for a GPT or BERT, --pairs FILE for a translator, "
        "--labelled FILE for a fine-tuned BERT\n"
    )
    assert (answer.status, answer.err) == (2, expected)
    assert "--against compares" in command("evaluate", folder, "--text", "x", "--against", folder).err
    assert "--beam 3 is of a search" in command("evaluate", folder, "--text", "x", "--beam", 3).err


def test_help_has_an_example(command):
    assert "qkv translate " in command("translate", "--help").out.split("Examples:")[1]


def test_a_prefix_stands_before_each_text_and_is_said(command, folder):
    plain = command("translate", folder, "uno dos", "--json")
    answer = command("translate", folder, "dos", "--prefix", "uno ", "--json")
    assert (plain.err, answer.err) == ("", f"qkv: {folder}: before each text stands 'uno '\n")
    assert json.loads(answer.out)["source_tokens"] == json.loads(plain.out)["source_tokens"]


def test_a_text_of_signs_stays_and_long_ones_are_cut_where_the_model_says_so(command, folder, tmp_path):
    shutil.copytree(folder, own := tmp_path / "own")
    (own / "generation_config.json").write_text('{"max_joined": 8}')
    answer = command("translate", own, stdin="-\nUno dos. Seis siete.\n")
    assert answer.out == "-\n" + " ".join(small_translator().translate(["Uno dos.", "Seis siete."])) + "\n"
    for option, n_remarks in ((["--whole", "--json"], 0), (["--json"], 1)):
        whole = command("translate", own, "Uno dos. Seis siete.", *option)
        assert json.loads(whole.out)["text"] == small_translator().translate("Uno dos. Seis siete.")
        assert whole.err.count("translated as one, which goes worse than in 2 parts") == n_remarks
    (own / "generation_config.json").write_text('{"max_joined": 0}')
    assert "max_joined=0 is no number of tokens" in command("translate", own, "uno").err
