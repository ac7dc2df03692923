"""Bugs that must make a test fail.

Each function replaces a function of qkv with a wrong version that an engineer could have written and that silently
gives wrong results. It returns the test that must fail.
"""

import dataclasses
from collections.abc import Callable
from functools import wraps
from typing import Any

import numpy as np
import torch
from torch import nn

from qkv.accel.cpu.prepacked_weights import PrepackedWeights
from qkv.cost.kernel_launch import ParametersByOptimizer, split_device_parameters_by_optimizer
from qkv.cost.memory import _kv_width
from qkv.cost.operation import Operation
from qkv.data.masked_batches import TokenMasker
from qkv.data.pair_files import connected_components
from qkv.data.sampler import rank_row_range
from qkv.data.token_batches import TokenBatch, _split_inputs_and_targets
from qkv.generation.beam import _SequenceBeams
from qkv.generation.decode_engine import GPTDecodeEngine
from qkv.generation.sampling import _keep_until_cumulative
from qkv.generation.sequence import StopStringFilter
from qkv.inspection.hooks import mask_attention
from qkv.inspection.logit_attribution import _apply_frozen_norm
from qkv.inspection.logit_lens import _apply_final_norm_and_unembedding
from qkv.inspection.rollout import rollout_from_means
from qkv.models import GPT
from qkv.models.stack import _document_offsets, position_ids_reserving_cache
from qkv.nn.attention import Attention, AttentionInputs, masked_softmax
from qkv.nn.cache import KVCache
from qkv.nn.mask import Mask
from qkv.nn.norm import LayerNorm
from qkv.nn.positions import PositionInfo
from qkv.nn.recurrent import BidirectionalRecurrentEncoder
from qkv.text.token_display import _count_new_words
from qkv.text.tokenizer import Encoding, StreamingDecoder, encode_texts, encode_truncated
from qkv.training.loop import EvaluationResult, evaluate
from qkv.training.optimizer import build_optimizers, learning_rate, load_optimizer_state
from qkv.training.step import accumulate_gradients
from qkv.weights.checkpoint_folder import INT8_MAX, quantize_rows
from qkv.weights.model_loader import _LoadTarget
from qkv.weights.rotary_layout import interleaved_to_halves
from tests.planted_bugs.patching import replace_everywhere

Test = Callable[..., None]
BUGS: dict[str, Callable[[], Test]] = {}


def planted_bug(install: Callable[[], Test]) -> Callable[[], Test]:
    BUGS[install.__name__] = install
    return install


def change_result(original: Any, change: Callable[[Any], Any]) -> None:
    """Replace a function with one that changes the result of the original."""

    @wraps(original)
    def wrong(*args: Any, **kwargs: Any) -> Any:
        return change(original(*args, **kwargs))

    replace_everywhere(original, wrong)


# --- nn ---------------------------------------------------------------------------------------------------------------


@planted_bug
def causal_mask_shows_the_next_token():
    from tests.agreement.test_incremental_decoding import test_gpt_with_a_cache_equals_a_single_pass as test

    original = Mask.to_dense

    def wrong(self: Mask, *sizes: Any) -> Any:
        visible = original(self, *sizes)
        return visible | visible.roll(1, -1) if self.causal else visible

    replace_everywhere(original, wrong)
    return test


@planted_bug
def sliding_window_is_one_too_wide():
    from tests.agreement.test_causality import test_a_sliding_window_of_three_covers_two_previous_tokens as test

    original = Mask.to_dense

    def wrong(self: Mask, *sizes: Any) -> Any:
        wider = (
            self if self.sliding_window is None else dataclasses.replace(self, sliding_window=self.sliding_window + 1)
        )
        return original(wider, *sizes)

    replace_everywhere(original, wrong)
    return test


@planted_bug
def padding_keys_are_attended_to():
    from tests.agreement.test_batching import test_bert_padded_with_garbage_equals_unpadded as test

    original = Mask.to_dense

    def wrong(self: Mask, *sizes: Any) -> Any:
        return original(dataclasses.replace(self, key_padding_mask=None), *sizes)

    replace_everywhere(original, wrong)
    return test


