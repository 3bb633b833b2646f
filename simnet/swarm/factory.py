"""Factory of simulated swarms: drawn at random, or read from a snapshot."""

from collections.abc import Sequence

from numpy.random import default_rng

from molink.simnet.core.matrices import RttMatrix
from molink.simnet.core.request_load import LengthLimits, kept
from molink.simnet.core.traces import TraceRequest
from molink.simnet.devices.model_shapes import ModelShape
from molink.simnet.swarm.population.hardware import kinds_of
from molink.simnet.swarm.population.places import ListedPlaces, RegionPlaces
from molink.simnet.swarm.population.reach import SwarmReach
from molink.simnet.swarm.population.snapshot_file import LiveSwarm
from molink.simnet.swarm.population.volunteers import Recruiter, identity_of
from molink.simnet.swarm.settings import SwarmSettings
from molink.simnet.swarm.world import WorldSetup

_WORLD = 1
"""Beside the seed: what is drawn of the world is not what happens in it."""


def random_setup(
    settings: SwarmSettings, shape: ModelShape, matrix: RttMatrix, trace: Sequence[TraceRequest]
) -> WorldSetup:
    """Volunteers at homes all over the matrix. Raises ValueError if the model or the trace fits nothing."""
    model = shape.spec()
    rng = default_rng((settings.seed, _WORLD))
    places = RegionPlaces(matrix)
    recruiter = Recruiter(model, kinds_of(shape, model), places, settings.churn, settings.seed, rng)
    volunteers = [recruiter.draw() for _ in range(settings.peers)]
    gateway_ids = _gateway_ids(settings)
    for gateway_id in gateway_ids:
        places.draw(rng, gateway_id)
    requests = kept(trace, LengthLimits(), model)
    if not settings.undialable:
        return WorldSetup(model, places, volunteers, gateway_ids, requests, recruiter.draw)
    reach = SwarmReach(settings.seed, settings.undialable, places)
    settled = reach.settle_all(volunteers)
    return WorldSetup(
        model, reach, settled, gateway_ids, requests, lambda: reach.settle(recruiter.draw()), reach
    )


def snapshot_setup(settings: SwarmSettings, live: LiveSwarm, trace: Sequence[TraceRequest]) -> WorldSetup:
    """The peers of a snapshot; nobody comes, nobody goes."""
    return WorldSetup(
        live.model,
        ListedPlaces(live.rtt_ms, {one.peer_id: one.facts.coordinate for one in live.volunteers}),
        live.volunteers,
        _gateway_ids(settings),
        kept(trace, LengthLimits(), live.model),
    )


def _gateway_ids(settings: SwarmSettings) -> tuple[str, ...]:
    return tuple(identity_of(settings.seed, f"gateway-{at}").peer_id for at in range(settings.gateways))
