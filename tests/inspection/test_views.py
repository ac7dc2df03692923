"""Views as data: maps, rollout, lens, stream, contributions, neuron, embeddings, plain numbers."""

import json
from importlib import import_module

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from qkv.choices import NormPosition, Stack
from qkv.errors import InputError
from qkv.inspection import (
    attention_map,
    contributions,
    embeddings,
    head_writes,
    heads,
    lens,
    merge_words,
    neighbours,
    neuron,
    plain,
    position_likeness,
    read,
    rollout,
    see,
    sink_of,
    stream,
    value_weighted,
    without_sink,
)
from qkv.inspection.reading import Reading, Tokens
from qkv.inspection.rollout import rollout_of
from tests.agreement.families import berts, close, gpts, seq2seqs, shaken, some_ids, some_source
from tests.inspection.looking import FAMILIES, TEXT, reading, task

TRANSFORMERS = ["gpt", "bert", "seq2seq"]


def side(ids):
    n = len(ids)
    return Tokens(text="", ids=ids, tokens=["x"] * n, words=[None] * n, spans=[None] * n, is_special=[False] * n)


def seen_by(config, seed):
    """A drawn model on drawn ids."""
    model = shaken(config, seed)
    own = side(some_ids(seed, 1, 7)[0].tolist())
    source = side(some_source(seed, 1, 5)[0].tolist()) if config.family == "seq2seq" else None
    return see(model, Reading(own=own, source=source, chosen=own.ids[1:]))


@pytest.mark.parametrize("families", [gpts(), berts(), seq2seqs()], ids=TRANSFORMERS)
def test_contributions_sum_to_the_logit_whatever_the_model(families):
    @settings(max_examples=12)
    @given(families, st.integers(0, 99))
    def law(config, seed):
        seen = seen_by(config, seed)
        tokenizer = task("gpt").tokenizer
        one = contributions(seen, tokenizer, position=4, token_id=3)
        assert float(one.values.sum()) == pytest.approx(float(seen.logits[4, 3]), abs=1e-8)
        both = contributions(seen, tokenizer, position=-1, token_id=3, against=11)
        assert float(both.values.sum()) == pytest.approx(float(seen.logits[-1, 3] - seen.logits[-1, 11]), abs=1e-8)
        n = sum(
            len(seen.table(stack)) * seen.table(stack).shape[1] for stack in seen.stacks if stack is not Stack.ENCODER
        )
        assert len(one.names) == len(set(one.names)) == n + config_layers(config) + 2

    law()


def config_layers(config):
    return config.n_decoder_layers if config.family == "seq2seq" else config.n_layers


@given(gpts(norm_position=NormPosition.PRE), st.integers(0, 99))
def test_heads_write_what_attention_writes_but_for_its_bias(config, seed):
    seen = seen_by(config, seed)
    for layer in range(2):
        bias = getattr(seen.model.blocks[layer].attention.output, "bias", None)
        written = head_writes(seen, Stack.SELF, layer).sum(0) + (0 if bias is None else bias)
        close(written, seen.stream(f"blocks.{layer}.attention_write"))


