"""Event streams of generations: the pieces of one as it runs, and what is made of them."""

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from contextvars import ContextVar

from molink.client.api.generation import Generation, TextPiece
from molink.client.api.generation_trace import GenerationTrace
from molink.client.api.opened_swarm import OpenedSwarm
from molink.client.api.sampling import Sampling
from molink.client.epochs.shared_prompt import PromptTurn, SharedPrompt
from molink.client.errors import InvalidRequest
from molink.client.text.tool_calls import ToolCallStream
from molink.shards.spec import SamplingParams


def _nobody_counts(_: int) -> None:
    """Nobody wants to know."""


PROMPT_COUNTED: ContextVar[Callable[[int], None]] = ContextVar("PROMPT_COUNTED", default=_nobody_counts)
"""Told how many tokens a generation's prompt has, once that is known and before anything is computed: who counts usage
sets it around the call that begins the generation."""


async def generation_events(
    opened: OpenedSwarm,
    encoded: Callable[[], Awaitable[tuple[int, ...]]],
    params: SamplingParams,
    sampling: Sampling,
    timeout_s: float,
    calls: ToolCallStream | None = None,
) -> AsyncGenerator[TextPiece, None]:
    """Yields the pieces of one generation. Leaving it ends the generation.

    Args:
        opened: the swarm.
        encoded: makes the prompt's token ids.
        params: how tokens are drawn.
        sampling: the keyword arguments that it was asked with.
        timeout_s: for so long a circuit is looked for.
        calls: finds calls of tools in the text; None: there are none.
    """
    check_timeout(timeout_s)
    trace = GenerationTrace.begin(opened.spec.name)
    context = b"" if trace is None else trace.context
    with PromptTurn(sampling.get("shared_prompt") or SharedPrompt()) as turn:
        speculation, ids = await opened.speculation(sampling), await encoded()
        PROMPT_COUNTED.get()(len(ids))
        await turn.wait()
        session = opened.session(ids, params, speculation, trace_context=context, turn=turn)
        if trace is not None:
            trace.follow(session)
        pieces = opened.pieces(session, params, timeout_s, calls)
        try:
            async with aclosing(pieces):
                async for piece in pieces:
                    turn.note_token()
                    yield piece
        finally:
            if trace is not None:
                trace.end()


def check_timeout(timeout_s: float) -> None:
    """Raises `InvalidRequest` for a time that nobody can wait."""
    if not timeout_s >= 0:
        raise InvalidRequest(f"timeout_s must be 0 or more, got {timeout_s}", "timeout_s")


async def whole(pieces: AsyncGenerator[TextPiece, None]) -> Generation:
    """Returns the generation, which comes with its last piece, as soon as its hops have been told that it is over: what
    they keep of it may be the next prompt's beginning."""
    async with aclosing(pieces):
        async for piece in pieces:
            if piece.generation is not None:
                return piece.generation
    raise RuntimeError("a generation ended without its last piece")


async def texts(pieces: AsyncGenerator[TextPiece, None]) -> AsyncGenerator[str, None]:
    """Yields the text of pieces that have some."""
    async with aclosing(pieces):
        async for piece in pieces:
            if piece.text:
                yield piece.text
