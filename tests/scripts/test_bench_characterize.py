"""One load for every backend, and what of a capture counts for it."""

import json
import random
from pathlib import Path

import numpy as np
import pytest
from bench.characterize import arm_row, without_gaps
from bench.parts.object_load import WINDOW, ObjectLoad, drive
from bench.parts.samsung_io import ComparedFigure, compare
from bench.parts.seen_table import median_rows
from bench.parts.tier_objects import TierBackend

from kvtier.codec.frame import frame_bytes
from kvtier.errors import KvError
from kvtier.tools.characterize.io_trace import IoLayer, IoTrace, by_time, rows_of
from kvtier.tools.characterize.io_trace_readers import read_objects
from kvtier.tools.characterize.measures import IoMeasures, measure

KIB = 1 << 10
SMALL = ObjectLoad(size=64 * KIB, streams=2, turns=6, conversations=2)


def test_a_turn_reads_what_its_conversation_wrote() -> None:
    load = ObjectLoad(size=1, streams=8, turns=24, conversations=2)
    assert load.read_share == pytest.approx(92.0)
    written: set[int] = set()
    reads = 0
    for stream in range(load.streams):
        own: set[int] = set()
        for way, numbers in load.calls(stream):
            assert 0 < len(numbers) <= WINDOW
            if way == "read":
                assert own.issuperset(numbers)
                reads += len(numbers)
            else:
                assert not own & set(numbers)
                own |= set(numbers)
        assert not written & own
        written |= own
    assert written == set(range(load.objects))
    assert reads / (reads + len(written)) == pytest.approx(0.92)


@pytest.mark.parametrize("kind", ["disk", "directory"])
def test_a_tier_moves_every_object_of_the_load(tmp_path: Path, kind: str) -> None:
    backend = TierBackend(kind, tmp_path / "store", SMALL, threads=2)
    try:
        backend.fill()
        drive(SMALL, backend, kind, tmp_path / "journal")
    finally:
        backend.close()
    log = read_objects([tmp_path / "journal"])
    calls = [call for stream in range(SMALL.streams) for call in SMALL.calls(stream)]
    rows = log.trace.requests
    for way, is_write in (("read", False), ("write", True)):
        assert (rows["is_write"] == is_write).sum() == sum(len(numbers) for of, numbers in calls if of == way)
    assert set(rows["bytes"].tolist()) == {frame_bytes(backend.layout.groups[0])}
    assert int(log.payload_bytes.sum()) == len(rows) * SMALL.size
    assert len(np.unique(rows["position"])) == SMALL.objects


def test_an_object_that_is_gone_is_no_figure(tmp_path: Path) -> None:
    backend = TierBackend("directory", tmp_path / "store", SMALL, threads=2)
    try:
        backend.submit(0, "read", [3])
        with pytest.raises(KvError, match="read of object 3 ended absent"):
            backend.take(10.0)
    finally:
        backend.close()


def device(issued_s: list[float], *, process: int, is_write: bool, layer: IoLayer = IoLayer.DEVICE) -> np.ndarray:
    issued = np.array(issued_s)
    return rows_of(
        len(issued), issued_s=issued, completed_s=issued + 0.1, bytes=4096, process=process, is_write=is_write,
        layer=layer,
    )  # fmt: skip


