"""`qkv generate`: output formats, sampling options, profiles and errors."""

import json
import re
import shutil
from functools import partial

import pytest
import torch

from qkv.choices import ProfileCategory
from qkv.cli.output import FASTER_THAN_BOUND, print_profile
from qkv.data import prepare_store
from qkv.tasks import load
from qkv.training.checkpoint import RunFolder, TrainingProgress
from qkv.training.profiler import DeviceRates, Profile
from qkv.weights.checkpoint_folder import read_safetensors
from tests.cli.answers import assert_only_error
from tests.tasks.small_gpt import save_task, small_gpt
from tests.training.runs import recipe


def save_step(run, model, progress):
    texts = {file.name: file.read_text() for file in model.glob("*.json") if file.name != "manifest.json"}
    run.save(progress, tensors={"model.safetensors": read_safetensors(model / "model.safetensors")}, texts=texts)


@pytest.fixture
def command(command):
    return partial(command, "generate")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_task(small_gpt(), tmp_path_factory.mktemp("model") / "small")


@pytest.fixture(scope="module")
def task(folder):
    return load(folder)


def test_each_prompt_is_printed_with_its_continuation(command, folder, task):
    answer = command(folder, "The cat", "El niño", "-n", 7, "--temperature", 0)
    expected = [prompt + task.generate(prompt, max_new=7, temperature=0) for prompt in ("The cat", "El niño")]
    assert answer.status == 0
    assert answer.out == "".join(f"{text}\n" for text in expected)


def test_a_full_context_is_reported(command, folder, task):
    n = task.model.config.context_length
    assert command(folder, "The cat", "-n", 7, "--temperature", 0).err == ""
    answer = command(folder, "The cat", "-n", n + 7, "--temperature", 0)
    assert re.fullmatch(rf"qkv: .*\b{n} tokens\n", answer.err)


def test_streamed_text_is_the_same_with_the_same_seed(command, folder):
    options = ["The cat", "El niño 😀", "-n", 9, "--seed", 5, "--temperature", 1.5]
    assert command(folder, *options, "--stream").out == command(folder, *options).out
    assert command(folder, *options, "--seed", 6).out != command(folder, *options).out


def test_every_option_reaches_the_sampling_config(command, folder, task):
    settings = {
        "temperature": 1.5, "top_k": 90, "top_p": 0.95, "min_p": 0.001, "typical_p": 0.9,
        "repetition_penalty": 1.7, "seed": 11,
    }  # fmt: skip
    flags = [part for name, value in settings.items() for part in (f"--{name.replace('_', '-')}", value)]
    output = command(folder, "The cat", "-n", 15, *flags, "--stop", "zzz").out
    assert output == "The cat" + task.generate("The cat", max_new=15, **settings) + "\n"


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


def test_json_has_text_ids_tokens_and_log_probabilities(command, folder, task):
    lines = command(folder, "--json", "-n", 6, "--seed", 3, stdin="The cat\n\nEl niño 😀\n").out.splitlines()
    results = [json.loads(line) for line in lines]
    assert [result["prompt"] for result in results] == ["The cat", "", "El niño 😀"]
    for result in results:
        assert len(result["ids"]) == len(result["tokens"]) == len(result["log_probabilities"])
        assert task.tokenizer.decode(result["ids"]) == result["text"]
        assert result["finish_reason"] in ("stop", "length")


def test_logprobs_has_one_line_per_token(command, folder):
    options = ["The cat", "-n", 6, "--seed", 3, "--temperature", 1]
    (result,) = map(json.loads, command(folder, *options, "--json").out.splitlines())
    printed = command(folder, *options, "--logprobs").out
    assert printed.startswith("The cat" + result["text"] + "\n")
    rows = printed.removeprefix("The cat" + result["text"] + "\n").splitlines()
    assert [float(row.split()[0]) for row in rows] == pytest.approx(result["log_probabilities"], abs=1e-4)


