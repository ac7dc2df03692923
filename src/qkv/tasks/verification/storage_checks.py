"""Check that saving and reloading a model preserves its weights and outputs."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from qkv.choices import ScheduleKind
from qkv.errors import ConfigError, InputError, MissingExtraError, WeightsError
from qkv.models import Seq2Seq
from qkv.tasks.loader import load_pretrained
from qkv.tasks.verification.case import NotCheckedError, VerificationCase, max_difference_relative_to_peak
from qkv.training.checkpoint import RunFolder, load_checkpoint
from qkv.training.family import TrainingData
from qkv.training.preparation import RECIPE_FILE, PreparedRun, build_trainer, open_run
from qkv.weights.checkpoint_folder import INT8_MAX
from qkv.weights.ctranslate2_export import ct2_vocabulary, save_ct2
from qkv.weights.gguf_file import write_gguf
from qkv.weights.model_loader import ModelBundle, native_name_table, to_published_state
from qkv.weights.save import StorageDType, save_hf, save_native, save_native_int8


class SaveFormat(NamedTuple):
    """A file format, given by the name of the saved file or folder and the function that writes it."""

    name: str
    write: Callable[[ModelBundle, Path], object]


NATIVE, INT8, HF, CT2 = (
    SaveFormat("native", save_native),
    SaveFormat("int8", save_native_int8),
    SaveFormat("hf", save_hf),
    SaveFormat("ct2", save_ct2),
)
GGUF = SaveFormat("model.gguf", partial(write_gguf, dtype=StorageDType.F32))


def max_relative_round_trip_difference(case: VerificationCase, *, save_format: SaveFormat) -> float:
    """Compare the outputs and all weights before and after saving and reloading.

    Comparing only the outputs would not be sufficient because no text uses every weight.
    """
    reloaded = _reload_and_check_tokenizer(case, save_format).model
    actual, expected = (
        list(to_published_state(model, native_name_table(model)).values()) for model in (reloaded, case.model)
    )
    return max_difference_relative_to_peak(
        [*case.compute_eager_outputs(reloaded), actual], [*case.reference_outputs, expected]
    )


def max_int8_change_in_steps(case: VerificationCase) -> float:
    """Return the largest change in any weight due to int8 quantization, in quantization steps of the weight's row."""
    reloaded = _reload_and_check_tokenizer(case, INT8)
    before, after = (to_published_state(model, native_name_table(model)) for model in (case.model, reloaded.model))
    rows = [(weight.flatten(1), after[name].flatten(1)) for name, weight in before.items() if weight.dim() > 1]
    steps = [(actual - other).abs().amax(1) / (actual.abs().amax(1) / INT8_MAX + 1e-30) for actual, other in rows]
    return float(torch.cat(steps).max())


def relative_rms_change_with_int8(case: VerificationCase) -> float:
    """Return the relative RMS change in the outputs, ignoring any constant added to all logits."""
    output_pairs = (case.compute_eager_outputs(_reload_and_check_tokenizer(case, INT8).model), case.reference_outputs)
    actual, expected = (
        torch.cat([(output - output.mean(-1, keepdim=True)).flatten() for output, *_ in outputs])
        for outputs in output_pairs
    )
    return float((actual - expected).norm() / expected.norm().clamp(min=1e-30))


def compare_outputs_with_transformers(case: VerificationCase) -> float:
    try:
        import transformers as library
    except ImportError:
        raise NotCheckedError("transformers is not installed; install it with: pip install transformers") from None
    folder = _save_once(case, HF)
    library.logging.set_verbosity_error()
    library.logging.disable_progress_bar()
    class_name = json.loads((folder / "config.json").read_text(encoding="utf-8"))["architectures"][0]
    model = getattr(library, class_name).from_pretrained(folder, dtype=torch.float32).eval()
    # The positional arguments are input_ids, attention_mask and decoder_input_ids.
    inputs = [
        (example.ids,) if example.source is None else (example.source, None, example.ids) for example in case.examples
    ]
    return max_difference_relative_to_peak(
        ([model(*arguments)[0]] for arguments in inputs), (outputs[:1] for outputs in case.reference_outputs)
    )


