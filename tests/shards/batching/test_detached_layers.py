"""Layers that are detached are freed, wherever what refers to them was made."""

import gc
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
from support.devices.paged_reference import decoding_here
from support.models.circuit_runs import DEVICE, engine_of
from torch import nn

from molink.shards.batching.engine import Engine, Rows
from molink.shards.loading.loader import StageSettings, load_stage
from molink.shards.model.stage import Stage
from molink.shards.spec import Span

WHOLE = Span(0, 3)
PART = Span(1, 2)
LAYERS = "model.layers."


@pytest.fixture
def frozen_start(freezing: None) -> Callable[[], None]:
    """As a peer does once it is ready: no collection looks at what is there by then."""

    def freeze() -> None:
        gc.collect()
        gc.freeze()

    return freeze


def stepped(engine: Engine) -> None:
    """A session has gone through all layers, so that whatever is made for steps is there."""
    cache = engine.new_cache(WHOLE, 40)
    engine.step(WHOLE, [Rows(cache, 3, (1, 2, 3), False)], None)
    engine.step(WHOLE, [Rows(cache, 1, (4,), False)], None)
    cache.close()


def modules_of(stage: Stage) -> dict[str, weakref.ref[nn.Module]]:
    return {
        name: weakref.ref(module) for name, module in stage.model.named_modules() if name.startswith(LAYERS)
    }


@pytest.mark.full
@pytest.mark.parametrize(
    ("quantization", "decodes", "exact", "dropped"),
    [
        ("none", False, True, WHOLE),
        pytest.param("none", False, True, PART, marks=pytest.mark.full),
        pytest.param("none", False, False, WHOLE, marks=pytest.mark.full),
        pytest.param("none", False, False, PART, marks=pytest.mark.full),
        pytest.param("none", True, False, WHOLE, marks=pytest.mark.full),
        ("none", True, False, PART),
        ("int8", False, False, WHOLE),
        pytest.param("int8", False, False, PART, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_no_module_of_detached_layers_is_left(
    tiny_model: Callable[[str], Path],
    frozen_start: Callable[[], None],
    quantization: str,
    decodes: bool,
    exact: bool,
    dropped: Span,
) -> None:
    decoding = decoding_here(sizes=(2,))[0] if decodes else None
    stage = load_stage(
        tiny_model("llama"), WHOLE, StageSettings("float32", quantization, device=DEVICE, exact=exact)
    )
    engine, modules = engine_of([stage], decoding=decoding), modules_of(stage)
    del stage
    stepped(engine)
    frozen_start()
    engine.detach(dropped)
    left = {int(name.split(".")[2]) for name, module in modules.items() if module() is not None}
    assert left == set(WHOLE) - set(dropped)
    assert gc.get_freeze_count() > 0
