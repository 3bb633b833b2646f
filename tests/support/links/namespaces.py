"""Homes behind NATs and an Internet between them, as network namespaces of this machine. Needs root, `ip` and `nft`.

Kinds of routers, by what they let in and how they name ports: `open` (none at all); `full` (everybody), `restricted`
(hosts that were written to), `port` (host and port; Linux masquerade), `moved` (as `port`, but another outside port),
`rst` (as `port`, but strangers are answered with a reset), `symmetric` (as `port`, another random port for each
destination), `blocked` (out: TCP to port 443 only), `carrier` (a home router behind a carrier's NAT, both `port`).
"""

import itertools
import os
import shutil
import subprocess
import sys
from contextlib import ExitStack, suppress
from types import TracebackType
from typing import Self

import pytest
from support.links.slow_lines import Line, SlowLines

HOME_LINE, VOLUNTEER_LINE = Line(10.0), Line(5.0)
"""Between two homes 40 ms there and back, over a volunteer 60."""
KINDS = ("full", "restricted", "port", "moved", "rst", "symmetric", "blocked", "carrier")
INSIDE = "192.168.1.2"
_counter = itertools.count(1)


def require_namespaces() -> None:
    """Skips a test where namespaces cannot be made, with what is missing."""
    missing = [tool for tool in ("ip", "nft") if shutil.which(tool) is None]
    if sys.platform != "linux":
        pytest.skip("network namespaces are Linux's")
    if missing:
        pytest.skip(f"{' and '.join(missing)} missing: apt-get install -y iproute2 nftables")
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root: run this test as root")
    name = f"ml{os.getpid() % 10000}probe"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if made.returncode:
        pytest.skip(f"network namespaces cannot be made here: {made.stderr.strip()}")
    subprocess.run(["ip", "netns", "del", name], check=False)


def run(*command: str, text: str | None = None) -> None:
    """Runs a command, which must succeed."""
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False, timeout=300)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr}")


class Internet:
    """Namespaces between `__enter__` and `__exit__`: a router in the middle, and whoever is added.

    Without `slow` lines have neither delay nor a rate; with it they have those of `home_line` and `volunteer_line`.
    """

    def __init__(
        self, *, slow: bool = False, home_line: Line = HOME_LINE, volunteer_line: Line = VOLUNTEER_LINE
    ) -> None:
        self._slow = SlowLines() if slow else None
        self._lines = {"v": volunteer_line}
        self._home_line = home_line
        self._stack = ExitStack()
        self._prefix = f"m{os.getpid() % 100000}x{next(_counter)}"
        self._names: list[str] = []
        self._middle = ""
        self._routers: dict[str, str] = {}
        """Namespaces of homes' outer routers, by public address."""
        self._ends: dict[str, str] = {}
        """Devices in the middle, by the namespace at their other end."""

    def __enter__(self) -> Self:
        if self._slow is not None:
            self._stack.enter_context(self._slow)
            return self
        self._middle = self._add("i")
        run("ip", "netns", "exec", self._middle, "sysctl", "-qw", "net.ipv4.ip_forward=1")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()
        for name in reversed(self._names):
            with suppress(RuntimeError):
                run("ip", "netns", "del", name)

    def volunteer(self, address: str) -> str:
        """A host with a public address, on a volunteer's line; the namespace's name."""
        return self._public("v", address)

    def host(self, address: str) -> str:
        """A host with a public address, on a home's line; the namespace's name."""
        return self._public("o", address)

    def home(self, kind: str, address: str) -> str:
        """A host at INSIDE, behind a router of that kind with a public address; the namespace's name."""
        if kind == "carrier":
            carrier = self._routers[address] = self._public("c", address)
            router = self._inside(carrier, "100.64.0.1", "100.64.0.2", "r")
            _translate(carrier, "port", "wan", "100.64.0.2", address)
            _translate(router, "port", "eth", INSIDE, "")
        else:
            router = self._routers[address] = self._public("r", address)
            _translate(router, kind, "wan", INSIDE, address)
        return self._inside(router, "192.168.1.1", INSIDE, "h")

    def forward(self, address: str, ports: dict[int, int]) -> None:
        """Has the router at that address pass on these of its ports, each to another one of the host inside."""
        for outer, inner in ports.items():
            rule = f"add rule ip nat arriving iifname wan tcp dport {outer} dnat to {INSIDE}:{inner}"
            run("ip", "netns", "exec", self._routers[address], "nft", rule)

    def part(self, address: str, other: str) -> None:
        """From now on two homes' routers drop what goes directly from one to the other, without a word."""
        for near, far in ((address, other), (other, address)):
            rule = f"insert rule ip nat passing ip saddr {far} drop; insert rule ip nat passing ip daddr {far} drop"
            run("ip", "netns", "exec", self._routers[near], "nft", rule)

    def forget(self, address: str, new_address: str = "") -> None:
        """The home router at that address forgets all connections without a word, and has another address from then
        on, if one is given."""
        router, after = self._routers[address], new_address or address
        run("ip", "-n", router, "link", "set", "wan", "down")
        if new_address:
            run("ip", "-n", router, "addr", "flush", "dev", "wan")
            run("ip", "-n", router, "addr", "add", f"{after}/32", "dev", "wan")
            self._routers[after] = self._routers.pop(address)
            self._readdress(router, after)
        run("ip", "-n", router, "link", "set", "wan", "up")
        run("ip", "-n", router, "route", "add", "default", "dev", "wan")

    def _readdress(self, router: str, address: str) -> None:
        if self._slow is not None:
            self._slow.readdress(router, address)
        else:
            end = self._ends[router]
            run("ip", "-n", self._middle, "route", "add", f"{address}/32", "dev", end)

    def command(self, name: str, *command: str) -> list[str]:
        """The command line that runs a command in a namespace."""
        return ["ip", "netns", "exec", name, *command]

    def _add(self, letter: str) -> str:
        name = f"{self._prefix}{letter}{len(self._names)}"
        run("ip", "netns", "add", name)
        self._names.append(name)
        run("ip", "-n", name, "link", "set", "lo", "up")
        return name

    def _public(self, letter: str, address: str) -> str:
        name = self._add(letter)
        if self._slow is not None:
            self._slow.place(name, address, self._lines.get(letter, self._home_line))
            run("ip", "-n", name, "addr", "add", f"{address}/32", "dev", "wan")
            run("ip", "-n", name, "link", "set", "wan", "up", "txqueuelen", "2000")
            run("ip", "-n", name, "route", "add", "default", "dev", "wan")
            return name
        end = self._ends[name] = f"w{len(self._names)}"
        run(
            "ip", "-n", self._middle, "link", "add", end, "type", "veth", "peer", "name", "wan", "netns", name
        )
        run("ip", "-n", name, "addr", "add", f"{address}/32", "dev", "wan")
        for where, device in ((name, "wan"), (self._middle, end)):
            run("ip", "-n", where, "link", "set", device, "up")
        run("ip", "-n", name, "route", "add", "default", "dev", "wan")
        run("ip", "-n", self._middle, "route", "add", f"{address}/32", "dev", end)
        # the middle answers for every address, so that nobody needs to know where it is
        answers = (f"net.ipv4.conf.{end}.proxy_arp=1", f"net.ipv4.neigh.{end}.proxy_delay=0")
        run("ip", "netns", "exec", self._middle, "sysctl", "-qw", *answers)
        return name

    def _inside(self, router: str, gateway: str, address: str, letter: str) -> str:
        name = self._add(letter)
        run("ip", "-n", router, "link", "add", "lan", "type", "veth", "peer", "name", "eth", "netns", name)
        run("ip", "-n", router, "addr", "add", f"{gateway}/24", "dev", "lan")
        run("ip", "-n", name, "addr", "add", f"{address}/24", "dev", "eth")
        for where, device in ((router, "lan"), (name, "eth")):
            run("ip", "-n", where, "link", "set", device, "up")
        run("ip", "-n", name, "route", "add", "default", "via", gateway)
        run("ip", "netns", "exec", router, "sysctl", "-qw", "net.ipv4.ip_forward=1")
        return name


