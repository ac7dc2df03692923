"""Looking inside: record what passes a model's named places, change it, draw it."""

from qkv.inspection.change import change, cut_edge, head_off
from qkv.inspection.figures import HeatMap, heat_maps, new_figure
from qkv.inspection.names import matching, taps
from qkv.inspection.record import SeenAttention, Trace, record

__all__ = [
    "HeatMap",
    "SeenAttention",
    "Trace",
    "change",
    "cut_edge",
    "head_off",
    "heat_maps",
    "matching",
    "new_figure",
    "record",
    "taps",
]
