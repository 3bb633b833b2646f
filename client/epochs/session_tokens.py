"""The tokens of one session as its client has them, and as its circuits' tails are told them where what they draw
depends on the tokens before.

A tail is told at the beginning of each epoch. What it draws from there on it knows itself; only while the session goes
over to another circuit tokens of the running one come that the next one's tail has not drawn.
"""

from collections.abc import Sequence

from molink.peer.wire.link.link import Link
from molink.peer.wire.protocol import molink_pb2 as pb


class SessionTokens:
    """Owner of one session's sequence."""

    def __init__(self, template: pb.SessionDescriptor, prompt: Sequence[int], *, tells_tails: bool) -> None:
        """`template`: whose session's; it becomes another's where the session goes over to a successor."""
        self.history = list(prompt)
        """The prompt, and what was generated and taken."""
        self._template = template
        self._tells_tails = tells_tails
        self.arrived: list[int] = list(prompt)
        """The same with what waits to be taken."""

    def begin(self, links: Sequence[Link], epoch: int) -> bool:
        """Tells the tail of a circuit that starts; a head hears the same with the start. Returns whether it could be
        told."""
        self.arrived = list(self.history)
        return not self._tells_tails or len(links) == 1 or self._tell(links[-1], epoch, 0)

    def go_over(self, tail: Link, epoch: int) -> None:
        """Tells the tail of the circuit that the session goes over to. What cannot be told has the next epoch stand
        still, and is a loss by that."""
        if self._tells_tails:
            self._tell(tail, epoch, 0)

    def arrive(self, token: pb.Token, tail: Link, epoch: int) -> None:
        """That token has come, while the session is on the circuit of that tail, or goes over to it."""
        self.arrived.append(token.token_id)
        if self._tells_tails and token.epoch != epoch:
            self._tell(tail, epoch, len(self.arrived) - 1)

    def tell_head(self, head: Link, epoch: int, prediction: Sequence[int], scope: bytes) -> None:
        """Tells a head that the session has gone over to the sequence, and what else it may guess tokens from. Who
        cannot be told guesses nothing."""
        told = pb.History(session=self._template.session, epoch=epoch, token_ids=self.arrived)
        told.prediction.extend(prediction)
        told.guess_scope = scope
        head.post(told, sessions=(self._template.session,))

    def _tell(self, tail: Link, epoch: int, position: int) -> bool:
        tokens = self.arrived[position:]
        told = pb.History(session=self._template.session, epoch=epoch, position=position, token_ids=tokens)
        return tail.post(told, sessions=(self._template.session,))
