"""Tests for CUDA graph capture of steps, with a stand-in for the capture on CPUs."""

import torch

from qkv.accel.cuda.graph_step import CUDAGraphStep


def test_a_replay_uses_the_new_inputs_and_other_shapes_run_eagerly():
    captures = []
    graph_step = CUDAGraphStep(capture=lambda work: captures.append(work) or work)
    for n, n_captures in ((3, 0), (3, 0), (5, 0), (3, 0), (3, 0), (3, 1), (3, 1), (5, 1), (3, 1)):
        x, y = torch.randn(n), torch.randn(n)
        expected = x - y
        assert torch.equal(graph_step((x, None, y), lambda inputs: inputs[0] - inputs[2]), expected)
        assert len(captures) == n_captures