def _translate(router: str, kind: str, wan: str, inside: str, address: str) -> None:
    """The rules of a router of that kind (nftables)."""
    arrives = leaves = blocks = ""
    masks = f"oifname {wan} masquerade" + (" fully-random" if kind == "symmetric" else "")
    drops = "policy accept" if kind == "rst" else "policy drop"
    if kind == "open":
        return
    if kind == "full":
        arrives = f"iifname {wan} ct state new dnat to {inside}"
    if kind == "restricted":
        arrives = f"iifname {wan} ip saddr @written ct state new dnat to {inside}"
        leaves = f"oifname {wan} update @written {{ ip daddr }}"
    if kind == "moved":
        # as if others had the ports already: each is given another one, the same for every destination
        masks = f"oifname {wan} meta l4proto tcp snat to {address}:th sport map @moved; {masks}"
    if kind == "blocked":
        blocks = f"oifname {wan} tcp dport != 443 drop; oifname {wan} meta l4proto udp drop"
    moved = "map moved { type inet_service : inet_service; flags interval; }"
    if kind == "moved":
        ports = ", ".join(f"{32768 + at} : {10000 + (at * 37) % 28232}" for at in range(0, 28232, 1))
        moved = f"map moved {{ type inet_service : inet_service; elements = {{ {ports} }} }}"
    rules = f"""
table ip nat {{
 set written {{ type ipv4_addr; flags dynamic,timeout; timeout 120s; }}
 {moved if kind == "moved" else ""}
 chain arriving {{ type nat hook prerouting priority dstnat; {arrives}; }}
 chain leaving {{ type nat hook postrouting priority srcnat; {masks}; }}
 chain passing {{ type filter hook forward priority filter; policy drop;
  {leaves}; {blocks}; ct state invalid drop; oifname {wan} accept;
  ct state established,related accept; ct status dnat accept; }}
 chain own {{ type filter hook input priority filter; {drops};
  iifname lan accept; ct state established,related accept; icmp type echo-request accept; }}
}}
""".replace(" ;", "").replace("  ;", "")
    rules = "\n".join(line for line in rules.splitlines() if line.strip())
    run("ip", "netns", "exec", router, "nft", "-f", "-", text=rules)
    # a connection that was forgotten is not taken up again in its middle
    run("ip", "netns", "exec", router, "sysctl", "-qw", "net.netfilter.nf_conntrack_tcp_loose=0")
