"""What is chosen for someone's own text: larger for more text and more time, never absurd."""

import itertools
import math
from types import SimpleNamespace

import pytest
import torch

from qkv.training import (
    choose_gpt_recipe,
    choose_model_size,
    fit_steps_to_time,
    measure_matmul_flops,
    recipe_selection,
    with_steps,
)
from qkv.weights import published_from_config

CPU, GPU = 5e10, 4e14


def n_parameters(shape):
    n_layers, d_model, _ = shape
    return 12 * n_layers * d_model**2


@pytest.mark.parametrize("n_bytes", [20, 20_000, 1_000_000, 50_000_000, 10**10])
@pytest.mark.parametrize("rate", [CPU, GPU])
def test_every_text_gets_a_recipe_that_can_be(n_bytes, rate):
    recipe = choose_gpt_recipe(["a.txt"], n_bytes=n_bytes, seconds=300.0, flops_per_second=rate)
    config = recipe.build_model_config(recipe.tokenizer.vocab_size)
    assert recipe.training.seq_len <= config.context_length


def test_more_text_and_more_time_never_make_a_model_smaller():
    sizes = [n_parameters(choose_model_size(n_bytes=10**n, flops=1e20)) for n in range(2, 11)]
    assert sizes == sorted(sizes)
    assert sizes[0] < sizes[-1]
    sizes = [n_parameters(choose_model_size(n_bytes=10**9, flops=10.0**n)) for n in range(10, 20)]
    assert sizes == sorted(sizes)


@pytest.mark.parametrize("n_bytes", [20_000, 1_000_000, 50_000_000])
def test_what_is_chosen_can_be_written_for_others(n_bytes):
    recipe = choose_gpt_recipe(["a.txt"], n_bytes=n_bytes, seconds=300.0, flops_per_second=CPU)
    config = recipe.build_model_config(recipe.tokenizer.vocab_size).replace(dropout=0.0)
    assert published_from_config(config)["model_type"] == "llama"


def test_a_short_text_is_read_by_characters():
    assert choose_gpt_recipe(["a.txt"], n_bytes=20_000, seconds=300.0, flops_per_second=CPU).tokenizer.kind == "char"
    assert choose_gpt_recipe(["a.txt"], n_bytes=10**6, seconds=300.0, flops_per_second=CPU).tokenizer.kind == "bpe"


def test_steps_fill_the_time_but_for_a_tenth():
    recipe = choose_gpt_recipe(["a.txt"], n_bytes=10**6, seconds=300.0, flops_per_second=CPU)
    fitted = fit_steps_to_time(recipe, seconds=300.0, seconds_per_step=0.1).training
    assert (fitted.steps, fitted.warmup_steps, fitted.eval_every, fitted.eval_batches) == (2700, 100, 270, 45)
    assert fit_steps_to_time(recipe, seconds=1.0, seconds_per_step=10.0).training.steps == 20


def test_a_small_model_keeps_all_the_checkpoints_that_its_run_saves():
    small = fit_steps_to_time(
        choose_gpt_recipe(["a.txt"], n_bytes=10**6, seconds=300.0, flops_per_second=CPU), seconds=300.0, seconds_per_step=0.7
    )
    n_saved = math.ceil(small.training.steps / small.training.save_every)
    assert n_saved >= 10
    assert small.training.keep_checkpoints >= n_saved
    assert choose_gpt_recipe(["a.txt"], n_bytes=10**9, seconds=3600.0, flops_per_second=1e15).training.keep_checkpoints == 2


def test_a_short_run_has_time_for_its_evaluations():
    recipe = choose_gpt_recipe(["a.txt"], n_bytes=10**6, seconds=300.0, flops_per_second=CPU)
    fitted = fit_steps_to_time(recipe, seconds=18.0, seconds_per_step=0.2).training
    n_evaluations = math.ceil(fitted.steps / fitted.eval_every)
    assert fitted.steps + n_evaluations * fitted.eval_batches / 3 <= 18 / 0.2


@pytest.mark.parametrize("steps", [1, 2, 9, 10, 1000])
def test_any_number_of_steps_can_be_asked_for(steps):
    training = with_steps(choose_gpt_recipe(["a.txt"], n_bytes=10**6, seconds=300.0, flops_per_second=CPU), steps).training
    assert training.steps == steps
    assert training.eval_every == max(1, steps // 10)


def test_the_rate_of_products_is_their_flops_by_the_time(monkeypatch):
    ticks = itertools.count()
    monkeypatch.setattr(recipe_selection, "time", SimpleNamespace(perf_counter=lambda: 0.5 * next(ticks)))
    assert measure_matmul_flops(torch.device("cpu")) == 2 * 1024**3 / 0.5
