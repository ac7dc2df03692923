"""Our models compared with `transformers`, with random weights loaded through the name tables."""

import pytest
import torch
import transformers as hf

from qkv.models import build
from qkv.weights import (
    config_from_published,
    load_published_weights,
    to_lossless_published_config,
    to_published_weights,
)
from tests.reference.published_configs import CASES, DECODERS, ENCODERS, NO_IDS, PAIRS, sides

TOLERANCE = 1e-4
BATCH, LENGTH = 3, 11
PADDINGS = ["none", "left", "right"]


def loaded(theirs):
    """Returns our model with their weights."""
    tensors = theirs.state_dict()
    ours = build(config_from_published(theirs.config.to_dict(), tensors), seed=3).eval()
    load_published_weights(ours, tensors)
    return ours


def random_ids(vocab_size: int, length: int = LENGTH, seed: int = 5) -> torch.Tensor:
    return torch.randint(vocab_size, (BATCH, length), generator=torch.Generator().manual_seed(seed))


def padding(side: str, length: int = LENGTH) -> torch.Tensor:
    """Returns an attention mask with rows of full length, 4 tokens and length − 2."""
    lengths = torch.tensor([length, 4, length - 2])[:, None]
    index = torch.arange(length)[None]
    match side:
        case "none":
            return torch.ones(BATCH, length, dtype=torch.bool)
        case "left":
            return index >= length - lengths
        case _:
            return index < lengths


def token_rows(attention_mask: torch.Tensor) -> torch.Tensor:
    return (attention_mask.long().cumsum(1) - 1).clamp(min=0)


def assert_agree(
    ours: torch.Tensor,
    theirs: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    *,
    tolerance: float = TOLERANCE,
) -> None:
    assert ours.shape == theirs.shape
    if attention_mask is not None:
        ours, theirs = ours[attention_mask], theirs[attention_mask]
    assert (ours - theirs).abs().max() <= tolerance


@pytest.mark.parametrize("side", PADDINGS)
@pytest.mark.parametrize("name", DECODERS)
def test_a_decoder_gives_the_published_logits(name, side):
    theirs = DECODERS[name].published()
    ids, attention_mask = random_ids(31), padding(side)
    with torch.no_grad():
        expected = theirs(ids, attention_mask=attention_mask.long(), position_ids=token_rows(attention_mask)).logits
        actual = loaded(theirs)(ids, attention_mask=None if side == "none" else attention_mask)
    assert_agree(actual, expected, attention_mask)


@pytest.mark.parametrize("side", PADDINGS)
@pytest.mark.parametrize("name", ENCODERS)
def test_an_encoder_gives_the_published_states_and_every_head(name, side):
    theirs = ENCODERS[name].published()
    ours = loaded(theirs)
    ids, attention_mask = random_ids(31), padding(side)
    inputs = {
        "attention_mask": attention_mask.long(),
        "position_ids": token_rows(attention_mask) + ours.config.position_offset,
    }
    segments = None
    if ours.config.n_segments:
        segments = inputs["token_type_ids"] = random_ids(ours.config.n_segments, seed=13)
    with torch.no_grad():
        answer = theirs(ids, **inputs, output_hidden_states=True)
        states = ours(ids, segments=segments, attention_mask=None if side == "none" else attention_mask)
        assert_agree(states, answer.hidden_states[-1], attention_mask, tolerance=1e-5)
        for head, expected in heads_of(answer, name).items():
            # The pooler reads the first position, which is padding if the row is padded on the left.
            rows = attention_mask if head == "masked_lm_logits" else attention_mask[:, 0]
            assert_agree(getattr(ours, head)(states), expected, rows)


