"""Two homes behind NATs and two relays between them: real processes in namespaces."""

import json
import os
import select
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from support.links.namespaces import Internet

TESTS = Path(__file__).parents[2]
LINE_TIMEOUT_S = 600.0
RELAY_PORT = 443
NEAR, FAR = "203.0.113.10", "203.0.114.20"
PUBLIC = ("open", "volunteer")
"""Kinds of homes that have no router: on a home's line and on a volunteer's."""
RELAYS = ("192.0.2.1", "198.51.100.2")


class Process:
    """A process of a namespace that speaks JSON lines. It ends with the block."""

    def __init__(self, command: list[str]) -> None:
        path = os.pathsep.join((str(TESTS), os.environ.get("PYTHONPATH", "")))
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path},
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.communicate()

    def line(self) -> dict[str, Any]:
        """The next line that it writes."""
        assert self._process.stdout is not None
        deadline_s = time.monotonic() + LINE_TIMEOUT_S
        ready, _, _ = select.select([self._process.stdout], [], [], deadline_s - time.monotonic())
        line = self._process.stdout.readline() if ready else ""
        assert line, f"nothing within {LINE_TIMEOUT_S} s, or it has ended: {self._process.poll()}"
        return dict(json.loads(line))

    def tell(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()


def started(stack: ExitStack, command: list[str], **asked: object) -> Process:
    """A `reach_process` in a namespace, whose `ip netns exec` command this is the beginning of."""
    arguments = [sys.executable, "-m", "support.links.reach_process", json.dumps(asked)]
    return stack.enter_context(Process([*command, *arguments]))


def dialled(
    kind: str,
    other_kind: str,
    *,
    slow: bool = False,
    parts: bool = False,
    forgets: bool = False,
    **asked: object,
) -> dict[str, Any]:
    """What a home behind a router of the first kind says of its link to one behind the other; kind `open`: to one that
    can be dialled. `slow`: their lines have delay. `parts`: once the link
    has moved, nothing goes directly between the two any more; `forgets`: once it is there, the other's router has
    forgotten all its connections. Nobody is told of either."""
    with ExitStack() as stack:
        net = stack.enter_context(Internet(slow=slow))
        relays = [
            started(stack, net.command(net.volunteer(host)), role="relay", port=RELAY_PORT) for host in RELAYS
        ]
        near = net.home(kind, NEAR)
        public = FAR if other_kind in PUBLIC else ""
        far = (
            {"open": net.host, "volunteer": net.volunteer}[other_kind](FAR)
            if public
            else net.home(other_kind, FAR)
        )
        places = [
            {"peer_id": relay.line()["peer_id"], "address": f"{host}:{RELAY_PORT}"}
            for relay, host in zip(relays, RELAYS, strict=True)
        ]
        homes = [
            started(
                stack,
                net.command(name),
                role="home",
                relays=places,
                parts=parts,
                forgets=forgets,
                public=where,
                **asked,
            )
            for name, where in ((near, ""), (far, public))
        ]
        facts = [one.line()["facts"] for one in homes]
        homes[0].tell(facts[1])
        if parts:
            assert homes[0].line()["moved"]
            net.part(NEAR, FAR)
            homes[0].tell("")
        if forgets:
            assert homes[0].line()["sent"]
            net.forget(FAR)
            homes[0].tell("")
        return homes[0].line()
