"""Tests that all training steps agree with the eager one, with a stand-in for the capture on CPUs."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from qkv.accel.swap import ModuleSwap, share_attributes
from qkv.choices import BackendName, OptimizerKind
from qkv.config import TrainingConfig
from qkv.engines import CUDAGraphStep
from qkv.errors import InputError, TrainingError
from qkv.models import GPT
from qkv.nn import Block
from qkv.training import Trainer, open_run
from qkv.training.cuda_step import AsyncStep, CapturedStep, can_capture, pin_batch
from qkv.training.objectives import LossOutput, SplitObjective
from qkv.training.optimizer import set_learning_rate
from qkv.training.step import EagerStep, StepError, StepResult, TrainStep, build_train_step
from tests.training import translation_runs
from tests.training.runs import build_cpu_trainer, checkpoint_contents, logged_metrics, train_until_signal

SPLIT = SplitObjective(to_device=lambda batch: (batch,), loss=LossOutput)


def config(**changes):
    defaults = {"steps": 7, "batch_size": 6, "seq_len": 13, "warmup_steps": 0, "compile": True}
    return TrainingConfig(**defaults | changes)


def with_step(trainer, create_step) -> Trainer:
    """Return a trainer that runs the same run with another step."""
    step = create_step(trainer.model, trainer.config, trainer.train_step.objective)
    step.load = lambda batch: batch  # memory can be pinned only with a GPU
    return Trainer(step, data=trainer.data, run=trainer.run, texts=trainer.texts, report=trainer.report)


def async_trainer(prepared) -> Trainer:
    return with_step(build_cpu_trainer(prepared), AsyncStep)


def captured_trainer(prepared) -> Trainer:
    """Build a trainer that works as on a GPU, but calls the step function instead of replaying a graph."""
    graph_step = CUDAGraphStep(capture=lambda work: work)
    return with_step(build_cpu_trainer(prepared), lambda *arguments: CapturedStep(*arguments, graph_step=graph_step))


def losses(path):
    return [float.fromhex(line["loss"]) for line in logged_metrics(path) if "loss" in line]


def test_all_steps_implement_the_protocol(run):
    prepared = run(micro_batch_size=4)
    for trainer in (build_cpu_trainer(prepared), async_trainer(prepared), captured_trainer(prepared)):
        assert isinstance(trainer.train_step, TrainStep)
        result = trainer.train_step(trainer.data.batch(0), 0, learning_rate=1e-3)
        assert isinstance(result, StepResult)
        assert result.is_ready == (type(trainer.train_step) is EagerStep)


def test_the_eager_step_computes_loss_backward_clip_and_update(run):
    prepared = run(micro_batch_size=4, optimizer=OptimizerKind.ADAMW, max_grad_norm=0.01)
    trainer, by_hand = build_cpu_trainer(prepared), build_cpu_trainer(prepared)
    batch, optimizer = trainer.data.batch(0), by_hand.train_step.optimizers[0]
    metrics = trainer.train_step(batch, 0, learning_rate=0.1).read()
    torch.manual_seed(trainer.config.seed * 1_000_003 * 1_009)
    loss = by_hand.train_step.objective(batch).loss / batch.n_targets
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(by_hand.model.parameters(), 0.01)
    set_learning_rate(optimizer, 0.1)
    optimizer.step()
    assert metrics.loss == loss.item()
    assert metrics.grad_norm == pytest.approx(float(norm), rel=1e-6)
    for actual, expected in zip(trainer.model.parameters(), by_hand.model.parameters(), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-7)
        assert actual.grad is None


@pytest.mark.parametrize("create_trainer", [build_cpu_trainer, async_trainer, captured_trainer])
def test_a_batch_without_targets_is_rejected_before_the_update(run, create_trainer):
    trainer = create_trainer(run(micro_batch_size=4))
    batch = trainer.data.batch(0)
    batch.counts.zero_()
    before = [parameter.detach().clone() for parameter in trainer.model.parameters()]
    with pytest.raises(StepError, match="at least 1 target") as error:
        trainer.train_step(batch, 5, learning_rate=0.1)
    assert error.value.step == 5
    assert all(map(torch.equal, before, trainer.model.parameters()))


@pytest.mark.parametrize("optimizer", list(OptimizerKind))
def test_async_steps_equal_eager_steps_also_in_a_resumed_run(run, optimizer):
    eager, other = (run(name, optimizer=optimizer, ema_decay=0.9) for name in ("eager", "async"))
    build_cpu_trainer(eager).train()
    for n_steps in (5, 99):
        trainer = async_trainer(open_run(other.run.path))
        trainer.resume(pytest.fail)
        train_until_signal(trainer, n_steps) if n_steps < 99 else trainer.train()
    assert logged_metrics(other.run.path) == logged_metrics(eager.run.path)
    assert checkpoint_contents(other.run.path) == checkpoint_contents(eager.run.path)


@pytest.mark.parametrize("optimizer", list(OptimizerKind))
@pytest.mark.parametrize("n_bad", [1, 99])
def test_a_non_finite_gradient_is_named_and_all_later_updates_are_skipped(run, optimizer, n_bad):
    trainer = async_trainer(run(save_every=2, eval_every=99, optimizer=optimizer))
    original, weights = trainer.train_step.compute_gradients, {}

    def gradients_with_inf(batch, step):
        if step == 3 and not weights:
            weights.update({name: p.detach().clone() for name, p in trainer.model.named_parameters()})
        is_bad = 3 <= step < 3 + n_bad
        hook = trainer.model.final_norm.weight.register_hook(lambda g: g * float("inf") if is_bad else g)
        output = original(batch, step)
        hook.remove()
        return output

    trainer.train_step.compute_gradients = gradients_with_inf
    with pytest.raises(TrainingError, match=r"step 3: loss [\d.]+: .*final_norm\.weight"):
        trainer.train()
    for name, p in trainer.model.named_parameters():
        assert torch.equal(p, weights[name])
    assert [line["step"] for line in logged_metrics(trainer.run.path)] == [1, 2, 3]
    assert trainer.run.checkpoint_steps()[-1] == 2


@pytest.mark.parametrize("optimizer", list(OptimizerKind))
def test_captured_steps_match_eager_steps_and_a_resumed_run_is_identical(run, optimizer):
    settings = {"optimizer": optimizer, "ema_decay": 0.9, "micro_batch_size": 4, "cross_documents": False}
    eager, captured, resumed = (run(name, **settings) for name in ("eager", "captured", "resumed"))
    build_cpu_trainer(eager).train()
    captured_trainer(captured).train()
    for n_steps in (5, 99):
        trainer = captured_trainer(open_run(resumed.run.path))
        trainer.resume(pytest.fail)
        train_until_signal(trainer, n_steps) if n_steps < 99 else trainer.train()
    assert losses(captured.run.path) == pytest.approx(losses(eager.run.path), rel=1e-5)
    assert logged_metrics(resumed.run.path) == logged_metrics(captured.run.path)
    assert checkpoint_contents(resumed.run.path) == checkpoint_contents(captured.run.path)


def test_an_invalid_id_raises_an_error_before_a_replay(run):
    trainer = captured_trainer(run(eval_every=99, micro_batch_size=4))
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
    trainer = captured_trainer(run(optimizer=OptimizerKind.MUON, micro_batch_size=4))
    rates = [group["lr"] for group in _param_groups(trainer)]
    trainer.train_step.set_learning_rate(0.25)
    assert len({id(rate) for rate in rates}) == len(rates)
    assert all(float(rate) == 0.25 for rate in rates)
    assert all(group["lr"] is rate for rate, group in zip(rates, _param_groups(trainer), strict=True))


def _param_groups(trainer):
    return [group for optimizer in trainer.train_step.optimizers for group in optimizer.param_groups]


@pytest.mark.parametrize(
    ("objective", "changes", "expected"),
    [
        (SPLIT, {}, True),
        (SPLIT, {"compile": False}, False),
        (SPLIT, {"micro_batch_size": 3}, False),
        (SPLIT, {"activation_checkpointing": True}, False),
        (SPLIT.__call__, {}, False),  # like the wrapped objective of several processes
    ],
)
def test_can_capture_requires_a_compiled_single_process_step(objective, changes, expected):
    assert can_capture(objective, config(**changes)) is expected


def test_pin_batch_pins_every_tensor(run, monkeypatch):
    pinned_tensors = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: pinned_tensors.append(tensor) or tensor.clone())
    prepared = run(cross_documents=False)
    batch = prepared.corpus.data(prepared.recipe.training).batch(0)
    pinned = pin_batch(batch)
    assert {id(t) for t in pinned_tensors} == {
        id(t) for t in (batch.ids, batch.targets, batch.document_ids, batch.counts)
    }
    assert torch.equal(pinned.ids, batch.ids)
    assert torch.equal(pinned.document_ids, batch.document_ids)


def test_the_objective_is_created_and_the_step_runs_with_the_modules_of_the_backend(run, monkeypatch):
    model, n_inside = GPT(run().config), 0

    @contextmanager
    def modules(_model, mode):
        nonlocal n_inside
        assert mode == "train"
        n_inside += 1
        yield
        n_inside -= 1

    class Reusable:
        def __enter__(self):
            self.context = modules(model, "train")
            self.context.__enter__()

        def __exit__(self, *error):
            self.context.__exit__(*error)

    def create_objective():
        created_inside.append(n_inside)
        return lambda _batch: pytest.fail("not called")

    monkeypatch.setattr("qkv.training.step.accelerated", lambda _model, _mode: Reusable())
    monkeypatch.setattr(
        "qkv.training.step.select_training_backend", lambda _model, _config, name: type("Backend", (), {"name": name})
    )
    created_inside = []
    for backend, expected in ((BackendName.CPU, 1), (BackendName.EAGER, 0)):
        step = build_train_step(model, config(compile=False), create_objective, backend=backend)
        assert created_inside.pop() == expected
        with step.modules:
            assert n_inside == expected


def test_a_named_backend_that_does_not_support_the_model_is_rejected(run, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(InputError, match=r"--backend cuda: the model is on cpu, not on an NVIDIA GPU"):
        build_cpu_trainer(run(), backend="cuda")
    with pytest.raises(InputError, match=r"--backend cpu: requires a weight matrix with at least 131,072 elements"):
        build_cpu_trainer(run("other"), backend="cpu")


def test_blocks_are_compiled_with_the_faster_modules(tmp_path, monkeypatch):
    classes = []

    class FasterBlock(Block):
        def forward(self, x, **options):
            classes.append(type(self))
            return super().forward(x, **options)

    def replace_blocks(model, _mode):
        return ModuleSwap(
            model, lambda module: share_attributes(module, FasterBlock) if type(module) is Block else None
        )

    prepared = translation_runs.prepare_small_run(tmp_path / "run", translation_runs.recipe("seq2seq", compile=True))
    monkeypatch.setattr("qkv.training.step.accelerated", replace_blocks)
    monkeypatch.setattr(
        "qkv.training.step.select_training_backend",
        lambda _model, _config, _name: SimpleNamespace(name=BackendName.CPU),
    )
    # Without real compilation, `Module.compile` still calls the module that it was called on.
    monkeypatch.setattr(torch, "compile", lambda function, **_options: function)
    trainer = build_cpu_trainer(prepared)
    trainer.train_step(trainer.data.batch(0), 0, learning_rate=0.1)
    n_blocks = sum(isinstance(module, Block) for module in trainer.model.modules())
    n_micro_batches = len(list(trainer.data.batch(0).split(trainer.config.micro_batch_size)))
    assert classes == [FasterBlock] * n_blocks * n_micro_batches
