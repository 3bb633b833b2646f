"""Roles of this peer and the partners that have copies of its sessions: it tells them what it computes, and suggests to
clients which sessions should go over to them."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from molink.peer.engine.sessions import ServedSession, SessionTable
from molink.peer.memory.lease import LeaseKey
from molink.peer.profiling.profile import StepWork
from molink.peer.profiling.step_times import StepTimes
from molink.peer.redundancy.pair_balance import HeldSequence
from molink.peer.redundancy.pair_roles import (
    HERE,
    LOOK_EVERY_S,
    QUIET_S,
    THERE,
    HolderLoad,
    RoleCosts,
    Roles,
    going_over,
)
from molink.peer.serving.copying import Copying
from molink.peer.wire.link.links import Links
from molink.peer.wire.protocol import molink_pb2 as pb
from molink.routing.routes.copy_forms import GATHERED_TOKENS, CopyForm
from molink.shards.spec import ModelSpec, Span

FRESH_S = 2.0
"""What a partner said longer ago is no ground for anything."""
STAY_S = 1.0
"""A session that has just come is not sent back for balance."""
WITHIN_S = 3.0
"""A session that has not gone over by then does not."""
BEHIND_TOKENS = 2 * GATHERED_TOKENS
"""What a copy may lack when its session is to go over, which gathers new tokens and has some on their way: it gets the
rest meanwhile."""
UNKNOWN_MOVE_S = 0.1
"""What a session waits when it goes over, where the round trip to the partner is not known."""
MOST_SESSIONS = 1024
"""Of what a partner says that it decodes."""


@dataclass(slots=True)
class _Partner:
    """What a partner has said last."""

    load: HolderLoad
    heard_s: float
    prompted_s: float
    """When it had a prompt last."""


class HolderRoles:
    """Owner of what is known of partners' work, and of what was suggested. On the event loop."""

    def __init__(
        self,
        roles: Roles,
        sessions: SessionTable,
        copying: Copying,
        links: Links,
        step_times: StepTimes | None,
    ) -> None:
        self._roles = roles
        self._sessions = sessions
        self._sender = copying.sender
        self._spec: ModelSpec = copying.spec
        self._links = links
        self._step_times = step_times
        self._partners: dict[str, _Partner] = {}
        self._prompted_s = 0.0
        """When a prompt was here last."""
        self._seen_s: dict[LeaseKey, float] = {}
        self._suggested_s: dict[LeaseKey, float] = {}
        self._kept: dict[LeaseKey, int] = {}
        """Tokens of sessions that standbys say to have."""
        self.suggested = 0
        """Sessions that should have gone over, so far."""
        if roles is not Roles.OFF:
            copying.keeper.own_load = self.own_load
            copying.sender.told_kept = self._told

    def own_load(self) -> HolderLoad:
        """What this peer does for sessions of its own."""
        decoding, prompt_tokens = [], 0
        for session in self._sessions:
            if session.ended:
                continue
            tokens = 0 if session.cache is None else session.cache.certain_tokens
            if tokens < session.plan.prompt_tokens:
                prompt_tokens += session.plan.prompt_tokens - tokens
            else:
                decoding.append(tokens)
        return HolderLoad(tuple(decoding[:MOST_SESSIONS]), prompt_tokens)

    def describe(self) -> Mapping[str, object]:
        """What it may do, what it does, and what it has suggested, JSON-ready."""
        load = self.own_load()
        does = [
            *(["prompts"] if load.prompt_tokens else []),
            *(["decode"] if load.decoding_tokens else []),
        ]
        return {
            "roles": str(self._roles),
            "role": " and ".join(does) or "none",
            "suggested_moves": self.suggested,
        }

    async def run(self) -> None:
        """Looks now and then which sessions should go over, while there are any, until cancelled."""
        while True:
            await self._sessions.any_present()
            self._look(asyncio.get_running_loop().time())
            await asyncio.sleep(LOOK_EVERY_S)

    def _look(self, now_s: float) -> None:
        here = self.own_load()
        if here.prompt_tokens:
            self._prompted_s = now_s
        held: dict[str, list[ServedSession]] = {}
        for session in self._sessions:
            self._seen_s.setdefault(session.key, now_s)
            if session.standby_peer_id and not session.ended and _decodes(session):
                held.setdefault(session.standby_peer_id, []).append(session)
        present = {session.key for session in self._sessions}
        for known in (self._seen_s, self._suggested_s, self._kept):
            for key in known.keys() - present:
                del known[key]
        for peer_id in self._partners.keys() - {session.standby_peer_id for session in self._sessions}:
            del self._partners[peer_id]  # nobody's standby any more: any identity may have been one
        for peer_id, sessions in held.items():
            partner = self._partners.get(peer_id)
            if partner is not None and now_s - partner.heard_s <= FRESH_S:
                self._decide(here, partner, peer_id, sessions, now_s)

    def _decide(
        self,
        here: HolderLoad,
        partner: _Partner,
        peer_id: str,
        sessions: Sequence[ServedSession],
        now_s: float,
    ) -> None:
        are_all_wanted = here.prompt_tokens > 0
        copied = []
        for number, session in enumerate(sessions):
            tokens = 0 if session.cache is None else session.cache.certain_tokens
            goes = now_s - self._suggested_s.get(session.key, -WITHIN_S) < WITHIN_S
            stays = not are_all_wanted and now_s - self._seen_s[session.key] < STAY_S
            copied.append(
                HeldSequence(
                    number,
                    min(tokens, session.plan.capacity_tokens),
                    session.plan.capacity_tokens,
                    THERE if goes else HERE,
                    (HERE,) if stays and not goes else (HERE, THERE),
                )
            )
        going = going_over(
            self._roles,
            here,
            partner.load,
            copied,
            self._costs(here, peer_id, sessions),
            is_quiet=now_s - max(self._prompted_s, partner.prompted_s) >= QUIET_S,
        )
        for number in going:
            session = sessions[number]
            tokens = 0 if session.cache is None else session.cache.certain_tokens
            if self._is_copied(session, tokens):
                self._suggest(session, now_s)
            else:
                self._sender.hasten(session)

    def _suggest(self, session: ServedSession, now_s: float) -> None:
        self._suggested_s[session.key] = now_s
        self.suggested += 1
        session.owner.post(
            pb.Leaving(
                session=session.key.session,
                epoch=session.key.epoch,
                within_ms=round(WITHIN_S * 1000),
                reason="its partner has more time for it",
                to_standby=True,
            )
        )

    def _is_copied(self, session: ServedSession, tokens: int) -> bool:
        kept_tokens = self._kept.get(session.key)
        return kept_tokens is not None and tokens - kept_tokens <= BEHIND_TOKENS

    def _told(self, peer_id: str, header: pb.CopiesKept) -> None:
        for one in header.copies:
            session = self._sessions.get(one.session, one.epoch)
            if session is not None and session.standby_peer_id == peer_id:
                self._kept[session.key] = 0 if one.ended else one.tokens
        now_s = asyncio.get_running_loop().time()
        load = HolderLoad(tuple(header.decoding_tokens[:MOST_SESSIONS]), header.prompt_tokens)
        known = self._partners.get(peer_id)
        prompted_s = now_s if load.prompt_tokens else 0.0 if known is None else known.prompted_s
        if not any(session.standby_peer_id == peer_id for session in self._sessions):
            self._partners.pop(peer_id, None)
            return
        self._partners[peer_id] = _Partner(load, now_s, prompted_s)

    def _costs(self, here: HolderLoad, peer_id: str, sessions: Sequence[ServedSession]) -> RoleCosts | None:
        times = self._step_times
        if times is None:
            return None
        span, tokens = sessions[0].span, max(here.decoding_tokens, default=0)
        link = self._links.find(peer_id)
        rtt_ms = None if link is None else link.rtt_ms

        def decode_s(rows: int) -> float:
            return times.predicted_ms(self._work(span, decode_contexts=(tokens,) * rows)) / 1000

        return RoleCosts(
            decode_s,
            times.predicted_ms(self._work(span, prefills=((here.prompt_tokens, 0),))) / 1000
            if here.prompt_tokens
            else 0.0,
            UNKNOWN_MOVE_S if rtt_ms is None else rtt_ms / 1000,
            any(session.standby_form is not CopyForm.KEYS_AND_VALUES for session in sessions),
        )

    def _work(
        self,
        span: Span,
        decode_contexts: tuple[int, ...] = (),
        prefills: tuple[tuple[int, int], ...] = (),
    ) -> StepWork:
        return StepWork(len(span), span.start == 0, span.stop == self._spec.layers, decode_contexts, prefills)


def _decodes(session: ServedSession) -> bool:
    return session.cache is not None and session.cache.certain_tokens >= session.plan.prompt_tokens
