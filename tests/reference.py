"""Slow, obvious twins of the fast paths: one device at a time, the way a reader would write it.

Nothing here imports `hushrec.kernels`. Random numbers are plain Python integers, training is torch
autograd, sums are float64, ranks are counted in a loop.
"""

import numpy as np
import torch

MASK = 2**64 - 1
GOLDEN = 0x9E3779B97F4A7C15


# ------------------------------------------------------------------ random numbers by address


def mix(word: int) -> int:
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB & MASK
    return word ^ (word >> 31)


def draw(key, user: int, position: int) -> int:
    low, high = (int(word) for word in key)
    counter = mix((low + (int(user) & MASK) * GOLDEN) & MASK)
    return mix(mix((counter + position * GOLDEN) & MASK) ^ high)


def below(word: int, bound: int) -> int:
    return (word >> 32) * bound >> 32


class Stream:
    """One user's numbers under a key, in order."""

    def __init__(self, key, user):
        self.key, self.user, self.position = key, int(user), 0

    def below(self, bound: int) -> int:
        self.position += 1
        return below(draw(self.key, self.user, self.position - 1), bound)


def negatives(stream: Stream, excluded, n_items: int, count: int) -> list[int]:
    """Draw items outside the exclusions, with repeats; none where nothing is outside."""
    outside = np.setdiff1d(np.arange(n_items), excluded)
    return [int(outside[stream.below(len(outside))]) for _ in range(count)] if len(outside) else []


# ------------------------------------------------------------------ one device


def samples(stream: Stream, positives, excluded, n_items: int, per_positive: int):
    """Return [(item, label)]: every positive followed by its negatives."""
    out = []
    for item in positives:
        out.append((int(item), 1.0))
        out += [(n, 0.0) for n in negatives(stream, excluded, n_items, per_positive)]
    return out


def shuffle(stream: Stream, things: list) -> None:
    """Fisher and Yates, from the end."""
    for last in range(len(things) - 1, 0, -1):
        other = stream.below(last + 1)
        things[last], things[other] = things[other], things[last]


def fit_device(
    key,
    user,
    positives,
    excluded,
    table,
    vector,
    bias,
    *,
    negatives,
    epochs,
    batch,
    rate,
    item_rate,
    with_bias,
    two_steps,
    clip=None,
):
    """Train one device by autograd; return (table, vector, bias, touched items, mean loss)."""
    dtype = torch.float64 if table.dtype == np.float64 else torch.float32
    items = torch.tensor(table, dtype=dtype, requires_grad=True)
    w = torch.tensor(vector, dtype=dtype, requires_grad=True)
    b = torch.tensor(float(bias), dtype=dtype, requires_grad=with_bias)
    own = torch.optim.SGD([w, b] if with_bias else [w], lr=float(rate))
    rows = torch.optim.SGD([items], lr=float(item_rate))
    criterion = torch.nn.BCEWithLogitsLoss()

    stream = Stream(key, user)
    seen = samples(stream, positives, excluded, len(table), negatives)
    touched = list(dict.fromkeys(item for item, _ in seen))
    losses = []
    for _ in range(epochs):
        shuffle(stream, seen)
        for start in range(0, len(seen), batch):
            part = seen[start : start + batch]
            ids = torch.tensor([item for item, _ in part])
            labels = torch.tensor([label for _, label in part], dtype=dtype)

            def loss_now(ids=ids, labels=labels):
                own.zero_grad()
                rows.zero_grad()
                loss = criterion(items[ids] @ w + b, labels)
                loss.backward()
                if clip is not None:
                    everything = [items, w, b] if with_bias else [items, w]
                    torch.nn.utils.clip_grad_norm_(everything, clip)
                return loss

            losses.append(loss_now().item() * len(part))
            own.step()
            if two_steps:
                loss_now()
                rows.step()
            else:
                # The gradient of the rows was taken before the vector moved.
                rows.step()
    mean_loss = sum(losses) / (epochs * len(seen)) if seen else 0.0
    return items.detach().numpy(), w.detach().numpy(), b.item(), touched, mean_loss


