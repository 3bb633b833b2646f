"""Peers that follow the control plane's protocols and then lie at one point: whatever they say, honest ones go on."""

import contextlib
import threading
import zlib
from collections.abc import Awaitable, Callable, Iterator

import pytest
import trio
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test
from support.attackers.control_plane_attack import (
    Claim,
    Muxed,
    delimited,
    dialled,
    newcomer_finds,
    proven,
    varint,
    victim,
)
from support.swarms.swarm_examples import facts_of, state_of

from molink.dht.gossip.gossip import IHAVE, IWANT
from molink.dht.gossip.gossip import PROTOCOL as GOSSIP
from molink.dht.gossip.table import PROTOCOL as TABLE
from molink.dht.host.compressed_stream import Deflater
from molink.dht.host.host import Host, open_host
from molink.dht.identity.identity import Identity
from molink.dht.membership.membership import tag_of
from molink.dht.node.network import Network
from molink.dht.records import announcement_pb2 as pb
from molink.dht.records.announcement import sign_facts, sign_loss, sign_state
from molink.dht.records.records import PeerLoss

ADA, MALLORY = Identity.generate(), Identity.generate()
STEP_S = 120.0


class Besieged:
    """A peer in a thread of its own, and the strangers that are connected to it."""

    def __init__(self) -> None:
        self._thread = threading.Thread(target=trio.run, args=(self._main,), name="besieged")
        self._started = threading.Event()
        self._token: trio.lowlevel.TrioToken | None = None
        self._ending = trio.Event()
        self.failure: BaseException | None = None

    def __enter__(self) -> "Besieged":
        self._thread.start()
        assert self._started.wait(30)
        return self

    def __exit__(self, *_: object) -> None:
        if self._thread.is_alive() and self._token is not None:
            self._token.run_sync_soon(self._ending.set)
        self._thread.join(30)
        assert not self._thread.is_alive()
        assert self.failure is None, self.failure

    def run(self, step: Callable[["Besieged"], Awaitable[None]]) -> None:
        """Runs a step of an attack in the peer's thread."""

        async def limited() -> None:
            with trio.fail_after(STEP_S):
                await step(self)

        trio.from_thread.run(limited, trio_token=self._token)

    async def newcomer_finds(self) -> None:
        await newcomer_finds(self.network.host.addresses[0], timeout_s=STEP_S)

    async def _main(self) -> None:
        try:
            async with (
                victim(ADA) as self.network,
                open_host(MALLORY, None, None) as self.mallory,
                contextlib.AsyncExitStack() as self.connections,
            ):
                self._token = trio.lowlevel.current_trio_token()
                self._started.set()
                await self._ending.wait()
        except BaseException as error:  # noqa: BLE001 the thread's boundary: the test asserts that there is none
            self.failure = error
            self._started.set()

    network: Network
    mallory: Host
    connections: contextlib.AsyncExitStack


FACTS, STATE = sign_facts(facts_of(MALLORY), MALLORY), sign_state(state_of(MALLORY), MALLORY)
LOSS = sign_loss(PeerLoss(tag_of(MALLORY.peer_id), tag_of(ADA.peer_id), 2**50), MALLORY)
TOO_MANY = [FACTS, STATE, LOSS, STATE[:-1] + b"!", IHAVE + bytes(5 * 20), IWANT + bytes(5)]
"""Of which nobody says three hundred at once."""


def records() -> st.SearchStrategy[bytes]:
    """Records, true and untrue, and what is none."""
    true = st.sampled_from([FACTS, STATE, LOSS])
    spoilt = st.tuples(true, st.integers(0, 500), st.integers(1, 255)).map(
        lambda it: bytes(byte ^ it[2] * (at == it[1] % len(it[0])) for at, byte in enumerate(it[0]))
    )
    cut = st.tuples(true, st.integers(0, 500)).map(lambda it: it[0][: it[1]])
    names = st.tuples(st.sampled_from([IHAVE, IWANT]), st.binary(max_size=120)).map(b"".join)
    return st.one_of(true, spoilt, cut, names, st.binary(max_size=200), st.just(b""))


def requests() -> st.SearchStrategy[bytes]:
    """What may be asked of a table, and what may not."""
    tags = st.lists(st.integers(0, 2**64 - 1), max_size=30)
    asked = st.builds(
        lambda tags, sequences, digests, states: pb.TableRequest(
            peer_tags=tags, sequences=sequences, digests=digests, states_only=states
        ).SerializeToString(),
        tags,
        tags,
        st.booleans(),
        st.booleans(),
    )
    return st.one_of(asked, records())


def deflated(data: bytes) -> bytes:
    """As one stream, and no longer than a frame."""
    deflate = zlib.compressobj(6, zlib.DEFLATED, -15)
    return (deflate.compress(data) + deflate.flush(zlib.Z_SYNC_FLUSH))[:65_535]


BOMBS = [deflated(b"\xff\xff" + bytes(2**23)), deflated(bytes(2**23))]
"""Little that inflates to much: of one endless frame, or of empty ones."""


