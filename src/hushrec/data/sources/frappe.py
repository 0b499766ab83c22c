"""Frappe: apps, the context of their use, and the figures of the app shop."""

from __future__ import annotations

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
    listed = {column: [apps[item][k] for item in data.items] for k, column in enumerate(head)}
    price = {"Free": "free", "unknown": "unknown"}
    # A missing rating is NaN, which the median replaces: no NaN goes on.
    rated = (float(e) if e.replace(".", "", 1).isdecimal() else np.nan for e in listed["rating"])
    stars = np.fromiter(rated, np.float32)
    filled = np.where(np.isnan(stars), np.nanmedian(stars), stars).astype(np.float32)
    described: dict[str, Column] = {
        "category": Categorical.of(listed["category"]),
        "price": Categorical.of(price.get(entry, "paid") for entry in listed["price"]),
        # The shop's own figures: classes of installations all over the world, and its stars.
        "downloads": Categorical.of(listed["downloads"]),
        "language": Categorical.of(listed["language"]),
        "rating": Numeric(filled, 0.0, 5.0),
    }
    named = zip(data.items, listed["name"], strict=True)
    titles = [str(item) if name in ("", "unknown") else name for item, name in named]
    return replace(data, titles=np.array(titles), item_features=described)


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
