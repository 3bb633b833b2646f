"""Turning text and chats into tokens without holding up the event loop.

A model's tokenizer and chat template are programs of whoever published the model: a template can loop, a normalizer can
take minutes or end its process. So nothing but implementations of `TextWork` runs them. Those of models that came with
the package or lie on this machine run in a thread; those that peers handed out run in processes with limits.
"""

import asyncio
import functools
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Protocol, Self

from molink.shards.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from molink.shards.text.chat_template import Message


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """Chat options: what a chat template is given beside the messages."""

    tools: Sequence[Mapping[str, Any]] = ()
    """What the model may call: `{"type": "function", "function": {"name", "description", "parameters"}}`."""
    variables: Mapping[str, Any] = field(default_factory=dict)
    """Further variables of the template, such as `enable_thinking`."""


PLAIN_CHAT: Final = ChatOptions()
TEXT_ASKER: ContextVar[str] = ContextVar("TEXT_ASKER", default="")
"""Whose texts take turns with others' where they wait: a client that asks for several users sets each user's own around
what it asks. Empty: this machine's user."""


class TextWork(Protocol):
    """One model's tokenizer and chat template at work. Open between `__aenter__` and `__aexit__`.

    Whoever stops waiting for an answer may: the work is then given up, or ends by itself within its limit.
    """

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    async def encode(self, text: str) -> tuple[int, ...]:
        """The ids of the text, with the special tokens that the model expects around it.

        Raises:
            TokenizerError: the tokenizer refuses the text, ends its process, or takes more time or memory than it may.
            SwarmUnavailable: too much of such work waits already (`busy`).
        """
        ...

    async def encode_chat(
        self, messages: "Sequence[Message]", chat: ChatOptions = PLAIN_CHAT
    ) -> tuple[int, ...]:
        """The ids of a chat, rendered by the model's chat template, with the beginning of an answer.

        Raises:
            TokenizerError: the model has no template, the template refuses the messages, or as for `encode`.
            SwarmUnavailable: as for `encode`.
        """
        ...


OpenTextWork = Callable[[Mapping[str, bytes]], TextWork]
"""Makes such work of a tokenizer's files, contents by name; it is opened by whoever asks for it."""


class TextWorkInThreads:
    """The tokenizer of a model that this machine's user chose to have here: trusted to end."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Nothing to close: a thread ends with its text."""

    async def encode(self, text: str) -> tuple[int, ...]:
        return await asyncio.to_thread(self._tokenizer.encode, text)

    async def encode_chat(
        self, messages: "Sequence[Message]", chat: ChatOptions = PLAIN_CHAT
    ) -> tuple[int, ...]:
        apply = functools.partial(
            self._tokenizer.apply_chat_template, messages, tools=chat.tools, variables=chat.variables
        )
        return await asyncio.to_thread(apply)
