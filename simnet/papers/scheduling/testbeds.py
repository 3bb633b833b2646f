"""The testbeds of the decentralized-scheduling paper (section 5.2), and swarms of any size in their manner.

Machines stand in regions of a matrix of round-trip times. A link takes half the round trip, times a factor from
a normal distribution of mean 1 and deviation 0.2, drawn once for each pair of machines. Layer times are the
paper's Table 2. What the paper leaves open, and how it is read here:

- Memory. The paper says that a GPU like the A100 has "less than 80 GB" and that the model needs about 130 GB:
  the A100 counts with 80 GB here, the two others with their 24, a layer with 1.6 GB, embedding and output with
  0.5 GB each, where the circuit starts and ends.
- Places. As many machines in each region as go evenly; which machine stands where is drawn, and so are the five
  regions of testbed 3.

Another reading, in which each machine draws its region and a link takes the whole round trip, comes nearer to the
paper's averages of random search: `World` has both.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np

from molink.routing.arrays import FloatArray, IntArray
from molink.routing.latency.coordinates import fit
from molink.routing.latency.latency import CoordinateLinks
from molink.routing.problem.problem import CircuitProblem
from molink.simnet.core.matrices import RttMatrix, bundled_matrix

GB = 10**9
NOISE = 0.2
MEMORY_SHARES = (0.25, 0.75)
"""Between these the share of a machine's memory that is free is drawn, where it is (testbed 4)."""
_LEAST_FACTOR = 0.05
"""Where a link's factor is cut off, four and a half deviations below its mean, so that it stays positive."""
_LAST_MILE_MEDIAN_MS, _LAST_MILE_SPREAD = 5.0, 0.6
"""One way between a home and its region: log-normal, nine tenths between 2 and 13 ms, as cable and fibre are."""
MOST_WITH_MATRIX = 2_000
"""Machines beyond which latencies come from network coordinates: a matrix of 10,000 takes 800 MB."""
_MEASURED_NEIGHBOURS = 16
"""Of the same region, drawn with replacement: what a peer finds to ping near by."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """A kind of machine: milliseconds for one token of llama-2-70b, and memory for weights."""

    embed_ms: float
    layer_ms: float
    head_ms: float
    memory_bytes: int


GPUS: Mapping[str, Gpu] = MappingProxyType(
    {
        "A100": Gpu(0.074, 1.211, 0.471, 80 * GB),
        "RTX 3090": Gpu(0.062, 2.177, 0.785, 24 * GB),
        "A10g": Gpu(0.098, 3.748, 1.293, 24 * GB),
    }
)
"""The paper's Table 2; the memory is read as above."""
MIX: Mapping[str, int] = MappingProxyType({"A100": 1, "RTX 3090": 4, "A10g": 16})
"""How many of each kind there are among 21 machines, in every testbed."""


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """The model that is served."""

    layers: int
    layer_bytes: int
    embed_bytes: int
    head_bytes: int


LLAMA_2_70B = ModelSizes(
    layers=80, layer_bytes=1_600_000_000, embed_bytes=500_000_000, head_bytes=500_000_000
)
"""In FP16, as the paper serves it."""


@dataclass(frozen=True, slots=True)
class PaperSetting:
    """One of the paper's settings."""

    machines: int
    regions: int | None = None
    """How many regions have machines; None: all that the matrix has."""
    memory_shares: tuple[float, float] = (1.0, 1.0)


TESTBEDS: Mapping[int, PaperSetting] = MappingProxyType(
    {
        1: PaperSetting(21),
        2: PaperSetting(42),
        3: PaperSetting(21, regions=5),
        4: PaperSetting(21, memory_shares=MEMORY_SHARES),
    }
)


@dataclass(frozen=True, slots=True)
class World:
    """What testbeds are made of besides their number and seed."""

    matrix: RttMatrix = field(default_factory=bundled_matrix)
    gpus: Mapping[str, Gpu] = field(default_factory=lambda: GPUS)
    workload: ModelSizes = LLAMA_2_70B
    noise: float = NOISE
    """Standard deviation of a link's factor."""
    one_way_share: float = 0.5
    """The part of a round trip that a link takes."""
    drawn_places: bool = False
    """Whether each machine of a testbed draws its region, so that regions may have several or none."""

    @property
    def one_way_ms(self) -> FloatArray:
        """[regions, regions]: what a link takes before noise."""
        return self.matrix.rtt_ms * self.one_way_share


@dataclass(frozen=True, slots=True)
class Deployment:
    """A circuit problem with what its machines are."""

    problem: CircuitProblem
    regions: tuple[str, ...]
    """[machines]: where each stands."""
    gpus: tuple[str, ...]
    """[machines]: of which kind each is."""


def testbed(number: int, seed: int, world: World | None = None) -> CircuitProblem:  # noqa: PT028 - no test
    """Testbed 1, 2, 3 or 4 of the paper; the same seed gives the same problem."""
    return place_testbed(number, seed, world).problem


