"""A peer's life: find the swarm, know the model, measure the machine, serve, drain, leave."""

import asyncio
import gc
import logging
import sys
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import torch

from molink.dht.errors import BootstrapUnreachable, PortInUse
from molink.dht.host.bridge import ThreadStoppedError
from molink.dht.identity.key_file import KeyFileError
from molink.dht.records.description import describe_swarm
from molink.peer.compute.native_ways import NativeWays
from molink.peer.daemon.bootstrap import Bootstrap, PeerError
from molink.peer.daemon.draft import DraftUnusable
from molink.peer.daemon.local_swarms import LocalPresence
from molink.peer.daemon.model_switch import ModelSwitch
from molink.peer.daemon.operator_orders import OrderRefused
from molink.peer.daemon.parts import PeerParts
from molink.peer.daemon.running import say
from molink.peer.daemon.settings import JoinSettings, SettingsError
from molink.peer.deaths import NO_DEATHS, FaultLog, PastDeaths
from molink.peer.device.device import choose_devices
from molink.peer.device.machine_status import describe_machine, read_machine_status
from molink.peer.engine.metrics import PeerMetrics, ServingState, describe_line, describe_predictions
from molink.peer.host_policy.readings import ReadMachine
from molink.peer.host_policy.start_wait import StartWait
from molink.peer.memory.lease_gate import DRAIN_S
from molink.peer.ranks.processes import RanksLost
from molink.peer.state_dir import StateDir
from molink.shards.checkpoint.catalog import CheckpointNotFound
from molink.shards.checkpoint.store import StoreError
from molink.shards.errors import QuantizationUnavailable, WeightsError
from molink.shards.native.compiling import user_folder

RETRY_S = 1.0
SWITCH_INTERVAL_S = 0.0002
"""The engine's thread waits at most about so long for the event loop to let go of the interpreter; Python's default of
5 ms is longer than a whole step."""
_log = logging.getLogger(__name__)


async def _keep_up(duty: Callable[[], Awaitable[None]]) -> None:
    """Begins a duty again where descriptors, threads or memory have run out, or something took too long: a peer
    outlives that."""
    while True:
        try:
            return await duty()
        except ThreadStoppedError:
            raise
        except (OSError, MemoryError, RuntimeError) as error:
            if isinstance(error, RuntimeError) and "start new thread" not in str(error):
                raise
            _log.warning("begins again in %g s: %s", RETRY_S, str(error) or type(error).__name__)
        await asyncio.sleep(RETRY_S)


