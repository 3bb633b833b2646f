"""Prefill windows: what waits at a hop is bounded, hop by hop, and whatever is sent is stepped in the end."""

from collections import deque
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from molink.peer.memory.leases import LeaseKey
from molink.peer.scheduling.microbatch import BatchLimits, MicroBatchQueue, PendingStep
from molink.peer.scheduling.prefill_window import WINDOW_BYTES, WINDOW_STEPS, ReceiveWindow, SendWindow
from molink.shards.spec import Span

SPAN = Span(0, 4)
MOST_BYTES = 40


def key(session: int) -> LeaseKey:
    return LeaseKey(session.to_bytes(16), 1)


def test_a_window_takes_steps_until_it_is_full_and_opens_when_they_are_said_to_be_stepped() -> None:
    sent = SendWindow(window_bytes=100)
    assert sent.is_open(key(1))
    sent.record_sent(key(1), 0, 99)
    assert sent.is_open(key(1))
    sent.record_sent(key(1), 1, 500)
    assert not sent.is_open(key(1))
    assert sent.is_open(key(2))
    sent.apply_window_update(key(1), 0)
    assert not sent.is_open(key(1))
    sent.apply_window_update(key(1), 1)
    assert sent.is_open(key(1))


def test_many_small_steps_fill_a_window_too() -> None:
    sent, received = SendWindow(), ReceiveWindow()
    for step in range(WINDOW_STEPS):
        assert sent.is_open(key(1))
        assert received.admit(key(1), step, 1)
        sent.record_sent(key(1), step, 1)
    assert not sent.is_open(key(1))
    assert not received.admit(key(1), WINDOW_STEPS, 1)


def test_who_sends_into_a_full_window_is_refused_and_nothing_of_it_is_kept() -> None:
    received = ReceiveWindow(window_bytes=100)
    assert received.admit(key(1), 0, 100)
    assert not received.admit(key(1), 1, 1)
    assert received.admit(key(2), 0, 1)
    assert received.record_computed(key(1), 0)
    assert received.admit(key(1), 1, 1)


def test_the_sender_is_told_each_half_window_and_not_of_each_step() -> None:
    received = ReceiveWindow(window_bytes=100)
    told = []
    for step in range(12):
        assert received.admit(key(1), step, 10)
        told.append(received.record_computed(key(1), step))
    assert told == [False, False, False, False, True] * 2 + [False, False]


def test_the_end_of_a_session_leaves_nothing() -> None:
    sent, received = SendWindow(window_bytes=10), ReceiveWindow(window_bytes=10)
    sent.record_sent(key(1), 0, 10)
    assert received.admit(key(1), 0, 10)
    sent.forget_session(key(1))
    received.forget_session(key(1))
    sent.apply_window_update(key(1), 0)
    assert not received.record_computed(key(1), 0)
    assert sent.is_open(key(1))
    assert received.admit(key(1), 0, 10)


def test_the_longest_prompt_of_one_step_fits_a_window() -> None:
    sent, received = SendWindow(), ReceiveWindow()
    assert sent.is_open(key(1))
    sent.record_sent(key(1), 0, 2 * WINDOW_BYTES)
    assert received.admit(key(1), 0, 2 * WINDOW_BYTES)
    assert received.record_computed(key(1), 0)


@dataclass
class Peer:
    """The decisions of one peer as the product puts them together, with links that are lists."""

    limits: BatchLimits
    window: tuple[int, int]
    queue: MicroBatchQueue = field(init=False)
    sent: SendWindow = field(init=False)
    received: ReceiveWindow = field(init=False)
    held: dict[int, deque[PendingStep]] = field(default_factory=dict)
    """By next peer: steps that the link had no room for."""

    def __post_init__(self) -> None:
        self.queue = MicroBatchQueue(self.limits)
        self.sent, self.received = SendWindow(*self.window), ReceiveWindow(*self.window)


