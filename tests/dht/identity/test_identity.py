"""Keys, peer ids, certificates and swarm keys."""

import asyncio
import os
import stat
import threading
from pathlib import Path

import grpc
import pytest
from cryptography import x509
from hypothesis import given
from hypothesis import strategies as st
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.peer.id import ID

from molink.dht.identity.identity import Identity, is_sound, peer_id_of, public_key_of, verify
from molink.dht.identity.key_file import KeyFileError, write_key_file
from molink.dht.identity.swarm_key import SwarmKey
from molink.peer.wire.link.certificate import certificate_hash, new_certificate, server_name


@given(st.binary(min_size=32, max_size=32))
def test_peer_ids_are_those_of_libp2p(seed: bytes) -> None:
    public_key = create_new_key_pair(seed).public_key
    peer_id = peer_id_of(public_key.to_bytes())
    assert peer_id == str(ID.from_pubkey(public_key))
    assert public_key_of(peer_id) == public_key.to_bytes()


@given(st.text(max_size=60))
def test_what_is_no_peer_id_has_no_key(text: str) -> None:
    with pytest.raises(ValueError, match="peer id"):
        public_key_of(text)


def test_an_identity_survives_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "state" / "identity.key"
    first = Identity.load_or_create(path)
    assert Identity.load_or_create(path).peer_id == first.peer_id
    assert [entry.name for entry in path.parent.iterdir()] == ["identity.key"]
    if os.name != "nt":
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_processes_that_start_together_get_one_identity(tmp_path: Path) -> None:
    path = tmp_path / "identity.key"
    found: list[str] = []
    threads = [
        threading.Thread(target=lambda: found.append(Identity.load_or_create(path).peer_id)) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert len(found) == 8
    assert len(set(found)) == 1


@pytest.mark.parametrize("content", [b"", b"-----BEGIN PRIVATE KEY-----\n", b"\xff" * 100, b"x" * 10_000])
def test_a_damaged_key_file_is_refused_and_kept(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "identity.key"
    write_key_file(path, content)
    with pytest.raises(KeyFileError, match=r"identity\.key"):
        Identity.load_or_create(path)
    assert path.read_bytes() == content


@pytest.mark.parametrize("kind", ["identity", "swarm"])
def test_a_key_that_others_can_read_is_refused(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "key"
    if kind == "identity":
        Identity.load_or_create(path)
    else:
        SwarmKey.write_new(path)
    path.chmod(0o644)
    if os.name == "nt":
        assert path.exists()
        return
    with pytest.raises(KeyFileError, match="chmod 600"):
        Identity.load_or_create(path) if kind == "identity" else SwarmKey.load(path)


@given(st.binary(max_size=200), st.integers(0, 63), st.integers(1, 255))
def test_a_signature_fits_one_key_and_one_text(data: bytes, position: int, flip: int) -> None:
    identity, other = Identity.generate(), Identity.generate()
    signature = identity.sign(data)
    altered = bytearray(signature)
    altered[position] ^= flip
    assert verify(identity.public_key, data, signature)
    assert not verify(other.public_key, data, signature)
    assert not verify(identity.public_key, data + b"!", signature)
    assert not verify(identity.public_key, data, bytes(altered))


@given(st.binary(max_size=100), st.binary(max_size=100))
def test_verifying_anything_only_ever_says_no(key: bytes, signature: bytes) -> None:
    assert not verify(key, b"text", signature)


def points_of_small_order() -> list[bytes]:
    """Each of the eight, as the curve's arithmetic shows, in each way in which 32 bytes can hold it."""
    field = 2**255 - 19
    d = -121665 * pow(121666, -1, field) % field
    root = pow(2, (field - 1) // 4, field)

    def x_of(y: int) -> int:
        square = (y * y - 1) * pow(d * y * y + 1, -1, field) % field
        x = pow(square, (field + 3) // 8, field)
        return x if x * x % field == square else x * root % field

    def doubled(x: int, y: int) -> tuple[int, int]:
        product = d * x * x * y * y % field
        return (
            2 * x * y * pow(1 + product, -1, field) % field,
            (y * y + x * x) * pow(1 - product, -1, field) % field,
        )

    order_8 = int.from_bytes(
        bytes.fromhex("c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac037a"), "little"
    )
    found = []
    for y in (0, 1, field - 1, order_8, field - order_8):
        point = (x_of(y), y)
        for _ in range(3):
            point = doubled(*point)
        assert point == (0, 1)
        found += [(y | sign << 255).to_bytes(32, "little") for sign in (0, 1)]
        if y < 19:
            found += [(y + field | sign << 255).to_bytes(32, "little") for sign in (0, 1)]
    return found


def test_keys_of_small_order_are_nobody_s() -> None:
    keys = points_of_small_order()
    assert len(set(keys)) == 14
    for key in keys:
        assert not is_sound(key)
        assert not verify(key, b"anything", (1).to_bytes(32, "little") + bytes(32))
        with pytest.raises(ValueError, match="peer id"):
            public_key_of(peer_id_of(key))


@given(st.integers(2**255 - 19, 2**255 - 1), st.booleans())
def test_a_key_is_written_in_one_way(y: int, sign: bool) -> None:
    assert not is_sound((y | sign << 255).to_bytes(32, "little"))


def test_secrets_are_not_shown(tmp_path: Path) -> None:
    key = SwarmKey.write_new(tmp_path / "swarm.key")
    certificate = new_certificate("peer")
    assert key.secret.hex() not in repr(key)
    assert "PRIVATE" not in repr(certificate)


def test_a_swarm_key_is_one_line_and_makes_equal_keys(tmp_path: Path) -> None:
    path = tmp_path / "swarm.key"
    key = SwarmKey.write_new(path)
    assert path.read_text() == f"molink-swarm-key-v1:{key.secret.hex()}\n"
    assert SwarmKey.load(path) == key
    with pytest.raises(FileExistsError):
        SwarmKey.write_new(path)
    assert SwarmKey.load(path) == key


@pytest.mark.parametrize("text", ["", "molink-swarm-key-v1:12", "molink-swarm-key-v2:" + "0" * 64, "ü"])
def test_what_is_no_swarm_key_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "swarm.key"
    write_key_file(path, text.encode())
    with pytest.raises(KeyFileError, match="not a swarm key"):
        SwarmKey.load(path)


def test_a_proof_needs_the_key_and_the_context() -> None:
    key, other = SwarmKey.generate(), SwarmKey.generate()
    proof = key.proof(b"nonce")
    assert key.check(b"nonce", proof)
    assert not key.check(b"another nonce", proof)
    assert not other.check(b"nonce", proof)
    assert not key.check(b"nonce", b"")
    assert key.libp2p_psk != key.secret.hex()
    assert len(bytes.fromhex(key.libp2p_psk)) == 32


def test_a_certificate_names_its_peer_whatever_the_clock_says() -> None:
    identity = Identity.generate()
    made = new_certificate(identity.peer_id)
    certificate = x509.load_der_x509_certificate(made.der)
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == [server_name(identity.peer_id)]
    assert identity.peer_id.endswith(certificate.subject.rfc4514_string().removeprefix("CN="))
    assert certificate.not_valid_before_utc.year == 2000
    assert certificate.not_valid_after_utc.year == 2100
    assert certificate_hash(made.der) != certificate_hash(new_certificate(identity.peer_id).der)


async def _answer(certificate_pinned: bytes, name: str, port: int) -> bytes:
    credentials = grpc.ssl_channel_credentials(root_certificates=certificate_pinned)
    options = [("grpc.ssl_target_name_override", name)]
    async with grpc.aio.secure_channel(f"127.0.0.1:{port}", credentials, options=options) as channel:
        return bytes(await channel.unary_unary("/test/Echo")(b"hello", timeout=120))


def test_grpc_accepts_the_pinned_certificate_and_no_other() -> None:
    asyncio.run(_pinned_and_not())


async def _pinned_and_not() -> None:
    peer_id = Identity.generate().peer_id
    made, imitation = new_certificate(peer_id), new_certificate(peer_id)
    server = grpc.aio.server()

    async def echo(request: bytes, _context: object) -> bytes:
        return request

    handlers = {"Echo": grpc.unary_unary_rpc_method_handler(echo)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test", handlers),))
    port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([(made.key_pem, made.pem)]))
    await server.start()
    try:
        assert await _answer(made.pem, server_name(peer_id), port) == b"hello"
        for pem, name in ((imitation.pem, server_name(peer_id)), (made.pem, server_name("other"))):
            with pytest.raises(grpc.aio.AioRpcError):
                await _answer(pem, name, port)
    finally:
        await server.stop(0)
