"""The key numbers of the lessons about positions, blocks, models and toys."""

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
from qkv.nn import CAUSAL, Mask, sinusoidal_encoding


def test_lecture_e_s_sinusoid_is_lecture_b_s_moved_by_a_pair():
    b, e = (sinusoidal_encoding(torch.arange(13)[None], 10, style)[0] for style in (positions.B, positions.E))
    assert torch.equal(e[:, :-2], b[:, 2:])
    assert (b - e).abs().max() > 1


@pytest.mark.parametrize("style", [positions.B, positions.E])
def test_any_two_rows_of_positions_differ(style):
    rows = sinusoidal_encoding(torch.arange(positions.N)[None], positions.D, style)[0]
    assert torch.pdist(rows).min() > 1


def test_small_words_are_found_at_their_own_position():
    rows = sinusoidal_encoding(torch.arange(5)[None], positions.D, positions.B)[0]
    assert positions._nearest_position_accuracy(rows[:, None].expand(-1, 3, -1), rows) == 1
    assert positions._nearest_position_accuracy(rows.flip(0)[:, None].expand(-1, 3, -1), rows) == pytest.approx(1 / 5)


SHUFFLED, REVERSED = torch.tensor([3, 0, 6, 2, 5, 1, 4]), torch.arange(7).flip(0)


