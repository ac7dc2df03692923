"""Position tables are computed once under torch.compile and equal the eager ones."""

import pytest
import torch

from qkv.accel.cuda.fused_modules import find_fused_replacement
from qkv.accel.cuda.materialize import materialize_under_compile
from qkv.accel.swap import ModuleSwap
from qkv.choices import PositionKind
from qkv.config import GPTConfig
from qkv.models import GPT

pytestmark = [
    pytest.mark.compiled,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # raised inside torch.compile
]
SIZE = {"vocab_size": 37, "context_length": 13, "d_model": 12, "n_heads": 3}


@pytest.mark.parametrize(
    ("positions", "n_tables"),
    [(PositionKind.ROTARY, 2), (PositionKind.SINUSOIDAL, 1), (PositionKind.CONCATENATED, 1)],
)
def test_a_compiled_pass_computes_its_angles_once_for_all_layers(device, positions, n_tables):
    model = GPT(GPTConfig(**SIZE, n_layers=3, positions=positions), seed=1).to(device)
    ids = torch.randint(37, (2, 13), generator=torch.Generator().manual_seed(2)).to(device)
    graphs = []

    def capture_graph(graph, _inputs):
        graphs.append(graph)
        return graph.forward

    with ModuleSwap(model, find_fused_replacement):
        actual = torch.compile(model, backend=capture_graph, fullgraph=True)(ids)
    steps = [str(node.target) for node in graphs[0].graph.nodes]
    assert sum("opaque_clone" in step for step in steps) == n_tables
    assert torch.equal(actual, model(ids))


def test_an_exported_program_contains_only_torch_operators(device):
    model = GPT(GPTConfig(**SIZE, n_layers=1, positions=PositionKind.ROTARY), seed=1).to(device)
    with ModuleSwap(model, find_fused_replacement):
        program = torch.export.export(model.eval(), (torch.tensor([[2, 3, 5]], device=device),))
    assert not [node for node in program.graph.nodes if str(node.target).startswith("qkv")]


def test_the_eager_implementation_does_not_copy_the_table():
    table = torch.zeros(3)
    assert materialize_under_compile(table) is table
