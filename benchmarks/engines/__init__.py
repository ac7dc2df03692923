"""Scripts that each run one benchmarked engine in a separate process."""
