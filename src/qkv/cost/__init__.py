"""Arithmetic on configs: parameters, FLOPs and bytes, before they are spent. Never imports torch."""

from qkv.cost.estimate import Estimate, estimate
from qkv.cost.flops import Flops, flops
from qkv.cost.launch import Launch, launches
from qkv.cost.memory import Memory, cache_bytes
from qkv.cost.operation import Kept, Operation, Phase, Product
from qkv.cost.operations import operations
from qkv.cost.parameters import Parameters, parameters
from qkv.cost.preflight import Preflight, preflight
from qkv.cost.traffic import Traffic
from qkv.cost.update import Communication
from qkv.cost.words import Crossing, LayerCost, crossing, layers_compared
from qkv.cost.workload import Backend, Mode, Precision, Sharding, Workload

__all__ = [
    "Backend",
    "Communication",
    "Crossing",
    "Estimate",
    "Flops",
    "Kept",
    "Launch",
    "LayerCost",
    "Memory",
    "Mode",
    "Operation",
    "Parameters",
    "Phase",
    "Precision",
    "Preflight",
    "Product",
    "Sharding",
    "Traffic",
    "Workload",
    "cache_bytes",
    "crossing",
    "estimate",
    "flops",
    "launches",
    "layers_compared",
    "operations",
    "parameters",
    "preflight",
]
