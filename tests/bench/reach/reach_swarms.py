"""Swarms of three homes behind routers: time per token over holes beside forwarded ports, and how soon one serves."""

import sys
import time
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bench.tables import Table
from support.links.home_peers import HomeClient, HomePeer, invited_by, reach_of
from support.links.namespaces import INSIDE, Internet

TPOT_BAR = 1.05
READY_BAR_S = 5.0
PROMPT, TOKENS = "To be, or not to be", 60
VOLUNTEERS = ("192.0.2.1", "198.51.100.2")
SPANS = ("0:4", "4:8", "8:12")
CLIENT = "203.0.120.9"
CONTROL, DATA = 4001, 4002
SETTLES_S = 60.0


class ThreeHomes:
    """Two volunteers that serve something else, three homes with a third of the model each, and a client at home.

    `forwarded`: the homes' routers pass their ports on.
    """

    def __init__(self, stack: ExitStack, *, forwarded: bool) -> None:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="bench-reach-")))
        self.net = net = stack.enter_context(Internet(slow=True))
        invited: list[str] = []
        for at, host in enumerate(VOLUNTEERS):
            where = ("--initial-peers", *invited) if invited else ("--new-swarm",)
            own = ("--layers", "0:1", "--dtype", "bfloat16", "--listen", host, "--announce", host)
            peer = HomePeer(stack, net, net.volunteer(host), folder / f"volunteer{at}", *where, *own)
            invited.append(invited_by(peer.ready()))
        self.options = ("--dtype", "float32", *(part for one in invited for part in ("--initial-peers", one)))
        self.homes = []
        for at, span in enumerate(SPANS):
            host = f"203.0.{113 + at}.10"
            name = net.home("port", host)
            own = ("--layers", span)
            if forwarded:
                net.forward(host, {CONTROL: CONTROL, DATA: DATA})
                announced = f"{host}:{CONTROL}:{DATA}"
                own += (
                    "--listen",
                    INSIDE,
                    "--port",
                    str(CONTROL),
                    "--grpc-port",
                    str(DATA),
                    "--announce",
                    announced,
                )
            self.homes.append(HomePeer(stack, net, name, folder / f"home{at}", *self.options, *own))
        for home in self.homes:
            home.ready()
        self.client = HomeClient(stack, net, net.home("port", CLIENT), *invited)

    def tpot_ms(self) -> float:
        """Of one generation: the median from token to token."""
        self.client.ask(PROMPT, TOKENS)
        pieces = [self.client.piece()]
        while pieces[-1].hops is None:
            pieces.append(self.client.piece())
        assert len(pieces[-1].hops) == len(SPANS)
        came_s = [piece.at_s for piece in pieces if piece.token_ids]
        return median([later - earlier for earlier, later in pairwise(came_s)]) * 1000

    def ways(self) -> set[str]:
        """How the homes' links to each other and to others go."""
        return {way for home in self.homes for way in reach_of(self.net, home)["ways"]}


def tpot(table: Table, rounds: int) -> None:
    """Three homes that nobody can dial, over holes, and the same with forwarded ports: generations in turns."""
    with ExitStack() as stack:
        punched = ThreeHomes(stack, forwarded=False)
        dialable = ThreeHomes(stack, forwarded=True)
        settled_s = time.monotonic() + SETTLES_S
        while "punched" not in punched.ways() and time.monotonic() < settled_s:
            punched.tpot_ms()
        dialable.tpot_ms()
        turns = [(punched.tpot_ms(), dialable.tpot_ms()) for _ in range(rounds)]
        assert "punched" in punched.ways()
        ratio = median([one / other for one, other in turns])
        table.judge("TPOT, punched over dialable", ratio, "times", TPOT_BAR)
        each = (median([one for one, _ in turns]), median([other for _, other in turns]))
        table.note("TPOT, punched and dialable", "{:.1f}, {:.1f} ms".format(*each), turns=turns)


def join(table: Table, rounds: int) -> None:
    """From `molink-peer join` to `ready` behind a router nobody can dial through, without what it measures itself."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="bench-reach-")))
        net = stack.enter_context(Internet(slow=True))
        host = VOLUNTEERS[0]
        own = ("--new-swarm", "--layers", "0:4", "--listen", host, "--announce", host)
        volunteer = HomePeer(stack, net, net.volunteer(host), folder / "volunteer", *own)
        invited, name = invited_by(volunteer.ready()), net.home("port", "203.0.121.7")
        runs: list[tuple[float, float]] = []
        for _ in range(rounds + 1):
            began_s = time.monotonic()
            peer = HomePeer(
                stack, net, name, folder / "joins", "--initial-peers", invited, "--layers", "4:12"
            )
            peer.ready()
            runs.append((peer.said_s[-1] - began_s, _measuring_s(peer)))
            peer.kill()
        took_s = [whole_s - measuring_s for whole_s, measuring_s in runs[1:]]
        table.judge("join to ready, behind a router", median(took_s), "s", READY_BAR_S, turns=took_s)
        table.note(
            "the same with measuring, the first time before",
            ", ".join(f"{whole_s:.1f} s" for whole_s, _ in runs),
        )


def _measuring_s(peer: HomePeer) -> float:
    """How long it measured itself: a machine too busy to be measured is measured again at each start."""
    for line, began_s, ended_s in zip(peer.said, peer.said_s, peer.said_s[1:], strict=False):
        if line.startswith("Measuring"):
            return ended_s - began_s
    return 0.0
