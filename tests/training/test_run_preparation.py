"""From a recipe to a trainer, and preparations that were cut off."""

import json
from dataclasses import replace

import pytest
import torch

from qkv.config import GPTConfig
from qkv.errors import ConfigError, DiskError, InputError, RunError
from qkv.models import GPT
from qkv.text import save_tokenizer
from qkv.training import finish_preparation, load_preparation_state, open_run, prepare_run, resume_preparation
from tests.disks import refusing
from tests.training.runs import checkpoints, copy_of, curve, recipe, trainer_of, write_text


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


def test_validation_files_are_stores_of_their_own(tmp_path):
    write_text(tmp_path / "other.txt", 20)
    data = {"train": ("text.txt",), "validation": ("ot*.txt",)}
    ready = prepare(tmp_path, recipe().replace(data=data))
    assert ready.corpus.validation.n_tokens < ready.corpus.train.n_tokens / 5
    assert (tmp_path / "run" / "data" / "validation").is_dir()


def test_a_recipe_reads_itself_back(prepared):
    assert open_run(prepared.run.path).recipe == prepared.recipe


def files(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_preparation_that_the_disk_cut_off_anywhere_goes_on_to_the_same_files(tmp_path):
    write_text(tmp_path / "text.txt")
    with refusing() as disk:
        whole = prepare_run(recipe(), tmp_path / "whole", tmp_path, progress=silent)
    expected = files(whole.run.path)
    n_gone_on = 0
    for at in [at for at, name in enumerate(disk.names, 1) if name != "mkdir"][::2]:
        folder = tmp_path / f"cut-{at}"
        with refusing(at), pytest.raises(DiskError, match="No space left on device"):
            prepare_run(recipe(), folder, tmp_path, progress=silent)
        with pytest.raises(RunError, match=r"it is no run to go on with|was stopped while it was prepared; go on: qkv"):
            open_run(folder)
        if (folder / "recipe.toml").exists():
            resume_preparation(folder, progress=silent)
            assert files(folder) == expected
            n_gone_on += 1
    assert n_gone_on > 5


def test_what_is_still_to_do_is_noted_until_it_is_done(tmp_path):
    ready = prepare(tmp_path, seconds=30.0)
    state = load_preparation_state(ready.run.path)
    assert (state.data, state.seconds) == (str(tmp_path), 30.0)
    finish_preparation(replace(ready, recipe=recipe(steps=5)))
    assert load_preparation_state(ready.run.path) is None
    assert open_run(ready.run.path).recipe.training.steps == 5


def test_a_note_that_is_none_is_refused(prepared, tmp_path):
    folder = copy_of(prepared, tmp_path / "run").run.path
    (folder / "preparing.json").write_text("[]")
    with pytest.raises(RunError, match=r"preparing\.json: not what a run needs to go on"):
        open_run(folder)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", r"text\.txt: is empty: it holds no text"),
        (b" \n\n ", r"text\.txt: is empty: it holds no text"),
        (b"ab\0cd", r"text\.txt: byte 2 is NUL: this is a binary file, not text"),
        (b"ab\ncd\xff", r"text\.txt: line 2: byte 5 \(0xFF\) is not UTF-8"),
        (b"a", r"text\.txt: 2 tokens are too few to keep 10% of them apart"),
    ],
)
def test_bad_text_is_one_line_and_leaves_no_folder(tmp_path, content, message):
    (tmp_path / "text.txt").write_bytes(content)
    with pytest.raises(InputError, match=message):
        prepare_run(recipe(), tmp_path / "runs" / "1", tmp_path, progress=silent)
    assert [path.name for path in tmp_path.iterdir()] == ["text.txt"]


def test_a_folder_that_was_there_before_a_refused_run_stays(tmp_path):
    (tmp_path / "text.txt").write_bytes(b"")
    (tmp_path / "runs" / "1").mkdir(parents=True)
    for name in ("1", "2"):
        with pytest.raises(InputError, match="is empty"):
            prepare_run(recipe(), tmp_path / "runs" / name, tmp_path, progress=silent)
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["1"]
    assert list((tmp_path / "runs" / "1").iterdir()) == []


def test_missing_text_is_said_before_anything_is_made(tmp_path):
    with pytest.raises(InputError, match=r"text\.txt: there is no such file or folder"):
        prepare_run(recipe(), tmp_path / "run", tmp_path, progress=silent)
    data = {"train": ("*.txt",)}
    with pytest.raises(InputError, match=r"\*\.txt: no file matches"):
        prepare_run(recipe().replace(data=data), tmp_path / "run", tmp_path, progress=silent)
    assert not (tmp_path / "run").exists()


def test_a_tokenizer_of_another_size_is_refused_with_both_numbers(prepared, tmp_path):
    save_tokenizer(prepared.corpus.tokenizer, tmp_path)
    settings = recipe().replace(tokenizer={"path": "tokenizer.json", "vocab_size": 99})
    with pytest.raises(ConfigError, match=r"tokenizer\.vocab_size=99, but tokenizer\.json has 16"):
        prepare(tmp_path, settings)
    fitting = recipe().replace(tokenizer={"path": "tokenizer.json", "vocab_size": 16})
    assert prepare(tmp_path, fitting).corpus.tokenizer.fingerprint == prepared.corpus.tokenizer.fingerprint


def test_a_text_smaller_than_a_window_is_trained_on_all_the_same(tmp_path):
    (tmp_path / "text.txt").write_text("a short text")
    ready = prepare_run(recipe(steps=3), tmp_path / "run", tmp_path, progress=silent)
    finish_preparation(ready)
    trainer_of(ready).train()
    assert len([line for line in curve(ready.run.path) if "loss" in line]) == 3


def test_a_run_begins_with_the_model_it_is_given(prepared, tmp_path):
    config = prepared.recipe.build_model_config(16)
    start = GPT(config, seed=5)
    trainer = trainer_of(prepared, start=start)
    assert all(
        torch.equal(mine, theirs) for mine, theirs in zip(trainer.model.parameters(), start.parameters(), strict=True)
    )
    other = GPT(GPTConfig(**{**config.model_dump(exclude={"family"}), "n_layers": 1}))
    with pytest.raises(ConfigError, match="the model to start from has n_layers=1, the recipe says 2"):
        trainer_of(prepared, start=other)


def test_a_folder_that_is_no_run_is_refused(tmp_path):
    with pytest.raises(RunError, match=r"holds no recipe\.toml, so it is no run to go on with"):
        open_run(tmp_path)


def test_a_checkpoint_holds_what_others_load(trained):
    folder = trained.run.checkpoint_folder(13)
    assert json.loads((folder / "config.json").read_text())["family"] == "gpt"
    assert json.loads((folder / "tokenizer_config.json").read_text())["eos_token"] == "<|endoftext|>"
    assert "checkpoints/step-00000013/tokenizer.json" in checkpoints(trained.run.path)