def fit_additive_device(
    key,
    user,
    positives,
    excluded,
    common,
    personal,
    vector,
    bias,
    *,
    negatives,
    epochs,
    batch,
    rate,
    table_rate,
    batch_decay,
    weight_decay,
    difference,
    ridge,
    personal_rate,
    with_bias,
):
    """FedRAP's device by autograd, on whole tables.

    Returns (common, personal, vector, bias, loss, sum of the rates of the common table's steps).
    """
    dtype = torch.float64
    c = torch.tensor(common, dtype=dtype, requires_grad=True)
    p = torch.tensor(personal, dtype=dtype, requires_grad=True)
    w = torch.tensor(vector, dtype=dtype, requires_grad=True)
    b = torch.tensor(float(bias), dtype=dtype, requires_grad=with_bias)
    groups = [
        {"params": [w, b] if with_bias else [w], "lr": rate},
        {"params": [c], "lr": table_rate},
        {"params": [p], "lr": table_rate * personal_rate},
    ]
    optimizer = torch.optim.SGD(groups, weight_decay=weight_decay)
    rates = 0.0
    decay = torch.optim.lr_scheduler.ExponentialLR(optimizer, batch_decay)
    stream = Stream(key, user)
    seen = samples(stream, positives, excluded, len(common), negatives)
    losses = []
    for _ in range(epochs):
        shuffle(stream, seen)
        for start in range(0, len(seen), batch):
            part = seen[start : start + batch]
            ids = torch.tensor([item for item, _ in part])
            labels = torch.tensor([label for _, label in part], dtype=dtype)
            optimizer.zero_grad()
            bce = torch.nn.functional.binary_cross_entropy_with_logits(
                (c[ids] + p[ids]) @ w + b, labels
            )
            apart, size = ((p[ids] - c[ids]) ** 2).mean(), (c[ids] ** 2).mean()
            loss = bce - difference * apart + ridge * size
            loss.backward()
            rates += optimizer.param_groups[1]["lr"]
            optimizer.step()
            decay.step()
            losses.append(bce.item() * len(part))
    mean_loss = sum(losses) / (epochs * len(seen))
    return *(t.detach().numpy() for t in (c, p, w)), b.item(), mean_loss, rates


def soft_threshold(table, threshold):
    """Entry by entry: the point that minimises (x - entry)^2 / 2 + threshold * |x|."""
    out = np.zeros_like(table)
    for place, entry in np.ndenumerate(table):
        if entry > threshold:
            out[place] = entry - threshold
        elif entry < -threshold:
            out[place] = entry + threshold
    return out


def guide_device(
    key,
    user,
    positives,
    excluded,
    table,
    guidance,
    vector,
    bias,
    gate,
    gate_bias,
    *,
    negatives,
    epochs,
    batch,
    rate,
    beta,
    clip,
):
    """FedRKG's guidance by autograd: train the gate, commit; (table, gate, gate bias)."""
    dtype = torch.float64
    p, g, e = (torch.tensor(a, dtype=dtype) for a in (table, guidance, vector))
    w = torch.tensor(gate, dtype=dtype, requires_grad=True)
    b = torch.tensor(float(gate_bias), dtype=dtype, requires_grad=True)
    optimizer = torch.optim.SGD([w, b], lr=rate)

    def fused(ids):
        opened = torch.sigmoid(torch.cat([p[ids], g[ids], p[ids] - g[ids]], 1) @ w + b)
        return beta * p[ids] + 2 * (1 - beta) * opened[:, None] * g[ids]

    stream = Stream(key, user)
    seen = samples(stream, positives, excluded, len(table), negatives) if epochs else []
    for _ in range(epochs):
        shuffle(stream, seen)
        for start in range(0, len(seen), batch):
            part = seen[start : start + batch]
            ids = torch.tensor([item for item, _ in part])
            labels = torch.tensor([label for _, label in part], dtype=dtype)
            optimizer.zero_grad()
            torch.nn.functional.binary_cross_entropy_with_logits(
                fused(ids) @ e + float(bias), labels
            ).backward()
            if clip is not None:
                torch.nn.utils.clip_grad_norm_([w, b], clip)
            optimizer.step()
    whole = fused(torch.arange(len(table))).detach().numpy()
    return whole, w.detach().numpy(), b.item()


