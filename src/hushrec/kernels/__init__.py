"""Numba kernels: each trains or scores a batch of clients on one thread.

Every kernel is a pure function of its arguments, or changes the arguments that it names. Tests
compare the kernels with the slow implementations in ``tests/reference.py``. Kernels release the
GIL, so a backend runs several at once, one batch of clients each; batches are independent.

This module exports the kernels that most methods share; those of one model family are imported
from their own modules.

Batches of clients are ragged arrays: client c owns ``values[indptr[c]:indptr[c + 1]]``.
"""

from hushrec.kernels.draws import (
    draw,
    draw_distinct_outside,
    draw_outside,
    list_samples,
    samples_of_epochs,
    shuffled_epochs,
)
from hushrec.kernels.inner_product import fit_inner_product, inner_products, rescore_own_rows
from hushrec.kernels.ragged import (
    add_dense,
    add_mean,
    add_rows,
    add_scattered,
    changed_rows,
    copy_ragged,
    number_by_first_use,
    put_rows,
    row_differences,
    rows_as_numbers,
    sorted_union,
    take_ragged,
)

__all__ = [
    "add_dense",
    "add_mean",
    "add_rows",
    "add_scattered",
    "changed_rows",
    "copy_ragged",
    "draw",
    "draw_distinct_outside",
    "draw_outside",
    "fit_inner_product",
    "inner_products",
    "list_samples",
    "number_by_first_use",
    "put_rows",
    "rescore_own_rows",
    "row_differences",
    "rows_as_numbers",
    "samples_of_epochs",
    "shuffled_epochs",
    "sorted_union",
    "take_ragged",
]
