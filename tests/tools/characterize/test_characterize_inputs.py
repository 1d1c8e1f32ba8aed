"""Recordings of blkparse, against their own account and against the kernel's events of the same run.

The recordings in `tests/golden/characterize` are real. blkparse.txt.gz and tracefs.txt.gz saw one run of fio on the two
partitions of a loop device; the first is from the kernel's `blk` tracer. Stacked devices are by hand.
"""

import gzip
import json
import random
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kvtier.cli.main import run
from kvtier.errors import ConfigError
from kvtier.tools.characterize.blktrace import read_blkparse
from kvtier.tools.characterize.io_trace import IoKind, IoLayer, IoTrace
from kvtier.tools.characterize.io_trace_readers import read_recordings
from kvtier.tools.characterize.measures import measure

SAMPLES = Path(__file__).parents[2] / "golden" / "characterize"

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def make(content: str | bytes, name: str = "recording") -> Path:
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return make


def text_of(name: str) -> str:
    return gzip.decompress((SAMPLES / name).read_bytes()).decode()


def line(
    time_s: float, action: str, rwbs: str, rest: str, *, device: str = "8,0", process: int = 7, cpu: int = 0
) -> str:
    return f"{device:>7} {cpu:2} {1:8} {time_s:15.9f} {process:5} {action:>2} {rwbs:>3} {rest}\n"


def device_rows(trace: IoTrace) -> np.ndarray:
    return trace.at(IoLayer.DEVICE)


def test_requests_are_those_of_blkparses_own_summary() -> None:
    trace = read_blkparse(SAMPLES / "blkparse.txt.gz")
    summary = text_of("blkparse.txt.gz").partition("Total (")[2]
    rows = device_rows(trace)
    for way, is_write in (("Read", False), ("Write", True)):
        wanted = re.search(rf"{way}s Completed: +(\d+), +(\d+)KiB", summary)
        queued = re.search(rf"{way}s Queued: +(\d+), +(\d+)KiB", summary)
        assert wanted
        assert queued
        mine = rows[rows["is_write"] == is_write]
        assert (len(mine), int(mine["bytes"].sum())) == (int(wanted[1]), int(wanted[2]) << 10)
        bios = trace.at(IoLayer.FILE_SYSTEM)
        bios = bios[bios["is_write"] == is_write]
        assert int(bios["bytes"].sum()) == int(queued[2]) << 10
    assert not np.isnan(rows["completed_s"]).any()
    assert trace.counts == {"remaps": 336, "splits": 80, "merges": 224}
    assert (trace.source, trace.lost_events, trace.places) == ("file", 0, {7 << 20: "7,0"})


def kernel_requests() -> list[tuple[int, int, bool, int]]:
    """Sector, bytes, direction and submitting process of each request that the kernel's own events name."""
    seen: list[tuple[int, int, bool, int]] = []
    owner: dict[int, int] = {}
    form = re.compile(r"-(\d+) +\[\d+\] \S+ [\d.]+: (block_bio_queue|block_getrq|block_rq_issue): 7,0 (\w+) (.*)")
    for each in text_of("tracefs.txt.gz").splitlines():
        found = form.search(each)
        if found is None:
            continue
        process, event, rwbs, rest = int(found[1]), found[2], found[3], found[4]
        sector = re.search(r"(\d+) \+ (\d+)", rest)
        assert sector
        if event == "block_rq_issue":
            size = int(sector[2]) * 512
            seen.append((int(sector[1]), size, "W" in rwbs, owner.get(int(sector[1]), process)))
        else:
            owner[int(sector[1])] = process
    return seen


