"""A native way that kills its process, never ends, or is wrong is dropped, which is said and remembered."""

import json
from pathlib import Path

import pytest
from support.devices import failing_ways

from molink.peer.compute.native_ways import NativeWays, TriedWay, WaysRecord, machine_facts
from molink.shards.native import compiling
from molink.shards.native.native_way import NativeWay, TrialJob

FAILING = "support.devices.failing_ways"
TESTS = Path(failing_ways.__file__).parents[2]
NONE_STARTS = "no.such.module"


@pytest.fixture(autouse=True)
def tests_are_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """By the process that tries, in which the user's cache is the test's."""
    monkeypatch.setenv("PYTHONPATH", str(TESTS))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def job(way: str, offset: int = 0, form: str = "none", dtype: str = "float32") -> TrialJob:
    return TrialJob(way, form, dtype, 64, 128, offset, (1, 4, 128), 1)


@pytest.mark.full
@pytest.mark.parametrize(
    ("way", "reason", "is_lasting"),
    [
        ("segmentation fault", "ended the process by SIGSEGV with 4 rows (64 x 128, float32)", True),
        ("illegal instruction", "ended the process by SIGILL with 4 rows (64 x 128, float32)", True),
        ("endless", "did not end with 4 rows (64 x 128, float32)", False),
        ("wrong", "gave wrong numbers with 4 rows (64 x 128, float32)", True),
        ("no numbers", "gave what are no numbers with 4 rows (64 x 128, float32)", True),
        (
            "refused",
            "failed (pack_vnni2 is only supported when avx512 is supported) (64 x 128, float32)",
            True,
        ),
    ],
)
def test_a_way_that_fails_is_dropped_and_the_rest_is_tried(
    way: str, reason: str, is_lasting: bool, tmp_path: Path
) -> None:
    said: list[str] = []
    ways = NativeWays(tmp_path, said.append, table=FAILING)
    jobs = [job("right"), job(way), job("right", 8), job(way, 8)]
    assert ways.try_ways(jobs) == {way}
    assert said == [
        f"Note: {way} is not used here, because in a trial it {reason}; the next best way is used instead"
    ]
    assert {tried.job for tried in ways.record.tried} == {job("right"), job("right", 8)}
    assert all(tried.bytes_per_s > 0 for tried in ways.record.tried)
    assert [(one.name, one.reason, one.is_lasting) for one in ways.record.dropped] == [
        (way, reason, is_lasting)
    ]
    later = WaysRecord.read(tmp_path)
    assert later.tried == ways.record.tried
    assert [one.name for one in later.dropped] == ([way] if is_lasting else [])


def test_what_is_known_is_not_tried_again_but_said(tmp_path: Path) -> None:
    jobs, said = [job("right"), job("wrong")], list[str]()
    NativeWays(tmp_path, said.append, table=FAILING).try_ways(jobs)
    later = NativeWays(tmp_path, said.append, table=NONE_STARTS)
    assert later.try_ways(jobs) == {"wrong"}
    assert later.try_ways(jobs) == {"wrong"}
    assert len(said) == 2, "once in each start"
    assert said[0] == said[1]


def remember(folder: Path) -> None:
    WaysRecord(machine_facts(), tried=(TriedWay(job("right"), 1.0),)).write(folder)


@pytest.mark.full
def test_another_shape_offset_or_dtype_is_tried(tmp_path: Path) -> None:
    remember(tmp_path)
    known = NativeWays(tmp_path, print, table=NONE_STARTS)
    assert known.try_ways([job("right")]) == frozenset()
    for other in (job("right", 40), job("right", dtype="bfloat16"), job("right", form="int8")):
        assert NativeWays(tmp_path, print, table=NONE_STARTS).try_ways([other]) == {"right"}


