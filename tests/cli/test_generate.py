"""`qkv generate`: the text on standard output, in every form; mistakes in a line and status 2."""

import json
import shutil
from functools import partial

import pytest
import torch

from qkv.choices import ProfileCategory
from qkv.cli.profile_report import show_profile
from qkv.data import prepare_store
from qkv.tasks import load
from qkv.training.profiler import DeviceRates, Profile
from qkv.training.run_folder import RunFolder, TrainingProgress
from qkv.weights.folder import read_tensors
from tests.tasks.small_gpt import saved, small_task
from tests.training.runs import recipe


def save_step(run, model, progress):
    texts = {file.name: file.read_text() for file in model.glob("*.json") if file.name != "manifest.json"}
    run.save(progress, tensors={"model.safetensors": read_tensors(model / "model.safetensors")}, texts=texts)


@pytest.fixture
def command(command):
    return partial(command, "generate")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return saved(small_task(), tmp_path_factory.mktemp("model") / "small")


@pytest.fixture(scope="module")
def task(folder):
    return load(folder)


def test_the_prompt_and_what_follows_are_printed_prompt_by_prompt(command, folder, task):
    answer = command(folder, "The cat", "El niño", "-n", 7, "--temperature", 0)
    expected = [prompt + task.generate(prompt, max_new=7, temperature=0) for prompt in ("The cat", "El niño")]
    assert answer.status == 0
    assert answer.out == "".join(f"{text}\n" for text in expected)


def test_a_full_context_is_said_beside_the_text(command, folder, task):
    n = task.model.config.context_length
    assert command(folder, "The cat", "-n", 7, "--temperature", 0).err == ""
    answer = command(folder, "The cat", "-n", n + 7, "--temperature", 0)
    assert answer.err == f"qkv: ended there: the model's context of {n} tokens is full\n"


def test_streamed_is_the_same_with_the_same_seeds(command, folder):
    options = ["The cat", "El niño 😀", "-n", 9, "--seed", 5, "--temperature", 1.5]
    assert command(folder, *options, "--stream").out == command(folder, *options).out
    assert command(folder, *options, "--seed", 6).out != command(folder, *options).out


def test_every_setting_reaches_the_sampling(command, folder, task):
    settings = {
        "temperature": 1.5, "top_k": 90, "top_p": 0.95, "min_p": 0.001, "typical_p": 0.9,
        "repetition_penalty": 1.7, "seed": 11,
    }  # fmt: skip
    flags = [part for name, value in settings.items() for part in (f"--{name.replace('_', '-')}", value)]
    got = command(folder, "The cat", "-n", 15, *flags, "--stop", "zzz").out
    assert got == "The cat" + task.generate("The cat", max_new=15, **settings) + "\n"


@pytest.mark.parametrize(
    "flags",
    [
        ["--temperature", 0.01],
        ["--top-k", 1],
        ["--top-p", 1e-6],
        ["--min-p", 1],
    ],
)
def test_each_filter_at_its_tightest_is_greedy(flags, command, folder):
    greedy = command(folder, "The cat", "-n", 9, "--temperature", 0).out
    assert command(folder, "The cat", "-n", 9, "--seed", 4, *flags).out == greedy


def test_json_holds_text_ids_tokens_and_log_probabilities(command, folder, task):
    lines = command(folder, "--json", "-n", 6, "--seed", 3, stdin="The cat\n\nEl niño 😀\n").out.splitlines()
    results = [json.loads(line) for line in lines]
    assert [result["prompt"] for result in results] == ["The cat", "", "El niño 😀"]
    for result in results:
        assert len(result["ids"]) == len(result["tokens"]) == len(result["log_probabilities"])
        assert task.tokenizer.decode(result["ids"]) == result["text"]
        assert result["finish_reason"] in ("stop", "length")


def test_logprobs_are_one_line_a_token(command, folder):
    options = ["The cat", "-n", 6, "--seed", 3, "--temperature", 1]
    (result,) = map(json.loads, command(folder, *options, "--json").out.splitlines())
    printed = command(folder, *options, "--logprobs").out
    assert printed.startswith("The cat" + result["text"] + "\n")
    rows = printed.removeprefix("The cat" + result["text"] + "\n").splitlines()
    assert [float(row.split()[0]) for row in rows] == pytest.approx(result["log_probabilities"], abs=1e-4)


