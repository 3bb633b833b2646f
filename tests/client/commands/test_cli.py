"""`molink` as its users meet it: what is printed where, exit statuses, Ctrl-C, and one line for each mistake.

A scripted swarm stands in the place of a real one.
"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.swarms.scripted_swarm import FIRST, HOPS, PEER_ID, Run, ScriptedSwarm

from molink.client.api.generation import Explanation, Hop, HopTimes
from molink.client.commands import cli, demo
from molink.client.commands.presentation import slowest
from molink.client.errors import InvalidRequest, ModelNotFound, SwarmError, SwarmUnavailable
from molink.progress import Progress

SECOND = f"/ip4/127.0.0.2/tcp/9/p2p/{PEER_ID}"
DEADLINE_S = 120.0


# -- help and mistakes


@pytest.mark.parametrize("command", ["generate", "chat", "explain", "demo"])
def test_every_command_has_help_with_an_example(run: Run, command: str) -> None:
    code, out, err = run(command, "--help")
    assert (code, err) == (0, "")
    assert f"Example:\n    molink {command}" in out


def test_help_lists_the_commands_and_is_what_no_arguments_show(run: Run) -> None:
    code, out, _ = run("--help")
    assert code == 0
    assert all(f"  {command} " in out for command in ("generate", "chat", "explain", "demo"))
    assert run()[:2] == (2, out)


def test_help_loads_nothing_heavy() -> None:
    heavy = ("torch", "transformers", "libp2p", "trio", "grpc", "numpy", "networkx", "httpx", "anyio", "cryptography",
             "rich")  # fmt: skip
    program = (
        "import sys\nfrom molink.client.commands import cli\n"
        "try:\n    cli.main(['generate', '--help'])\nexcept SystemExit:\n    pass\n"
        f"print([name for name in {heavy} if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=DEADLINE_S, check=True
    )
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["dance"], "No such command 'dance'"),
        (["generate"], "Missing argument 'PROMPT'"),
        (["generate"], "`molink generate --help`"),
        (["generate", "x", "--dance"], "No such option"),
        (["generate", "x", "--temperature", "-1"], "--temperature"),
        (["generate", "x", "--max-new-tokens", "0"], "--max-new-tokens"),
        (["generate", "x", "--seed", "-1"], "--seed"),
        (["generate", "x", "--swarm-key", "/no/such.key"], "--swarm-key"),
        (["generate", "x", "--initial-peers", "here"], "'here' is not a peer's multiaddress"),
        (["generate", "\udcff"], "PROMPT is not valid text"),
        (["explain", "\udcff"], "PROMPT is not valid text"),
        (["explain", "x", "--top-p", "2"], "--top-p"),
        (["generate", "x", "--top-p", "0"], "above 0"),
        (["chat", "--initial-peers", "here"], "'here' is not a peer's multiaddress"),
        (["demo", "--peers", "0"], "--peers"),
        (["demo", "--peers", "13"], "--peers"),
    ],
)
def test_bad_arguments_give_one_line_and_exit_status_2(run: Run, arguments: list[str], message: str) -> None:
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert err.startswith("molink: ")
    assert message in err


@pytest.mark.parametrize("command", [["generate", "x"], ["explain", "x"], ["chat"]])
def test_without_a_configured_swarm_a_sentence_says_how_to_name_one(run: Run, command: list[str]) -> None:
    code, out, err = run(*command)
    assert (code, out) == (1, "")
    assert err.startswith("molink: no swarm is configured: name one of its peers with --initial-peers")
    assert err.count("\n") == 1


def test_a_swarm_that_does_not_answer_is_one_sentence(run: Run) -> None:
    code, out, err = run("generate", "x", "--initial-peers", FIRST)
    assert (code, out) == (1, "")
    assert err.startswith("molink: none of the initial peers answered")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (InvalidRequest("the prompt is\nempty", "prompt"), 2),
        (SwarmUnavailable("all peers are \x1b[31mbusy"), 1),
        (ModelNotFound("m", "nobody serves it"), 1),
    ],
)
def test_what_a_swarm_could_not_do_is_one_harmless_line(
    run: Run, swarm: ScriptedSwarm, error: SwarmError, status: int
) -> None:
    swarm.errors = [error]
    code, out, err = run("generate", "x")
    assert (code, out) == (status, "")
    assert err == f"molink: {str(error).replace(chr(10), ' ').replace(chr(27), '?')}\n"


def test_a_circuit_that_took_longer_than_was_allowed_names_the_option(run: Run, swarm: ScriptedSwarm) -> None:
    swarm.errors = [SwarmUnavailable("the circuit over attic was not ready in time", late=True)]
    code, out, err = run("generate", "x", "--timeout", "0")
    assert (code, out) == (1, "")
    assert err.endswith("was not ready in time: allow it more seconds with --timeout\n")


# -- generate


@pytest.mark.parametrize("way", ["--stream", "--no-stream"])
def test_generate_prints_the_new_text_and_nothing_else(run: Run, swarm: ScriptedSwarm, way: str) -> None:
    assert run("generate", "What light?", way) == (0, "But soft!\n", "")
    assert swarm.asked == ["What light?"]


def test_a_text_that_ends_its_line_gets_no_further_one(run: Run, swarm: ScriptedSwarm) -> None:
    swarm.words = ("But\n",)
    assert run("generate", "x")[1] == "But\n"
    swarm.words = ("\x1b[2J",)
    assert run("generate", "x")[1] == "\x1b[2J\n"  # a pipe gets what was generated; only a terminal is spared


def test_options_reach_the_swarm(run: Run, swarm: ScriptedSwarm, tmp_path: Path) -> None:
    key = tmp_path / "k"
    key.write_text("")
    options = (
        "--temperature 0.5 --top-k 3 --top-p 0.9 --seed 7 --max-new-tokens 5 --stop a --stop b --timeout 2"
    )
    where = ("--initial-peers", FIRST, SECOND, "--model", "m", "--swarm-key", str(key))
    assert run("generate", "x", *options.split(), *where)[0] == 0
    assert swarm.opened_with["model"] == "m"
    assert swarm.opened_with["initial_peers"] == (FIRST, SECOND)
    assert swarm.opened_with["swarm_key"] == key
    expected = {"temperature": 0.5, "top_k": 3, "top_p": 0.9, "seed": 7, "max_new_tokens": 5}
    assert swarm.sampling == {**expected, "stop": ["a", "b"], "timeout_s": 2.0}


def test_json_is_one_document(run: Run, swarm: ScriptedSwarm) -> None:
    code, out, err = run("generate", "What?", "--json")
    assert (code, err) == (0, "")
    document = json.loads(out)
    assert document["text"] == "But soft!"
    assert document["token_ids"] == [0, 1, 2]
    assert document["model"] == "test/model"
    assert [(hop["name"], hop["start"], hop["stop"]) for hop in document["circuit"]["hops"]] == [
        ("attic", 0, 1),
        ("cellar", 1, 3),
    ]


def test_ctrl_c_ends_quietly() -> None:
    program = (
        "import asyncio, signal\nfrom molink.client.commands import cli; from molink.client.api import swarm\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a shell ignores it for its background jobs
        "class Hanging:\n"
        "    def __init__(self, *_, **__): pass\n"
        "    async def __aenter__(self):\n"
        "        signal.raise_signal(signal.SIGINT)\n"
        "        await asyncio.Event().wait()\n"
        "    async def __aexit__(self, *_): pass\n"
        "swarm.AsyncSwarm = Hanging\n"
        "cli.main()\n"
    )
    command = [sys.executable, "-c", program, "generate", "x", "--initial-peers", FIRST]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


# -- explain


def times(hop: Hop, compute_ms: float, queue_ms: float, link_ms: float) -> HopTimes:
    return HopTimes(hop, compute_ms / 2, compute_ms, queue_ms, link_ms / 2, link_ms)


@pytest.mark.parametrize(
    ("first", "second", "sentence"),
    [
        (
            (5, 1, 2),
            (4, 0, 1),
            "Slowest: computing on attic (layers 0:1) takes 5.00 ms, 25 % of a token's time",
        ),
        ((5, 1, 2), (4, 9, 1), "Slowest: waiting in the queue of cellar (layers 1:3) takes 9.00 ms, 45 %"),
        ((5, 1, 10), (4, 9, 1), "Slowest: the link out of attic (layers 0:1) takes 10.00 ms, 50 %"),
    ],
)
def test_the_slowest_part_is_named(
    run: Run,
    swarm: ScriptedSwarm,
    first: tuple[float, float, float],
    second: tuple[float, float, float],
    sentence: str,
) -> None:
    hops = (times(HOPS[0], *first), times(HOPS[1], *second))
    swarm.explanation = Explanation(swarm.generation(), hops, 10.0, 20.0, predicted_trip_ms=10.0)
    assert slowest(swarm.explanation).startswith(sentence)
    code, out, err = run("explain", "x")
    assert (code, err) == (0, "")
    assert sentence in out
    assert "attic" in out
    assert "predicted 10.00 ms, measured 20.00 ms" in out
    document = json.loads(run("explain", "x", "--json")[1])
    assert document["hops"][1]["name"] == "cellar"
    assert document["hops"][1]["measured_queue_ms"] == second[1]
    assert document["slowest"].startswith(sentence)


def test_a_single_token_cannot_be_explained(run: Run, swarm: ScriptedSwarm) -> None:
    code, out, _ = run("explain", "x", "--max-new-tokens", "1")
    assert code == 0
    assert out.startswith("Nothing was measured: that takes at least two tokens")


# -- progress and the demonstration's parts


@pytest.mark.parametrize(("level", "told"), [("INFO", "loading 1 of 2\ndone\n"), ("WARNING", "")])
def test_where_there_is_no_terminal_progress_is_for_who_asks_and_shown_late_and_once(
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    level: str,
    told: str,
) -> None:
    caplog.set_level(level, "molink")
    now_s = [100.0]
    monkeypatch.setattr("molink.progress.time.monotonic", lambda: now_s[0])
    with Progress() as progress:
        progress.report("not begun")
        progress.begin("asking")
        progress.report("soon")
        now_s[0] += 2.5
        progress.report("loading\n1 of 2")
        now_s[0] += 2.5
        progress.report("loading\n1 of 2")
        progress.report("done")
        progress.end()
        now_s[0] += 9.0
        progress.report("too late")
    assert capsys.readouterr() == ("", told)


@pytest.mark.parametrize("parts", range(1, demo.LAYERS + 1))
def test_the_demonstration_cuts_the_model_evenly(parts: int) -> None:
    spans = demo.cut_evenly(demo.LAYERS, parts)
    assert [layer for start, stop in spans for layer in range(start, stop)] == list(range(demo.LAYERS))
    lengths = {stop - start for start, stop in spans}
    assert max(lengths) - min(lengths) <= 1


def test_the_demonstration_leaves_environment_and_signals_as_they_were(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MOLINK_INITIAL_PEERS", FIRST)
    before = dict(os.environ), signal.getsignal(signal.SIGTERM)
    seen: dict[str, str] = {}

    async def fail(self: object) -> None:
        seen.update(os.environ)
        raise SwarmUnavailable("no peer started")

    monkeypatch.setattr("molink.client.commands.demo._Demonstration.run", fail)
    with pytest.raises(SystemExit) as ended:
        cli.main(["demo"])
    assert ended.value.code == 1
    assert seen["MOLINK_INITIAL_PEERS"] == ""
    assert (dict(os.environ), signal.getsignal(signal.SIGTERM)) == before
