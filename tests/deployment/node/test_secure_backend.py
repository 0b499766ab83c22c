"""Secure sums give the bits of one process."""

from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from secure_nodes import Secured

from hushrec.deployment.coordinator.run import RemoteBackend
from hushrec.testing import BackendContract

METHODS = [
    ("pfedrec", "plain"),
    ("pfedrec", "central"),
    ("fedrap", "plain"),
    ("fedals", "plain"),
    ("fedease", "central"),
    ("fednext", "plain"),
    ("fednext", "central"),
    ("fedmix", "plain"),
]
FORMS = ["fedmf budgets", "fedrkg with silent rounds", "lipm silos", "pfedrec unseen users"]


class TestSecure(BackendContract):
    nodes = 3

    @pytest.fixture(autouse=True)
    def _folder(self):
        with TemporaryDirectory() as folder:
            self.folder = Path(folder)
            yield

    def make(self, setup):
        made = Secured(self.folder, setup.split.data, setup.experiment, self.nodes)
        return RemoteBackend(setup.task, setup.experiment, made.roster, made.session, made.summing)

    @pytest.mark.parametrize(("method", "mode"), METHODS)
    def test_every_method(self, method, mode):
        super().test_every_method(method, mode)

    @pytest.mark.parametrize("form", FORMS)
    def test_every_form(self, form):
        super().test_every_form(form)