@pytest.mark.parametrize(
    "variable", ["ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "DNNL_VERBOSE", "MKL_DEBUG"]
)
def test_other_instruction_sets_are_another_machine(
    variable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remember(tmp_path)
    monkeypatch.setenv(variable, "0")
    assert machine_facts()["environment"][variable] == "0"
    assert WaysRecord.read(tmp_path).tried == ()
    monkeypatch.delenv(variable)
    assert len(WaysRecord.read(tmp_path).tried) == 1


@pytest.mark.full
def test_a_process_that_cannot_begin_drops_all_for_one_start(tmp_path: Path) -> None:
    said: list[str] = []
    ways = NativeWays(tmp_path, said.append, table=NONE_STARTS)
    assert ways.try_ways([job("right"), job("wrong")]) == {"right", "wrong"}
    assert len(said) == 2
    assert NativeWays(tmp_path, print, table=FAILING).try_ways([job("right")]) == frozenset()


def test_ways_that_a_start_is_without_are_not_tried(tmp_path: Path) -> None:
    ways = NativeWays(tmp_path, print, without=frozenset({"segmentation fault"}), table=FAILING)
    assert ways.try_ways([job("segmentation fault"), job("right")]) == {"segmentation fault"}
    assert ways.record.dropped == ()


@pytest.mark.full
def test_what_was_chosen_is_remembered_with_its_speed(tmp_path: Path) -> None:
    ways = NativeWays(tmp_path, print, table=FAILING)
    ways.try_ways([job("right"), job("right", 8)])
    ways.chose({"right", "elsewhere"})
    later = WaysRecord.read(tmp_path)
    assert later.chosen == ("elsewhere", "right")
    assert later.speeds() == {"right": 64.0 * 128 * 4}


@pytest.mark.parametrize("content", ["", "[]", '{"tried": [{"job": 1}]}', '{"tried": [], "dropped": [3]}'])
def test_a_damaged_record_is_an_empty_one(content: str, tmp_path: Path) -> None:
    remember(tmp_path)
    (path,) = tmp_path.glob("ways-*.json")
    assert json.loads(path.read_text())["tried"]
    path.write_text(content)
    assert WaysRecord.read(tmp_path).tried == ()


def test_the_process_leaves_no_dump_and_loads_torch_alone(tmp_path: Path) -> None:
    ways = NativeWays(tmp_path, print, table=FAILING)
    assert ways.try_ways([job("process")]) == {"process"}
    assert "failed (core 0, dumpable 0, loaded [])" in ways.record.dropped[0].reason


@pytest.mark.full
def test_a_library_that_comes_later_is_tried_then(tmp_path: Path) -> None:
    """A library, or None where none can be compiled: there is nothing to try."""
    ways = NativeWays(tmp_path, print)
    compiled = job(NativeWay.COMPILED)
    assert ways.try_ways([compiled]) == frozenset()
    assert ways.record.tried == ()
    library = compiling.compiled_library(compiling.user_folder())
    assert ways.try_library()
    named = compiling.kept_library_name(compiling.user_folder())
    assert [tried.job.library for tried in ways.record.tried] == ([named] if library is not None else [])


@pytest.mark.full
def test_every_way_of_this_machine_is_right_at_every_offset(tmp_path: Path) -> None:
    """Those that it lacks take no rows."""
    forms = {
        "none": (NativeWay.LINEAR, NativeWay.ONEDNN_PACKED, NativeWay.ATTENTION),
        "int8": (NativeWay.TORCH_BYTES, NativeWay.ONEDNN_BYTES),
        "nf4": (NativeWay.BITSANDBYTES, NativeWay.BITSANDBYTES_PRODUCT),
    }
    jobs = [
        job(way, offset, form, dtype)
        for form, ways in forms.items()
        for way in ways
        for dtype in ("float32", "bfloat16")
        for offset in (0, 8, 40)
    ]
    jobs += [job(way) for way in (NativeWay.ONEDNN, NativeWay.DIVIDED)]
    ways = NativeWays(tmp_path, print)
    assert ways.try_ways(jobs) == frozenset(), ways.record.dropped
    assert {tried.job for tried in ways.record.tried} == set(jobs)
