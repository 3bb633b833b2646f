"""Models that a gateway serves: the one that it was opened on, and the others of the same swarm, over one connection.

Each other one is opened when it is asked for, and stays open until others need its place: its description and tokenizer
are then here.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType, TracebackType
from typing import Any, Protocol, Self

from molink.client.errors import ModelNotFound
from molink.client.gateway.models.opened_models import OpenedModels
from molink.client.gateway.models.swarm_protocol import AnnouncedModel, ServingSwarm
from molink.shards.spec import ModelSpec


class MayUse(Protocol):
    """Who asks for a model."""

    def require_model(self, spec: AnnouncedModel) -> None:
        """Raises whatever the caller is told who may not use it."""
        ...

    def may_use(self, spec: AnnouncedModel) -> bool: ...


class NamedServices(Protocol):
    """Services, each a model under a name of its own, as `ServiceKeeper` has them."""

    def knows(self, name: str) -> bool: ...

    def names(self) -> Sequence[str]: ...

    def parameters(self, name: str) -> Mapping[str, object]: ...

    def spec_of(self, name: str) -> ModelSpec | None: ...

    async def get(self, name: str) -> ServingSwarm: ...


@dataclass(frozen=True, slots=True)
class ServiceName:
    """A service as keys see it: they name it by its name alone, never by the hash of its model."""

    name: str
    model_hash: str = ""


class ServedModels:
    """Models of one swarm that may be asked for. Open between `__aenter__` and `__aexit__`, and no longer than the
    swarm is."""

    def __init__(
        self,
        first: ServingSwarm,
        *,
        others: bool = False,
        aliases: Mapping[str, str] = MappingProxyType({}),
        services: NamedServices | None = None,
    ) -> None:
        """`first` is opened by the caller; `others`: whether all that the swarm serves may be asked for; `aliases` are
        further names, each of a model's name or hash; `services` have names of their own, and are the caller's."""
        self._services = services
        self._first = first
        self._others = others
        self._aliases = dict(aliases)
        self._opened = OpenedModels(first)

    @property
    def first(self) -> ServingSwarm:
        return self._first

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Closes all but the first."""
        await self._opened.end()

    async def get(self, asked: str, caller: MayUse) -> ServingSwarm:
        """The model of that name, hash or alias, for as long as the task runs that asks.

        Raises:
            ModelNotFound: neither the gateway nor the swarm has it.
            GatewayBusy: too many others are used.
            SwarmError: no peer hands it out.
            ServiceNotReady: it is a service that is being deployed or deleted.
        """
        if self._services is not None and self._services.knows(asked):
            caller.require_model(ServiceName(asked))
            return await self._services.get(asked)
        name = self._aliases.get(asked, asked)
        first = self._first.model
        if name in (first.name, first.model_hash) and caller.may_use(first):
            return self._first
        known = (first, *await self._served_beside())
        meant = [one for one in known if name in (one.name, one.model_hash)]
        if not meant:
            names = ", ".join(sorted({one.name for one in known if caller.may_use(one)}))
            raise ModelNotFound(asked, f"this gateway serves {names or 'you none'}")
        found = next((one for one in meant if caller.may_use(one)), meant[0])
        caller.require_model(found)
        return await self._opened.open(found.model_hash, {one.model_hash for one in known})

    async def listed(self, caller: MayUse) -> list[dict[str, Any]]:
        """The models that the caller may ask for, the first one first, with their aliases behind them. Each name is
        there once, with the model that it means: others of that name are there with their hashes in place of it."""
        return [*await self._listed_models(caller), *self._listed_services(caller)]

    async def describe(self, asked: str, caller: MayUse) -> dict[str, Any]:
        """What is listed of the model of that name, hash or alias, or of that service.

        Raises:
            ModelNotFound: the caller may ask for none of these.
        """
        models, services = await self._listed_models(caller), self._listed_services(caller)
        named = (one for one in (*services, *models) if one["id"] == asked)
        # a service is asked for by its name alone, whatever model it is of
        found = next(named, None) or next((one for one in models if one["model_hash"] == asked), None)
        if found is None:
            names = ", ".join(one["id"] for one in (*models, *services))
            raise ModelNotFound(asked, f"this gateway serves {names or 'you none'}")
        return found

    async def _listed_models(self, caller: MayUse) -> list[dict[str, Any]]:
        models: list[AnnouncedModel] = [self._first.model, *await self._served_beside()]
        entries: dict[str, dict[str, Any]] = {}
        for one in models:
            if caller.may_use(one):
                about = {"model_hash": one.model_hash, "context_length": self._context_length(one)}
                known_as = (one.name, one.model_hash)
                aliases = [alias for alias, name in self._aliases.items() if name in known_as]
                means_another = one.name in entries or one.name in self._aliases or self._is_service(one.name)
                for name in (one.model_hash if means_another else one.name, *aliases):
                    entries.setdefault(name, {"id": name, **about})
        return [*entries.values()]

    def _is_service(self, name: str) -> bool:
        return self._services is not None and self._services.knows(name)

    def _listed_services(self, caller: MayUse) -> list[dict[str, Any]]:
        """Those that the caller may ask for; of their models what is known here."""
        if self._services is None:
            return []
        specs = {name: self._services.spec_of(name) for name in self._services.names()}
        return [
            {
                "id": name,
                "model_hash": None if spec is None else spec.model_hash,
                "context_length": None if spec is None else spec.context_length,
            }
            for name, spec in specs.items()
            if caller.may_use(ServiceName(name))
        ]

    async def has_model(self, name: str) -> bool:
        """Whether a model or an alias has that name."""
        known = (self._first.model, *await self._served_beside())
        return name in self._aliases or any(name in (one.name, one.model_hash) for one in known)

    def parameters(self, asked: str) -> Mapping[str, object]:
        """Parameters of requests for that name, where these do not say; empty but for services."""
        return {} if self._services is None else self._services.parameters(asked)

    async def _served_beside(self) -> list[AnnouncedModel]:
        """The other models that may be asked for; of those of one name the one first that it means."""
        if not self._others:
            return []
        first = self._first.model.model_hash
        return [one for one in await self._first.models() if one.model_hash != first]

    def _context_length(self, model: AnnouncedModel) -> int | None:
        """Known of those that are open."""
        if model.model_hash == self._first.model.model_hash:
            return self._first.model.context_length
        opened = self._opened.find(model.model_hash)
        return None if opened is None else opened.model.context_length
