"""Requests about tokens: text or a chat into token ids, and back."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, model_validator

from molink.client.gateway.apis.chat_input import Arguments, ChatInput, Listed, offered
from molink.client.gateway.apis.openai import ChatMessage, TokenId, Tool

MAX_TOKENS = 2**18
"""Token ids of one request."""


class TokenizeRequest(BaseModel):
    """POST /tokenize: a prompt as completions take it, or messages as chat does."""

    model_config = ConfigDict(strict=True)

    model: str | None = None
    prompt: Annotated[str, Field(min_length=1)] | None = None
    messages: Annotated[Listed[ChatMessage], Field(min_length=1)] | None = None
    tools: Listed[Tool] | None = None
    chat_template_kwargs: Arguments | None = None
    return_token_strs: bool | None = False

    @model_validator(mode="after")
    def _one_of_both(self) -> "TokenizeRequest":
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("prompt or messages must be there, and not both")
        offered([tool.function for tool in self.tools or ()], None)
        return self

    def chat(self) -> ChatInput | None:
        """What the chat template is given; None: a prompt is asked for."""
        if self.messages is None:
            return None
        tools = offered([tool.function for tool in self.tools or ()], None)
        messages = tuple(message.plain() for message in self.messages)
        return ChatInput(messages, tools, self.chat_template_kwargs or {})


class DetokenizeRequest(BaseModel):
    """POST /detokenize."""

    model_config = ConfigDict(strict=True)

    model: str | None = None
    tokens: Annotated[Listed[TokenId], Field(max_length=MAX_TOKENS)]