def compare_ctranslate2_log_probs(case: VerificationCase) -> float:
    """Compare CTranslate2's log-probabilities of the example tokens with those of the eager implementation."""
    folder, model, loaded = _save_once(case, CT2), case.model, case.loaded
    assert isinstance(model, Seq2Seq)
    assert loaded.tokenizer is not None
    import ctranslate2

    words = ct2_vocabulary(loaded.tokenizer, model.config.vocab_size)
    source_words = ct2_vocabulary(loaded.source_tokenizer or loaded.tokenizer, model.config.source_vocab_size)
    sources = [
        [source_words[i] for i in example.source[0].tolist()] for example in case.examples if example.source is not None
    ]
    targets = [[words[i] for i in example.ids[0, 1:].tolist()] for example in case.examples]
    translator: Any = ctranslate2.Translator(str(folder), device="cpu", compute_type="float32")
    # The last log-probability belongs to the end token, which the examples do not contain.
    actual_log_probs = [[torch.tensor(score.log_probs[:-1])] for score in translator.score_batch(sources, targets)]
    expected_log_probs = []
    for example, (output,) in zip(case.examples, case.reference_outputs, strict=True):
        logits = output[0, :-1].clone()
        logits[:, sorted(loaded.generation_config.suppressed_ids)] = float("-inf")
        expected_log_probs.append([logits.log_softmax(-1).gather(1, example.ids[0, 1:, None])[:, 0]])
    return max_difference_relative_to_peak(actual_log_probs, expected_log_probs)


def compare_resumed_training(case: VerificationCase) -> float:
    """Compare all weights and optimizer states in the final checkpoints of an interrupted and an uninterrupted run."""
    if case.run is None:
        raise NotCheckedError("the model does not belong to a training run that could be resumed")
    if not (case.run / RECIPE_FILE).is_file():
        raise NotCheckedError(f"the run has no {RECIPE_FILE} (fine-tuning runs keep their data elsewhere)")
    prepared = open_run(case.run)
    progress, folder = prepared.run.latest_valid_checkpoint(lambda _message: None)
    ends = {"once": [2], "twice": [1, 2]}
    for name, steps in ends.items():
        run = RunFolder(case.folder / name)
        shutil.copytree(folder, run.checkpoint_folder(progress.step))
        for n in steps:
            _resume_with_constant_lr(replace(prepared, run=run), last_step=progress.step + n)
    once, twice = (load_checkpoint(RunFolder(case.folder / name).checkpoint_folder(progress.step + 2)) for name in ends)
    return max_difference_relative_to_peak(
        (tensors.values() for tensors in twice), (tensors.values() for tensors in once)
    )


@torch.enable_grad()
def _resume_with_constant_lr(prepared: PreparedRun, *, last_step: int) -> None:
    """Resume training with a constant learning rate because other schedules depend on the number of steps.

    Evaluation is disabled because it does not affect the weights.
    """
    training = prepared.recipe.training
    training = training.replace(
        steps=last_step,
        schedule=ScheduleKind.CONSTANT,
        warmup_steps=min(training.warmup_steps, last_step),
        compile=False,
    )
    prepared = replace(prepared, recipe=prepared.recipe.replace(training=training))
    trainer = build_trainer(prepared, device=torch.device("cpu"), report=lambda _entry: None)
    trainer.data = TrainingData(batch=trainer.data.batch)
    trainer.resume(lambda _message: None)
    if trainer.train().signal is not None:
        raise KeyboardInterrupt


def _save_once(case: VerificationCase, save_format: SaveFormat) -> Path:
    """Save the model unless it was already saved in this format, and return the path.

    If the format cannot represent the model, the check is skipped.
    """
    target = case.folder / save_format.name
    try:
        if not target.exists():
            save_format.write(case.loaded, target)
    except (ConfigError, InputError, MissingExtraError, WeightsError) as error:
        raise NotCheckedError(str(error)) from None
    return target


def _reload_and_check_tokenizer(case: VerificationCase, save_format: SaveFormat) -> ModelBundle:
    reloaded = load_pretrained(_save_once(case, save_format))
    expected, actual = (loaded.source_tokenizer or loaded.tokenizer for loaded in (case.loaded, reloaded))
    if expected is not None and (
        actual is None or actual.encode_batch(case.texts) != expected.encode_batch(case.texts)
    ):
        raise WeightsError("the reloaded tokenizer encodes the texts differently")
    return reloaded