def framed(pieces: list[bytes], error: int) -> bytes:
    """Frames, the last of which says that it is longer or shorter than it is."""
    lengths = [len(piece) for piece in pieces]
    if lengths:
        lengths[-1] = max(0, min(65_535, lengths[-1] + error))
    return b"".join(length.to_bytes(2) + piece for length, piece in zip(lengths, pieces, strict=True))


errors = st.one_of(st.just(0), st.integers(-3, 3), st.just(65_535))
packed = st.one_of(
    st.lists(records(), max_size=40).map(lambda pieces: Deflater().pack(pieces)),
    st.sampled_from(BOMBS).map(lambda bomb: [bomb]),
    st.sampled_from(TOO_MANY).map(lambda record: Deflater().pack([record] * 300)),
    st.lists(st.binary(max_size=2000), max_size=3),
)
asked = st.one_of(requests().map(lambda request: Deflater().pack([request])), packed)
yamux_frames = st.lists(
    st.tuples(
        st.integers(0, 5),
        st.integers(0, 31),
        st.integers(0, 9) | st.integers(0, 2**32 - 1),
        st.integers(0, 40) | st.sampled_from([2**16, 2**18, 2**24, 2**32 - 1]),
        st.binary(max_size=40),
    ),
    min_size=1,
    max_size=12,
)


class Siege(RuleBasedStateMachine):
    """Strangers come, one after another, and stay."""

    besieged: Besieged

    @rule(
        hello=st.sampled_from(
            [b"", delimited("/multistream/1.0.0"), delimited("/multistream/1.0.0") + delimited("/noise")]
        ),
        length=st.integers(0, 2**70) | st.integers(0, 70_000),
        body=st.binary(max_size=300),
        stays=st.booleans(),
    )
    def negotiate(self, hello: bytes, length: int, body: bytes, *, stays: bool) -> None:
        """Raw TCP: any beginning, any length, any bytes, and then silence or the end."""

        async def step(besieged: Besieged) -> None:
            stream = await dialled(besieged.network.host.addresses[0])
            if stays:
                besieged.connections.callback(stream.socket.close)
            with contextlib.suppress(trio.BrokenResourceError):
                await stream.send_all(hello + varint(length) + body)
            if not stays:
                await stream.aclose()

        self.besieged.run(step)

    @rule(frames=yamux_frames, cut=st.integers(0, 12))
    def multiplex(self, frames: list[tuple[int, int, int, int, bytes]], cut: int) -> None:
        """A proven connection with any frames of yamux, the last one cut short."""

        async def step(besieged: Besieged) -> None:
            muxed: Muxed = await besieged.connections.enter_async_context(
                proven(besieged.network.host.addresses[0], Claim.honest())
            )
            with contextlib.suppress(Exception):  # it is hung up on, sooner or later
                for frame in frames:
                    await muxed.frame(*frame)
                await muxed.session.write(bytes(cut))

        self.besieged.run(step)

    @rule(
        protocol=st.sampled_from([GOSSIP, TABLE]),
        pieces=packed,
        error=errors,
        end=st.sampled_from(["", "close", "reset"]),
    )
    def tell(self, protocol: str, pieces: list[bytes], error: int, end: str) -> None:
        """A stream that says what is not so."""
        self._speak(protocol, pieces, error, end)

    @rule(pieces=asked, error=errors, end=st.sampled_from(["", "close", "reset"]))
    def ask(self, pieces: list[bytes], error: int, end: str) -> None:
        """A question to the table, and its answer not read."""
        self._speak(TABLE, pieces, error, end)

    def _speak(self, protocol: str, pieces: list[bytes], error: int, end: str) -> None:
        async def step(besieged: Besieged) -> None:
            with contextlib.suppress(ConnectionError):
                peer_id = await besieged.mallory.dial(besieged.network.host.addresses[0], timeout_s=STEP_S)
                stream = await besieged.mallory.open_stream(peer_id, protocol, timeout_s=STEP_S)
                with contextlib.suppress(Exception):  # it may be reset while this is being said
                    await stream.write(framed(pieces, error))
                    if end:
                        await getattr(stream, end)()

        self.besieged.run(step)

    def teardown(self) -> None:
        """An honest newcomer is served as ever."""

        async def step(besieged: Besieged) -> None:
            await besieged.newcomer_finds()
            await besieged.connections.aclose()

        self.besieged.run(step)


@contextlib.contextmanager
def siege() -> Iterator[type[Siege]]:
    with Besieged() as besieged:
        yield type("SiegeOfOne", (Siege,), {"besieged": besieged})


def test_a_peer_stands_a_short_siege() -> None:
    with siege() as machine:
        run_state_machine_as_test(
            machine,
            settings=settings(
                max_examples=8, stateful_step_count=10, derandomize=True, deadline=None, database=None
            ),
        )


@pytest.mark.fuzz
def test_a_peer_stands_a_long_siege() -> None:
    with siege() as machine:
        run_state_machine_as_test(
            machine,
            settings=settings(
                max_examples=300,
                stateful_step_count=30,
                deadline=None,
                suppress_health_check=list(HealthCheck),
            ),
        )
