"""Gatekeeper: whose request it is, whether its key lets it in, and what it used."""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from molink.client.gateway.accounts.admitted import AdmittedRequest
from molink.client.gateway.accounts.api_keys import ApiKey, KeyScope, is_secret_of, parse_key
from molink.client.gateway.accounts.errors import KeyFault, KeyRefused, NotPermitted
from molink.client.gateway.accounts.key_table import KeyTable
from molink.client.gateway.accounts.quotas import Quotas
from molink.client.gateway.accounts.usage_ledger import UsageLedger
from molink.client.gateway.accounts.usage_store import UsageLine
from molink.client.gateway.models.swarm_protocol import AnnouncedModel
from molink.shards.spec import ModelSpec

MAX_KEY_BYTES: Final = 512
"""Of a header that may hold a key."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Caller: who sent a request. Without a key, anybody, where no key is asked for."""

    key: ApiKey | None = None

    @property
    def user(self) -> str | None:
        """Whose share of the gateway it is: the key's; None: that of its address."""
        return None if self.key is None else f"key {self.key.quota_id}"

    def require_scope(self, scope: KeyScope) -> None:
        """Raises `NotPermitted` if the key has not that scope."""
        if self.key is not None and scope not in self.key.scopes:
            raise NotPermitted(
                f"This key lacks the scope {scope.value!r}. Its operator can make another one.",
                "insufficient_scope",
            )

    def may_use(self, spec: AnnouncedModel) -> bool:
        """Whether the key may ask for that model."""
        models = () if self.key is None else self.key.limits.models
        return not models or spec.name in models or spec.model_hash in models

    def require_model(self, spec: AnnouncedModel) -> None:
        """Raises `NotPermitted` if the key may not ask for that model."""
        if not self.may_use(spec):
            raise NotPermitted(f"This key may not use the model {spec.name}.", "model_not_allowed", "model")


ANYBODY: Final = Caller()


class Gatekeeper:
    """Gatekeeper of one gateway."""

    def __init__(self, keys: KeyTable, quotas: Quotas, ledger: UsageLedger) -> None:
        self._keys = keys
        self._quotas = quotas
        self._ledger = ledger

    @property
    def asks_for_keys(self) -> bool:
        """Whether a request needs a key: as soon as there was ever one."""
        return self._keys.has_keys

    @property
    def usable_keys(self) -> int:
        """How many keys could be used now."""
        return self._keys.usable(time.time())

    @property
    def has_operator(self) -> bool:
        """Whether there is a key that may operate now."""
        return self._keys.opens(KeyScope.OPERATE, time.time())

    async def caller_of(self, headers: Iterable[tuple[bytes, bytes]]) -> Caller:
        """Returns who sent a request with these headers.

        Raises:
            KeyRefused: it has no key that is taken here, though one is needed.
            AccountsUnavailable: the database would have to be asked, and does not answer.
        """
        if not self._keys.has_keys:
            return ANYBODY
        key_id, secret = _presented(headers)
        await self._keys.ensure_fresh()
        key = await self._keys.find(key_id)
        if not is_secret_of(secret, key) or key is None:
            raise KeyRefused(KeyFault.WRONG)
        fault = key.fault(time.time())
        if fault is not None:
            raise KeyRefused(fault)
        return Caller(key)

    async def admit(
        self, caller: Caller, spec: ModelSpec, prompts: Sequence[int], new_tokens: int
    ) -> AdmittedRequest:
        """Lets a request in, as far as its key's limits go.

        Args:
            caller: who asks.
            spec: the model that is asked for.
            prompts: for each generation, the tokens that its prompt is estimated to have; 0: it is another's.
            new_tokens: that each generation may come to.

        Raises:
            NotPermitted: the key may not use that model.
            DemandTooLarge, QuotaExceeded: it is more than the key may have, ever or now.
            AccountsUnavailable: the database would have to be asked, and does not answer.
        """
        caller.require_model(spec)
        taken = None
        if caller.key is not None:
            new_tokens = min(new_tokens, spec.context_length)
            tokens = sum(min(prompt, spec.context_length) for prompt in prompts) + new_tokens * len(prompts)
            taken = await self._quotas.take(caller.key, tokens, len(prompts))
        key_id = "" if caller.key is None else caller.key.id
        return AdmittedRequest(self._ledger, key_id, spec.name, taken, prompts)

    async def usage(self, caller: Caller, days: int) -> tuple[UsageLine, ...]:
        """Returns the usage of a caller's key in the last days; none without a key.

        Raises:
            AccountsUnavailable: as `Database.transaction` does.
        """
        if caller.key is None:
            return ()
        return await self._ledger.of_days(days, time.time(), caller.key.id)


def _presented(headers: Iterable[tuple[bytes, bytes]]) -> tuple[str, bytes]:
    """The key that a request has in `Authorization: Bearer` or `x-api-key`. Two different ones are none: what stands
    before this gateway might have gone by the other."""
    found: set[bytes] = set()
    for name, value in headers:
        if name == b"x-api-key":
            found.add(value.strip())
        elif name == b"authorization":
            kind, _, rest = value.strip().partition(b" ")
            if kind.lower() == b"bearer":
                found.add(rest.strip())
    if not found:
        raise KeyRefused(KeyFault.MISSING)
    if len(found) > 1:
        raise KeyRefused(KeyFault.AMBIGUOUS)
    [text] = found
    parsed = parse_key(text[:MAX_KEY_BYTES].decode("latin-1"))
    if parsed is None:
        raise KeyRefused(KeyFault.WRONG)
    return parsed
