"""`molink-gateway nodes`: what an operator does with the machines that take a gateway's orders."""

import json
from typing import Annotated, Any

import typer

from molink import commands
from molink.client.gateway.key_commands import counted
from molink.client.gateway.services.service_commands import (
    DEFAULT_URL,
    GatewayUrl,
    NoWait,
    OperatorKey,
    path_part,
    show_operation,
    told_gateway,
)
from molink.commands import example, plain, with_logging

PeerId = Annotated[str, typer.Argument(metavar="PEER_ID", help="The node, as `nodes list` shows it.")]

nodes_app = typer.Typer(
    name="nodes",
    help="See the machines that take a gateway's orders, drain them, have them serve another model or exit.",
    epilog=example("molink-gateway nodes list"),
    context_settings={"help_option_names": ["--help", "-h"]},
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


@nodes_app.command("list", epilog=example("molink-gateway nodes list --json"))
@with_logging
def list_nodes(
    gateway: GatewayUrl = DEFAULT_URL, key: OperatorKey = None, as_json: commands.Json = False
) -> None:
    """List the machines that have registered, and the identity whose orders they take."""
    with told_gateway(gateway, key) as client:
        answer = client.call("GET", "/admin/v1/nodes")
    if as_json:
        print(json.dumps(answer))
        return
    print(f"Operator: {plain(str(answer['operator']))}")
    for node in answer["data"]:
        machine = node["descriptor"]
        gpus = ", ".join(gpu["name"] for gpu in machine["gpus"]) or "no GPU"
        print(plain(f"{node['peer_id']}  {machine['hostname']}, {machine['system']}, {gpus}"))


@nodes_app.command(epilog=example("molink-gateway nodes status 12D3KooW..."))
@with_logging
def status(
    peer_id: PeerId,
    gateway: GatewayUrl = DEFAULT_URL,
    key: OperatorKey = None,
    as_json: commands.Json = False,
) -> None:
    """Show how a machine is: what it serves, load, memory, temperatures, power."""
    with told_gateway(gateway, key) as client:
        answer = client.call("GET", f"/admin/v1/nodes/{path_part(peer_id)}")
    if as_json:
        print(json.dumps(answer))
        return
    print(plain(_sentence(answer)))


@nodes_app.command(epilog=example("molink-gateway nodes drain 12D3KooW..."))
@with_logging
def drain(
    peer_id: PeerId,
    no_wait: NoWait = False,
    gateway: GatewayUrl = DEFAULT_URL,
    key: OperatorKey = None,
    as_json: commands.Json = False,
) -> None:
    """Have a machine take nothing new: its sessions go over to others, or end. It stays in the swarm."""
    with told_gateway(gateway, key) as client:
        begun = client.call("POST", f"/admin/v1/nodes/{path_part(peer_id)}/drain", {})
        show_operation(client, begun["operation"], waits=not no_wait, as_json=as_json)


@nodes_app.command(epilog=example("molink-gateway nodes serve 12D3KooW... Qwen/Qwen3-8B"))
@with_logging
def serve(
    peer_id: PeerId,
    model: Annotated[str, typer.Argument(help="A model that comes with MoLink, or a hub's: OWNER/NAME.")],
    no_wait: NoWait = False,
    gateway: GatewayUrl = DEFAULT_URL,
    key: OperatorKey = None,
    as_json: commands.Json = False,
) -> None:
    """Have a machine serve another model: its sessions go over to others, or end, then it loads that one."""
    with told_gateway(gateway, key) as client:
        begun = client.call("POST", f"/admin/v1/nodes/{path_part(peer_id)}/serve", {"model": model})
        show_operation(client, begun["operation"], waits=not no_wait, as_json=as_json)


@nodes_app.command("exit", epilog=example("molink-gateway nodes exit 12D3KooW..."))
@with_logging
def exit_node(
    peer_id: PeerId,
    no_wait: NoWait = False,
    gateway: GatewayUrl = DEFAULT_URL,
    key: OperatorKey = None,
    as_json: commands.Json = False,
) -> None:
    """Have a machine drain, free its leases and weights, leave, and lose its registration and token."""
    with told_gateway(gateway, key) as client:
        begun = client.call("DELETE", f"/admin/v1/nodes/{path_part(peer_id)}")
        show_operation(client, begun["operation"], waits=not no_wait, as_json=as_json)


def _sentence(answer: dict[str, Any]) -> str:
    told = answer["status"]
    if told is None:
        return f"{answer['peer_id']}: does not answer ({answer['reason']})"
    load, spans = told["load"], ", ".join(f"{start}:{stop}" for start, stop in told["spans"]) or "nothing"
    state = "draining" if told["draining"] else "serving"
    memory = f"{load['memory_used_bytes'] / 1e9:.1f} of {load['memory_total_bytes'] / 1e9:.1f} GB"
    parts = [
        f"{answer['peer_id']}: {state} {told['model']}, layers {spans}",
        counted(told["sessions"], "session"),
        f"CPU {load['cpu_percent']:g} %",
        f"memory {memory}",
    ]
    for gpu in load["gpus"] or ():
        figures = (("gpu_percent", "%"), ("power_w", "W"), ("temperature_c", "°C"))
        shown = [f"{gpu[name]:g} {unit}" for name, unit in figures if gpu[name] is not None]
        parts.append(" ".join([str(gpu["name"]), *shown]))
    return "; ".join(parts)
