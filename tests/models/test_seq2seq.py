"""Tests of the encoder–decoder Transformer: shapes, layer inputs and rejected inputs."""

import pytest
import torch

import qkv
from qkv.config import Seq2SeqConfig
from qkv.errors import ContextLengthError, InputError, KVCacheError, ShapeError
from qkv.nn import Source
from tests.agreement.model_strategies import assert_close, build_random_model, random_ids, random_source_ids

SMALL = {
    "vocab_size": 23, "source_vocab_size": 19, "share_embeddings": False, "context_length": 11,
    "d_model": 10, "n_heads": 5, "n_encoder_layers": 2, "n_decoder_layers": 3,
}  # fmt: skip


@pytest.fixture
def model():
    return build_random_model(Seq2SeqConfig(**SMALL))


def test_every_target_position_gets_a_logit_for_every_token(model):
    assert model(random_source_ids(1, 3, 5), random_ids(1, 3, 7)).shape == (3, 7, 23)


def test_encode_then_decode_is_forward(model):
    source, ids = random_source_ids(1, 3, 5), random_ids(1, 3, 7)
    assert_close(model.decode(ids, model.encode(source)), model(source, ids))


def test_every_decoder_layer_attends_to_the_last_encoder_output(model):
    """Lecture E asks which of four wirings between encoder and decoder is right."""
    with qkv.record(model, "encoder.last_hidden_state", "decoder.blocks.*.cross_attention.keys") as trace:
        model(random_source_ids(1, 3, 5), random_ids(1, 3, 7))
    for i, block in enumerate(model.decoder.blocks):
        keys = block.cross_attention.k_proj(trace["encoder.last_hidden_state"]).unflatten(2, (5, 2)).transpose(1, 2)
        assert_close(trace[f"decoder.blocks.{i}.cross_attention.keys"], keys)


def test_the_source_passes_through_every_encoder_layer(model):
    with qkv.record(model, "encoder.*") as trace:
        source = model.encode(random_source_ids(1, 3, 5))
    assert torch.equal(source.states, trace["encoder.last_hidden_state"])
    assert torch.equal(trace["encoder.last_hidden_state"], trace["encoder.blocks.1.resid_post"])
    assert torch.equal(trace["encoder.blocks.0.resid_post"], trace["encoder.blocks.1.resid_pre"])


def test_a_source_mask_without_padding_changes_nothing(model):
    source, ids = random_source_ids(1, 3, 5), random_ids(1, 3, 7)
    assert_close(model(source, ids, source_attention_mask=torch.ones(3, 5, dtype=torch.bool)), model(source, ids))


def test_source_and_target_are_checked_against_their_own_vocabularies(model):
    with pytest.raises(InputError, match=r"id 19\b.*0 … 18"):
        model(torch.full((3, 5), 19), random_ids(1, 3, 7))
    with pytest.raises(InputError, match=r"id 23\b.*0 … 22"):
        model(random_source_ids(1, 3, 5), torch.full((3, 7), 23))
    model(random_source_ids(1, 3, 5), torch.full((3, 7), 22))


def test_source_and_target_are_checked_against_the_context_length(model):
    with pytest.raises(ContextLengthError, match=r"\b12 tokens\b.*context_length\b.*\b11\b"):
        model(random_source_ids(1, 3, 12), random_ids(1, 3, 7))
    with pytest.raises(ContextLengthError, match=r"\b13 tokens\b.*context_length\b.*\b11\b"):
        model(random_source_ids(1, 3, 5), random_ids(1, 3, 13))


def test_rows_that_cannot_share_the_sources_evenly_are_rejected(model):
    source = model.encode(random_source_ids(1, 2, 5))
    with pytest.raises(ShapeError, match=r"\b3\b.*\b2\b"):
        model.decode(random_ids(1, 3, 7), source)


