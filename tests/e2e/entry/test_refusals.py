"""Bad input ends in one clear sentence, and the swarm serves on."""

import hashlib
import shutil
import socket
from pathlib import Path

import pytest
from support.models.tiny_models import make_tiny_model
from support.swarms.forked_peers import run_forked
from support.swarms.live_swarms import BUNDLED, Ended, References, check_that_it_serves, run_program

from molink.client.api.swarm import AsyncSwarm
from molink.client.errors import InvalidRequest, ModelNotFound, SwarmUnavailable
from molink.client.local.local_swarm import LocalSwarm
from molink.shards.checkpoint.catalog import resolve

pytestmark = [pytest.mark.real, pytest.mark.full, pytest.mark.anyio]

NOBODY = "/ip4/127.0.0.1/tcp/1/p2p/12D3KooWDpJ7As7BWAwRMfu1VU2WCqNjvq387JEYKDBj4kx6nXTN"


def check_one_line(ended: Ended, *words: str, status: int = 1) -> None:
    """One sentence on stderr, no traceback, and nothing that a user must not meet."""
    assert ended.status == status, ended
    lines = ended.err.strip().splitlines()
    assert len(lines) == 1, ended.err
    assert "Traceback" not in ended.err
    assert "unexpected error" not in ended.err
    for word in words:
        assert word in lines[0]


async def join_that_fails(tmp_path: Path, *options: str) -> Ended:
    return await run_forked(("join", "--state-dir", str(tmp_path / "state"), *options), tmp_path / "said")


@pytest.mark.parametrize(
    ("prompt", "options", "words"),
    [
        ("", {}, "empty"),
        ([], {}, "empty"),
        ([5] * 1024, {}, "1023 at most"),
        ([5] * 5000, {}, "5000 tokens"),
        ([99999], {}, "token ids"),
        ([-1], {}, "token ids"),
        ("a", {"temperature": -1.0}, "temperature"),
        ("a", {"max_new_tokens": 0}, "max_new_tokens"),
        ("a", {"top_p": 2.0}, "top_p"),
        ("a", {"speculation": "on"}, "speculation must be auto or off"),
        ("a", {"prediction": "a" * 65_537}, "65536"),
        ("a", {"prediction": [99999]}, "token ids"),
        (None, {}, "text or token ids"),
        ([1.5], {}, "text or token ids"),
        ("a", {"timeout_s": -1.0}, "timeout_s"),
        ("a", {"timeout_s": float("nan")}, "timeout_s"),
    ],
)
async def test_a_request_that_no_swarm_can_serve_is_refused_with_a_sentence(
    prompt: object,
    options: dict[str, object],
    words: str,
    wide_client: AsyncSwarm,
    references: References,
) -> None:
    with pytest.raises(InvalidRequest, match=words):
        await wide_client.generate(prompt, **options)  # type: ignore[arg-type]
    await check_that_it_serves(wide_client, references)


@pytest.mark.parametrize("messages", ["hello", [], ["hello"], [None]])
async def test_a_chat_of_anything_but_messages_is_refused(wide_client: AsyncSwarm, messages: object) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await wide_client.chat(messages)  # type: ignore[arg-type]
    assert caught.value.parameter == "messages"


async def test_a_model_in_other_numbers_than_are_served_is_named_with_both(wide_swarm: LocalSwarm) -> None:
    asked = AsyncSwarm(BUNDLED, initial_peers=wide_swarm.addresses, dtype="bfloat16")
    async with asked:
        with pytest.raises(SwarmUnavailable, match=r"in bfloat16 .* the swarm serves .* in float32"):
            await asked.generate("a", timeout_s=0)


async def test_a_swarm_that_is_to_guess_otherwise_than_it_can_is_not_opened(wide_swarm: LocalSwarm) -> None:
    with pytest.raises(InvalidRequest, match="speculation must be auto or off, got 'on'"):
        async with AsyncSwarm(BUNDLED, initial_peers=wide_swarm.addresses, speculation="on"):
            pass


