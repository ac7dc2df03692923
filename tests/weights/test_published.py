"""Published configs are converted to ours and back, and unsupported settings are rejected by name."""

import pytest
import torch

from qkv.choices import Activation, NormKind, PositionKind, SinusoidStyle
from qkv.config import PRESETS, GPTConfig, RopeScaling, preset
from qkv.errors import ConfigError, WeightsError
from qkv.models import build
from qkv.weights import (
    config_from_published,
    load_published_weights,
    to_lossless_published_config,
    to_published_weights,
)

TOKEN_IDS = {"bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 1, "forced_eos_token_id": 2}
GPT2 = {
    **TOKEN_IDS, "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "activation_function": "gelu_new",
    "attn_pdrop": 0.1, "embd_pdrop": 0.1, "resid_pdrop": 0.1, "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-05, "n_ctx": 1024, "n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024,
    "summary_type": "cls_index", "summary_use_proj": True, "summary_activation": None, "vocab_size": 50257,
    "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
}  # fmt: skip
LLAMA = {
    **TOKEN_IDS, "model_type": "llama", "architectures": ["LlamaForCausalLM"], "attention_bias": False,
    "attention_dropout": 0.0, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
    "intermediate_size": 14336, "max_position_embeddings": 8192, "num_attention_heads": 32,
    "num_hidden_layers": 32, "num_key_value_heads": 8, "pretraining_tp": 1, "rms_norm_eps": 1e-05,
    "rope_scaling": None, "rope_theta": 500000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "use_cache": True, "vocab_size": 128256,
}  # fmt: skip
LLAMA3 = {
    "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}  # fmt: skip
BERT = {
    **TOKEN_IDS, "model_type": "bert", "architectures": ["BertForMaskedLM"], "attention_probs_dropout_prob": 0.1,
    "gradient_checkpointing": False, "hidden_act": "gelu", "hidden_dropout_prob": 0.1, "hidden_size": 768,
    "initializer_range": 0.02, "intermediate_size": 3072, "layer_norm_eps": 1e-12,
    "max_position_embeddings": 512, "num_attention_heads": 12, "num_hidden_layers": 12,
    "position_embedding_type": "absolute", "type_vocab_size": 2, "use_cache": True, "vocab_size": 30522,
}  # fmt: skip
MARIAN = {
    **TOKEN_IDS, "model_type": "marian", "architectures": ["MarianMTModel"], "activation_dropout": 0.0,
    "activation_function": "swish", "add_bias_logits": False, "add_final_layer_norm": False,
    "attention_dropout": 0.0, "bad_words_ids": [[58100]], "classif_dropout": 0.0, "d_model": 512,
    "decoder_attention_heads": 8, "decoder_ffn_dim": 2048, "decoder_layerdrop": 0.0, "decoder_layers": 6,
    "decoder_start_token_id": 58100, "dropout": 0.1, "encoder_attention_heads": 8, "encoder_ffn_dim": 2048,
    "encoder_layerdrop": 0.0, "encoder_layers": 6, "init_std": 0.02, "is_encoder_decoder": True,
    "max_length": 512, "max_position_embeddings": 512, "normalize_before": False, "normalize_embedding": False,
    "num_beams": 6, "num_hidden_layers": 6, "scale_embedding": True, "static_position_embeddings": True,
    "vocab_size": 58101,
}  # fmt: skip
T5 = {
    **TOKEN_IDS, "model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "d_ff": 2048, "d_kv": 64,
    "d_model": 512, "dropout_rate": 0.1, "initializer_factor": 1.0, "is_encoder_decoder": True,
    "layer_norm_epsilon": 1e-06, "n_positions": 512, "num_heads": 8, "num_layers": 6, "output_past": True,
    "relative_attention_num_buckets": 32, "vocab_size": 32128,
}  # fmt: skip
BART = {**MARIAN, "model_type": "bart", "normalize_embedding": True, "static_position_embeddings": False}
ALL = {"gpt2": GPT2, "llama": LLAMA, "bert": BERT, "marian": MARIAN, "bart": BART, "t5": T5}


@pytest.mark.parametrize(
    ("published", "name"), [(GPT2, "gpt2"), (LLAMA, "llama-3-8b"), (T5, "t5-small")], ids=["gpt2", "llama", "t5"]
)
def test_a_published_config_equals_its_preset(published, name):
    dropout = config_from_published(published).dropout
    assert config_from_published(published).model_dump() == preset(name, dropout=dropout).model_dump()


def test_the_config_of_bert_equals_its_preset_with_the_heads_of_its_architecture():
    config = config_from_published(BERT)
    assert config.model_dump() == preset("bert-base", dropout=0.1, pooler=False, masked_lm_head=True).model_dump()


def test_the_tensors_determine_the_heads_of_bert():
    names = ["bert.pooler.dense.weight", "cls.seq_relationship.weight", "cls.predictions.transform.dense.weight"]
    config = config_from_published(BERT, names)
    assert (config.pooler, config.masked_lm_head, config.next_sentence_head) == (True, True, True)
    config = config_from_published(
        {**BERT, "id2label": {"0": "a", "1": "b", "2": "c"}}, [*names[:1], "classifier.weight"]
    )
    assert (config.masked_lm_head, config.n_classes) == (False, 3)


def test_the_config_of_marian_has_its_positions_and_bias():
    config = config_from_published(MARIAN)
    assert (config.positions, config.sinusoid) == (PositionKind.SINUSOIDAL, SinusoidStyle.HALVES)
    assert config.activation is Activation.SILU
    assert config.scale_embedding
    assert config.unembedding_bias


def test_t5_version_1_1_is_untied_gated_and_unscaled():
    for settings in ({"tie_word_embeddings": False}, {"tie_word_embeddings": True, "scale_decoder_outputs": False}):
        config = config_from_published({**T5, "feed_forward_proj": "gated-gelu", **settings}, ["lm_head.weight"])
        assert (config.tie_embeddings, config.scale_logits) == (False, False)
        assert (config.gated, config.activation, config.norm) == (True, Activation.GELU_TANH, NormKind.RMS)
    assert config_from_published(T5, ["lm_head.weight"]).tie_embeddings


REJECTED = [
    ({**GPT2, "model_type": "gpt-2"}, r"model_type='gpt-2'.*'gpt2'"),
    ({}, "model_type=None"),
    ({**GPT2, "scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx=True.*False"),
    ({**GPT2, "add_cross_attention": True}, "add_cross_attention=True.*False"),
    ({**GPT2, "pruned_heads": {"1": [2]}}, "pruned_heads="),
    ({**GPT2, "activation_function": "mish"}, "activation_function='mish'.*relu, gelu"),
    ({**GPT2, "n_heads": 12}, "n_heads=12.*'n_head'"),
    ({**GPT2, "quantization_config": {"bits": 4}, "more": 1}, r"quantization_config=.*\b1 .*\bmore\)"),
    ({k: v for k, v in GPT2.items() if k != "vocab_size"}, r"^gpt: vocab_size\b"),
    ({**GPT2, "n_head": 7}, "^n_embd must .*n_embd=768.*n_head=7"),
    ({**LLAMA, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "'yarn'"),
    ({**LLAMA, "rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
    ({**LLAMA, "rope_scaling": {"type": "linear"}}, "'linear'"),
    ({**LLAMA, "rope_scaling": {**LLAMA3, "low_freq_factor": 4.0}}, "low_freq_factor=4.0"),
    ({**LLAMA, "rope_scaling": 2.0}, "rope_scaling.*2.0.*float"),
    ({**LLAMA, "rope_interleaved": True}, "rope_interleaved=True.*False"),
    ({**BERT, "position_embedding_type": "relative_key"}, "position_embedding_type='relative_key'"),
    ({**BERT, "is_decoder": True}, "is_decoder=True"),
    ({**BERT, "architectures": ["BertForQuestionAnswering"]}, "BertForQuestionAnswering"),
    ({**MARIAN, "decoder_ffn_dim": 1024}, "encoder_ffn_dim=2048.*decoder_ffn_dim=1024"),
    ({**MARIAN, "normalize_before": True}, "normalize_before=True"),
    ({**BART, "normalize_embedding": False}, "normalize_embedding=False.*True"),
    ({**T5, "feed_forward_proj": "gated-mish"}, "feed_forward_proj='mish'"),
    ({**T5, "feed_forward_proj": "gated-gelu", "dense_act_fn": "gelu"}, "dense_act_fn='gelu'"),
]  # fmt: skip


@pytest.mark.parametrize(("published", "message"), REJECTED, ids=[message[:30] for _, message in REJECTED])
def test_the_error_of_an_unsupported_setting_names_it(published, message):
    with pytest.raises(ConfigError, match=message):
        config_from_published(published)


@pytest.mark.parametrize("name", ALL)
def test_settings_round_trip(name):
    config = config_from_published(ALL[name])
    published = to_lossless_published_config(config)
    assert published["model_type"] == name
    assert config_from_published(published).model_dump() == config.model_dump()


@pytest.mark.parametrize("scaling", [LLAMA3, {"rope_type": "linear", "factor": 2.0}])
def test_rope_scaling_round_trips(scaling):
    config = config_from_published({**LLAMA, "rope_scaling": scaling})
    assert config.rope_scaling is not None
    assert to_lossless_published_config(config)["rope_scaling"] == scaling


def test_rope_scaling_requires_rotary_positions():
    with pytest.raises(ConfigError, match=r"rope_scaling.*learned"):
        preset("gpt-nano", rope_scaling=RopeScaling(factor=2.0))


@pytest.mark.parametrize("name", ["gpt-nano", "llama-nano", "bert-nano"])
def test_small_models_can_be_published_and_loaded(name):
    model, other = build(preset(name), seed=1), build(preset(name), seed=2)
    tensors = to_published_weights(model)
    load_published_weights(other, tensors)
    assert all(torch.equal(tensor, other.state_dict()[key]) for key, tensor in model.state_dict().items())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"positions": "alibi"}, "gpt2.*positions="),
        ({"n_kv_heads": 2}, "gpt2.*n_kv_heads=2"),
        ({"attention_bias": False}, "gpt2.*attention_bias=False"),
        ({"causal": False}, "gpt2.*causal=False"),
        ({"positions": "rotary"}, "llama.*gated=False, norm="),
    ],
)
def test_configs_without_a_published_format_are_rejected(changes, message):
    model = build(preset("gpt-nano", **changes))
    with pytest.raises(ConfigError, match=message):
        to_lossless_published_config(model.config)
    with pytest.raises(ConfigError, match=message):
        to_published_weights(model)


def test_an_rnn_has_no_published_format():
    with pytest.raises(WeightsError, match="RNN"):
        to_lossless_published_config(preset("rnn-nano"))


def test_stored_masks_of_old_gpt2_files_are_ignored_and_returned():
    config = GPTConfig(vocab_size=11, context_length=7, d_model=6, n_heads=3, n_layers=2)
    model = build(config)
    tensors = {name.removeprefix("transformer."): tensor for name, tensor in to_published_weights(model).items()}
    tensors["h.0.attn.bias"] = torch.ones(1, 1, 7, 7)
    assert load_published_weights(model, tensors) == ["h.0.attn.bias"]


def test_gamma_and_beta_of_old_bert_files_are_read():
    model = build(preset("bert-nano"))
    old = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): tensor
        for name, tensor in to_published_weights(model).items()
    }
    assert "bert.embeddings.LayerNorm.gamma" in old
    assert load_published_weights(model, old) == []


