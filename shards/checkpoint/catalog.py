"""From what a user calls a model to the folder that holds it."""

import re
from collections.abc import Iterable, Mapping
from importlib.resources import files
from pathlib import Path
from types import MappingProxyType
from typing import Final

from molink.shards.checkpoint.safetensors_header import StoreError
from molink.shards.checkpoint.store import SMALL_FILES

BUNDLED: Final[Mapping[str, str]] = MappingProxyType(
    {
        "molink/tiny-shakespeare": "models/tiny-shakespeare",
        "molink/tiny-shakespeare-draft": "models/tiny-shakespeare-draft",
    }
)
"""Models that are installed with the package: name to path in `molink.shards`."""
BUNDLED_CONTENT: Final[Mapping[str, str]] = MappingProxyType(
    {
        "molink/tiny-shakespeare": "29be448223090ce3fe43429b587adf43f3c328ee682d98479c742373976e2a25",
        "molink/tiny-shakespeare-draft": "d8203467bd98621ac587ed6962091bda556b28fd93df9f0e1738229c40695851",
    }
)
"""The content hash of each as it was released."""
INDEX_FILES: Final = ("model.safetensors.index.json",)
_HUB_ID: Final = re.compile(r"(?!.*(?:--|\.\.))[A-Za-z0-9][\w.-]{0,95}(?:/[A-Za-z0-9][\w.-]{0,95})?")


class CheckpointNotFound(LookupError):
    """No folder for this identifier; the sentence says what was tried."""

    def __init__(self, model: str, detail: str) -> None:
        super().__init__(f"model {model!r} was not found: {detail}")
        self.model = model
        self.detail = detail


def resolve(identifier: str, cache_dir: Path | None = None) -> Path:
    """The folder of a model: a bundled one, a local directory, or one of the Hugging Face hub.

    Of a model of the hub, the configuration, the tokenizer and the index of the weights are fetched (once;
    into `cache_dir`, by default the hub library's own cache); the weights are fetched by `hub_weights`.

    Raises:
        CheckpointNotFound: there is no such model, or it cannot be reached.
    """
    check_identifier(identifier)
    if identifier in BUNDLED:
        return _bundled(identifier)
    local = Path(identifier).expanduser()
    return local.resolve() if local.is_dir() else _download(identifier, cache_dir)


def check_identifier(identifier: str) -> None:
    """Refuses what cannot be a model, by its form and this machine's folders alone.

    Raises:
        CheckpointNotFound: it is neither bundled, nor a folder with a configuration, nor of the form of a hub's id.
    """
    local = Path(identifier).expanduser()
    if identifier in BUNDLED:
        return
    if local.is_dir():
        if (local / "config.json").is_file():
            return
        raise CheckpointNotFound(
            identifier, f"{local.resolve()} has no config.json, so it is no model in Hugging Face format."
        )
    if not _HUB_ID.fullmatch(identifier):
        raise CheckpointNotFound(
            identifier,
            "there is no such directory, and this is not the form of a Hugging Face hub id, such as "
            f"Qwen/Qwen3-0.6B. Bundled with MoLink: {', '.join(BUNDLED)}.",
        )


def require_identity(
    identifier: str, folder: Path, content_hash: str, served: Iterable[tuple[str, str]]
) -> None:
    """Refuses a copy of a model that is not what its name stands for.

    `served` are the name and content hash of each model that the swarm serves: under another name, other contents are
    another model.

    Raises:
        StoreError: the folder's contents differ from the bundled model's as released, or from all that the swarm
            serves under this very name.
    """
    released = BUNDLED_CONTENT.get(identifier)
    if released not in (None, content_hash):
        raise StoreError(
            f"the model folder {folder} differs from {identifier} as it was released: a file was altered. "
            "Install MoLink again."
        )
    if released is not None:
        return  # whatever others call by its name
    named = {content for name, content in served if name == identifier}
    if named and content_hash not in named:
        raise StoreError(
            f"the model folder {folder} differs from what the swarm serves as {identifier} (its contents are "
            f"{content_hash[:12]}, the swarm's {min(named)[:12]}). Fetch the model again; if it is meant to be another "
            "one, call it by another name."
        )


def is_from_hub(identifier: str) -> bool:
    """Whether `resolve` would ask the Hugging Face hub for it."""
    local = identifier in BUNDLED or Path(identifier).expanduser().is_dir()
    return not local and _HUB_ID.fullmatch(identifier) is not None


def _bundled(identifier: str) -> Path:
    folder = Path(str(files("molink.shards"))) / BUNDLED[identifier]
    configuration = folder / "config.json"
    if not configuration.is_file():
        raise CheckpointNotFound(
            identifier,
            f"it should have been installed at {folder}. Install MoLink again, with its data files.",
        )
    return configuration.resolve().parent  # an editable install is a tree of links to where the files are


def _download(identifier: str, cache_dir: Path | None) -> Path:
    """A snapshot of the small files of a hub model."""
    from httpx import HTTPError
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError

    patterns = [*SMALL_FILES, *INDEX_FILES]
    tried = f"neither a bundled model ({', '.join(BUNDLED)}) nor a local directory has this name, and"
    try:
        folder = Path(snapshot_download(identifier, allow_patterns=patterns, cache_dir=cache_dir))
    except GatedRepoError as error:
        raise CheckpointNotFound(
            identifier,
            f"{tried} the Hugging Face hub gives it only to those who accepted its terms. Accept them on "
            f"the model's "
            "page, then run `hf auth login`.",
        ) from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise CheckpointNotFound(
            identifier, f"{tried} the Hugging Face hub has no public model of this name. Check the spelling."
        ) from error
    except (HTTPError, OSError) as error:
        raise CheckpointNotFound(
            identifier,
            f"{tried} the Hugging Face hub could not be reached ({type(error).__name__}). Check the "
            f"network, or give "
            "the path of a directory that holds the model.",
        ) from error
    if not (folder / "config.json").is_file():
        raise CheckpointNotFound(identifier, "the Hugging Face hub has it, but without config.json.")
    return folder