def test_requests_are_those_that_the_kernels_events_name() -> None:
    rows = device_rows(read_blkparse(SAMPLES / "blkparse.txt.gz"))
    mine = [
        (int(row["position"]) // 512, int(row["bytes"]), bool(row["is_write"]), int(row["process"])) for row in rows
    ]
    wanted = kernel_requests()
    assert len(wanted) == 192
    assert Counter(mine) == Counter(wanted)


def test_lines_of_several_cpus_may_be_out_of_order(write: Write) -> None:
    lines = text_of("blkparse.txt.gz").partition("CPU0 (")[0].splitlines(keepends=True)
    random.Random(3).shuffle(lines)
    shuffled = read_blkparse(write("".join(lines)))
    usual = read_blkparse(SAMPLES / "blkparse.txt.gz")
    assert shuffled.requests.tobytes() == usual.requests.tobytes()
    later = [line(1.0, "Q", "R", "64 + 8 [b]", process=2), line(1.1, "D", "R", "64 + 8 [c]", process=3)]
    earlier = [line(0.0, "Q", "R", "64 + 8 [a]", process=1), line(0.1, "D", "R", "64 + 8 [c]", process=3)]
    trace = read_blkparse(write("".join([*later, *earlier])))
    assert device_rows(trace)["process"].tolist() == [1, 2]


STACKED = "".join(
    [
        line(0.0, "Q", "W", "1000 + 8 [writer]", device="253,0"),
        line(0.1, "A", "W", "5000 + 8 <- (253,0) 1000"),
        line(0.2, "Q", "W", "5000 + 8 [writer]"),
        line(0.3, "G", "W", "5000 + 8 [writer]"),
        line(0.4, "I", "W", "5000 + 8 [writer]"),
        line(0.5, "D", "W", "5000 + 8 [kworker/0:1H]", process=90),
        line(0.9, "C", "W", "5000 + 8 [0]", process=0),
        line(1.0, "C", "W", "1000 + 8 [0]", device="253,0", process=0),
    ]
)


def test_one_layer_of_a_stack_is_counted(write: Write) -> None:
    trace = read_blkparse(write(STACKED))
    (request,), (bio,) = device_rows(trace), trace.at(IoLayer.FILE_SYSTEM)
    assert (request["place"], request["position"], request["process"]) == (8 << 20, 5000 * 512, 7)
    assert request["completed_s"] - request["issued_s"] == pytest.approx(0.4)
    assert (bio["place"], bio["position"]) == (253 << 20, 1000 * 512)
    assert trace.processes == {7: "writer"}
    # Without the remap nothing says that both bios are one.
    unrelated = read_blkparse(write("".join(each for each in STACKED.splitlines(keepends=True) if " A " not in each)))
    assert len(unrelated.at(IoLayer.FILE_SYSTEM)) == 2


def test_requests_of_the_upper_device_of_a_multipath_stack_are_not_counted(write: Write) -> None:
    text = STACKED + line(0.05, "D", "W", "1000 + 8 [writer]", device="253,0")
    assert device_rows(read_blkparse(write(text)))["place"].tolist() == [8 << 20]


def test_kinds_owners_and_what_is_no_request(write: Write) -> None:
    text = "Input file sda.blktrace.0 added\n" + "".join(
        [
            line(0.00, "Q", "WM", "64 + 8 [jbd2/sda1-8]", process=30),
            line(0.01, "D", "WM", "64 + 8 [jbd2/sda1-8]", process=30),
            line(0.02, "Q", "R", "208 + 8 [reader]", process=40),
            line(0.03, "G", "R", "208 + 8 [reader]", process=40),
            line(0.04, "Q", "R", "200 + 8 [other]", process=41),
            line(0.05, "F", "R", "200 + 8 [other]", process=41),
            line(0.06, "D", "R", "200 + 16 [reader]", process=40),
            line(0.07, "D", "FN", "[reader]"),
            line(0.075, "C", "FN", "0 [0]", process=0),
            line(0.08, "D", "D", "4096 + 2048 [fstrim]"),
            line(0.09, "D", "R", "36 (12 00 00 00 24 00 ..) [smartctl]"),
            line(0.10, "m", "N", "cfq2519S allocated"),
            line(0.11, "U", "N", "[reader] 1"),
            line(0.12, "C", "R", "200 + 16 [65531]", process=0),
            line(0.13, "D", "W", "300 + 8 [writer]"),
            line(0.14, "R", "W", "300 + 8 [0]"),
            line(0.15, "D", "W", "300 + 8 [writer]"),
            line(0.17, "C", "W", "300 + 8 (   20000) [0]"),
        ]
    )
    trace = read_blkparse(write(text + "CPU0 (8,0):\n anything at all\nSkips: 2 forward (1,234 -   0.5%)\n"))
    rows = device_rows(trace)
    assert [(int(row["position"]) // 512, int(row["kind"]), int(row["process"])) for row in rows] == [
        (64, IoKind.METADATA, 0),
        (200, IoKind.DATA, 41),
        (0, IoKind.FLUSH, 7),
        (4096, IoKind.DISCARD, 7),
        (300, IoKind.DATA, 7),
    ]
    assert rows[4]["completed_s"] - rows[4]["issued_s"] == pytest.approx(0.04)  # from the first issue
    assert rows[2]["completed_s"] == pytest.approx(0.075)
    assert trace.counts == {"merges": 1, "requeues": 1, "commands without data": 1, "failed": 1}
    assert trace.lost_events == 1234
    assert trace.seconds == pytest.approx(0.17)


def test_a_request_that_is_split_counts_once(write: Write) -> None:
    """Four random reads of 1 MiB; the device takes 2,032 sectors, so that each has a second part of 16."""
    text = ""
    for number, sector in enumerate((80_000, 40_000, 120_000, 0)):
        text += line(number, "Q", "R", f"{sector} + 2048 [fio]") + line(
            number, "X", "R", f"{sector} / {sector + 2032} [fio]"
        )
        for part, size in ((sector, 2032), (sector + 2032, 16)):
            text += line(number + 0.1, "D", "R", f"{part} + {size} [fio]")
            text += line(number + 0.3, "C", "R", f"{part} + {size} [0]", process=0)
    it = measure(read_blkparse(write(text)))
    assert (it.requests, it.layers["device"].requests) == (4, 8)
    assert it.sequential_share == {"device": 0.0, "per_process": 0.0}
    assert (it.request_bytes["p50"], it.request_bytes["share_over_1mb"]) == (1 << 20, 1.0)
    assert it.layers["device"].share_over_1mb == 0.5


def test_requests_that_are_merged_count_each(write: Write) -> None:
    text = (
        line(0, "Q", "R", "8192 + 2048 [a]")
        + line(1, "Q", "R", "6144 + 2048 [a]")
        + line(1, "F", "R", "6144 + 2048 [a]")
    )
    text += line(2, "D", "R", "6144 + 4096 [a]") + line(4, "C", "R", "6144 + 4096 [0]", process=0)
    it = measure(read_blkparse(write(text)))
    assert (it.requests, it.request_bytes["p50"], it.layers["device"].p50) == (2, 1 << 20, 2 << 20)
    assert it.submitted_depth == {"mean": 7 / 4, "peak": 2.0, "busy_mean": 7 / 4}  # 4 s and 3 s in flight, of 4


def test_a_request_that_the_driver_hands_back_goes_on(write: Write) -> None:
    """Two requests at 0 s; the driver takes the first at 1 s, hands it back at 2 s, and takes the other at 6 s."""
    text = line(0, "Q", "R", "0 + 2048 [fio]") + line(0, "Q", "R", "90000 + 2048 [fio]")
    for time_s, action, sector in (
        (1, "D", 0),
        (2, "R", 0),
        (4, "D", 0),
        (6, "C", 0),
        (6, "D", 90000),
        (10, "C", 90000),
    ):
        text += line(time_s, action, "R", f"{sector} + 2048 [0]")
    it = measure(read_blkparse(write(text)))
    assert it.queue_depth == pytest.approx(
        {"mean": 0.9, "peak": 1, "busy_mean": 1.0, "submitted": 1.6}
    )  # (6 + 10) / 10
    assert it.queue_to_driver_us is not None
    assert (it.queue_to_driver_us["p50"], it.queue_to_driver_us["max"]) == pytest.approx((1e6, 6e6))
    assert (it.latency_us["p50"], it.latency_us["max"]) == pytest.approx((4e6, 5e6))


def test_two_requests_for_one_sector_that_are_both_handed_back_are_two(write: Write) -> None:
    """And a third one of another size, at the same first sector, that the driver keeps."""
    text = "".join(line(0, "Q", "R", f"0 + {size} [fio]") for size in (2048, 2048, 16))
    for time_s, action, size in (
        (1, "D", 2048), (2, "D", 2048), (2.5, "D", 16), (3, "R", 2048), (4, "R", 2048), (5, "D", 2048), (6, "D", 2048),
        (7, "C", 2048), (8, "C", 2048), (9, "C", 16),
    ):  # fmt: skip
        text += line(time_s, action, "R", f"0 + {size} [0]")
    rows = device_rows(read_blkparse(write(text)))
    assert sorted(rows["bytes"].tolist()) == [16 * 512, 1 << 20, 1 << 20]
    assert not np.isnan(rows["completed_s"]).any()


def test_a_later_request_for_the_sectors_of_one_that_was_handed_back_begins_anew(write: Write) -> None:
    """The first was merged to another after it came back, and was never issued from its own sector again."""
    text = line(0, "Q", "R", "8 + 8 [a]") + line(1, "D", "R", "8 + 8 [a]") + line(2, "R", "R", "8 + 8 [0]")
    text += line(3, "Q", "R", "0 + 8 [a]") + line(4, "D", "R", "0 + 16 [a]") + line(5, "C", "R", "0 + 16 [0]")
    text += line(50, "Q", "R", "8 + 8 [b]") + line(51, "D", "R", "8 + 8 [b]") + line(52, "C", "R", "8 + 8 [0]")
    trace = read_blkparse(write(text))
    rows, bios = device_rows(trace), trace.at(IoLayer.FILE_SYSTEM)
    assert (rows["completed_s"] - rows["issued_s"]).tolist() == [1.0, 1.0]
    assert bios["driver_s"].tolist() == [4.0, 4.0, 51.0]


def test_a_last_line_that_is_cut_off_is_not_counted(write: Write) -> None:
    text = line(0.0, "D", "R", "0 + 2048 [reader]") + line(0.1, "D", "R", "8 + 2048 [reader]")[:-11]
    trace = read_blkparse(write(text))
    assert len(trace.requests) == 1
    assert any("cut off" in each for each in trace.remarks)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"\x00\xff\xfe" * 50, "not UTF-8"),
        (b"\x1f\x8b" + b"garbage" * 9, "after line 0: not a trace: Unknown compression"),
        (gzip.compress(STACKED.encode(), mtime=0)[:60], "not a trace"),
        (STACKED + "8,0 this is none\n", "line 9: '8,0 this is none' is not an event"),
        (STACKED + line(2, "D", "W", "1 + 8 [" + "x" * 5000 + "]"), "line 9: .*up to 4096"),
        (STACKED + line(2, "K", "W", "1 + 8 [x]"), "line 9: unknown action 'K'"),
        (STACKED + line(2, "D", "W", f"{1 << 62} + 8 [x]"), "line 9: sector"),
        (STACKED + line(2, "D", "W", "1 + 8 [x]", device="8,99999999"), "line 9: minor number"),
        ("time,value\n1,2\n", "line 1: .*unknown format; allowed: the text of blkparse"),
        (line(0, "D", "R", "296960 1024 524288 0 (null)"), "unknown format"),  # of `blkparse -f`
        (STACKED + line(2, "D", "R", "296960 1024 524288 0 (null)"), "line 9: "),
        ("fio version 3 iolog\n", "unknown format"),
        ("Input file sda.blktrace.0 added\n", "has no event"),
        (line(0, "C", "R", "8 + 8 [0]") + line(1, "U", "N", "[reader] 1"), "has no event Q or D"),
    ],
)
def test_what_is_no_recording_is_an_error_that_names_file_and_line(
    write: Write, content: str | bytes, message: str
) -> None:
    path = write(content)
    with pytest.raises(ConfigError, match=message) as failed:
        read_recordings([path])
    assert str(path) in str(failed.value)


def test_recordings_that_count_the_same_requests_twice_do_not_go_together() -> None:
    with pytest.raises(ConfigError, match="allowed: one text of blkparse, or"):
        read_recordings([SAMPLES / "blkparse.txt.gz", SAMPLES / "blkparse.txt.gz"])


def test_the_command_measures_a_recording(capsys: pytest.CaptureFixture[str]) -> None:
    files = ["--input", str(SAMPLES / "blkparse.txt.gz")]
    assert run(["characterize", "--json", *files]) == 0
    found = json.loads(capsys.readouterr().out)
    # 74 + 6 requests of 1 MiB were submitted and split in half each, and 256 of 4 KiB of which 224 were merged.
    assert (found["source"], found["requests"], found["layers"]["device"]["requests"]) == ("file", 336, 192)
    assert found["read_share_bytes"] == pytest.approx(75776 / (75776 + 7168))
    assert (found["request_bytes"]["p99"], found["layers"]["device"]["p99"]) == (1 << 20, 512 << 10)
    assert run(["characterize", *files, "--seconds", "3"]) == 2
    assert "--input measures a recording" in capsys.readouterr().err
