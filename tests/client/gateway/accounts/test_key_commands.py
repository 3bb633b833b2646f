"""`molink-gateway keys` and `usage`, and what the gateway says of keys when it starts."""

import json
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from support.gateways.gateway_keys import id_of, in_database, make_key

from molink.client.gateway import cli
from molink.client.gateway.accounts.api_keys import parse_key
from molink.client.gateway.accounts.usage_store import UsageCounts, UsageDay, UsageStore, day_of

HOSTILE = "Robert'); DROP TABLE api_keys;-- [bold]"


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:  # noqa: ANN401
    """Runs a command line on one database; its exit status, stdout and stderr."""
    monkeypatch.delenv("MOLINK_DATABASE", raising=False)

    def command(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            cli.main([*arguments, *([] if "--state-dir" in arguments else ["--state-dir", str(tmp_path)])])
        out, err = capsys.readouterr()
        return int(str(ended.value.code)), out, err

    return command


def document(done: tuple[int, str, str]) -> dict[str, Any]:
    code, out, err = done
    assert (code, err) == (0, "")
    return dict(json.loads(out))


def test_a_key_is_made_shown_once_and_listed(run: Any) -> None:  # noqa: ANN401
    code, out, err = run("keys", "create", HOSTILE)
    assert code == 0
    key = out.strip()
    assert parse_key(key) is not None
    assert "shown this once" in err
    assert key not in err
    [listed] = document(run("keys", "list", "--json"))["keys"]
    assert (listed["id"], listed["name"], listed["state"]) == (id_of(key), HOSTILE, "active")
    assert (listed["scopes"], listed["models"], listed["last_used_at"]) == (["use"], [], None)
    code, table, _ = run("keys", "list")
    assert code == 0
    assert id_of(key) in table
    assert HOSTILE in table
    for text in (table, json.dumps(listed)):
        assert key[-43:] not in text


def test_limits_scopes_models_and_an_end_are_kept(run: Any) -> None:  # noqa: ANN401
    made = document(
        run("keys", "create", "alice", "--scope", "use", "--scope", "operate", "--expires", "2099-12-31",
            "--requests-per-minute", "60", "--tokens-per-minute", "9000", "--tokens-per-day", "100000",
            "--streams", "4", "--model", "a/b", "--model", "c", "--json")
    )  # fmt: skip
    assert made["scopes"] == ["operate", "use"]
    assert (made["requests_per_minute"], made["tokens_per_minute"], made["tokens_per_day"]) == (
        60,
        9000,
        100_000,
    )
    assert (made["streams"], made["models"]) == (4, ["a/b", "c"])
    assert made["expires_at"] == "2100-01-01T00:00:00Z"
    [listed] = document(run("keys", "list", "--json"))["keys"]
    assert listed == {name: value for name, value in made.items() if name != "key"}
    table = run("keys", "list")[1]
    for words in ("60 requests/min", "4 streams", "operate use", "a/b"):
        assert words in " ".join(table.split())


def test_rotating_makes_a_key_of_the_same_limits_and_the_old_one_ends_later(run: Any) -> None:  # noqa: ANN401
    old = document(run("keys", "create", "alice", "--streams", "4", "--json"))
    new = document(run("keys", "rotate", old["id"], "--overlap", "2h", "--json"))
    assert (new["replaces"], new["streams"], new["name"], new["expires_at"]) == (old["id"], 4, "alice", None)
    assert new["key"] != old["key"]
    keys = {key["id"]: key for key in document(run("keys", "list", "--json"))["keys"]}
    ends = datetime.fromisoformat(keys[old["id"]]["expires_at"])
    assert abs((ends - datetime.now(UTC)).total_seconds() - 7200) < 300
    assert keys[old["id"]]["state"] == keys[new["id"]]["state"] == "active"
    assert document(run("keys", "revoke", old["id"], "--json"))["state"] == "revoked"
    assert run("keys", "revoke", old["id"])[:2] == (0, f"The key {old['id']} (alice) is revoked.\n")
    for unknown in (("rotate", "nobody"), ("revoke", "' OR 1=1")):
        code, out, err = run("keys", *unknown)
        assert (code, out, err.count("\n")) == (1, "", 1)
        assert "there is no key" in err


def test_usage_is_shown_by_day_key_and_model(run: Any, tmp_path: Path) -> None:  # noqa: ANN401
    import asyncio

    key = id_of(make_key(tmp_path, name="alice"))
    assert run("usage", "--days", "7")[:2] == (0, "Nothing was used in the last 7 days.\n")
    today = day_of(time.time())
    counts = {
        UsageDay(today, key, "m"): UsageCounts(1, 20, 3, 4),
        UsageDay("2020-01-01", key, "m"): UsageCounts(9),
    }
    asyncio.run(in_database(None, tmp_path, lambda database: UsageStore(database).add(counts)))
    assert document(run("usage", "--json"))["usage"] == [
        {"day": today, "key": key, "name": "alice", "model": "m", "requests": 1, "prompt_tokens": 20,
         "cached_tokens": 3, "completion_tokens": 4}
    ]  # fmt: skip
    assert f"{today} {key} alice m 1 20 3 4" in " ".join(run("usage")[1].split())


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("keys", "create", ""), 2, "NAME must be"),
        (("keys", "create", "a\x1b[31m"), 2, "NAME must be"),
        (("keys", "create", "x" * 201), 2, "NAME must be"),
        (("keys", "create", "a", "--scope", "root"), 2, "--scope is use, operate or access"),
        (("keys", "create", "a", "--expires", "soon"), 2, "90d, or a date such as 2027-01-31, not 'soon'"),
        (("keys", "create", "a", "--expires", "2020-01-01"), 2, "has passed"),
        (("keys", "create", "a", "--streams", "0"), 2, "--streams"),
        (("keys", "rotate", "a", "--overlap", "-1h"), 2, "or 90d, not '-1h'"),
        (("keys", "list", "--database", "nonsense"), 2, "--database takes"),
        (("keys", "list", "--database", "sqlite:////no/such/a.db"), 1, "cannot be used"),
        (("usage", "--days", "0"), 2, "--days"),
        (("--port", "1", "keys", "list"), 2, "--port stands before keys"),
        (("--allow-origin", "chat.example"), 2, "--allow-origin takes an origin"),
        (("--allow-origin", "https://chat.example/path"), 2, "--allow-origin takes an origin"),
    ],
)
def test_mistakes_are_one_sentence(run: Any, arguments: tuple[str, ...], code: int, words: str) -> None:  # noqa: ANN401
    exit_code, out, err = run(*arguments)
    assert (exit_code, out) == (code, "")
    assert words in err
    assert err.count("\n") == 1