@pytest.mark.parametrize(
    ("kind", "causal", "order", "sees_order"),
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
def test_permuted_input_gives_permuted_output_only_where_order_is_unseen(kind, causal, order, sees_order):
    moved = no_positions.permutation_difference(order, kind=kind, causal=causal)
    assert moved > 0.01 if sees_order else moved < 1e-12


def test_normed_keys_lie_on_the_plane_orthogonal_to_1_at_distance_root_d():
    keys = layernorm_geometry.apply_layer_norm(torch.randn(17, 11, dtype=torch.float64) + 3)
    assert keys.sum(1).abs().max() < 1e-9
    assert keys.norm(dim=1).tolist() == pytest.approx([11**0.5] * 17)
    weights = layernorm_geometry.compute_weights(torch.ones(11, dtype=torch.float64), keys)
    assert weights.tolist() == pytest.approx([1 / 17] * 17)


def test_a_key_within_the_hull_of_the_others_is_unselectable():
    square = torch.tensor([[1.0, 1], [1, -1], [-1, 1], [-1, -1], [0.2, 0.3], [1, 0.5]])
    assert find_selectable_keys(square).tolist() == [True, True, True, True, False, False]


def test_a_shifted_triangle_has_its_corners_selectable_though_0_is_outside():
    keys = torch.tensor([[5.0, 5, 0], [6, 5, 0], [5, 6, 1], [5.3, 5.3, 0.3]], dtype=torch.float64)
    assert find_selectable_keys(keys).tolist() == [True, True, True, False]


@pytest.mark.parametrize("d", [3, 5])
def test_layer_norm_leaves_no_key_unselectable(d):
    keys = torch.randn(43, d, dtype=torch.float64)
    assert not find_selectable_keys(keys).all()
    assert find_selectable_keys(layernorm_geometry.apply_layer_norm(keys)).all()


def test_the_counter_learns_and_leans_towards_1_with_layer_norm():
    model, accuracy = majority.train_majority_classifier(normed=True, seed=0)
    assert accuracy > 0.4  # a guess is right once in ten
    assert model.query_cosine_with_ones() > majority.random_cosine_with_ones(0)


def test_gradients_die_without_residual_and_norm_and_live_with_both():
    neither, _, _, both = (
        vanishing_gradients.gradient_by_depth(design) for design in vanishing_gradients.STACK_DESIGNS
    )
    assert neither[0] < 1e-15
    assert 0.3 < both[0] < 10


def test_gradients_die_with_the_distance_in_an_rnn_and_not_in_attention():
    models = vanishing_gradients.build_sequence_models()
    reach = {name: vanishing_gradients.gradient_by_distance(model)[-1].item() for name, model in models.items()}
    assert reach["RNN"] < reach["LSTM"] < 1e-15
    assert reach["LSTM, gate open"] > 0.01
    assert reach["attention"] > 0.01


def test_the_mask_is_the_one_switch_between_gpt_and_bert():
    past = torch.ones(6, 6).tril().T.bool()  # row: which token was changed
    assert torch.equal(causal_and_bidirectional.logit_changes(mask=True) > 1e-6, past)
    assert (causal_and_bidirectional.logit_changes(mask=False) > 1e-6).all()
    assert causal_and_bidirectional.difference_from_bert() < 1e-6


def test_another_token_enters_a_stream_at_the_first_attention_and_by_no_other_way():
    gpt = residual_stream.build_gpt()
    of_it = residual_stream.stream_changes(gpt, position=residual_stream.SOURCE)[:, residual_stream.TARGET]
    assert of_it[0] == 0
    assert (of_it[1:] > 0.1).all()


def test_a_cut_edge_leaves_detours_and_cutting_all_edges_leaves_nothing():
    gpt = residual_stream.build_gpt()
    source, target = residual_stream.SOURCE, residual_stream.TARGET
    with residual_stream.mask_edges_to_source(gpt, queries=[target]):
        detour = residual_stream.stream_changes(gpt, position=source)[:, target]
    with residual_stream.mask_edges_to_source(
        gpt, queries=list(range(source + 1, len(residual_stream.SENTENCE_WORDS)))
    ):
        nothing = residual_stream.stream_changes(gpt, position=source)[:, target]
    assert detour[:4].max() == 0  # a detour needs a second layer
    assert detour[-1] > 0.1
    assert nothing.max() == 0


def test_encoder_decoder_and_cross_attention_see_what_the_lectures_say():
    model = wirings.build_seq2seq()
    assert (who_sees_whom.changes_by_token(model, decoder=False) > 0).all()
    assert torch.equal(who_sees_whom.changes_by_token(model, decoder=True) > 0, torch.ones(5, 5).tril().bool())
    assert (who_sees_whom.changes_by_encoder_state(model) > 0).all()


def test_the_slide_s_cross_attention_hides_later_source_states():
    causal = CAUSAL.to_dense(5, 5, torch.device("cpu"))[0, 0].int()
    rule = who_sees_whom.lecture_c_cross_mask(causal, torch.ones(5, dtype=torch.int)).bool()
    seen = who_sees_whom.changes_by_encoder_state(wirings.build_seq2seq(), Mask(dense=rule[None, None])) > 0
    assert torch.equal(seen, torch.ones(5, 5).tril().bool())
    with pytest.raises(UnboundLocalError, match="padding_mask"):
        who_sees_whom.lecture_c_cross_mask(causal)


def test_every_decoder_layer_reads_the_last_encoder_layer():
    measured = wirings.key_differences(wirings.build_seq2seq()) == 0
    assert [name for name, wiring in wirings.candidate_wirings().items() if torch.equal(wiring, measured)] == [
        "last encoder layer → every decoder layer"
    ]


def test_the_bigram_table_is_the_slide_s():
    x = toy_head_5.bigram_table()
    assert x[1].tolist() == x[4].tolist() == [0, 0, 0.5, 0.5, 0]
    assert x[5].tolist() == [1, 0, 0, 0, 0]
    assert torch.equal(x[:, toy_head_5.MAN_ID], x[:, toy_head_5.CHICKEN_ID])


@pytest.mark.parametrize(("last_row", "distance"), [(1.0, 1.0), (0.0, 2.0)])
def test_no_mix_of_the_bigram_table_reaches_the_target(last_row, distance):
    x = toy_head_5.bigram_table()
    x[-1, 0] = last_row
    best = toy_head_5.best_row_combination(x)
    assert (best - toy_head_5.target_table()).square().sum().item() == pytest.approx(distance, abs=1e-5)
    assert best[1, 2:4].tolist() == pytest.approx([0.5, 0.5])


def test_man_and_woman_are_alike_in_the_bigram_table_of_seven_tokens():
    x = toy_head_7.bigram_inputs()
    assert torch.equal(x[0, :4], x[1, :4])
    assert x.sum(-1).unique().tolist() == [1]


def test_the_slide_s_weights_sum_to_1_and_its_predictions_do_not():
    assert toy_head_slide.SLIDE_TOY_WEIGHTS.sum(-1).flatten().tolist() == pytest.approx([1] * 10, abs=0.0015)
    assert (toy_head_slide.SLIDE_PREDICTIONS.sum(-1) > 2).all()


def test_what_is_trained_is_all_there_is():
    model = GPT(quiz.SMALL_CONFIG)
    sizes = quiz.trainable_parameter_counts(model)
    assert sum(sizes.values()) == sum(parameter.numel() for parameter in model.parameters())
    assert sizes["7. W_o"] == 2 * 48 * 48
    assert sizes["2. W_q and W_k (and W_v)"] == 2 * 3 * 48 * 48


def test_counted_operations_of_a_product_are_2nmk():
    assert quiz_cost.count_flops(lambda: torch.ones(3, 5) @ torch.ones(5, 7)) == 2 * 3 * 5 * 7


def test_the_encoder_decoder_costs_what_the_formula_says(capsys):
    measured = quiz_cost.print_cost_answers(0)
    assert measured["encoder"] == [2 * (24 * m * 64**2 + 4 * m**2 * 64) for m in quiz_cost.SOURCE_LENGTHS]
    m_64, m_128, m_256, _ = measured["decoder"]
    assert m_256 - m_128 == 2 * (m_128 - m_64)  # in proportion to m, no m²
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


def test_word_vectors_are_near_by_meaning_and_move_with_the_sentence(run_lesson):
    lesson = run_lesson("word-vectors")
    mom = lesson.numbers("mom ")
    assert mom[0] == 1
    assert mom[1] > 2 * max(mom[2:])
    assert "cat" in lesson.row("dog", 2)
    static = lesson.numbers("embedding.tokens")
    assert static == [1, 1, 0, 0]
    near, far, *_ = lesson.numbers("blocks.7.resid_post")
    assert near > far + 0.2
