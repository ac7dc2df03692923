"""Engines do the same work: the same losses, ids and vectors from the same weights."""

import math
import subprocess
from importlib.util import find_spec

import pytest
import torch

from benchmarks.engines import (
    beam_joeynmt,
    beam_qkv,
    beam_transformers,
    decode_ctranslate2,
    decode_qkv,
    decode_transformers,
    train_qkv,
    train_transformers,
)
from benchmarks.engines.beam_work import Work as BeamWork
from benchmarks.engines.decode_work import Work as DecodeWork
from benchmarks.engines.heldout import heldout_loss, split_text
from benchmarks.engines.nanogpt import find, version
from benchmarks.engines.next_token_work import Work
from benchmarks.engines.speaking import MissingPeerError

SHAPE = {"n_layers": 2, "n_heads": 3, "d_model": 12, "vocab_size": 17, "context_length": 13, "batch": 2}


@pytest.mark.parametrize("bias", [True, False])
def test_ours_and_hugging_faces_steps_have_the_same_losses(bias):
    work = Work(**SHAPE, bias=bias, length=11, threads=1)
    built = [train_qkv.build(work, {}), train_transformers.build(work, {})]
    made = [[one.step(*batch) for batch in work.batches()[:3]] for one in built]
    ours, theirs = ([one.read(of) for of in steps] for one, steps in zip(built, made, strict=True))
    assert ours == pytest.approx(theirs, abs=1e-5)
    assert len(set(ours)) == 3


def test_weights_and_batches_are_a_pure_function_of_the_seed():
    one, other = (Work(**SHAPE, bias=True, length=11, threads=1) for _ in range(2))
    assert all(torch.equal(one.first_weights()[name], given) for name, given in other.first_weights().items())
    assert all(torch.equal(a, b) for (a, _), (b, _) in zip(one.batches(), other.batches(), strict=True))


def test_a_folder_without_nanogpt_is_a_missing_peer(tmp_path):
    with pytest.raises(MissingPeerError, match=r"no folder of peers was named"):
        find(None)
    with pytest.raises(MissingPeerError, match=r"has no nanoGPT/model\.py"):
        find(str(tmp_path))


@pytest.mark.parametrize("length", [1 + 3 * 64 * 5, 1 + 64 * 5 + 2, 4])
def test_the_held_out_loss_counts_every_character_but_the_first_once(length):
    ids = torch.arange(length) % 7
    seen = []

    def logits(given):
        seen.append(given)
        # All but certain of the next id, save that an even chance is given where the right answer is 0.
        answer = torch.nn.functional.one_hot((given + 1) % 7, 7) * 100.0
        return torch.where(((given + 1) % 7 == 0)[..., None], 0.0, answer)

    n_zeros = int((ids[1:] == 0).sum())
    expected = n_zeros * math.log(7) / (length - 1)
    assert heldout_loss(logits, ids, window=5) == pytest.approx(expected, abs=1e-6)
    assert torch.equal(torch.cat([given.flatten() for given in seen]), ids[:-1])
    assert all(given.shape[1] <= 5 for given in seen)


def test_the_last_tenth_is_held_out(tmp_path):
    path = tmp_path / "text"
    path.write_text("abcdefghijklm")
    assert split_text(path) == ("abcdefghijk", "lm")


def test_our_beams_and_hugging_faces_find_the_same_texts():
    work = BeamWork(n_encoder_layers=1, n_decoder_layers=2, n_heads=3, d_model=12, vocab_size=31, batch=2,
                    source_length=7, length=11, n_beams=3, threads=1)  # fmt: skip
    found = [engine.build(work, {})[0](work.sources(), 2) for engine in (beam_qkv, beam_transformers)]
    assert found[0] == found[1]
    assert [len(text) for text in found[0]] == [11, 11]


def test_a_folder_without_joeynmt_is_a_missing_peer(tmp_path):
    with pytest.raises(MissingPeerError, match=r"no folder of peers was named"):
        beam_joeynmt.find(None)
    with pytest.raises(MissingPeerError, match=r"has no joeynmt/"):
        beam_joeynmt.find(str(tmp_path))


def test_each_of_joeynmts_names_has_one_of_ours():
    names = {
        "trg_trg_att.q_layer.weight": "attention.query.weight",
        "src_trg_att.output_layer.bias": "cross.output.bias",
        "feed_forward.pwff_layer.3.bias": "feedforward.contract.bias",
        "layer_norm.weight": "attention_norm.weight",
        "feed_forward.layer_norm.bias": "feedforward_norm.bias",
    }
    assert {name: beam_joeynmt._our_name(name) for name in names} == names


@torch.inference_mode()
def test_every_engine_writes_the_same_ids():
    """And many different ones: a random model that says one token for ever would hide much."""
    work = DecodeWork(
        n_layers=2, n_heads=3, d_model=24, vocab_size=97, batch=2, short=1, long=17, threads=1, n_prompt=5
    )
    engines = [decode_qkv, decode_transformers]
    if find_spec("ctranslate2") is not None:
        engines.append(decode_ctranslate2)
    written = [engine.build(work, {})[0](work.prompts(), work.long) for engine in engines]
    assert all(texts == written[0] for texts in written)
    assert len({number for text in written[0] for number in text}) > 5
    assert len(decode_qkv.build(work, {"int8": True})[0](work.prompts(), 3)[1]) == 3


def test_a_copy_without_a_repository_of_its_own_has_not_the_version_of_the_one_around_it(tmp_path):
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    who = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    subprocess.run(["git", "-C", tmp_path, *who, "commit", "-q", "--allow-empty", "-m", "x"], check=True)
    (tmp_path / "copy").mkdir()
    assert version(tmp_path / "copy") == "unknown"
    assert len(version(tmp_path)) >= 7
