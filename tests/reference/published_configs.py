"""Published architectures with random weights, used by `test_transformers.py`."""

from dataclasses import dataclass
from typing import Any

import torch
import transformers as hf

hf.logging.set_verbosity_error()  # it warns about token ids outside these tiny vocabularies
BACKBONES = (hf.BertModel, hf.DistilBertModel, hf.RobertaModel)
NO_IDS = {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}


@dataclass(frozen=True)
class Case:
    """One published architecture."""

    model: type
    config: type
    settings: dict[str, Any]

    @property
    def prefix(self) -> str:
        """What a bare backbone leaves off before its names."""
        return f"{self.model.base_model_prefix}." if self.model in BACKBONES else ""

    def published(self) -> Any:
        """Every number is random, biases and norms too, and large: a swapped pair cannot hide behind zeros."""
        torch.manual_seed(7)
        model = self.model(self.config(**{**NO_IDS, **self.settings})).eval()
        if self.config is hf.T5Config and not model.config.scale_decoder_outputs:
            # `transformers` ties T5 1.1 until it loads a file with a separate matrix, as the published files have.
            model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.clone())
        # If the matrix is not tied, this bias has a second, unused copy. Both get the same values.
        if self.model in (hf.BertForMaskedLM, hf.BertForPreTraining):
            model.cls.predictions.bias = model.cls.predictions.decoder.bias
        if self.model is hf.RobertaForMaskedLM:
            model.lm_head.bias = model.lm_head.decoder.bias
        with torch.no_grad():
            for name, tensor in model.state_dict().items():
                if "embed_positions" in name and self.config is hf.MarianConfig:
                    continue  # fixed sinusoids
                scales = "bias" not in name and ("norm" in name.lower() or ".ln_" in name)
                tensor.normal_(std=0.3).add_(1.0 if scales else 0.0)
        return model


GPT2 = {"vocab_size": 31, "n_positions": 23}
LLAMA = {"vocab_size": 31, "max_position_embeddings": 41}
BART = {"vocab_size": 31, "max_position_embeddings": 23}
T5 = {"vocab_size": 31}


def sides(n_encoder: int, n_decoder: int, heads: int, d_ff: int) -> dict[str, int]:
    return {
        "encoder_layers": n_encoder, "decoder_layers": n_decoder, "encoder_attention_heads": heads,
        "decoder_attention_heads": heads, "encoder_ffn_dim": d_ff, "decoder_ffn_dim": d_ff,
    }  # fmt: skip


DECODERS = {
    "gpt2": Case(hf.GPT2LMHeadModel, hf.GPT2Config, {**GPT2, "n_embd": 35, "n_head": 5, "n_layer": 2}),
    "gpt2, wide, untied": Case(
        hf.GPT2LMHeadModel,
        hf.GPT2Config,
        {**GPT2, "n_embd": 21, "n_head": 3, "n_layer": 3, "n_inner": 37, "tie_word_embeddings": False},
    ),
    "gpt2, exact gelu, unscaled": Case(
        hf.GPT2LMHeadModel,
        hf.GPT2Config,
        {
            **GPT2, "n_embd": 26, "n_head": 2, "n_layer": 2, "activation_function": "gelu",
            "scale_attn_weights": False, "layer_norm_epsilon": 1e-2,
        },
    ),
    "llama, grouped heads": Case(
        hf.LlamaForCausalLM,
        hf.LlamaConfig,
        {
            **LLAMA, "hidden_size": 60, "intermediate_size": 37, "num_hidden_layers": 2,
            "num_attention_heads": 6, "num_key_value_heads": 2,
        },
    ),
    "llama, one key/value head, tied, biased": Case(
        hf.LlamaForCausalLM,
        hf.LlamaConfig,
        {
            **LLAMA, "hidden_size": 42, "intermediate_size": 29, "num_hidden_layers": 3,
            "num_attention_heads": 3, "num_key_value_heads": 1, "tie_word_embeddings": True,
            "attention_bias": True, "mlp_bias": True,
        },
    ),
    "llama, own head width, other base": Case(
        hf.LlamaForCausalLM,
        hf.LlamaConfig,
        {
            **LLAMA, "hidden_size": 35, "intermediate_size": 43, "num_hidden_layers": 2,
            "num_attention_heads": 5, "head_dim": 22, "rms_norm_eps": 1e-2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
        },
    ),
    "llama, linear scaling": Case(
        hf.LlamaForCausalLM,
        hf.LlamaConfig,
        {
            **LLAMA, "hidden_size": 28, "intermediate_size": 29, "num_hidden_layers": 2, "num_attention_heads": 2,
            "rope_parameters": {"rope_type": "linear", "rope_theta": 700.0, "factor": 3.0},
        },
    ),
    # Rotations in 29 positions: 4.6 (unchanged), 2.4 and 1.2 (interpolated), 0.6 down to 0.09 (divided).
    "llama, llama3 scaling": Case(
        hf.LlamaForCausalLM,
        hf.LlamaConfig,
        {
            **LLAMA, "hidden_size": 42, "intermediate_size": 29, "num_hidden_layers": 2, "num_attention_heads": 3,
            "rope_parameters": {
                "rope_type": "llama3", "rope_theta": 100.0, "factor": 5.0, "low_freq_factor": 1.0,
                "high_freq_factor": 4.0, "original_max_position_embeddings": 29,
            },
        },
    ),
    "mistral, window": Case(
        hf.MistralForCausalLM,
        hf.MistralConfig,
        {
            **LLAMA, "hidden_size": 28, "intermediate_size": 29, "num_hidden_layers": 2,
            "num_attention_heads": 2, "num_key_value_heads": 1, "sliding_window": 5,
        },
    ),
}  # fmt: skip


