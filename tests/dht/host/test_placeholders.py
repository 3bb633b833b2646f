"""Placeholders stand in for what is never used; whoever uses one is told, and what comes later is the real thing."""

import subprocess
import sys
from types import ModuleType

import pytest

from molink.dht.host.placeholders import PlaceholderUsed, placeholders


@pytest.fixture
def unloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some modules of the standard library that nobody here has loaded yet."""
    for name in [name for name in sys.modules if name.split(".")[0] == "wsgiref"]:
        monkeypatch.delitem(sys.modules, name)


@pytest.mark.usefixtures("unloaded")
def test_what_is_imported_from_them_can_be_named_derived_from_and_kept_but_not_used() -> None:
    with placeholders({"wsgiref"}):
        import wsgiref
        from wsgiref.simple_server import WSGIServer

    class Own(WSGIServer):
        pass

    kept: WSGIServer | None = Own(("", 0), None)
    assert not isinstance("", WSGIServer)
    assert isinstance(wsgiref, ModuleType)
    assert isinstance(WSGIServer.allow_reuse_address, type)
    with pytest.raises(PlaceholderUsed, match=r"Own\.serve_forever was left out"):
        kept.serve_forever()


@pytest.mark.usefixtures("unloaded")
def test_afterwards_the_real_modules_are_imported() -> None:
    with placeholders({"wsgiref.simple_server"}):
        from wsgiref import simple_server
        from wsgiref.headers import Headers
    assert not hasattr(simple_server, "__file__")
    assert Headers([("a", "b")])["a"] == "b", "what was not named is there"
    from wsgiref.simple_server import ServerHandler

    assert ServerHandler.server_software


@pytest.mark.parametrize(("key", "brought_in"), [("None", ""), ("SwarmKey.generate()", "Crypto")])
def test_libp2p_is_loaded_without_what_is_never_used_and_hosts_connect_in_public_and_private_swarms(
    key: str, brought_in: str
) -> None:
    program = (
        "import sys\n"
        "from molink.dht.host.lean_libp2p import load_lean_libp2p\n"
        "load_lean_libp2p()\n"
        "import trio\n"
        "from molink.dht.host.host import Listen, open_host\n"
        "from molink.dht.identity.identity import Identity\n"
        "from molink.dht.identity.swarm_key import SwarmKey\n"
        f"key = {key}\n"
        "async def main():\n"
        "    async with open_host(Identity.generate(), Listen('127.0.0.1', 0), key) as one:\n"
        "        async with open_host(Identity.generate(), None, key) as other:\n"
        "            assert await other.dial(one.addresses[0], timeout_s=120) == one.peer_id\n"
        "trio.run(main)\n"
        "heavy = {'aioquic', 'zeroconf', 'requests', 'httpx', 'dns', 'Crypto', 'fastecdsa', 'prometheus_client'}\n"
        "print(*sorted(heavy.intersection(sys.modules)))\n"
        "import prometheus_client\n"
        "assert prometheus_client.Counter\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=180, check=False
    )
    assert (done.stdout.strip(), done.returncode) == (brought_in, 0), done.stderr
