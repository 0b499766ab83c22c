from hushrec_extras.backwards import Backwards
from hushrec_extras.largest_rows import LargestRows
from hushrec_extras.two_tower import TwoTower

from hushrec.federation.backends.simulation import Machine
from hushrec.federation.setup import prepare
from hushrec.testing import BackendContract, MechanismContract, MethodContract


class TestTwoTower(MethodContract):
    method = TwoTower


class TestLargestRows(MechanismContract):
    hides_support = False

    def make(self, shape):
        return LargestRows(shape)


class TestBackwards(BackendContract):
    def make(self, server, split):
        machine = Machine(backend="backwards")
        backend = prepare(server.experiment, split, server.plan, machine)[0].backend
        assert isinstance(backend, Backwards)
        return backend
