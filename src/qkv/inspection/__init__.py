"""Looking inside: record what passes a model's named places, change it, show it as data, draw it.

`seen = see(task.model, read(task, "text"))`, then a view of it: `heads(seen)`, `attention_map(seen)`, `lens(seen,
task.tokenizer)` … Views are dataclasses of tensors and labels; `plain` makes JSON of them, `figure` a picture.
"""

from qkv.inspection.change import change, cut_edge, head_off
from qkv.inspection.contributions import Contributions, contributions
from qkv.inspection.embeddings import EmbeddingView, embeddings, neighbours, position_likeness
from qkv.inspection.figures import HeatMap, heat_maps, new_figure
from qkv.inspection.heads import PATTERNS, HeadsView, heads
from qkv.inspection.interventions import EdgeCut, Effect, HeadOff, Intervention, Patch, effect, idle_cuts, intervening
from qkv.inspection.lens import LensView, lens
from qkv.inspection.maps import MapView, attention_map, merge_words, sink_of, value_weighted, without_sink
from qkv.inspection.names import matching, taps
from qkv.inspection.neuron import NeuronView, neuron
from qkv.inspection.over_picture import PictureLooks, over_pictures
from qkv.inspection.pictures import View, figure
from qkv.inspection.plain import plain
from qkv.inspection.reading import Readable, Reading, Tokens, read, read_ids
from qkv.inspection.record import SeenAttention, Trace, record
from qkv.inspection.reference import ReferenceView, reference
from qkv.inspection.rollout import Rollout, rollout
from qkv.inspection.seeing import Seen, see
from qkv.inspection.stream import StreamView, head_writes, stream
from qkv.inspection.timeline import TimelineView, timeline

__all__ = [
    "PATTERNS",
    "Contributions",
    "EdgeCut",
    "Effect",
    "EmbeddingView",
    "HeadOff",
    "HeadsView",
    "HeatMap",
    "Intervention",
    "LensView",
    "MapView",
    "NeuronView",
    "Patch",
    "PictureLooks",
    "Readable",
    "Reading",
    "ReferenceView",
    "Rollout",
    "Seen",
    "SeenAttention",
    "StreamView",
    "TimelineView",
    "Tokens",
    "Trace",
    "View",
    "attention_map",
    "change",
    "contributions",
    "cut_edge",
    "effect",
    "embeddings",
    "figure",
    "head_off",
    "head_writes",
    "heads",
    "heat_maps",
    "idle_cuts",
    "intervening",
    "lens",
    "matching",
    "merge_words",
    "neighbours",
    "neuron",
    "new_figure",
    "over_pictures",
    "plain",
    "position_likeness",
    "read",
    "read_ids",
    "record",
    "reference",
    "rollout",
    "see",
    "sink_of",
    "stream",
    "taps",
    "timeline",
    "value_weighted",
    "without_sink",
]