def place_testbed(number: int, seed: int, world: World | None = None) -> Deployment:
    """Testbed 1, 2, 3 or 4 with the places of its machines; raises ValueError for another number."""
    chosen = TESTBEDS.get(number)
    if chosen is None:
        raise ValueError(f"testbed must be one of {', '.join(map(str, TESTBEDS))}, got {number}")
    world = world or World()
    count = len(world.matrix.regions)
    if chosen.regions is not None and count < chosen.regions:
        raise ValueError(f"testbed {number} needs {chosen.regions} regions, the matrix has {count}")
    rng = np.random.default_rng((number, seed))
    settled = rng.permutation(count)[: chosen.regions]
    places = (
        rng.choice(settled, chosen.machines)
        if world.drawn_places
        else rng.permutation(np.resize(settled, chosen.machines))
    )
    kinds = _mixed(chosen.machines)
    shares = rng.uniform(*chosen.memory_shares, chosen.machines)
    latency_ms = _noisy(world.one_way_ms[np.ix_(places, places)], world.noise, rng)
    return _deployment(world, places, kinds, shares, latency_ms)


def place_random_swarm(machines: int, seed: int, world: World | None = None) -> Deployment:
    """A swarm of volunteers with its places: kinds in the testbeds' proportion, a quarter to three quarters of
    the memory free, and the way between home and region on top of every link.

    Beyond MOST_WITH_MATRIX machines latencies are predicted from coordinates fitted to the matrix, but for some
    near neighbours of each machine.
    """
    if machines < 1:
        raise ValueError(f"machines must be at least 1, got {machines}")
    world = world or World()
    rng = np.random.default_rng((machines, seed))
    places = rng.integers(len(world.matrix.regions), size=machines)
    kinds = _mixed(machines)
    shares = rng.uniform(*MEMORY_SHARES, machines)
    last_mile_ms = rng.lognormal(np.log(_LAST_MILE_MEDIAN_MS), _LAST_MILE_SPREAD, machines)
    if machines > MOST_WITH_MATRIX:
        return _deployment(world, places, kinds, shares, _coordinates(world, places, last_mile_ms, rng))
    latency_ms = _noisy(world.one_way_ms[np.ix_(places, places)], world.noise, rng)
    latency_ms += last_mile_ms[:, None] + last_mile_ms[None, :]
    np.fill_diagonal(latency_ms, 0.0)
    return _deployment(world, places, kinds, shares, latency_ms)


def _coordinates(
    world: World, places: IntArray, last_mile_ms: FloatArray, rng: np.random.Generator
) -> CoordinateLinks:
    """Every machine where its region is, its way there in the height; it has measured some of its region."""
    regions = fit(world.matrix.rtt_ms)
    order = np.argsort(places, kind="stable")
    first = np.searchsorted(places[order], places)
    population = np.bincount(places)[places]
    drawn = rng.random((len(places), _MEASURED_NEIGHBOURS)) * population[:, None]
    source = np.repeat(np.arange(len(places)), _MEASURED_NEIGHBOURS)
    target = order[first[:, None] + drawn.astype(np.int64)].ravel()
    source, target = source[source != target], target[source != target]
    one_way_ms = world.one_way_ms[places[source], places[target]]
    one_way_ms = one_way_ms * np.maximum(_LEAST_FACTOR, 1.0 + world.noise * rng.standard_normal(len(source)))
    one_way_ms = one_way_ms + last_mile_ms[source] + last_mile_ms[target]
    both_ways = (np.r_[source, target], np.r_[target, source], np.r_[one_way_ms, one_way_ms])
    heights_ms = regions.heights_ms[places] * world.one_way_share + last_mile_ms
    return CoordinateLinks.of(regions.positions[places] * world.one_way_share, heights_ms, both_ways)


def _deployment(
    world: World,
    places: IntArray,
    kinds: tuple[str, ...],
    shares: FloatArray,
    latencies: FloatArray | CoordinateLinks,
) -> Deployment:
    each = [world.gpus[kind] for kind in kinds]
    workload = world.workload
    problem = CircuitProblem(
        layer_ms=np.array([gpu.layer_ms for gpu in each]),
        latency_ms=None if isinstance(latencies, CoordinateLinks) else latencies,
        coordinates=latencies if isinstance(latencies, CoordinateLinks) else None,
        free_bytes=shares * np.array([gpu.memory_bytes for gpu in each]),
        layer_bytes=np.full(workload.layers, workload.layer_bytes, dtype=np.int64),
        embed_ms=np.array([gpu.embed_ms for gpu in each]),
        head_ms=np.array([gpu.head_ms for gpu in each]),
        embed_bytes=workload.embed_bytes,
        head_bytes=workload.head_bytes,
    )
    return Deployment(problem, tuple(world.matrix.regions[place] for place in places), kinds)


def _mixed(machines: int) -> tuple[str, ...]:
    """Kinds of machines in the testbeds' proportion, rounded so that the rare ones are not left out."""
    shares = np.ceil(np.array(list(MIX.values())) * machines / sum(MIX.values())).astype(int)
    return tuple(np.repeat(list(MIX), shares)[:machines].tolist())


def _noisy(latency_ms: FloatArray, noise: float, rng: np.random.Generator) -> FloatArray:
    """Times one factor for each pair of machines, both ways; zero from a machine to itself."""
    factor = np.maximum(_LEAST_FACTOR, 1.0 + noise * rng.standard_normal(latency_ms.shape))
    upper = np.triu(factor, 1)
    return np.asarray(latency_ms * (upper + upper.T), dtype=np.float64)
