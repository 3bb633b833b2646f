"""Second copies of KV caches at one peer: those that it has made of its sessions, and those that it keeps."""

from collections.abc import Mapping
from dataclasses import dataclass

from molink.peer.engine.kept_copy import input_rows
from molink.peer.engine.sessions import ServedSession
from molink.peer.redundancy.input_log import InputLog, InputLogs
from molink.peer.serving.copy_keeper import CopyKeeper
from molink.peer.serving.copy_sender import CopySender
from molink.peer.wire.link.link import Link
from molink.peer.wire.protocol import molink_pb2 as pb
from molink.routing.routes.copy_forms import CopyForm
from molink.shards.spec import ModelSpec


@dataclass(frozen=True, slots=True, eq=False)
class Copying:
    """Both directions of a peer's copies."""

    sender: CopySender
    keeper: CopyKeeper
    logs: InputLogs
    spec: ModelSpec

    def log_inputs(self, session: ServedSession, before: InputLog | None = None) -> None:
        """What comes to the session is logged from now on: behind what came in its epoch before, or to the copy that it
        was, if rows are encoded as they were."""
        encoding, row_bytes = input_rows(session.plan, session.place.hop, self.spec)
        if before is not None and before.encoding == encoding:
            before.kept_tokens, session.inputs = None, before
            return
        if before is not None:
            before.close()
        session.inputs = self.logs.open(encoding, row_bytes)

    def serves(self, peer_id: str) -> bool:
        """Whether that peer is the client or the hop of a copy here."""
        return any(peer_id in (kept.owner.peer_id, kept.source) for kept in self.keeper.copies)

    def on_frame(self, link: Link, header: pb.CopyParts | pb.CopiesKept, payload: memoryview) -> None:
        """A hop sends parts of its copies, or a standby says how far it has come.

        Raises:
            ProtocolError: the payload is not what the header says.
        """
        if isinstance(header, pb.CopyParts):
            self.keeper.on_parts(link, header, payload)
        else:
            self.sender.on_kept(link, header)

    async def close(self) -> None:
        """Ends what is under way."""
        await self.sender.close()
        await self.keeper.close()

    def describe(self) -> Mapping[str, int]:
        """Copies, lag and bytes, JSON-ready."""
        copied = self.sender.behind_tokens
        kept = [one.intake.lacking_tokens for one in self.keeper.copies]
        return {
            "copied_sessions": len(self.sender),
            "copied_behind_tokens": sum(copied),
            "copied_furthest_behind_tokens": max(copied, default=0),
            "sent_copy_bytes": self.sender.sent_bytes,
            "sent_computed_tokens": sum(self.sender.sent_tokens.values())
            - self.sender.sent_tokens[CopyForm.KEYS_AND_VALUES],
            "input_log_bytes": self.logs.used_bytes,
            "kept_copies": len(self.keeper.copies),
            "kept_behind_tokens": sum(kept),
            "kept_furthest_behind_tokens": max(kept, default=0),
            "kept_copy_bytes": self.keeper.kv_bytes,
            "computed_copy_tokens": self.keeper.writer.computed_tokens,
            "taken_over": self.keeper.taken_over,
        }
