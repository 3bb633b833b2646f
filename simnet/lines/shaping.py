"""A shaped link on loopback, without root:
`python -m molink.simnet.lines.shaping --target 127.0.0.1:5000 --rate-mbps 100`.

What is sent to the printed port reaches the target at the rate and after the delay of an emulated line, and back. Lines
of standard input change it while it runs, lines of standard output answer: see `--help`.
"""

import argparse
import json
import socket
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial

from molink.simnet.lines.flows import Path, RelayPort
from molink.simnet.lines.line import Line
from molink.simnet.lines.shaper import Shaper
from molink.simnet.lines.sockets import Dialling, address, reset
from molink.simnet.lines.transit import Chunk

COMMANDS = """commands on standard input, each answered by a line of JSON:
  rate MBPS        both directions, from now on      up MBPS, down MBPS   one direction
  counters         bytes, busy and queueing seconds  cut                  resets all connections
  pause, resume    nothing moves                     end (or end of file) ends"""


class ShapedPort(RelayPort):
    """A port whose connections reach `target` through lines, between `__enter__` and `__exit__`.

    `up` carries what clients send, `down` the answers; ports that are given the same line share it. A connection costs
    a round trip before its first byte moves. Listens on 127.0.0.1 unless told otherwise; OSError if it cannot.
    """

    def __init__(
        self,
        shaper: Shaper,
        target: tuple[str, int],
        up: Line[Chunk],
        down: Line[Chunk],
        port: int = 0,
        host: str = "127.0.0.1",
    ) -> None:
        super().__init__(shaper, port, host)
        self._target = target
        self._paths: tuple[Path, Path] = ((up,), (down,))
        self._paused = False

    @property
    def connections(self) -> int:
        """How many are open."""
        return self._shaper.call(lambda: len(self._connections))

    def cut(self) -> int:
        """Resets the connections that are open now, and tells how many. New ones are taken as before."""
        return self._shaper.call(self._cut)

    def pause(self) -> None:
        """Nothing moves until `resume`, on no connection, and none ends: a peer that has fallen silent."""
        self._shaper.call(lambda: self._pause(True))

    def resume(self) -> None:
        self._shaper.call(lambda: self._pause(False))

    def _arrive(self, client: socket.socket) -> None:
        self._arriving[client] = b""
        (up,), (down,) = self._paths
        self._shaper.after(up.delay.fixed_s + down.delay.fixed_s, partial(self._dial, client))

    def _dial(self, client: socket.socket) -> None:
        if client in self._arriving:
            Dialling(
                self._shaper, self._target, partial(self._join, client), lambda _: self._drop(client)
            ).begin()

    def _join(self, client: socket.socket, server: socket.socket) -> None:
        self._arriving.pop(client, None)
        connection = self._connect(client, server, self._paths, 0.0)
        connection.begin()
        connection.pause(self._paused)

    def _drop(self, client: socket.socket) -> None:
        self._arriving.pop(client, None)
        reset(client)

    def _pause(self, paused: bool) -> None:
        self._paused = paused
        for connection in tuple(self._connections):
            connection.pause(paused)


def answer(
    command: Sequence[str], shaper: Shaper, ports: Sequence[ShapedPort], lines: dict[str, Line[Chunk]]
) -> object:
    """Carries out a command of standard input. ValueError tells what is wrong with it."""
    match command:
        case ["rate", mbps]:
            for line in lines.values():
                shaper.call(partial(shaper.set_rate, line, float(mbps)))
        case ["up" | "down" as which, mbps]:
            shaper.call(partial(shaper.set_rate, lines[which], float(mbps)))
        case ["counters"]:
            return {name: asdict(shaper.call(line.counters)) for name, line in lines.items()}
        case ["cut"]:
            return {"cut": sum(port.cut() for port in ports)}
        case ["pause"]:
            for port in ports:
                port.pause()
        case ["resume"]:
            for port in ports:
                port.resume()
        case _:
            raise ValueError(f"unknown command: {' '.join(command)}")
    return {"done": " ".join(command)}


def serve(ports: Sequence[ShapedPort], shaper: Shaper, lines: dict[str, Line[Chunk]]) -> None:
    """Prints the ports, then answers commands until `end`, the end of the input, or an interrupt."""
    with ExitStack() as stack:
        stack.enter_context(shaper)
        for port in ports:
            print(stack.enter_context(port).port, flush=True)
        for text in sys.stdin:
            command = text.split()
            if command == ["end"]:
                return
            try:
                print(json.dumps(answer(command, shaper, ports, lines)), flush=True)
            except ValueError as error:
                print(json.dumps({"error": str(error)}), flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of `python -m molink.simnet.lines.shaping`."""
    parser = argparse.ArgumentParser(
        prog="python -m molink.simnet.lines.shaping",
        description="A shaped link on loopback: prints its port, then moves bytes between it and the target.",
        epilog=COMMANDS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--target",
        required=True,
        action="append",
        metavar="HOST:PORT",
        type=address,
        help="more than one: a port for each is printed, and all share the same lines",
    )
    parser.add_argument(
        "--listen", type=int, default=0, metavar="PORT", help="of the first target; 0: any free one"
    )
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen on (default: this machine only)"
    )
    parser.add_argument("--rate-mbps", type=float, default=100.0, help="each direction, of payload (100)")
    parser.add_argument("--delay-ms", type=float, default=15.0, help="one way (15)")
    parser.add_argument("--jitter-ms", type=float, default=0.0, help="the delay wanders by so much more (0)")
    parser.add_argument(
        "--queue-ms", type=float, default=100.0, help="what waits before the sender is held back (100)"
    )
    options = parser.parse_args(arguments)
    shape = (options.rate_mbps, options.delay_ms, options.jitter_ms, options.queue_ms)
    try:
        lines: dict[str, Line[Chunk]] = {"up": Line(*shape, seed=1), "down": Line(*shape, seed=2)}
    except ValueError as error:
        parser.error(str(error))
    shaper = Shaper()
    ports = [
        ShapedPort(shaper, target, lines["up"], lines["down"], options.listen if first else 0, options.host)
        for first, target in zip((True, *[False] * len(options.target)), options.target, strict=False)
    ]
    try:
        serve(ports, shaper, lines)
    except OSError as error:
        parser.exit(1, f"cannot listen on {options.host}:{options.listen}: {error}\n")
    except KeyboardInterrupt:
        pass


if __name__ == "__main__":
    main()