def test_a_rejected_step_leaves_the_cache_unchanged(model):
    source, ids = model.encode(random_source_ids(1, 3, 5)), random_ids(1, 3, 4)
    cache = model.new_cache(batch=3, capacity=4)
    model.decode(ids[:, :2], source, cache=cache)
    with pytest.raises(InputError, match="id 99"):
        model.decode(torch.full((3, 1), 99), source, cache=cache)
    with pytest.raises(KVCacheError, match=r"\b4\b.*\b5\b"):
        model.decode(ids[:, :3], source, cache=cache)
    with pytest.raises(ShapeError, match=r"\b3\b.*\b2\b"):
        model.decode(ids[:, 2:], model.encode(random_source_ids(1, 2, 5)), cache=cache)
    with pytest.raises(KVCacheError, match=r"3 × 5\b"):
        model.decode(ids[:, 2:], model.encode(random_source_ids(2, 3, 5)), cache=cache)
    assert_close(model.decode(ids[:, 2:], source, cache=cache), model.decode(ids, source)[:, 2:])


def test_the_keys_and_values_of_the_source_are_computed_once(model):
    source, ids = model.encode(random_source_ids(1, 3, 5)), random_ids(1, 3, 4)
    cache = model.new_cache(batch=3)
    n_before = cache.n_bytes
    first = model.decode(ids[:, :1], source, cache=cache)
    assert cache.n_bytes - n_before == 2 * 3 * 5 * 10 * 3 * 8  # key + value, rows, source, width, layers, bytes
    cached = [source_cache.keys_values for source_cache in cache.sources]
    model.decode(ids[:, 1:2], source, cache=cache)
    assert all(source_cache.keys_values is before for source_cache, before in zip(cache.sources, cached, strict=True))
    assert first.shape == (3, 1, 23)


def test_a_source_of_only_padding_gives_finite_logits(model):
    attention_mask = torch.tensor([[True] * 5, [False] * 5])
    logits = model(random_source_ids(1, 2, 5), random_ids(1, 2, 7), source_attention_mask=attention_mask)
    assert logits.isfinite().all()


def test_a_shared_embedding_serves_source_and_target():
    shared = {**SMALL, "source_vocab_size": 23, "share_embeddings": True}
    model = build_random_model(Seq2SeqConfig(**shared))
    assert model.encoder.embedding.token is model.decoder.embedding.token
    model = build_random_model(Seq2SeqConfig(**SMALL))
    assert model.encoder.embedding.token is not model.decoder.embedding.token


def test_encoding_without_padding_gives_a_source_without_a_mask(model):
    source = model.encode(random_source_ids(1, 3, 5))
    assert isinstance(source, Source)
    assert source.mask is None


PATCH_CONFIG = Seq2SeqConfig(
    vocab_size=23, share_embeddings=False, d_patch=13, context_length=11, d_model=10, n_heads=5,
    n_encoder_layers=2, n_decoder_layers=3,
)  # fmt: skip


def test_a_one_hot_patch_equals_the_embedding_of_its_token():
    id_model = build_random_model(Seq2SeqConfig(**{**SMALL, "source_vocab_size": 13}))
    patch_model = build_random_model(PATCH_CONFIG)
    patch_model.load_state_dict(id_model.state_dict())
    source, ids = torch.randint(13, (3, 5)), random_ids(1, 3, 7)
    attention_mask = torch.arange(5) < torch.tensor([[5], [2], [3]])
    patches = torch.nn.functional.one_hot(source, 13).double()
    for mask in (None, attention_mask):
        assert_close(
            patch_model(patches, ids, source_attention_mask=mask), id_model(source, ids, source_attention_mask=mask)
        )


def test_patches_of_the_wrong_shape_are_rejected():
    model = build_random_model(PATCH_CONFIG)
    with pytest.raises(ShapeError, match=r"d_patch=13\b.*\(3, 5\)"):
        model(random_source_ids(1, 3, 5), random_ids(1, 3, 7))
    with pytest.raises(ShapeError, match=r"d_patch=13\b.*\(3, 5, 12\)"):
        model.encode(torch.rand(3, 5, 12))
    with pytest.raises(ContextLengthError, match=r"\b12 tokens\b.*context_length\b.*\b11\b"):
        model.encode(torch.rand(3, 12, 13, dtype=torch.float64))
