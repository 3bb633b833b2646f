"""Command line before environment before file before defaults; what cannot be done is refused."""

from pathlib import Path

import pytest

from molink.peer.daemon import settings as settings_module
from molink.peer.daemon.settings import (
    AnnouncedPorts,
    JoinSettings,
    SettingsError,
    load_settings,
    parse_layers,
    where_to_join,
)
from molink.peer.host_policy.rules import HostPolicy, parse_quiet_hours
from molink.peer.scheduling.in_flight_rules import molink
from molink.shards.spec import Span

PEER = "12D3KooWDpJ7As7BWAwRMfu1VU2WCqNjvq387JEYKDBj4kx6nXTN"
LOCAL = f"/ip4/127.0.0.1/tcp/4001/p2p/{PEER}"
REMOTE = f"/ip4/203.0.113.7/tcp/4001/p2p/{PEER}"


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    path = tmp_path / "config.toml"
    path.write_text("")
    return {"MOLINK_CONFIG": str(path)}


def load(environment: dict[str, str], file: str = "", **command_line: object) -> JoinSettings:
    Path(environment["MOLINK_CONFIG"]).write_text(file)
    return load_settings(command_line, environment)


def test_without_anything_the_defaults_hold(environment: dict[str, str]) -> None:
    settings = load(environment)
    assert settings.options.model is None
    assert settings.initial_peers == ()
    assert settings.options.new_swarm is False
    assert settings.memory_bytes is None
    assert (settings.options.device, settings.options.dtype, settings.options.quantization) == (
        "auto",
        "auto",
        None,
    )
    assert settings.listen == "127.0.0.1"
    assert (settings.options.port, settings.options.grpc_port, settings.layers) == (0, 0, None)
    assert (settings.options.partner, settings.options.relay) == ("auto", "auto")
    assert (settings.options.offer_relay, settings.options.relay_port) == ("auto", 0)
    assert settings.rule is molink
    assert settings.options.activation_codec == "none", "nobody loses exactness unasked"
    assert settings.options.http_proxy is None
    assert settings.options.metrics_port is None, "nobody is listened to unasked"
    assert settings.options.transmission_policy == "molink"
    assert settings.state_dir.is_absolute()
    assert settings.state_dir.name == "peer"
    assert settings.store_dir.is_absolute()
    assert settings.store_dir != settings.state_dir, "peers of one user share it"
    assert settings.store_bytes is None
    assert settings.swap_bytes is None


def test_the_command_line_comes_before_the_file_and_each_setting_for_itself(
    environment: dict[str, str],
) -> None:
    file = (
        'name = "from the file"\nmemory = "2GB"\nport = 4001\nactivation_codec = "int8"\nstore_size = "3GB"\n'
    )
    settings = load(environment, file, name="mine", layers="2:6")
    assert settings.options.name == "mine"
    assert settings.memory_bytes == 2_000_000_000
    assert settings.store_bytes == 3_000_000_000
    assert settings.options.port == 4001
    assert settings.options.activation_codec == "int8"
    assert settings.layers == Span(2, 6)


def test_the_volunteers_comfort_is_on_unless_told_otherwise(environment: dict[str, str]) -> None:
    settings = load(environment)
    assert settings.host_policy == HostPolicy("auto", (), "pause")
    assert settings.options.priority == "low"
    file = 'pause_when_busy = "on"\nquiet_hours = ["22:00-07:00", "12:00-13:00"]\npriority = "normal"\n'
    settings = load(environment, file, on_battery="serve")
    night, noon = parse_quiet_hours("22:00-07:00"), parse_quiet_hours("12:00-13:00")
    assert settings.host_policy == HostPolicy("on", (night, noon), "serve")
    assert settings.options.priority == "normal"
    assert load(environment, 'quiet_hours = "22:00-07:00"\n').host_policy.quiet_hours == (night,)
    with pytest.raises(SettingsError, match=r"--quiet-hours: '22-7' is not a part of the day"):
        load(environment, quiet_hours=("22-7",))


