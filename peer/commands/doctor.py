"""`molink-peer doctor`: looks at this machine, the swarm and the ways between them, beside a peer or before."""

import asyncio
import os
import platform
import shutil
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING

from molink.commands import plain
from molink.dht.identity.dialable import host_of
from molink.peer.commands.checks import (
    Check,
    clock_check,
    death_checks,
    device_checks,
    disk_checks,
    kind_of_router,
    local_check,
    port_mapping_check,
    reach_checks,
    swarm_check,
    version_checks,
)
from molink.shards.address_ranges import ALL_INTERFACES

if TYPE_CHECKING:
    from molink.dht.identity.swarm_key import SwarmKey
    from molink.dht.records.records import PeerView
    from molink.peer.daemon.settings import JoinSettings
    from molink.peer.reach.survey import Survey

SWARM_TIMEOUT_S = 30.0
PACKAGES = ("molink", "torch", "transformers", "grpcio", "libp2p")


async def examine(settings: "JoinSettings", peer_id: str) -> dict[str, object]:
    """All findings, JSON-ready. `peer_id` is that of the peer that runs here with these settings; empty: none does."""
    from molink.dht.identity.swarm_key import SwarmKey
    from molink.dht.node.discovery import BootstrapUnreachable, Discovery
    from molink.peer.deaths import past_deaths
    from molink.peer.device.machine import network_addresses
    from molink.peer.state_dir import StateDir

    hosts = [one.address for one in network_addresses()]
    ports = StateDir(settings.state_dir).ports()
    initial_peers = settings.initial_peers
    if peer_id and ports[0] is not None:
        initial_peers = (
            *(_multiaddress(host, ports[0], peer_id) for host in ("127.0.0.1", *hosts)),
            *initial_peers,
        )
    key = None if settings.options.swarm_key is None else SwarmKey.load(settings.options.swarm_key)
    views: tuple[PeerView, ...] = ()
    survey, error = None, ""
    if initial_peers:
        from molink.dht.identity.identity import Identity

        swarm = Discovery(Identity.generate(), initial_peers=initial_peers, swarm_key=key, listen=None)
        try:
            async with asyncio.timeout(SWARM_TIMEOUT_S), swarm:
                await swarm.refresh()
                views = swarm.snapshot(other_versions=True)
        except (BootstrapUnreachable, OSError, TimeoutError) as failure:
            error = str(failure) or f"no answer within {SWARM_TIMEOUT_S:g} s"
    checks = [swarm_check(initial_peers, views, error)]
    own = next((view.facts for view in views if view.peer_id == peer_id), None)
    port = ports[1] if peer_id else None
    if own is not None and own.grpc_addresses:  # a router or a container may map that port to another
        port = int(own.grpc_addresses[0].rpartition(":")[2])
    # one that runs and announces no address is on relays, whatever these settings say
    listens = settings.listen if own is None else host_of("".join(own.grpc_addresses[:1]))
    if views and _is_loopback(listens):
        checks.append(local_check(listens))
    elif views:
        (survey, port), mapping = await asyncio.gather(
            _survey(settings, key, views, peer_id, port), _port_mapping(settings.listen)
        )
        checks += [*reach_checks(survey, hosts, port), mapping]
    checks += clock_check([view for view in views if view.peer_id != peer_id], time.time())
    checks += disk_checks(_folders(settings))
    checks += _device_checks(settings.options.device)
    checks += death_checks(past_deaths(settings.state_dir))
    checks += version_checks(_versions(), views)
    return {
        "healthy": all(check.state != "problem" for check in checks),
        "peer_id": peer_id or None,
        "router": None if survey is None else kind_of_router(survey, hosts),
        "port": port,
        "checks": [asdict(check) for check in checks],
        **({} if survey is None else _described(survey)),
    }


