"""`molink-gateway keys` and `usage`: what an operator does with keys, straight in the database."""

import json
import re
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeVar

import typer

from molink import commands
from molink.commands import EXIT_USAGE, CommandFailed, example, plain, tell, with_logging
from molink.signals import run_loop

if TYPE_CHECKING:
    from molink.client.gateway.accounts.api_keys import ApiKey
    from molink.client.gateway.accounts.database import Database

T = TypeVar("T")
NAME_LENGTH: Final = 200
PIPE_COLUMNS: Final = 2000
SHOWN_ONCE: Final = "The key is shown this once; only its hash is kept."
_UNITS_S: Final = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_KEY_COLUMNS: Final = ("id", "name", "state", "scopes", "limits", "created", "expires", "last used")
_USAGE_COLUMNS: Final = ("day", "key", "name", "model", "requests", "prompt", "cached", "completion")

DatabaseUrl = Annotated[
    str | None,
    typer.Option(
        "--database",
        metavar="URL",
        envvar="MOLINK_DATABASE",
        help="Where keys, quotas and usage are kept: postgresql://... or sqlite:///...; a file in the state directory, "
        "unless told.",
    ),
]
StateFolder = Annotated[
    Path | None,
    typer.Option(
        "--state-dir", metavar="DIR", help="The gateway's state directory: this user's, unless told."
    ),
]
KeyId = Annotated[str, typer.Argument(metavar="ID", help="The key's id, as `keys list` shows it.")]
Limit = typer.Option(metavar="N", min=1, help="Without it, no limit.")

keys_app = typer.Typer(
    name="keys",
    help="Make, list, rotate and revoke the keys of a gateway.",
    epilog=example("molink-gateway keys create alice --expires 90d"),
    context_settings={"help_option_names": ["--help", "-h"]},
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


@keys_app.command(epilog=example("molink-gateway keys create alice --requests-per-minute 60 --expires 90d"))
@with_logging
def create(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Whose key it is, for the operator.")],
    scope: Annotated[
        list[str] | None,
        typer.Option(
            metavar="use|operate|access",
            help="What it opens; repeat it for several. Use, unless told; access registers one machine as a node.",
        ),
    ] = None,
    expires: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="When it ends: 90d, 12h, or a date such as 2027-01-31 (UTC)."),
    ] = None,
    requests_per_minute: Annotated[int | None, Limit] = None,
    tokens_per_minute: Annotated[int | None, Limit] = None,
    tokens_per_day: Annotated[int | None, Limit] = None,
    streams: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Generations at once. Without it, no limit.")
    ] = None,
    model: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Model that it may use; repeat it for several. All, unless told."),
    ] = None,
    database: DatabaseUrl = None,
    state_dir: StateFolder = None,
    as_json: commands.Json = False,
) -> None:
    """Make a key, and show it once."""
    from molink.client.gateway.accounts.api_keys import KeyLimits, KeyScope
    from molink.client.gateway.accounts.key_store import KeyStore

    try:
        scopes = frozenset(KeyScope(one) for one in scope or [KeyScope.USE])
    except ValueError:
        raise CommandFailed("--scope is use, operate or access", EXIT_USAGE) from None
    limits = KeyLimits(
        requests_per_minute=requests_per_minute,
        tokens_per_minute=tokens_per_minute,
        tokens_per_day=tokens_per_day,
        streams=streams,
        models=tuple(_checked(one, "--model") for one in model or ()),
    )
    ends_s = None if expires is None else _end_of(expires)
    name = _checked(name, "NAME")
    key, secret = _with_database(
        database,
        state_dir,
        lambda opened: KeyStore(opened).create(name, scopes=scopes, limits=limits, expires_at_s=ends_s),
        makes=True,
    )
    _show_new(key, secret, as_json=as_json)


