"""Record, analyze, change and plot a model's activations.

Run a model once with `cache = run_with_cache(task.model, prepare_input(task, "text"))`, then compute a view of the
cached activations: `classify_heads(cache)`, `attention_map(cache)`, `logit_lens(cache, task.tokenizer)`, and so on.
Views are dataclasses of tensors and labels. `to_jsonable` converts them to JSON, and `plot_view` plots them.
"""

from qkv.inspection.activation_cache import ActivationCache, run_with_cache
from qkv.inspection.attention_map import (
    AttentionMapView,
    attention_map,
    merge_subwords,
    remove_sink,
    sink_mask,
    value_weighted_attention,
)
from qkv.inspection.coreference import CoreferenceView, coreference
from qkv.inspection.embeddings import EmbeddingView, embedding_trajectories, nearest_tokens, position_similarity
from qkv.inspection.figures import Heatmap, new_figure, plot_heatmaps
from qkv.inspection.heads import PATTERNS, HeadsView, classify_heads
from qkv.inspection.hooks import ablate_head, intervene, mask_attention
from qkv.inspection.image_attention import ImageAttention, plot_image_attention
from qkv.inspection.interventions import (
    ActivationPatch,
    EdgeMask,
    HeadAblation,
    Intervention,
    InterventionEffect,
    apply_interventions,
    find_ineffective_masks,
    measure_effect,
)
from qkv.inspection.jsonable import to_jsonable
from qkv.inspection.logit_attribution import LogitAttribution, logit_attribution
from qkv.inspection.logit_lens import LogitLensView, logit_lens
from qkv.inspection.model_input import (
    ModelInput,
    ModelWithTokenizer,
    TokenizedText,
    prepare_gpt_input_from_ids,
    prepare_input,
)
from qkv.inspection.neuron_view import NeuronView, compute_neuron_view
from qkv.inspection.plot import View, plot_view
from qkv.inspection.record import ActivationRecord, AttentionRecord, record
from qkv.inspection.residual_stream import ResidualStreamView, head_outputs, residual_stream_norms
from qkv.inspection.rollout import AttentionRollout, attention_rollout
from qkv.inspection.taps import match_taps, named_taps
from qkv.inspection.timeline import TrainingTimelineView, checkpoint_timeline

__all__ = [
    "PATTERNS",
    "ActivationCache",
    "ActivationPatch",
    "ActivationRecord",
    "AttentionMapView",
    "AttentionRecord",
    "AttentionRollout",
    "CoreferenceView",
    "EdgeMask",
    "EmbeddingView",
    "HeadAblation",
    "HeadsView",
    "Heatmap",
    "ImageAttention",
    "Intervention",
    "InterventionEffect",
    "LogitAttribution",
    "LogitLensView",
    "ModelInput",
    "ModelWithTokenizer",
    "NeuronView",
    "ResidualStreamView",
    "TokenizedText",
    "TrainingTimelineView",
    "View",
    "ablate_head",
    "apply_interventions",
    "attention_map",
    "attention_rollout",
    "checkpoint_timeline",
    "classify_heads",
    "compute_neuron_view",
    "coreference",
    "embedding_trajectories",
    "find_ineffective_masks",
    "head_outputs",
    "intervene",
    "logit_attribution",
    "logit_lens",
    "mask_attention",
    "match_taps",
    "measure_effect",
    "merge_subwords",
    "named_taps",
    "nearest_tokens",
    "new_figure",
    "plot_heatmaps",
    "plot_image_attention",
    "plot_view",
    "position_similarity",
    "prepare_gpt_input_from_ids",
    "prepare_input",
    "record",
    "remove_sink",
    "residual_stream_norms",
    "run_with_cache",
    "sink_mask",
    "to_jsonable",
    "value_weighted_attention",
]