@planted_bug
def scores_are_not_scaled():
    from tests.agreement.test_grouped_query_attention import test_attention_equals_a_computation_head_by_head as test

    original = Attention.__init__

    def wrong(self: Attention, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self.scale = 1.0

    replace_everywhere(original, wrong)
    return test


@planted_bug
def kv_heads_are_repeated_in_the_wrong_order():
    from tests.agreement.test_attention_kernels import test_gpt_with_the_fused_kernel_equals_eager as test

    def wrong(self: AttentionInputs, kv: torch.Tensor) -> torch.Tensor:
        return kv.repeat(1, self.queries.shape[1] // kv.shape[1], 1, 1)

    replace_everywhere(AttentionInputs._repeat_kv_heads, wrong)
    return test


@planted_bug
def keys_and_values_are_swapped():
    from tests.reference.test_torch_nn import test_self_attention_equals_torch_multihead_attention as test

    change_result(Attention._project_keys_values, lambda keys_and_values: keys_and_values[::-1])
    return test


@planted_bug
def rotary_pairs_are_interleaved():
    from tests.nn.test_relative_positions import test_rotary_rotates_dimension_i_with_dimension_i_plus_half as test

    def wrong(self: PositionInfo, x: torch.Tensor) -> torch.Tensor:
        if self.rotation is None:
            return x
        cos, sin = self.rotation
        rotated = torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)
        return x * cos + rotated * sin

    replace_everywhere(PositionInfo.rotate, wrong)
    return test


@planted_bug
def fully_masked_rows_are_nan():
    from tests.agreement.test_attention_kernels import test_bert_with_the_fused_kernel_equals_eager as test

    replace_everywhere(masked_softmax, lambda scores: scores.softmax(-1))
    return test


@planted_bug
def cached_positions_start_at_zero():
    from tests.agreement.test_incremental_decoding import test_gpt_with_a_cache_equals_a_single_pass as test

    original = KVCache._assign_slots

    def wrong(self: KVCache, *args: Any) -> torch.Tensor:
        return original(self, *args) - self.n_filled

    replace_everywhere(original, wrong)
    return test


@planted_bug
def cached_values_are_not_reordered_with_their_keys():
    from tests.agreement.test_incremental_decoding import (
        test_reordered_rows_continue_as_if_computed_from_the_start as test,
    )

    original = KVCache.reorder

    def wrong(self: KVCache, rows: torch.Tensor, **kwargs: Any) -> None:
        values = self.values.clone()
        original(self, rows, **kwargs)
        self.values = values[:, torch.arange(len(rows)) % values.shape[1]]

    replace_everywhere(original, wrong)
    return test


# --- models -----------------------------------------------------------------------------------------------------------


@planted_bug
def packed_documents_share_positions():
    from tests.agreement.test_packed_documents import test_packed_documents_of_gpt_equal_separate_ones as test

    change_result(_document_offsets, torch.zeros_like)
    return test


@planted_bug
def padding_takes_a_position():
    from tests.agreement.test_batching import test_gpt_padded_with_garbage_equals_unpadded as test

    change_result(position_ids_reserving_cache, lambda positions: torch.arange(positions.shape[1]).expand_as(positions))
    return test


@planted_bug
def rnn_encoder_reads_padding():
    from tests.agreement.test_batching import test_an_rnns_source_padded_with_garbage_equals_unpadded as test

    original = BidirectionalRecurrentEncoder.forward
    replace_everywhere(original, lambda self, x, _attention_mask=None: original(self, x, None))
    return test


# --- generation -------------------------------------------------------------------------------------------------------


@planted_bug
def beams_are_not_reordered_in_the_cache():
    from tests.generation.test_beam import test_scores_equal_those_of_a_full_pass_and_decrease as test

    original = GPTDecodeEngine.reorder

    def wrong(self: GPTDecodeEngine, rows: torch.Tensor, **kwargs: Any) -> None:
        if len(rows) != self.cache.batch:
            original(self, rows, **kwargs)

    replace_everywhere(original, wrong)
    return test


@planted_bug
def beams_may_end_without_their_forced_terms():
    from tests.generation.test_translate import test_constraints_always_occur_in_the_output as test

    change_result(_SequenceBeams._is_complete, lambda _: True)
    return test


@planted_bug
def prepacked_weights_are_not_updated():
    from tests.generation.test_translate import test_changed_weights_are_repacked as test

    original, products = PrepackedWeights.packed_linear, {}

    def wrong(self: PrepackedWeights, *modules: Any, **kwargs: Any) -> Any:
        key = (self, *modules, *kwargs.values())
        if key not in products:
            products[key] = original(self, *modules, **kwargs)
        return products[key]

    replace_everywhere(original, wrong)
    return test


@planted_bug
def top_p_drops_the_token_that_reaches_p():
    from tests.generation.test_sampling import test_top_p_keeps_the_smallest_set_that_reaches_p as test

    def wrong(p: float, logits: torch.Tensor, ordered: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
        is_dropped = ordered.cumsum(-1) >= p
        is_dropped[:, 0] = False
        everywhere = torch.ones_like(logits, dtype=torch.bool)
        return logits.masked_fill(everywhere.scatter(-1, order, is_dropped), float("-inf"))

    replace_everywhere(_keep_until_cumulative, wrong)
    return test


@planted_bug
def stop_string_is_found_only_within_one_token():
    from tests.generation.test_stop_conditions import (
        test_emitted_text_is_always_a_prefix_of_the_result as test,
    )

    change_result(StopStringFilter._partial_match_length, lambda _: 0)
    return test


# --- data -------------------------------------------------------------------------------------------------------------


@planted_bug
def targets_are_the_inputs():
    from tests.data.test_token_batches import test_a_target_follows_its_input as test

    def repeat_inputs(batch: TokenBatch) -> TokenBatch:
        return dataclasses.replace(batch, targets=torch.where(batch.targets < 0, batch.targets, batch.ids))

    change_result(_split_inputs_and_targets, repeat_inputs)
    return test


@planted_bug
def every_rank_reads_the_same_rows():
    from tests.data.test_token_batches import test_the_concatenated_rows_of_all_ranks_are_the_full_batch as test

    replace_everywhere(rank_row_range, lambda n_rows, *, rank, world_size: (0, n_rows // world_size))  # noqa: ARG005
    return test


@planted_bug
def special_tokens_are_masked():
    from tests.data.test_masked_batches import (
        test_special_tokens_are_never_masked_and_rows_have_equally_many_slots as test,
    )

    original = TokenMasker.__init__

    def wrong(self: TokenMasker, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self._is_special = np.zeros_like(self._is_special)

    replace_everywhere(original, wrong)
    return test


@planted_bug
def pairs_that_share_a_sentence_are_separated():
    from tests.data.test_pair_split import (
        test_sets_do_not_share_sentences_and_contain_all_pairs as test,
    )

    change_result(connected_components, lambda numbers: np.arange(len(numbers)))
    return test


# --- training ---------------------------------------------------------------------------------------------------------


@planted_bug
def each_micro_batch_counts_as_a_whole_batch():
    from tests.training.test_trainer import (
        test_accumulated_gradients_equal_those_of_the_full_batch_with_unequal_target_counts as test,
    )

    original = accumulate_gradients

    def wrong(outcomes: Any, n_targets: Any, **kwargs: Any) -> Any:
        outcomes = list(outcomes)
        return original(outcomes, n_targets / len(outcomes), **kwargs)

    replace_everywhere(original, wrong)
    return test


@planted_bug
def learning_rate_is_one_step_ahead():
    from tests.training.test_schedule import (
        test_every_schedule_warms_up_evenly_and_peaks_at_the_learning_rate as test,
    )

    original = learning_rate
    replace_everywhere(original, lambda config, step: original(config, step + 1))
    return test


@planted_bug
def norms_and_biases_decay():
    from tests.training.test_optimizer import test_weight_decay_applies_to_matrices_only as test

    def decay_all(optimizers: list[torch.optim.Optimizer]) -> list[torch.optim.Optimizer]:
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        for group in groups:
            group["weight_decay"] = max(other["weight_decay"] for other in groups)
        return optimizers

    change_result(build_optimizers, decay_all)
    return test


@planted_bug
def optimizer_state_is_not_restored():
    from tests.training.test_optimizer import test_restored_optimizers_continue_bit_for_bit as test

    replace_everywhere(load_optimizer_state, lambda *_: None)
    return test


@planted_bug
def evaluation_averages_averages():
    from tests.training.test_evaluation import test_batches_are_weighted_by_their_targets as test

    original = evaluate

    def wrong(model: nn.Module, objective: Any, batches: Any, **kwargs: Any) -> EvaluationResult:
        scores = [original(model, objective, [batch], **kwargs) for batch in batches]
        return EvaluationResult(loss_sum=sum(score.loss for score in scores), n_targets=len(scores))

    replace_everywhere(original, wrong)
    return test


# --- weights ----------------------------------------------------------------------------------------------------------


@planted_bug
def rotary_rows_of_llama_files_are_not_permuted():
    from tests.weights.test_llama2c import (
        test_rotary_layout_conversions_are_inverse as test,
    )

    replace_everywhere(interleaved_to_halves, lambda weight, **_: weight)
    return test


@planted_bug
def fused_query_key_value_are_split_in_reverse():
    from tests.weights.test_state_dict import test_a_concatenated_and_transposed_tensor_is_split as test

    original = _LoadTarget.load

    def wrong(self: _LoadTarget, tensor: torch.Tensor) -> None:
        original(dataclasses.replace(self, parameters=self.parameters[::-1]), tensor)

    replace_everywhere(original, wrong)
    return test


@planted_bug
def int8_rows_share_one_scale():
    from tests.weights.test_int8_storage import test_rows_of_zeros_stay_zero_and_rows_are_independent as test

    def wrong(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scale = matrix.abs().max() / INT8_MAX
        return (matrix / scale).round().to(torch.int8), scale.expand(len(matrix)).clone()

    replace_everywhere(quantize_rows, wrong)
    return test


# --- inspection -------------------------------------------------------------------------------------------------------


@planted_bug
def masked_edge_is_reversed():
    from tests.inspection.test_hooks import (
        test_masking_equals_a_score_of_minus_infinity_and_stays_fused as test,
    )

    original = mask_attention
    replace_everywhere(original, lambda *args, query, key, **kwargs: original(*args, query=key, key=query, **kwargs))
    return test


@planted_bug
def logit_lens_forgets_the_final_norm():
    from tests.inspection.test_views import test_the_last_depth_of_the_logit_lens_is_the_models_output as test

    original = _apply_final_norm_and_unembedding

    def wrong(model: Any, states: torch.Tensor) -> torch.Tensor:
        return model.unembedding(states) if isinstance(model, GPT) else original(model, states)

    replace_everywhere(original, wrong)
    return test


@planted_bug
def rollout_ignores_the_residual_connection():
    from tests.inspection.test_views import test_rollout_multiplies_half_attention_half_identity as test

    def wrong(means: torch.Tensor) -> torch.Tensor:
        layers = [means[0]]
        for layer in means[1:]:
            layers.append(layer @ layers[-1])
        return torch.stack(layers)

    replace_everywhere(rollout_from_means, wrong)
    return test


@planted_bug
def contributions_keep_their_mean_through_layer_norm():
    from tests.inspection.test_views import test_contributions_sum_to_the_logit_of_any_model as test

    original = _apply_frozen_norm

    def wrong(norm: nn.Module, parts: torch.Tensor) -> torch.Tensor:
        centered = original(norm, parts)
        if not isinstance(norm, LayerNorm):
            return centered
        scale = (parts.sum(0).var(correction=0) + norm.eps).rsqrt()
        return centered + parts.mean(-1, keepdim=True) * scale * norm.weight

    replace_everywhere(original, wrong)
    return test


# --- cost -------------------------------------------------------------------------------------------------------------


@planted_bug
def cache_size_counts_query_heads():
    from tests.cost.test_published_numbers import (
        test_fewer_kv_heads_reduce_the_cache_and_the_projections as test,
    )

    def wrong(config: Any) -> int:
        return config.n_heads * (config.d_head + config.d_value)

    replace_everywhere(_kv_width, wrong)
    return test


@planted_bug
def a_multiply_add_counts_as_one_flop():
    from tests.cost.test_published_numbers import test_a_multiply_add_counts_as_2_flops as test

    original = Operation.flops
    replace_everywhere(original, property(lambda self: original.fget(self) // 2))
    return test


@planted_bug
def fsdp_does_not_shard_the_optimizer():
    from tests.cost.test_memory import test_fsdp_shards_the_state_and_ddp_replicates_it as test

    replace_everywhere(
        split_device_parameters_by_optimizer,
        lambda _operations, n_parameters, _workload: ParametersByOptimizer(by_adamw=n_parameters),
    )
    return test


# --- text -------------------------------------------------------------------------------------------------------------


@planted_bug
def streaming_decoder_splits_characters():
    from tests.text.test_streaming_decoder import test_an_emoji_is_returned_after_its_last_byte as test

    original = StreamingDecoder.add
    replace_everywhere(original, lambda self, number: original(self, number) or self.finish())
    return test


@planted_bug
def truncation_cuts_off_the_separator():
    from tests.text.test_encodings import test_truncation_keeps_the_start_of_a_text_and_the_special_tokens as test

    def wrong(tokenizer: Any, row: tuple[str, ...], max_length: int, **kwargs: Any) -> Encoding:
        (encoded,) = encode_texts(tokenizer, [row], **kwargs)
        return Encoding(encoded.ids[:max_length], encoded.segments[:max_length])

    replace_everywhere(encode_truncated, wrong)
    return test


@planted_bug
def subwords_start_new_words():
    from tests.text.test_word_indices import test_word_indices_of_any_ids as test

    replace_everywhere(_count_new_words, lambda _last, text: len(text.split()))
    return test


# --- checks of the mechanism, not in BUGS -----------------------------------------------------------------------------


def no_bug():
    from tests.training.test_schedule import (
        test_every_schedule_warms_up_evenly_and_peaks_at_the_learning_rate as test,
    )

    change_result(learning_rate, lambda rate: rate)
    return test


def bug_that_raises():
    from tests.training.test_schedule import (
        test_every_schedule_warms_up_evenly_and_peaks_at_the_learning_rate as test,
    )

    change_result(learning_rate, lambda rate: rate / 0)
    return test