@pytest.mark.parametrize("name", [name for name in PRESETS if name.startswith(("gpt", "llama", "bert", "t5"))])
def test_every_preset_of_a_published_family_has_a_published_config(name):
    assert to_lossless_published_config(preset(name))["model_type"] in ALL


@pytest.mark.parametrize(
    ("name", "key"),
    [(name, key) for name, keys in {
        "gpt2": ["vocab_size", "n_positions", "n_embd", "n_head", "n_layer"],
        "llama": ["vocab_size", "max_position_embeddings", "hidden_size", "num_attention_heads", "num_hidden_layers"],
        "bert": ["vocab_size", "max_position_embeddings", "hidden_size", "num_attention_heads", "num_hidden_layers"],
        "marian": ["vocab_size", "max_position_embeddings", "d_model", "encoder_layers", "decoder_layers"],
        "bart": ["vocab_size", "max_position_embeddings", "d_model", "encoder_layers", "decoder_layers"],
        "t5": ["vocab_size", "d_model", "num_heads", "num_layers"],
    }.items() for key in keys],
)  # fmt: skip
def test_a_missing_key_is_reported_by_its_published_name(name, key):
    with pytest.raises(ConfigError, match=rf"^(\w+: )?{key}\b"):
        config_from_published({other: value for other, value in ALL[name].items() if other != key})