async def test_a_model_that_nobody_serves_is_not_found(wide_swarm: LocalSwarm) -> None:
    with pytest.raises(ModelNotFound, match=r"nobody/nothing.*serves molink/tiny-shakespeare"):
        async with AsyncSwarm("nobody/nothing", initial_peers=wide_swarm.addresses):
            pass


async def test_an_initial_peer_that_does_not_answer_is_named() -> None:
    with pytest.raises(SwarmUnavailable, match="none of the initial peers answered") as caught:
        async with AsyncSwarm(BUNDLED, initial_peers=[NOBODY]):
            pass
    assert NOBODY in str(caught.value)


async def test_a_peer_whose_initial_peers_do_not_answer_says_so(tmp_path: Path) -> None:
    ended = await join_that_fails(tmp_path, "--model", BUNDLED, "--initial-peers", NOBODY)
    check_one_line(ended, "none of the initial peers answered", NOBODY, "--new-swarm")


@pytest.mark.parametrize(
    ("draft", "words"),
    [
        ("another tokenizer", ("another tokenizer", "{own}", "{wanted}")),
        *[
            pytest.param(draft, words, marks=pytest.mark.full)
            for draft, words in (
                ("somebody/draft", ("somebody/draft", "neither bundled nor a directory")),
                (BUNDLED, ("at most half of --memory", "bytes are missing")),
            )
        ],
    ],
)
async def test_a_draft_that_cannot_guess_is_refused_with_a_sentence(
    draft: str, words: tuple[str, ...], tmp_path: Path
) -> None:
    served, hashes = resolve(BUNDLED), dict[str, str]()
    if draft == "another tokenizer":
        draft = str(shutil.copytree(resolve(f"{BUNDLED}-draft"), tmp_path / "draft"))
        (tmp_path / "draft" / "tokenizer.json").write_text("{}")
        for whose, folder in (("own", Path(draft)), ("wanted", served)):
            hashes[whose] = hashlib.sha256((folder / "tokenizer.json").read_bytes()).hexdigest()[:16]
    ended = await join_that_fails(
        tmp_path, "--model", BUNDLED, "--new-swarm", "--memory", "60MB", "--draft", draft
    )
    check_one_line(ended, "--draft", *(word.format(**hashes) for word in words))


@pytest.mark.parametrize("option", ["--port", pytest.param("--grpc-port", marks=pytest.mark.full)])
async def test_a_port_in_use_is_named(option: str, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        ended = await join_that_fails(tmp_path, "--model", BUNDLED, "--new-swarm", option, port)
    check_one_line(ended, port, option)


async def test_relay_on_is_refused_for_now(tmp_path: Path) -> None:
    ended = await run_program(
        "molink.peer", "join", "--new-swarm", "--state-dir", str(tmp_path), "--relay", "on"
    )
    check_one_line(ended, "--relay on", "leave --relay out", status=2)


@pytest.mark.parametrize("damage", ["truncated", pytest.param("overwritten", marks=pytest.mark.full)])
async def test_damaged_weights_are_refused_with_a_sentence(damage: str, tmp_path: Path) -> None:
    """Cut off in the middle, or with a header that is none."""
    folder = make_tiny_model("llama", tmp_path, seed=1)
    weights = folder / "model.safetensors"
    content = bytearray(weights.read_bytes())
    if damage == "truncated":
        weights.write_bytes(content[: len(content) * 2 // 3])
    else:
        header_bytes = int.from_bytes(content[:8], "little")
        content[8 : 8 + header_bytes] = b"\x00" * header_bytes
        weights.write_bytes(content)
    ended = await join_that_fails(tmp_path, "--model", str(folder), "--new-swarm", "--layers", "0:6")
    check_one_line(ended, "model.safetensors")
