"""The gateway's identity, kept over restarts: peers know it again, and what they have computed of its prompts."""

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from filelock import FileLock, Timeout
from platformdirs import user_state_dir

from molink.dht.identity.identity import Identity
from molink.dht.identity.key_file import KeyFileError

_log = logging.getLogger(__name__)


class IdentityUnusable(Exception):
    """The identity in a folder cannot be used; the text says why and what to do."""


@contextmanager
def gateway_identity(folder: Path | None) -> Iterator[Identity]:
    """The identity in that folder, which is made if there is none; nobody else has it while the context is open. None:
    that of this user, or one for this run alone where that cannot be used.

    Raises:
        IdentityUnusable: another gateway has it, or its file or folder cannot be used.
    """
    with ExitStack() as stack:
        try:
            identity = stack.enter_context(_held(folder or default_folder()))
        except IdentityUnusable as error:
            if folder is not None:
                raise
            _log.warning("this run's identity is not kept: %s", error)
            identity = Identity.generate()
        yield identity


def default_folder() -> Path:
    """Where this user's gateway keeps its identity."""
    return Path(user_state_dir("molink", appauthor=False)) / "gateway"


@contextmanager
def _held(folder: Path) -> Iterator[Identity]:
    lock = FileLock(folder / "gateway.lock", blocking=False)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock.acquire()
    except Timeout:
        raise IdentityUnusable(
            f"another gateway runs with the state directory {folder}: give this one another with --state-dir"
        ) from None
    except (OSError, NotImplementedError) as error:
        raise _unusable(folder, error) from error
    try:
        yield _loaded(folder)
    finally:
        lock.release()


def _loaded(folder: Path) -> Identity:
    try:
        return Identity.load_or_create(folder / "gateway.key")
    except KeyFileError as error:
        raise IdentityUnusable(str(error)) from error
    except OSError as error:
        raise _unusable(folder, error) from error


def _unusable(folder: Path, error: Exception) -> IdentityUnusable:
    reason = (error.strerror if isinstance(error, OSError) else None) or error
    return IdentityUnusable(
        f"the state directory {folder} cannot be used ({reason}): choose another one with --state-dir"
    )
