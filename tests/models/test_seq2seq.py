"""The encoder–decoder Transformer: shapes, what each layer reads, what is refused."""

import pytest
import torch

import qkv
from qkv.config import Seq2SeqConfig
from qkv.errors import CacheError, ContextLengthError, InputError, ShapeError
from qkv.nn import Source
from tests.agreement.families import close, shaken, some_ids, some_source

SMALL = {
    "vocab_size": 23, "source_vocab_size": 19, "share_embeddings": False, "context_length": 11,
    "d_model": 10, "n_heads": 5, "n_encoder_layers": 2, "n_decoder_layers": 3,
}  # fmt: skip


@pytest.fixture
def model():
    return shaken(Seq2SeqConfig(**SMALL))


def test_every_target_position_gets_a_logit_for_every_token(model):
    assert model(some_source(1, 3, 5), some_ids(1, 3, 7)).shape == (3, 7, 23)


def test_encode_then_decode_is_forward(model):
    source, ids = some_source(1, 3, 5), some_ids(1, 3, 7)
    close(model.decode(ids, model.encode(source)), model(source, ids))


def test_every_decoder_layer_reads_the_encoders_last_output(model):
    """Lecture E's question: which of four wirings."""
    with qkv.record(model, "encoder.last_hidden_state", "decoder.blocks.*.cross_attention.keys") as trace:
        model(some_source(1, 3, 5), some_ids(1, 3, 7))
    for i, block in enumerate(model.decoder.blocks):
        keys = block.cross_attention.k_proj(trace["encoder.last_hidden_state"]).unflatten(2, (5, 2)).transpose(1, 2)
        close(trace[f"decoder.blocks.{i}.cross_attention.keys"], keys)


def test_the_source_passes_every_encoder_layer(model):
    with qkv.record(model, "encoder.*") as trace:
        source = model.encode(some_source(1, 3, 5))
    assert torch.equal(source.states, trace["encoder.last_hidden_state"])
    assert torch.equal(trace["encoder.last_hidden_state"], trace["encoder.blocks.1.resid_post"])
    assert torch.equal(trace["encoder.blocks.0.resid_post"], trace["encoder.blocks.1.resid_pre"])


def test_without_a_source_mask_and_with_one_of_tokens_alone_are_the_same(model):
    source, ids = some_source(1, 3, 5), some_ids(1, 3, 7)
    close(model(source, ids, source_attention_mask=torch.ones(3, 5, dtype=torch.bool)), model(source, ids))


def test_source_and_target_are_checked_against_their_own_vocabularies(model):
    with pytest.raises(InputError, match="id 19 is outside the vocabulary of 19"):
        model(torch.full((3, 5), 19), some_ids(1, 3, 7))
    with pytest.raises(InputError, match="id 23 is outside the vocabulary of 23"):
        model(some_source(1, 3, 5), torch.full((3, 7), 23))
    model(some_source(1, 3, 5), torch.full((3, 7), 22))


def test_source_and_target_are_checked_against_the_context(model):
    with pytest.raises(ContextLengthError, match="12 tokens, but the model's context_length is 11"):
        model(some_source(1, 3, 12), some_ids(1, 3, 7))
    with pytest.raises(ContextLengthError, match="13 tokens, but the model's context_length is 11"):
        model(some_source(1, 3, 5), some_ids(1, 3, 13))


def test_rows_that_cannot_share_the_sources_evenly_are_refused(model):
    source = model.encode(some_source(1, 2, 5))
    with pytest.raises(ShapeError, match="3 rows of ids cannot share 2 sources evenly"):
        model.decode(some_ids(1, 3, 7), source)