async def _survey(
    settings: "JoinSettings",
    key: "SwarmKey | None",
    views: Sequence["PeerView"],
    peer_id: str,
    port: int | None,
) -> tuple["Survey", int]:
    """Of the running peer's port, else of the one that it would have. Raises PortInUse."""
    from molink.dht.identity.dialable import swarm_ranges
    from molink.peer.device.machine import free_port
    from molink.peer.reach.asking import Doorstep
    from molink.peer.reach.survey import Surveyor
    from molink.peer.state_dir import StateDir
    from molink.peer.wire.link.certificate import certificate_hash

    listens = [settings.listen] if settings.listen not in ALL_INTERFACES else []
    announces = [settings.options.announce] if settings.options.announce else []
    own = next((view.facts for view in views if view.peer_id == peer_id), None)
    seen = [*own.grpc_addresses, *own.addresses] if own is not None else []
    ranges = await swarm_ranges([*listens, *announces, *settings.initial_peers, *seen])
    wanted = settings.options.grpc_port or StateDir(settings.state_dir).ports()[1]
    listen = (settings.listen, 0 if port is not None else free_port(settings.listen, wanted))
    async with AsyncExitStack() as stack:
        relay_port = free_port(settings.listen, settings.options.relay_port or None)
        surveyor = await stack.enter_async_context(Surveyor(listen, key, ranges, relay_port))
        sought = surveyor.doorstep
        if own is not None and port is not None:
            sought = Doorstep(port, certificate_hash(own.certificate))
        return await surveyor.survey(views, peer_id, sought), sought.port


async def _port_mapping(listen: str) -> Check:
    """Nothing is mapped."""
    from molink.peer.reach.port_mapping import ANSWER_WITHIN_S, GatewayError, in_thread, public_host
    from molink.peer.reach.upnp_gateway import find_gateway

    try:
        return port_mapping_check(await in_thread(lambda: public_host(find_gateway(listen)), ANSWER_WITHIN_S))
    except GatewayError as error:
        return port_mapping_check(error)


def print_findings(findings: Mapping[str, object]) -> None:
    """A line for each check, and one for its remedy. Others choose their names and addresses."""
    checks = findings["checks"]
    assert isinstance(checks, list)  # noqa: S101 - as `examine` has made it
    signs = {"ok": "ok", "note": "note", "problem": "PROBLEM"}
    for check in checks:
        print(f"{signs[check['state']]:8}{check['name']}: {plain(check['found'])}")
        if check["remedy"]:
            print(f"{'':8}-> {plain(check['remedy'])}")


def _described(survey: "Survey") -> dict[str, object]:
    return {
        "relays": [
            {
                "peer_id": one.relay.peer_id,
                "address": one.relay.address,
                "round_trip_ms": None if one.round_trip_s is None else one.round_trip_s * 1000,
                "sees": None if one.answer is None else one.answer.observed,
                "reaches": None if one.answer is None else one.answer.found,
            }
            for one in survey.relays
        ],
        "ways": [asdict(trial) for trial in survey.trials],
    }


def _is_loopback(host: str) -> bool:
    """Whether that is an address of this machine alone."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def _multiaddress(host: str, port: int, peer_id: str) -> str:
    return f"/{'ip6' if ':' in host else 'ip4'}/{host}/tcp/{port}/p2p/{peer_id}"


def _folders(settings: "JoinSettings") -> dict[str, tuple[str, int | None]]:
    """Each folder with what its disk has free, by its option."""
    folders = {"--state-dir": settings.state_dir, "--store-dir": settings.store_dir}
    return {option: (str(folder), _free_bytes(folder)) for option, folder in folders.items()}


def _free_bytes(folder: Path) -> int | None:
    """None: it, or the nearest folder that there is, cannot be written."""
    there = next(one for one in (folder, *folder.parents) if one.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        return None
    return shutil.disk_usage(there).free


def _device_checks(named: str) -> list[Check]:
    from molink.configuration import SettingsError
    from molink.peer.device.device import choose_device, describe_device, why_not_others
    from molink.peer.device.graphics_cards import seen_cards

    cards = [
        f"{card.maker} {card.name}" + (f" (driver {card.driver})" if card.driver else " (no driver)")
        for card in seen_cards()
    ]
    try:
        device = choose_device(named)
    except SettingsError as error:
        return device_checks("nothing", cards, str(error))
    return device_checks(describe_device(device).name, cards, why_not_others(named, device))


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version(), "system": f"{platform.system()} {platform.machine()}"}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "missing"
    return versions
