"""Model choice: which of the models that a swarm's peers announce is meant by a name. Pure.

Identities cost nothing, so it counts how many networks serve a model rather than how many peers say that they do; and
whom the user named as the way into the swarm counts before strangers.
"""

import random
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from molink.dht.identity.dialable import host_of
from molink.dht.membership.door import network_of
from molink.dht.records.records import PeerView, ServedModel
from molink.shards.spec import Span


@dataclass(frozen=True, slots=True)
class ModelCandidate:
    """A model, and the peers that say that they serve it."""

    served: ServedModel
    views: tuple[PeerView, ...]
    complete: bool
    """Whether the layers that they hold are all of it."""
    networks: int
    """In how many networks they are."""
    named: bool
    """Whether one of them is a peer that the user named."""

    @property
    def rank(self) -> tuple[bool, bool, int, int]:
        """The greater the likelier is it meant."""
        return self.complete, self.named, self.networks, len(self.views)


def candidates(views: Iterable[PeerView], named: Collection[str]) -> tuple[ModelCandidate, ...]:
    """The models that these peers serve, the likeliest first; of equals the smallest hash, so that clients agree.

    `named` are the ids of the peers that the user named.
    """
    by_model: dict[tuple[str, str], list[PeerView]] = {}
    for view in views:
        by_model.setdefault((view.facts.model.model_hash, view.facts.model.content_hash), []).append(view)
    found = [_candidate(group, named) for group in by_model.values()]
    found.sort(key=lambda one: one.served.model_hash)
    found.sort(key=lambda one: one.rank, reverse=True)
    return tuple(found)


def in_order_of_names(views: Iterable[PeerView], named: Collection[str]) -> tuple[ServedModel, ...]:
    """The models that these peers serve, by their names; of those of one name the likeliest first, as a client that
    asks for the name has it. A model that is announced under several names is there under each."""
    by_name: dict[str, list[PeerView]] = {}
    for view in views:
        by_name.setdefault(view.facts.model.name, []).append(view)
    served: list[ServedModel] = []
    for name in sorted(by_name):
        of_name = {view.facts.model.model_hash: view.facts.model for view in by_name[name]}
        if len(of_name) > 1:  # seldom, and weighing them takes long where peers are many
            of_name.clear()
            for one in candidates(by_name[name], named):
                of_name.setdefault(one.served.model_hash, one.served)
        served += of_name.values()
    return tuple(served)


def asked_in_order(
    views: Sequence[PeerView], first: Collection[str], rng: random.Random
) -> tuple[PeerView, ...]:
    """Orders whom to ask for files: those of `first`, then one of each network, then the others; otherwise in any
    order."""
    order = rng.sample(tuple(views), len(views))
    seen: set[str] = set()
    again: dict[str, bool] = {}
    for view in order:
        network = _network(view)
        again[view.peer_id] = network in seen
        seen.add(network)
    order.sort(key=lambda view: (view.peer_id not in first, again[view.peer_id]))
    return tuple(order)


def _candidate(views: Sequence[PeerView], named: Collection[str]) -> ModelCandidate:
    served = views[0].facts.model
    return ModelCandidate(
        served,
        tuple(views),
        complete=_covers({span for view in views for span in view.state.spans}, served.layers),
        networks=len({_network(view) for view in views}),
        named=any(view.peer_id in named for view in views),
    )


def _covers(spans: Iterable[Span], layers: int) -> bool:
    """Whether each of so many layers is in one of the spans."""
    covered = 0
    for span in sorted(spans, key=lambda one: one.start):
        if span.start > covered:
            return False
        covered = max(covered, span.stop)
    return covered >= layers


def _network(view: PeerView) -> str:
    return network_of(host_of(view.facts.grpc_addresses[0])) if view.facts.grpc_addresses else ""
