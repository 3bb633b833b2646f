"""What `molink-peer profile` and `status` look at: this machine, and a swarm from outside. JSON-ready."""

import asyncio
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from molink.commands import CommandFailed
from molink.dht.identity.identity import Identity
from molink.dht.identity.key_file import KeyFileError
from molink.dht.identity.swarm_key import SwarmKey
from molink.dht.records.description import describe_swarm
from molink.signals import run_loop

if TYPE_CHECKING:
    from molink.peer.models.model import LocalModel
    from molink.peer.profiling.profile import Profile
    from molink.shards.spec import ModelSpec

SWARM_TIMEOUT_S = 30.0
COMPARED_DTYPES = ("float32", "bfloat16")
"""A layer is timed in these and in the model's own. Few models were made for float16, and others may overflow in it."""


def measure_machine(
    model: str,
    device_name: str,
    dtype: str,
    threads: int | None,
    folder: Path,
    progress: Callable[[str], None],
    say: Callable[[str], None],
) -> dict[str, object]:
    """Measures the device with the model, the disk of `folder`, and lists the network's addresses.

    Of a hub's model no weights are fetched: random ones take as long to compute with. Its hash stays unknown. With
    dtype `auto`, the model's own is measured, and a layer's decode step in others too. `progress` is told what is being
    done, `say` what the owner should know.

    Raises:
        CommandFailed: the model cannot be found or loaded, or the folder cannot be written.
        SettingsError: there is no such device.
    """
    from molink.peer.compute.backend import MeasuredModel
    from molink.peer.compute.first_step import first_step
    from molink.peer.device.device import (
        choose_device,
        default_memory_bytes,
        describe_device,
        free_memory_bytes,
        why_not_others,
    )
    from molink.peer.device.machine import network_addresses
    from molink.peer.device.threads import counts_to_try
    from molink.peer.models.model import ModelRequest, open_model
    from molink.peer.profiling.profile_json import to_json
    from molink.peer.profiling.profiler import measure
    from molink.shards.checkpoint.catalog import CheckpointNotFound
    from molink.shards.checkpoint.store import StoreError
    from molink.shards.errors import WeightsError

    device = choose_device(device_name)
    unused = why_not_others(device_name, device)
    if unused is not None:
        say(unused)
    try:
        progress(f"Looking for {model}")
        with tempfile.TemporaryDirectory(prefix="molink-profile-") as digests:
            local = run_loop(open_model(ModelRequest(model, dtype), (), Path(digests), progress))
        spec = local.spec
        if device != "cpu":
            progress(f"Trying a layer of {model} on {device}")
        proof = first_step(local, device)
        if proof.sentence is not None:
            say(proof.sentence)
        memory = {"free_bytes": free_memory_bytes(device), "default_bytes": default_memory_bytes(device)}
        counts = counts_to_try(device, threads)
        measured = MeasuredModel(local.folder, spec, device, local.stand_ins(), proof.way)
        profile = measure(measured, progress, threads=counts)
        memory |= _divided(spec, memory["default_bytes"], device, proof.library_bytes, profile)
        dtypes = _compared(local, device, memory["default_bytes"], progress) if dtype == "auto" else {}
    except (CheckpointNotFound, StoreError, WeightsError) as error:
        raise CommandFailed(str(error)) from error
    return {
        "device": asdict(describe_device(device)),
        "way": proof.way.value,
        "unused_gpu": unused,
        "memory": memory,
        "model": spec.name,
        "model_hash": None if local.outlined is not None else spec.model_hash,
        "dtype": spec.dtype,
        **to_json(profile),
        **dtypes,
        "disk": _disk_of(folder, progress),
        "network": [asdict(address) for address in network_addresses()],
    }


def _disk_of(folder: Path, progress: Callable[[str], None]) -> dict[str, object]:
    """How fast the folder's disk is. Raises CommandFailed where it cannot be written."""
    from molink.peer.device.machine import measure_disk

    progress(f"Measuring the disk of {folder}")
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return asdict(measure_disk(folder))
    except OSError as error:
        raise CommandFailed(
            f"the disk of {folder} cannot be measured ({error.strerror or error}): "
            "make room, or name another folder with --state-dir"
        ) from error


def _compared(
    local: "LocalModel", device: str, memory_bytes: int, progress: Callable[[str], None]
) -> dict[str, object]:
    """A layer's decode step in each dtype of which one fits the memory, with the threads that torch has now, and the
    fastest. Raises WeightsError."""
    from molink.peer.compute.backend import MeasuredModel
    from molink.peer.models.choosing import fastest_dtype
    from molink.peer.profiling.profiler import decode_layer_ms
    from molink.shards.checkpoint.store import describe

    own = local.spec.dtype
    decode_ms: dict[str, float] = {}
    for dtype in dict.fromkeys((own, *COMPARED_DTYPES)):
        spec = describe(local.manifest, dtype, "none", name=local.spec.name)
        if max(spec.layer_bytes) <= memory_bytes:
            progress(f"Measuring a layer of {spec.name} in {dtype} on {device}")
            decode_ms[dtype] = decode_layer_ms(MeasuredModel(local.folder, spec, device, local.stand_ins()))
    if not decode_ms:
        return {}
    return {"decode_layer_ms_by_dtype": decode_ms, "fastest_dtype": fastest_dtype(decode_ms, own)}


def _divided(
    spec: "ModelSpec", total_bytes: int, device: str, library_bytes: int | None, profile: "Profile"
) -> dict[str, int]:
    """What of the memory that a peer takes by default is for weights, and for a step's work space."""
    from molink.peer.daemon.compute_setup import limits_on, reserve_of
    from molink.peer.memory.memory import plan_memory

    try:
        reserve = reserve_of(spec, (device,), total_bytes, library_bytes)
        limits = limits_on((device,), spec, profile, total_bytes)
        plan = plan_memory(spec, total_bytes, limits.max_tokens, reserve_bytes=reserve)
    except ValueError as error:
        raise CommandFailed(str(error)) from error
    return {"weight_limit_bytes": plan.weight_limit_bytes, "workspace_bytes": plan.workspace_bytes}


async def view_swarm(initial_peers: Sequence[str], swarm_key: Path | None) -> dict[str, object]:
    """Joins the swarm as a client that announces nothing, and describes the peers that it hears of.

    Raises:
        CommandFailed: the swarm cannot be reached, or the key file cannot be used.
    """
    from molink.dht.node.discovery import BootstrapUnreachable, Discovery

    key = _load_key(swarm_key)
    try:
        async with (
            asyncio.timeout(SWARM_TIMEOUT_S),
            Discovery(Identity.generate(), initial_peers=initial_peers, swarm_key=key, listen=None) as swarm,
        ):
            await swarm.refresh()
            return describe_swarm(swarm.snapshot(other_versions=True))
    except BootstrapUnreachable as error:
        raise CommandFailed(str(error)) from error
    except (OSError, TimeoutError) as error:
        raise CommandFailed(
            f"the swarm of {', '.join(initial_peers)} could not be looked at "
            f"({str(error) or f'no answer within {SWARM_TIMEOUT_S:g} s'}): try again, or ask another peer"
        ) from error


def _load_key(path: Path | None) -> SwarmKey | None:
    try:
        return None if path is None else SwarmKey.load(path)
    except FileNotFoundError:
        raise CommandFailed(f"the key file {path} does not exist: check --swarm-key") from None
    except KeyFileError as error:
        raise CommandFailed(str(error)) from error
