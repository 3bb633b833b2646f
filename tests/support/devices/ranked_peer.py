"""`python tests/support/devices/ranked_peer.py ARGUMENTS`: `molink-peer ARGUMENTS` on a machine with two devices, both
its processor.

Two processes on one processor are never the faster layout, so tensor parallelism is the only one that is offered.
"""

from molink.dht.host.lean_libp2p import load_lean_libp2p
from molink.shards.loading.lean_transformers import load_lean_transformers

if __name__ == "__main__":  # as `molink-peer` does
    load_lean_libp2p()
    load_lean_transformers()

from molink.peer.commands import cli
from molink.peer.daemon import bootstrap
from molink.peer.ranks import choice as several_devices
from molink.routing.parallelism.layout_prediction import DeviceLink, LayoutChoice, choose_layout
from molink.routing.parallelism.parallelism import Layout
from molink.shards.spec import ModelSpec, Span


def two_processors(_name: str) -> tuple[str, ...]:
    return ("cpu", "cpu")


def both(
    spec: ModelSpec, span: Span, devices: int, alone: several_devices.DeviceAlone, link: DeviceLink
) -> LayoutChoice:
    rates = several_devices.measured_rates(spec, alone)
    return choose_layout(spec, span, [Layout(tensor=devices)], rates, link, several_devices.REQUEST)


if __name__ == "__main__":
    bootstrap.choose_devices = two_processors
    several_devices.compare = both
    cli.main()
