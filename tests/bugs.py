"""Bugs that were made, or nearly made, and the tests that must see them; planted by `planted_bugs.py`."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Bug:
    """A change of the source, as (file, old text, new text), and tests of which one must turn red."""

    name: str
    edits: tuple[tuple[str, str, str], ...]
    tests: tuple[str, ...]


def bug(name: str, file: str, old: str, new: str, *tests: str) -> Bug:
    return Bug(name=name, edits=((file, old, new),), tests=tests)


CACHED = "agreement/test_cached.py"
BATCHED = "agreement/test_batched.py"
FUSED = "agreement/test_fused.py"
GROUPED = "agreement/test_grouped.py"
NUMPY = "reference/test_numpy.py"
CUT = "inspection/test_change.py"
RECORD = "inspection/test_record.py"

BEFORE = '        """The stream, and what a sub-layer reads of it."""\n'

FOUNDATION = [
    bug(
        "causal mask off by one", "nn/mask.py", "seen & (distance >= 0)", "seen & (distance >= -1)",
        f"{CACHED}::test_gpt_in_pieces_equals_gpt_at_once",
    ),
    bug(
        "cached position offset dropped", "nn/cache.py",
        "return torch.arange(self.n_filled, self.n_filled + n_new, device=self.lengths.device)[None]",
        "return torch.arange(n_new, device=self.lengths.device)[None]",
        f"{CACHED}::test_gpt_in_pieces_equals_gpt_at_once",
    ),
    bug(
        "no √d", "nn/attention.py", "heads.d_head**-0.5 if scale_scores else 1.0", "1.0",
        f"{GROUPED}::test_grouped_with_all_heads_is_plain_attention_head_by_head",
    ),
    bug(
        "KV heads repeated in the wrong order", "nn/lookup.py",
        "kv.repeat_interleave(self.queries.shape[1] // kv.shape[1], dim=1)",
        "kv.repeat(1, self.queries.shape[1] // kv.shape[1], 1, 1)",
        f"{FUSED}::test_gpt_by_the_fused_kernel_equals_the_plain_road",
    ),
    bug(
        "padding visible", "nn/mask.py", "seen = seen & self.key_padding_mask[:, None, None, :]", "pass",
        f"{BATCHED}::test_bert_padded_with_garbage_equals_unpadded",
    ),
    Bug(
        name="pre- and post-norm swapped",
        edits=(
            ("nn/block.py", BEFORE,
             BEFORE + "        return x, norm(x) if self.norm_position is NormPosition.POST else x\n"),
            ("nn/block.py", "x = x + self.dropout(write)\n",
             "x = x + self.dropout(write)\n        return norm(x) if self.norm_position is NormPosition.PRE else x\n"),
        ),
        tests=(f"{RECORD}::test_the_residual_stream_is_the_sum_of_what_was_written",),
    ),
    bug(
        "segments ignored", "nn/embedding.py", "self._segments(ids, segments)", "self._segments(ids, None)",
        "models/test_bert.py::test_segments_count_and_are_zero_unless_given",
    ),
    bug(
        "dropout in evaluation", "nn/attention.py", "dropout = self.dropout if self.training else 0.0",
        "dropout = self.dropout",
        "agreement/test_built.py::test_dropout_is_for_training_alone",
    ),
    bug(
        "untied after load", "nn/embedding.py",
        "else tied_to.weight", "else nn.Parameter(tied_to.weight.detach().clone())",
        "agreement/test_built.py::test_a_tied_model_is_tied_when_built_copied_and_loaded",
    ),
    bug(
        "window off by one", "nn/mask.py", "distance.abs() < self.window", "distance.abs() <= self.window",
        "agreement/test_causality.py::test_a_window_of_three_sees_itself_and_two_back",
    ),
    bug(
        "K and V swapped", "nn/attention.py",
        "keys=self.keys(keys),\n            values=self.values(values),",
        "keys=self.keys(values),\n            values=self.values(keys),",
        "reference/test_torch_nn.py::test_self_attention_equals_torch_multihead_attention",
    ),
    bug(
        "cross-attention given the causal mask", "nn/block.py", "source=source.states, mask=source.mask",
        "source=source.states, mask=Mask(causal=True, query_positions=torch.arange(x.shape[1])[None])",
        "agreement/test_causality.py::test_the_first_target_position_sees_the_whole_source",
    ),
    bug(
        "the first thread to leave turns cuDNN's switch back", "nn/recurrent.py",
        "            self._n_inside -= 1\n            if self._n_inside == 0:\n",
        "            self._n_inside -= 1\n            if True:\n",
        "nn/test_recurrent.py::test_a_gpus_library_is_told_to_be_exact_until_the_last_of_two_threads_has_its_answer",
    ),
]  # fmt: skip

MASKS_AND_PADDING = [
    bug(
        "packed documents see each other", "nn/mask.py",
        "seen = seen & (self.documents[:, None, :, None] == self.documents[:, None, None, :])", "pass",
        "agreement/test_packed.py::test_gpts_packed_documents_equal_separate_ones",
    ),
    bug(
        "packed documents share positions", "models/placing.py",
        "return n_before if documents is None else n_before - _starts(documents, n_before)", "return n_before",
        "agreement/test_packed.py::test_gpts_packed_documents_equal_separate_ones",
    ),
    bug(
        "padding takes a position", "models/placing.py", "attention_mask.long().cumsum(1) - attention_mask.long()",
        "torch.arange(ids.shape[1])[None].expand_as(ids)",
        f"{BATCHED}::test_gpt_padded_with_garbage_equals_unpadded",
    ),
    bug(
        "padding of the source visible", "nn/block.py", "source=source.states, mask=source.mask",
        "source=source.states, mask=None",
        f"{BATCHED}::test_seq2seq_padded_with_garbage_equals_unpadded",
    ),
    bug(
        "a row that sees nothing is NaN", "nn/lookup.py",
        "safe = scores.masked_fill(sees_nothing, 0.0)\n    return safe.softmax(-1).masked_fill(sees_nothing, 0.0)",
        "return scores.softmax(-1)",
        f"{FUSED}::test_bert_by_the_fused_kernel_equals_the_plain_road",
    ),
    bug(
        "an RNN reads padding", "nn/recurrent.py", "if attention_mask is None:", "if attention_mask is None or True:",
        f"{BATCHED}::test_an_rnns_source_padded_with_garbage_equals_unpadded",
    ),
]  # fmt: skip

CACHE_AND_BEAMS = [
    bug(
        "values not selected with their keys", "nn/cache.py",
        "self.values = self.values.index_select(1, rows)", "self.values = self.values[:, : len(rows)]",
        f"{CACHED}::test_selected_rows_go_on_as_if_they_had_been_there_from_the_start",
    ),
    bug(
        "lengths not selected with their rows", "nn/cache.py",
        "self.lengths = self.lengths.index_select(0, rows)", "pass",
        f"{CACHED}::test_a_ragged_cache_is_selected_with_its_lengths",
    ),
    bug(
        "ragged slot off by one", "nn/cache.py", "(attention_mask.long().cumsum(1) - 1).clamp(min=0)",
        "attention_mask.long().cumsum(1)",
        f"{CACHED}::test_rows_of_different_lengths_share_a_cache",
    ),
    bug(
        "keys of a cache stand one further", "nn/block.py", "torch.arange(n_keys, device=x.device)",
        "torch.arange(1, n_keys + 1, device=x.device)",
        f"{CACHED}::test_gpt_in_pieces_equals_gpt_at_once",
    ),
    bug(
        "beams folded in the wrong order", "nn/attention.py",
        "queries.view(rows // n_shared, n_shared, n_heads, n, width).transpose(1, 2)",
        "queries.view(n_shared, rows // n_shared, n_heads, n, width).transpose(0, 1).transpose(1, 2)",
        "agreement/test_shared_source.py::test_seq2seqs_beams_share_a_source",
    ),
    bug(
        "an RNN's state is not carried on", "models/rnn.py",
        "states, state = self.decoder(", "states, _ = self.decoder(",
        f"{CACHED}::test_rnn_in_pieces_equals_rnn_at_once",
    ),
    bug(
        "a refused pass moves the cache on", "models/gpt.py", "check_ids(ids, self.config.vocab_size)", "pass",
        "models/test_gpt.py::test_a_refused_pass_leaves_the_cache_as_it_was",
    ),
]  # fmt: skip

PARTS = [
    bug(
        "softmax over the queries", "nn/lookup.py", "safe.softmax(-1)", "safe.softmax(-2)",
        f"{FUSED}::test_gpt_by_the_fused_kernel_equals_the_plain_road",
    ),
    bug(
        "rotary applied to the values too", "nn/attention.py",
        "return (keys if relation is None else relation.rotate(keys)), values",
        "return (keys, values) if relation is None else (relation.rotate(keys), relation.rotate(values))",
        f"{NUMPY}::test_gpt_computes_what_the_mathematics_says",
    ),
    bug(
        "rotary pairs interleaved", "nn/relation.py", "first, second = x.chunk(2, dim=-1)",
        "first, second = x[..., ::2], x[..., 1::2]",
        "nn/test_relation.py::test_rotary_turns_number_i_with_number_i_plus_half",
    ),
    bug(
        "ALiBi rewards distance", "nn/relation.py", "bias=-slopes * distance", "bias=slopes * distance",
        "nn/test_relation.py::test_alibi_takes_slope_times_distance_from_the_score",
    ),
    bug(
        "T5's own position counted as ahead", "nn/relation.py",
        "first = (ahead > 0).long()", "first = (ahead >= 0).long()",
        "nn/test_relation.py::test_an_encoder_has_half_of_the_buckets_for_each_side",
    ),
    bug(
        "LayerNorm by the sample's variance", "nn/norm.py",
        "return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.epsilon)",
        "bias = 0.0 if self.bias is None else self.bias\n        centred = x - x.mean(-1, keepdim=True)\n"
        "        return centred / (x.var(-1, keepdim=True) + self.epsilon).sqrt() * self.weight + bias",
        "nn/test_norm.py::test_layer_norm_divides_by_the_populations_variance",
    ),
    bug(
        "GELU variants swapped", "nn/feedforward.py", 'F.gelu(x, approximate="tanh")', "F.gelu(x)",
        "nn/test_feedforward.py::test_each_activation_is_its_formula",
    ),
    bug(
        "gate and expansion swapped", "nn/feedforward.py", "activate(gate(x), self.activation) * self.expand(x)",
        "activate(self.expand(x), self.activation) * gate(x)",
        "nn/test_feedforward.py::test_gated_multiplies_the_expansion_by_the_activated_gate",
    ),
    bug(
        "learned positions forget their offset", "nn/positions.py", "self.table(positions + self.offset)",
        "self.table(positions)",
        "nn/test_positions.py::test_learned_positions_are_rows_of_a_table_after_the_offset",
    ),
    bug(
        "averaged heads are added", "nn/attention.py", "heads.mean(1)", "heads.sum(1)",
        f"{GROUPED}::test_grouped_with_all_heads_is_plain_attention_head_by_head",
    ),
    bug(
        "no residual", "nn/block.py", "x = x + self.dropout(write)", "x = self.dropout(write)",
        f"{RECORD}::test_the_residual_stream_is_the_sum_of_what_was_written",
    ),
    bug(
        "decoder reads the encoder's first block", "models/seq2seq.py", "side.blocks(side.embedding(source",
        "side.blocks[:1](side.embedding(source",
        "models/test_seq2seq.py::test_the_source_passes_every_encoder_layer",
    ),
]  # fmt: skip

LOOKING_AND_SETTINGS = [
    bug(
        "the edge is cut the wrong way round", "inspection/change.py",
        "looks = lookup.standing() == query", "looks = lookup.standing() == key",
        f"{CUT}::test_a_cut_is_minus_infinity_added_to_the_score_and_stays_fused",
    ),
    bug(
        "watching leaves the fused kernel", "inspection/record.py",
        "attention.weights.watch_if_computed(", "attention.weights.watch(",
        "agreement/test_watched.py::test_watched_equals_unwatched_bit_for_bit_and_stays_fused",
    ),
    bug(
        "what was recorded changes with the cache", "inspection/record.py",
        "passing.clone() if is_of_cache else passing", "passing",
        f"{RECORD}::test_what_was_recorded_stays_when_the_cache_goes_on",
    ),
    bug(
        "the fused kernel is not used", "nn/attention.py", "self.kernel = Kernel.FUSED", "self.kernel = Kernel.PLAIN",
        f"{FUSED}::test_gpt_by_the_fused_kernel_equals_the_plain_road",
    ),
    bug(
        "unknown keys are taken in silence", "config/base.py", 'extra="forbid"', 'extra="ignore"',
        "config/test_base.py::test_an_unknown_key_is_refused_with_the_nearest_known_one",
    ),
    bug(
        "a changed width keeps the old derived ones", "config/base.py",
        "self.model_dump(exclude_unset=True)", "self.model_dump()",
        "config/test_base.py::test_replace_derives_again_what_was_derived",
    ),
]  # fmt: skip

BEAM = "generation/test_beam.py"
TRANSLATE = "generation/test_translate.py"
GENERATE = "generation/test_generate.py"
SAMPLING = "generation/test_sampling.py"
TASK = "tasks/test_language_model.py"
LEAN = "agreement/test_lean.py"

GENERATION = [
    bug(
        "beams not reordered in the cache", "generation/beam.py",
        "if kept is not None or rows != list(range(len(rows))):", "if kept is not None or width == 1:",
        f"{BEAM}::test_scores_are_those_of_a_full_pass_and_fall",
    ),
    bug(
        "beams not reordered in an rnn's state", "generation/decoder.py",
        "tuple(part.index_select(1, rows) for part in self._state)",
        "tuple(part.index_select(1, rows.sort().values) for part in self._state)",
        f"{TRANSLATE}::test_a_batch_equals_its_sources_alone_and_scores_are_a_full_passs",
    ),
    bug(
        "beams not reordered in their own text", "generation/beam.py",
        "before = self.guesses[one.of]", "before = self.guesses[min(rank, len(self.guesses) - 1)]",
        f"{BEAM}::test_scores_are_those_of_a_full_pass_and_fall",
    ),
    bug(
        "a finished guess goes on", "generation/beam.py",
        "            if one.id not in self._stop_ids:\n", "            if True:\n",
        f"{BEAM}::test_scores_are_those_of_a_full_pass_and_fall",
    ),
    bug(
        "any end token finishes, however unlikely", "generation/beam.py",
        "elif (rank < n_beams or is_forced)", "elif True",
        f"{BEAM}::test_an_end_that_is_not_among_the_likeliest_is_not_taken",
    ),
    bug(
        "a source stays when its text is done", "generation/decoder.py",
        "        if texts is not None:\n            self._source = self._source.select(texts).written_out()\n\n", "\n",
        f"{BEAM}::test_the_same_search_serves_an_encoder_decoder",
    ),
    bug(
        "a source's keys stay when its text is done", "nn/cache.py",
        "                source.select(sources)\n", "                pass\n",
        f"{BEAM}::test_the_same_search_serves_an_encoder_decoder",
    ),
    bug(
        "a text may end without its forced terms", "generation/beam.py",
        "return self.terms.n_ids == 0 or self.terms.n_reached(guess.ids) == self.terms.n_ids", "return True",
        f"{TRANSLATE}::test_forced_terms_always_stand_in_the_text",
    ),
    bug(
        "prepared weights outlive a change", "generation/packing.py",
        "if made is None or made.state != state:", "if made is None:",
        f"{TRANSLATE}::test_weights_that_changed_are_prepared_anew",
    ),
    Bug(
        "prepared weights are known by their address alone",
        (
            ("generation/packing.py", "_weights = [weight.detach() for", "_weights = [weight.detach().clone() for"),
            ("generation/packing.py", "kept=[tensor.detach() for", "kept=[tensor.detach().clone() for"),
        ),
        (f"{TRANSLATE}::test_weights_that_come_to_lie_where_older_ones_did_are_prepared_anew",),
    ),
    bug(
        "a token too few moves with its beam", "generation/decoder.py", "else 1 + n_equal)", "else 2 + n_equal)",
        "generation/test_lean.py::test_what_beams_have_in_common_stays_and_the_rest_moves",
    ),
    bug(
        "the lean step forgets the gate", "generation/lean.py",
        "hidden = activate(gate, self._activation).mul_(hidden)", "hidden = activate(gate, self._activation)",
        "generation/test_lean.py::test_each_step_agrees_with_the_models_own_road_through_padding_and_selection",
    ),
    bug(
        "the lean step turns by the next token's angles", "generation/lean.py",
        "[part[0, 0, n - 1] for part in self._angles]", "[part[0, 0, n] for part in self._angles]",
        f"{LEAN}::test_each_step_of_the_known_shapes_agrees",
    ),
    bug(
        "the lean step turns keys the other way", "generation/room.py",
        "after_first.addcmul_(second, sin, value=-1)", "after_first.addcmul_(second, sin)",
        f"{LEAN}::test_each_step_of_the_known_shapes_agrees",
    ),
    bug(
        "the lean step's bias is one key late", "generation/lean.py",
        "self._bias[..., self._capacity - n + first :]", "self._bias[..., self._capacity - n + first - 1 : -1]",
        f"{LEAN}::test_each_step_of_the_known_shapes_agrees",
    ),
    bug(
        "the lean step's window is one too wide", "generation/lean.py",
        "max(0, n - self._window)", "max(0, n - self._window - 1)",
        f"{LEAN}::test_each_step_of_the_known_shapes_agrees",
    ),
    bug(
        "the lean step sees behind the ends of shorter rows", "generation/lean.py",
        "torch.where(visible, bias, float(\"-inf\"))", "torch.where(visible | True, bias, float(\"-inf\"))",
        f"{LEAN}::test_each_step_of_the_known_shapes_agrees",
    ),
    bug(
        "the lean step adds one position to all rows", "generation/lean.py",
        "positions[:, 0] if cache.is_ragged else cache.n_filled - 1", "cache.n_filled - 1",
        f"{LEAN}::test_each_step_of_the_known_shapes_agrees",
    ),
    bug(
        "the lean RMSNorm has no epsilon", "generation/room.py",
        "(d_model * (epsilon or 0)) ** 0.5", "0.0",
        f"{LEAN}::test_the_lean_norm_of_a_small_row_has_its_epsilon",
    ),
    bug(
        "a product forgets its bias when it adds", "generation/packing.py",
        "            stream.add_(self._bias)\n", "            pass\n",
        f"{LEAN}::test_a_product_is_the_linear_maps_side_by_side_for_any_rows",
    ),
    bug(
        "looking inside is not noticed by the lean road", "generation/lean.py",
        "        and not any(is_looked_at(part) for part in looked_at)\n", "",
        "generation/test_lean.py::test_who_looks_inside_a_search_sees_it_and_who_changes_it_is_heard",
    ),
    bug(
        "a cache that grows forgets what it held", "nn/cache.py",
        "torch.cat((kept, kept.new_zeros(", "torch.cat((torch.zeros_like(kept), kept.new_zeros(",
        "nn/test_cache.py::test_a_cache_that_grows_holds_what_one_made_whole_holds",
    ),
    bug(
        "int8 rows share one range", "nn/int8.py", "x.abs().amax(-1, keepdim=True)", "x.abs().amax()",
        "nn/test_int8.py::test_a_row_is_off_by_at_most_half_a_step_of_its_own_range",
    ),
    bug(
        "what may never be written is written", "generation/translate.py",
        "never=decoding.never", "never=frozenset()",
        "weights/test_published_translators.py::test_a_folder_translates_as_transformers_does",
    ),
    bug(
        "what is forced first costs something", "generation/translate.py",
        'logits = torch.full_like(logits, float("-inf"))', "logits = logits.clone()",
        "weights/test_published_translators.py::test_a_folder_translates_as_transformers_does",
    ),
    bug(
        "ct2: gate and product are swapped", "weights/ct2.py",
        "_fill_linear(given.ffn.linear_0_noact, feedforward.expand)",
        "_fill_linear(given.ffn.linear_0_noact, feedforward.gate)",
        "weights/test_ct2.py::test_log_probabilities_of_other_shapes_agree",
    ),
    bug(
        "alignment says target before source", "inspection/alignment.py",
        'f"{source}-{target}"', 'f"{target}-{source}"',
        "tasks/test_translator.py::test_pharaoh_says_source_word_then_target_word",
    ),
    bug(
        "rows that ended stay in the cache", "generation/generate.py", "decoder.select(kept, texts=kept)",
        "decoder.cache.lengths = decoder.cache.lengths[: len(kept)]",
        f"{GENERATE}::test_a_ragged_batch_equals_its_rows_alone",
    ),
    bug(
        "what is said now is not remembered", "generation/generate.py",
        "said = said.scatter(1, chosen[:, None], value=True)", "pass",
        f"{GENERATE}::test_cached_equals_recomputing_everything",
    ),
    bug(
        "all rows draw with one seed", "generation/generate.py",
        "Random(sampling.seed + row) for row in range(len(texts))]\n    said",
        "Random(sampling.seed) for row in range(len(texts))]\n    said",
        f"{GENERATE}::test_the_seed_decides_and_rows_have_their_own",
    ),
    bug(
        "log p after the settings", "generation/generate.py", "of_chosen = log_probabilities(logits, chosen).tolist()",
        "of_chosen = log_probabilities(logits / max(sampling.temperature, 0.1), chosen).tolist()",
        f"{GENERATE}::test_log_probabilities_are_those_of_a_full_pass",
    ),
    bug(
        "top-p leaves out the one that reaches p", "generation/sampling.py",
        "is_beyond = ordered.cumsum(-1) - ordered >= p", "is_beyond = ordered.cumsum(-1) >= p",
        f"{SAMPLING}::test_top_p_keeps_the_fewest_that_reach_p",
    ),
    bug(
        "negative logits are rewarded for repetition", "generation/sampling.py",
        "torch.where(logits > 0, logits / penalty, logits * penalty)", "logits / penalty",
        f"{SAMPLING}::test_repetition_is_penalised_whichever_sign_a_logit_has",
    ),
    bug(
        "the last id is drawn too seldom", "generation/sampling.py", "chance.double()[:, None] * reached[:, -1:]",
        "chance.double()[:, None] * (reached[:, -1:] - 0.005)",
        f"{SAMPLING}::test_a_million_draws_have_the_frequencies_of_the_softmax",
    ),
    bug(
        "a stop string within one token alone", "generation/stopping.py",
        "n_kept = max((self._n_begun(string) for string in self._strings), default=0)", "n_kept = 0",
        f"{TASK}::test_a_stop_string_split_over_tokens_ends_the_text_before_it",
    ),
    bug(
        "windows score a token twice", "tasks/scoring.py", "yield Window(document, part, scored - start - 1)",
        "yield Window(document, part, max(0, scored - start - 2))",
        f"{TASK}::test_batches_of_like_length_score_as_one_by_one",
    ),
    bug(
        "padding is scored", "tasks/scoring.py", "targets = torch.full_like(ids, NO_TARGET)",
        "targets = torch.zeros_like(ids)", f"{TASK}::test_batches_of_like_length_score_as_one_by_one",
    ),
]  # fmt: skip

INTEGERS = "cost/test_integers.py"
FLOPS = "cost/test_flops.py"
MEMORY = "cost/test_memory.py"
PEAK = "cost/test_peak.py"

COST = [
    bug(
        "a fused kernel writes n×n", "cost/operation.py", "return self.reads - self.inside_reads, self.writes",
        "return self.reads, self.writes",
        "cost/test_launch.py::test_a_fused_backward_reads_five_tensors_and_writes_three",
    ),
    bug(
        "KV heads forgotten in the cache", "cost/memory.py", "return config.n_kv_heads * (config.d_head",
        "return config.n_heads * (config.d_head",
        f"{INTEGERS}::test_fewer_kv_heads_make_a_smaller_cache_and_smaller_projections",
    ),
    bug(
        "multiply–adds called FLOPs", "cost/operation.py", "else 2 * self.product.multiply_adds * self.runs",
        "else self.product.multiply_adds * self.runs", f"{INTEGERS}::test_a_flop_is_half_a_multiply_add",
    ),
    bug(
        "the zero first state has a gradient", "cost/recurrent.py",
        "no_gradient=recurrent.multiply_adds if starts_at_zero else 0", "no_gradient=0",
        f"{FLOPS}::test_training_is_three_forwards_less_the_gradient_to_an_rnn_s_zero_state",
    ),
    bug(
        "a generation has a step too many", "cost/workload.py", "return self.length + (self.new or 1) - 1",
        "return self.length + (self.new or 1)", "cost/test_generation.py::test_it_is_what_torch_counts",
    ),
    bug(
        "a window's steps summed as one", "cost/operations.py", "edge = last if window is None else",
        "edge = last if True else",
        "cost/test_generation.py::test_it_is_the_sum_of_its_steps",
    ),
    bug(
        "a CPU's RMSNorm keeps its statistics alone", "cost/blocks.py", "(0 if is_layer or on_gpu else n)", "0",
        f"{MEMORY}::test_activations_are_what_autograd_keeps",
    ),
    bug(
        "one batch's logits forgotten at the loss", "cost/timeline.py", "casts + 3 * LOSS_SIZE * head.writes",
        "casts + LOSS_SIZE * head.writes", f"{MEMORY}::test_a_chunked_loss_never_holds_all_logits",
    ),
    bug(
        "learned bias on a CPU held by a fused kernel", "cost/blocks.py", "if is_learned and not self.on_gpu:",
        "if False:", f"{PEAK}::test_the_peak_of_a_step_on_a_cpu",
    ),
    bug(
        "FSDP shards no moments", "cost/update.py", "return Update(by_adamw=shard(n_parameters, n))",
        "return Update(by_adamw=n_parameters)", f"{MEMORY}::test_fsdp_holds_a_part_on_each_device_and_ddp_all",
    ),
    bug(
        "crossing off by one", "cost/words.py", "if pairs_a_token(middle) >= wanted",
        "if pairs_a_token(middle) > wanted",
        "cost/test_words.py::test_attention_costs_as_much_as_the_rest_at_6d_executed_and_12d_useful",
    ),
]  # fmt: skip

MASKED = "data/test_masked_batches.py"
PRETRAINING = [
    bug(
        "wrong next sentences from anywhere", "data/next_sentence.py", "np.where(places >= begin, n_own, 0)", "0",
        f"{MASKED}::test_right_pairs_go_on_and_wrong_ones_are_from_another_document",
    ),
    bug(
        "a document there twice gives a right sentence as wrong", "data/next_sentence.py",
        "same[maybe] = np.logical_and.reduceat(equal, np.cumsum(n[maybe]) - n[maybe])", "same[maybe] = False",
        f"{MASKED}::test_a_document_that_is_there_twice_gives_no_wrong_sentence_that_is_right",
    ),
    bug(
        "hidden words rounded up", "data/masking.py", "n_words + rounding", "n_words + 1",
        f"{MASKED}::test_a_million_hidden_words_have_the_shares_they_should",
    ),
    bug(
        "disguises follow the order from its start", "data/masking.py", "+ turn) % 1.0", "+ 0 * turn) % 1.0",
        f"{MASKED}::test_a_million_hidden_words_have_the_shares_they_should",
    ),
    bug(
        "separators may be hidden", "data/masking.py", "keys[is_special] |=", "keys[is_special & False] |=",
        f"{MASKED}::test_specials_are_never_hidden_and_slots_stay_the_same",
    ),
    bug(
        "a cut word hidden in part", "data/masking.py", "(ranks < wanted) & ~is_cut", "(ranks < wanted)",
        f"{MASKED}::test_whole_words_are_hidden_whole",
    ),
    bug(
        "next sentences weigh a word each", "training/bert.py", "+ targets_a_row * found", "+ 1.0 * found",
        "training/test_bert.py::test_the_loss_is_the_sum_of_both_means_over_all_positions",
    ),
    bug(
        "each part weighs next sentences by its own words", "data/masked_batches.py",
        'n_targets=int((tensors["targets"] != NOTHING).sum()))',
        'n_targets=0, targets_a_row=float((tensors["targets"] != NOTHING).sum()) / n_rows)',
        "training/test_bert.py::test_parts_of_a_batch_add_up_to_the_whole",
    ),
    bug(
        "a run goes on with other data", "training/prepare.py", "    check_data(folder)\n", "",
        "training/test_same_data.py::test_another_texts_store_is_refused_though_it_is_whole",
    ),
]  # fmt: skip

VIEWS = "inspection/test_views.py"
WITHIN = [
    bug(
        "rows of a generation are the last pass alone", "inspection/seeing.py",
        "for i in range(self.trace.n_passes(name))]\n        n_keys", "for i in [-1]]\n        n_keys",
        "inspection/test_seeing.py::test_rows_seen_while_generating_with_the_cache_are_those_of_one_pass",
    ),
    bug(
        "induction looks at the token itself", "inspection/heads.py",
        "induction[:, 1:] = duplicate[:, :-1]", "induction[:, :] = duplicate",
        "inspection/test_heads.py::test_a_planted_induction_head_and_its_previous_token_head_are_found",
    ),
    bug(
        "a part keeps its mean through the last norm", "inspection/contributions.py",
        "parts = parts - parts.mean(-1, keepdim=True)", "parts = parts - 0",
        f"{VIEWS}::test_contributions_sum_to_the_logit_whatever_the_model",
    ),
    bug(
        "the lens forgets the last norm", "inspection/lens.py",
        "return model.unembedding(model.final_norm(states))", "return model.unembedding(states)",
        f"{VIEWS}::test_the_deepest_guesses_of_the_lens_are_the_models_own",
    ),
    bug(
        "rollout without the residual connection", "inspection/rollout.py",
        "        share = (layer @ share + share) / 2", "        share = layer @ share",
        f"{VIEWS}::test_rollout_multiplies_half_attention_half_identity",
    ),
    bug(
        "the sink stays in the shares", "inspection/reference.py",
        "without_sink(table[query].mean(0), sink)", "table[query].mean(0)",
        "inspection/test_interventions.py::test_shares_are_of_the_row_without_its_sink",
    ),
    bug(
        "the knock-out is of the text before", "inspection/reference.py",
        "range(query[-1] + 1, n)", "range(1, query[-1] + 1)",
        "inspection/test_interventions.py::test_knock_out_is_the_change_of_what_follows_with_all_looks_cut",
    ),
]  # fmt: skip

FAULTS = [
    bug(
        "who was given up still gets the model",
        "serving/turns.py",
        "    return event is not None and event.is_set()",
        "    return False",
        "serving/test_app.py::test_who_was_given_up_leaves_the_queue_and_never_gets_the_model",
    ),
    bug(
        "health waits as the others do",
        "serving/explorer.py",
        "type=JSON, is_quick=True",
        "type=JSON",
        "serving/test_app.py::test_health_is_answered_however_many_wait",
    ),
]

BUGS = (
    FOUNDATION
    + MASKS_AND_PADDING
    + CACHE_AND_BEAMS
    + PARTS
    + LOOKING_AND_SETTINGS
    + GENERATION
    + COST
    + PRETRAINING
    + WITHIN
    + FAULTS
)
