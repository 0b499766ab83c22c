"""The fused loops. Each runs a whole stack of clients on one thread without the interpreter.

Everything here is a pure function of its arguments, written twice: here for speed, and in
``tests/reference.py`` the way one device would do it. The tests hold the two equal. Kernels
release the interpreter lock, so the backend runs several of them at once, one chunk of clients
each; nothing in a chunk depends on another chunk.

The loops that most methods share are taken from here; those of one family from its own module.

Client stacks are ragged arrays: client c owns ``values[indptr[c]:indptr[c + 1]]``.
"""

from hushrec.kernels.draws import (
    below,
    draw,
    draw_distinct_outside,
    draw_outside,
    draw_samples,
    list_outside,
    nth_outside,
    shuffled_epochs,
)
from hushrec.kernels.guidance import gates, guide
from hushrec.kernels.inner_product import (
    ANY_ORDER,
    fit_inner_product,
    fit_pooled,
    inner_products,
    rescore_own_rows,
    sigmoid,
)
from hushrec.kernels.ragged import (
    add_dense,
    add_mean,
    add_rows,
    changed_rows,
    copy_ragged,
    places,
    put_rows,
    row_differences,
    rows_as_numbers,
    sorted_union,
    take_ragged,
)

__all__ = [
    "ANY_ORDER",
    "add_dense",
    "add_mean",
    "add_rows",
    "below",
    "changed_rows",
    "copy_ragged",
    "draw",
    "draw_distinct_outside",
    "draw_outside",
    "draw_samples",
    "fit_inner_product",
    "fit_pooled",
    "gates",
    "guide",
    "inner_products",
    "list_outside",
    "nth_outside",
    "places",
    "put_rows",
    "rescore_own_rows",
    "row_differences",
    "rows_as_numbers",
    "shuffled_epochs",
    "sigmoid",
    "sorted_union",
    "take_ragged",
]