def test_steps_show_the_candidates_before_and_after_and_mark_the_chosen_one(command, folder):
    options = ["The cat", "-n", 4, "--top-k", 2, "--seed", 3]
    (plain,) = map(json.loads, command(folder, *options, "--json").out.splitlines())
    answer = command(folder, *options, "--steps")
    assert "settings: temperature 0.8, top_k 2, seed 3" in answer.out
    assert answer.out.count("\nstep ") == 4
    assert answer.out.count("   → ") == 4
    assert answer.out.rstrip("\n").endswith("The cat" + plain["text"])
    first = answer.out.split("step 1, ")[1].split("step 2, ")[0]
    rows = [line.split() for line in first.splitlines()[2:] if line.strip()]
    assert sum(row[-1] == "out" for row in rows) == len(rows) - 2, "top-k 2 leaves two"
    revised = [float(row[-1]) for row in rows if row[-1] != "out"]
    assert sum(revised) == pytest.approx(1, abs=1e-3)
    shares = [float(row[-2]) for row in rows]
    assert shares == sorted(shares, reverse=True)


def test_steps_as_json_agree_with_the_plain_answer(command, folder):
    options = ["The cat", "El niño", "-n", 4, "--seed", 3, "--json"]
    plain = [json.loads(line) for line in command(folder, *options).out.splitlines()]
    stepped = [json.loads(line) for line in command(folder, *options, "--steps").out.splitlines()]
    for one, other in zip(plain, stepped, strict=True):
        assert [step["id"] for step in other["steps"]] == one["ids"]
        for step in other["steps"]:
            assert [c["id"] for c in step["candidates"] if c["chosen"]] == [step["id"]]
            assert len(step["candidates"]) >= 5


def test_beam_prints_the_best_or_several_with_scores(command, folder, task):
    one = command(folder, "The cat", "-n", 5, "--beam", 3).out
    three = command(folder, "The cat", "-n", 5, "--beam", 3, "--n-best", 3, "--json").out
    found = json.loads(three)["found"]
    assert one == f"The cat{found[0]['text']}\n"
    assert [text["score"] for text in found] == sorted((text["score"] for text in found), reverse=True)
    lines = command(folder, "The cat", "-n", 5, "--beam", 3, "--n-best", 2, "--length-penalty", 0).out
    assert float(lines.split("\t")[0]) < -1
    greedy = command(folder, "The cat", "-n", 5, "--temperature", 0).out
    assert command(folder, "The cat", "-n", 5, "--beam", 1).out == greedy


def test_mistakes_are_one_line_and_status_2(command, folder, tmp_path):
    for arguments, line in [
        (["x", "--temperature", -1], "temperature=-1.0: input should be greater than or equal to 0"),
        (["x", "--top-k", 0], "top_k=0: input should be greater than or equal to 1"),
        (["x", "--top-p", 1.5], "top_p=1.5: input should be less than or equal to 1"),
        (["x", "--typical-p", 0], "typical_p=0.0: input should be greater than 0"),
        (["x", "--repetition-penalty", 0], "repetition_penalty=0.0: input should be greater than 0"),
        (["x", "--stop", ""], "a stop string is empty: 0 characters"),
        (["x", "--stream", "--json"], "--stream prints text as it comes, --json whole objects: choose one"),
        (["x", "--stream", "--steps"], "--stream and --steps are two ways to print"),
        (["x", "--beam", 2, "--top-k", 3, "--stop", "a"], "leave out --top-k, --stop"),
        (["x", "--beam", 0], "--beam 0: there must be at least 1 running guess"),
        (["x", "--beam", 2, "--n-best", 3], "--n-best 3 is more than the guesses of --beam 2"),
        (["x", "--n-best", 3], "--n-best 3 belongs to --beam"),
        (["the cat " * 50], "the model's context_length is 41"),
    ]:
        answer = command(folder, *arguments)
        assert answer.status == 2, arguments
        assert answer.out == ""
        assert answer.err.startswith("qkv: error: ")
        assert line in answer.err
        assert len(answer.err.splitlines()) == 1
    assert "standard input is empty, and no text was given" in command(folder, stdin="").err
    assert command(tmp_path / "nowhere", "x").status == 2