def test_where_to_join_is_decided_by_the_first_source_that_says_anything(environment: dict[str, str]) -> None:
    file = f'initial_peers = ["{REMOTE}"]\n'
    assert load(environment, file).initial_peers == (REMOTE,)
    environment["MOLINK_INITIAL_PEERS"] = f"{LOCAL} {REMOTE}"
    assert load(environment, file).initial_peers == (LOCAL, REMOTE)
    assert load(environment, file, initial_peers=[REMOTE]).initial_peers == (REMOTE,)
    founded = load(environment, file, new_swarm=True)
    assert (founded.initial_peers, founded.options.new_swarm) == ((), True)
    assert load(environment, "new_swarm = true\n").initial_peers == (LOCAL, REMOTE)


def test_a_source_that_wants_both_to_join_and_to_found_is_refused(environment: dict[str, str]) -> None:
    with pytest.raises(SettingsError, match="the command line asks for initial peers and for a new swarm"):
        load(environment, new_swarm=True, initial_peers=[LOCAL])
    with pytest.raises(
        SettingsError, match=r"the configuration file .* asks for initial peers and for a new swarm"
    ):
        load(environment, f'new_swarm = true\ninitial_peers = "{LOCAL}"\n')


def test_founding_because_nothing_is_configured_is_said(environment: dict[str, str]) -> None:
    where = where_to_join(load(environment))
    assert where.initial_peers == ()
    assert "no initial peers are configured" in where.reason
    assert where_to_join(load(environment, new_swarm=True)).reason == "Founding a new swarm"
    joined = where_to_join(load(environment, initial_peers=[LOCAL, REMOTE]))
    assert joined.initial_peers == (LOCAL, REMOTE)
    assert LOCAL in joined.reason


def test_a_peer_listens_beyond_this_machine_only_when_the_swarm_is_beyond_it(
    environment: dict[str, str],
) -> None:
    assert load(environment, initial_peers=[LOCAL]).listen == "127.0.0.1"
    assert load(environment, initial_peers=[LOCAL, REMOTE]).listen == "0.0.0.0"  # noqa: S104 - what is tested
    assert load(environment, initial_peers=[REMOTE], listen="127.0.0.1").listen == "127.0.0.1"


@pytest.mark.parametrize("option", ["listen", "announce"])
@pytest.mark.parametrize("written", ["::1", "[::1]"])
def test_an_ipv6_address_may_have_the_brackets_that_it_has_beside_a_port(
    environment: dict[str, str], option: str, written: str
) -> None:
    settings = load(environment, **{option: written})
    assert {"listen": settings.listen, "announce": settings.options.announce}[option] == "::1"


@pytest.mark.parametrize(
    ("announce", "host", "ports"),
    [
        ("peer.example.org:34001:34002", "peer.example.org", AnnouncedPorts(34001, 34002)),
        ("203.0.113.7:1:65535", "203.0.113.7", AnnouncedPorts(1, 65535)),
        ("[2001:db8::1]:34001:34002", "2001:db8::1", AnnouncedPorts(34001, 34002)),
        ("2001:db8::1", "2001:db8::1", None),
        ("203.0.113.7", "203.0.113.7", None),
    ],
)
def test_a_container_announces_the_ports_that_its_own_are_mapped_to(
    environment: dict[str, str], announce: str, host: str, ports: AnnouncedPorts | None
) -> None:
    settings = load(environment, announce=announce)
    assert (settings.options.announce, settings.announced_ports) == (host, ports)


