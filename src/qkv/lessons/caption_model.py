"""A small image captioning model for the lesson on pictures, with functions for training, generation and attention."""

from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from qkv.choices import NormPosition
from qkv.config import BeamConfig, Seq2SeqConfig, TrainingConfig
from qkv.data.pair_batches import PairBatch
from qkv.generation import FinishReason, LengthLimit, Seq2SeqDecodeEngine, beam_search
from qkv.inspection import record
from qkv.lessons.scenes import BEGIN, CAPTION_WORDS, END, PATCH, PATCHES_PER_ROW, UNSEEN_PAIRS, Scenes, draw_scenes
from qkv.models import Seq2Seq
from qkv.nn import Mask, Source
from qkv.tensors import Ids, Patches
from qkv.training import RunFolder, SignalInterrupt, Trainer, TrainingData
from qkv.training.loop import MetricsCallback
from qkv.training.step import build_train_step
from qkv.training.translation import translation_objective

CAPTION_CONFIG = Seq2SeqConfig(
    vocab_size=len(CAPTION_WORDS),
    share_embeddings=False,
    d_patch=3 * PATCH**2,
    context_length=PATCHES_PER_ROW**2,
    d_model=64,
    n_heads=4,
    d_ff=128,
    n_encoder_layers=1,
    n_decoder_layers=1,
    sliding_window=1,
    norm_position=NormPosition.PRE,
    final_norm=True,
    scale_embedding=False,
    init_std=0.1,
)
"""Config of the encoder–decoder from the 2017 paper, with one encoder layer, one decoder layer and image patches as its
source.

With `sliding_window=1`, each position in the encoder or decoder attends only to itself in self-attention. If patches
can attend to each other, the captions are equally good. For one of three seeds, however, the cross-attention weights
are on empty patches.
"""
BATCH_SIZE = 32
MAX_WORDS = 12
HELD_OUT_SEED = 1_000_003
"""Seed of the test images, which training never uses."""


def train_caption_model(*, seed: int, n_steps: int, report: MetricsCallback = lambda _entry: None) -> Seq2Seq:
    """Train a captioning model with the same trainer and objective that the translation models use."""
    model = Seq2Seq(CAPTION_CONFIG, seed=seed)
    training = TrainingConfig(
        steps=n_steps,
        batch_size=BATCH_SIZE,
        seq_len=MAX_WORDS,
        seed=seed,
        learning_rate=3e-3,
        min_lr_ratio=0.0,
        warmup_steps=n_steps // 20,
        weight_decay=0.01,
        beta2=0.98,
        eval_every=max(1, n_steps // 5),
        keep_checkpoints=1,
    )
    held_out = draw_scenes(200, rng=np.random.default_rng(HELD_OUT_SEED - 1), pairs=UNSEEN_PAIRS)
    data = TrainingData(
        batch=lambda t: _to_pair_batch(draw_scenes(BATCH_SIZE, rng=np.random.default_rng((seed, t)))),
        validation=lambda: [_to_pair_batch(held_out)],
    )
    with TemporaryDirectory() as folder:
        run = RunFolder.create(Path(folder))
        trainer = Trainer(
            build_train_step(model, training, lambda: translation_objective(model, training)),
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
def generate_captions(model: Seq2Seq, patches: Patches) -> list[list[int]]:
    """Generate a caption for each image greedily, stopping at `<end>` or after `MAX_WORDS` words."""
    n = len(patches)
    engine = Seq2SeqDecodeEngine(model, model.new_cache(batch=n, capacity=MAX_WORDS))
    logits = engine.prefill([[CAPTION_WORDS.index(BEGIN)]] * n, sources=model.encode(patches))
    limits = [LengthLimit(MAX_WORDS, FinishReason.LENGTH)] * n
    results = beam_search(
        engine, logits, limits, beam=BeamConfig(n_beams=1), stop_ids=frozenset({CAPTION_WORDS.index(END)})
    )
    return [best.ids for best, *_ in results]


@torch.inference_mode()
def mean_cross_attention_weights(model: Seq2Seq, patches: Patches, ids: Ids) -> Float[Tensor, "scene word patch"]:
    """Return the cross-attention weights used to predict each word, averaged over the heads."""
    with record(model, "decoder.blocks.0.cross_attention.weights") as cache:
        model(patches, _shift_right(ids))
    return cache["decoder.blocks.0.cross_attention.weights"].mean(1)


@torch.inference_mode()
def teacher_forced_word_accuracy(
    model: Seq2Seq, scenes: Scenes, *, masked_patches: Bool[Tensor, "scene patch"] | None = None
) -> Float[Tensor, " word"]:
    """Return the prediction accuracy at each word position, given the true preceding words.

    If `masked_patches` is given, the decoder cannot attend to these patches.
    """
    source = model.encode(scenes.patches)
    if masked_patches is not None:
        source = Source(states=source.states, mask=Mask(key_padding_mask=~masked_patches))
    predicted = model.decode(_shift_right(scenes.captions), source).argmax(-1)
    return (predicted == scenes.captions).float().mean(0)


def _shift_right(ids: Ids) -> Ids:
    return torch.cat((torch.full_like(ids[:, :1], CAPTION_WORDS.index(BEGIN)), ids[:, :-1]), dim=1)


def _to_pair_batch(scenes: Scenes) -> PairBatch:
    n, n_words = scenes.captions.shape
    return PairBatch(
        source=scenes.patches,
        source_lengths=torch.full((n,), PATCHES_PER_ROW**2),
        ids=_shift_right(scenes.captions),
        targets=scenes.captions,
        counts=torch.full((n,), n_words),
        n_rows_at_max_length=n,
    )
