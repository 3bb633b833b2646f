"""Files of a model's folder that may be read and handed on: regular ones that are inside it.

A folder may come from a stranger. A link in it that leads elsewhere would make this machine's own files part of the
model, for anyone to ask for. The cache of the Hugging Face hub is made of links, which lead to the blobs beside its
snapshots: these belong to the folder.
"""

import os
import stat
from pathlib import Path
from typing import BinaryIO, Final

from molink.shards.checkpoint.safetensors_header import StoreError

TOKENIZER_FILES: Final = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "sentencepiece.bpe.model",
    "spiece.model",
)
"""The names under which tokenizers and chat templates are stored; nothing else is handed out as one."""
# as far as the system knows them; a pipe that takes the place of a file must not hold anyone up
_READ_FLAGS: Final = os.O_RDONLY | sum(
    getattr(os, flag, 0) for flag in ("O_NOFOLLOW", "O_NONBLOCK", "O_CLOEXEC", "O_BINARY")
)


def own_file(folder: Path, name: str) -> Path | None:
    """Where the bytes of a file of the folder lie, all links followed; None if there is no such file.

    Raises `StoreError` if it is not a regular file, or not inside the folder.
    """
    path = folder / name
    try:
        found = path.resolve(strict=True)
        inside = any(found.is_relative_to(root) for root in _roots(folder))
    except FileNotFoundError:
        return None
    except (OSError, RuntimeError) as error:  # a circle of links
        raise StoreError(f"{path} cannot be read: {error}. Fetch the model again.") from error
    if not inside:
        raise StoreError(
            f"{path} is a link that leads out of the model's folder, and what a model consists of is handed to whoever "
            f"asks. If its contents are the model's, put a copy in its place."
        )
    if not found.is_file():
        raise StoreError(f"{path} is not a file. Fetch the model again.")
    return found


def open_own(folder: Path, name: str) -> BinaryIO:
    """Opens a file of the folder for reading.

    Raises `StoreError` as `own_file`, or if it is gone; OSError.
    """
    path = own_file(folder, name)
    if path is None:
        raise StoreError(f"{folder / name} is gone. Fetch the model again.")
    descriptor = os.open(path, _READ_FLAGS)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):  # changed since
        os.close(descriptor)
        raise StoreError(f"{path} is not a file. Fetch the model again.")
    return os.fdopen(descriptor, "rb")


def _roots(folder: Path) -> tuple[Path, ...]:
    """The folder, and the blobs beside it if it is a snapshot in a hub's cache."""
    own = folder.resolve(strict=True)
    if own.parent.name != "snapshots":
        return (own,)
    return own, own.parent.parent / "blobs"
