"""`qkv translate` and `qkv evaluate --pairs`."""

import json
import re
import shutil
from copy import deepcopy
from functools import partial

import pytest
import torch

from qkv.choices import SpecialToken
from qkv.tasks import Translator
from tests.cli.answers import assert_only_error
from tests.tasks.small_translator import reverse_words, save_translator, small_translator


@pytest.fixture
def command(command):
    return partial(command, stdin=b"")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_translator(small_translator(), tmp_path_factory.mktemp("model") / "small")


def test_one_line_is_printed_per_line_including_blank_ones(command, folder):
    answer = command("translate", folder, "--beam", 2, stdin="uno dos\n\ntres\n")
    assert (answer.status, answer.out) == (0, "dos uno\n\ntres\n")


@pytest.mark.parametrize("option", [["--n-best", 2], ["--alignment"]])
def test_a_blank_line_is_printed_as_a_blank_line_with_every_option(command, folder, option):
    lines = command("translate", folder, "uno", " ", "dos", *option).out.splitlines()
    assert [line for line in lines if "\t" not in line] == [""]


def test_an_empty_argument_is_reported_but_not_an_empty_line_of_a_file(command, folder):
    answer = command("translate", folder, "", "uno", "  ")
    assert (answer.status, answer.out) == (0, "\nuno\n\n")
    assert [line.partition(": ")[2][:8] for line in answer.err.splitlines()] == ["line 1: ", "line 3: "]
    assert command("translate", folder, stdin="uno\n\ndos\n").err == ""


def test_an_empty_translation_is_reported_with_its_line(command, tmp_path):
    task = small_translator()
    model, end = deepcopy(task.model), task.tokenizer.special_id(SpecialToken.EOS)
    last = model.decoder.blocks[-1].feed_forward_norm
    with torch.no_grad():  # EOS is always the most likely first token
        last.weight.zero_()
        last.bias.copy_(99 * model.unembedding.weight[end])
    silent = save_translator(Translator(model, task.tokenizer), tmp_path / "silent")
    answer = command("translate", silent, stdin="-\n\nuno\n")
    assert (answer.status, answer.out) == (0, "-\n\n\n")
    assert re.fullmatch(r"qkv: line 3: .*'uno'\n", answer.err)


def test_alignment_follows_a_tab(command, folder):
    text, _, links = command("translate", folder, "uno dos tres", "--alignment").out.rstrip("\n").partition("\t")
    (translation,) = small_translator().translate_batch(["uno dos tres"], attention=True)
    assert (text, links) == ("tres dos uno", translation.attention.to_pharaoh())
    assert len(links.split()) == 3


def test_json_has_tokens_scores_and_hypotheses(command, folder):
    answer = command("translate", folder, "uno dos", "tres", "--n-best", 3, "--json")
    first, second = map(json.loads, answer.out.splitlines())
    assert (first["text"], second["text"]) == ("dos uno", "tres")
    assert "".join(first["tokens"][:-1]) == "dos uno"
    assert len(first["tokens"]) == len(first["log_probabilities"])
    scores = [hypothesis["score"] for hypothesis in first["hypotheses"]]
    assert scores == sorted(scores, reverse=True)
    plain = command("translate", folder, "uno dos", "--n-best", 3).out.splitlines()
    assert [line.split("\t")[1] for line in plain] == [hypothesis["text"] for hypothesis in first["hypotheses"]]


@pytest.mark.parametrize("suffix", ["png", "svg", "pdf"])
def test_attention_is_plotted(command, folder, tmp_path, suffix):
    figure = tmp_path / f"attention.{suffix}"
    answer = command("translate", folder, "uno dos", "--plot", figure, *(["--layer", 1] if suffix == "svg" else []))
    assert (answer.status, answer.out) == (0, "dos uno\n")
    assert figure.stat().st_size > 1000
    if suffix == "svg":
        assert "layer 1, head 3" in figure.read_text()


def test_the_translations_of_a_glossary_are_used(command, folder, tmp_path):
    (tmp_path / "glossary.tsv").write_text("dos\tnueve\n")
    answer = command("translate", folder, "uno dos", "tres", "--glossary", tmp_path / "glossary.tsv")
    first, second = answer.out.splitlines()
    assert "nueve" in first
    assert second == "tres"


