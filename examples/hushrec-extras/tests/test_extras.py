from hushrec_extras.largest_rows import LargestRows
from hushrec_extras.two_tower import TwoTower

from hushrec import Machine
from hushrec.testing import BackendContract, MechanismContract, MethodContract


class TestTwoTower(MethodContract):
    method = TwoTower


class TestLargestRows(MechanismContract):
    hides_support = False

    def make(self, shape):
        return LargestRows(shape)


class TestBackwards(BackendContract):
    machine = Machine(backend="backwards")
