"""Tests for the preparation of runs."""

import json
from dataclasses import replace

import pytest
import torch

from qkv.config import GPTConfig
from qkv.errors import ConfigError, DiskError, InputError, RunError
from qkv.models import GPT
from qkv.text import save_tokenizer
from qkv.training import (
    load_preparation_inputs,
    open_run,
    prepare_run,
    resume_preparation,
    write_fingerprints_and_final_recipe,
)
from tests.failing_disk import failing_disk
from tests.training.runs import build_cpu_trainer, checkpoint_contents, copy_run, logged_metrics, recipe, write_text


def silent(_label):
    return lambda _done, _all: None


def prepare(folder, settings=None, **options):
    write_text(folder / "text.txt")
    return prepare_run(settings or recipe(), folder / "run", folder, progress=silent, **options)


def test_the_end_of_the_text_is_held_out(prepared):
    corpus = prepared.corpus
    n = corpus.train.n_tokens + corpus.validation.n_tokens
    assert corpus.train.n_tokens == round(0.9 * n)
    assert corpus.tokenizer.vocab_size == 16


def test_validation_files_get_their_own_store(tmp_path):
    write_text(tmp_path / "other.txt", 20)
    data = {"train": ("text.txt",), "validation": ("ot*.txt",)}
    prepared_run = prepare(tmp_path, recipe().replace(data=data))
    assert prepared_run.corpus.validation.n_tokens < prepared_run.corpus.train.n_tokens / 5
    assert (tmp_path / "run" / "data" / "validation").is_dir()


def test_a_recipe_survives_a_round_trip(prepared):
    assert open_run(prepared.run.path).recipe == prepared.recipe


def files(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_preparation_interrupted_by_a_disk_error_resumes_to_the_same_files(tmp_path):
    write_text(tmp_path / "text.txt")
    with failing_disk() as disk:
        uninterrupted = prepare_run(recipe(), tmp_path / "uninterrupted", tmp_path, progress=silent)
    expected = files(uninterrupted.run.path)
    n_resumed = 0
    for at in [at for at, name in enumerate(disk.operations, 1) if name != "mkdir"][::2]:
        folder = tmp_path / f"interrupted-{at}"
        with failing_disk(at), pytest.raises(DiskError, match="No space left on device"):
            prepare_run(recipe(), folder, tmp_path, progress=silent)
        with pytest.raises(RunError, match=r"recipe\.toml|qkv train --resume"):
            open_run(folder)
        if (folder / "recipe.toml").exists():
            resume_preparation(folder, progress=silent)
            assert files(folder) == expected
            n_resumed += 1
    assert n_resumed > 5


def test_the_preparation_state_is_saved_until_it_is_finished(tmp_path):
    prepared_run = prepare(tmp_path, seconds=30.0)
    state = load_preparation_inputs(prepared_run.run.path)
    assert (state.data, state.seconds) == (str(tmp_path), 30.0)
    write_fingerprints_and_final_recipe(replace(prepared_run, recipe=recipe(steps=5)))
    assert load_preparation_inputs(prepared_run.run.path) is None
    assert open_run(prepared_run.run.path).recipe.training.steps == 5


def test_an_invalid_preparation_state_raises_an_error(prepared, tmp_path):
    folder = copy_run(prepared, tmp_path / "run").run.path
    (folder / "preparation.json").write_text("[]")
    with pytest.raises(RunError, match=r"preparation\.json: "):
        open_run(folder)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", r"text\.txt: "),
        (b" \n\n ", r"text\.txt: "),
        (b"ab\0cd", r"text\.txt: .*\b2\b.*NUL"),
        (b"ab\ncd\xff", r"text\.txt: line 2: .*UTF-8.*\b5\b.*0xFF"),
        (b"a", r"text\.txt: 2 tokens .*10%"),
    ],
)
def test_invalid_text_raises_an_error_and_leaves_no_folder(tmp_path, content, message):
    (tmp_path / "text.txt").write_bytes(content)
    with pytest.raises(InputError, match=message):
        prepare_run(recipe(), tmp_path / "runs" / "1", tmp_path, progress=silent)
    assert [path.name for path in tmp_path.iterdir()] == ["text.txt"]


def test_an_existing_folder_is_kept_if_the_input_is_invalid(tmp_path):
    (tmp_path / "text.txt").write_bytes(b"")
    (tmp_path / "runs" / "1").mkdir(parents=True)
    for name in ("1", "2"):
        with pytest.raises(InputError, match=r"text\.txt: "):
            prepare_run(recipe(), tmp_path / "runs" / name, tmp_path, progress=silent)
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["1"]
    assert list((tmp_path / "runs" / "1").iterdir()) == []


def test_missing_text_raises_an_error_before_anything_is_created(tmp_path):
    with pytest.raises(InputError, match=r"text\.txt: "):
        prepare_run(recipe(), tmp_path / "run", tmp_path, progress=silent)
    data = {"train": ("*.txt",)}
    with pytest.raises(InputError, match=r"\*\.txt: "):
        prepare_run(recipe().replace(data=data), tmp_path / "run", tmp_path, progress=silent)
    assert not (tmp_path / "run").exists()


def test_a_tokenizer_of_another_size_raises_an_error_with_both_sizes(prepared, tmp_path):
    save_tokenizer(prepared.corpus.tokenizer, tmp_path)
    settings = recipe().replace(tokenizer={"path": "tokenizer.json", "vocab_size": 99})
    with pytest.raises(ConfigError, match=r"vocab_size .*\b16\b.*tokenizer\.json, got 99$"):
        prepare(tmp_path, settings)
    matching = recipe().replace(tokenizer={"path": "tokenizer.json", "vocab_size": 16})
    assert prepare(tmp_path, matching).corpus.tokenizer.fingerprint == prepared.corpus.tokenizer.fingerprint


def test_a_text_shorter_than_a_window_can_be_trained_on(tmp_path):
    (tmp_path / "text.txt").write_text("a short text")
    prepared_run = prepare_run(recipe(steps=3), tmp_path / "run", tmp_path, progress=silent)
    write_fingerprints_and_final_recipe(prepared_run)
    build_cpu_trainer(prepared_run).train()
    assert len([line for line in logged_metrics(prepared_run.run.path) if "loss" in line]) == 3


def test_a_run_starts_with_the_weights_of_the_initial_model(prepared, tmp_path):
    config = prepared.recipe.build_model_config(16)
    start = GPT(config, seed=5)
    trainer = build_cpu_trainer(prepared, start=start)
    assert all(
        torch.equal(actual, expected)
        for actual, expected in zip(trainer.model.parameters(), start.parameters(), strict=True)
    )
    other = GPT(GPTConfig(**{**config.model_dump(exclude={"family"}), "n_layers": 1}))
    with pytest.raises(ConfigError, match=r"n_layers .*\b2\b.*, got 1$"):
        build_cpu_trainer(prepared, start=other)


def test_a_folder_that_is_not_a_run_raises_an_error(tmp_path):
    with pytest.raises(RunError, match=r"recipe\.toml"):
        open_run(tmp_path)


def test_a_checkpoint_contains_config_and_tokenizer(trained):
    folder = trained.run.checkpoint_folder(13)
    assert json.loads((folder / "config.json").read_text())["family"] == "gpt"
    assert json.loads((folder / "tokenizer_config.json").read_text())["eos_token"] == "<|endoftext|>"
    assert "checkpoints/step-00000013/tokenizer.json" in checkpoint_contents(trained.run.path)
