"""GPT: shapes, what it refuses, and the one switch that makes it an encoder."""

import pytest
import torch

from qkv.config import BERTConfig, GPTConfig
from qkv.errors import CacheError, ConfigError, ContextLengthError, InputError, ShapeError
from qkv.models import BERT, GPT
from tests.agreement.families import close, shaken, some_ids

SMALL = {"vocab_size": 23, "context_length": 11, "d_model": 10, "n_heads": 5, "n_layers": 2}


@pytest.fixture
def model():
    return shaken(GPTConfig(**SMALL))


def test_every_position_gets_a_logit_for_every_token(model):
    assert model(some_ids(1, 3, 7)).shape == (3, 7, 23)
    assert model.hidden_states(some_ids(1, 3, 7)).shape == (3, 7, 10)


def test_logits_are_the_states_times_the_token_table(model):
    states = model.hidden_states(some_ids(1, 3, 7))
    close(model(some_ids(1, 3, 7)), states @ model.embedding.token.weight.T)


def test_the_whole_context_is_taken_and_one_more_token_is_not(model):
    assert model(some_ids(1, 3, 11)).shape == (3, 11, 23)
    with pytest.raises(ContextLengthError, match="12 tokens, but the model's context_length is 11"):
        model(some_ids(1, 3, 12))


def test_tokens_in_the_cache_count_for_the_context(model):
    cache = model.new_cache(batch=3, capacity=20)
    model(some_ids(1, 3, 8), cache=cache)
    with pytest.raises(ContextLengthError, match="12 tokens, but the model's context_length is 11"):
        model(some_ids(1, 3, 4), cache=cache)


@pytest.mark.parametrize(("bad", "shown"), [(23, "id 23"), (-1, "id -1")])
def test_an_id_outside_the_vocabulary_is_refused(model, bad, shown):
    ids = some_ids(1, 3, 7)
    ids[1, 2] = bad
    with pytest.raises(InputError, match=rf"{shown} is outside the vocabulary of 23 \(0 … 22\)"):
        model(ids)


@pytest.mark.parametrize(
    ("shape", "what"), [((3, 0), "the sequence is empty: 0 ids"), ((0, 3), "the batch is empty: 0")]
)
def test_nothing_is_refused(model, shape, what):
    with pytest.raises(InputError, match=what):
        model(torch.zeros(shape, dtype=torch.long))


def test_a_full_cache_is_refused_with_both_numbers(model):
    cache = model.new_cache(batch=3, capacity=5)
    model(some_ids(1, 3, 4), cache=cache)
    with pytest.raises(CacheError, match="the cache holds 5 tokens a row, 6 are needed"):
        model(some_ids(1, 3, 2), cache=cache)


def test_a_cache_of_another_batch_is_refused(model):
    with pytest.raises(CacheError, match="the cache was made for batch=2, the ids have batch=3"):
        model(some_ids(1, 3, 4), cache=model.new_cache(batch=2))


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
def test_a_refused_pass_leaves_the_cache_as_it_was(model, ids, attention_mask):
    start, more = some_ids(1, 3, 4), some_ids(2, 3, 2)
    cache = model.new_cache(batch=3, capacity=6)
    model(start, cache=cache)
    with pytest.raises((InputError, CacheError)):
        model(ids, attention_mask=attention_mask, cache=cache)
    close(model(more, cache=cache), model(torch.cat((start, more), dim=1))[:, 4:])


def test_documents_cannot_be_used_with_a_cache(model):
    ids = some_ids(1, 3, 4)
    with pytest.raises(ConfigError, match="documents are packed for training; they cannot be used with a cache"):
        model(ids, documents=torch.zeros_like(ids), cache=model.new_cache(batch=3))


def test_a_cache_needs_a_past():
    encoder = GPT(GPTConfig(**SMALL, causal=False))
    with pytest.raises(ConfigError, match="with causal=False there is none"):
        encoder(some_ids(1, 3, 4), cache=encoder.new_cache(batch=3))


