"""The key results of the lessons about positions, blocks, models and toy heads."""

import pytest
import torch

from qkv.choices import PositionKind
from qkv.lessons import (
    causal_and_bidirectional,
    layernorm_geometry,
    majority,
    no_positions,
    positions,
    quiz,
    quiz_cost,
    residual_stream,
    toy_head_5,
    toy_head_7,
    toy_head_slide,
    vanishing_gradients,
    who_sees_whom,
    wirings,
)
from qkv.lessons.selectable_keys import find_selectable_keys
from qkv.models import GPT
from qkv.nn import CAUSAL, Mask
from qkv.nn.positions import sinusoidal_encoding


def test_the_sinusoid_of_lecture_e_is_that_of_lecture_b_shifted_by_one_pair():
    b, e = (sinusoidal_encoding(torch.arange(13)[None], 10, style)[0] for style in (positions.B, positions.E))
    assert torch.equal(e[:, :-2], b[:, 2:])
    assert (b - e).abs().max() > 1


@pytest.mark.parametrize("style", [positions.B, positions.E])
def test_any_two_position_encodings_differ(style):
    rows = sinusoidal_encoding(torch.arange(positions.N)[None], positions.D, style)[0]
    assert torch.pdist(rows).min() > 1


def test_nearest_position_accuracy_is_the_fraction_of_correct_positions():
    rows = sinusoidal_encoding(torch.arange(5)[None], positions.D, positions.B)[0]
    assert positions._nearest_position_accuracy(rows[:, None].expand(-1, 3, -1), rows) == 1
    assert positions._nearest_position_accuracy(rows.flip(0)[:, None].expand(-1, 3, -1), rows) == pytest.approx(1 / 5)


SHUFFLED, REVERSED = torch.tensor([3, 0, 6, 2, 5, 1, 4]), torch.arange(7).flip(0)


@pytest.mark.parametrize(
    ("kind", "causal", "order", "depends_on_order"),
    [
        (PositionKind.NONE, False, SHUFFLED, False),
        (PositionKind.NONE, True, SHUFFLED, True),
        (PositionKind.LEARNED, False, SHUFFLED, True),
        (PositionKind.SINUSOIDAL, False, SHUFFLED, True),
        (PositionKind.ROTARY, False, SHUFFLED, True),
        (PositionKind.ALIBI, False, SHUFFLED, True),
        (PositionKind.ALIBI, False, REVERSED, False),
    ],
)
def test_permuting_the_input_permutes_the_output_only_if_the_model_ignores_order(kind, causal, order, depends_on_order):
    difference = no_positions.permutation_equivariance_error(order, kind=kind, causal=causal)
    assert difference > 0.01 if depends_on_order else difference < 1e-12


def test_normalized_keys_are_orthogonal_to_the_ones_vector_and_have_norm_root_d():
    keys = layernorm_geometry.apply_layer_norm(torch.randn(17, 11, dtype=torch.float64) + 3)
    assert keys.sum(1).abs().max() < 1e-9
    assert keys.norm(dim=1).tolist() == pytest.approx([11**0.5] * 17)
    weights = layernorm_geometry.compute_weights(torch.ones(11, dtype=torch.float64), keys)
    assert weights.tolist() == pytest.approx([1 / 17] * 17)


def test_a_key_inside_the_convex_hull_of_the_others_is_unselectable():
    square = torch.tensor([[1.0, 1], [1, -1], [-1, 1], [-1, -1], [0.2, 0.3], [1, 0.5]])
    assert find_selectable_keys(square).tolist() == [True, True, True, True, False, False]


def test_the_corners_of_a_triangle_are_selectable_even_if_it_does_not_contain_the_origin():
    keys = torch.tensor([[5.0, 5, 0], [6, 5, 0], [5, 6, 1], [5.3, 5.3, 0.3]], dtype=torch.float64)
    assert find_selectable_keys(keys).tolist() == [True, True, True, False]


@pytest.mark.parametrize("d", [3, 5])
def test_layer_norm_makes_all_keys_selectable(d):
    keys = torch.randn(43, d, dtype=torch.float64)
    assert not find_selectable_keys(keys).all()
    assert find_selectable_keys(layernorm_geometry.apply_layer_norm(keys)).all()