def test_steps_prints_model_and_sampling_probabilities_and_marks_the_chosen_token(command, folder):
    options = ["The cat", "-n", 4, "--top-k", 2, "--seed", 3]
    (plain,) = map(json.loads, command(folder, *options, "--json").out.splitlines())
    answer = command(folder, *options, "--show-steps")
    assert "temperature 0.8, top_k 2, seed 3" in answer.out
    assert answer.out.count("\nstep ") == 4
    assert answer.out.count("   → ") == 4
    assert answer.out.rstrip("\n").endswith("The cat" + plain["text"])
    first = answer.out.split("step 1, ")[1].split("step 2, ")[0]
    rows = [line.split() for line in first.splitlines()[2:] if line.strip()]
    assert sum(row[-1] == "excluded" for row in rows) == len(rows) - 2, "top-k 2 keeps two"
    sampling_probabilities = [float(row[-1]) for row in rows if row[-1] != "excluded"]
    assert sum(sampling_probabilities) == pytest.approx(1, abs=1e-3)
    probabilities = [float(row[-2]) for row in rows]
    assert probabilities == sorted(probabilities, reverse=True)


def test_steps_as_json_agree_with_the_plain_output(command, folder):
    options = ["The cat", "El niño", "-n", 4, "--seed", 3, "--json"]
    plain = [json.loads(line) for line in command(folder, *options).out.splitlines()]
    with_steps = [json.loads(line) for line in command(folder, *options, "--show-steps").out.splitlines()]
    for result, step_result in zip(plain, with_steps, strict=True):
        assert [step["id"] for step in step_result["steps"]] == result["ids"]
        for step in step_result["steps"]:
            assert [c["id"] for c in step["candidates"] if c["chosen"]] == [step["id"]]
            assert len(step["candidates"]) >= 5


def test_beam_search_prints_the_best_text_or_several_with_scores(command, folder, task):
    best = command(folder, "The cat", "-n", 5, "--beam", 3).out
    three_best = command(folder, "The cat", "-n", 5, "--beam", 3, "--n-best", 3, "--json").out
    hypotheses = json.loads(three_best)["hypotheses"]
    assert best == f"The cat{hypotheses[0]['text']}\n"
    scores = [hypothesis["score"] for hypothesis in hypotheses]
    assert scores == sorted(scores, reverse=True)
    lines = command(folder, "The cat", "-n", 5, "--beam", 3, "--n-best", 2, "--length-penalty", 0).out
    assert float(lines.split("\t")[0]) < -1
    greedy = command(folder, "The cat", "-n", 5, "--temperature", 0).out
    assert command(folder, "The cat", "-n", 5, "--beam", 1).out == greedy


def test_invalid_options_are_reported_in_one_line(command, folder, tmp_path):
    for arguments, parts in [
        (["x", "--temperature", -1], ["temperature=-1.0"]),
        (["x", "--top-k", 0], ["top_k=0"]),
        (["x", "--top-p", 1.5], ["top_p=1.5"]),
        (["x", "--typical-p", 0], ["typical_p=0.0"]),
        (["x", "--repetition-penalty", 0], ["repetition_penalty=0.0"]),
        (["x", "--stop", ""], ["stop"]),
        (["x", "--stream", "--json"], ["--stream", "--json"]),
        (["x", "--stream", "--show-steps"], ["--stream", "--show-steps"]),
        (["x", "--beam", 2, "--top-k", 3, "--stop", "a"], ["--beam", "--top-k, --stop"]),
        (["x", "--beam", 0], ["--beam 0: ", "1"]),
        (["x", "--beam", 2, "--n-best", 3], ["--n-best 3", "--beam 2"]),
        (["x", "--n-best", 3], ["--n-best 3", "--beam"]),
        (["the cat " * 50], ["context_length", "41"]),
    ]:
        assert_only_error(command(folder, *arguments), *parts)
    assert_only_error(command(folder, stdin=""), "standard input")
    assert command(tmp_path / "nowhere", "x").status == 2


