"""Files that hold a secret: made whole or not at all, and readable by their owner alone."""

import os
import secrets
import stat
from pathlib import Path

MAX_KEY_FILE_BYTES = 4096


class KeyFileError(ValueError):
    """A key file cannot be used; the text says why and what to do."""


def write_key_file(path: Path, content: bytes) -> None:
    """Makes `path` with `content`, mode 600 on POSIX; a reader never sees half of it.

    Raises:
        FileExistsError: there is a file of that name already; it is left as it is.
        OSError: the folder cannot be made or written to.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        if os.name == "nt":
            draft.rename(path)  # refuses to replace on Windows
        else:
            os.link(draft, path)  # refuses to replace everywhere else, which rename does not
    finally:
        draft.unlink(missing_ok=True)


def read_key_file(path: Path, begins_with: bytes) -> bytes:
    """The content of a key file, which should begin with these bytes.

    Raises:
        FileNotFoundError: there is none.
        KeyFileError: others can read it, or it is too long to be a key.
    """
    with path.open("rb") as file:
        status = os.fstat(file.fileno())
        if os.name != "nt" and status.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            if file.read(len(begins_with)) != begins_with:  # whose mode is none of our business
                raise KeyFileError(f"{path} is not a key of MoLink: check the path, and name the right file")
            raise KeyFileError(
                f"the key file {path} can be read or written by others (mode {status.st_mode & 0o777:o}), so "
                f"its key may be known to them: run `chmod 600 {path}`, or make a new key in its place"
            )
        content = file.read(MAX_KEY_FILE_BYTES + 1)
    if len(content) > MAX_KEY_FILE_BYTES:
        raise KeyFileError(f"the key file {path} is longer than any key: it is damaged, or not a key file")
    return content
