from hushrec_cooccurrence import Cooccurrence

from hushrec.testing import MethodContract


class TestCooccurrence(MethodContract):
    method = Cooccurrence
