"""Numba kernels: each trains or scores a batch of clients on one thread.

Every kernel is a pure function of its arguments, or changes the arguments that it names. Tests
compare the kernels with the slow implementations in ``tests/reference.py``. Kernels release the
GIL, so a backend runs several at once, one batch of clients each; batches are independent.

Batches of clients are ragged arrays: client c owns ``values[indptr[c]:indptr[c + 1]]``.
"""
