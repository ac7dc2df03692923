"""Arithmetic on configs: parameters, FLOPs and bytes, before they are spent. Never imports torch."""

from qkv.cost.estimate import Estimate, estimate
from qkv.cost.flops import Flops, flops
from qkv.cost.launch import Launch, launches
from qkv.cost.memory import Memory, Traffic, cache_bytes
from qkv.cost.operation import Kept, Operation, Phase, Product
from qkv.cost.operations import operations
from qkv.cost.parameters import Parameters, parameters
from qkv.cost.preflight import Preflight, preflight
from qkv.cost.workload import Mode, Precision, Workload

__all__ = [
    "Estimate",
    "Flops",
    "Kept",
    "Launch",
    "Memory",
    "Mode",
    "Operation",
    "Parameters",
    "Phase",
    "Precision",
    "Preflight",
    "Product",
    "Traffic",
    "Workload",
    "cache_bytes",
    "estimate",
    "flops",
    "launches",
    "operations",
    "parameters",
    "preflight",
]
