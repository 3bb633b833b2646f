"""The options of a peer, each declared once: command line, environment and configuration file are read by them.

A field of `Configuration` is the option `--its-name`, the variable `MOLINK_ITS_NAME` and the key `its_name` of the
file; its annotation is what values it takes, its default what holds if none of the three gives one, its `Option` what
the help says. Loads neither pydantic nor typer, so that the help waits for the one as little as a client for the other.
"""

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Constrains an option's values: numbers from `ge` to `le`; texts by their length and a pattern."""

    ge: float | None = None
    le: float | None = None
    min_length: int | None = None
    max_length: int | None = None
    pattern: str | None = None


@dataclass(frozen=True, slots=True)
class Option:
    """Describes an option in the help. `metavar` stands for its value; empty: the choices that its annotation has."""

    help: str
    metavar: str = ""
    bounds: Bounds = Bounds()


PORT = Bounds(ge=0, le=65535)


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """The options of `molink-peer join`, in the help's order. More than a class should have: each is one thing that an
    owner may decide, and what they have in common is only where they are written."""

    model: Annotated[
        str | None, Option("Model to serve: without it, the one that the swarm needs most.", "ID_OR_PATH")
    ] = None
    model_name: Annotated[
        str | None,
        Option(
            "What the swarm is to call the model: without it, what --model says, a path too.",
            "NAME",
            Bounds(min_length=1, max_length=200, pattern=r"^[^\s\x00-\x1f]+$"),
        ),
    ] = None
    initial_peers: Annotated[
        tuple[str, ...] | None, Option("Peers of the swarm to ask first.", "MULTIADDR ...")
    ] = None
    new_swarm: Annotated[bool, Option("Found a new swarm.")] = False
    local_network: Annotated[
        Literal["on", "off"],
        Option("Look for swarms on the local network, and let it know of this peer: on, unless told."),
    ] = "on"
    swarm_key: Annotated[Path | None, Option("Key file of a private swarm.", "FILE")] = None
    memory: Annotated[
        str | int | None,
        Option(
            "Cap on weights, KV cache and work space together; the program itself takes some 0.6 GB more.",
            "10GB",
        ),
    ] = None
    device: Annotated[
        str,
        Option(
            "Where to compute: several GPUs share every layer, if that is predicted to be faster.",
            "auto|cpu|cuda:0|cuda:0,1|mps",
        ),
    ] = "auto"
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        Option("Numbers to compute in: auto is the model's."),
    ] = "auto"
    quantization: Annotated[
        Literal["none", "int8", "nf4"] | None,
        Option("How weights are held: without it, as in the swarm that is joined."),
    ] = None
    exact: Annotated[
        Literal["on", "off"],
        Option("On: one session's numbers are bit for bit transformers', and slower; off, unless told."),
    ] = "off"
    listen: Annotated[
        str | None,
        Option("Address to listen on: this machine only, unless the swarm is on others.", "HOST"),
    ] = None
    announce: Annotated[
        str | None,
        Option(
            "Address that others dial; with ports, where a container's are mapped to others.",
            "HOST[:CONTROL:DATA]",
        ),
    ] = None
    port: Annotated[int, Option("Control plane's port: any free one, remembered.", "N", PORT)] = 0
    grpc_port: Annotated[int, Option("Data plane's port: any free one, remembered.", "N", PORT)] = 0
    name: Annotated[
        str | None, Option("What others see this peer called.", "NAME", Bounds(min_length=1, max_length=64))
    ] = None
    region: Annotated[
        str | None,
        Option(
            "Where others see that this peer is, such as DE, us-east or Lisbon: nothing, unless told.",
            "NAME",
            Bounds(min_length=1, max_length=32),
        ),
    ] = None
    operator: Annotated[
        tuple[str, ...] | None,
        Option(
            "Identity whose orders this peer takes, such as a gateway's: to drain, to leave, to serve another model, "
            "to tell how its machine is; may be given again. Nobody's, unless told.",
            "ID",
        ),
    ] = None
    layers: Annotated[
        str | None, Option("Hold exactly the layers from A up to, not including, B.", "A:B")
    ] = None
    state_dir: Annotated[Path | None, Option("Folder of the peer's identity and caches.", "DIR")] = None
    relay: Annotated[
        Literal["auto", "on", "off"],
        Option(
            "Being reached over other peers' relays: auto, if nobody can dial this one; on, always; off, never."
        ),
    ] = "auto"
    relay_port: Annotated[
        int, Option("Port of this peer's own relay, if others can dial it: any free one.", "N", PORT)
    ] = 0
    port_mapping: Annotated[
        Literal["on", "off"],
        Option("Ask the router by UPnP to pass this peer's ports on, while it serves; off, unless told."),
    ] = "off"
    offer_relay: Annotated[
        str | int | float,
        Option(
            "What it passes on for peers that nobody can dial: auto is a tenth of the uplink, at most 20 Mbps.",
            "auto|off|MBPS",
        ),
    ] = "auto"
    partner: Annotated[
        str,
        Option(
            "Who keeps second copies of its sessions' KV caches, as it does for others: any peer, nobody, or one.",
            "auto|off|PEER_ID",
        ),
    ] = "auto"
    roles: Annotated[
        Literal["auto", "off", "pairs", "pieces"],
        Option(
            "Whether sessions go over to partners while this peer computes prompts: auto, if it pays; off, unless told."
        ),
    ] = "off"
    sessions_per_client: Annotated[
        int,
        Option(
            "How many sessions one client may have here at once; a gateway is one client, whoever uses it.",
            "N",
            Bounds(ge=1, le=64),
        ),
    ] = 32
    draft: Annotated[
        str,
        Option(
            "What tokens are guessed from where this peer is the head: a session's text; with auto its client's "
            "earlier generations too, and with a draft model, of the same tokenizer, what that says.",
            "auto|off|lookup|ID_OR_PATH",
            Bounds(min_length=1),
        ),
    ] = "auto"
    activation_codec: Annotated[
        Literal["none", "auto", "float16", "bfloat16", "int8"],
        Option("Fewer bytes on links, less exact, for sessions that ask for it: auto is any of them."),
    ] = "none"
    micro_batches: Annotated[
        str | int,
        Option(
            "How many micro-batches circulate where this peer is the head: a rule, or a number.",
            "molink|system|transmission|N",
        ),
    ] = "molink"
    http_proxy: Annotated[
        str | None, Option("HTTP proxy that links to peers are dialled through.", "URL")
    ] = None
    metrics_port: Annotated[
        int | None, Option("Serve /metrics for Prometheus to this machine; 0: any free port.", "N", PORT)
    ] = None
    otlp_endpoint: Annotated[
        str | None,
        Option(
            "Send traces of requests that ask for it to this OpenTelemetry collector, such as http://127.0.0.1:4318.",
            "URL",
        ),
    ] = None
    log_format: Annotated[
        Literal["text", "json"], Option("What stands on stderr: text, or a JSON object in each line.")
    ] = "text"
    transmission_policy: Annotated[
        str, Option("What leaves this machine first: molink, or a rival to measure.", "NAME")
    ] = "molink"
    store_dir: Annotated[
        Path | None, Option("Folder of weights that come from a hub; peers share it.", "DIR")
    ] = None
    store_size: Annotated[
        str | int | None,
        Option("Cap on that folder: without it, half of what the disk has free.", "100GB"),
    ] = None
    swap_space: Annotated[
        str | int | None,
        Option("With a GPU: the host's memory for sessions that wait while others take its KV cache.", "8GB"),
    ] = None
    pause_when_busy: Annotated[
        Literal["auto", "on", "off"],
        Option("Pause while a full-screen or GPU-heavy program runs: auto is if this peer uses a GPU."),
    ] = "auto"
    quiet_hours: Annotated[
        tuple[str, ...] | None,
        Option("Serve nobody in this part of the day; may be given again.", "22:00-07:00"),
    ] = None
    on_battery: Annotated[
        Literal["pause", "serve"], Option("What to do while the machine is on battery.")
    ] = "pause"
    threads: Annotated[
        int | None,
        Option(
            "Threads of a processor: without it or OMP_NUM_THREADS, as many as are fastest.",
            "N",
            Bounds(ge=1, le=1024),
        ),
    ] = None
    priority: Annotated[
        Literal["normal", "low"], Option("Low, unless told: this machine's other programs go first.")
    ] = "low"
    wait: Annotated[
        float,
        Option(
            "Keep trying to reach the initial peers for so long, if they start later: 0, unless told.",
            "SECONDS",
            Bounds(ge=0, le=604_800),
        ),
    ] = 0.0


@dataclass(frozen=True, slots=True)
class Declared:
    """What a field of `Configuration` declares."""

    kinds: tuple[Any, ...]
    """What its values may be, None left out."""
    option: Option
    annotation: object

    @property
    def choices(self) -> tuple[str, ...]:
        """The texts that it takes; empty: any, or no text at all."""
        return get_args(self.kinds[0]) if get_origin(self.kinds[0]) is Literal else ()

    @property
    def takes_several(self) -> bool:
        return get_origin(self.kinds[0]) is tuple


@cache
def declared_options() -> dict[str, Declared]:
    """What there is to configure, by name."""
    hints = get_type_hints(Configuration, include_extras=True)
    return {name: _declared(*get_args(hint)) for name, hint in hints.items()}


def _declared(annotation: object, option: Option) -> Declared:
    united = get_origin(annotation) in (Union, UnionType)
    kinds = get_args(annotation) if united else (annotation,)
    return Declared(tuple(kind for kind in kinds if kind is not NoneType), option, annotation)
