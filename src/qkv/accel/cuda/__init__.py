"""Fast paths for NVIDIA GPUs: Triton kernels, CUDA graphs, variable-length encoding and fused training modules."""
