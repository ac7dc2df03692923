"""Engines with the same weights compute the same losses, ids and vectors."""

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
from benchmarks.engines.beam_workload import Workload as BeamWork
from benchmarks.engines.decode_workload import Workload as DecodeWork
from benchmarks.engines.held_out_loss import held_out_loss, split_to_context_length
from benchmarks.engines.nanogpt import find, version
from benchmarks.engines.next_token_workload import Workload
from benchmarks.engines.protocol import MissingPeerError

SHAPE = {"n_layers": 2, "n_heads": 3, "d_model": 12, "vocab_size": 17, "context_length": 13, "batch": 2}


@pytest.mark.parametrize("bias", [True, False])
def test_qkv_and_hugging_face_steps_have_the_same_losses(bias):
    workload = Workload(**SHAPE, bias=bias, length=11, threads=1)
    built = [train_qkv.build(workload, {}), train_transformers.build(workload, {})]
    outputs = [[engine.step(*batch) for batch in workload.batches()[:3]] for engine in built]
    ours, theirs = ([engine.read(output) for output in steps] for engine, steps in zip(built, outputs, strict=True))
    assert ours == pytest.approx(theirs, abs=1e-5)
    assert len(set(ours)) == 3


def test_weights_and_batches_depend_only_on_the_seed():
    first, second = (Workload(**SHAPE, bias=True, length=11, threads=1) for _ in range(2))
    assert all(torch.equal(first.initial_weights()[name], tensor) for name, tensor in second.initial_weights().items())
    assert all(torch.equal(a, b) for (a, _), (b, _) in zip(first.batches(), second.batches(), strict=True))


def test_a_folder_without_nanogpt_is_a_missing_peer(tmp_path):
    with pytest.raises(MissingPeerError, match=r"--peers"):
        find(None)
    with pytest.raises(MissingPeerError, match=r"nanoGPT/model\.py"):
        find(str(tmp_path))


@pytest.mark.parametrize("length", [1 + 3 * 64 * 5, 1 + 64 * 5 + 2, 4])
def test_the_held_out_loss_counts_every_character_except_the_first_once(length):
    ids = torch.arange(length) % 7
    batches = []

    def logits(inputs):
        batches.append(inputs)
        # Nearly certain of the next id, except for uniform logits where the target is 0.
        certain = torch.nn.functional.one_hot((inputs + 1) % 7, 7) * 100.0
        return torch.where(((inputs + 1) % 7 == 0)[..., None], 0.0, certain)

    n_zeros = int((ids[1:] == 0).sum())
    expected = n_zeros * math.log(7) / (length - 1)
    assert held_out_loss(logits, ids, window=5) == pytest.approx(expected, abs=1e-6)
    assert torch.equal(torch.cat([inputs.flatten() for inputs in batches]), ids[:-1])
    assert all(inputs.shape[1] <= 5 for inputs in batches)


def test_the_last_tenth_is_held_out(tmp_path):
    path = tmp_path / "text"
    path.write_text("abcdefghijklm")
    assert split_to_context_length(path) == ("abcdefghijk", "lm")


def test_qkv_and_hugging_face_beams_find_the_same_translations():
    workload = BeamWork(
        n_encoder_layers=1,
        n_decoder_layers=2,
        n_heads=3,
        d_model=12,
        vocab_size=31,
        batch=2,
        source_length=7,
        length=11,
        n_beams=3,
        threads=1,
    )
    result = [engine.build(workload, {})[0](workload.sources(), 2) for engine in (beam_qkv, beam_transformers)]
    assert result[0] == result[1]
    assert [len(text) for text in result[0]] == [11, 11]


def test_a_folder_without_joeynmt_is_a_missing_peer(tmp_path):
    with pytest.raises(MissingPeerError, match=r"--peers"):
        beam_joeynmt.find(None)
    with pytest.raises(MissingPeerError, match=r"joeynmt/"):
        beam_joeynmt.find(str(tmp_path))


def test_joeynmt_names_are_mapped_to_qkv_names():
    names = {
        "trg_trg_att.q_layer.weight": "attention.q_proj.weight",
        "src_trg_att.output_layer.bias": "cross_attention.out_proj.bias",
        "feed_forward.pwff_layer.3.bias": "feed_forward.down_proj.bias",
        "layer_norm.weight": "attention_norm.weight",
        "feed_forward.layer_norm.bias": "feed_forward_norm.bias",
    }
    assert {name: beam_joeynmt._to_our_name(name) for name in names} == names


@torch.inference_mode()
def test_all_engines_generate_the_same_ids():
    """The ids must vary, because a model that repeats one token would hide differences."""
    workload = DecodeWork(
        n_layers=2, n_heads=3, d_model=24, vocab_size=97, batch=2, short=1, long=17, threads=1, n_prompt=5
    )
    engines = [decode_qkv, decode_transformers]
    if find_spec("ctranslate2") is not None:
        engines.append(decode_ctranslate2)
    outputs = [engine.build(workload, {})[0](workload.prompts(), workload.long) for engine in engines]
    assert all(texts == outputs[0] for texts in outputs)
    assert len({number for text in outputs[0] for number in text}) > 5
    assert len(decode_qkv.build(workload, {"int8": True})[0](workload.prompts(), 3)[1]) == 3


def test_a_copy_inside_another_repository_has_no_version(tmp_path):
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    identity = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    subprocess.run(["git", "-C", tmp_path, *identity, "commit", "-q", "--allow-empty", "-m", "x"], check=True)
    (tmp_path / "copy").mkdir()
    assert version(tmp_path / "copy") == "unknown"
    assert len(version(tmp_path)) >= 7