def heads_of(answer, name: str) -> dict[str, torch.Tensor]:
    match name.split(", ")[1]:
        case "backbone":
            return {} if name.startswith("distilbert") else {"pooled_output": answer.pooler_output}
        case "both games":
            return {
                "masked_lm_logits": answer.prediction_logits,
                "next_sentence_logits": answer.seq_relationship_logits,
            }
        case "masked words":
            return {"masked_lm_logits": answer.logits}
        case "next sentence":
            return {"next_sentence_logits": answer.logits}
        case _:
            return {"class_logits": answer.logits}


def test_roberta_derives_positions_from_padding_as_we_do():
    theirs = ENCODERS["roberta, masked words, 1"].published()
    attention_mask = padding("right")
    pad = theirs.config.pad_token_id
    ids = random_ids(31 - pad - 1) + pad + 1  # no real token may have the padding id
    ids[~attention_mask] = pad
    with torch.no_grad():
        expected = theirs(ids, attention_mask=attention_mask.long(), output_hidden_states=True)
        ours = loaded(theirs)(ids, attention_mask=attention_mask)
    assert_agree(ours, expected.hidden_states[-1], attention_mask, tolerance=1e-5)


# With left padding, `transformers` counts padding as positions and we do not, so only relative positions agree.
PADDED_PAIRS = [(name, side) for name in PAIRS for side in PADDINGS if side != "left" or name.startswith("t5")]


@pytest.mark.parametrize(("name", "side"), PADDED_PAIRS)
def test_an_encoder_decoder_gives_the_published_logits(name, side):
    theirs = PAIRS[name].published()
    source_ids, source_attention_mask = random_ids(31), padding(side)
    ids, attention_mask = random_ids(31, 7, seed=13), padding(side, 7)
    with torch.no_grad():
        expected = theirs(
            input_ids=source_ids,
            attention_mask=source_attention_mask.long(),
            decoder_input_ids=ids,
            decoder_attention_mask=attention_mask.long(),
        ).logits
        actual = loaded(theirs)(
            source_ids,
            ids,
            source_attention_mask=None if side == "none" else source_attention_mask,
            attention_mask=None if side == "none" else attention_mask,
        )
    assert_agree(actual, expected, attention_mask)


@pytest.mark.parametrize("name", CASES)
def test_exported_weights_equal_the_loaded_ones_byte_for_byte(name):
    theirs = CASES[name].published()
    exported = to_published_weights(loaded(theirs))
    published = {CASES[name].prefix + key: tensor for key, tensor in theirs.state_dict().items()}
    for key, tensor in exported.items():
        assert torch.equal(tensor, published[key]), key
        assert tensor.is_contiguous()
    # Tensors that are not exported are aliases of exported ones, or Marian's fixed positions.
    addresses = {published[key].data_ptr() for key in exported}
    rest = {key for key, tensor in published.items() if tensor.data_ptr() not in addresses}
    assert rest == {key for key in published if "embed_positions" in key and name.startswith("marian")}


@pytest.mark.parametrize("name", CASES)
def test_transformers_rebuilds_the_model_from_our_export(name):
    case = CASES[name]
    theirs = case.published()
    ours = loaded(theirs)
    settings, tensors = to_lossless_published_config(ours.config), to_published_weights(ours)
    again = case.model(case.config(**{**NO_IDS, **settings})).eval()
    if not ours.config.tie_embeddings and case.config is hf.T5Config:
        again.lm_head.weight = torch.nn.Parameter(again.lm_head.weight.clone())
    fitting = {key.removeprefix(case.prefix): tensor for key, tensor in tensors.items()}
    assert not again.load_state_dict(fitting, strict=False).unexpected_keys
    inputs = {"input_ids": random_ids(31)}
    if name in PAIRS:
        inputs["decoder_input_ids"] = random_ids(31, 7)
    with torch.no_grad():
        assert torch.equal(again(**inputs)[0], theirs(**inputs)[0])