def bert(d_model: int, n_layers: int, n_heads: int, d_ff: int, **more: Any) -> dict[str, Any]:
    names = {"hidden_size": d_model, "num_hidden_layers": n_layers, "num_attention_heads": n_heads}
    return {
        "vocab_size": 31,
        "max_position_embeddings": 23,
        **names,
        "intermediate_size": d_ff,
        "num_labels": 5,
        **more,
    }


def distilbert(d_model: int, n_layers: int, n_heads: int, d_ff: int, **more: Any) -> dict[str, Any]:
    names = {"dim": d_model, "n_layers": n_layers, "n_heads": n_heads, "hidden_dim": d_ff}
    return {"vocab_size": 31, "max_position_embeddings": 23, **names, "num_labels": 5, **more}


ENCODER_HEADS = {
    "bert": {
        "backbone": hf.BertModel,
        "both games": hf.BertForPreTraining,
        "masked words": hf.BertForMaskedLM,
        "next sentence": hf.BertForNextSentencePrediction,
        "classes": hf.BertForSequenceClassification,
    },
    "distilbert": {
        "backbone": hf.DistilBertModel,
        "masked words": hf.DistilBertForMaskedLM,
        "classes": hf.DistilBertForSequenceClassification,
    },
    "roberta": {
        "backbone": hf.RobertaModel,
        "masked words": hf.RobertaForMaskedLM,
        "classes": hf.RobertaForSequenceClassification,
    },
}
ENCODER_SHAPES = {
    "bert": [
        bert(35, 2, 5, 43),
        bert(21, 3, 3, 17, type_vocab_size=3, hidden_act="relu", num_labels=1),
        bert(26, 1, 2, 29, hidden_act="gelu_new", layer_norm_eps=1e-2, tie_word_embeddings=False),
    ],
    "distilbert": [distilbert(35, 2, 5, 43), distilbert(22, 3, 1, 29, activation="relu", tie_word_embeddings=False)],
    "roberta": [
        bert(35, 2, 5, 43, type_vocab_size=1, pad_token_id=1),
        bert(26, 3, 2, 17, layer_norm_eps=1e-2, pad_token_id=3, tie_word_embeddings=False),
    ],
}
ENCODERS = {
    f"{family}, {head}, {i}": Case(model, model.config_class, settings)
    for family, heads in ENCODER_HEADS.items()
    for head, model in heads.items()
    for i, settings in enumerate(ENCODER_SHAPES[family])
}
PAIRS = {
    "marian, swish": Case(
        hf.MarianMTModel,
        hf.MarianConfig,
        {**BART, **sides(2, 3, 5, 37), "d_model": 30, "activation_function": "swish", "scale_embedding": True},
    ),
    "marian, relu, unscaled": Case(
        hf.MarianMTModel,
        hf.MarianConfig,
        {**BART, **sides(3, 1, 3, 17), "d_model": 42, "activation_function": "relu"},
    ),
    "marian, gelu, two vocabularies": Case(
        hf.MarianMTModel,
        hf.MarianConfig,
        {
            **BART, **sides(1, 2, 2, 29), "d_model": 26, "decoder_vocab_size": 37,
            "share_encoder_decoder_embeddings": False, "scale_embedding": True,
        },
    ),
    "bart": Case(
        hf.BartForConditionalGeneration, hf.BartConfig, {**BART, **sides(2, 3, 5, 37), "d_model": 35}
    ),
    "bart, scaled": Case(
        hf.BartForConditionalGeneration,
        hf.BartConfig,
        {**BART, **sides(3, 1, 3, 17), "d_model": 21, "scale_embedding": True},
    ),
    "bart, relu": Case(
        hf.BartForConditionalGeneration,
        hf.BartConfig,
        {**BART, **sides(1, 2, 1, 11), "d_model": 13, "activation_function": "relu"},
    ),
    "t5 1.0": Case(
        hf.T5ForConditionalGeneration,
        hf.T5Config,
        {**T5, "d_model": 35, "d_kv": 6, "num_heads": 5, "d_ff": 37, "num_layers": 2, "num_decoder_layers": 3},
    ),
    "t5 1.1": Case(
        hf.T5ForConditionalGeneration,
        hf.T5Config,
        {
            **T5, "d_model": 22, "d_kv": 13, "num_heads": 3, "d_ff": 17, "num_layers": 3,
            "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False,
        },
    ),
    "t5, few buckets": Case(
        hf.T5ForConditionalGeneration,
        hf.T5Config,
        {
            **T5, "d_model": 26, "d_kv": 7, "num_heads": 2, "d_ff": 29, "num_layers": 1, "num_decoder_layers": 2,
            "relative_attention_num_buckets": 8, "relative_attention_max_distance": 9,
            "feed_forward_proj": "gated-silu", "layer_norm_epsilon": 1e-2,
        },
    ),
}  # fmt: skip
CASES = {**DECODERS, **ENCODERS, **PAIRS}
