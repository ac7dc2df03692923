"""The GPU's benchmarks, as far as a CPU can tell: engines agree, the reports' arithmetic, a CPU is refused."""

import pytest
import torch

from benchmarks import gpu_decoding, gpu_encoding, gpu_training, machine, memory
from benchmarks.engines import gpu_encode_qkv, gpu_encode_transformers
from benchmarks.engines.gpu_encode_work import Work
from benchmarks.runner import Asked, Best, Comparison

SHAPE = {"n_layers": 2, "n_heads": 2, "d_model": 34, "d_ff": 62, "vocab_size": 31, "device": "cpu"}


@pytest.mark.parametrize("is_mixed", [True, False])
def test_packed_and_padded_texts_have_the_same_means_and_texts_are_a_function_of_the_seed(is_mixed):
    work = Work(**SHAPE, texts=7, length=13, is_mixed=is_mixed)
    assert work.rows() == work.rows()
    lengths = {len(row) for row in work.rows()}
    assert max(lengths) == 13
    assert (len(lengths) > 1) == is_mixed
    with torch.inference_mode():
        ours = gpu_encode_qkv.built(work, {}).means()
        theirs = gpu_encode_transformers.built(work, {"batch": 3}).means()
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("measure", [gpu_training.train_gpu, gpu_encoding.encode_gpu, gpu_decoding.decode_gpu])
def test_a_cpu_is_refused(measure):
    with pytest.raises(SystemExit, match="measures a GPU: add --device cuda"):
        measure(Asked(peers=None, repeats=1, threads=None, say=print))


def test_memory_is_that_of_the_device_asked_for_where_there_is_a_gpu_too(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    asked = []
    monkeypatch.setattr(memory, "measured", lambda _, device: asked.append(device) or memory.MIB)
    monkeypatch.setattr(memory, "predicted", lambda _, device: asked.append(device) or memory.MIB)
    text = memory.memory(Asked(peers=None, repeats=1, threads=None, say=print)).text()
    assert set(asked) == {"cpu"}
    assert "Mean error 0.0%" in text


def test_shares_of_the_ceiling_are_of_tokens_times_flops(monkeypatch):
    found = Comparison(best={"qkv": Best(wall=1.0, cpu=1.0), "nanoGPT": Best(wall=1.5, cpu=1.0)})
    n_cores = machine.n_cores()
    found.ceilings = {n_cores: {"flops": 8e14, "bytes": 4e12}}
    monkeypatch.setattr(gpu_training, "compare", lambda *_, **__: found)
    monkeypatch.setattr(machine, "gpu", lambda: "a GPU")
    text = gpu_training.train_gpu(Asked(peers=None, repeats=1, threads=None, say=print, device="cuda")).text()
    # 20 steps of 32 × 1024 tokens in a second; 6 × 123.6 M weights, and 12 × 12 × 768 × 1024 for attention.
    assert "| qkv | 655,360 |" in text
    assert "| nanoGPT | 436,907 | 75.0 | 50.0 | 1.50 | 1.00 | 44% |" in text
    assert "qkv: 70% of the ceiling where attention is counted whole" in text