def test_the_majority_classifier_learns_and_layer_norm_aligns_its_query_with_the_ones_vector():
    model, accuracy = majority.train_majority_classifier(layer_norm=True, seed=0)
    assert accuracy > 0.4  # random guessing gives 0.1
    assert model.input_space_query_cosine_with_ones() > majority.random_cosine_with_ones(0)


def test_gradients_vanish_without_residuals_and_norms_but_not_with_both():
    neither, _, _, both = (
        vanishing_gradients.relative_gradient_norm_by_depth(design) for design in vanishing_gradients.STACK_DESIGNS
    )
    assert neither[0] < 1e-15
    assert 0.3 < both[0] < 10


def test_gradients_vanish_with_distance_in_an_rnn_but_not_in_attention():
    models = vanishing_gradients.build_recurrent_and_attention_layers()
    reach = {
        name: vanishing_gradients.relative_gradient_norm_by_distance(model)[-1].item() for name, model in models.items()
    }
    assert reach["RNN"] < reach["LSTM"] < 1e-15
    assert reach["LSTM, gate open"] > 0.01
    assert reach["attention"] > 0.01


def test_the_causal_mask_is_the_only_difference_between_gpt_and_bert():
    past = torch.ones(6, 6).tril().T.bool()  # row: the token that was changed
    assert torch.equal(causal_and_bidirectional.logit_change_norms(causal=True) > 1e-6, past)
    assert (causal_and_bidirectional.logit_change_norms(causal=False) > 1e-6).all()
    assert causal_and_bidirectional.unmasked_gpt_and_bert_difference() < 1e-6


def test_another_token_first_changes_a_residual_stream_in_the_first_attention():
    gpt = residual_stream.build_untrained_gpt()
    target_changes = residual_stream.residual_change_norms(gpt, replaced_position=residual_stream.SOURCE)[
        :, residual_stream.TARGET
    ]
    assert target_changes[0] == 0
    assert (target_changes[1:] > 0.1).all()


def test_masking_a_single_edge_leaves_indirect_paths_and_masking_all_edges_leaves_none():
    gpt = residual_stream.build_untrained_gpt()
    source, target = residual_stream.SOURCE, residual_stream.TARGET
    with residual_stream.mask_edges_to_source(gpt, queries=[target]):
        indirect = residual_stream.residual_change_norms(gpt, replaced_position=source)[:, target]
    with residual_stream.mask_edges_to_source(
        gpt, queries=list(range(source + 1, len(residual_stream.SENTENCE_WORDS)))
    ):
        blocked = residual_stream.residual_change_norms(gpt, replaced_position=source)[:, target]
    assert indirect[:4].max() == 0  # a longer path needs a second layer
    assert indirect[-1] > 0.1
    assert blocked.max() == 0


def test_encoder_decoder_and_cross_attention_attend_as_the_lectures_state():
    model = wirings.build_float64_seq2seq()
    assert (who_sees_whom.state_changes_by_replaced_token(model, decoder=False) > 0).all()
    assert torch.equal(
        who_sees_whom.state_changes_by_replaced_token(model, decoder=True) > 0, torch.ones(5, 5).tril().bool()
    )
    assert (who_sees_whom.decoder_changes_by_encoder_state(model) > 0).all()


def test_the_cross_mask_on_the_slide_hides_later_source_states():
    causal = CAUSAL.to_dense(5, 5, torch.device("cpu"))[0, 0].int()
    rule = who_sees_whom.buggy_lecture_c_cross_mask(causal, torch.ones(5, dtype=torch.int)).bool()
    is_visible = (
        who_sees_whom.decoder_changes_by_encoder_state(wirings.build_float64_seq2seq(), Mask(dense=rule[None, None]))
        > 0
    )
    assert torch.equal(is_visible, torch.ones(5, 5).tril().bool())
    with pytest.raises(UnboundLocalError, match="padding_mask"):
        who_sees_whom.buggy_lecture_c_cross_mask(causal)


def test_every_decoder_layer_reads_the_last_encoder_layer():
    measured = wirings.max_cross_attention_key_differences(wirings.build_float64_seq2seq()) == 0
    assert [name for name, wiring in wirings.quiz_answer_wirings().items() if torch.equal(wiring, measured)] == [
        "last encoder layer → every decoder layer"
    ]


def test_the_bigram_table_equals_the_slide():
    x = toy_head_5.bigram_distribution_by_position()
    assert x[1].tolist() == x[4].tolist() == [0, 0, 0.5, 0.5, 0]
    assert x[5].tolist() == [1, 0, 0, 0, 0]
    assert torch.equal(x[:, toy_head_5.MAN_ID], x[:, toy_head_5.CHICKEN_ID])