@keys_app.command("list", epilog=example("molink-gateway keys list --json"))
@with_logging
def list_keys(
    database: DatabaseUrl = None, state_dir: StateFolder = None, as_json: commands.Json = False
) -> None:
    """List all keys, with their limits and when they were last used."""
    from molink.client.gateway.accounts.key_store import KeyStore

    keys = _with_database(database, state_dir, lambda opened: KeyStore(opened).all())
    if as_json:
        print(json.dumps({"keys": [_document(key) for key in keys]}))
    elif keys:
        _print_table(_KEY_COLUMNS, [_cells(key) for key in keys])
    else:
        print("There are no keys: `molink-gateway keys create NAME` makes one.")


@keys_app.command(epilog=example("molink-gateway keys rotate k7qz4n2mxw5a --overlap 1h"))
@with_logging
def rotate(
    key_id: KeyId,
    overlap: Annotated[
        str, typer.Option(metavar="TIME", help="For so long the old key goes on: 24h, 30m, 0s.")
    ] = "24h",
    database: DatabaseUrl = None,
    state_dir: StateFolder = None,
    as_json: commands.Json = False,
) -> None:
    """Make a new key with the limits of an old one, which ends after the overlap."""
    from molink.client.gateway.accounts.key_store import KeyStore

    overlap_s = duration_s(overlap, "--overlap")
    key, secret = _with_database(
        database, state_dir, lambda opened: KeyStore(opened).rotate(key_id, overlap_s)
    )
    _show_new(key, secret, as_json=as_json, replaces=key_id)


@keys_app.command(epilog=example("molink-gateway keys revoke k7qz4n2mxw5a"))
@with_logging
def revoke(
    key_id: KeyId,
    database: DatabaseUrl = None,
    state_dir: StateFolder = None,
    as_json: commands.Json = False,
) -> None:
    """End a key now. Running gateways refuse it within a second, and after 5 s in any case."""
    from molink.client.gateway.accounts.key_store import KeyStore

    key = _with_database(database, state_dir, lambda opened: KeyStore(opened).revoke(key_id))
    if as_json:
        print(json.dumps(_document(key)))
    else:
        print(f"The key {key.id} ({plain(key.name)}) is revoked.")


@with_logging
def usage(
    days: Annotated[int, typer.Option(metavar="N", min=1, max=366, help="Today and the days before.")] = 30,
    database: DatabaseUrl = None,
    state_dir: StateFolder = None,
    as_json: commands.Json = False,
) -> None:
    """Show requests and tokens by day (UTC), key and model."""
    from molink.client.gateway.accounts.usage_store import UsageStore

    lines = _with_database(database, state_dir, lambda opened: UsageStore(opened).of_days(days, time.time()))
    rows = [
        (line.of.day, line.of.key_id, line.key_name, line.of.model, line.counts.requests,
         line.counts.prompt_tokens, line.counts.cached_tokens, line.counts.completion_tokens)
        for line in lines
    ]  # fmt: skip
    if as_json:
        names = (
            "day",
            "key",
            "name",
            "model",
            "requests",
            "prompt_tokens",
            "cached_tokens",
            "completion_tokens",
        )
        print(json.dumps({"usage": [dict(zip(names, row, strict=True)) for row in rows]}))
    elif rows:
        _print_table(_USAGE_COLUMNS, [tuple(map(str, row)) for row in rows])
    else:
        print(f"Nothing was used in the last {days} days.")


def _with_database(
    url: str | None,
    state_dir: Path | None,
    work: "Callable[[Database], Awaitable[T]]",
    *,
    makes: bool = False,
) -> T:
    """What the work in the database comes to; its failures are one sentence each. Only what `makes` keys makes a state
    directory."""
    from molink.client.gateway.accounts.database import opened_database
    from molink.client.gateway.accounts.errors import (
        AccountsUnavailable,
        DatabaseUnusable,
        InvalidDatabaseUrl,
        UnknownKey,
    )
    from molink.client.gateway.kept_identity import default_folder

    async def run() -> T:
        async with opened_database(url, state_dir or default_folder(), makes=makes) as database:
            return await work(database)

    try:
        return run_loop(run())
    except InvalidDatabaseUrl as error:
        raise CommandFailed(plain(str(error)), EXIT_USAGE) from error
    except (DatabaseUnusable, UnknownKey) as error:
        raise CommandFailed(plain(str(error))) from error
    except AccountsUnavailable as error:
        raise CommandFailed(f"the database did not do it ({plain(str(error))}): try again") from error


