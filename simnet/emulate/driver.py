"""The client of an emulation: sends requests when they come, and writes down when their tokens do."""

import asyncio
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Self

import numpy as np

from molink.client.circuit.circuit_builder import CircuitBuilder
from molink.client.circuit.connection import SwarmConnection
from molink.client.circuit.session import ClientSession
from molink.client.circuit.session_request import SessionRequest
from molink.client.errors import SwarmError
from molink.dht.records.records import PeerView
from molink.peer.wire.protocol import molink_pb2 as pb
from molink.shards.spec import ModelSpec, SamplingParams
from molink.simnet.core.request_load import AFTERMATH_S, Request, RequestOutcome
from molink.simnet.core.room import Room, reserved_tokens

FORMATION_TIMEOUT_S = 30.0
TRACED_EVERY = 4
"""One request in so many carries the hops' times, from which the links' follow."""


class RequestDriver:
    """Sends requests over one connection, as if many clients stood beside the head."""

    def __init__(
        self, connection: SwarmConnection, spec: ModelSpec, room: Room, hops: int, seed: int
    ) -> None:
        self._circuit_builder = CircuitBuilder(connection, spec)
        self._spec = spec
        self._room = room
        self._hops = hops
        self._seed = seed
        self.running = 0
        """Requests that have come and not ended."""
        self.awaited = 0
        """Measured requests that have not ended, once no more of them come."""
        self.tokens = 0
        """That all requests have got so far."""

    async def drive(
        self,
        requests: Iterator[Request],
        start_s: float,
        window_s: tuple[float, float],
        report: Callable[[], None],
    ) -> list[RequestOutcome]:
        """Sends every request at its time from `start_s` (the loop's clock) on. Returns what became of those that came
        within `window_s`, in their order; the load stays up until the last of these has ended.

        Raises:
            EmulationError, SwarmError: what no request can be blamed for.
        """
        measured: list[asyncio.Task[RequestOutcome]] = []
        others: list[asyncio.Task[RequestOutcome]] = []
        arriving = asyncio.create_task(
            self._arrive(requests, start_s, window_s, measured, others), name="arrivals"
        )
        clock = asyncio.get_running_loop().time
        try:
            await _sleep_until(start_s + window_s[1])
            deadline_s = clock() + AFTERMATH_S
            while clock() < deadline_s and (running := [task for task in measured if not task.done()]):
                self.awaited = len(running)
                await asyncio.wait((*running, arriving), timeout=1.0, return_when=asyncio.FIRST_COMPLETED)
                if arriving.done():
                    arriving.result()
                report()
        finally:
            for task in (arriving, *measured, *others):
                task.cancel()
            await asyncio.gather(arriving, *measured, *others, return_exceptions=True)
        return [task.result() for task in measured]

    async def _arrive(
        self,
        requests: Iterator[Request],
        start_s: float,
        window_s: tuple[float, float],
        measured: list[asyncio.Task[RequestOutcome]],
        others: list[asyncio.Task[RequestOutcome]],
    ) -> None:
        for request in requests:
            await _sleep_until(start_s + request.arrival_s)
            kind = measured if window_s[0] <= request.arrival_s < window_s[1] else others
            kind.append(asyncio.create_task(self._serve(request, start_s), name=f"request {request.number}"))

    async def _serve(self, request: Request, start_s: float) -> RequestOutcome:
        """One request from its arrival to its last token. Never raises: an error is its outcome, and so is the end of
        the run."""
        clock = asyncio.get_running_loop().time
        token_ids: list[int] = []
        token_s: list[float] = []
        one_way_s: list[float] = []
        error = None
        self.running += 1
        try:
            async with self._room.taken(reserved_tokens(request.prompt_tokens + request.new_tokens)):
                params = SamplingParams(max_new_tokens=request.new_tokens, ignore_eos=True)
                traced = request.number % TRACED_EVERY == 0
                session = ClientSession(
                    self._circuit_builder, SessionRequest(self._prompt(request), params, trace=traced)
                )
                async for token in session.tokens(FORMATION_TIMEOUT_S):
                    self.tokens += 1
                    token_ids.append(token.token_id)
                    token_s.append(clock() - start_s)
                    if len(token_s) > 1 and token.timings:
                        one_way_s.append(_one_way_s(token, token_s[-1] - token_s[-2], self._hops))
            if len(token_ids) != request.new_tokens:
                error = f"it got {len(token_ids)} of {request.new_tokens} tokens"
        except (SwarmError, ValueError) as problem:
            error = str(problem)
        except asyncio.CancelledError:
            error = "it had not ended when the run did"
        finally:
            self.running -= 1
        return RequestOutcome(request, tuple(token_ids), tuple(token_s), tuple(one_way_s), error)

    def _prompt(self, request: Request) -> list[int]:
        """Made up: the same for the same seed and request."""
        rng = np.random.default_rng((self._seed, request.number))
        return [int(token) for token in rng.integers(self._spec.vocabulary_size, size=request.prompt_tokens)]


def _one_way_s(token: pb.Token, since_last_s: float, hops: int) -> float:
    """What of the time since the last token the hops do not account for, for each of the links between them."""
    at_hops_s = sum(timing.queue_us + timing.compute_us for timing in token.timings) / 1e6
    return (since_last_s - at_hops_s) / hops


async def _sleep_until(at_s: float) -> None:
    await asyncio.sleep(max(0.0, at_s - asyncio.get_running_loop().time()))


class KnownPeers:
    """A SwarmView of peers that stay as they are."""

    def __init__(self, views: tuple[PeerView, ...]) -> None:
        self._views = views

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def snapshot(self, model_hash: str | None = None) -> tuple[PeerView, ...]:
        """All of them, or those that serve the model."""
        return tuple(view for view in self._views if model_hash in (None, view.facts.model.model_hash))

    async def refresh(self) -> None:
        """There is nothing new."""

    async def connections(self) -> int:
        """It has none that could go."""
        return 0

    async def changed(self, timeout_s: float) -> bool:
        """Nothing changes: False after `timeout_s`."""
        await asyncio.sleep(timeout_s)
        return False
