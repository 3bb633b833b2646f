"""Three homes behind three NATs generate for a fourth while what stands between them breaks: exactly transformers'."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.links.home_peers import HomeClient, HomePeer, StreamedPiece, invited_by, reach_of
from support.links.namespaces import Internet, require_namespaces
from support.swarms.live_swarms import References, bundled_folder

pytestmark = [pytest.mark.real, pytest.mark.full]

PROMPT = "To be, or not to be"
TOKENS = 120
VOLUNTEERS = ("192.0.2.1", "198.51.100.2")
HOMES = (
    ("port", "203.0.113.10", "0:4"),
    ("symmetric", "203.0.114.20", "4:8"),
    ("carrier", "203.0.115.30", "8:12"),
)
"""The last is the one that punches a hole to the first; the one between is reached over relays."""
CLIENT = ("port", "203.0.116.40")
MOVED_TO = "203.0.117.50"


@dataclass
class HomeSwarm:
    """Two volunteers that relay, three homes that hold the model between them, and a client at home."""

    net: Internet
    volunteers: list[HomePeer]
    homes: list[HomePeer]
    client: HomeClient

    def busiest(self) -> HomePeer:
        """The volunteer that relays most."""
        pairs = {at: reach_of(self.net, one)["relayed_pairs"] for at, one in enumerate(self.volunteers)}
        most = max(pairs, key=pairs.__getitem__)
        assert pairs[most], pairs
        return self.volunteers[most]

    def ways(self) -> dict[str, int]:
        """How many of the homes' links go which way."""
        ways: Counter[str] = Counter()
        for home in self.homes:
            ways.update(reach_of(self.net, home)["ways"])
        return dict(ways)

    def generated(self, faults: dict[int, Callable[[], None]]) -> list[StreamedPiece]:
        """The pieces of a generation, during which each of these is done once so many tokens have come."""
        self.client.ask(PROMPT, TOKENS)
        pieces: list[StreamedPiece] = []
        waiting = dict(sorted(faults.items()))
        while not pieces or pieces[-1].hops is None:
            pieces.append(self.client.piece())
            tokens = sum(len(piece.token_ids) for piece in pieces)
            for at in [at for at in waiting if at <= tokens]:
                waiting.pop(at)()
        assert not waiting
        return pieces


@pytest.fixture
def swarm(tmp_path: Path) -> Iterator[HomeSwarm]:
    require_namespaces()
    with ExitStack() as stack:
        net = stack.enter_context(Internet(slow=True))
        invited: list[str] = []
        volunteers = []
        for at, host in enumerate(VOLUNTEERS):
            joins = ("--initial-peers", *invited) if invited else ("--new-swarm",)
            own = (
                "--layers",
                "0:1",
                "--dtype",
                "bfloat16",
                "--listen",
                host,
                "--announce",
                host,
                "--relay-port",
                "443",
            )
            volunteers.append(
                HomePeer(stack, net, net.volunteer(host), tmp_path / f"volunteer{at}", *joins, *own)
            )
            invited.append(invited_by(volunteers[-1].ready()))
        options = ("--dtype", "float32", *(part for one in invited for part in ("--initial-peers", one)))
        homes = [
            HomePeer(stack, net, net.home(kind, host), tmp_path / kind, *options, "--layers", span)
            for kind, host, span in HOMES
        ]
        for home in homes:
            home.ready()
        client = HomeClient(stack, net, net.home(*CLIENT), *invited)
        yield HomeSwarm(net, volunteers, homes, client)


@pytest.fixture(scope="session")
def expected() -> tuple[int, ...]:
    references, folder = References(), bundled_folder()
    return tuple(references.greedy(folder, references.ids(folder, PROMPT), TOKENS))


@pytest.mark.timeout(600)
def test_relays_die_mappings_vanish_and_addresses_change_and_the_tokens_are_transformers(
    swarm: HomeSwarm, expected: tuple[int, ...]
) -> None:
    net, (first, middle, last) = swarm.net, HOMES
    cases: dict[str, Callable[[], dict[int, Callable[[], None]]]] = {
        "links move to holes": dict,
        "the mappings of a relayed home vanish": lambda: {30: lambda: net.forget(middle[1])},
        "those of a home with a hole vanish": lambda: {30: lambda: net.forget(first[1])},
        "the outer address of a home changes": lambda: {30: lambda: net.forget(last[1], MOVED_TO)},
        "a relay is killed": lambda: {30: swarm.busiest().kill},
    }
    for name, faults in cases.items():
        pieces = swarm.generated(faults())
        assert [token for piece in pieces for token in piece.token_ids] == list(expected), name
        assert len(pieces[-1].hops or ()) == len(HOMES), name
    assert swarm.ways().keys() >= {"punched", "relayed"}
