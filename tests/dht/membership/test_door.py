"""Who may stay connected: a crowd that does nothing keeps nobody out, and who is busy stays."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from support.properties import examples

from molink.dht.membership.door import ConnectionLimiter, ConnectionLimits, network_of

LIMITS = ConnectionLimits(unproven=4, proven=20, of_network=12, of_identity=2, proof_s=8.0, idle_s=60.0)


def nobody(identity: str) -> bool:
    """All are strangers."""
    return not identity


def entered(door: ConnectionLimiter, now: float, network: str, identity: str) -> int | None:
    guest = door.admit(now, network).guest
    assert guest is not None
    return door.prove(guest, now, identity).guest


@pytest.mark.parametrize(
    ("host", "network"),
    [
        ("203.0.113.9", "203.0.113.0/24"),
        ("::ffff:203.0.113.9", "203.0.113.0/24"),
        ("2002:cb00:7109::1", "203.0.113.0/24"),
        ("2a01:4f8:1:2ab::7", "2a01:4f8:1:200::/56"),
        ("127.0.0.1", "127.0.0.1"),
        ("192.168.1.7", "192.168.1.7"),
        ("100.64.3.4", "100.64.3.4"),
        ("fe80::1%eth0", "fe80::1"),
        ("::1", "::1"),
        ("not an address", "not an address"),
    ],
)
def test_a_network_is_what_one_person_probably_has(host: str, network: str) -> None:
    assert network_of(host) == network


def test_of_those_that_prove_nothing_the_oldest_of_the_largest_network_goes() -> None:
    door = ConnectionLimiter(LIMITS, nobody)
    lone = door.admit(0.0, "honest").guest
    crowd = [door.admit(1.0 + at, "crowd") for at in range(10)]
    assert lone in door
    assert [entry.sent_away for entry in crowd[3:]] == [(entry.guest,) for entry in crowd[:7]]
    assert door.unproven == LIMITS.unproven


def test_a_crowd_of_idle_strangers_keeps_no_newcomer_out() -> None:
    door = ConnectionLimiter(LIMITS, nobody)
    for at in range(100):
        entered(door, float(at), f"network {at % 5}", f"idle {at}")
    assert len(door) == 18
    newcomer = entered(door, 100.0, "newcomer's", "newcomer")
    assert newcomer is not None
    for at in range(17):
        entered(door, 101.0 + at, f"network {at % 5}", f"other {at}")
    assert newcomer in door


def test_strangers_do_not_take_the_last_tenth() -> None:
    door = ConnectionLimiter(LIMITS, lambda identity: identity.startswith("member"))
    for at in range(18):
        guest = entered(door, 0.0, f"network {at}", f"busy {at}")
        assert guest is not None
        door.mark_busy(guest)
    assert entered(door, 1.0, "another", "stranger") is None
    assert entered(door, 1.0, "another", "member 1") is not None
    assert entered(door, 1.0, "another", "member 2") is not None
    assert len(door) == LIMITS.proven
    assert entered(door, 2.0, "yet another", "member 3") is not None, "idle members make room for others"
    assert len(door) == LIMITS.proven


def test_members_go_after_strangers() -> None:
    door = ConnectionLimiter(LIMITS, lambda identity: identity.startswith("member"))
    members = [entered(door, 0.0, f"network {at}", f"member {at}") for at in range(10)]
    for at in range(50):
        entered(door, 1.0 + at, f"network {at}", f"stranger {at}")
    assert all(member in door for member in members)


def test_one_identity_replaces_its_own_idle_connections() -> None:
    door = ConnectionLimiter(LIMITS, nobody)
    first, second = entered(door, 0.0, "here", "ada"), entered(door, 1.0, "there", "ada")
    third = entered(door, 2.0, "elsewhere", "ada")
    assert first not in door
    assert second in door
    assert third is not None
    for guest in (second, third):
        assert guest is not None
        door.mark_busy(guest)
    assert entered(door, 3.0, "here", "ada") is None
    assert len(door) == 2


def test_who_does_nothing_goes_in_time_and_who_is_busy_stays() -> None:
    door = ConnectionLimiter(LIMITS, nobody)
    unproven = door.admit(0.0, "a").guest
    idle, busy = entered(door, 0.0, "b", "idle"), entered(door, 0.0, "c", "busy")
    assert busy is not None
    door.mark_busy(busy)
    assert door.evict_overdue(7.9) == ()
    assert door.evict_overdue(8.0) == (unproven,)
    assert door.evict_overdue(60.0) == (idle,)
    door.mark_idle(busy, 100.0)
    assert door.evict_overdue(159.9) == ()
    assert door.evict_overdue(160.0) == (busy,)
    assert len(door) == 0


def test_a_process_without_descriptors_keeps_who_is_busy() -> None:
    door = ConnectionLimiter(LIMITS, lambda identity: identity == "member")
    member, stranger = entered(door, 0.0, "a", "member"), entered(door, 1.0, "b", "stranger")
    busy = entered(door, 0.0, "c", "busy")
    assert busy is not None
    door.mark_busy(busy)
    unproven = door.admit(2.0, "d").guest
    assert door.make_room(2) == (unproven, stranger)
    assert door.make_room(2) == (member,)
    assert door.make_room(2) == ()
    assert busy in door


class Doorkeeping(RuleBasedStateMachine):
    """Anybody does anything, in any order."""

    names = st.sampled_from(["ada", "bob", "eve", "mallory", *(f"sybil {at}" for at in range(30))])
    networks = st.sampled_from(["home", "office", "crowd"])

    def __init__(self) -> None:
        super().__init__()
        self.door = ConnectionLimiter(LIMITS, lambda identity: identity in ("ada", "bob"))
        self.now = 0.0
        self.identities: dict[int, tuple[str, str | None]] = {}
        self.are_busy: set[int] = set()

    def forget(self, gone: tuple[int, ...]) -> None:
        assert not self.are_busy & set(gone)
        for guest in gone:
            del self.identities[guest]

    @rule(network=networks, wait=st.floats(0.0, 3.0))
    def arrive(self, network: str, wait: float) -> None:
        self.now += wait
        entry = self.door.admit(self.now, network)
        assert entry.guest is not None
        self.identities[entry.guest] = (network, None)
        self.forget(entry.sent_away)

    @rule(identity=names)
    def prove(self, identity: str) -> None:
        for guest, (network, known) in tuple(self.identities.items()):
            if known is None:
                entry = self.door.prove(guest, self.now, identity)
                if entry.guest is None:
                    del self.identities[guest]
                else:
                    self.identities[guest] = (network, identity)
                self.forget(entry.sent_away)
                return

    @rule(at=st.integers(0, 100))
    def work(self, at: int) -> None:
        proven = [guest for guest, (_, identity) in self.identities.items() if identity]
        for guest in proven[at : at + 1]:
            self.door.mark_busy(guest)
            self.are_busy.add(guest)

    @rule()
    def rest(self) -> None:
        if self.are_busy:
            self.door.mark_idle(self.are_busy.pop(), self.now)

    @rule()
    def sweep(self) -> None:
        self.forget(self.door.evict_overdue(self.now))

    @rule(at=st.integers(0, 100))
    def leave(self, at: int) -> None:
        for guest in tuple(self.identities)[at : at + 1]:
            self.door.remove_guest(guest)
            self.are_busy.discard(guest)
            del self.identities[guest]

    @rule(count=st.integers(0, 5))
    def run_out(self, count: int) -> None:
        self.forget(self.door.make_room(count))

    @invariant()
    def limits_hold(self) -> None:
        assert len(self.door) == len(self.identities)
        proven = [(network, identity) for network, identity in self.identities.values() if identity]
        assert len(proven) <= LIMITS.proven
        assert len(self.identities) - len(proven) <= LIMITS.unproven
        assert sum(identity not in ("ada", "bob") for _, identity in proven) <= LIMITS.proven - 2
        for network in {network for network, _ in proven}:
            assert sum(other == network for other, _ in proven) <= LIMITS.of_network
        for identity in {identity for _, identity in proven}:
            assert sum(other == identity for _, other in proven) <= LIMITS.of_identity


TestDoorkeeping = Doorkeeping.TestCase
TestDoorkeeping.settings = settings(max_examples=examples(60), stateful_step_count=40, deadline=None)