@pytest.mark.parametrize("name", DECODERS)
def test_sixteen_greedy_tokens_with_a_cache_equal_transformers(name):
    theirs = DECODERS[name].published()
    ours = loaded(theirs)
    ids = random_ids(31, 5)
    cache = ours.new_cache(batch=BATCH)
    written, new = ids, ids
    with torch.no_grad():
        for _ in range(16):
            new = ours(new, cache=cache)[:, -1:].argmax(-1)
            ids = torch.cat((ids, theirs(ids).logits[:, -1:].argmax(-1)), dim=1)
            written = torch.cat((written, new), dim=1)
    assert written.shape == (BATCH, 21)
    assert torch.equal(written, ids)


SWAPS = {
    "gpt2": ("transformer.h.0.ln_1.weight", "transformer.h.0.ln_2.weight"),
    "llama, grouped heads": ("self_attn.k_proj.weight", "self_attn.v_proj.weight"),
    "distilbert, classes, 0": ("attention.k_lin.weight", "attention.v_lin.weight"),
    "bert, both games, 0": ("attention.self.key.weight", "attention.self.value.weight"),
    "marian, swish": ("encoder_attn.k_proj.weight", "encoder_attn.v_proj.weight"),
    "bart": ("decoder.layers.1.self_attn.k_proj.weight", "decoder.layers.1.self_attn.v_proj.weight"),
    "t5 1.1": ("DenseReluDense.wi_0.weight", "DenseReluDense.wi_1.weight"),
}


@pytest.mark.parametrize("name", SWAPS)
def test_a_swapped_pair_of_tensors_is_detected(name):
    theirs = CASES[name].published()
    right = theirs.state_dict()
    first, second = SWAPS[name]
    wrong = {
        key: right[key.replace(first, second) if key.endswith(first) else key.replace(second, first)] for key in right
    }
    ours = loaded(theirs)
    inputs = (random_ids(31), random_ids(31, 7)) if name in PAIRS else (random_ids(31),)
    with torch.no_grad():
        before = ours(*inputs)
        load_published_weights(ours, wrong)
        assert (ours(*inputs) - before).abs().max() > 100 * TOLERANCE


LEAST = {
    hf.GPT2Config: ["vocab_size", "n_positions", "n_embd", "n_head", "n_layer"],
    hf.LlamaConfig: [
        "vocab_size", "max_position_embeddings", "hidden_size", "intermediate_size", "num_hidden_layers",
        "num_attention_heads",
    ],
    hf.MistralConfig: [
        "vocab_size", "max_position_embeddings", "hidden_size", "intermediate_size", "num_hidden_layers",
        "num_attention_heads", "num_key_value_heads",
    ],
    hf.BertConfig: [
        "vocab_size", "max_position_embeddings", "hidden_size", "intermediate_size", "num_hidden_layers",
        "num_attention_heads",
    ],
    hf.DistilBertConfig: ["vocab_size", "max_position_embeddings", "dim", "hidden_dim", "n_layers", "n_heads"],
    hf.RobertaConfig: [
        "vocab_size", "max_position_embeddings", "hidden_size", "intermediate_size", "num_hidden_layers",
        "num_attention_heads",
    ],
    hf.MarianConfig: ["vocab_size", "max_position_embeddings", "d_model", *sides(1, 2, 3, 5)],
    hf.BartConfig: ["vocab_size", "max_position_embeddings", "d_model", *sides(1, 2, 3, 5)],
    hf.T5Config: ["vocab_size", "d_model", "d_kv", "d_ff", "num_heads", "num_layers"],
}  # fmt: skip


@pytest.mark.parametrize("kind", LEAST, ids=lambda kind: kind.model_type)
def test_missing_settings_have_the_default_of_transformers(kind):
    complete = kind().to_dict()
    least = {key: complete[key] for key in ["model_type", *LEAST[kind]]}
    training_alone = {"dropout"}
    assert config_from_published(least).model_dump(exclude=training_alone) == config_from_published(
        complete
    ).model_dump(exclude=training_alone)
