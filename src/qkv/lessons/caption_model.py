"""How does a model put a picture into words? One that learns it within a minute, writes, and shows where it looked."""

from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from qkv.choices import NormPosition
from qkv.config import Seq2SeqConfig, TrainingConfig
from qkv.data.pair_batches import PairBatch
from qkv.generation import FinishReason, LengthLimit, Seq2SeqDecoder, beam_search
from qkv.generation.translate import GREEDY
from qkv.inspection import record
from qkv.lessons.scenes import BEGIN, END, N_ACROSS, PATCH, UNSEEN, WORDS, Scenes, draw_scenes
from qkv.models import Seq2Seq
from qkv.nn import Mask, Source
from qkv.tensors import Ids, Patches
from qkv.training import RunFolder, SignalInterrupt, Trainer, TrainingData
from qkv.training.trainer import Report
from qkv.training.translation import translation_objective

CONFIG = Seq2SeqConfig(
    vocab_size=len(WORDS), share_embeddings=False, d_patch=3 * PATCH**2, context_length=N_ACROSS**2, d_model=64,
    n_heads=4, d_ff=128, n_encoder_layers=1, n_decoder_layers=1, sliding_window=1, norm_position=NormPosition.PRE,
    final_norm=True, scale_embedding=False, init_std=0.1,
)  # fmt: skip
"""The 2017 paper's encoder–decoder, sinusoids included, with one layer each; only the source is another.

`window=1`: within a side each position sees itself alone. Where patches may see each other, they learn to carry what
they saw elsewhere: captions are as good, but in one of three seeds the look goes where nothing is to be seen.
"""
BATCH = 32
MOST_WORDS = 12
HELD_OUT = 1_000_003
"""Seed of what is asked at the end; no step of training draws from it."""


def learn(*, seed: int, n_steps: int, report: Report = lambda _entry: None) -> Seq2Seq:
    """A captioner, trained by the trainer that trains translators: a source, and the true words so far."""
    model = Seq2Seq(CONFIG, seed=seed)
    training = TrainingConfig(
        steps=n_steps, batch_size=BATCH, seq_len=MOST_WORDS, seed=seed, learning_rate=3e-3, min_lr_ratio=0.0,
        warmup_steps=n_steps // 20, weight_decay=0.01, beta2=0.98, eval_every=max(1, n_steps // 5), keep_checkpoints=1,
    )  # fmt: skip
    held_out = draw_scenes(200, chance=np.random.default_rng(HELD_OUT - 1), among=UNSEEN)
    data = TrainingData(
        batch=lambda t: _batch(draw_scenes(BATCH, chance=np.random.default_rng((seed, t)))),
        validation=lambda: [_batch(held_out)],
    )
    with TemporaryDirectory() as folder:
        run = RunFolder.create(Path(folder))
        trainer = Trainer(
            model,
            training,
            objective=translation_objective(model, training),
            data=data,
            run=run,
            texts={},
            report=report,
        )
        stop = trainer.train()
    if stop.signal is not None:
        raise SignalInterrupt(stop.signal)
    return model.eval()


@torch.inference_mode()
def captions(model: Seq2Seq, patches: Patches) -> list[list[int]]:
    """The likeliest word each time, until <end>: the search that translates, from a picture."""
    n = len(patches)
    decoder = Seq2SeqDecoder(model, model.encode(patches), capacity=MOST_WORDS)
    logits = decoder.step(torch.full((n,), WORDS.index(BEGIN)))
    limits = [LengthLimit(MOST_WORDS, FinishReason.LENGTH)] * n
    found = beam_search(decoder, logits, limits, beam=GREEDY, stop_ids=frozenset({WORDS.index(END)}))
    return [best.ids for best, *_ in found]


@torch.inference_mode()
def looks(model: Seq2Seq, patches: Patches, ids: Ids) -> Float[Tensor, "scene word patch"]:
    """Row t is the look that chose word t, the mean of the heads."""
    with record(model, "decoder.blocks.0.cross_attention.weights") as trace:
        model(patches, _before(ids))
    return trace["decoder.blocks.0.cross_attention.weights"].mean(1)


@torch.inference_mode()
def right_words(
    model: Seq2Seq, scenes: Scenes, *, hidden: Bool[Tensor, "scene patch"] | None = None
) -> Float[Tensor, " word"]:
    """How often each word is the right one after the true ones before it; no look may go where it is `hidden`."""
    source = model.encode(scenes.patches)
    if hidden is not None:
        source = Source(states=source.states, mask=Mask(key_padding_mask=~hidden))
    said = model.decode(_before(scenes.captions), source).argmax(-1)
    return (said == scenes.captions).float().mean(0)


def _before(ids: Ids) -> Ids:
    return torch.cat((torch.full_like(ids[:, :1], WORDS.index(BEGIN)), ids[:, :-1]), dim=1)


def _batch(scenes: Scenes) -> PairBatch:
    n, n_words = scenes.captions.shape
    return PairBatch(
        source=scenes.patches, source_lengths=torch.full((n,), N_ACROSS**2), ids=_before(scenes.captions),
        targets=scenes.captions, counts=torch.full((n,), n_words), full_batch_rows=n,
    )  # fmt: skip
