"""Frames in: what comes of sessions on links, checked, as events of the hop's core.

A session's fault is its own: it ends that, and not the link, which is others' too.
"""

from collections.abc import Iterator
from itertools import accumulate, groupby, pairwise

import torch

from molink.peer.engine.guessing import fault_of_told, fault_of_trip
from molink.peer.engine.sending import StepToken
from molink.peer.engine.sessions import ServedSession, SessionTable
from molink.peer.engine.steps import StepPayload
from molink.peer.hop import events
from molink.peer.hop.session import ArrivedRows
from molink.peer.wire.protocol import molink_pb2 as pb
from molink.peer.wire.protocol.frames import Frame, ProtocolError
from molink.routing.cost.pipeline import COST
from molink.shards import codec
from molink.shards.spec import MOST_PROMPT_LOGPROBS_BYTES, ModelSpec, row_bytes

MOST_ACTIVATION = 2.0**30
"""Larger numbers than this no model makes of its own accord, and no step overflows in float32 or bfloat16 if those that
go in are smaller."""
MOST_TOKEN_BYTES = MOST_PROMPT_LOGPROBS_BYTES + 16 * 1024
"""Of a token's message: beside a prompt's log-probabilities it has those of the likeliest tokens and a few numbers of
each hop."""

StepEvent = events.HopEvent[ServedSession, StepPayload]


def of_activations(
    peer_id: str, frame: Frame, header: pb.Activations, sessions: SessionTable, spec: ModelSpec
) -> Iterator[StepEvent]:
    """Rows of some sessions. Raises ProtocolError as `read_activations`."""
    found = [sessions.get(row.session, row.epoch) for row in header.rows]
    if all(session is None or session.ended for session in found):
        return
    logged = any(session is not None and session.inputs is not None for session in found)
    parts = read_activations(frame.payload, header, spec)
    encoded = rows_as_they_came(frame.payload, header) if logged else ()
    rows: list[ArrivedRows[ServedSession, StepPayload]] = []
    for place, (row, part, session) in enumerate(zip(header.rows, parts, found, strict=True)):
        if session is None or session.is_head or session.previous_peer_id != peer_id:
            continue  # this peer is not that hop's next one, whatever the client told that hop
        fault = fault_of_rows(header, row, part, session)
        if fault is not None:
            yield events.FaultFound(session, peer_id, fault)
            continue
        came: bytes | memoryview = b"" if session.inputs is None else encoded[place]
        if len(header.rows) > 1:
            came = bytes(came)  # nor must what it logs keep that memory
        payload = StepPayload(hidden=part, encoded=came, timings=tuple(row.timings))
        draws = row.guesses + 1 if row.sample else 0
        rows.append((session, row.step, row.rows, draws, row.prefill, row.position, payload))
    yield events.RowsArrived(peer_id, rows)


def of_tokens(peer_id: str, header: pb.Tokens, sessions: SessionTable) -> Iterator[StepEvent]:
    """A tail's tokens, for their head."""
    tokens: list[StepToken] = []
    for (key, epoch, _), together in groupby(header.tokens, _step_of):
        session = sessions.get(key, epoch)
        if session is None or not session.is_head or session.previous_peer_id != peer_id:
            continue
        trip = tuple(together)
        largest_bytes = max(token.ByteSize() for token in trip)
        fault = fault_of_trip(trip, session)
        if largest_bytes > MOST_TOKEN_BYTES:
            fault = f"a token of {largest_bytes} bytes is more than any has"
        if fault is not None:
            yield events.FaultFound(session, peer_id, fault)
        else:
            tokens += [step_token(session, token) for token in trip]
    yield events.TokensReturned(peer_id, tokens)


def of_guesses(peer_id: str, header: pb.Guesses, sessions: SessionTable) -> Iterator[StepEvent]:
    """What a head has guessed, for its tail, which keeps it; only a fault is an event."""
    for guess in header.guesses:
        session = sessions.get(guess.session, guess.epoch)
        if session is None or not session.is_tail or session.is_head or session.next_peer_id != peer_id:
            continue
        if (fault := fault_of_told(guess, session)) is not None:
            yield events.FaultFound(session, peer_id, fault)
        elif guess.step >= session.progress.told_guesses[0]:
            session.progress.told_guesses = guess.step, tuple(guess.token_ids)


