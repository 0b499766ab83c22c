"""Secure sums in one process, stage by stage, with everything that was sent kept to look at."""

from dataclasses import dataclass, field, replace

import numpy as np
from scipy import stats

from hushrec.secagg import (
    Identity,
    NodeState,
    SetupNode,
    SetupServer,
    SetupState,
    Stage,
    SumNode,
    SumServer,
    SumTerms,
    VectorLayout,
    messages,
)
from hushrec.secagg.messages import SERVER

FRAME = 56
"""Bytes of a message before its body."""
WORD = np.dtype("<u8")
SETUP = (Stage.KEYS, Stage.SHARES)


def identities(count):
    """Nodes "a", "b", ... with identities that are the same in every run."""
    return {chr(ord("a") + k): Identity(bytes([k + 1] * 32)) for k in range(count)}


def make_terms(nodes, words=8, wide=(), number=1, first=None, count=2, layout=None, **more):
    """The terms of one sum over these nodes."""
    public = {name: identity.public for name, identity in nodes.items()}
    layout = layout or VectorLayout({"x": (words,)}, tuple(wide))
    first = number if first is None else first
    return SumTerms("test", first, public, count, **more, number=number, layout=layout)


@dataclass
class Play:
    """All parties of a set-up and of one of its sums."""

    people: dict[str, Identity]
    vectors: dict[str, np.ndarray]
    """Words of 64 bits, or bytes."""
    terms: SumTerms
    server: SetupServer | SumServer
    setups: dict[str, SetupState] = field(default_factory=dict)
    states: dict[str, NodeState] = field(default_factory=dict)
    said: dict[Stage, dict[str, bytes]] = field(default_factory=dict)
    """What nodes sent, also what got lost; of a vector, the first piece."""
    pieces: dict[tuple[str, int], bytes] = field(default_factory=dict)
    """The pieces of vectors that nodes sent."""
    told: dict[Stage, dict[str, bytes]] = field(default_factory=dict)
    """What the server sent."""
    set_up: SetupServer | None = None
    last: int = 0
    """The last number that nodes used before."""

    @classmethod
    def of(cls, people, vectors, terms, last=0):
        return cls(people, vectors, terms, SetupServer(terms.setup), last=last)

    @property
    def nodes(self):
        return {name: SumNode(self.terms, name, each) for name, each in self.people.items()}

    def in_setup(self, name):
        return SetupNode(self.terms.setup, name, self.people[name])

    def piece(self, name, number):
        size = self.terms.layout.piece_bytes
        return words_of(self.vectors[name])[number * size : (number + 1) * size]

    def answer(self, name, stage, message=b"", state=None):
        """Let one node answer; its state is none of ours, and goes through bytes."""
        if stage in SETUP:
            node, kept = self.in_setup(name), state or self.setups.get(name)
            act = node.announce(self.last) if stage == Stage.KEYS else node.share(kept, message)
            return SetupState.from_bytes(act[0].to_bytes()), act[1]
        node = self.nodes[name]
        if stage == Stage.MASKED:
            kept, own = node.begin(state or self.setups[name], message)
            own = NodeState.from_bytes(own.to_bytes())
            said = node.mask(own, 0, self.piece(name, 0))
            self.setups[name] = SetupState.from_bytes(kept.to_bytes())
            return own, said
        act = {Stage.CONSISTENCY: "agree", Stage.REVEALED: "reveal"}
        step = getattr(node, act[stage])(state or self.states.get(name), message)
        return NodeState.from_bytes(step[0].to_bytes()), step[1]

    def let(self, name, stage, message=b""):
        """Let one node answer, and keep its state."""
        state, said = self.answer(name, stage, message)
        (self.setups if stage in SETUP else self.states)[name] = state
        return said

    def tell(self, stage, body, sender=SERVER):
        """A message of the server, or of a node, with any body."""
        terms = self.terms.setup if stage in SETUP else self.terms
        return messages.write(terms, stage, sender, body)

    def again(self, name, number):
        """Let a node send a piece of its vector."""
        return self.nodes[name].mask(self.states[name], number, self.piece(name, number))

    def step(self, stage, lost=()):
        """Play a stage; what the lost ones send does not arrive. A (name, piece) that is lost is
        the last that is heard of its node."""
        inbox = dict.fromkeys(self.people, b"") if stage == 1 else self.told[Stage(stage - 1)]
        self.said[stage] = {}
        for name, message in inbox.items():
            self.said[stage][name] = self.let(name, stage, message)
            arrives = name not in lost
            if arrives and (name, 0) not in lost:
                self.server.receive(name, self.said[stage][name])
            if stage == Stage.MASKED:
                self.pieces[name, 0] = self.said[stage][name]
                for number in range(1, self.terms.layout.pieces):
                    arrives = arrives and (name, number - 1) not in lost
                    self.pieces[name, number] = self.again(name, number)
                    if arrives and (name, number) not in lost:
                        self.server.receive(name, self.pieces[name, number])
        if stage < Stage.REVEALED:
            self.close()

    def close(self):
        """Close a stage; a sum follows its set-up."""
        stage = self.server.stage
        self.told[stage] = self.server.close()
        if stage == Stage.SHARES:
            self.set_up = self.server
            self.server = SumServer(self.terms, self.set_up)

    def until(self, stage, lost=None):
        """Play every stage up to this one."""
        for each in Stage:
            if self.server.stage <= each <= stage:
                self.step(each, (lost or {}).get(each, ()))
        return self

    def until_end(self):
        """Play the stages that are left."""
        return self.until(Stage.REVEALED)

    def total(self):
        """The sum, as words of 64 bits."""
        return np.frombuffer(b"".join(self.server.total()), "<i8")


def words_of(vector):
    return vector if isinstance(vector, bytes) else vector.astype("<i8").tobytes()


def run_in_memory(people, vectors, terms, lost=None):
    """Return the sum, and the names of the nodes that are in it."""
    play = Play.of(people, vectors, terms).until(Stage.REVEALED, lost)
    return play.total(), play.server.survivors


def random_vectors(names, length, seed=0):
    """Whole numbers of all sizes."""
    rng = np.random.default_rng(seed)
    return {name: rng.integers(-(2**63), 2**63 - 1, length) for name in names}


def wrapped_sum(vectors):
    """The slow sum: Python's numbers, then 64 bits with a sign."""
    columns = zip(*(np.frombuffer(words_of(v), "<i8").tolist() for v in vectors), strict=True)
    return [(sum(column) + 2**63) % 2**64 - 2**63 for column in columns]


def play(count=4, words=8, seed=0, sums=2, **more):
    """A world of nodes with random vectors, before the first message."""
    people = identities(count)
    terms = make_terms(people, words, count=sums, **more)
    return Play.of(people, random_vectors(people, terms.layout.nbytes // 8, seed), terms)


def next_sum(before):
    """The same parties, after another set-up."""
    terms = before.terms
    first = terms.first + terms.count
    later = replace(terms, first=first, number=first)
    return Play.of(before.people, before.vectors, later, last=first - 1)


def following_sum(before, **more):
    """The same parties, in the next sum of the same set-up."""
    after = Play.of(before.people, before.vectors, before.terms)
    after.terms = replace(before.terms, number=before.terms.number + 1, **more)
    after.setups, after.set_up = dict(before.setups), before.set_up
    after.said, after.told = (
        {stage: each[stage] for stage in SETUP} for each in (before.said, before.told)
    )
    after.server = SumServer(after.terms, after.set_up)
    return after


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
