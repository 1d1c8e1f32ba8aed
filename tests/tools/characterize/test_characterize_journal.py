"""kvtier's journal as a source of its own, and joined with what the device did in the same time."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.rig import FINGERPRINT, LAYOUT, Engine, config, load_places, loaded, looked_up, places_of, prefix_of, stored

from kvtier.config.sections import JournalConfig
from kvtier.errors import ConfigError
from kvtier.observe import metric_definitions as table
from kvtier.runtime.open import open_session
from kvtier.tier.disk.kind import DiskSettings
from kvtier.tools.characterize.io_trace import IoLayer, IoTrace, by_time, rows_of
from kvtier.tools.characterize.io_trace_readers import read_objects, read_recordings, write_amplification
from kvtier.types import RequestId

CHUNKS = 6
MIB = 1 << 20
HEAD = {"kind": "journal", "version": 1, "began_s": 1000.0, "chunk_tokens": 256}

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def make(*lines: object, name: str = "journal-5-77-1-12345678.jsonl") -> Path:
        path = tmp_path / name
        path.write_text("".join(it if isinstance(it, str) else json.dumps(it) + "\n" for it in lines))
        return path

    return make


def line(ended_s: float, way: str, name: str, **more: object) -> dict[str, object]:
    return {
        "kind": "object",
        "time_s": ended_s,
        "seconds": 0.5,
        "way": way,
        "tier": "disk",
        "outcome": "done",
        "bytes": 4096,
        "payload_bytes": 4000,
        "name": name,
    } | more


def test_a_real_journal_has_the_bytes_that_the_metrics_count(tmp_path: Path) -> None:
    folder = tmp_path / "journal"
    disk = DiskSettings(path=tmp_path / "disk", capacity_bytes=8 * MIB, reserve_bytes=1)
    kv = open_session(
        replace(config(None), tiers=(disk,), journal=JournalConfig(path=folder)),
        LAYOUT,
        FINGERPRINT,
        Engine(64).copier(),
    )
    for turn in range(2):
        for seed in range(12):
            request, prefix = f"{turn}.{seed}", prefix_of(CHUNKS, kv.root, seed=seed)
            if tokens := looked_up(kv.session, request, prefix).tokens:
                loaded(kv.session, request, prefix, tokens, load_places(tokens))
            stored(kv.session, f"{request} store", prefix, places_of(range(CHUNKS)))
            kv.session.release(RequestId(request))
    kv.session.close(60)
    trace = read_recordings(sorted(folder.iterdir()))
    assert (trace.source, trace.layers, trace.places) == ("log", [IoLayer.APPLICATION], {0: "disk"})
    for is_write, link in ((False, "promote"), (True, "demote")):
        rows = trace.requests[trace.requests["is_write"] == is_write]
        assert len(rows)
        assert int(rows["bytes"].sum()) == kv.metrics.get(table.TRANSFER_BYTES, link=link, tier="disk")
    assert set(trace.requests["process"].tolist()) == set(trace.processes)
    assert (trace.requests["completed_s"] >= trace.requests["issued_s"]).all()


def test_repeated_reads_are_those_of_a_name_and_no_two_objects_follow_each_other(write: Write) -> None:
    path = write(
        HEAD,
        line(1001.0, "write", "a"),
        line(1002.0, "read", "a"),
        line(1003.0, "read", "b"),
        line(1004.0, "read", "a", tier="shared"),
        line(1005.0, "read", "c", outcome="absent", bytes=0, payload_bytes=0),
        {"kind": "request", "id": "x"},
        '{"kind": "object", "time_s": 10',
    )
    log = read_objects([path])
    rows = log.trace.requests
    assert rows["position"][0] == rows["position"][1] == rows["position"][3] != rows["position"][2]
    assert not (rows["position"][1:] == rows["position"][:-1] + rows["bytes"][:-1]).any()
    assert rows["place"].tolist() == [0, 0, 0, 1]
    assert log.payload_bytes.tolist() == [4000] * 4
    assert log.trace.counts == {"reads that ended absent": 1}
    assert (log.trace.began_s, log.trace.seconds, log.trace.processes) == (1000.5, 3.5, {77: "kvtier"})
    assert any("cut off" in each for each in log.trace.remarks)


def blocks(began_s: float, seconds: float, *, chosen: frozenset[int] | None) -> IoTrace:
    """A capture whose device wrote 4096 bytes a second for process 77, and 512 for a kernel thread."""
    count = int(seconds)
    parts = [
        rows_of(count, issued_s=np.arange(count), bytes=size, process=process, is_write=True, layer=IoLayer.DEVICE)
        for size, process in ((4096, 77), (512, 0))
    ]
    reads = rows_of(count, issued_s=np.arange(count), bytes=1 << 20, process=77, layer=IoLayer.DEVICE)
    above = rows_of(count, issued_s=np.arange(count), bytes=1 << 20, is_write=True, layer=IoLayer.FILE_SYSTEM)
    return IoTrace("block", by_time(*parts, reads, above), seconds, began_s=began_s, chosen=chosen)


def test_write_amplification_is_of_the_time_that_both_recordings_share(write: Write) -> None:
    lines = [line(1001.0 + second, "write", str(second)) for second in range(10)]
    log = read_objects([write(HEAD, *lines, line(1012.0, "read", "0"))])
    found = write_amplification(log, blocks(1003.0, 5.0, chosen=frozenset({77})))
    # Writes that began after 1003.0 and ended by 1008.0: those that ended at 1004 to 1008.
    assert (found.objects, found.payload_bytes, found.framed_bytes) == (5, 20000, 20480)
    assert (found.device_bytes, found.unattributed_bytes) == (5 * 4096, 5 * 512)
    assert found.framed_ratio == pytest.approx(1.024)
    assert found.device_ratio == pytest.approx(1.024)
    everything = write_amplification(log, blocks(1003.0, 5.0, chosen=None))
    assert (everything.device_bytes, everything.unattributed_bytes) == (5 * 4608, 0)
    with pytest.raises(ConfigError, match="recordings of the same time"):
        write_amplification(log, blocks(2000.0, 5.0, chosen=None))


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([HEAD | {"version": 2}], "line 1: a journal of version 2"),
        ([HEAD], "no object"),
        ([HEAD, "nonsense\n"], "line 2: not JSON"),
        ([HEAD, "[1]\n"], "line 2: .*is not a JSON object"),
        ([HEAD, {"kind": "object"}], "line 2: 'way' is missing"),
        ([HEAD, line(1.0, "erase", "a")], "line 2: way is 'erase'"),
        ([HEAD, line(1.0, "read", "a", bytes=-1)], "line 2: an object of -1 bytes"),
        ([HEAD, line(1.0, "read", "a", bytes=float("nan"))], "line 2: bytes is nan"),
        ([HEAD, line(1.0, "read", "a" * 300)], "line 2: name is .*allowed: 1 to 256"),
        ([HEAD, line(1.0, "read", "a", outcome="x" * 70000)], "line 2: .* characters"),
    ],
)
def test_what_is_no_journal_is_an_error_that_names_file_and_line(
    write: Write, lines: list[object], message: str
) -> None:
    path = write(*lines)
    with pytest.raises(ConfigError, match=message) as failed:
        read_recordings([path])
    assert str(path) in str(failed.value)
