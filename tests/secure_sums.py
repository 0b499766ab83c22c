"""A secure sum in one process, stage by stage, with everything that was sent kept to look at."""

from dataclasses import dataclass, field, replace

import numpy as np
from scipy import stats

from hushrec.secagg import Identity, NodeState, Stage, SumNode, SumServer, SumTerms, VectorLayout
from hushrec.secagg.vectors import WORD

FRAME = 56
"""Bytes of a message before its body."""


def identities(count):
    """Nodes "a", "b", ... with identities that are the same in every run."""
    return {chr(ord("a") + k): Identity(bytes([k + 1] * 32)) for k in range(count)}


def make_terms(nodes, words=8, wide=(), number=1, **more):
    """The terms of one sum over these nodes."""
    public = {name: identity.public for name, identity in nodes.items()}
    return SumTerms("test", number, public, VectorLayout({"x": (words,)}, tuple(wide)), **more)


@dataclass
class Play:
    """All parties of one sum."""

    nodes: dict[str, SumNode]
    vectors: dict[str, np.ndarray]
    server: SumServer
    states: dict[str, NodeState] = field(default_factory=dict)
    said: dict[Stage, dict[str, bytes]] = field(default_factory=dict)
    """What nodes sent, also what got lost."""
    told: dict[Stage, dict[str, bytes]] = field(default_factory=dict)
    """What the server sent."""

    @classmethod
    def of(cls, people, vectors, terms):
        nodes = {name: SumNode(terms, name, identity) for name, identity in people.items()}
        return cls(nodes, vectors, SumServer(terms))

    @property
    def terms(self):
        return self.server.terms

    def answer(self, name, stage, message=b"", state=None):
        """Let one node answer; its state is none of ours, and goes through bytes."""
        node, state = self.nodes[name], state or self.states.get(name)
        if stage == Stage.KEYS:
            step = node.announce(last=node.terms.number - 1)
        elif stage == Stage.MASKED:
            step = node.mask(state, message, self.vectors[name])
        else:
            act = {Stage.SHARES: "share", Stage.CONSISTENCY: "agree", Stage.REVEALED: "reveal"}
            step = getattr(node, act[stage])(state, message)
        return NodeState.from_bytes(step[0].to_bytes()), step[1]

    def step(self, stage, lost=()):
        """Play a stage; what the lost ones send does not arrive."""
        inbox = dict.fromkeys(self.nodes, b"") if stage == 1 else self.told[Stage(stage - 1)]
        self.said[stage] = {}
        for name, message in inbox.items():
            self.states[name], self.said[stage][name] = self.answer(name, stage, message)
            if name not in lost:
                self.server.receive(name, self.said[stage][name])
        if stage < Stage.REVEALED:
            self.told[stage] = self.server.close()

    def until(self, stage, lost=None):
        """Play every stage up to this one."""
        for each in Stage:
            if each <= stage:
                self.step(each, (lost or {}).get(each, ()))
        return self

    def until_end(self):
        """Play the stages that are left."""
        for each in Stage:
            if each >= self.server.stage:
                self.step(each)
        return self


def run_in_memory(people, vectors, terms, lost=None):
    """Return the sum, and the names of the nodes that are in it."""
    play = Play.of(people, vectors, terms).until(Stage.REVEALED, lost)
    return play.server.total(), play.server.survivors


def random_vectors(names, length, seed=0):
    """Whole numbers of all sizes."""
    rng = np.random.default_rng(seed)
    return {name: rng.integers(-(2**63), 2**63 - 1, length) for name in names}


def wrapped_sum(vectors):
    """The slow sum: Python's numbers, then 64 bits with a sign."""
    columns = zip(*(vector.tolist() for vector in vectors), strict=True)
    return [(sum(column) + 2**63) % 2**64 - 2**63 for column in columns]


def play(count=4, words=8, seed=0, **more):
    """A world of nodes with random vectors, before the first message."""
    people = identities(count)
    terms = make_terms(people, words, **more)
    return Play.of(people, random_vectors(people, terms.layout.length, seed), terms)


def next_sum(before):
    """The same parties, one sum later."""
    people = {name: node.identity for name, node in before.nodes.items()}
    return Play.of(people, before.vectors, replace(before.terms, number=before.terms.number + 1))


# ------------------------------------------------------------ what looks like chance

CHANCE = 1e-9
"""Below this probability something is not chance."""


def body(message):
    return np.frombuffer(message, WORD, offset=FRAME)


def _sums_of_signs(signs, weights):
    """How likely these weighted sums of independent signs are, each by itself."""
    return (2 * stats.norm.sf(abs(weights @ signs) / np.sqrt(weights @ weights))).tolist()


def least_likely(words, vector):
    """The smallest probability that uniform words, knowing nothing of a vector, look like this."""
    found = [  # every byte takes every value as often
        stats.chisquare(np.bincount(column, minlength=256)).pvalue
        for column in words.view(np.uint8).reshape(-1, 8).T
    ]
    signs = 2.0 * np.unpackbits(words.view(np.uint8)).reshape(-1, 64) - 1
    found += _sums_of_signs(signs, np.ones(len(words)))  # every bit is set as often as not
    if vector.std():  # and knows nothing of the vector
        found += _sums_of_signs(signs, (vector - vector.mean()) / vector.std())
    repeats = len(words) - len(np.unique(words))  # of 64 bits nearly none
    found.append(stats.poisson.sf(repeats - 1, len(words) ** 2 / 2**65) if repeats else 1.0)
    return min(found)
