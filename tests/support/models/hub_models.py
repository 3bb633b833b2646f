"""A tiny model at a fake hub, and what a process needs to fetch parts of it."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from support.links.data_plane import DEADLINE_S
from support.models.fake_hub import COMMIT, FakeHub, fake_hub, files_of

from molink.shards.checkpoint.manifest import CONFIGURATION_FILES, Manifest
from molink.shards.checkpoint.model_files import TOKENIZER_FILES
from molink.shards.checkpoint.store import read_manifest
from molink.shards.hub.hub import HubClient, RetryPolicy
from molink.shards.hub.hub_checkpoint import HubCheckpoint, read_checkpoint
from molink.shards.hub.hub_weights import HubWeights
from molink.shards.spec import Span
from molink.shards.store.blobs import BlobStore

MODEL = "someone/some-model"


@dataclass(slots=True)
class HubSide:
    """A hub with a model, and a folder for what is fetched from it."""

    hub: FakeHub
    model_folder: Path
    """The model whole, as it lies at the hub."""
    folder: Path
    patience: RetryPolicy = RetryPolicy(attempts=3, connect_s=DEADLINE_S, silence_s=DEADLINE_S)  # noqa: RUF009 (a value)
    pauses: list[float] = field(default_factory=list)

    def open_client(self, commit: str = COMMIT) -> HubClient:
        return HubClient(
            MODEL, commit, endpoint=self.hub.endpoint, patience=self.patience, pause=self.pauses.append
        )

    def snapshot(self) -> Path:
        """A folder as the hub's own library makes it of the model's small files."""
        snapshot = self.folder / COMMIT
        if snapshot.exists():
            return snapshot
        snapshot.mkdir()
        for name in (*CONFIGURATION_FILES, *TOKENIZER_FILES, "model.safetensors.index.json"):
            if name in self.hub.files:
                (snapshot / name).write_bytes(self.hub.files[name])
        return snapshot

    def replace_hub(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """From now on the hub's own library takes this one for the hub."""
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", self.hub.endpoint)
        template = self.hub.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)

    @property
    def checkpoint_commit(self) -> str:
        return COMMIT

    def store(self, limit_bytes: int | None = 2**30, name: str = "store") -> BlobStore:
        return BlobStore(self.folder / name, limit_bytes)

    def checkpoint(self, store: BlobStore) -> HubCheckpoint:
        return read_checkpoint(MODEL, self.snapshot(), store, self.open_client)

    def weights(self, store: BlobStore) -> HubWeights:
        return HubWeights(self.checkpoint(store), store, self.open_client)

    @property
    def manifest(self) -> Manifest:
        return read_manifest(self.model_folder)

    def fetch(self, store: BlobStore, span: Span) -> dict[str, bytes]:
        """The bytes of the span's tensors as they lie in the store."""
        seen: list[tuple[int, int]] = []
        with self.weights(store).ready(span, self.manifest, lambda *it: seen.append(it)) as parts:
            return {name: part.path.read_bytes() for name, part in parts.items()}


@contextmanager
def hub_side(model_folder: Path, folder: Path) -> Iterator[HubSide]:
    with fake_hub(MODEL, files_of(model_folder)) as hub:
        yield HubSide(hub, model_folder, folder)