def _show_new(key: "ApiKey", secret: bytes, *, as_json: bool, replaces: str | None = None) -> None:
    from molink.client.gateway.accounts.api_keys import key_text

    text = key_text(key.id, secret)
    if as_json:
        print(json.dumps(_document(key) | {"key": text} | ({"replaces": replaces} if replaces else {})))
        return
    print(text)
    tell(f"{SHOWN_ONCE} Its id is {key.id}: `keys list`, `rotate` and `revoke` know it by that.")


def _document(key: "ApiKey") -> dict[str, Any]:
    """What is shown of a key, all but the hash of its secret."""
    return {
        "id": key.id,
        "name": key.name,
        "state": _state(key),
        "scopes": sorted(key.scopes),
        "requests_per_minute": key.limits.requests_per_minute,
        "tokens_per_minute": key.limits.tokens_per_minute,
        "tokens_per_day": key.limits.tokens_per_day,
        "streams": key.limits.streams,
        "models": list(key.limits.models),
        "created_at": _time(key.created_at_s),
        "expires_at": _time(key.expires_at_s),
        "revoked_at": _time(key.revoked_at_s),
        "last_used_at": _time(key.last_used_at_s),
    }


def _cells(key: "ApiKey") -> tuple[str, ...]:
    limits = key.limits
    amounts = (
        (limits.requests_per_minute, "requests/min"),
        (limits.tokens_per_minute, "tokens/min"),
        (limits.tokens_per_day, "tokens/day"),
        (limits.streams, "streams"),
    )
    shown = [f"{amount} {unit}" for amount, unit in amounts if amount is not None]
    times = (_time(key.created_at_s), _time(key.expires_at_s), _time(key.last_used_at_s))
    return (
        key.id,
        key.name,
        _state(key),
        " ".join(sorted(key.scopes)),
        ", ".join([*shown, *limits.models]) or "none",
        *(at or "never" for at in times),
    )


def _state(key: "ApiKey") -> str:
    fault = key.fault(time.time())
    return "active" if fault is None else fault.value


def counted(number: int, what: str) -> str:
    """`1 circuit`, `2 circuits`."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """For people. In a pipe no line is folded."""
    from rich import box
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(*columns, box=box.SIMPLE_HEAD, pad_edge=False)
    for row in rows:
        table.add_row(*(escape(plain(cell)) for cell in row))
    Console(width=None if sys.stdout.isatty() else PIPE_COLUMNS, highlight=False).print(table)


def _time(at_s: float | None) -> str | None:
    return None if at_s is None else f"{datetime.fromtimestamp(at_s, UTC):%Y-%m-%dT%H:%M:%SZ}"


def duration_s(text: str, option: str, or_else: str = "") -> float:
    """The seconds that an option's text says, such as 30m or 24h. Raises `CommandFailed` if it says none, with what the
    option takes besides (`or_else`)."""
    found = re.fullmatch(r"(\d{1,9})([smhd])", text.strip())
    if found is None:
        raise CommandFailed(
            f"{option} takes a number and a unit, such as 30m, 24h or 90d{or_else}, not {plain(text)!r}",
            EXIT_USAGE,
        )
    return float(int(found[1]) * _UNITS_S[found[2]])


def _end_of(text: str) -> float:
    """When a key ends that is made now; a date ends with its day."""
    try:
        at_s = datetime.strptime(text, "%Y-%m-%d").replace(tzinfo=UTC).timestamp() + _UNITS_S["d"]
    except ValueError:
        at_s = time.time() + duration_s(text, "--expires", ", or a date such as 2027-01-31")
    if at_s <= time.time():
        raise CommandFailed(f"--expires {plain(text)} has passed: name a later time", EXIT_USAGE)
    return at_s


def _checked(text: str, what: str) -> str:
    if not text.strip() or len(text) > NAME_LENGTH or not text.isprintable():
        raise CommandFailed(f"{what} must be 1 to {NAME_LENGTH} printable characters", EXIT_USAGE)
    return text
