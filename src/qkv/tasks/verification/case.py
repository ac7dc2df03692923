"""The model to verify, its example inputs and its reference outputs."""

from collections.abc import Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import count
from pathlib import Path

import torch
from torch import Tensor

from qkv.choices import AttentionKernel
from qkv.errors import InputError
from qkv.models import BERT, Model, RNNSeq2Seq, Seq2Seq
from qkv.nn import use_attention_kernel
from qkv.tasks.translator import Translator
from qkv.tasks.verification.implementations import Example, forward
from qkv.weights.model_loader import ModelBundle

MAX_EXAMPLE_TOKENS = 64
"""The maximum length of an example, which is enough for every check but short enough to check large models quickly."""


class NotCheckedError(Exception):
    """An error raised when a check does not apply to a model or cannot run on this machine."""


@dataclass(frozen=True, kw_only=True)
class VerificationCase:
    """A model to verify, its example texts and the reference outputs of the eager implementation.

    The eager implementation (explicit softmax, no cache, one text at a time) defines the correct outputs.
    """

    loaded: ModelBundle
    texts: Sequence[str]
    folder: Path
    """An empty folder for files that the checks write."""
    run: Path | None = None
    """The run folder that contains the model, if any."""
    cpu_outputs: list[list[Tensor]] | None = None
    """The outputs of the eager implementation on the CPU if another device is being verified, otherwise `None`."""

    @property
    def model(self) -> Model:
        return self.loaded.model

    def to_device(self, device: torch.device) -> "VerificationCase":
        """Return a copy of this case whose model is on the given device."""
        moved = replace(self.loaded, model=deepcopy(self.model).to(device))
        return VerificationCase(
            loaded=moved, texts=self.texts, folder=self.folder, run=self.run, cpu_outputs=self.reference_outputs
        )

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @cached_property
    def examples(self) -> list[Example]:
        """The tokenized texts, truncated to at most half the context length.

        This leaves room to append tokens or another text. The limit varies from text to text so that the lengths
        differ.
        """
        max_tokens = min(MAX_EXAMPLE_TOKENS, self.model.config.context_length // 2)
        lengths = (max_tokens - index % (1 + max_tokens // 3) for index in count())
        tokenized = [
            Example(*(tensor[:, :length].to(self.device) for tensor in tensors))
            for length, tensors in zip(lengths, self._create_model_inputs(), strict=False)
        ]
        usable = [
            example
            for example in tokenized
            if example.ids.shape[1] > 1 and (example.source is None or example.source.shape[1])
        ]
        if len(usable) < 2:
            raise InputError(
                f"at least 2 texts with 2 or more tokens are required, got {len(usable)} of {len(self.texts)} texts"
            )
        return usable

    def _create_model_inputs(self) -> Iterable[tuple[Tensor, ...]]:
        """Return the token ids of each text, or random ids if the model has no tokenizer."""
        model, tokenizer = self.model, self.loaded.tokenizer
        is_pair = isinstance(model, Seq2Seq | RNNSeq2Seq)
        if isinstance(model, Seq2Seq) and model.config.d_patch is not None:
            raise InputError(
                f"only text models can be verified, but this model takes images (d_patch={model.config.d_patch})"
            )
        if tokenizer is None:
            max_id = min(model.config.vocab_size, model.config.source_vocab_size if is_pair else 1 << 30)
            random_ids = torch.randint(max_id, (5, 40), generator=torch.Generator().manual_seed(0))
            random_ids[:, 0] = 0  # the decoder start id
            return [
                (row[None, : 8 * row_number], row[None, -7:])[: 1 + is_pair]
                for row_number, row in enumerate(random_ids, 1)
            ]
        if not is_pair:
            return [(torch.tensor([tokenizer.encode(text)]),) for text in self.texts if text]
        task = Translator(
            model, tokenizer, source=self.loaded.source_tokenizer, generation_config=self.loaded.generation_config
        )
        sources = [task.source_tokenizer.encode(task.normalize_and_add_prefix(text)) for text in self.texts]
        targets = [[task.decoder_start_id, *tokenizer.encode(text, add_special_tokens=False)] for text in self.texts]
        return [
            (torch.tensor([target]), torch.tensor([source])) for target, source in zip(targets, sources, strict=True)
        ]

    @cached_property
    def reference_outputs(self) -> list[list[Tensor]]:
        return self.compute_eager_outputs(self.model)

    def compute_eager_outputs(self, model: Model) -> list[list[Tensor]]:
        """Return the outputs of the eager implementation for each example."""
        with use_attention_kernel(model, AttentionKernel.EAGER):
            return [
                _outputs_to_compare(model, forward(model, example.ids, example.source)) for example in self.examples
            ]

    def relative_difference_from_reference(self, rows: Iterable[Tensor]) -> float:
        """Return the largest relative difference between the logits or states in `rows` and the reference outputs."""
        return max_difference_relative_to_peak(
            [_outputs_to_compare(self.model, row[None]) for row in rows], self.reference_outputs
        )


def _outputs_to_compare(model: Model, states: Tensor) -> list[Tensor]:
    """Return the outputs that users see: the logits or, for a BERT model, the states and the outputs of the heads."""
    if not isinstance(model, BERT):
        return [states]
    heads = {
        model.class_logits: model.classifier,
        model.masked_lm_logits: model.masked_lm,
        model.next_sentence_logits: model.next_sentence,
    }
    return [*(apply_head(states) for apply_head, head in heads.items() if head is not None), states]


def max_difference_relative_to_peak(actual: Iterable[Iterable[Tensor]], expected: Iterable[Iterable[Tensor]]) -> float:
    """Return the largest difference between two lists of outputs, relative to the largest expected value (at least 1).

    If either list contains NaN, the result is NaN, for which every check fails.
    """
    shares = [torch.zeros(())]
    for actual_tensors, expected_tensors in zip(actual, expected, strict=True):
        for actual_tensor, expected_tensor in zip(actual_tensors, expected_tensors, strict=True):
            if actual_tensor.shape != expected_tensor.shape:
                return float("inf")
            reference = expected_tensor.cpu()
            shares.append((actual_tensor.cpu() - reference).abs().max() / reference.abs().max().clamp(min=1.0))
    return float(torch.stack(shares).max())
