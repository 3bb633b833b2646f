"""Errors of keys, quotas and the database behind them; `error_handlers.py` has their HTTP answers."""

from collections.abc import Mapping
from enum import StrEnum


class KeyFault(StrEnum):
    """Fault of a key: why it is not taken."""

    MISSING = "missing"
    AMBIGUOUS = "ambiguous"
    WRONG = "wrong"
    EXPIRED = "expired"
    REVOKED = "revoked"


class KeyRefused(Exception):
    """A request has no key that is taken here."""

    def __init__(self, fault: KeyFault) -> None:
        super().__init__(fault.value)
        self.fault = fault


class NotPermitted(Exception):
    """The key is good, but not for this; the text says for what."""

    def __init__(self, message: str, code: str, parameter: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.parameter = parameter


class QuotaExceeded(Exception):
    """The key has used what it may for now."""

    def __init__(self, message: str, kind: str, retry_after_s: float, headers: Mapping[str, str]) -> None:
        """`kind` is one of `QuotaKind`'s values, or "streams"; `headers` are those of rate limits."""
        super().__init__(message)
        self.kind = kind
        self.retry_after_s = retry_after_s
        self.headers = dict(headers)


class DemandTooLarge(Exception):
    """One request asks for more than its key may ever use at once: coming back later would not help."""

    def __init__(self, message: str, parameter: str) -> None:
        super().__init__(message)
        self.parameter = parameter


class AccountsUnavailable(Exception):
    """The database did not answer in time, or cannot be reached; the text is for the log alone."""


class OutcomeUnknown(AccountsUnavailable):
    """The database did not say whether it has committed. Who would do it again may do it twice."""


class DatabaseUnusable(Exception):
    """The database cannot be used at all; the text is one sentence for whoever started the command."""


class InvalidDatabaseUrl(DatabaseUnusable):
    """What was given as a database's URL is none."""


class UnknownKey(Exception):
    """There is no key of that id, or none to which that can be done; the text is one sentence."""


class TokenUsed(Exception):
    """A key that registers one machine has registered another; the text is one sentence."""


class UnknownResponse(Exception):
    """Nothing is kept under the id, or nothing of the caller's."""

    def __init__(self, response_id: str) -> None:
        super().__init__(f"There is no response {response_id[:80]!r}: it was not kept, or its time is over.")
