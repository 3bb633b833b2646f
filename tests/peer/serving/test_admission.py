"""Admission on a real engine, asked over real links: leases, loads, and what is freed when and why."""

import asyncio
import threading
from dataclasses import replace
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
from support.links.data_plane import DEADLINE_S, End, asynchronous, facts_at, until
from support.models.stored_models import alter_a_weight
from support.swarms.served_peer import LOW, PATIENT_LEASES, model, opened, served

from molink.dht.identity.identity import Identity
from molink.peer.engine import stepping
from molink.peer.engine.steps import StepOutput
from molink.peer.models import model as model_module
from molink.peer.models.model import LocalModel
from molink.peer.serving.data_plane import DataPlaneSettings
from molink.peer.serving.timeouts import ServingTimeouts
from molink.peer.wire.link.certificate import new_certificate
from molink.peer.wire.protocol import molink_pb2 as pb
from molink.shards.loading.loader import load_stage
from molink.shards.model.stage import Stage
from molink.shards.spec import Span

__all__ = ["model"]
LOOKS_OFTEN = DataPlaneSettings(timeouts=ServingTimeouts(expiry_check_s=0.02))


class Loads:
    """Stands before the loader: counts loads, and holds them up while `gate` is closed."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.gate = threading.Event()
        self.gate.set()

    def __call__(self, *arguments: Any, **options: Any) -> Stage:  # noqa: ANN401 - the loader's own
        self.spans.append(arguments[1])
        assert self.gate.wait(DEADLINE_S)
        return load_stage(*arguments, **options)


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> Loads:
    counted = Loads()
    monkeypatch.setattr(model_module, "load_stage", counted)
    return counted


@asynchronous
async def test_a_lease_is_granted_then_loaded_then_ready_with_its_cache(
    model: LocalModel, loads: Loads
) -> None:
    async with served(model) as peer:
        asked = peer.alone()
        answer = await peer.reserve(asked)
        assert answer.reserved.bytes_to_load == model.spec.weight_bytes(model.spec.whole)
        assert loads.spans == []
        assert peer.cache_tokens(asked) == 0
        assert (await peer.ready(asked)).readiness.ready
        assert peer.cache_tokens(asked) == asked.capacity_tokens
        assert peer.leases.held == (model.spec.whole,)
        assert loads.spans == [model.spec.whole]
        assert (await peer.reserve(peer.alone(2))).reserved.bytes_to_load == 0


@asynchronous
async def test_a_lease_that_is_asked_for_twice_is_one_lease(model: LocalModel) -> None:
    async with served(model) as peer:
        asked = peer.alone()
        await peer.reserve(asked)
        assert (await peer.ready(asked)).readiness.ready
        cached = peer.serving.sessions.get(asked.session, 1)
        assert (await peer.reserve(asked)).HasField("reserved")
        assert peer.serving.sessions.get(asked.session, 1) is cached
        assert (await peer.readiness(asked)).readiness.ready
        assert len(peer.leases.leases) == 1


@asynchronous
async def test_progress_is_told_while_layers_load(model: LocalModel, loads: Loads) -> None:
    async with served(model) as peer:
        loads.gate.clear()
        asked = peer.alone()
        await peer.reserve(asked)
        readiness = (await peer.readiness(asked)).readiness
        assert not readiness.ready
        assert readiness.total_bytes == model.spec.weight_bytes(model.spec.whole)
        loads.gate.set()
        assert (await peer.ready(asked)).readiness.ready


@asynchronous
async def test_who_asks_for_a_sign_of_life_hears_whether_its_rows_wait_for_the_engine(
    model: LocalModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on, computes = threading.Event(), stepping.compute

    def held_up(*arguments: Any, **options: Any) -> StepOutput:  # noqa: ANN401 - the engine's own
        assert goes_on.wait(DEADLINE_S)
        return computes(*arguments, **options)

    monkeypatch.setattr(stepping, "compute", held_up)
    async with served(model) as peer:
        computed, queued, unasked = (peer.alone(session) for session in (1, 2, 3))
        for asked in (computed, queued, unasked):
            await peer.reserve(asked)
            assert not (await peer.ready(asked)).readiness.waits
        peer.link.post(pb.Start(session=computed.session, epoch=1, token_ids=[5, 6, 7, 8, 9]))
        while not (await peer.readiness(computed)).readiness.computing_ms:
            pass
        peer.link.post(pb.Start(session=queued.session, epoch=1, token_ids=[5, 6, 7, 8, 9]))
        waiting = [(await peer.ready(asked)).readiness.waits for asked in (computed, queued, unasked)]
        goes_on.set()
        assert waiting == [False, True, False]


@asynchronous
async def test_leases_for_the_same_cold_layers_share_one_load(model: LocalModel, loads: Loads) -> None:
    async with served(model) as peer:
        first, second = peer.alone(1), peer.alone(2)
        await asyncio.gather(peer.reserve(first), peer.reserve(second))
        ready = await asyncio.gather(peer.ready(first), peer.ready(second))
        assert [one.readiness.ready for one in ready] == [True, True]
        assert loads.spans == [model.spec.whole]
        assert peer.cache_tokens(first) == peer.cache_tokens(second) == 20


@asynchronous
async def test_a_release_frees_the_cache_and_keeps_the_weights(model: LocalModel) -> None:
    async with served(model) as peer:
        free_bytes = peer.leases.free_kv_bytes
        asked = peer.alone()
        await peer.reserve(asked)
        await peer.ready(asked)
        await peer.release(asked)
        assert peer.cache_tokens(asked) is None
        assert peer.leases.leases == ()
        assert peer.leases.held == (model.spec.whole,)
        assert peer.leases.free_kv_bytes == free_bytes - model.spec.weight_bytes(model.spec.whole)
        assert (await peer.ready(asked)).refusal.code == "epoch"
        await peer.release(asked)


@asynchronous
async def test_a_release_before_anything_was_loaded_gives_all_memory_back(
    model: LocalModel, loads: Loads
) -> None:
    async with served(model) as peer:
        before = (peer.leases.free_weight_bytes, peer.leases.free_kv_bytes)
        first, second = peer.alone(1), peer.alone(2)
        await peer.reserve(first)
        await peer.reserve(second)
        await peer.release(first)
        assert peer.leases.loading == (model.spec.whole,)  # the other still waits for it
        await peer.release(second)
        assert (peer.leases.free_weight_bytes, peer.leases.free_kv_bytes) == before
        assert peer.leases.loading == ()
        assert loads.spans == []


@asynchronous
async def test_a_release_does_not_overtake_the_request_that_it_takes_back(model: LocalModel) -> None:
    async with served(model) as peer:
        asked = peer.alone()
        reserving = asyncio.create_task(peer.reserve(asked))
        releasing = asyncio.create_task(peer.release(asked))
        await asyncio.gather(reserving, releasing)
        assert peer.leases.leases == ()
        assert peer.cache_tokens(asked) is None


@asynchronous
async def test_a_release_while_layers_load_ends_the_lease_and_not_the_load(
    model: LocalModel, loads: Loads
) -> None:
    async with served(model) as peer:
        loads.gate.clear()
        asked = peer.alone()
        await peer.reserve(asked)
        await peer.readiness(asked)
        await until(lambda: bool(loads.spans))
        await peer.release(asked)
        assert peer.cache_tokens(asked) is None
        loads.gate.set()
        await until(lambda: peer.leases.held == (model.spec.whole,))
        assert peer.leases.leases == ()
        again = peer.alone(2)
        await peer.reserve(again)
        assert (await peer.ready(again)).readiness.ready
        assert loads.spans == [model.spec.whole]


@asynchronous
async def test_a_lease_that_is_not_renewed_expires(
    model: LocalModel,
) -> None:
    async with served(model, settings=LOOKS_OFTEN, lease_times=replace(PATIENT_LEASES, ttl_s=0.2)) as peer:
        asked = peer.alone()
        await peer.reserve(asked)
        await until(lambda: peer.cache_tokens(asked) is None)
        assert (await peer.ready(asked)).refusal.code == "epoch"
        assert peer.leases.leases == ()


@asynchronous
async def test_a_load_that_fails_says_so_and_gives_the_memory_back(model: LocalModel, tmp_path: Path) -> None:
    damaged = opened(copytree(model.folder, tmp_path / "damaged"))
    (weights,) = damaged.folder.glob("*.safetensors")
    weights.write_bytes(weights.read_bytes()[:1000])
    async with served(damaged) as peer:
        before = peer.leases.free_weight_bytes
        asked, other = peer.alone(1), peer.alone(2)
        await peer.reserve(asked)
        await peer.reserve(other)
        refusal = (await peer.ready(asked)).refusal
        assert refusal.code == "load"
        assert "could not be loaded" in refusal.detail
        assert (await peer.ready(other)).refusal.code == "epoch"  # its lease ended with the load
        assert peer.leases.free_weight_bytes == before
        weights.write_bytes((model.folder / weights.name).read_bytes())
        again = peer.alone(3)
        await peer.reserve(again)
        assert (await peer.ready(again)).readiness.ready


@asynchronous
async def test_a_client_hears_of_a_load_that_ended_as_nobody_has_foreseen(
    model: LocalModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> Stage:
        raise KeyError("model.layers.3.mlp.gate.weight")

    monkeypatch.setattr(model_module, "load_stage", broken)
    async with served(model) as peer:
        before = peer.leases.free_weight_bytes
        asked = peer.alone()
        await peer.reserve(asked)
        assert (await peer.ready(asked)).refusal.code == "load"
        assert (peer.leases.loading, peer.leases.free_weight_bytes) == ((), before)


@asynchronous
async def test_weights_that_are_altered_after_the_peer_has_started_are_not_served(
    model: LocalModel, tmp_path: Path
) -> None:
    altered = opened(copytree(model.folder, tmp_path / "altered"))
    alter_a_weight(altered.folder, "model.layers.3.mlp.up_proj.weight")
    async with served(altered) as peer:
        asked = peer.alone()
        await peer.reserve(asked)
        refusal = (await peer.ready(asked)).refusal
        assert refusal.code == "load"
        assert "the weights of layer 3 are not those of the model that is served" in refusal.detail
        assert peer.leases.held == ()


@asynchronous
async def test_a_loader_that_breaks_in_a_way_of_its_own_fails_the_lease_too(
    model: LocalModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> Stage:
        raise ValueError("no such span")

    monkeypatch.setattr(model_module, "load_stage", broken)
    async with served(model) as peer:
        asked = peer.alone()
        await peer.reserve(asked)
        assert (await peer.ready(asked)).refusal.code == "load"
        assert peer.leases.loading == ()


@asynchronous
async def test_a_new_epoch_takes_the_place_of_the_old_one(model: LocalModel) -> None:
    async with served(model, kv_tokens=20) as peer:  # room for one session
        old, new = peer.alone(1, epoch=1), peer.alone(1, epoch=2)
        await peer.reserve(old)
        await peer.ready(old)
        assert (await peer.reserve(peer.alone(2))).refusal.code == "memory"
        assert (await peer.reserve(new)).HasField("reserved")
        assert peer.cache_tokens(old) is None
        assert (await peer.ready(new)).readiness.ready
        assert peer.cache_tokens(new) == 20
        assert (await peer.ready(old)).refusal.code == "epoch"
        assert (await peer.reserve(old)).refusal.code == "epoch"
        await peer.release(old)
        assert peer.cache_tokens(new) == 20


@asynchronous
async def test_a_client_that_goes_takes_its_own_sessions_along(model: LocalModel) -> None:
    async with served(model) as peer:
        kept = peer.alone(1)
        await peer.reserve(kept)
        await peer.ready(kept)
        async with End(is_client=True) as other:
            link = await other.links.to(peer.facts)
            for session in (2, 3):
                reserve = pb.Reserve(descriptor=peer.alone(session))
                response, _ = await link.request(pb.Request(reserve=reserve), DEADLINE_S)
                assert response.HasField("reserved")
            assert len(peer.leases.leases) == 3
        await until(lambda: len(peer.leases.leases) == 1)
        assert peer.cache_tokens(peer.alone(2)) is None
        assert peer.cache_tokens(kept) == 20


@asynchronous
async def test_a_lease_whose_layers_are_held_is_made_ready_with_its_reservation_if_asked(
    model: LocalModel, loads: Loads
) -> None:
    async with served(model) as peer:
        cold = await peer.reserve(peer.alone(1), ready_within_ms=5000)
        assert cold.WhichOneof("body") == "reserved"
        assert cold.reserved.bytes_to_load > 0
        assert loads.spans == []
        assert (await peer.ready(peer.alone(1))).readiness.ready
        # after five seconds on a machine that is that busy it says `reserved`, and is asked again
        while not (answer := await peer.reserve(peer.alone(2), ready_within_ms=5000)).readiness.ready:
            assert answer.reserved.bytes_to_load == 0
        assert peer.cache_tokens(peer.alone(2)) is not None
        assert (await peer.reserve(peer.alone(3))).WhichOneof("body") == "reserved"


@asynchronous
async def test_another_client_cannot_take_over_a_session(model: LocalModel) -> None:
    async with served(model) as peer, End(is_client=True) as other:
        await peer.reserve(peer.alone())
        link = await other.links.to(peer.facts)
        reserve = pb.Reserve(descriptor=peer.alone(epoch=2))
        response, _ = await link.request(pb.Request(reserve=reserve), DEADLINE_S)
        assert response.refusal.code == "epoch"


@asynchronous
async def test_another_client_can_neither_release_a_lease_nor_wait_for_it_nor_renew_it(
    model: LocalModel, loads: Loads
) -> None:
    async with served(model) as peer, End(is_client=True) as other:
        asked = peer.alone()
        await peer.reserve(asked)
        (lease,) = peer.leases.leases
        link = await other.links.to(peer.facts)
        key = {"session": asked.session, "epoch": asked.epoch}
        for request in (
            pb.Request(release=pb.Release(**key)),
            pb.Request(await_ready=pb.AwaitReady(**key, wait_ms=0)),
        ):
            response, _ = await link.request(request, DEADLINE_S)
            assert response.refusal.code == "epoch"
            assert "another client's" in response.refusal.detail
        assert peer.leases.leases == (lease,)
        assert loads.spans == []
        assert (await peer.ready(asked)).readiness.ready
        await peer.release(asked)
        assert peer.leases.leases == ()


@asynchronous
async def test_a_hop_that_is_not_this_peers_is_refused(model: LocalModel) -> None:
    stranger = Identity.generate()
    async with served(model) as peer:
        facts = facts_at(stranger, new_certificate(stranger.peer_id))
        two = peer.with_neighbour(stranger, facts)
        for hop in (1, 2, 2**32 - 1):
            assert (await peer.reserve(two, hop)).refusal.code == "request"
        assert (await peer.reserve(pb.SessionDescriptor())).refusal.code == "request"
        assert peer.leases.leases == ()


@asynchronous
async def test_a_hop_is_ready_when_it_has_a_link_to_its_neighbour(model: LocalModel) -> None:
    async with served(model) as peer, End() as neighbour:
        asked = peer.with_neighbour(neighbour.identity, neighbour.facts)
        await peer.reserve(asked)
        assert (await peer.ready(asked)).readiness.ready
        assert peer.serving.links.find(neighbour.peer_id) is not None
        assert peer.leases.held == (LOW,)


@asynchronous
async def test_a_neighbour_that_cannot_be_dialled_may_dial(model: LocalModel) -> None:
    async with served(model) as peer, End(is_client=True) as neighbour:
        asked = peer.with_neighbour(neighbour.identity, neighbour.facts)
        await peer.reserve(asked)
        assert not (await peer.readiness(asked)).readiness.ready
        await neighbour.links.to(peer.facts)
        assert (await peer.ready(asked)).readiness.ready


@pytest.mark.parametrize("kind", ["gone", "silent", "no-certificate"])
@asynchronous
async def test_a_neighbour_that_is_not_reached_is_named(model: LocalModel, kind: str) -> None:
    async with End() as neighbour:
        identity = neighbour.identity
        gone, certificate = neighbour.facts.grpc_addresses, neighbour.certificate
    addresses = () if kind == "silent" else gone
    facts = facts_at(identity, certificate, *addresses)
    if kind == "no-certificate":
        object.__setattr__(facts, "certificate", b"not a certificate")
    settings = DataPlaneSettings(timeouts=ServingTimeouts(unreached_s=0.5, silent_s=0.1))
    async with served(model, settings=settings) as peer:
        asked = peer.with_neighbour(identity, facts)
        await peer.reserve(asked)
        refusal = (await peer.ready(asked)).refusal
        assert refusal.code == "link"
        assert (refusal.peer_id, refusal.detail) == (identity.peer_id, "it could not be reached")
        await peer.release(asked)
        assert peer.leases.leases == ()
