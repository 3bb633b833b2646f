"""Migrations: the database is brought to this version's revision when it is opened, by one process at a time."""

from pathlib import Path
from typing import Final

from sqlalchemy import Connection, inspect, text

from molink.client.gateway.accounts.errors import DatabaseUnusable

LATEST: Final = "0006"
"""The newest revision here."""
EMPTY: Final = "base"
"""Before the first one."""
LOCK_NUMBER: Final = 0x6D6F6C696E6B
"""Of PostgreSQL's advisory lock for it: the letters of "molink". SQLite locks its whole file."""
_FOLDER: Final = Path(__file__).parent


def migrate(connection: Connection, revision: str = LATEST) -> None:
    """Brings the database to a revision, up or down, within the transaction that is open: all of it, or nothing.

    Raises:
        DatabaseUnusable: a newer version of this program has made it.
    """
    if connection.dialect.name == "postgresql":
        connection.execute(text("SELECT pg_advisory_xact_lock(:number)"), {"number": LOCK_NUMBER})
    current = current_revision(connection)
    if current == revision:
        return
    # Only who has something to migrate waits for alembic to be loaded.
    from alembic import command
    from alembic.config import Config
    from alembic.script import ScriptDirectory

    config = Config(attributes={"connection": connection})
    config.set_main_option("script_location", str(_FOLDER).replace("%", "%%"))
    known = [one.revision for one in ScriptDirectory.from_config(config).walk_revisions()]
    if current is not None and current not in known:
        raise DatabaseUnusable(
            f"the database is of revision {current}, which a newer version of molink has made; this one knows up to "
            f"{LATEST}: install the newer version, or name another database"
        )
    is_down = revision == EMPTY or (current is not None and known.index(revision) > known.index(current))
    (command.downgrade if is_down else command.upgrade)(config, revision)


def current_revision(connection: Connection) -> str | None:
    """Returns the database's revision; None if it has none of our tables."""
    if not inspect(connection).has_table("alembic_version"):
        return None
    found = connection.execute(text("SELECT version_num FROM alembic_version")).scalar_one_or_none()
    return None if found is None else str(found)
