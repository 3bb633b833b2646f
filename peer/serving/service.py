"""What arrives on a peer's links, and where it goes: sessions' frames to the stepper, requests to admission."""

import asyncio
import logging
from collections.abc import Callable
from weakref import WeakKeyDictionary, WeakSet

from molink.dht.refusals import RefusalLog
from molink.peer.engine.sessions import SessionPlan, SessionTable, read_plan
from molink.peer.engine.stepping import Stepper
from molink.peer.memory.lease_rules import MIN_RETRY_S
from molink.peer.memory.leases import LeaseKey
from molink.peer.serving.admission import Admission, RequestRefused
from molink.peer.serving.artifact_server import ArtifactServer
from molink.peer.serving.budgets import Budget, RequestRate, RequestRates
from molink.peer.wire.link.link import Link
from molink.peer.wire.link.links import Links
from molink.peer.wire.protocol import molink_pb2 as pb
from molink.peer.wire.protocol.frames import Frame, ProtocolError
from molink.shards.spec import ModelSpec

MAX_WAIT_S = 5.0
RESERVATIONS = RequestRates(RequestRate(40.0, 128.0), RequestRate(80.0, 256.0), RequestRate(120.0, 320.0))
"""A session asks once. Checking a descriptor takes about a millisecond, beside which decode steps wait."""
PACKETS = RequestRates(RequestRate(200.0, 2000.0), RequestRate(400.0, 4000.0), RequestRate(1000.0, 8000.0))
"""Of who is not known, such as questions and signs of life, not what acknowledges something. To take one in takes a
quarter of a millisecond, gRPC's part included."""
REFUSAL_S = 0.25
"""What asks beyond the rate waits so long for its refusal, and what the link asks next waits behind it."""
FILE_PARTS = RequestRates(RequestRate(2.0, 256.0), RequestRate(8.0, 512.0), RequestRate(32.0, 1024.0))
"""Of a MiB. All that a client needs of a model is a few of them, once."""
_log = logging.getLogger(__name__)