def test_invalid_options_are_reported_in_one_line(command, folder, tmp_path):
    (tmp_path / "bad.tsv").write_text("dos\t\n")
    for arguments, parts in [
        (["uno", "--plot", "a.gif"], ["a.gif: ", ".png"]),
        (["uno", "dos", "--plot", "a.png"], ["--plot", "1", "2"]),
        (["uno", "--layer", 1], ["--layer 1", "--plot"]),
        (["uno", "--split", "--json"], ["--split", "--json"]),
        (["uno", "--alignment", "--n-best", 2], ["--alignment", "--n-best 2"]),
        (["uno", "--plot", "a.png", "--n-best", 2], ["--plot", "--n-best 2"]),
        (["uno", "--plot", "nowhere/a.png"], ["nowhere/a.png: "]),
        (["uno", "--glossary", tmp_path / "bad.tsv"], ["bad.tsv: ", "entry 1"]),
        (["uno " * 99], ["context_length", "37"]),
    ]:
        assert_only_error(command("translate", folder, *arguments), *parts)


def test_pairs_are_evaluated_with_one_or_two_models(command, folder, tmp_path):
    sources = ["uno dos", "tres", "cuatro cinco uno dos", "nueve ocho"] * 3
    lines = "".join(f"{source}\t{reverse_words(source)}\n" for source in sources)
    (tmp_path / "pairs.tsv").write_text(lines + "seis\t\n")
    answer = command("evaluate", folder, "--pairs", tmp_path / "pairs.tsv", "--beam", 2)
    assert "12 pairs, beam 2" in answer.out
    assert "tok:13a" in answer.out
    assert "95 % interval" in answer.out
    assert "1 of 13" in answer.err
    both = command("evaluate", folder, "--pairs", tmp_path / "pairs.tsv", "--against", folder, "--json", "--limit", 12)
    first, second = json.loads(both.out)["systems"].values()
    assert first["BLEU"]["score"] == second["BLEU"]["score"] == pytest.approx(100)
    assert second["BLEU"]["p_value"] > 0.5
    assert [row["words"] for row in first["by_length"]] == ["1–5"]


def test_evaluate_requires_data(command, folder):
    assert_only_error(command("evaluate", folder), "--text FILE", "--pairs FILE", "--labeled FILE")
    assert_only_error(command("evaluate", folder, "--text", "x", "--against", folder), "--against", "--pairs")
    assert_only_error(command("evaluate", folder, "--text", "x", "--beam", 3), "--beam 3", "--pairs")


def test_help_has_an_example(command):
    assert "qkv translate " in command("translate", "--help").out.split("Examples:")[1]


def test_a_prefix_is_prepended_and_reported(command, folder):
    plain = command("translate", folder, "uno dos", "--json")
    answer = command("translate", folder, "dos", "--prefix", "uno ", "--json")
    assert plain.err == ""
    assert re.fullmatch(rf"qkv: {folder}: .*'uno '.*\n", answer.err)
    assert json.loads(answer.out)["source_tokens"] == json.loads(plain.out)["source_tokens"]


def test_punctuation_is_unchanged_and_long_texts_are_split_if_the_model_config_says_so(command, folder, tmp_path):
    shutil.copytree(folder, model := tmp_path / "model")
    (model / "generation_config.json").write_text('{"max_joined": 8}')
    answer = command("translate", model, stdin="-\nUno dos. Seis siete.\n")
    assert answer.out == "-\n" + " ".join(small_translator().translate(["Uno dos.", "Seis siete."])) + "\n"
    for option, n_remarks in ((["--no-split", "--json"], 0), (["--json"], 1)):
        answer = command("translate", model, "Uno dos. Seis siete.", *option)
        assert json.loads(answer.out)["text"] == small_translator().translate("Uno dos. Seis siete.")
        assert len(answer.err.splitlines()) == n_remarks
        assert answer.err.count("2 sentences") == n_remarks
    (model / "generation_config.json").write_text('{"max_joined": 0}')
    assert_only_error(command("translate", model, "uno"), "max_joined", "got 0")