async def let_sessions_end(parts: PeerParts, changed: asyncio.Event, at_once: asyncio.Event) -> None:
    """Takes nothing new, and returns when all sessions have ended or gone over to others, DRAIN_S have passed, or
    `at_once` is set. `changed` is set when one has ended."""
    parts.leases.gate.drain()
    parts.serving.say_leaving(DRAIN_S, "it leaves the swarm")
    await parts.announcer.announce_or_later()
    deadline_s = asyncio.get_running_loop().time() + DRAIN_S
    while parts.leases.leases and asyncio.get_running_loop().time() < deadline_s:
        changed.clear()
        waits = [asyncio.create_task(event.wait()) for event in (changed, at_once)]
        await asyncio.wait(waits, timeout=1.0, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        if at_once.is_set():
            return


class Peer:
    """One peer, from join to leave. `run` it once."""

    def __init__(
        self,
        settings: JoinSettings,
        state: StateDir,
        report: Callable[[str], None],
        read_machine: ReadMachine | None = None,
        *,
        past: PastDeaths = NO_DEATHS,
        faults: FaultLog | None = None,
    ) -> None:
        """`read_machine` tells what the volunteer does; by default it is read of this machine. `past` starts have died,
        and `faults` notes what this one uses, in case it dies."""
        self.addresses: tuple[str, ...] = ()
        self.metrics = PeerMetrics()
        self._settings = settings
        self._state = state
        self._past = past
        self._faults = faults
        self._progress = report
        self._read_machine = read_machine
        self._switch = ModelSwitch()
        self._leaving = asyncio.Event()
        self._at_once = asyncio.Event()
        self._changed = asyncio.Event()
        self._start_wait = StartWait(say)
        self._parts: PeerParts | None = None

    async def run(self, on_ready: Callable[["Peer"], None]) -> None:
        """Joins, serves, and returns when it has left. With another model that its operator orders it joins anew; if
        that cannot be served, with the one before.

        Raises:
            PeerError: it cannot; the sentence says what to do.
        """
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        while True:
            try:
                await self._live(on_ready)
                settings = self._switch.next_settings(self._settings)
            except PeerError as error:
                settings = self._switch.go_back(self._settings.options.model or "", str(error))
                if settings is None or self._leaving.is_set():
                    raise
                say(f"{self._switch.reason}; serving {settings.options.model or 'the model before'} again")
            if settings is None:
                return
            if self.loads:  # two models at once are more than the memory that the owner gives
                raise PeerError("layers of the model before are still being loaded: start the peer again")
            self._settings = settings
            self._begin_again()

    def _begin_again(self) -> None:
        """What was of the life before is over, and its memory free."""
        self._parts, self.metrics = None, PeerMetrics()
        self._leaving.clear()
        gc.unfreeze()
        gc.collect()

    async def _live(self, on_ready: Callable[["Peer"], None]) -> None:
        """With one model, from join to leave. Raises PeerError."""
        ways = NativeWays(user_folder(), say, without=self._past.left_out)
        if self._faults is not None:
            ways.note = self._faults.use
        bootstrap = Bootstrap(
            self._settings,
            self._state,
            self.metrics,
            self._changed,
            self._progress,
            self._read_machine,
            self,
            ways,
        )
        try:
            devices = choose_devices(self._settings.options.device)
            await self._start_wait.until_over(self._settings.host_policy, devices, self._read_machine)
            async with AsyncExitStack() as stack:
                parts = self._parts = await bootstrap.open(stack)
                self._switch.stand()
                self.metrics.watch_serving(parts.model.spec.name, self._serving_state)
                await parts.announcer.announce_or_later(facts_too=True)
                await stack.enter_async_context(
                    LocalPresence(
                        self._settings,
                        parts.announcer.facts.peer_id,
                        (parts.discovery.port, parts.serving.port),
                        parts.serving.links,
                        say,
                    )
                )
                saying = asyncio.create_task(self._say_ready(parts, on_ready), name="say ready")
                await asyncio.sleep(0)  # it is said now, if it can be
                # What start-up made (half a million objects, torch's own above all) stays: a full collection that
                # walks it would hold up a token for a tenth of a second.
                gc.collect()
                gc.freeze()
                await self._serve(parts, saying)
        except (
            KeyFileError,
            CheckpointNotFound,
            DraftUnusable,
            StoreError,
            WeightsError,
            QuantizationUnavailable,
            PortInUse,
        ) as error:
            raise PeerError(str(error)) from error
        except RanksLost as error:
            raise PeerError(f"the devices cannot go on together: {error}. Start the peer again") from error
        except BootstrapUnreachable as error:
            raise PeerError(f"{error}. Or start a swarm of your own with --new-swarm") from error
        except SettingsError as error:  # found out only with the model, such as that it needs more memory
            raise PeerError(str(error)) from error
        except (OSError, MemoryError, torch.OutOfMemoryError) as error:
            _log.debug("what ended this life", exc_info=error)
            raise PeerError(f"this peer cannot go on: {str(error) or type(error).__name__}") from error

    def leave(self, *, at_once: bool = False) -> None:
        """Drains and stops; `at_once` without draining. Call it on the loop."""
        self._switch.cancel()
        self._leaving.set()
        if at_once:
            self._at_once.set()

    @property
    def serves(self) -> bool:
        """Whether there may be sessions to wait for: not while it begins, with its first model or another one."""
        return self._parts is not None

    @property
    def loads(self) -> bool:
        """Whether weights are still being fetched or loaded, by a thread that nothing can interrupt."""
        return self._parts is not None and self._parts.serving.loader.loads

    def status(self) -> dict[str, object]:
        """This peer and the swarm as it knows it, JSON-ready."""
        parts = self._parts
        if parts is None:
            return self._starting_status()
        swarm = describe_swarm(parts.discovery.snapshot(silent=True))
        line = describe_line(parts.serving.measure_line())
        return {**self._own_status(parts), "circuits": parts.serving.describe_circuits(), **line, **swarm}

    def own_status(self) -> dict[str, object]:
        """This peer alone, JSON-ready: soon told, however large the swarm is."""
        return self._starting_status() if self._parts is None else self._own_status(self._parts)

    def _starting_status(self) -> dict[str, object]:
        reason = self._start_wait.reason
        return {"ready": False, **({} if reason is None else {"paused": reason}), **self._deaths()}

    def _deaths(self) -> dict[str, object]:
        if not self._past.deaths:
            return {}
        left_out = sorted(self._past.left_out)
        return {"last_death": str(self._past.deaths[-1]), **({"left_out": left_out} if left_out else {})}

    def _own_status(self, parts: PeerParts) -> dict[str, object]:
        return {
            "ready": True,
            "peer_id": parts.announcer.facts.peer_id,
            "name": parts.announcer.facts.name,
            "model": parts.model.spec.name,
            "model_hash": parts.model.spec.model_hash,
            "dtype": parts.model.spec.dtype,
            "addresses": list(self.addresses),
            "spans": [[span.start, span.stop] for span in parts.leases.held],
            "sessions": len(parts.leases.leases),
            "draining": parts.leases.gate.is_closed,
            "paused": parts.pausing.paused_for,
            "computed_tokens": self.metrics.rows,
            "operators": list(self._settings.options.operator or ()),
            "sent_activation_bytes": self.metrics.activation_bytes,
            "memory": {
                "total_bytes": parts.leases.memory.total_bytes,
                "free_weight_bytes": parts.leases.free_weight_bytes,
                "free_kv_bytes": parts.leases.free_kv_bytes,
            },
            "reach": parts.reach.describe(),
            **self._deaths(),
            **describe_predictions(parts.step_times),
            **({} if parts.serving.copying is None else parts.serving.copying.describe()),
            **({} if parts.serving.roles is None else parts.serving.roles.describe()),
        }

    async def report(self) -> dict[str, Any]:
        """How this peer and its machine are, for its operator."""
        parts = self._serving_parts()
        facts, leases = parts.announcer.facts, parts.leases
        return {
            "peer_id": facts.peer_id,
            "name": facts.name,
            "version": facts.version,
            "model": parts.model.spec.name,
            "spans": [[span.start, span.stop] for span in leases.held],
            "sessions": len(leases.leases),
            "draining": leases.gate.is_closed,
            "leaving": self._leaving.is_set(),
            "serves_next": self._switch.wanted,
            "not_served": self._switch.reason,
            "paused": parts.pausing.paused_for,
            "addresses": [*facts.addresses, *facts.grpc_addresses],
            "machine": await asyncio.to_thread(describe_machine),
            "load": await asyncio.to_thread(read_machine_status),
        }

    async def drain(self) -> dict[str, Any]:
        """Takes nothing new, and has its sessions go over to others or end; it stays in the swarm."""
        parts = self._serving_parts()
        parts.leases.gate.drain()
        parts.serving.say_leaving(DRAIN_S, "its operator drains it")
        await parts.announcer.announce_or_later()
        return {"sessions": len(parts.leases.leases)}

    async def resume(self) -> dict[str, Any]:
        """Takes new sessions again, after it was drained."""
        parts = self._serving_parts()
        if self._leaving.is_set():
            raise OrderRefused("this peer is leaving already")
        parts.leases.gate.reopen("draining")
        await parts.announcer.announce_or_later()
        return {"sessions": len(parts.leases.leases)}

    async def depart(self) -> dict[str, Any]:
        """Leaves the swarm once its sessions have ended, within DRAIN_S; then the program ends."""
        parts = self._serving_parts()
        say("Leaving, as its operator orders")
        self.leave()
        return {"sessions": len(parts.leases.leases)}

    async def serve(self, model: str) -> dict[str, Any]:
        """Leaves the swarm once its sessions have ended, within DRAIN_S, and joins it anew with that model."""
        parts = self._serving_parts()
        if self._leaving.is_set() and self._switch.wanted is None:
            raise OrderRefused("this peer is leaving already")
        if model == parts.model.spec.name and not self._leaving.is_set():
            self._switch.reason = None
        else:
            say(f"Serving {model} when running sessions have ended, as the operator orders")
            self._switch.order(model)
            self._leaving.set()
        return {"sessions": len(parts.leases.leases)}

    def _serving_parts(self) -> PeerParts:
        if self._parts is None:
            raise OrderRefused("this peer is still starting")
        return self._parts

    def _serving_state(self) -> ServingState:
        parts = self._parts
        if parts is None:
            raise RuntimeError("the peer does not serve yet")
        return ServingState(
            sessions=len(parts.leases.leases),
            layers=sum(span.stop - span.start for span in parts.leases.held),
            queued_steps=parts.serving.stepper.queued,
            free_weight_bytes=parts.leases.free_weight_bytes,
            free_kv_bytes=parts.leases.free_kv_bytes,
            is_draining=parts.leases.gate.is_closed,
            is_paused=parts.pausing.paused_for is not None,
        )

    async def _say_ready(self, parts: PeerParts, on_ready: Callable[["Peer"], None]) -> None:
        """Once others have a way to this peer."""
        await parts.reach.reached()
        if parts.announcer.facts.grpc_addresses:  # else nobody can dial them
            self.addresses = parts.discovery.addresses
        on_ready(self)
        await asyncio.Event().wait()

    async def _serve(self, parts: PeerParts, saying: "asyncio.Task[None]") -> None:
        """Until told to leave; then the sessions may end, and the swarm hears that this peer goes."""
        tasks = [
            saying,
            asyncio.create_task(parts.serving.run(), name="serve"),
            asyncio.create_task(_keep_up(parts.announcer.keep_announced), name="announce"),
            asyncio.create_task(_keep_up(parts.announcer.keep_probing), name="probe"),
        ]
        tasks.append(
            asyncio.create_task(
                _keep_up(lambda: parts.reach.keep(parts.base, parts.announcer.tell_facts)),
                name="keep reachable",
            )
        )
        if parts.ranks is not None:
            tasks.append(asyncio.create_task(parts.ranks.watch(), name="watch the ranks"))
        tasks.append(asyncio.create_task(_keep_up(parts.pausing.enforce), name="keep comfortable"))
        if parts.memory_guard is not None:
            tasks.append(asyncio.create_task(parts.memory_guard.keep_within(), name="keep within memory"))
        if parts.placing is not None:
            tasks.append(asyncio.create_task(parts.placing.keep_placed(), name="keep placed"))
        leaving = asyncio.create_task(self._leaving.wait(), name="wait to leave")
        try:
            done, _ = await asyncio.wait({*tasks, leaving}, return_when=asyncio.FIRST_COMPLETED)
            for task in done - {leaving}:
                task.result()  # a duty never returns: what ended it is an error
            await let_sessions_end(parts, self._changed, self._at_once)
        finally:
            for task in (*tasks, leaving):
                task.cancel()
            await asyncio.gather(*tasks, leaving, return_exceptions=True)
