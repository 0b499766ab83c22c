"""What a device is given to score with is enough, to the bit."""

import numpy as np
import pytest

import hushrec
from hushrec.aggregation import ExactSum
from hushrec.methods.base import Method, method_class, method_names
from hushrec.methods.fcf import FCF
from hushrec.methods.fedmf import FedMF
from hushrec.methods.fedrkg import FedRKG
from hushrec.methods.pfedrec import PFedRec
from hushrec.private import PrivateStore
from hushrec.streams import Round, Streams
from hushrec.testing import clients_of

KINDS = [method_class(name) for name in method_names()]
KINDS += [kind.under_noise for kind in KINDS if kind.under_noise]
FORMS = [(kind, {}) for kind in KINDS]
FORMS += [(kind, {"dual": True}) for kind in KINDS if "dual" in kind.Config.model_fields]
FORMS += [(PFedRec, {"score_function": "mlp"}), (FedRKG, {"backbone": "fedncf", "interval": 1})]


def after_two_rounds(method: Method):
    view, streams = clients_of([[7], [5, 3, 9], [4, 40, 8, 2, 20], [59, 1]]), Streams(0)
    shared = method.init(view, streams)
    store = PrivateStore(method.private_fields(view, shared, streams), len(view))
    everybody = np.arange(len(view))
    for number in (1, 2):
        private, phase = store.read(everybody), method.phase_of(number)
        fitted = phase.fit(phase.download(shared), private, view, Round(number, streams))
        store.write(everybody, fitted.private)
        summed = ExactSum(view.n_items)
        summed.add(fitted.update)
        shared = phase.apply(shared, summed.total(), number)
    return shared, store.read(everybody), view


@pytest.mark.parametrize(
    ("kind", "options"), FORMS, ids=[f"{kind.__name__} {options}" for kind, options in FORMS]
)
def test_scores_need_no_more_than_is_served(kind, options):
    method = kind(kind.Config(**options))
    shared, private, view = after_two_rounds(method)
    served = method.serving(shared)
    assert served.keys() <= shared.keys()
    scores = []
    for given in (shared, served):
        adapted = method.adapt(given, private, view, Streams(0))
        scores.append(method.score(given, adapted, view))
    np.testing.assert_array_equal(*scores)


def test_what_only_the_server_needs_stays_there():
    for kind, options, names in (
        (FCF, {}, {"items"}),
        (FedMF, {}, {"items"}),
        (FedMF, {"dual": True}, {"received"}),
        (PFedRec, {}, {"received"}),
        (FedRKG, {}, set()),
    ):
        method = kind(kind.Config(**options))
        view = clients_of([[1, 2], [3]])
        assert method.serving(method.init(view, Streams(0))).keys() == names
        assert method.download_own({}, np.arange(2)) == {}


def test_whether_a_method_adapts_is_whether_it_says_how():
    adapting = {kind.name for kind in KINDS if kind().adapts}
    assert adapting == {"fofl-self", "nn-self", "privrec", "privrec-cen"}


@pytest.mark.parametrize("method", ["pfedrec", "fedrkg", "fcf"])
def test_newcomers_fold_themselves_in_with_all_that_is_shared(method, small):
    settings = {"split.kind": "unseen-users"}
    run = hushrec.train(small, method, rounds=1, settings=settings)
    assert 0 < run.metrics["full"]["auc"] < 1