def journal(folder: Path) -> Path:
    common = {"kind": "object", "seconds": 0.5, "tier": "x", "outcome": "done", "bytes": 8192, "payload_bytes": 8000}
    lines: list[dict[str, object]] = [
        {"kind": "journal", "version": 1},
        common | {"time_s": 1010.5, "way": "write", "name": "0"},
        common | {"time_s": 1011.5, "way": "read", "name": "1"},
    ]
    path = folder / "journal"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_only_what_the_load_caused_counts(tmp_path: Path) -> None:
    log = read_objects([journal(tmp_path)])  # 1010.0 to 1011.5
    requests = by_time(
        device([1.0, 10.1, 10.2], process=7, is_write=True),  # the first one fills the tier
        device([11.1, 11.2, 11.3], process=7, is_write=False),
        device([10.3], process=8, is_write=True),  # of another process
        device([12.0], process=0, is_write=True),  # writeback, after the load
        device([10.0], process=7, is_write=True, layer=IoLayer.APPLICATION),
    )
    row = arm_row("x", 0, 8000, IoTrace("block", requests, 20.0, began_s=1000.0, chosen=frozenset({7})), log)
    assert (row.device.layer, row.device.requests, row.requests_per_object) == ("device", 5, 2.5)
    assert row.device.read_share_bytes == pytest.approx(0.6)
    assert row.amplification.device_ratio == pytest.approx(8192 / 8000)
    assert row.later_bytes == 4096
    assert (row.objects.reads, row.objects.writes) == (1, 1)
    assert row.objects.gb_per_s == round(16000 / 1.5 / 1e9, 3)


def test_a_load_that_never_reaches_the_device_measures_no_layer_above(tmp_path: Path) -> None:
    above = device([10.1, 10.2], process=7, is_write=True, layer=IoLayer.APPLICATION)
    trace = IoTrace("block", above, 20.0, began_s=1000.0, chosen=frozenset({7}))
    row = arm_row("x", 0, 8000, trace, read_objects([journal(tmp_path)]))
    assert (row.device.layer, row.device.requests, row.amplification.device_ratio) == ("device", 0, 0.0)


@pytest.mark.parametrize("seed", range(20))
def test_a_map_has_as_many_bytes_as_were_touched(seed: int) -> None:
    draw = random.Random(seed)
    starts, sizes = [draw.randrange(200) for _ in range(30)], [draw.randrange(1, 20) for _ in range(30)]
    touched = sorted({at for start, size in zip(starts, sizes, strict=True) for at in range(start, start + size)})
    rows = rows_of(30, position=starts, bytes=sizes)
    assert without_gaps(rows).tolist() == [touched.index(start) for start in starts]


def test_the_table_shows_the_median_repetition_and_the_range() -> None:
    rows = [
        {"arm": arm, "chunk_bytes": 1, "repetition": number, "objects": {"gb_per_s": rate}}
        for number, rates in enumerate(((2.0, 9.0), (3.0, 1.0), (1.0, 5.0)))
        for arm, rate in zip(("a", "b"), rates, strict=True)
    ]
    found = [(row["arm"], row["repetition"], row["range"]) for row in median_rows(rows)]
    assert found == [("a", 0, (1.0, 3.0)), ("b", 2, (1.0, 9.0))]


TICK = 1 / 128


def steady(count: int, *, size: int = 1 << 20, took: float = TICK) -> np.ndarray:
    """`count` requests that follow each other, one each tick."""
    number = np.arange(count)
    return rows_of(
        count, issued_s=number * TICK, completed_s=number * TICK + took, position=number * size, bytes=size,
        layer=IoLayer.DEVICE, place=1, process=7,
    )  # fmt: skip


def verdicts(it: IoMeasures) -> dict[str, ComparedFigure]:
    return {row.what: row for row in compare(it)}


def test_a_load_like_the_papers_agrees() -> None:
    """Requests of 1 MiB, one in thirteen a write, 160 in flight; a tenth begins elsewhere."""
    rows = steady(4000, took=160 * TICK)
    rows["is_write"][::13] = True
    rows["position"] += (np.arange(4000) // 10 * (1 << 30)).astype(np.uint64)
    it = measure(IoTrace("block", rows, 4160 * TICK, device_facts={"nvme0n1": {"max_sectors_kb": 1280}}))
    found = verdicts(it)
    agree = {"reads, of all bytes", "requests over 1 MB", "queue depth, mean", "sequential, per process"}
    assert {what for what, row in found.items() if row.verdict == "agrees"} == agree
    assert {row.why for what, row in found.items() if what in agree} == {""}
    assert all(row.why for row in found.values() if row.verdict == "differs")