def server_mean(table, trained_tables):
    """Average whole tables over the participants, in float64."""
    return np.mean([np.asarray(t, np.float64) for t in trained_tables], axis=0).astype(table.dtype)


# ------------------------------------------------------------------ pooled training


def fit_pooled(key, users, positives, excluded, table, vectors, *, negatives, rate, decay):
    """One pass of sample-by-sample SGD; return (table, vectors, mean loss), in float64."""
    table, vectors = table.astype(np.float64), vectors.astype(np.float64)
    seen = []
    for c, user in enumerate(users):
        stream = Stream(key, user)
        for item, label in samples(stream, positives[c], excluded[c], len(table), negatives):
            seen.append((c, item, label))
    for last in range(len(seen) - 1, 0, -1):
        other = below(draw(key, -1, last), last + 1)
        seen[last], seen[other] = seen[other], seen[last]
    loss = 0.0
    for c, item, label in seen:
        row, vector = table[item].copy(), vectors[c].copy()
        logit = row @ vector
        loss += np.logaddexp(0, logit) - label * logit
        error = 1 / (1 + np.exp(-logit)) - label
        table[item] = row - rate * (error * vector + decay * row)
        vectors[c] = vector - rate * (error * row + decay * vector)
    return table, vectors, loss / len(seen)


# ------------------------------------------------------------------ scoring and ranking


def own_table_scores(received, own_items, own_rows, vector, bias):
    """Score with the received table, the device's own rows in place."""
    table = np.array(received)
    table[own_items] = own_rows
    return table @ vector + bias


def popularity(positives, n_items: int):
    """Count the users of every item."""
    counts = np.zeros(n_items)
    for items in positives:
        counts[np.unique(items)] += 1
    return counts


def rank(scores, target: int, candidates) -> tuple[int, int]:
    """Return how many candidates lie ahead of the target, and how many tie with it."""
    ahead = sum(1 for i in candidates if i != target and scores[i] > scores[target])
    tied = sum(1 for i in candidates if i != target and scores[i] == scores[target])
    return ahead, tied


# ------------------------------------------------------------------ a mixture of experts


def by_lag(row, table, ends, by_place, n_items):
    """What a history's last items say, in buckets by how far back they are; 0 has no end."""
    out = np.zeros((len(ends), n_items))
    for g, item in enumerate(reversed(row), start=1):
        buckets = [b for b, end in enumerate(ends) if end == 0 or g <= end]
        if buckets:
            weight = by_place[g - 1] if g <= len(by_place) else 1.0
            out[buckets[0]] += weight * table[item]
    return out


def unpacked(table):
    """A packed table in dense form: walk over each item's entries."""
    n_items = len(table.scales)
    out = np.zeros((n_items, n_items), np.float32)
    for item in range(n_items):
        column = -1
        for k in range(table.starts[item], table.starts[item + 1]):
            column += 1 + int(table.gaps[k])
            code = int(table.codes[k])
            out[item, column] = table.scales[item] * np.float32(code * abs(code))
    return out


