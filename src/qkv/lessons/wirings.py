"""Measure which encoder layer each decoder layer attends to (for the lessons who-sees-whom and quiz)."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from qkv.config import Seq2SeqConfig
from qkv.inspection import record
from qkv.lessons.console import print_table, print_text
from qkv.models import Seq2Seq

N_STACK_LAYERS = 3
IDS = torch.arange(5)[None]
REPLACEMENT_ID = 5
"""Id of the token that replaces another token."""


def build_float64_seq2seq(seed: int = 0) -> Seq2Seq:
    """Build an untrained encoder–decoder in float64, which makes rounding errors negligible."""
    config = Seq2SeqConfig(
        vocab_size=6, context_length=8, d_model=32, n_heads=2, n_encoder_layers=N_STACK_LAYERS,
        n_decoder_layers=N_STACK_LAYERS, init_std=0.2,
    )  # fmt: skip
    return Seq2Seq(config, seed=seed).double().eval()


def max_cross_attention_key_differences(seq2seq: Seq2Seq) -> Float[Tensor, "decoder_layer encoder_layer"]:
    """Compare each decoder layer's cross-attention keys with its projections of each encoder layer's output.

    Return the largest absolute difference for each pair of layers.
    """
    differences = torch.zeros(N_STACK_LAYERS, N_STACK_LAYERS)
    with (
        record(seq2seq, "encoder.blocks.*.resid_post", "decoder.blocks.*.cross_attention.keys") as cache,
        torch.no_grad(),
    ):
        seq2seq(IDS, IDS)
        for i in range(N_STACK_LAYERS):
            keys = cache[f"decoder.blocks.{i}.cross_attention.keys"].transpose(1, 2).flatten(2)
            k_proj = seq2seq.get_submodule(f"decoder.blocks.{i}.cross_attention.k_proj")
            for j in range(N_STACK_LAYERS):
                differences[i, j] = (keys - k_proj(cache[f"encoder.blocks.{j}.resid_post"])).abs().max()
    return differences


def quiz_answer_wirings() -> dict[str, Bool[Tensor, "decoder_layer encoder_layer"]]:
    """Return the four quiz answers as tables. `True` means that a decoder layer attends to an encoder layer."""
    last_only, all_layers = torch.zeros(2, N_STACK_LAYERS, N_STACK_LAYERS, dtype=torch.bool)
    last_only[-1, -1] = True
    all_layers[:, -1] = True
    return {
        "encoder layer l → decoder layer l": torch.eye(N_STACK_LAYERS, dtype=torch.bool),
        "last encoder layer → first decoder layer": last_only.flip(0),
        "last encoder layer → last decoder layer": last_only,
        "last encoder layer → every decoder layer": all_layers,
    }


def print_cross_attention_wiring(seq2seq: Seq2Seq) -> None:
    """Print the measured wiring, and whether each of the four quiz answers is correct."""
    differences = max_cross_attention_key_differences(seq2seq)
    print_table(["max|difference| of keys from", *(f"encoder layer {j}" for j in range(N_STACK_LAYERS))], [
        (f"decoder layer {i}", *row) for i, row in enumerate(differences.tolist())
    ])  # fmt: skip
    print_text(
        "A difference of 0 means that the decoder layer computes its keys from the output of that encoder layer. The "
        "next table compares the four answers of the quiz in lecture E with this measurement."
    )
    print_table(
        ["wiring", "agrees with the measurement"],
        [
            (name, "yes: correct" if torch.equal(m, differences == 0) else "no")
            for name, m in quiz_answer_wirings().items()
        ],
    )