def test_relays_are_not_asked_for_where_nothing_could_come_of_it(environment: dict[str, str]) -> None:
    assert load(environment, initial_peers=[REMOTE], relay="on").options.relay == "on"
    with pytest.raises(
        SettingsError, match=r"--relay on cannot work, for this peer listens on 127\.0\.0\.1 only"
    ):
        load(environment, initial_peers=[LOCAL], relay="on")
    with pytest.raises(SettingsError, match="--relay on cannot work, for links go through --http-proxy"):
        load(environment, initial_peers=[REMOTE], relay="on", http_proxy="http://proxy.example.org:3128")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"initial_peers": [LOCAL]}, r"cannot work, for this peer listens on 127\.0\.0\.1 only"),
        ({"listen": "::1"}, "cannot work, for this peer listens on ::1 only"),
        (
            {"initial_peers": [REMOTE], "http_proxy": "http://proxy.example.org:3128"},
            "cannot work, for links go through --http-proxy",
        ),
        ({"initial_peers": [REMOTE], "announce": "203.0.113.7"}, "and --announce contradict each other"),
        ({"initial_peers": [REMOTE], "relay": "on"}, "and --relay on contradict each other"),
    ],
)
def test_the_router_is_not_asked_to_map_ports_where_nothing_could_come_of_it(
    environment: dict[str, str], given: dict[str, object], message: str
) -> None:
    with pytest.raises(SettingsError, match=f"--port-mapping on {message}"):
        load(environment, port_mapping="on", **given)


def test_the_router_is_asked_to_map_ports_only_if_the_owner_says_so(environment: dict[str, str]) -> None:
    assert load(environment, initial_peers=[REMOTE]).options.port_mapping == "off"
    assert load(environment, initial_peers=[REMOTE], port_mapping="on").options.port_mapping == "on"
    assert load(environment, 'port_mapping = "on"', listen="0.0.0.0").options.port_mapping == "on"  # noqa: S104


def test_a_host_is_announced_by_its_name_or_address(environment: dict[str, str]) -> None:
    assert load(environment, announce="peer.example.org").options.announce == "peer.example.org"
    assert load(environment, announce="203.0.113.7").options.announce == "203.0.113.7"
    assert load(environment, listen="localhost").listen == "127.0.0.1"


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("announce", "not a host!", "--announce: 'not a host!' is neither an IP address nor a host name"),
        ("announce", "a:b:c", "peer.example.org, with mapped ports HOST:CONTROL:DATA$"),
        ("announce", "1.2.3", "--announce: .* neither an IP address nor a host name"),
        ("announce", "", "--announce: .* neither an IP address nor a host name"),
        ("announce", ":1:2", "--announce: .* neither an IP address nor a host name"),
        ("announce", "203.0.113.7:0:1", "--announce 203.0.113.7:0:1: CONTROL and DATA are two ports"),
        ("announce", "203.0.113.7:4:4", "--announce 203.0.113.7:4:4: CONTROL and DATA are two ports"),
        ("announce", "203.0.113.7:4:70000", "--announce .*: CONTROL and DATA are two ports"),
        ("listen", "nonsense", "--listen: 'nonsense' is not an IP address"),
        ("listen", "203.0.113.9", r"--listen 203\.0\.113\.9 is not an address of this machine"),
    ],
)
def test_a_host_that_is_none_is_refused_at_once(
    environment: dict[str, str], option: str, value: str, message: str
) -> None:
    with pytest.raises(SettingsError, match=message):
        load(environment, **{option: value})


def test_port_zero_means_any_free_one(environment: dict[str, str]) -> None:
    settings = load(environment, port=0, grpc_port=0)
    assert (settings.options.port, settings.options.grpc_port) == (0, 0)


