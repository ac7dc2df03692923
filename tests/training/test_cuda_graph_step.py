"""Steps played back: who gets them, and that nothing but their launches changes."""

import pytest
import torch

from qkv.choices import OptimizerKind
from qkv.config import TrainingConfig
from qkv.errors import TrainingError
from qkv.training import onednn_linear, open_run
from qkv.training.cuda_graph_step import CUDAGraphStep, can_capture
from qkv.training.objectives import LossOutput, SplitObjective
from qkv.training.optimizer import build_optimizers, set_learning_rate
from tests.training.runs import checkpoints, curve, stopped_after, trainer_of

HALVES = SplitObjective(send=lambda batch: (batch,), judge=LossOutput)


def config(**changes):
    given = {"steps": 7, "batch_size": 6, "seq_len": 13, "warmup_steps": 0, "compile": True}
    return TrainingConfig(**given | changes)


@pytest.mark.parametrize(
    ("objective", "changes", "device", "expected"),
    [
        (HALVES, {}, "cuda", True),
        (HALVES, {}, "cpu", False),
        (HALVES, {"compile": False}, "cuda", False),
        (HALVES, {"micro_batch_size": 3}, "cuda", False),
        (HALVES, {"activation_checkpointing": True}, "cuda", False),
        (HALVES.__call__, {}, "cuda", False),  # as several processes wrap it
    ],
)
def test_a_step_is_replayed_if_compiled_on_a_gpu_whole_and_by_one_process(objective, changes, device, expected):
    assert can_capture(objective, config(**changes), torch.device(device)) is expected


def test_what_is_recorded_reads_each_calls_own_tensors_and_other_shapes_go_the_plain_road():
    recordings = []
    replay = CUDAGraphStep(record=lambda work: recordings.append(work) or work)
    for n, n_recordings in ((3, 0), (3, 0), (5, 0), (3, 0), (3, 0), (3, 1), (3, 1), (5, 1), (3, 1)):
        x, y = torch.randn(n), torch.randn(n)
        wanted = x - y
        assert torch.equal(replay((x, None, y), lambda given: given[0] - given[2]), wanted)
        assert len(recordings) == n_recordings


@pytest.fixture(autouse=True)
def no_other_products(monkeypatch):
    monkeypatch.setattr(onednn_linear, "_has_onednn", lambda: False)  # a CPU's alone; they would wrap the objective


def replaying(prepared):
    """A trainer that works as on a GPU, save that a recording is called."""
    trainer = trainer_of(prepared)
    trainer._reads_late = True
    trainer._replay = CUDAGraphStep(record=lambda work: work)
    trainer.optimizers = build_optimizers(trainer.model, trainer.config, capturable=True)
    return trainer


def losses(path):
    return [float.fromhex(line["loss"]) for line in curve(path) if "loss" in line]


@pytest.mark.parametrize("optimizer", list(OptimizerKind))
def test_replayed_steps_make_the_numbers_of_plain_ones_and_a_resumed_run_the_same_bits(run, optimizer):
    settings = {"optimizer": optimizer, "ema_decay": 0.9, "micro_batch_size": 4, "cross_documents": False}
    plain, other, again = (run(name, **settings) for name in ("plain", "other", "again"))
    trainer_of(plain).train()
    replaying(other).train()
    for n_steps in (5, 99):
        trainer = replaying(open_run(again.run.path))
        trainer.resume(pytest.fail)
        stopped_after(trainer, n_steps) if n_steps < 99 else trainer.train()
    assert losses(other.run.path) == pytest.approx(losses(plain.run.path), rel=1e-5)
    assert curve(again.run.path) == curve(other.run.path)
    assert checkpoints(again.run.path) == checkpoints(other.run.path)


def test_a_bad_id_is_refused_before_a_replay(run):
    trainer = replaying(run(eval_every=99, micro_batch_size=4))
    plain = trainer.data.batch

    def batch(t):
        made = plain(t)
        if t == 4:
            made.ids[0, 0] = 10**6
        return made

    trainer.data = type(trainer.data)(batch=batch)
    with pytest.raises(TrainingError, match="step 4: id 1000000 is outside the vocabulary"):
        trainer.train()


def test_a_recorded_learning_rate_is_written_where_the_recording_reads_it(run):
    trainer = replaying(run(optimizer=OptimizerKind.MUON, micro_batch_size=4))
    held = [group["lr"] for group in _groups(trainer)]
    for one in trainer.optimizers:
        set_learning_rate(one, 0.25)
    assert len({id(one) for one in held}) == len(held)
    assert all(float(one) == 0.25 for one in held)
    assert all(group["lr"] is was for was, group in zip(held, _groups(trainer), strict=True))


def _groups(trainer):
    return [group for one in trainer.optimizers for group in one.param_groups]