def important_pairs(long, shares, slots):
    """The pairs that a packed index has room for: the most important ones, one after the other."""
    n_items = len(shares)
    sizes = np.zeros((n_items, n_items), np.float32)
    for table in long:
        present = table["weights"][table["weights"] != 0].astype(np.float64)
        unit = np.float32(np.sqrt((present**2).mean())) if len(present) else np.float32(1)
        for item in range(n_items):
            for neighbour, weight in zip(
                table["neighbours"][item], table["weights"][item], strict=True
            ):
                sizes[item, neighbour] += abs(weight) / unit
    sizes *= ((shares + np.float32(0.05)) ** np.float32(0.25))[:, None]
    order = [pair for pair in np.argsort(-sizes.ravel(), kind="stable") if sizes.ravel()[pair] > 0]
    count = slots
    while True:
        kept = np.zeros(n_items * n_items, bool)
        kept[order[:count]] = True
        taken = 0
        for row in kept.reshape(n_items, n_items):
            gaps = np.diff(np.flatnonzero(row), prepend=-1) - 1
            taken += int((1 + gaps // 256).sum())
        if taken <= slots:
            return kept.reshape(n_items, n_items)
        count -= taken - slots


def groups_following(row, members, sizes, by_gap):
    """Which group of an item followed which; groups of two fields are never paired."""
    field = np.repeat(np.arange(len(sizes)), sizes)
    out = np.zeros((len(field), len(field)))
    for p, i in enumerate(row):
        for gap, j in enumerate(row[p + 1 : p + 1 + len(by_gap)]):
            out += by_gap[gap] * np.outer(members[i], members[j])
    return out * (field[:, None] == field)


def pairs_on_a_grid(histories, count, n_items, window, bits):
    """The most popular items, and sums over their pairs in whole units, of which a one has some."""
    units = 2**bits
    touched = [sum(item in past for past in histories) for item in range(n_items)]
    head = set(sorted(range(n_items), key=lambda item: (-touched[item], item))[:count])
    sums = {}
    for past in histories:
        kept = [(place, item) for place, item in enumerate(past) if item in head]
        for p, i in kept:
            for q, j in kept:
                weight = units if p == q else round(units / (q - p)) if 0 < q - p <= window else 0
                if weight:
                    sums[i * n_items + j] = sums.get(i * n_items + j, 0) + weight
    return head, sums, units


def mixture_loss(rows, weights, scale):
    """Cross-entropy of the first row under the softmax of weighed scores."""
    rows = rows.double()
    logits = (rows[:, :-1] / torch.tensor(scale).double()) @ weights + rows[:, -1]
    return torch.logsumexp(logits, 0) - logits[0]


def network_loss(rows, weights, center, scale, parameters, best):
    """The same after the network spoke, among the best of the mixture; None if it is not asked."""
    rows = rows[rows[:, -1] > -1e29]
    scaled = rows[:, :-2] / scale[:-1]
    mixed, before = scaled @ weights[0], scaled @ weights[1]
    chosen = np.sort(np.argsort(-mixed, kind="stable")[:best])
    near = rows[1:, -1] == 0
    if chosen[0] != 0 or before[0] < before[1:][near].min():
        return None
    x = torch.tensor((rows[chosen, :-1] - center) / scale)
    width = x.shape[1]
    hidden = next(h for h in range(1, 99) if width * h + h * h + 3 * h + 1 == len(parameters))
    sizes = [width * hidden, hidden, hidden**2, hidden, hidden, 1]
    w1, b1, w2, b2, w3, multiplier = torch.split(parameters, sizes)
    first = x @ w1.reshape(width, hidden) + b1
    first = first * torch.sigmoid(1.702 * first)
    second = first @ w2.reshape(hidden, hidden) + b2
    second = second * torch.sigmoid(1.702 * second)
    logits = multiplier * torch.tensor(mixed[chosen]) + second @ w3
    return torch.logsumexp(logits, 0) - logits[0]


# ------------------------------------------------------------------ the server's Adam


class Adam:
    """Adam with decoupled decay, written out."""

    def __init__(self, values, rate, decay):
        self.values, self.rate, self.decay, self.steps = values, rate, decay, 0
        self.first = [torch.zeros_like(v) for v in values]
        self.second = [torch.zeros_like(v) for v in values]

    @torch.no_grad()
    def step(self, gradients):
        self.steps += 1
        for value, g, first, second in zip(
            self.values, gradients, self.first, self.second, strict=True
        ):
            first.mul_(0.9).add_(0.1 * g)
            second.mul_(0.99).add_(0.01 * g**2)
            mean, square = first / (1 - 0.9**self.steps), second / (1 - 0.99**self.steps)
            value.mul_(1 - self.rate * self.decay).sub_(self.rate * mean / (square.sqrt() + 1e-8))


def close(ours, theirs):
    """Hold arrays equal to 1e-5 of each entry, or of the largest."""
    theirs = np.asarray(theirs)
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5 * abs(theirs).max())
