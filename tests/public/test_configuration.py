"""What users write down about swarms is read exactly, or refused with a sentence that names what is wrong."""

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.deadline import DEADLINE_S

from molink.commands import spread_initial_peers
from molink.configuration import (
    COMMAND_LINE,
    SettingsError,
    check_address,
    check_given,
    configuration_path,
    configured_initial_peers,
    is_loopback,
    read_configuration,
    split_addresses,
)

PEER = "12D3KooWDpJ7As7BWAwRMfu1VU2WCqNjvq387JEYKDBj4kx6nXTN"
LOCAL = f"/ip4/127.0.0.1/tcp/4001/p2p/{PEER}"
REMOTE = f"/dns4/swarm.example.org/tcp/4001/p2p/{PEER}"


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "config.toml"
    path.write_text("")
    monkeypatch.setenv("MOLINK_CONFIG", str(path))
    monkeypatch.delenv("MOLINK_INITIAL_PEERS", raising=False)
    return path


@pytest.mark.parametrize(
    "address", [LOCAL, REMOTE, f"/ip6/::1/tcp/1/p2p/{PEER}", f"/dns/a/tcp/65535/p2p/{PEER}"]
)
def test_an_address_of_a_peer_is_taken_as_it_is(address: str) -> None:
    assert check_address(address) == address


@pytest.mark.parametrize(
    "address",
    [
        "",
        "127.0.0.1:4001",
        "/ip4/127.0.0.1/tcp/4001",
        "/ip4/127.0.0.1/tcp/4001/p2p/12D3...",
        f"/ip4/127.0.0.1/tcp/0/p2p/{PEER}",
        f"/ip4/127.0.0.1/tcp/65536/p2p/{PEER}",
        f"/ip4/300.0.0.1/tcp/4001/p2p/{PEER}",
        f"/ip4/::1/tcp/4001/p2p/{PEER}",
        f"/ip6/127.0.0.1/tcp/4001/p2p/{PEER}",
        f"/ip4/127.0.0.1/udp/4001/quic-v1/p2p/{PEER}",
        f"{LOCAL}/",
        f" {LOCAL}",
    ],
)
def test_what_leads_to_no_peer_is_refused_with_an_example(address: str) -> None:
    with pytest.raises(SettingsError, match=r"not a peer's multiaddress.*such as /ip4/"):
        check_address(address)


def test_a_mistyped_peer_id_is_seen() -> None:
    with pytest.raises(SettingsError, match="is mistyped"):
        check_address(LOCAL.replace("12D3", "22D3"))
    with pytest.raises(SettingsError, match="52 characters"):
        check_address(LOCAL[:-1])


@given(st.text(max_size=80))
def test_checking_any_text_returns_it_or_says_why_not(text: str) -> None:
    try:
        answer = check_address(text)
    except SettingsError as refusal:
        answer = str(refusal).partition(" is not a peer's multiaddress")[0]
        text = repr(text)
    assert answer == text


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        (LOCAL, True),
        (f"/ip4/127.9.9.9/tcp/1/p2p/{PEER}", True),
        (f"/ip6/::1/tcp/1/p2p/{PEER}", True),
        (f"/dns4/localhost/tcp/1/p2p/{PEER}", True),
        (REMOTE, False),
        (f"/ip4/192.168.1.5/tcp/1/p2p/{PEER}", False),
    ],
)
def test_loopback_addresses_are_told_from_those_of_other_machines(address: str, expected: bool) -> None:
    assert is_loopback(address) is expected


@pytest.mark.parametrize("text", ["a,b", "a b", " a , b ", "a,\n b,", ",a b"])
def test_addresses_are_separated_by_commas_or_white_space(text: str) -> None:
    assert split_addresses(text) == ("a", "b")


@pytest.mark.parametrize("text", ["", " ", ",", " , "])
def test_no_text_names_no_addresses(text: str) -> None:
    assert split_addresses(text) == ()


