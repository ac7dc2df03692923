"""Tests of GPT: shapes, rejected inputs and the non-causal variant."""

import re

import pytest
import torch

from qkv.config import BERTConfig, GPTConfig
from qkv.errors import ConfigError, ContextLengthError, InputError, KVCacheError, ShapeError
from qkv.models import BERT, GPT
from tests.agreement.model_strategies import assert_close, build_random_model, random_ids

SMALL = {"vocab_size": 23, "context_length": 11, "d_model": 10, "n_heads": 5, "n_layers": 2}


@pytest.fixture
def model():
    return build_random_model(GPTConfig(**SMALL))


def test_every_position_gets_a_logit_for_every_token(model):
    assert model(random_ids(1, 3, 7)).shape == (3, 7, 23)
    assert model.hidden_states(random_ids(1, 3, 7)).shape == (3, 7, 10)


def test_logits_are_the_hidden_states_times_the_token_embedding(model):
    states = model.hidden_states(random_ids(1, 3, 7))
    assert_close(model(random_ids(1, 3, 7)), states @ model.embedding.token.weight.T)


def test_the_context_length_is_the_longest_accepted_input(model):
    assert model(random_ids(1, 3, 11)).shape == (3, 11, 23)
    with pytest.raises(ContextLengthError, match=r"\b12 tokens\b.*context_length\b.*\b11\b"):
        model(random_ids(1, 3, 12))


def test_cached_tokens_count_toward_the_context_length(model):
    cache = model.new_cache(batch=3, capacity=20)
    model(random_ids(1, 3, 8), cache=cache)
    with pytest.raises(ContextLengthError, match=r"\b12 tokens\b.*context_length\b.*\b11\b"):
        model(random_ids(1, 3, 4), cache=cache)


@pytest.mark.parametrize("bad_id", [23, -1])
def test_an_id_outside_the_vocabulary_is_rejected(model, bad_id):
    ids = random_ids(1, 3, 7)
    ids[1, 2] = bad_id
    with pytest.raises(InputError, match=rf"id {bad_id}\b.*0 … 22"):
        model(ids)


@pytest.mark.parametrize("shape", [(3, 0), (0, 3)])
def test_empty_input_is_rejected(model, shape):
    with pytest.raises(ShapeError, match=re.escape(str(shape))):
        model(torch.zeros(shape, dtype=torch.long))


def test_a_full_cache_is_rejected(model):
    cache = model.new_cache(batch=3, capacity=5)
    model(random_ids(1, 3, 4), cache=cache)
    with pytest.raises(KVCacheError, match=r"\b5\b.*\b6\b"):
        model(random_ids(1, 3, 2), cache=cache)


def test_a_cache_with_another_batch_size_is_rejected(model):
    with pytest.raises(KVCacheError, match=r"batch=2\b.*batch=3\b"):
        model(random_ids(1, 3, 4), cache=model.new_cache(batch=2))


@pytest.mark.parametrize(
    ("ids", "attention_mask"),
    [
        (torch.full((3, 2), 99), None),
        (torch.zeros(3, 0, dtype=torch.long), None),
        (torch.zeros(3, 9, dtype=torch.long), None),
        (torch.zeros(3, 3, dtype=torch.long), torch.tensor([[True, True, True], [True, True, False], [True] * 3])),
    ],
    ids=["bad ids", "empty", "beyond the context", "beyond the capacity"],
)
def test_a_rejected_forward_pass_leaves_the_cache_unchanged(model, ids, attention_mask):
    start, more = random_ids(1, 3, 4), random_ids(2, 3, 2)
    cache = model.new_cache(batch=3, capacity=6)
    model(start, cache=cache)
    with pytest.raises((InputError, KVCacheError, ShapeError)):
        model(ids, attention_mask=attention_mask, cache=cache)
    assert_close(model(more, cache=cache), model(torch.cat((start, more), dim=1))[:, 4:])


def test_documents_cannot_be_used_with_a_cache(model):
    ids = random_ids(1, 3, 4)
    with pytest.raises(ConfigError, match="documents"):
        model(ids, documents=torch.zeros_like(ids), cache=model.new_cache(batch=3))


