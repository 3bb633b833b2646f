"""A peer notes the native ways that it uses, and starts without those that it is told to leave out."""

from collections.abc import Collection
from pathlib import Path

from molink.peer.compute.native_ways import NativeWay, NativeWays, TriedWay, WaysRecord
from molink.shards.native.native_way import TrialJob


def job(way: NativeWay) -> TrialJob:
    return TrialJob(way, "none", "float32", 64, 64, 0, (1,), 1)


def test_ways_are_noted_while_they_are_timed_and_once_they_are_chosen(tmp_path: Path) -> None:
    jobs = [job(way) for way in (NativeWay.ONEDNN, NativeWay.DIVIDED, NativeWay.LINEAR, NativeWay.ATTENTION)]
    WaysRecord(WaysRecord.read(tmp_path).machine, tuple(TriedWay(one, 1.0) for one in jobs)).write(tmp_path)
    noted: list[set[str]] = []

    def note(ways: Collection[str]) -> None:
        noted.append(set(ways))

    ways = NativeWays(tmp_path, print, without=frozenset({NativeWay.DIVIDED}), note=note)
    assert NativeWay.DIVIDED in ways.try_ways(jobs)
    ways.chose([NativeWay.ONEDNN])
    ways.chose([NativeWay.LINEAR])  # for another span
    assert noted == [
        {NativeWay.ONEDNN, NativeWay.LINEAR, NativeWay.ATTENTION},
        {NativeWay.ONEDNN, NativeWay.ATTENTION},
        {NativeWay.ONEDNN, NativeWay.LINEAR, NativeWay.ATTENTION},
    ]
