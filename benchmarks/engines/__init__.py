"""Scripts that run the benchmarked engines, each in a separate process."""