def of_window_update(peer_id: str, header: pb.Stepped, sessions: SessionTable) -> StepEvent:
    """A next hop's window update."""
    stepped = [
        (session, one.step)
        for one in header.sessions
        if (session := sessions.get(one.session, one.epoch)) is not None
    ]
    return events.WindowUpdated(peer_id, stepped)


def read_activations(
    payload: memoryview, header: pb.Activations, spec: ModelSpec
) -> list[torch.Tensor | None]:
    """The rows of each session that the header lists, [its rows, hidden_size]; None where they hold what no sound hop
    sends: NaN, infinities, or numbers beyond MOST_ACTIVATION.

    Raises:
        ProtocolError: the payload is not what the header says, of another width than the model's, or of no encoding.
    """
    counts = [row.rows for row in header.rows]
    if header.hidden_size != spec.hidden_size:
        raise ProtocolError(f"activations of {header.hidden_size} numbers are not this model's")
    if not header.dtype:
        raise ProtocolError("activations come without the name of their encoding")
    try:
        hidden = codec.decode(payload, sum(counts), header.hidden_size, spec.dtype, encoding=header.dtype)
    except ValueError as error:
        raise ProtocolError(f"activations: {error}") from error
    parts = torch.split(hidden, counts)
    sound = [True] * len(parts) if is_sound(hidden) else [is_sound(part) for part in parts]
    if len(parts) == 1:
        return [hidden if sound[0] else None]
    # one that waits must not keep the memory of those that came with it; of a few, as decode steps have them, it may
    most = COST.steps_per_batch
    return [
        None if not holds else part.clone() if row.prefill or row.rows * most < len(hidden) else part
        for row, part, holds in zip(header.rows, parts, sound, strict=True)
    ]


def rows_as_they_came(payload: memoryview, header: pb.Activations) -> list[memoryview]:
    """Of an activation frame that has been read: the encoded rows of each session, each row by itself."""
    counts = [row.rows for row in header.rows]
    apart = codec.rows_apart(payload, sum(counts), header.hidden_size, header.dtype)
    size, ends = row_bytes(header.dtype, header.hidden_size), list(accumulate(counts, initial=0))
    return [apart[first * size : stop * size] for first, stop in pairwise(ends)]


def fault_of_rows(
    header: pb.Activations, row: pb.ActivationRow, part: torch.Tensor | None, session: ServedSession
) -> str | None:
    """What is wrong with a session's rows, of which `part` was read; None: nothing.

    It may be the hop's fault or the client's, who tells each hop about the session. So it costs that session alone, and
    not the link, which is others' too.
    """
    if header.dtype != session.receives_in:
        return f"activations in {header.dtype[:16]} came where {session.receives_in} was agreed on"
    if len(row.timings) > session.place.hop:
        return f"{len(row.timings)} hops are said to have computed step {row.step} before hop {session.place.hop}"
    if session.cache is None:
        return "activations came before the lease was ready"
    if part is None:
        return f"the activations of step {row.step} are not numbers that a sound hop sends"
    return None


def is_sound(hidden: torch.Tensor) -> bool:
    """Whether all numbers are finite and within MOST_ACTIVATION. One pass over them: NaN is its own extreme."""
    if not hidden.numel():
        return True
    least, greatest = hidden.aminmax()
    return float(least) >= -MOST_ACTIVATION and float(greatest) <= MOST_ACTIVATION


def step_token(session: ServedSession, token: pb.Token) -> StepToken:
    """A token as the core takes it. A client that is gone takes none: that one is the last."""
    is_last = token.finish != pb.NOT_FINISHED or session.owner.closed_because is not None
    payload = StepPayload(token_ids=(token.token_id,), expected=tuple(token.expected))
    return session, token.step, token.position, is_last, payload, token


def _step_of(token: pb.Token) -> tuple[bytes, int, int]:
    return token.session, token.epoch, token.step
