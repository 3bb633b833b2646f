"""`molink-gateway services`: what an operator does with services, through a gateway that runs."""

import json
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from molink import commands
from molink.client.gateway.key_commands import counted, duration_s
from molink.commands import EXIT_USAGE, CommandFailed, example, plain, tell, with_logging
from molink.sizes import parse_bytes

DEFAULT_URL: Final = "http://127.0.0.1:8000"
GatewayUrl = Annotated[
    str, typer.Option("--gateway", metavar="URL", envvar="MOLINK_GATEWAY", help="The gateway that is told.")
]
OperatorKey = Annotated[
    str | None,
    typer.Option(
        "--key",
        metavar="KEY",
        envvar="MOLINK_OPERATOR_KEY",
        help="Key with the scope operate, where the gateway asks for keys; better in the environment, where process "
        "lists do not show it.",
    ),
]

ServiceNameArgument = Annotated[str, typer.Argument(metavar="NAME", help="The service's name.")]
NoWait = Annotated[bool, typer.Option("--no-wait", help="Do not wait until it is done.")]

if TYPE_CHECKING:
    from molink.client.gateway.services.admin_client import AdminClient

services_app = typer.Typer(
    name="services",
    help="Deploy services on a running gateway, make their keys, see how they are, delete them.",
    epilog=example("molink-gateway services deploy poet --model molink/tiny-shakespeare"),
    context_settings={"help_option_names": ["--help", "-h"]},
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


@services_app.command(
    epilog=example("molink-gateway services deploy poet --model molink/tiny-shakespeare --maximum 8")
)
@with_logging
def deploy(  # noqa: PLR0913 - an operator's options, by name
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="Under which it is asked for: a-z, 0-9 and hyphens.")
    ],
    model: Annotated[
        str, typer.Option(metavar="ID", help="The model that it serves: a name or hash that peers serve.")
    ],
    minimum: Annotated[int, typer.Option(metavar="N", min=1, help="Circuits that are held in any case.")] = 1,
    maximum: Annotated[
        int, typer.Option(metavar="N", min=1, help="Circuits at most: generations at once.")
    ] = 4,
    tokens: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=2, help="For which a circuit that is held has room; 2048, unless told."
        ),
    ] = None,
    gpu: Annotated[
        str, typer.Option(metavar="NAME", help="Only peers with such a GPU: a part of its name.")
    ] = "",
    gpu_count: Annotated[
        int, typer.Option(metavar="N", min=0, help="Only if its peers have so many GPUs together.")
    ] = 0,
    memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Only peers with a device of so much memory: 16GB.")
    ] = None,
    region: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Only peers that say they are there; repeat it for several."),
    ] = None,
    partners: Annotated[
        str, typer.Option(metavar="auto|off", help="Whether other peers keep copies of KV caches.")
    ] = "auto",
    parameter: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE",
            help="What requests that do not say are served with, such as temperature=0.2; repeat it for several.",
        ),
    ] = None,
    preview: Annotated[
        bool, typer.Option("--preview", help="Only show where it would go, and what is missing.")
    ] = False,
    no_wait: NoWait = False,
    gateway: GatewayUrl = DEFAULT_URL,
    key: OperatorKey = None,
    as_json: commands.Json = False,
) -> None:
    """Deploy a service, and wait until it runs.

    A model under a name of its own, with circuits that are held for it. Nothing is loaded where it does not fit.
    """
    resources = {
        "minimum_circuits": minimum,
        "maximum_circuits": maximum,
        "tokens_per_circuit": tokens,
        "gpu": gpu,
        "gpu_count": gpu_count,
        "memory_bytes": 0 if memory is None else _bytes(memory),
        "regions": region or [],
        "partners": partners,
    }
    parameters = dict(map(_parameter, parameter or ()))
    asked = {"name": name, "model": model, "resources": resources, "parameters": parameters}
    with told_gateway(gateway, key) as client:
        if preview:
            _show_preview(client.call("POST", "/admin/v1/services/preview", asked), as_json=as_json)
            return
        begun = client.call("POST", "/admin/v1/services", asked)
        show_operation(client, begun["operation"], waits=not no_wait, as_json=as_json)


@services_app.command("key", epilog=example("molink-gateway services key poet --overlap 1h"))
@with_logging
def make_key(
    name: ServiceNameArgument,
    overlap: Annotated[
        str, typer.Option(metavar="TIME", help="For so long the service's older keys go on: 24h, 30m, 0s.")
    ] = "24h",
    gateway: GatewayUrl = DEFAULT_URL,
    key: OperatorKey = None,
    as_json: commands.Json = False,
) -> None:
    """Make a key that opens the service and nothing else, and show it once."""
    body = {"overlap_s": duration_s(overlap, "--overlap")}
    with told_gateway(gateway, key) as client:
        made = client.call("POST", f"/admin/v1/services/{path_part(name)}/keys", body)
    if as_json:
        print(json.dumps(made))
        return
    print(plain(str(made["key"])))
    tell(f"The key is shown this once; only its hash is kept. Older ones end after {overlap}.")


