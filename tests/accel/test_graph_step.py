"""Tests for CUDA graph capture of training steps, with a stand-in for the capture on CPUs."""

import pytest
import torch

from qkv.accel.cpu import onednn_linear
from qkv.accel.cuda.graph_step import CUDAGraphStep, can_capture
from qkv.choices import OptimizerKind
from qkv.config import TrainingConfig
from qkv.errors import TrainingError
from qkv.training import open_run
from qkv.training.objectives import LossOutput, SplitObjective
from qkv.training.optimizer import build_optimizers, set_learning_rate
from tests.training.runs import build_cpu_trainer, checkpoint_contents, logged_metrics, train_until_signal

SPLIT = SplitObjective(to_device=lambda batch: (batch,), loss=LossOutput)


def config(**changes):
    defaults = {"steps": 7, "batch_size": 6, "seq_len": 13, "warmup_steps": 0, "compile": True}
    return TrainingConfig(**defaults | changes)


@pytest.mark.parametrize(
    ("objective", "changes", "device", "expected"),
    [
        (SPLIT, {}, "cuda", True),
        (SPLIT, {}, "cpu", False),
        (SPLIT, {"compile": False}, "cuda", False),
        (SPLIT, {"micro_batch_size": 3}, "cuda", False),
        (SPLIT, {"activation_checkpointing": True}, "cuda", False),
        (SPLIT.__call__, {}, "cuda", False),  # like the wrapped objective of several processes
    ],
)
def test_can_capture_requires_a_compiled_single_process_step_on_a_gpu(objective, changes, device, expected):
    assert can_capture(objective, config(**changes), torch.device(device)) is expected


def test_a_replay_uses_the_new_inputs_and_other_shapes_run_eagerly():
    captures = []
    graph_step = CUDAGraphStep(capture=lambda work: captures.append(work) or work)
    for n, n_captures in ((3, 0), (3, 0), (5, 0), (3, 0), (3, 0), (3, 1), (3, 1), (5, 1), (3, 1)):
        x, y = torch.randn(n), torch.randn(n)
        expected = x - y
        assert torch.equal(graph_step((x, None, y), lambda inputs: inputs[0] - inputs[2]), expected)
        assert len(captures) == n_captures


@pytest.fixture(autouse=True)
def without_onednn(monkeypatch):
    monkeypatch.setattr(
        onednn_linear, "_has_onednn", lambda: False
    )  # oneDNN would wrap the objective, and it is used on CPUs only


def graph_trainer(prepared):
    """Build a trainer that works as on a GPU, but calls the step function instead of replaying a graph."""
    trainer = build_cpu_trainer(prepared)
    trainer._async_metrics = True
    trainer._graph_step = CUDAGraphStep(capture=lambda work: work)
    trainer.optimizers = build_optimizers(trainer.model, trainer.config, capturable=True)
    return trainer


def losses(path):
    return [float.fromhex(line["loss"]) for line in logged_metrics(path) if "loss" in line]


@pytest.mark.parametrize("optimizer", list(OptimizerKind))
def test_replayed_steps_match_eager_steps_and_a_resumed_run_is_identical(run, optimizer):
    settings = {"optimizer": optimizer, "ema_decay": 0.9, "micro_batch_size": 4, "cross_documents": False}
    eager, graph, resumed = (run(name, **settings) for name in ("eager", "graph", "resumed"))
    build_cpu_trainer(eager).train()
    graph_trainer(graph).train()
    for n_steps in (5, 99):
        trainer = graph_trainer(open_run(resumed.run.path))
        trainer.resume(pytest.fail)
        train_until_signal(trainer, n_steps) if n_steps < 99 else trainer.train()
    assert losses(graph.run.path) == pytest.approx(losses(eager.run.path), rel=1e-5)
    assert logged_metrics(resumed.run.path) == logged_metrics(graph.run.path)
    assert checkpoint_contents(resumed.run.path) == checkpoint_contents(graph.run.path)


def test_an_invalid_id_raises_an_error_before_a_replay(run):
    trainer = graph_trainer(run(eval_every=99, micro_batch_size=4))
    original = trainer.data.batch

    def batch(t):
        loaded = original(t)
        if t == 4:
            loaded.ids[0, 0] = 10**6
        return loaded

    trainer.data = type(trainer.data)(batch=batch)
    with pytest.raises(TrainingError, match=r"step 4: .*\b1000000\b"):
        trainer.train()


def test_the_learning_rate_is_updated_in_the_tensor_that_the_graph_reads(run):
    trainer = graph_trainer(run(optimizer=OptimizerKind.MUON, micro_batch_size=4))
    rates = [group["lr"] for group in _param_groups(trainer)]
    for optimizer in trainer.optimizers:
        set_learning_rate(optimizer, 0.25)
    assert len({id(rate) for rate in rates}) == len(rates)
    assert all(float(rate) == 0.25 for rate in rates)
    assert all(group["lr"] is rate for rate, group in zip(rates, _param_groups(trainer), strict=True))


def _param_groups(trainer):
    return [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
