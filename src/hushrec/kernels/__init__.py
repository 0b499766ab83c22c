"""The fused loops. Each runs a whole stack of clients on one thread without the interpreter.

Everything here is a pure function of its arguments, written twice: here for speed, and in
``tests/reference.py`` the way one device would do it. The tests hold the two equal. Kernels
release the interpreter lock, so the backend runs several of them at once, one chunk of clients
each; nothing in a chunk depends on another chunk.

The loops that most methods share are taken from here; those of one family, and the values that
loops take, from their own modules.

Client stacks are ragged arrays: client c owns ``values[indptr[c]:indptr[c + 1]]``.
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
