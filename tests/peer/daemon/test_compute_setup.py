"""What a peer plans with is what its devices have, and what cannot be is refused with what to type."""

import pytest
from support.models.tiny_models import make_tiny_model

from molink.configuration import SettingsError
from molink.dht.records.records import LayerLatency, PrefillLatency
from molink.peer.daemon import compute_setup
from molink.peer.daemon.compute_setup import limits_on, memory_of, planned_memory, reserve_of
from molink.peer.daemon.settings import JoinSettings, load_settings
from molink.peer.memory.memory import LIBRARY_STREAMS, gpu_reserve_bytes, workspace_bytes
from molink.peer.models.model import LocalModel
from molink.peer.profiling.profile import Profile
from molink.peer.scheduling.microbatch import BatchLimits, batch_limits
from molink.shards.checkpoint.store import describe, read_manifest

GB = 1000**3


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LocalModel:
    folder = tmp_path_factory.mktemp("tiny")
    stored = make_tiny_model("llama", folder)
    manifest = read_manifest(stored, folder / "digests")
    return LocalModel(stored, manifest, describe(manifest, "float32", "none", name="tiny"))


def settings(**given: object) -> JoinSettings:
    return load_settings(given, {})


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Of each device what nobody uses, as the test sets it."""
    there: dict[str, int] = {}
    monkeypatch.setattr(compute_setup, "free_memory_bytes", lambda device: there[device])
    monkeypatch.setattr(compute_setup, "default_memory_bytes", lambda device: there[device] * 9 // 10)
    return there


def test_of_a_gpu_no_more_is_planned_than_others_leave_free(free: dict[str, int]) -> None:
    free |= {"cuda:0": 8 * GB, "cuda:1": 6 * GB, "cpu": 8 * GB, "mps": 8 * GB}
    assert memory_of(("cuda:0",), 4 * GB) == 4 * GB
    assert memory_of(("cuda:0",), 20 * GB) == 8 * GB
    assert memory_of(("cuda:0", "cuda:1"), 20 * GB) == 12 * GB
    assert memory_of(("cuda:0", "cuda:1"), None) == 2 * 54 * GB // 10
    assert memory_of(("cpu",), 20 * GB) == 20 * GB, "a processor's owner knows what swapping does"


def test_what_a_gpu_holds_beside_the_plan_is_kept_free(model: LocalModel, free: dict[str, int]) -> None:
    free |= {"cuda:0": 8 * GB, "cpu": 8 * GB}
    on_cpu = planned_memory(model, ("cpu",), settings(memory="4GB"))
    on_gpu = planned_memory(model, ("cuda:0",), settings(memory="4GB"))
    assert on_gpu.workspace_bytes - on_cpu.workspace_bytes == gpu_reserve_bytes(model.spec, 4 * GB)
    measured = planned_memory(model, ("cuda:0",), settings(memory="4GB"), 8_000_000)
    assert measured.workspace_bytes == on_cpu.workspace_bytes + gpu_reserve_bytes(
        model.spec, 4 * GB, 8_000_000
    )
    assert measured.workspace_bytes < on_gpu.workspace_bytes, (
        "what was measured counts, not the most there is"
    )
    assert LIBRARY_STREAMS == 2


def test_work_space_is_set_aside_for_steps_as_long_as_are_announced(
    model: LocalModel, free: dict[str, int]
) -> None:
    free |= {"cuda:0": 8 * GB}
    usual, longer = (
        planned_memory(model, ("cuda:0",), settings(memory="4GB"), limits=batch_limits(model.spec, limits))
        for limits in (BatchLimits(), BatchLimits(max_tokens=2048))
    )
    more = workspace_bytes(model.spec, 2048) - workspace_bytes(model.spec, 512)
    assert longer.workspace_bytes - usual.workspace_bytes == more > 0


@pytest.mark.parametrize(
    ("devices", "tokens"),
    [(("cuda:0",), 2048), (("cuda:0", "cuda:1"), 512), (("cpu",), 512), (("mps",), 512)],
)
def test_only_a_gpu_alone_takes_longer_steps_and_as_its_profile_says(
    model: LocalModel, devices: tuple[str, ...], tokens: int
) -> None:
    measured = [(512, 0.6), (1024, 0.8), (2048, 1.2)]
    prefills = tuple(PrefillLatency(count, layer_ms) for count, layer_ms in measured)
    profile = Profile((LayerLatency(1, 0.1),), 0.1, 0.1, 1e9, prefills)
    assert limits_on(devices, model.spec, profile, 80 * GB).max_tokens == tokens


def test_several_gpus_have_each_a_reserve(model: LocalModel) -> None:
    both = reserve_of(model.spec, ("cuda:0", "cuda:1"), 8 * GB)
    assert both == 2 * gpu_reserve_bytes(model.spec, 4 * GB)
    assert reserve_of(model.spec, ("cpu", "cpu"), 8 * GB) == 0


def test_a_card_too_small_for_one_layer_is_refused_with_what_to_type(
    model: LocalModel, free: dict[str, int]
) -> None:
    free |= {"cuda:0": GB // 10}
    with pytest.raises(
        SettingsError, match=r"is too little for tiny: its smallest layer .* or type --device cpu$"
    ):
        planned_memory(model, ("cuda:0",), settings())


@pytest.mark.parametrize("devices", [("cpu",), ("mps",), ("cuda:0", "cuda:1")])
def test_only_beside_one_gpu_there_is_anything_to_swap(
    model: LocalModel, free: dict[str, int], devices: tuple[str, ...]
) -> None:
    free |= dict.fromkeys(devices, 8 * GB)
    with pytest.raises(SettingsError, match="--swap-space is the host's memory beside that of one GPU"):
        planned_memory(model, devices, settings(swap_space="1GB"))


def test_layers_that_the_model_has_not_are_refused_before_anything_is_measured(
    model: LocalModel, free: dict[str, int]
) -> None:
    free |= {"cpu": 8 * GB}
    with pytest.raises(SettingsError, match=r"--layers 0:20: tiny has \d+ layers$"):
        planned_memory(model, ("cpu",), settings(layers="0:20"))