@services_app.command(epilog=example("molink-gateway services status poet --json"))
@with_logging
def status(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="The service's name; without it, all are listed.")
    ] = None,
    gateway: GatewayUrl = DEFAULT_URL,
    key: OperatorKey = None,
    as_json: commands.Json = False,
) -> None:
    """Show how a service is: its state, circuits, requests, throughput and utilisation."""
    with told_gateway(gateway, key) as client:
        if name is None:
            answer = client.call("GET", "/admin/v1/services")
            services = answer["data"]
        else:
            answer = client.call("GET", f"/admin/v1/services/{path_part(name)}")
            services = [answer]
    if as_json:
        print(json.dumps(answer))
    elif not services:
        print("There are no services: `molink-gateway services deploy NAME --model MODEL` makes one.")
    for service in () if as_json else services:
        print(_sentence(service))


@services_app.command(epilog=example("molink-gateway services delete poet"))
@with_logging
def delete(
    name: ServiceNameArgument,
    no_wait: NoWait = False,
    gateway: GatewayUrl = DEFAULT_URL,
    key: OperatorKey = None,
    as_json: commands.Json = False,
) -> None:
    """Delete a service: what is under way may end within 10 s, its circuits are given back, its keys end."""
    with told_gateway(gateway, key) as client:
        begun = client.call("DELETE", f"/admin/v1/services/{path_part(name)}")
        show_operation(client, begun["operation"], waits=not no_wait, as_json=as_json)


def told_gateway(url: str, key: str | None) -> "AbstractContextManager[AdminClient]":
    """The gateway that is told, as `admin_client` has it."""
    from molink.client.gateway.services.admin_client import admin_client

    return admin_client(url, key)


def show_operation(client: "AdminClient", operation: dict[str, Any], *, waits: bool, as_json: bool) -> None:
    """Prints what becomes of an operation. Raises `CommandFailed` if it does not succeed."""
    for operation in client.follow(operation["id"]) if waits else ():  # noqa: B020 - the latest that is told
        if not as_json and operation["state"] == "running" and operation["message"]:
            tell(plain(operation["message"]))
    if as_json:
        print(json.dumps(operation))
    if operation["state"] in ("failed", "cancelled"):
        raise CommandFailed(f"{operation['state']}: {plain(operation['message'])}")
    if not as_json:
        done = plain(operation["message"]) or f"Under way, as operation {operation['id']}."
        print(done)


def _show_preview(answer: dict[str, Any], *, as_json: bool) -> None:
    routing = answer["routing"]
    if as_json:
        print(json.dumps(answer))
    else:
        for number, circuit in enumerate(routing["circuits"], 1):
            hops = ", ".join(f"{hop['peer_id']} {hop['start']}:{hop['stop']}" for hop in circuit["hops"])
            print(f"Circuit {number}: {plain(hops)} ({circuit['predicted_tpot_ms']} ms a token)")
        print(f"To load: {routing['load_bytes']} bytes")
    if not routing["possible"]:
        missing = routing["missing_bytes"]
        lack = f"{missing} bytes are missing: " if missing else ""
        raise CommandFailed(f"it does not fit: {lack}{plain(routing['reason'])}")


def _sentence(service: dict[str, Any]) -> str:
    uptime_s = service["uptime_s"]
    parts = [
        f"{service['name']}: {service['state']}, {service['model']}",
        f"up {uptime_s:.0f} s" if uptime_s is not None else "not up",
        f"{counted(service.get('held', 0), 'circuit')} held and {service.get('in_use', 0)} in use of "
        f"{service['minimum_circuits']} to {service['maximum_circuits']}",
        f"{service.get('throughput_tokens_per_s', 0):g} tokens/s",
        f"utilisation {100 * service.get('utilisation', 0):.0f} %",
    ]
    if "requests" in service:
        parts.append(counted(service["requests"], "request"))
    return plain("; ".join(parts))


def _parameter(text: str) -> tuple[str, Any]:
    name, separator, value = (part.strip() for part in text.partition("="))
    if not (name and separator and value):
        raise CommandFailed(f"--parameter takes NAME=VALUE, not {plain(text)!r}", EXIT_USAGE)
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def _bytes(text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise CommandFailed(f"--memory: {plain(str(error))}", EXIT_USAGE) from error


def path_part(name: str) -> str:
    """The name as part of a path: whatever else it is, it stays one part."""
    from urllib.parse import quote

    return quote(name, safe="")
