"""Which encoder layer does each decoder layer read? Lecture E's quiz, for the lessons who-sees-whom and quiz."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from qkv.config import Seq2SeqConfig
from qkv.inspection import record
from qkv.lessons.console import print_table, print_text
from qkv.models import Seq2Seq

N_LAYERS = 3
IDS = torch.arange(5)[None]
OTHER = 5
"""The id put in another token's place."""


def new_model(seed: int = 0) -> Seq2Seq:
    """A new encoder–decoder: random weights, the wiring of all of them. In float64, so that equal means equal."""
    config = Seq2SeqConfig(
        vocab_size=6, context_length=8, d_model=32, n_heads=2, n_encoder_layers=N_LAYERS,
        n_decoder_layers=N_LAYERS, init_std=0.2,
    )  # fmt: skip
    return Seq2Seq(config, seed=seed).double().eval()


def gaps(seq2seq: Seq2Seq) -> Float[Tensor, "decoder_layer encoder_layer"]:
    """max|keys of a decoder layer's cross-attention − the keys it would make of an encoder layer's output|."""
    found = torch.zeros(N_LAYERS, N_LAYERS)
    with (
        record(seq2seq, "encoder.blocks.*.resid_post", "decoder.blocks.*.cross_attention.keys") as trace,
        torch.no_grad(),
    ):
        seq2seq(IDS, IDS)
        for i in range(N_LAYERS):
            keys = trace[f"decoder.blocks.{i}.cross_attention.keys"].transpose(1, 2).flatten(2)
            project = seq2seq.get_submodule(f"decoder.blocks.{i}.cross_attention.k_proj")
            for j in range(N_LAYERS):
                found[i, j] = (keys - project(trace[f"encoder.blocks.{j}.resid_post"])).abs().max()
    return found


def drawn() -> dict[str, Bool[Tensor, "decoder_layer encoder_layer"]]:
    """Four wirings one may draw; True: this decoder layer reads that encoder layer."""
    last, every = torch.zeros(2, N_LAYERS, N_LAYERS, dtype=torch.bool)
    last[-1, -1] = True
    every[:, -1] = True
    return {
        "encoder layer l → decoder layer l": torch.eye(N_LAYERS, dtype=torch.bool),
        "last encoder layer → first decoder layer": last.flip(0),
        "last encoder layer → last decoder layer": last,
        "last encoder layer → every decoder layer": every,
    }


def answer(seq2seq: Seq2Seq) -> None:
    """Print the measured wiring, and which of the four it is."""
    measured = gaps(seq2seq)
    print_table(["max|difference| of its keys from", *(f"encoder layer {j}" for j in range(N_LAYERS))], [
        (f"decoder layer {i}", *row) for i, row in enumerate(measured.tolist())
    ])  # fmt: skip
    print_text("0: these keys are made of that layer's output. Four wirings one may draw, as E's quiz does:")
    print_table(
        ["wiring", "as measured?"],
        [(name, "yes: correct" if torch.equal(m, measured == 0) else "no") for name, m in drawn().items()],
    )