def test_explicit_peers_come_before_the_environment_and_that_before_the_file(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = LOCAL.replace("4001", "4002")
    third = LOCAL.replace("4001", "4003")
    assert configured_initial_peers(None) == ()
    file.write_text(f'initial_peers = ["{third}"]\n')
    assert configured_initial_peers(None) == (third,)
    monkeypatch.setenv("MOLINK_INITIAL_PEERS", f"{other}, {third}")
    assert configured_initial_peers([]) == (other, third)
    assert configured_initial_peers([LOCAL, LOCAL]) == (LOCAL,)
    assert configured_initial_peers(LOCAL) == (LOCAL,)


def test_the_file_may_give_initial_peers_as_one_text(file: Path) -> None:
    file.write_text(f'initial_peers = "{LOCAL} {REMOTE}"\n')
    assert configured_initial_peers(None) == (LOCAL, REMOTE)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('modle = "gpt2"\n', r"`modle` is not a known key \(did you mean `model`\?\)"),
        ("zzzz = 1\n", r"`zzzz` is not a known key \(known keys are model, model_name, initial_peers"),
        ('port = "abc"\n', r"`port`: input should be a valid integer"),
        ("grpc_port = 70000\n", r"`grpc_port`: input should be less than or equal to 65535"),
        ('relay = "maybe"\n', r"`relay`: input should be 'auto', 'on' or 'off'"),
        ('model = "a"\nport = \n', r"line 2"),
        ("[peer]\nport = 1\n", r"`peer` is not a known key"),
    ],
)
def test_a_wrong_file_is_refused_by_its_name_and_the_key_or_line(
    file: Path, content: str, message: str
) -> None:
    file.write_text(content)
    with pytest.raises(SettingsError, match=message) as raised:
        read_configuration()
    assert str(file) in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("quantization", "int4", "the command line: --quantization: input should be 'none', 'int8' or 'nf4'"),
        ("activation_codec", "zip", "the command line: --activation-codec: input should be "),
        ("grpc_port", 70000, "the command line: --grpc-port: input should be less than or equal to 65535"),
    ],
)
def test_an_option_on_the_command_line_is_named_as_it_is_typed(
    name: str, value: object, message: str
) -> None:
    with pytest.raises(SettingsError, match=f"^{message}"):
        check_given({name: value}, COMMAND_LINE)
    with pytest.raises(SettingsError, match=f"^a file: `{name}`: "):
        check_given({name: value}, "a file")


def test_a_file_that_is_not_text_is_refused(file: Path) -> None:
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(SettingsError, match="not valid TOML"):
        read_configuration()


def test_a_named_file_has_to_exist_but_the_default_one_has_not(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="does not exist"):
        read_configuration({"MOLINK_CONFIG": str(tmp_path / "none.toml")})
    assert configuration_path({}).name == "config.toml"


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("join --initial-peers /a /b --new-swarm", "join --initial-peers /a --initial-peers /b --new-swarm"),
        ("--initial-peers=/a /b", "--initial-peers=/a --initial-peers /b"),
        ("--initial-peers /a prompt /b", "--initial-peers /a prompt /b"),
        ("--initial-peers /a --swarm-key /k", "--initial-peers /a --swarm-key /k"),
        ("--state-dir /s --initial-peers /a", "--state-dir /s --initial-peers /a"),
        (
            "--initial-peers /a --initial-peers /b /c",
            "--initial-peers /a --initial-peers /b --initial-peers /c",
        ),
    ],
)
def test_several_peers_may_follow_one_option(written: str, meant: str) -> None:
    assert spread_initial_peers(written.split()) == meant.split()


def test_the_module_brings_in_no_libp2p_torch_or_grpc() -> None:
    program = (
        "import sys, molink.configuration; "
        "print([name for name in ('libp2p', 'torch', 'grpc', 'trio') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=DEADLINE_S, check=True
    )
    assert done.stdout.strip() == "[]"
