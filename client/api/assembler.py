"""Generation assembler: text from the tokens of a session, piece by piece as it becomes certain, then the whole."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from functools import lru_cache

from molink.client.api.generation import (
    CircuitReport,
    FinishReason,
    Generation,
    Hop,
    PromptToken,
    Recovery,
    TextPiece,
    TokenLogprob,
)
from molink.client.circuit.session import ClientSession
from molink.client.epochs.session_log import SessionLog
from molink.client.text.tool_calls import ToolCall, ToolCallStream
from molink.peer.wire.protocol import molink_pb2 as pb
from molink.peer.wire.protocol.prompt_logprobs import unpacked
from molink.routing.routes.route import RouteHop
from molink.shards.spec import SamplingParams
from molink.shards.text.text_stream import StopMatcher, TextStream
from molink.shards.text.tokenizer import Tokenizer


class GenerationAssembler:
    """Generation assembler: one generation's text as it grows."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        params: SamplingParams,
        prompt: Sequence[int],
        calls: ToolCallStream | None = None,
    ) -> None:
        """`calls` finds calls of tools in the text; None: it has none."""
        self._tokenizer = tokenizer
        self._text = TextStream(
            tokenizer, frozenset() if calls is None else calls.token_ids(tokenizer.token_id)
        )
        self._calls = calls
        self._called: list[ToolCall] = []
        self._stops = StopMatcher(params.stop)
        self._prompt = prompt
        self._scores_prompt = params.prompt_logprobs is not None
        self._out: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprob] = []
        self._prompt_logprobs: tuple[PromptToken, ...] = ()

    def push(self, token: pb.Token) -> TextPiece:
        """The piece that the token adds. Its `finish_reason` is set if the generation ends here."""
        scored = () if self._token_ids else self._scored_prompt(token)
        self._token_ids.append(token.token_id)
        text = self._stops.push(self._text.push(token.token_id))
        logprobs = self._logprob(token)
        self._logprobs.extend(logprobs)
        ended = token.finish != pb.NOT_FINISHED
        if ended and self._stops.matched is None:
            text += self._stops.push(self._text.finish())
            text += self._stops.finish()
        finish = self._finish_reason(token)
        text, calls = self._split(text, ended=finish is not None)
        self._out.append(text)
        self._called.extend(calls)
        return TextPiece(text, (token.token_id,), logprobs, finish, tool_calls=calls, prompt_logprobs=scored)

    def _split(self, text: str, *, ended: bool) -> tuple[str, tuple[ToolCall, ...]]:
        if self._calls is None:
            return text, ()
        content, calls = self._calls.push(text)
        if ended:
            rest, last = self._calls.finish()
            content, calls = content + rest, calls + last
        return content, calls

    def generation(self, last: TextPiece, log: SessionLog, started_s: float) -> Generation:
        """Returns the whole, after the last piece. `started_s`: when it was asked for, by the loop's clock."""
        first_s, last_s = log.arrived_s[0], log.arrived_s[-1]
        return Generation(
            text="".join(self._out),
            token_ids=tuple(self._token_ids),
            prompt_tokens=len(self._prompt),
            finish_reason=last.finish_reason or "length",
            ttft_s=first_s - started_s,
            tpot_s=(last_s - first_s) / max(1, len(log.arrived_s) - 1),
            circuit=circuit_report(log),
            epochs=log.epochs,
            logprobs=tuple(self._logprobs),
            prompt_logprobs=self._prompt_logprobs,
            recoveries=recoveries_of(log),
            cached_tokens=log.cached_tokens,
            stop_string=self._stops.matched,
            tool_calls=tuple(self._called),
            trips=log.trips.trips,
            guessed_tokens=log.trips.guessed,
            accepted_tokens=log.trips.accepted,
        )

    def _finish_reason(self, token: pb.Token) -> FinishReason | None:
        if self._stops.matched is not None or token.finish == pb.STOP:
            return "stop"
        return "length" if token.finish == pb.LENGTH else None

    def _scored_prompt(self, first: pb.Token) -> tuple[PromptToken, ...]:
        """The prompt's tokens with the log-probabilities that came with the first token behind it."""
        if not self._scores_prompt:
            return ()
        prompt = self._prompt
        told = unpacked(first.prompt_logprobs, len(prompt))
        text_of = lru_cache(maxsize=None)(self._tokenizer.token_text)
        ids, top = told.likeliest_ids.tolist(), told.likeliest.tolist()
        scored = [PromptToken(text_of(prompt[0]), prompt[0], None)]
        for at, (token_id, logprob) in enumerate(zip(prompt[1:], told.logprobs.tolist(), strict=True)):
            best = tuple((text_of(one), value) for one, value in zip(ids[at], top[at], strict=True))
            scored.append(PromptToken(text_of(token_id), token_id, logprob, best))
        self._prompt_logprobs = tuple(scored)
        return self._prompt_logprobs

    def _logprob(self, token: pb.Token) -> tuple[TokenLogprob, ...]:
        if not token.HasField("logprob"):
            return ()
        top = tuple((self._tokenizer.token_text(one.token_id), one.logprob) for one in token.top)
        return (TokenLogprob(self._tokenizer.token_text(token.token_id), token.token_id, token.logprob, top),)


async def assemble(
    session: ClientSession,
    tokenizer: Tokenizer,
    params: SamplingParams,
    timeout_s: float,
    calls: ToolCallStream | None = None,
) -> AsyncGenerator[TextPiece, None]:
    """The session's pieces; the last one carries the whole generation."""
    assembly = GenerationAssembler(tokenizer, params, session.prompt, calls)
    started_s = asyncio.get_running_loop().time()
    tokens = session.tokens(timeout_s)
    try:
        async for token in tokens:
            piece = assembly.push(token)
            if piece.finish_reason is None:
                yield piece
                continue
            whole = assembly.generation(piece, session.log, started_s)
            yield replace(piece, generation=whole)
            return
    finally:
        await tokens.aclose()


def circuit_report(log: SessionLog) -> CircuitReport:
    """The last circuit of a session."""
    route = log.route
    if route is None:
        return CircuitReport((), 0.0)
    hops = tuple(_hop_report(hop, log) for hop in route.hops)
    return CircuitReport(hops, route.tpot_ms)


def _hop_report(hop: RouteHop, log: SessionLog) -> Hop:
    name, copy = log.names.get(hop.peer_id, ""), log.standbys.get(hop.peer_id)
    if copy is None:
        return Hop(hop.peer_id, hop.span.start, hop.span.stop, name)
    return Hop(hop.peer_id, hop.span.start, hop.span.stop, name, copy.peer_id, copy.form, copy.behind_tokens)


def recoveries_of(log: SessionLog) -> tuple[Recovery, ...]:
    """What became of the hops that a session has lost."""
    return tuple(
        Recovery(
            Hop(one.peer_id, one.span.start, one.span.stop, log.names.get(one.peer_id, "")),
            one.seconds,
            one.recomputed_tokens,
            one.by_standby,
        )
        for one in log.recoveries
        if one.span is not None
    )