@pytest.mark.parametrize("name", ["attention_mask", "documents"])
def test_marks_of_another_shape_are_refused(model, name, unchecked):
    marks = torch.ones(3, 6, dtype=torch.bool if name == "attention_mask" else torch.long)
    with pytest.raises(ShapeError, match=rf"{name} has shape \(3, 6\), ids \(3, 7\)"):
        model(some_ids(1, 3, 7), **{name: marks})


@pytest.mark.parametrize(("batch", "capacity"), [(0, 5), (3, 0)])
def test_a_cache_of_nothing_is_refused(model, batch, capacity):
    with pytest.raises(CacheError, match=f"batch={batch} and capacity={capacity} of at least 1"):
        model.new_cache(batch=batch, capacity=capacity)


def test_a_new_cache_has_room_for_the_whole_context(model):
    cache = model.new_cache(batch=3)
    assert cache.capacity == 11
    assert cache.n_bytes == 2 * 3 * 11 * 10 * 2 * 8  # key + value, rows, slots, width, layers, bytes of float64


def test_a_text_of_padding_alone_gives_numbers_and_disturbs_nobody(model):
    ids = some_ids(1, 2, 5)
    attention_mask = torch.tensor([[True] * 5, [False] * 5])
    logits = model(ids, attention_mask=attention_mask)
    assert logits.isfinite().all()
    close(logits[0], model(ids[:1])[0])


def as_bert(config: GPTConfig) -> BERTConfig:
    shared = {name: getattr(config, name) for name in BERTConfig.model_fields if name in GPTConfig.model_fields}
    return BERTConfig(**{**shared, "family": "bert"}, n_segments=1, pooler=False)


@pytest.mark.parametrize("positions", ["learned", "sinusoidal", "rotary", "alibi", "relative"])
def test_without_its_mask_gpt_is_an_encoder_like_bert(positions):
    """Lecture A's one switch: mask on is GPT, off is BERT."""
    changes = {"causal": False, "positions": positions, "relative_buckets": 8, "relative_max_distance": 13}
    gpt = shaken(GPTConfig(**SMALL, **changes))
    bert = BERT(as_bert(gpt.config)).double().eval()
    state = {name: tensor for name, tensor in gpt.state_dict().items() if not name.startswith("unembedding")}
    state["embedding.segment.weight"] = torch.zeros(1, 10)
    bert.load_state_dict(state)
    ids = some_ids(1, 3, 7)
    close(gpt.hidden_states(ids), bert(ids))
    masked = GPT(gpt.config.replace(causal=True)).double().eval()
    if positions != "relative":  # its buckets are others when only the past is seen
        masked.load_state_dict(gpt.state_dict())
        assert not torch.allclose(masked.hidden_states(ids), bert(ids))
        close(masked.hidden_states(ids)[:, :1], bert(ids[:, :1]))


def test_ids_of_another_shape_or_type_are_refused(model, unchecked):
    with pytest.raises(ShapeError, match=r"ids have 1 axes, shape \(7,\); they need 2"):
        model(some_ids(1, 3, 7)[0])
    with pytest.raises(InputError, match=r"ids are torch.float32, they must be torch.int64"):
        model(some_ids(1, 3, 7).float())


def test_a_padding_mask_of_numbers_is_refused(model, unchecked):
    with pytest.raises(InputError, match=r"attention_mask is torch.int64, it must be torch.bool"):
        model(some_ids(1, 3, 7), attention_mask=torch.ones(3, 7, dtype=torch.long))


def test_the_cache_of_another_model_is_refused_with_both_numbers(model):
    deeper = GPT(model.config.replace(n_layers=5)).double()
    with pytest.raises(CacheError, match="the cache is for 5 layers, the model has 2"):
        model(some_ids(1, 3, 7), cache=deeper.new_cache(batch=3))
