"""Speed and memory of hushrec, as ratios measured in one run: ``python -m benchmarks``."""
