"""Settings that the router's ports are filled into, as if the owner had named them."""

from contextlib import AsyncExitStack
from pathlib import Path

from support.links.data_plane import asynchronous, soon
from support.links.routers import HomeRouter, UpnpRouter

from molink.peer.daemon.reaching import with_mapped_ports
from molink.peer.daemon.settings import AnnouncedPorts, JoinSettings, load_settings
from molink.peer.reach.upnp_gateway import UpnpGateway, find_gateway

FORGOTTEN = (None, None)


def settings(folder: Path, **given: object) -> JoinSettings:
    return load_settings({"state_dir": folder, "listen": "0.0.0.0", "port_mapping": "on", **given}, {})  # noqa: S104


@asynchronous
async def test_a_peer_announces_the_ports_that_its_router_maps_and_ends_that_when_it_leaves(
    tmp_path: Path,
) -> None:
    said: list[str] = []
    with UpnpRouter() as router:

        def find(_: str) -> UpnpGateway:
            return find_gateway("127.0.0.1", router.described_at)

        router.taken.add(4001)
        async with AsyncExitStack() as stack:
            asked = settings(tmp_path, port=4001)
            mapped = await soon(with_mapped_ports(stack, asked, FORGOTTEN, said.append, find))
            outside = {inner: outer for outer, (_, inner, _, _) in router.mapped.items()}
            options = mapped.options
            assert (options.announce, options.port) == ("203.0.113.7", 4001)
            assert mapped.announced_ports == AnnouncedPorts(
                outside[4001], outside[options.grpc_port], outside[options.relay_port]
            )
            assert len(said) == 1
        assert router.mapped == {}


@asynchronous
async def test_a_peer_without_a_relay_has_two_ports_mapped(tmp_path: Path) -> None:
    router = HomeRouter()
    async with AsyncExitStack() as stack:
        asked = settings(tmp_path, offer_relay="off")
        mapped = await soon(with_mapped_ports(stack, asked, FORGOTTEN, lambda _: None, lambda _: router))
        assert set(router.mapped) == {mapped.options.port, mapped.options.grpc_port}
        assert mapped.announced_ports is not None
        assert mapped.announced_ports.relay is None


@asynchronous
async def test_a_router_that_maps_nothing_leaves_the_settings_as_they_were(tmp_path: Path) -> None:
    said: list[str] = []
    router = HomeRouter(refuses=True)
    async with AsyncExitStack() as stack:
        asked = settings(tmp_path)
        assert await soon(with_mapped_ports(stack, asked, FORGOTTEN, said.append, lambda _: router)) is asked
    assert len(said) == 1


@asynchronous
async def test_no_router_is_asked_unless_the_owner_says_so(tmp_path: Path) -> None:
    asked = settings(tmp_path, port_mapping="off")

    def find(_: str) -> HomeRouter:
        raise AssertionError

    async with AsyncExitStack() as stack:
        assert await soon(with_mapped_ports(stack, asked, FORGOTTEN, print, find)) is asked
