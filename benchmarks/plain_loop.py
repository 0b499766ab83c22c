"""A plain per-device PFedRec round, written the way published federated recommender code is.

The baseline of the ``speed`` benchmark: correct, readable, and slow for the usual reasons. Every
device gets its own deep copy of a torch model with the whole item table, its own `DataLoader` and
its own two optimizers; negatives are drawn positive by positive in Python; the server holds one
state dict per device and averages them one after the other. Nothing in here comes from hushrec.
"""

from __future__ import annotations

import copy
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

StateDict = dict[str, Tensor]
Sample = tuple[int, float]
TABLE = "item_embedding.weight"


@dataclass(frozen=True)
class Settings:
    """The options of the method, as in hushrec's preset."""

    d: int
    lr: float
    item_lr: float
    negatives: int
    epochs: int
    batch: int


@dataclass(frozen=True)
class RoundTimes:
    """Where the seconds of a round went, and what was done in them."""

    sampling: float
    training: float
    aggregation: float
    samples: int
    loss: float
    """Mean over the devices of their mean loss, each batch before its steps."""

    @property
    def total(self) -> float:
        """Seconds of the whole round."""
        return self.sampling + self.training + self.aggregation


class Model(nn.Module):
    """An item table and a linear score function."""

    def __init__(self, n_items: int, d: int) -> None:
        super().__init__()
        self.item_embedding = nn.Embedding(n_items, d)
        self.score_function = nn.Linear(d, 1)

    def forward(self, items: Tensor) -> Tensor:
        """Return the probability that the user likes each item."""
        logits = self.score_function(self.item_embedding(items))
        return torch.sigmoid(logits).view(-1)


class DeviceData(Dataset[tuple[Tensor, Tensor, Tensor]]):
    """The samples of one device, as (user, item, label); the model has no use for the user."""

    def __init__(self, device: int, samples: Sequence[Sample]) -> None:
        self.users = torch.full((len(samples),), device, dtype=torch.long)
        self.items = torch.tensor([item for item, _ in samples], dtype=torch.long)
        self.labels = torch.tensor([label for _, label in samples], dtype=torch.float)

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        return self.users[index], self.items[index], self.labels[index]


class PlainLoop:
    """A server and its devices, one after the other."""

    def __init__(
        self, positives: list[list[int]], pools: list[set[int]], model: Model, settings: Settings
    ) -> None:
        self.positives = positives
        self.pools = pools
        """For each device, the items it may draw negatives from."""
        self.model = model
        self.settings = settings
        self.device_states: dict[int, StateDict] = {}
        self.uploads: dict[int, StateDict] = {}
        self.table = model.item_embedding.weight.detach().clone()

    def round(
        self, devices: Sequence[int], on_device: Callable[[], None] = lambda: None
    ) -> RoundTimes:
        """Sample, train and average these devices."""
        began = time.perf_counter()
        samples = {device: self._sample(device) for device in devices}
        sampled = time.perf_counter()
        losses = []
        for device in devices:
            losses.append(self._train(device, samples[device]))
            on_device()
        trained = time.perf_counter()
        self._average(devices)
        return RoundTimes(
            sampling=sampled - began,
            training=trained - sampled,
            aggregation=time.perf_counter() - trained,
            samples=sum(len(of_device) for of_device in samples.values()),
            loss=sum(losses) / len(losses),
        )

    def _sample(self, device: int) -> list[Sample]:
        samples: list[Sample] = []
        pool = self.pools[device]
        for item in self.positives[device]:
            samples.append((item, 1.0))
            # Published code hands the set itself to `random.sample`, which used to copy it to a
            # tuple on every call; later versions of Python ask the caller to do so.
            for negative in random.sample(tuple(pool), self.settings.negatives):
                samples.append((negative, 0.0))  # noqa: PERF401 - as plain code has it
        return samples

    def _train(self, device: int, samples: Sequence[Sample]) -> float:
        model = copy.deepcopy(self.model)
        if device in self.device_states:
            state = copy.deepcopy(self.device_states[device])
            state[TABLE] = self.table.clone()
            model.load_state_dict(state)
        else:
            model.item_embedding.weight.data.copy_(self.table)
        model.train()
        criterion = nn.BCELoss()
        score_steps = torch.optim.SGD(model.score_function.parameters(), lr=self.settings.lr)
        item_steps = torch.optim.SGD(model.item_embedding.parameters(), lr=self.settings.item_lr)
        data = DeviceData(device, samples)
        loader = DataLoader(data, batch_size=self.settings.batch, shuffle=True)
        summed = 0.0
        for _ in range(self.settings.epochs):
            for _, items, labels in loader:
                score_steps.zero_grad()
                loss = criterion(model(items), labels)
                loss.backward()
                score_steps.step()
                summed += loss.item() * len(items)

                item_steps.zero_grad()
                criterion(model(items), labels).backward()
                item_steps.step()
        self.device_states[device] = copy.deepcopy(model.state_dict())
        self.uploads[device] = copy.deepcopy(self.device_states[device])
        return summed / (self.settings.epochs * len(samples))

    def _average(self, devices: Sequence[int]) -> None:
        total = torch.zeros_like(self.table)
        for device in devices:
            total += self.uploads[device][TABLE]
        self.table = total / len(devices)
        self.uploads = {}