def test_the_database_may_stand_in_the_environment(
    run: Any,  # noqa: ANN401
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MOLINK_DATABASE", f"sqlite:///{tmp_path / 'other.db'}")
    assert run("keys", "create", "alice")[0] == 0
    assert (tmp_path / "other.db").exists()
    monkeypatch.delenv("MOLINK_DATABASE")
    assert "holds no gateway's state" in run("keys", "list", "--json")[2]


def test_other_machines_are_not_served_without_keys_unless_told(run: Any) -> None:  # noqa: ANN401
    code, out, err = run("--host", "0.0.0.0", "--port", "0")  # noqa: S104
    assert (code, out) == (1, "")
    assert err == (
        "molink-gateway: there are no keys, and whoever reaches 0.0.0.0 could use this gateway: make one with "
        "`molink-gateway keys create NAME`, or say --public\n"
    )


@pytest.mark.parametrize("command", [("keys", "list"), ("keys", "revoke", "k7qz4n2mxw5a"), ("usage",)])
def test_where_no_gateway_has_been_nothing_is_made_by_looking(
    run: Any,  # noqa: ANN401
    tmp_path: Path,
    command: tuple[str, ...],
) -> None:
    away = tmp_path / "mistyped"
    code, out, err = run(*command, "--state-dir", str(away))
    assert (code, out) == (1, "")
    assert f"{away} holds no gateway's state: check --state-dir" in err
    assert not away.exists()