@pytest.mark.parametrize("n_documents", [1, 2])
def test_a_model_trained_on_one_document_requires_a_prompt(command, folder, task, tmp_path, n_documents):
    shutil.copytree(folder, run := tmp_path / "run")
    text = tmp_path / "book.txt"
    text.write_text("\n<|endoftext|>\n".join(["the cat sat"] * n_documents))
    prepare_store([text], run / "data" / "train", tokenizer=task.tokenizer, progress=lambda _done, _all: None)
    answer = command(run, "", "-n", 3)
    if n_documents == 1:
        assert_only_error(answer, f"{run}: ", "1 document")
    else:
        assert (answer.status, answer.err) == (0, "")
    assert command(run, "the", "-n", 3).status == 0
    (run / "recipe.toml").write_text(recipe(steps=3).replace(init_from="another").to_toml())
    assert command(run, "", "-n", 3).status == 0


def test_help_has_an_example(command):
    assert "qkv generate " in command("--help").out.split("Examples:")[1]


def test_a_profile_is_printed_to_standard_error(command, folder):
    plain = command(folder, "The cat", "El", "-n", 5, "--seed", 3)
    profiled = command(folder, "The cat", "El", "-n", 5, "--seed", 3, "--profile")
    assert (profiled.status, profiled.out) == (0, plain.out)
    assert "10 new tokens, 2 prompts: " in profiled.err
    assert "1 new token, 1 prompt: " in command(folder, "El", "-n", 1, "--profile").err
    assert ProfileCategory.PRODUCTS.value in profiled.err
    assert_only_error(command(folder, "The cat", "--profile", "--stream"), "--profile", "--stream")


def test_the_reason_for_a_missing_bound_is_printed(command, folder):
    err = command(folder, "--profile", *["El"] * 65, "-n", 1).err
    assert "BOUND MS and OF BOUND are empty: " in err


def test_times_below_the_bound_are_marked(capsys):
    seconds = {ProfileCategory.PRODUCTS: 4.0, ProfileCategory.ATTENTION: 1.0}
    rates = DeviceRates(matmul_flops=1e9, bandwidth=1e9)
    print_profile(
        Profile(
            seconds=5.0,
            seconds_by_category=seconds,
            bounds={ProfileCategory.PRODUCTS: 2.0, ProfileCategory.ATTENTION: 1.28},
            rates=rates,
        ),
        "x",
    )
    err = capsys.readouterr().err
    assert "128 %" not in err
    assert "50 %" in err
    assert FASTER_THAN_BOUND in err
    print_profile(
        Profile(seconds=5.0, seconds_by_category=seconds, bounds={ProfileCategory.PRODUCTS: 9.0}, rates=rates), "x"
    )
    err = capsys.readouterr().err
    assert "% of the bound" not in err
    assert "bound: 9,000.0 ms" in err


@pytest.mark.parametrize("best", [None, 7, 95])
def test_a_best_checkpoint_that_is_not_the_last_is_reported(command, folder, tmp_path, best):
    run = tmp_path / "run"
    for step in (7, 95):
        save_step(RunFolder(run), folder, TrainingProgress(step=step, best_step=best and min(best, step)))
    last = run / "checkpoints" / "step-00000095"
    reported = re.fullmatch(rf"qkv: {run}: .*step 7 of 95.*{last}\n", command(run, "the", "-n", 3).err)
    assert bool(reported) == (best == 7)
    assert command(last, "the", "-n", 3).err == ""
    (last / "progress.json").write_text("broken")
    assert command(run, "the", "-n", 3).status == 0


@pytest.mark.parametrize("flags", [["--trace", "x.txt"], ["--trace", "no/such/x.json"]])
def test_the_path_of_a_trace_is_checked_first(command, flags):
    assert_only_error(command("no-such-model", "x", *flags), f"--trace {flags[1]}: ")


@pytest.mark.skipif(torch.cuda.is_available(), reason="requires a machine without a GPU")
def test_a_missing_gpu_is_reported_in_one_line(command, folder):
    answer = command(folder, "The cat", "--device", "cuda")
    assert_only_error(answer, "--device cuda: ", str(torch.__version__), "CUDA")