def test_a_refused_step_leaves_the_cache_as_it_was(model):
    source, ids = model.encode(some_source(1, 3, 5)), some_ids(1, 3, 4)
    cache = model.new_cache(batch=3, capacity=4)
    model.decode(ids[:, :2], source, cache=cache)
    with pytest.raises(InputError, match="id 99"):
        model.decode(torch.full((3, 1), 99), source, cache=cache)
    with pytest.raises(CacheError, match="the cache holds 4 tokens a row, 5 are needed"):
        model.decode(ids[:, :3], source, cache=cache)
    with pytest.raises(ShapeError, match="3 rows of ids cannot share 2 sources evenly"):
        model.decode(ids[:, 2:], model.encode(some_source(1, 2, 5)), cache=cache)
    with pytest.raises(CacheError, match="another source of 3 × 5 tokens"):
        model.decode(ids[:, 2:], model.encode(some_source(2, 3, 5)), cache=cache)
    close(model.decode(ids[:, 2:], source, cache=cache), model.decode(ids, source)[:, 2:])


def test_the_sources_keys_and_values_are_computed_once(model):
    source, ids = model.encode(some_source(1, 3, 5)), some_ids(1, 3, 4)
    cache = model.new_cache(batch=3)
    n_before = cache.n_bytes
    first = model.decode(ids[:, :1], source, cache=cache)
    assert cache.n_bytes - n_before == 2 * 3 * 5 * 10 * 3 * 8  # key + value, rows, source, width, layers, bytes
    kept = [part.keys_values for part in cache.sources]
    model.decode(ids[:, 1:2], source, cache=cache)
    assert all(part.keys_values is before for part, before in zip(cache.sources, kept, strict=True))
    assert first.shape == (3, 1, 23)


def test_a_source_of_padding_alone_gives_numbers(model):
    attention_mask = torch.tensor([[True] * 5, [False] * 5])
    logits = model(some_source(1, 2, 5), some_ids(1, 2, 7), source_attention_mask=attention_mask)
    assert logits.isfinite().all()


def test_one_table_serves_source_and_target_where_it_is_shared():
    shared = {**SMALL, "source_vocab_size": 23, "share_embeddings": True}
    model = shaken(Seq2SeqConfig(**shared))
    assert model.encoder.embedding.token is model.decoder.embedding.token
    model = shaken(Seq2SeqConfig(**SMALL))
    assert model.encoder.embedding.token is not model.decoder.embedding.token


def test_a_source_is_what_it_says(model):
    source = model.encode(some_source(1, 3, 5))
    assert isinstance(source, Source)
    assert source.mask is None


PICTURES = Seq2SeqConfig(
    vocab_size=23, share_embeddings=False, d_patch=13, context_length=11, d_model=10, n_heads=5,
    n_encoder_layers=2, n_decoder_layers=3,
)  # fmt: skip


def test_a_patch_that_is_a_one_hot_is_read_as_that_token():
    of_ids = shaken(Seq2SeqConfig(**{**SMALL, "source_vocab_size": 13}))
    of_pictures = shaken(PICTURES)
    of_pictures.load_state_dict(of_ids.state_dict())
    source, ids = torch.randint(13, (3, 5)), some_ids(1, 3, 7)
    attention_mask = torch.arange(5) < torch.tensor([[5], [2], [3]])
    patches = torch.nn.functional.one_hot(source, 13).double()
    for marks in (None, attention_mask):
        close(of_pictures(patches, ids, source_attention_mask=marks), of_ids(source, ids, source_attention_mask=marks))


def test_what_are_no_patches_of_the_config_is_refused():
    model = shaken(PICTURES)
    with pytest.raises(ShapeError, match=r"shape \(3, 5\); patches are \(batch, source, d_patch=13\)"):
        model(some_source(1, 3, 5), some_ids(1, 3, 7))
    with pytest.raises(ShapeError, match=r"shape \(3, 5, 12\); patches are \(batch, source, d_patch=13\)"):
        model.encode(torch.rand(3, 5, 12))
    with pytest.raises(ContextLengthError, match="12 tokens, but the model's context_length is 11"):
        model.encode(torch.rand(3, 12, 13, dtype=torch.float64))