@pytest.mark.parametrize("n_documents", [1, 2])
def test_a_model_that_has_seen_no_document_begin_wants_the_first_words(command, folder, task, tmp_path, n_documents):
    shutil.copytree(folder, run := tmp_path / "run")
    text = tmp_path / "book.txt"
    text.write_text("\n<|endoftext|>\n".join(["the cat sat"] * n_documents))
    prepare_store([text], run / "data" / "train", tokenizer=task.tokenizer, progress=lambda _done, _all: None)
    answer = command(run, "", "-n", 3)
    expected = f"qkv: error: {run}: was trained on 1 document and has seen none begin; give it the first words\n"
    assert (answer.status, answer.err) == ((2, expected) if n_documents == 1 else (0, ""))
    assert command(run, "the", "-n", 3).status == 0
    (run / "recipe.toml").write_text(recipe(steps=3).replace(init_from="another").to_toml())
    assert command(run, "", "-n", 3).status == 0


def test_help_has_an_example(command):
    assert "qkv generate " in command("--help").out.split("Examples:")[1]


def test_a_profile_stands_beside_the_texts(command, folder):
    plain = command(folder, "The cat", "El", "-n", 5, "--seed", 3)
    profiled = command(folder, "The cat", "El", "-n", 5, "--seed", 3, "--profile")
    assert (profiled.status, profiled.out) == (0, plain.out)
    assert "10 new tokens, prompts 2: " in profiled.err
    assert "1 new token, prompts 1: " in command(folder, "El", "-n", 1, "--profile").err
    assert "matrix products" in profiled.err
    refused = command(folder, "The cat", "--profile", "--stream")
    assert refused.status == 2
    assert "--profile times whole texts that are drawn: leave out --stream" in refused.err


def test_where_no_bound_is_known_it_is_said_why(command, folder):
    err = command(folder, "--profile", *["El"] * 65, "-n", 1).err
    assert "AT LEAST and REACHED are empty: there is more than one batch" in err


def test_nothing_reaches_more_than_its_bound(capsys):
    spent = {ProfileCategory.PRODUCTS: 4.0, ProfileCategory.ATTENTION: 1.0}
    rates = DeviceRates(matmul_flops=1e9, bandwidth=1e9)
    show_profile(
        Profile(seconds=5.0, seconds_by_kind=spent, bounds={ProfileCategory.PRODUCTS: 2.0, ProfileCategory.ATTENTION: 1.28}, rates=rates), "x"
    )
    err = capsys.readouterr().err
    assert "128 %" not in err
    assert "50 %" in err
    assert "—: faster than the bound" in err
    show_profile(Profile(seconds=5.0, seconds_by_kind=spent, bounds={ProfileCategory.PRODUCTS: 9.0}, rates=rates), "x")
    err = capsys.readouterr().err
    assert "of the bound reached" not in err
    assert "as measured here (beaten)" in err


@pytest.mark.parametrize("best", [None, 7, 95])
def test_the_step_of_a_run_is_told_where_it_is_not_the_last(command, folder, tmp_path, best):
    run = tmp_path / "run"
    for step in (7, 95):
        save_step(RunFolder(run), folder, TrainingProgress(step=step, best_step=best and min(best, step)))
    last = run / "checkpoints" / "step-00000095"
    said = f"qkv: {run}: step 7 of 95, the best on the held-out text; the last: {last}\n"
    assert command(run, "the", "-n", 3).err == (said if best == 7 else "")
    assert command(last, "the", "-n", 3).err == ""
    (last / "progress.json").write_text("broken")
    assert command(run, "the", "-n", 3).status == 0


@pytest.mark.parametrize("flags", [["--trace", "x.txt"], ["--trace", "no/such/x.json"]])
def test_a_trace_that_cannot_be_is_refused_first(command, flags):
    answer = command("no-such-model", "x", *flags)
    assert answer.status == 2
    assert answer.err.startswith(f"qkv: error: --trace {flags[1]}: ")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_gpu_that_is_not_there_is_told_in_a_line(command, folder):
    answer = command(folder, "The cat", "--device", "cuda")
    assert answer.status == 2
    assert answer.err.startswith(f"qkv: error: --device cuda: this torch ({torch.__version__}) has no CUDA; ")
    assert answer.err.count("\n") == 1
