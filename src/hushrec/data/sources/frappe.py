"""Frappe: apps, the context of their use, and the figures of the app shop."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from hushrec.data.interactions import Categorical, Column, Interactions, Numeric
from hushrec.data.sources import DataFolder, DataSet


def _read(folder: DataFolder) -> Interactions:
    data = folder.interactions("frappe.csv")
    head, *rows = folder.lines("frappe.csv", "\t")
    # The categories of a published file are as public as the file.
    columns = {head[k]: [row[k] for row in rows] for k in range(3, len(head))}
    context: dict[str, Column] = {
        column: Categorical.of(entries, sorted(set(entries) - {""}))
        for column, entries in columns.items()
    }
    data = replace(data, context=context)
    apps = folder.rows("meta.csv", "\t", header=True)
    if not apps:
        return data
    head = folder.lines("meta.csv", "\t")[0]
    name, category, price, downloads, language, rating = (
        head.index(column)
        for column in ("name", "category", "price", "downloads", "language", "rating")
    )
    listed = [apps[item] for item in data.items]
    described: dict[str, Column] = {
        "category": Categorical.of(row[category] for row in listed),
        "price": Categorical.of(_price_kind(row[price]) for row in listed),
        # The shop's own figures: classes of installations all over the world, and its stars.
        "downloads": Categorical.of(row[downloads] for row in listed),
        "language": Categorical.of(row[language] for row in listed),
        "rating": _numbers((row[rating] for row in listed), 0.0, 5.0),
    }
    titles = [
        str(item) if row[name] in ("", "unknown") else row[name]
        for item, row in zip(data.items, listed, strict=True)
    ]
    return replace(data, titles=np.array(titles), item_features=described)


def _price_kind(price: str) -> str:
    return {"Free": "free", "unknown": "unknown"}.get(price, "paid")


def _numbers(entries: Iterable[str], low: float, high: float) -> Numeric:
    """Read numbers; the median replaces missing ones, so that no NaN goes on."""
    known = np.array(
        [float(e) if e.replace(".", "", 1).isdecimal() else np.nan for e in entries], np.float32
    )
    filled = np.where(np.isnan(known), np.nanmedian(known), known)
    return Numeric(filled.astype(np.float32), low, high)


FRAPPE = DataSet(
    name="frappe",
    title="Frappe: app usage in context",
    licence="research use, acknowledge; no redistribution, no de-anonymising, no commercial use "
    "without permission",
    citation="L. Baltrunas, K. Church, A. Karatzoglou, N. Oliver. 2015. Frappe: Understanding the "
    "Usage and Perception of Mobile App Recommendations In-The-Wild. arXiv:1505.03014.",
    users=957,
    items=4_082,
    rows=96_203,
    loader=_read,
    files={
        "frappe.csv": "409edc12f4e2153c5dd58ae171938735911d9b0f70961d5f1086b241656b2cb5",
        "meta.csv": "de87f6b2e7cd0428f9179167e2e7826b5dd3bf490d5af680261b685763ac214f",
    },
)
