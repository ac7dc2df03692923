"""Tests for the automatic selection of recipes."""

import itertools
import math
from types import SimpleNamespace

import pytest
import torch

from qkv.training import (
    choose_gpt_recipe_except_steps,
    choose_model_size,
    fit_steps_to_time,
    measure_matmul_flops,
    recipe_selection,
    with_steps_and_scaled_intervals,
)
from qkv.weights import to_lossless_published_config

CPU_FLOPS, GPU_FLOPS = 5e10, 4e14


def n_parameters(size):
    n_layers, d_model, _ = size
    return 12 * n_layers * d_model**2


@pytest.mark.parametrize("n_bytes", [20, 20_000, 1_000_000, 50_000_000, 10**10])
@pytest.mark.parametrize("flops_per_second", [CPU_FLOPS, GPU_FLOPS])
def test_every_text_size_gets_a_valid_recipe(n_bytes, flops_per_second):
    recipe = choose_gpt_recipe_except_steps(
        ["a.txt"], n_bytes=n_bytes, seconds=300.0, flops_per_second=flops_per_second
    )
    config = recipe.build_model_config(recipe.tokenizer.vocab_size)
    assert recipe.training.seq_len <= config.context_length


def test_more_text_and_more_time_never_make_a_model_smaller():
    sizes = [n_parameters(choose_model_size(n_bytes=10**n, flops=1e20)) for n in range(2, 11)]
    assert sizes == sorted(sizes)
    assert sizes[0] < sizes[-1]
    sizes = [n_parameters(choose_model_size(n_bytes=10**9, flops=10.0**n)) for n in range(10, 20)]
    assert sizes == sorted(sizes)


@pytest.mark.parametrize("n_bytes", [20_000, 1_000_000, 50_000_000])
def test_chosen_models_can_be_exported(n_bytes):
    recipe = choose_gpt_recipe_except_steps(["a.txt"], n_bytes=n_bytes, seconds=300.0, flops_per_second=CPU_FLOPS)
    config = recipe.build_model_config(recipe.tokenizer.vocab_size).replace(dropout=0.0)
    assert to_lossless_published_config(config)["model_type"] == "llama"


def test_a_short_text_uses_a_character_tokenizer():
    assert (
        choose_gpt_recipe_except_steps(
            ["a.txt"], n_bytes=20_000, seconds=300.0, flops_per_second=CPU_FLOPS
        ).tokenizer.kind
        == "char"
    )
    assert (
        choose_gpt_recipe_except_steps(
            ["a.txt"], n_bytes=10**6, seconds=300.0, flops_per_second=CPU_FLOPS
        ).tokenizer.kind
        == "bpe"
    )


def test_steps_use_ninety_percent_of_the_time():
    recipe = choose_gpt_recipe_except_steps(["a.txt"], n_bytes=10**6, seconds=300.0, flops_per_second=CPU_FLOPS)
    fitted = fit_steps_to_time(recipe, seconds=300.0, seconds_per_step=0.1).training
    assert (fitted.steps, fitted.warmup_steps, fitted.eval_every, fitted.eval_batches) == (2700, 100, 270, 45)
    assert fit_steps_to_time(recipe, seconds=1.0, seconds_per_step=10.0).training.steps == 20


def test_a_small_model_keeps_all_checkpoints_of_its_run():
    small = fit_steps_to_time(
        choose_gpt_recipe_except_steps(["a.txt"], n_bytes=10**6, seconds=300.0, flops_per_second=CPU_FLOPS),
        seconds=300.0,
        seconds_per_step=0.7,
    )
    n_saved = math.ceil(small.training.steps / small.training.save_every)
    assert n_saved >= 10
    assert small.training.keep_checkpoints >= n_saved
    assert (
        choose_gpt_recipe_except_steps(
            ["a.txt"], n_bytes=10**9, seconds=3600.0, flops_per_second=1e15
        ).training.keep_checkpoints
        == 2
    )


def test_a_short_run_has_time_for_its_evaluations():
    recipe = choose_gpt_recipe_except_steps(["a.txt"], n_bytes=10**6, seconds=300.0, flops_per_second=CPU_FLOPS)
    fitted = fit_steps_to_time(recipe, seconds=18.0, seconds_per_step=0.2).training
    n_evaluations = math.ceil(fitted.steps / fitted.eval_every)
    assert fitted.steps + n_evaluations * fitted.eval_batches / 3 <= 18 / 0.2


@pytest.mark.parametrize("steps", [1, 2, 9, 10, 1000])
def test_any_number_of_steps_is_possible(steps):
    training = with_steps_and_scaled_intervals(
        choose_gpt_recipe_except_steps(["a.txt"], n_bytes=10**6, seconds=300.0, flops_per_second=CPU_FLOPS), steps
    ).training
    assert training.steps == steps
    assert training.eval_every == max(1, steps // 10)


def test_matmul_throughput_is_flops_divided_by_time(monkeypatch):
    ticks = itertools.count()
    monkeypatch.setattr(recipe_selection, "time", SimpleNamespace(perf_counter=lambda: 0.5 * next(ticks)))
    assert measure_matmul_flops(torch.device("cpu")) == 2 * 1024**3 / 0.5