@given(gpts(), st.integers(0, 99))
def test_value_weighted_attention_is_the_length_of_what_each_key_sends(config, seed):
    seen = seen_by(config, seed)
    attention = seen.model.blocks[1].attention
    (look,) = seen.looks(Stack.SELF, 1)
    found = value_weighted(seen, Stack.SELF, layer=1)
    # The plain way: every head and key but one is silenced, and the rest goes through the layer itself.
    for head, query, key in ((0, 6, 2), (5, 3, 3)):
        values = look.lookup.values[0, head // (6 // attention.shape.n_kv_heads), key]
        alone = torch.zeros_like(look.heads)[:, :, :1]
        alone[0, head, 0] = values * look.weights()[0, head, query, key]
        sent = attention.output(attention._join(alone)) - attention.output(attention._join(torch.zeros_like(alone)))
        assert float(found[head, query, key]) == pytest.approx(float(sent.norm().detach()), abs=1e-9)


def test_rollout_multiplies_half_attention_half_identity():
    weights = torch.rand(2, 3, 5, 5).softmax(-1).double()
    mixed = [weights[layer].mean(0) / 2 + torch.eye(5) / 2 for layer in range(2)]
    close(rollout_of(weights.mean(1)), torch.stack([mixed[0], mixed[1] @ mixed[0]]))


@pytest.mark.parametrize("family", TRANSFORMERS)
def test_shares_of_a_rollout_sum_to_one(family):
    seen = see(task(family).model, reading(family))
    for stack in seen.stacks:
        found = rollout(seen, stack)
        total = found.own.sum(-1) + (0 if found.source is None else found.source.sum(-1))
        close(total, torch.ones_like(total))
        assert (found.source is None) == (stack not in (Stack.DECODER, Stack.CROSS))


def test_words_are_merged_to_by_sums_and_from_by_means():
    own = Tokens(text="", ids=[1, 2, 3, 4], tokens=["[CLS]", " un", "do", " it"], words=[None, 0, 0, 1],
                 spans=[None] * 4, is_special=[True, False, False, False])  # fmt: skip
    seen = see(task("gpt").model, reading("gpt"))
    view = attention_map(seen, layer=0, head=0)
    weights = torch.rand(4, 4).softmax(-1)
    merged = merge_words(type(view)(weights=weights, queries=own.labels, keys=own.labels, title="t"), own, own)
    assert merged.keys == merged.queries == ["[CLS]", "undo", "it"]
    expected = torch.stack([weights[0], weights[1:3].mean(0), weights[3]])
    expected = torch.stack([expected[:, 0], expected[:, 1:3].sum(1), expected[:, 3]], dim=1)
    torch.testing.assert_close(merged.weights, expected)
    rest = without_sink(weights, sink_of(own))
    assert (rest[:, 0] == 0).all()
    torch.testing.assert_close(rest.sum(-1), torch.ones(4))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_deepest_guesses_of_the_lens_are_the_models_own(family):
    seen = see(task(family).model, reading(family))
    view = lens(seen, task(family).tokenizer, n=3)
    own = seen.logits.float().softmax(-1)[:, : task(family).tokenizer.vocab_size].topk(3)
    torch.testing.assert_close(view.probabilities[-1], own.values)
    assert torch.equal(view.ids[-1], own.indices)
    n_layers = 0 if family == "rnn" else config_layers(task(family).model.config)
    assert len(view.depths) == n_layers + 1
    wanted = seen.reading.own.ids if family == "bert" else seen.reading.chosen
    place = len(wanted) - 1
    probability = seen.logits.float().softmax(-1)[place, wanted[place]]
    torch.testing.assert_close(view.wanted_probabilities[-1, place], probability)
    assert bool(view.wanted_probabilities[-1, -1].isnan()) == (family == "gpt")


def test_the_lens_of_a_middle_layer_is_the_model_without_the_layers_above():
    from qkv.inspection import change

    model, text = task("gpt").model, reading("gpt")
    view = lens(see(model, text), task("gpt").tokenizer, n=3)
    with change(model, {"blocks.1.attention_write": 0.0, "blocks.1.feedforward_write": 0.0}):
        short = model(torch.tensor([text.own.ids]))[0].float().softmax(-1)
    torch.testing.assert_close(view.probabilities[1], short[:, : task("gpt").tokenizer.vocab_size].topk(3).values)


@pytest.mark.parametrize("family", TRANSFORMERS)
def test_the_stream_view_holds_the_lengths_of_what_passed(family):
    seen = see(task(family).model, reading(family))
    view = stream(seen, seen.stacks[-1])
    prefix = "decoder." if family == "seq2seq" else ""
    close(view.residual[1], seen.stream(f"{prefix}blocks.0.residual_post").norm(dim=-1))
    close(view.writes[-1, 1], seen.stream(f"{prefix}blocks.1.feedforward_write").norm(dim=-1))
    assert view.parts == (["attention", "cross", "feedforward"] if prefix else ["attention", "feedforward"])


@given(st.one_of(gpts(), berts(), seq2seqs()), st.integers(0, 99))
def test_the_steps_from_q_and_k_to_weights_follow_one_another(config, seed):
    seen = seen_by(config, seed)
    for stack in seen.stacks:
        view = neuron(seen, stack, layer=1, head=5, query=4)
        close(view.products.sum(-1), view.dots)
        close(view.scores.softmax(-1), view.weights)
        seen_keys = view.scores.isfinite()
        close(view.scaled[seen_keys], view.scores[seen_keys])
        # A rotation changes no length.
        torch.testing.assert_close(view.q_before.norm().double(), view.q.norm().double(), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(
            view.k_before.norm(dim=-1).double(), view.k.norm(dim=-1).double(), atol=1e-5, rtol=1e-5
        )


@pytest.mark.parametrize("family", FAMILIES)
def test_a_map_of_embeddings_has_a_point_for_each_token_at_each_depth(family):
    seen = see(task(family).model, reading(family))
    view = embeddings(seen, task(family).tokenizer, n=2)
    assert view.points.shape == (len(view.depths), len(view.tokens), 2)
    assert view.likeness[0].tolist() == pytest.approx([1.0] * len(view.tokens))
    assert {len(near) for near in view.neighbours} == {2}


def test_neighbours_are_the_rows_of_the_greatest_cosine():
    model, tokenizer = task("gpt").model, task("gpt").tokenizer
    cosines = F.cosine_similarity(model.embedding.token.weight[29], model.embedding.token.weight, dim=-1)
    cosines[29] = -2
    (first, likeness), *_ = neighbours(model, tokenizer, 29)
    assert likeness == pytest.approx(float(cosines.detach().max()), abs=1e-6)
    assert first.replace("▁", " ") == tokenizer.decode([29, int(cosines.argmax())])[len(tokenizer.decode([29])) :]


def test_likeness_of_positions_is_one_on_the_diagonal_and_refused_where_there_are_none():
    found = position_likeness(task("gpt").model, 7)
    close(found.diagonal(), torch.ones(7).double())
    close(found, found.T)
    with pytest.raises(InputError, match="adds no vectors of positions"):
        position_likeness(task("rnn").model, 7)
    with pytest.raises(InputError, match="99 positions were asked for, the model's context_length is 41"):
        position_likeness(task("gpt").model, 99)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_view_is_plain_json(family):
    seen = see(task(family).model, reading(family))
    views = [
        heads(seen),
        attention_map(seen),
        lens(seen, task(family).tokenizer),
        embeddings(seen, task(family).tokenizer),
    ]
    if family != "rnn":
        views += [neuron(seen), stream(seen), contributions(seen, task(family).tokenizer, position=1, token_id=2)]
    for view in views:
        said = json.loads(json.dumps(plain(view), allow_nan=False))
        assert said.keys() >= {"weights"} or len(said) > 3


def test_views_that_an_rnn_has_not_are_refused_clearly():
    seen = see(task("rnn").model, reading("rnn"))
    tokenizer = task("rnn").tokenizer
    for call, line in [
        (lambda: rollout(seen), "an RNN has one attention alone"),
        (lambda: neuron(seen), "no heads with queries and keys"),
        (lambda: stream(seen), "an RNN has no blocks"),
        (lambda: value_weighted(seen, Stack.CROSS, layer=0), "an RNN's values are its states"),
        (lambda: contributions(seen, tokenizer, position=0, token_id=0), "cannot be parted"),
    ]:
        with pytest.raises(InputError, match=line):
            call()


def test_places_outside_are_refused_with_both_numbers():
    seen = see(task("gpt").model, reading("gpt"))
    tokenizer, n = task("gpt").tokenizer, len(read(task("gpt"), TEXT).own.ids)
    with pytest.raises(InputError, match=rf"position {n} is outside the {n} tokens"):
        contributions(seen, tokenizer, position=n, token_id=0)
    with pytest.raises(InputError, match=rf"query {n} is outside the {n} positions"):
        neuron(seen, query=n)
    with pytest.raises(InputError, match=r"head 3 is outside the 3 heads \(0 … 2\)"):
        attention_map(seen, layer=0, head=3)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_lens_of_some_positions_at_a_time_is_that_of_all(family, monkeypatch):
    seen, tokenizer = see(task(family).model, reading(family)), task(family).tokenizer
    whole = lens(seen, tokenizer, n=3)
    monkeypatch.setattr(import_module("qkv.inspection.lens"), "MOST_ROWS", 3)
    parts = lens(seen, tokenizer, n=3)
    assert parts.tokens == whole.tokens
    close(parts.probabilities, whole.probabilities)
    close(parts.wanted_probabilities.nan_to_num(), whole.wanted_probabilities.nan_to_num())