def test_a_cache_requires_a_causal_model():
    encoder = GPT(GPTConfig(**SMALL, causal=False))
    with pytest.raises(ConfigError, match="causal=False"):
        encoder(random_ids(1, 3, 4), cache=encoder.new_cache(batch=3))


@pytest.mark.parametrize("name", ["attention_mask", "documents"])
def test_masks_of_the_wrong_shape_are_rejected(model, name, unchecked):
    value = torch.ones(3, 6, dtype=torch.bool if name == "attention_mask" else torch.long)
    with pytest.raises(ShapeError, match=rf"{name}\b.*\(3, 6\).*\(3, 7\)"):
        model(random_ids(1, 3, 7), **{name: value})


@pytest.mark.parametrize(("batch", "capacity"), [(0, 5), (3, 0)])
def test_an_empty_batch_or_capacity_is_rejected(model, batch, capacity):
    with pytest.raises(KVCacheError, match=rf"batch={batch}\b.*capacity={capacity}\b"):
        model.new_cache(batch=batch, capacity=capacity)


def test_a_new_cache_has_the_capacity_of_the_context_length(model):
    cache = model.new_cache(batch=3)
    assert cache.capacity == 11
    assert cache.n_bytes == 2 * 3 * 11 * 10 * 2 * 8  # key and value, rows, slots, width, layers, bytes per float64


def test_a_row_of_only_padding_gives_finite_logits_and_does_not_affect_other_rows(model):
    ids = random_ids(1, 2, 5)
    attention_mask = torch.tensor([[True] * 5, [False] * 5])
    logits = model(ids, attention_mask=attention_mask)
    assert logits.isfinite().all()
    assert_close(logits[0], model(ids[:1])[0])


def as_bert(config: GPTConfig) -> BERTConfig:
    shared = {name: getattr(config, name) for name in BERTConfig.model_fields if name in GPTConfig.model_fields}
    return BERTConfig(**{**shared, "family": "bert"}, n_segments=1, pooler=False)


@pytest.mark.parametrize("positions", ["learned", "sinusoidal", "rotary", "alibi", "relative"])
def test_a_gpt_without_causal_mask_equals_bert(positions):
    """Lecture A: with the causal mask the model is a GPT, and without it a BERT."""
    changes = {"causal": False, "positions": positions, "relative_buckets": 8, "relative_max_distance": 13}
    gpt = build_random_model(GPTConfig(**SMALL, **changes))
    bert = BERT(as_bert(gpt.config)).double().eval()
    state = {name: tensor for name, tensor in gpt.state_dict().items() if not name.startswith("unembedding")}
    state["embedding.segment.weight"] = torch.zeros(1, 10)
    bert.load_state_dict(state)
    ids = random_ids(1, 3, 7)
    assert_close(gpt.hidden_states(ids), bert(ids))
    masked = GPT(gpt.config.replace(causal=True)).double().eval()
    if positions != "relative":  # a causal model uses different buckets
        masked.load_state_dict(gpt.state_dict())
        assert not torch.allclose(masked.hidden_states(ids), bert(ids))
        assert_close(masked.hidden_states(ids)[:, :1], bert(ids[:, :1]))


def test_ids_of_the_wrong_shape_or_dtype_are_rejected(model, unchecked):
    with pytest.raises(ShapeError, match=r"ids\b.*\(7,\)"):
        model(random_ids(1, 3, 7)[0])
    with pytest.raises(InputError, match=r"ids\b.*torch\.float32"):
        model(random_ids(1, 3, 7).float())


def test_an_integer_attention_mask_is_rejected(model, unchecked):
    with pytest.raises(InputError, match=r"attention_mask\b.*torch\.int64"):
        model(random_ids(1, 3, 7), attention_mask=torch.ones(3, 7, dtype=torch.long))


def test_the_cache_of_another_model_is_rejected(model):
    deeper = GPT(model.config.replace(n_layers=5)).double()
    with pytest.raises(KVCacheError, match=r"\b5 layers\b.*\b2\b"):
        model(random_ids(1, 3, 7), cache=deeper.new_cache(batch=3))