class Swarm:
    """Peers, sessions that take any of them in any order, and links of which each holds a few bytes."""

    def __init__(
        self, circuits: list[list[int]], prompts: list[list[int]], window: tuple[int, int], link_bytes: int
    ) -> None:
        self.circuits = circuits
        self.window = window
        self.link_bytes = link_bytes
        count = max(max(circuit) for circuit in circuits) + 1
        self.peers = [Peer(BatchLimits(MOST_BYTES, 4), window) for _ in range(count)]
        self.links: dict[tuple[int, int], deque[PendingStep]] = {}
        self.credits: deque[tuple[int, LeaseKey, int]] = deque()
        self.prompts = [deque(enumerate(prompt)) for prompt in prompts]
        self.finished: list[list[int]] = [[] for _ in circuits]
        for session in range(len(circuits)):
            self.begin_chunk(session)

    def begin_chunk(self, session: int) -> None:
        if self.prompts[session]:
            step, size = self.prompts[session].popleft()
            pending = PendingStep(key(session), step, SPAN, size, 0.0, prefill=True)
            assert self.peers[self.circuits[session][0]].queue.push(pending)

    def following(self, peer: int, one: LeaseKey) -> int | None:
        circuit = self.circuits[int.from_bytes(one.session)]
        place = circuit.index(peer) + 1
        return circuit[place] if place < len(circuit) else None

    def may_prefill(self, peer: int, one: LeaseKey) -> bool:
        following = self.following(peer, one)
        here = self.peers[peer]
        return following is None or (following not in here.held and here.sent.is_open(one))

    def forward(self, peer: int, following: int, pending: PendingStep) -> bool:
        link = self.links.setdefault((peer, following), deque())
        if link and sum(one.tokens for one in link) + pending.tokens > self.link_bytes:
            return False
        link.append(pending)
        return True

    def step(self, peer: int) -> bool:
        """The engine computes a micro-batch, if it may."""
        here = self.peers[peer]
        batch = here.queue.next_batch(lambda one: self.may_prefill(peer, one))
        for pending in batch:
            session = int.from_bytes(pending.key.session)
            if self.circuits[session][0] == peer:
                self.begin_chunk(session)
            elif here.received.record_computed(pending.key, pending.step):
                previous = self.circuits[session][self.circuits[session].index(peer) - 1]
                self.credits.append((previous, pending.key, pending.step))
            following = self.following(peer, pending.key)
            if following is None:
                self.finished[session].append(pending.step)
                continue
            here.sent.record_sent(pending.key, pending.step, pending.tokens)
            if following in here.held or not self.forward(peer, following, pending):
                here.held.setdefault(following, deque()).append(pending)
        return bool(batch)

    def carry(self, ends: tuple[int, int]) -> None:
        """A link brings a step, and has room again."""
        sender, receiver = ends
        pending = self.links[ends].popleft()
        there = self.peers[receiver]
        assert there.received.admit(pending.key, pending.step, pending.tokens)
        assert there.queue.push(pending)
        held = self.peers[sender].held.get(receiver)
        while held and self.forward(sender, receiver, held[0]):
            held.popleft()
        if held is not None and not held:
            del self.peers[sender].held[receiver]

    def credit(self) -> None:
        peer, one, step = self.credits.popleft()
        self.peers[peer].sent.apply_window_update(one, step)

    def check_bounds(self) -> None:
        """What any peer holds of a session is a window and the step that filled it."""
        for number, peer in enumerate(self.peers):
            for session, circuit in enumerate(self.circuits):
                waiting = peer.received._sessions.get(key(session))
                if number in circuit[1:] and waiting is not None:
                    assert waiting.queued_bytes < self.window[0] + MOST_BYTES
                    assert len(waiting.steps) <= self.window[1]
            for held in peer.held.values():
                assert sum(pending.tokens for pending in held) <= 2 * MOST_BYTES


@settings(deadline=None)
@given(
    st.lists(
        st.permutations(range(4)).flatmap(lambda p: st.integers(1, 4).map(lambda n: p[:n])),
        min_size=1,
        max_size=6,
    ),
    st.data(),
)
def test_every_prompt_ends_however_circuits_cross_links_drain_and_engines_take_turns(
    circuits: list[list[int]], data: st.DataObject
) -> None:
    sizes = st.lists(st.integers(1, MOST_BYTES), min_size=1, max_size=8)
    prompts = [data.draw(sizes) for _ in circuits]
    window = data.draw(st.integers(1, 60)), data.draw(st.integers(1, 4))
    swarm = Swarm(circuits, prompts, window, data.draw(st.integers(1, 60)))
    rng = data.draw(st.randoms(use_true_random=False))
    idle: set[int] = set()
    while any(len(done) < len(prompt) for done, prompt in zip(swarm.finished, prompts, strict=True)):
        full = [ends for ends, link in swarm.links.items() if link]
        turns = [("step", peer) for peer in range(len(swarm.peers)) if peer not in idle]
        turns += [("carry", ends) for ends in full]
        turns += [("credit", None)] * bool(swarm.credits)
        assert turns, "nobody can go on"
        what, which = rng.choice(turns)
        if what == "step":
            if not swarm.step(which):
                idle.add(which)
                continue
        elif what == "carry":
            swarm.carry(which)
        else:
            swarm.credit()
        idle.clear()
        swarm.check_bounds()
    assert swarm.finished == [list(range(len(prompt))) for prompt in prompts]


@pytest.mark.parametrize("blocked", [{1}, {1, 2}])
def test_decode_goes_on_beside_prefill_that_may_not_and_that_keeps_its_place(blocked: set[int]) -> None:
    queue = MicroBatchQueue(BatchLimits(max_tokens=10, max_sessions=4))
    waiting = [PendingStep(key(session), 0, SPAN, 6, 0.0, prefill=True) for session in (1, 2)]
    decode = PendingStep(key(3), 0, SPAN, 1, 9.0, prefill=False)
    for pending in (*waiting, decode):
        assert queue.push(pending)
    may = [one for one in waiting if int.from_bytes(one.key.session) not in blocked]
    first = queue.next_batch(lambda one: int.from_bytes(one.session) not in blocked)
    assert first == (decode, *may)
    assert queue.next_batch(lambda one: int.from_bytes(one.session) not in blocked) == ()
    assert len(queue) == len(blocked)
    assert queue.next_batch()[0] == waiting[0]
