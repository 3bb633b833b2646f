"""Fetching in a process of its own: one that is killed on the way, and what a loaded span takes of memory."""

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.links.data_plane import DEADLINE_S
from support.models.fake_hub import Answer, Asked
from support.models.hub_models import MODEL, HubSide, hub_side
from transformers import AutoConfig, AutoModelForCausalLM

from molink.shards.checkpoint.safetensors_header import read_header
from molink.shards.spec import Span

PROGRAM = """
import json, sys, psutil
from pathlib import Path

from molink.shards.store.blobs import BlobStore
from molink.shards.hub.hub import HubClient
from molink.shards.hub.hub_checkpoint import read_checkpoint
from molink.shards.hub.hub_weights import HubWeights
from molink.shards.checkpoint.manifest import Manifest
from molink.shards.spec import Span

model, endpoint, folder, start, stop, loads = *sys.argv[1:4], *map(int, sys.argv[4:])
folder = Path(folder)
if loads:
    from molink.shards.loading.loader import StageSettings, load_stage
    import transformers.models.llama.modeling_llama
open_client = lambda commit: HubClient(model, commit, endpoint=endpoint)
(snapshot,) = (path for path in folder.iterdir() if len(path.name) == 40)
manifest = Manifest.from_bytes((folder / "manifest").read_bytes())
span = Span(start, stop)
before = psutil.Process().memory_info().rss
with BlobStore(folder / "store", 2**32) as store:
    weights = HubWeights(read_checkpoint(model, snapshot, store, open_client), store, open_client)
    with weights.ready(span, manifest, lambda *_: None) as parts:
        if loads:
            stage = load_stage(snapshot, span, StageSettings("float32"), manifest=manifest, parts=parts)
            print(json.dumps([stage.weight_bytes, psutil.Process().memory_info().rss - before]))
"""


@contextmanager
def fetching(side: HubSide, span: Span, *, loads: bool) -> Iterator[subprocess.Popen[str]]:
    """A process that fetches the span, and may load it, and is gone in the end."""
    side.snapshot()
    (side.folder / "manifest").write_bytes(side.manifest.to_bytes())
    where = (MODEL, side.hub.endpoint, str(side.folder), str(span.start), str(span.stop), str(int(loads)))
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *where], stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.full
def test_what_a_killed_process_has_fetched_is_not_fetched_again(side: HubSide) -> None:
    held_up, gone = threading.Event(), threading.Event()
    last = {
        (path.name, tensor.start)
        for path in side.model_folder.glob("*.safetensors")
        for tensor in read_header(path)
        if "layers.3." in tensor.name
    }

    def hold(asked: Asked, answer: Answer) -> Answer:
        """Of the layers, which come one after the other, the last does not come."""
        if (asked.name, asked.start) in last:
            held_up.set()
            gone.wait(DEADLINE_S)
        return answer

    with side.store() as store:
        side.checkpoint(store)
        side.hub.weight_ranges()
        side.hub.fault = hold
        with fetching(side, Span(1, 4), loads=False):
            assert held_up.wait(DEADLINE_S)
        gone.set()
        side.hub.fault = None
        before = side.hub.weight_ranges()
        side.fetch(store, Span(1, 4))
        after = side.hub.weight_ranges()
    assert sum(map(len, before.values())) > sum(map(len, after.values()))
    assert {(name, start) for name, ranges in after.items() for start, _ in ranges} <= last


@pytest.mark.full
def test_a_loaded_span_takes_little_more_memory_than_its_parameters(tmp_path: Path) -> None:
    shape = {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16, "vocab_size": 1000}
    config = AutoConfig.for_model("llama", num_hidden_layers=12, **shape)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model", max_shard_size="100MB")
    (tmp_path / "folder").mkdir()
    with (
        hub_side(tmp_path / "model", tmp_path / "folder") as side,
        fetching(side, Span(3, 9), loads=True) as process,
    ):
        out, _ = process.communicate(timeout=DEADLINE_S)
    parameters, resident = json.loads(out)
    assert parameters > 300 * 2**20
    assert resident <= 1.25 * parameters + 150 * 2**20