class PeerService:
    """The peer's LinkHandler. The collaborators are attached once the links they need exist."""

    def __init__(
        self,
        spec: ModelSpec,
        sessions: SessionTable,
        artifacts: ArtifactServer,
        activation_codecs: tuple[str, ...],
        is_announced: Callable[[str], bool] = lambda _: False,
    ) -> None:
        """`is_announced`: whether an identity has announced itself to the swarm."""
        self._spec = spec
        self._encodings = (spec.dtype, *activation_codecs)
        self._sessions = sessions
        self._artifacts = artifacts
        self._stepper: Stepper | None = None
        self._admission: Admission | None = None
        self._links: Links | None = None
        self._is_announced = is_announced
        self._known: WeakSet[Link] = WeakSet()
        """Links of who was found to be known once."""
        self._packets = Budget(PACKETS)
        self._reservations = Budget(RESERVATIONS)
        self._file_parts = Budget(FILE_PARTS)
        self._refusals = RefusalLog(_log)
        self._turns: WeakKeyDictionary[Link, asyncio.Lock] = WeakKeyDictionary()
        """A release must not overtake the request whose lease it gives back."""

    def attach(self, stepper: Stepper, admission: Admission, links: Links) -> None:
        """From here on links can be served."""
        self._stepper = stepper
        self._admission = admission
        self._links = links

    def serves(self, peer_id: str) -> bool:
        """Whether a session of that client is here, or one in whose circuit that peer is a neighbour."""
        return any(
            peer_id in (session.owner.peer_id, session.next_peer_id, session.previous_peer_id)
            for session in self._sessions
        )

    def pace(self, link: Link) -> float:
        """For how many seconds no further packet of that link is to be read (`link.Pace`)."""
        if link in self._known:
            return 0.0
        if self._is_known(link) or self._is_announced(link.peer_id):
            self._known.add(link)
            return 0.0
        return self._packets.spend(link.peer_id, link.remote.network, asyncio.get_running_loop().time())

    def on_frame(self, link: Link, frame: Frame) -> None:
        stepper, header = self._stepper, frame.header
        if stepper is None:
            return
        if isinstance(header, pb.Activations):
            stepper.on_activations(link, frame, header)
        elif isinstance(header, pb.Tokens):
            stepper.on_tokens(link, header)
        elif isinstance(header, pb.Stepped):
            stepper.on_window_update(link, header)
        elif isinstance(header, pb.Start):
            stepper.on_start(link, header)
        else:
            raise ProtocolError(f"a {type(header).__name__} is out of place here")

    async def on_request(self, link: Link, request: pb.Request) -> tuple[pb.Response, bytes]:
        try:
            return await self._answer(link, request)
        except RequestRefused as refusal:
            return pb.Response(refusal=refusal.to_message()), b""
        except ProtocolError as error:
            return pb.Response(refusal=pb.Refusal(code="request", detail=str(error)[:500])), b""
        except Exception:  # noqa: BLE001 - the request boundary: whatever is wrong with one request must not end the link
            _log.exception("a %s request failed", request.WhichOneof("body"))
            return pb.Response(
                refusal=pb.Refusal(code="internal", detail="this peer failed; see its log")
            ), b""

    def on_closed(self, link: Link, reason: str) -> None:
        """Sessions of a gone client end; sessions whose neighbour is gone are reported to their clients."""
        if self._admission is None or self._links is None or self._stepper is None:
            return
        if not self._links.in_use(link):
            return  # another link has taken its place
        if any(session.owner is link for session in self._sessions):
            self._admission.release_owner(link.peer_id)
        # what came of dialling again says something of this machine's network, and is not for clients
        told = reason.partition(", and could not be resumed")[0]
        for session in self._sessions:
            hops = session.plan.hops
            if len(hops) > 1 and link.peer_id in (session.next_peer_id, session.previous_peer_id):
                self._stepper.fail_session(session, link.peer_id, "lost", told)

    def _require_encodings(self, plan: SessionPlan, hop: int) -> None:
        """The facts in the descriptor may be older than what this peer's owner wants now."""
        refused = {*plan.encodings[max(0, hop - 1) : hop + 1]}.difference(self._encodings)
        if refused:
            raise RequestRefused("codec", f"this peer takes no activations in {', '.join(sorted(refused))}")

    def _is_known(self, link: Link) -> bool:
        return self._admission is not None and self._admission.knows(link.peer_id)

    async def _spend(self, budget: Budget, link: Link, what: str) -> None:
        """Raises RequestRefused, after a while, where more is asked than may be."""
        now = asyncio.get_running_loop().time()
        wait_s = budget.spend(link.peer_id, link.remote.network, now, known=self._is_known(link))
        if wait_s:
            await asyncio.sleep(REFUSAL_S)
            self._refusals.refused(f"{what} beyond the rate", link.peer_id)
            raise RequestRefused(
                "busy", f"this peer is asked for more {what} than it answers", max(MIN_RETRY_S, wait_s)
            )

    async def _answer(self, link: Link, request: pb.Request) -> tuple[pb.Response, bytes]:
        if self._admission is None:
            raise RequestRefused("busy", "this peer is still starting", retry_after_s=1.0)
        body = request.WhichOneof("body")
        if body == "reserve":
            async with self._turns.setdefault(link, asyncio.Lock()):
                await self._spend(self._reservations, link, "reservations")
                plan = await asyncio.to_thread(read_plan, request.reserve.descriptor, self._spec)
                self._require_encodings(plan, request.reserve.hop)
                bytes_to_load = self._admission.reserve(link, plan, request.reserve.hop)
            wait_s = min(request.reserve.ready_within_ms / 1000, MAX_WAIT_S)
            if wait_s and not bytes_to_load:
                readiness = await self._admission.await_ready(plan.key, link.peer_id, wait_s)
                if readiness.ready:
                    return pb.Response(readiness=readiness), b""
            return pb.Response(reserved=pb.Reserved(bytes_to_load=bytes_to_load)), b""
        if body == "await_ready":
            asked = request.await_ready
            key = LeaseKey(bytes(asked.session), asked.epoch)
            wait_s = min(asked.wait_ms / 1000, MAX_WAIT_S)
            readiness = await self._admission.await_ready(key, link.peer_id, wait_s)
            return pb.Response(readiness=readiness), b""
        if body == "release":
            async with self._turns.setdefault(link, asyncio.Lock()):
                self._admission.release(request.release, link.peer_id)
            return pb.Response(released=pb.Released()), b""
        if body == "get_manifest":
            await self._spend(self._file_parts, link, "requests for files")
            payload, total = self._artifacts.manifest(request.get_manifest.model_hash)
            return pb.Response(content=pb.Content(total_bytes=total)), payload
        if body == "get_file":
            await self._spend(self._file_parts, link, "requests for files")
            wanted = request.get_file
            payload, total = await asyncio.to_thread(
                self._artifacts.read_part, wanted.model_hash, wanted.sha256, wanted.offset
            )
            return pb.Response(content=pb.Content(total_bytes=total)), payload
        raise RequestRefused(
            "request", "this peer does not know that request; it may be older than the asker"
        )
