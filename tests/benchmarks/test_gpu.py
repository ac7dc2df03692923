"""GPU benchmarks, as far as a CPU can test them: engines agree, reports are correct, and a CPU is an error."""

import pytest
import torch

from benchmarks import gpu_decoding, gpu_encoding, gpu_training, machine, memory
from benchmarks.engines import gpu_encode_qkv, gpu_encode_transformers
from benchmarks.engines.gpu_encode_workload import Workload
from benchmarks.runner import BenchmarkOptions, BestTimes, Comparison

SHAPE = {"n_layers": 2, "n_heads": 2, "d_model": 34, "d_ff": 62, "vocab_size": 31, "device": "cpu"}


@pytest.mark.parametrize("is_mixed", [True, False])
def test_packed_and_padded_texts_have_the_same_means(is_mixed):
    workload = Workload(**SHAPE, texts=7, length=13, is_mixed=is_mixed)
    assert workload.rows() == workload.rows()
    lengths = {len(row) for row in workload.rows()}
    assert max(lengths) == 13
    assert (len(lengths) > 1) == is_mixed
    with torch.inference_mode():
        ours = gpu_encode_qkv.build_encoder(workload, {}).means()
        theirs = gpu_encode_transformers.build_encoder(workload, {"batch": 3}).means()
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("measure", [gpu_training.train_gpu, gpu_encoding.encode_gpu, gpu_decoding.decode_gpu])
def test_a_cpu_is_an_error(measure):
    with pytest.raises(SystemExit, match="--device cuda"):
        measure(BenchmarkOptions(peers=None, repeats=1, threads=None, log=print))


def test_memory_is_measured_on_the_requested_device_even_if_there_is_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    devices = []
    monkeypatch.setattr(memory, "measure_peak", lambda _, device: devices.append(device) or memory.MIB)
    monkeypatch.setattr(memory, "predict_peak", lambda _, device: devices.append(device) or memory.MIB)
    text = memory.memory(BenchmarkOptions(peers=None, repeats=1, threads=None, log=print)).text()
    assert set(devices) == {"cpu"}
    assert "Mean error 0.0%" in text


def test_fractions_of_the_peak_are_tokens_times_flops(monkeypatch):
    result = Comparison(best={"qkv": BestTimes(wall=1.0, cpu=1.0), "nanoGPT": BestTimes(wall=1.5, cpu=1.0)})
    available_cores = machine.available_cores()
    result.ceilings = {available_cores: {"flops": 8e14, "bytes": 4e12}}
    monkeypatch.setattr(gpu_training, "compare", lambda *_, **__: result)
    monkeypatch.setattr(machine, "gpu", lambda: "a GPU")
    text = gpu_training.train_gpu(
        BenchmarkOptions(peers=None, repeats=1, threads=None, log=print, device="cuda")
    ).text()
    # 20 steps of 32 × 1024 tokens per second, 6 × 123.6 M weights, and 12 × 12 × 768 × 1024 for attention.
    assert "| qkv | 655,360 |" in text
    assert "| nanoGPT | 436,907 | 75.0 | 50.0 | 1.50 | 1.00 | 44% |" in text
    assert "qkv: 70%" in text
