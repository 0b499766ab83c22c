"""Tests of Flower's processes need the extra 'flower'."""

from importlib.util import find_spec

NEED_FLOWER = [
    *("test_coordinator.py", "test_examples.py", "test_federation.py", "test_flower.py"),
    *("test_gateway.py", "test_processes.py"),
]
collect_ignore = [] if find_spec("flwr") else NEED_FLOWER