def test_missing_head_counts_are_reported_by_their_published_name():
    sides = ("encoder_attention_heads", "decoder_attention_heads")
    with pytest.raises(ConfigError, match=r"encoder_attention_heads\b"):
        config_from_published({key: value for key, value in BART.items() if key not in sides})


@pytest.mark.parametrize("name", [name for name in PRESETS if name.startswith("transformer")])
def test_the_original_transformer_has_no_published_format(name):
    with pytest.raises(ConfigError, match=r"marian.*sinusoid="):
        to_lossless_published_config(preset(name))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model_type": ["gpt2"]}, r"model_type=\['gpt2'\]"),
        ({"model_type": "gpt2", "activation_function": ["relu"]}, r"activation_function=\['relu'\]"),
        ({"model_type": "bert", "architectures": 5}, "architectures=5"),
        ({"model_type": "bert", "architectures": [["BertModel"]]}, r"architectures=\[\['BertModel'\]\]"),
        ({"model_type": "llama", "rope_scaling": {"type": ["linear"]}}, r"\['linear'\]"),
        ({"model_type": "t5", "vocab_size": 7, "d_model": 6, "num_heads": 3}, "num_layers"),
    ],
)
def test_invalid_configs_are_rejected_in_one_line(settings, message):
    with pytest.raises(ConfigError, match=message):
        config_from_published(settings)
