"""Steps are captured in a CUDA graph on a GPU. On a CPU, a stand-in for the capture calls the step function."""

import torch

from qkv.accel.cuda.graph_step import CUDAGraphStep, capture_graph


def test_a_replay_uses_the_new_inputs_and_other_shapes_run_eagerly(device):
    captures = []

    def capture(work):
        captures.append(work)
        return capture_graph(work) if device.type == "cuda" else work

    graph_step = CUDAGraphStep(capture=capture)
    for n, n_captures in ((3, 0), (3, 0), (5, 0), (3, 0), (3, 0), (3, 1), (3, 1), (5, 1), (3, 1)):
        x, y = torch.randn(n, device=device), torch.randn(n, device=device)
        expected = x - y
        assert torch.equal(graph_step((x, None, y), lambda inputs: inputs[0] - inputs[2]), expected)
        assert len(captures) == n_captures
