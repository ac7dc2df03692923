"""Estimate parameters, FLOPs, bytes and time from a model config. This package never imports torch."""

from qkv.cost.estimate import Estimate, RunEstimate, estimate, estimate_run
from qkv.cost.explanation import AttentionCrossover, LayerCost, attention_crossover, compare_attention_with_rnn_costs
from qkv.cost.kernel_launch import CommunicationBytes, KernelLaunch, MemoryTraffic, list_kernel_launches
from qkv.cost.memory import MemoryEstimate, cache_bytes
from qkv.cost.operation import Flops, MatMul, Operation, ParameterCounts, Phase, SavedTensors
from qkv.cost.operations import count_flops, count_parameters, list_operations
from qkv.cost.workload import DeviceType, Mode, Precision, Sharding, Workload

__all__ = [
    "AttentionCrossover",
    "CommunicationBytes",
    "DeviceType",
    "Estimate",
    "Flops",
    "KernelLaunch",
    "LayerCost",
    "MatMul",
    "MemoryEstimate",
    "MemoryTraffic",
    "Mode",
    "Operation",
    "ParameterCounts",
    "Phase",
    "Precision",
    "RunEstimate",
    "SavedTensors",
    "Sharding",
    "Workload",
    "attention_crossover",
    "cache_bytes",
    "compare_attention_with_rnn_costs",
    "count_flops",
    "count_parameters",
    "estimate",
    "estimate_run",
    "list_kernel_launches",
    "list_operations",
]
