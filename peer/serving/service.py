"""What arrives on a peer's links, and where it goes: sessions' frames to the stepper, requests to admission."""

import asyncio
import logging
from collections.abc import Callable
from weakref import WeakKeyDictionary

from molink.peer.engine.sessions import SessionPlan, SessionTable, read_plan
from molink.peer.engine.stepping import Stepper
from molink.peer.memory.leases import LeaseKey
from molink.peer.serving.admission import Admission
from molink.peer.serving.artifact_server import ArtifactServer
from molink.peer.serving.copying import Copying
from molink.peer.serving.prepared_epochs import PreparedEpochs
from molink.peer.serving.request_limits import RequestLimits, RequestRefused
from molink.peer.wire.link.link import Link
from molink.peer.wire.link.links import Links
from molink.peer.wire.protocol import molink_pb2 as pb
from molink.peer.wire.protocol.frames import Frame, ProtocolError
from molink.shards.spec import GRAMMARS, PROMPT_LOGPROBS, ModelSpec

MAX_WAIT_S = 5.0
MOST_GRAMMARS = 64
"""Sessions with one that are drawn here at a time: each may take 32 MB."""
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
        *,
        abilities: frozenset[str] = frozenset(),
    ) -> None:
        """`is_announced`: whether an identity has announced itself to the swarm. `abilities`: those of GRAMMARS and
        PROMPT_LOGPROBS that this peer has."""
        self._spec = spec
        self._encodings = (spec.dtype, *activation_codecs)
        self._abilities = abilities
        self._sessions = sessions
        self._artifacts = artifacts
        self._stepper: Stepper | None = None
        self._admission: Admission | None = None
        self._links: Links | None = None
        self._copying: Copying | None = None
        self._prepared: PreparedEpochs | None = None
        self._limits = RequestLimits(self._knows, is_announced)
        self._turns: WeakKeyDictionary[Link, asyncio.Lock] = WeakKeyDictionary()
        """A release must not overtake the request whose lease it gives back."""

    def attach(
        self,
        stepper: Stepper,
        admission: Admission,
        links: Links,
        prepared: PreparedEpochs,
        copying: Copying | None = None,
    ) -> None:
        """From here on links can be served. Without `copying` no copies are kept, here or of what is here."""
        self._copying = copying
        self._prepared = prepared
        self._stepper = stepper
        self._admission = admission
        self._links = links

    def serves(self, peer_id: str) -> bool:
        """Whether a session of that client is here, or one in whose circuit that peer is a neighbour, or a copy of
        either's."""
        if self._copying is not None and self._copying.serves(peer_id):
            return True
        return any(
            peer_id
            in (
                session.owner.peer_id,
                session.next_peer_id,
                session.previous_peer_id,
                session.standby_peer_id,
            )
            for session in self._sessions
        )

    def pace(self, link: Link) -> float:
        """For how many seconds no further packet of that link is to be read (`link.Pace`)."""
        return self._limits.pace(link)

    def on_frame(self, link: Link, frame: Frame) -> None:
        stepper, prepared, header = self._stepper, self._prepared, frame.header
        if stepper is None or prepared is None:
            return
        if isinstance(header, pb.Activations):
            stepper.on_activations(link, frame, header)
            prepared.on_activations(link, frame, header)
        elif isinstance(header, pb.Tokens):
            stepper.on_tokens(link, header)
        elif isinstance(header, pb.Guesses):
            stepper.on_guesses(link, header)
            prepared.on_guesses(link, header)
        elif isinstance(header, pb.Stepped):
            stepper.on_window_update(link, header)
        elif isinstance(header, pb.Start):
            stepper.on_start(link, header)
        elif isinstance(header, pb.Move | pb.History):
            _go_on(prepared, link, header)
        elif isinstance(header, pb.CopyParts | pb.CopiesKept):
            if self._copying is not None:
                self._copying.on_frame(link, header, frame.payload)
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
        """Sessions of a client that is gone end; those whose neighbour is gone are reported to their clients."""
        if self._admission is None or self._links is None or self._stepper is None:
            return
        if any(session.owner is link for session in self._sessions):
            self._admission.abandon(link)
        if self._copying is not None:
            self._copying.keeper.owner_gone(link)
        if self._prepared is not None:
            self._prepared.forget_ended()
        if not self._links.in_use(link):
            return  # another link has taken its place
        if self._copying is not None:
            self._copying.sender.link_closed(link.peer_id)
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

    def _require_abilities(self, plan: SessionPlan, hop: int) -> None:
        """Only a tail needs to understand the grammar, and to score the prompt."""
        if hop != len(plan.hops) - 1:
            return
        if plan.params.prompt_logprobs is not None and PROMPT_LOGPROBS not in self._abilities:
            raise RequestRefused("ability", "this peer tells no log-probabilities of prompts")
        if plan.params.grammar is None:
            return
        if GRAMMARS not in self._abilities:
            raise RequestRefused("ability", "this peer draws by no grammar: it lacks molink[grammars]")
        if sum(one.plan.params.grammar is not None for one in self._sessions) >= MOST_GRAMMARS:
            raise RequestRefused("busy", "this peer draws by as many grammars as it may", retry_after_s=1.0)

    def _knows(self, peer_id: str) -> bool:
        return self._admission is not None and self._admission.knows(peer_id)

    async def _answer(self, link: Link, request: pb.Request) -> tuple[pb.Response, bytes]:
        if self._admission is None:
            raise RequestRefused("busy", "this peer is still starting", retry_after_s=1.0)
        admission, body = self._admission, request.WhichOneof("body")
        if body == "reserve":
            return await self._reserve(admission, link, request.reserve), b""
        if body == "await_ready":
            return await self._await_ready(admission, link, request.await_ready), b""
        if body == "release":
            async with self._turns.setdefault(link, asyncio.Lock()):
                self._release(admission, link, request.release)
            return pb.Response(released=pb.Released()), b""
        if body in ("get_manifest", "get_file"):
            return await self._read_file(link, request)
        raise RequestRefused(
            "request", "this peer does not know that request; it may be older than the asker"
        )

    async def _reserve(self, admission: Admission, link: Link, asked: pb.Reserve) -> pb.Response:
        is_about_copies = asked.copy or asked.prepare or self._is_known(asked.descriptor)
        if is_about_copies:
            await self._limits.spend_copy(link)
        async with self._turns.setdefault(link, asyncio.Lock()):
            if not is_about_copies:
                await self._limits.spend_reservation(link)
            plan = await asyncio.to_thread(read_plan, asked.descriptor, self._spec)
            self._require_encodings(plan, asked.hop)
            self._require_abilities(plan, asked.hop)
            if asked.copy:
                if self._copying is None:
                    raise RequestRefused("busy", "this peer keeps no copies for others")
                await self._copying.keeper.keep(link, plan, asked.hop)
                return pb.Response(reserved=pb.Reserved())
            bytes_to_load = 0 if asked.prepare else admission.reserve(link, plan, asked.hop)
            session = self._sessions.get(*plan.key)
            if asked.hand_over and session is not None and self._copying is not None:
                self._copying.sender.hasten(session)
        if asked.prepare:
            return await self._prepare(link, plan, asked)
        wait_s = min(asked.ready_within_ms / 1000, MAX_WAIT_S)
        if wait_s and not bytes_to_load:
            readiness = await admission.await_ready(plan.key, link.peer_id, wait_s)
            if readiness.ready:
                return pb.Response(readiness=readiness)
        return pb.Response(reserved=pb.Reserved(bytes_to_load=bytes_to_load))

    async def _prepare(self, link: Link, plan: SessionPlan, asked: pb.Reserve) -> pb.Response:
        if self._prepared is None:
            raise RequestRefused("busy", "this peer is still starting", retry_after_s=1.0)
        wait_s = min(asked.ready_within_ms / 1000, MAX_WAIT_S)
        return pb.Response(readiness=await self._prepared.prepare(link, plan, asked.hop, wait_s))

    def _is_known(self, descriptor: pb.SessionDescriptor) -> bool:
        """Whether that session has its lease: who asks for it again says who keeps copies."""
        return self._sessions.get(descriptor.session, descriptor.epoch) is not None

    async def _await_ready(self, admission: Admission, link: Link, asked: pb.AwaitReady) -> pb.Response:
        key = LeaseKey(bytes(asked.session), asked.epoch)
        if self._copying is not None:
            kept_tokens = self._copying.keeper.renew(key, link.peer_id)
            if kept_tokens is not None:
                return pb.Response(readiness=pb.Readiness(ready=True, held_tokens=kept_tokens))
        if self._prepared is not None and self._prepared.knows(key, link.peer_id):
            return pb.Response(readiness=pb.Readiness(ready=False))
        wait_s = min(asked.wait_ms / 1000, MAX_WAIT_S)
        return pb.Response(readiness=await admission.await_ready(key, link.peer_id, wait_s))

    def _release(self, admission: Admission, link: Link, asked: pb.Release) -> None:
        key = LeaseKey(bytes(asked.session), asked.epoch)
        if self._prepared is not None and self._prepared.forget(key, link.peer_id):
            return
        if self._copying is None or not self._copying.keeper.release(key, link.peer_id):
            admission.release(asked, link.peer_id)

    async def _read_file(self, link: Link, request: pb.Request) -> tuple[pb.Response, bytes]:
        await self._limits.spend_file_part(link)
        if request.WhichOneof("body") == "get_manifest":
            payload, total = self._artifacts.manifest(request.get_manifest.model_hash)
        else:
            wanted = request.get_file
            payload, total = await asyncio.to_thread(
                self._artifacts.read_part, wanted.model_hash, wanted.sha256, wanted.offset
            )
        return pb.Response(content=pb.Content(total_bytes=total)), payload


def _go_on(prepared: PreparedEpochs, link: Link, header: pb.Move | pb.History) -> None:
    """What an epoch goes on with: the token behind which it begins, or the sequence that its tail is to know."""
    if isinstance(header, pb.Move):
        prepared.on_move(link, header)
    else:
        prepared.on_history(link, header)