@pytest.mark.parametrize("quantization", ["int8", "nf4"])
def test_quantization_needs_its_package(
    quantization: str, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert load(environment, quantization=quantization).options.quantization == quantization
    monkeypatch.setattr(settings_module, "find_spec", lambda _: None)
    with pytest.raises(SettingsError, match=r"--quantization: .* pip install 'molink\[quantization\]'"):
        load(environment, quantization=quantization)


def test_it_is_exact_only_when_told(environment: dict[str, str]) -> None:
    assert load(environment).options.exact == "off"
    assert load(environment, 'exact = "on"').options.exact == "on"
    assert load(environment, 'exact = "on"', exact="off").options.exact == "off"
    with pytest.raises(SettingsError, match="exact"):
        load(environment, 'exact = "yes"')


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"memory": "lots"}, r"--memory: .*not a size"),
        ({"memory": -1}, "--memory"),
        ({"swap_space": 0}, "--swap-space 0 leaves nothing to swap into"),
        ({"store_size": "much"}, r"--store-size: .*not a size"),
        ({"store_size": 0}, "--store-size 0 leaves nothing to keep weights in"),
        ({"layers": "6:2"}, r"--layers '6:2' is not a span"),
        ({"layers": "3"}, r"such as 0:12"),
        ({"layers": "a:b"}, "not a span"),
        ({"initial_peers": ["localhost:4001"]}, "not a peer's multiaddress"),
        ({"offer_relay": "much"}, "--offer-relay much: use auto, off, or megabits per second"),
        ({"offer_relay": 0}, "--offer-relay 0: use auto, off, or megabits per second"),
        ({"partner": "anybody"}, "--partner anybody: use auto, off, or a peer id"),
        ({"device": "gpu"}, "--device 'gpu' is not known"),
        ({"device": "cuda:x"}, "not known"),
        ({"swarm_key": "/no/such/file"}, "is not a file"),
        ({"transmission_policy": "best"}, "--transmission-policy 'best' is not known: use one of molink"),
        ({"http_proxy": "127.0.0.1:3128"}, "'127.0.0.1:3128' is not the URL of an HTTP proxy"),
        ({"http_proxy": "http://127.0.0.1"}, "with its port"),
        ({"http_proxy": "http://127.0.0.1:65536"}, "with its port"),
        ({"http_proxy": "http:// :1"}, "with its port"),
        ({"port": 5000, "grpc_port": 5000}, "--port and --grpc-port are both 5000"),
        ({"micro_batches": "all"}, "--micro-batches: 'all' is neither a number nor one of molink"),
        ({"micro_batches": 0}, "--micro-batches: 1 to 64 micro-batches can circulate, not 0"),
    ],
)
def test_what_cannot_be_done_is_refused_in_one_sentence(
    environment: dict[str, str], given: dict[str, object], message: str
) -> None:
    with pytest.raises(SettingsError, match=message) as raised:
        load(environment, **given)
    assert "\n" not in str(raised.value)


def test_the_proxy_of_the_command_line_comes_before_that_of_the_environment_and_the_file(
    environment: dict[str, str],
) -> None:
    file = 'http_proxy = "http://file.example:1"\n'
    assert load(environment, file).options.http_proxy == "http://file.example:1"
    environment["MOLINK_HTTP_PROXY"] = "http://[::1]:2"
    assert load(environment, file).options.http_proxy == "http://[::1]:2"
    assert load(environment, file, http_proxy="http://user:word@127.0.0.1:3/").options.http_proxy == (
        "http://user:word@127.0.0.1:3/"
    )


def test_the_environment_is_checked_like_the_command_line(environment: dict[str, str]) -> None:
    environment["MOLINK_INITIAL_PEERS"] = "nowhere"
    with pytest.raises(SettingsError, match="'nowhere' is not a peer's multiaddress"):
        load(environment)


def test_layers_are_the_first_and_the_one_after_the_last() -> None:
    assert parse_layers("0:12") == Span(0, 12)
    assert parse_layers(" 3:4 ") == Span(3, 4)


@pytest.mark.parametrize("device", ["auto", "cpu", "mps", "cuda", "cuda:0", "cuda:0,1"])
def test_device_names_of_the_documentation_are_known(environment: dict[str, str], device: str) -> None:
    assert load(environment, device=device).options.device == device


def test_a_key_file_is_taken_by_its_absolute_path(
    environment: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "swarm.key").write_text("content is checked where it is used")
    monkeypatch.chdir(tmp_path)
    assert load(environment, swarm_key=Path("swarm.key")).options.swarm_key == tmp_path / "swarm.key"