@pytest.mark.parametrize(("last_row", "distance"), [(1.0, 1.0), (0.0, 2.0)])
def test_no_combination_of_bigram_rows_equals_the_target(last_row, distance):
    x = toy_head_5.bigram_distribution_by_position()
    x[-1, 0] = last_row
    best = toy_head_5.least_squares_fit_to_target(x)
    assert (best - toy_head_5.target_table()).square().sum().item() == pytest.approx(distance, abs=1e-5)
    assert best[1, 2:4].tolist() == pytest.approx([0.5, 0.5])


def test_man_and_woman_have_equal_rows_in_the_seven_token_bigram_table():
    x = toy_head_7.bigram_distribution_by_position()
    assert torch.equal(x[0, :4], x[1, :4])
    assert x.sum(-1).unique().tolist() == [1]


def test_the_attention_weights_on_the_slide_sum_to_1_and_its_predictions_do_not():
    assert toy_head_slide.SLIDE_TOY_WEIGHTS.sum(-1).flatten().tolist() == pytest.approx([1] * 10, abs=0.0015)
    assert (toy_head_slide.SLIDE_PREDICTIONS.sum(-1) > 2).all()


def test_the_trainable_parameter_counts_add_up_to_the_model_size():
    model = GPT(quiz.SMALL_CONFIG)
    sizes = quiz.trainable_parameters_by_quiz_option(model)
    assert sum(sizes.values()) == sum(parameter.numel() for parameter in model.parameters())
    assert sizes["7. W_o"] == 2 * 48 * 48
    assert sizes["2. W_q and W_k (and W_v)"] == 2 * 3 * 48 * 48


def test_a_matrix_product_costs_2nmk_flops():
    assert quiz_cost.count_flops(lambda: torch.ones(3, 5) @ torch.ones(5, 7)) == 2 * 3 * 5 * 7


def test_the_encoder_decoder_flops_equal_the_formula(capsys):
    measured = quiz_cost.print_quiz_cost_answers(0)
    assert measured.encoder == [2 * (24 * m * 64**2 + 4 * m**2 * 64) for m in quiz_cost.SOURCE_LENGTHS]
    m_64, m_128, m_256, _ = measured.decoder
    assert m_256 - m_128 == 2 * (m_128 - m_64)  # linear in m, without an m² term
    rows = [
        line.split() for line in capsys.readouterr().out.split("encoder–decoder with source length")[1].splitlines()
    ]
    rows = [row for row in rows if len(row) == 6 and row[0].isdigit()]
    assert len(rows) == len(quiz_cost.SOURCE_LENGTHS) + 2
    assert all(row[2] == row[3] and row[4] == row[5] for row in rows)


EXPECTED_OUTPUT = {
    "positions": ["[1 × N]", "[N × d]"],
    "no-positions": ["the dog bit the man", "ALiBi"],
    "layernorm-geometry": ["√d = 8.000"],
    "vanishing-gradients": ["LSTM, gate open"],
    "causal-and-bidirectional": ["max|difference| = 0"],
    "residual-stream": ["resid_mid"],
    "who-sees-whom": ["UnboundLocalError", "yes: correct"],
    "toy-head-5": ["max|difference| = 0", "<start>"],
    "toy-head-7": ["T×H = 5×20", "T×V = 5×7"],
    "quiz": ["nm + mk + nk", "x·W_Eᵀ", "Answer: B", "Answer 4: 2ndL", "w_j"],
}


@pytest.mark.parametrize("name", EXPECTED_OUTPUT)
def test_the_lesson_runs_and_prints_its_results(run_lesson, name):
    text = " ".join(run_lesson(name).text.split())
    assert [expected for expected in EXPECTED_OUTPUT[name] if expected not in text] == []


def test_similar_words_have_similar_vectors_and_contextual_vectors_depend_on_the_sentence(run_lesson):
    lesson = run_lesson("word-vectors")
    mom = lesson.numbers("mom ")
    assert mom[0] == 1
    assert mom[1] > 2 * max(mom[2:])
    assert "cat" in lesson.row("dog", 2)
    static = lesson.numbers("embedding.tokens")
    assert static == [1, 1, 0, 0]
    near, far, *_ = lesson.numbers("blocks.7.resid_post")
    assert near > far + 0.2
