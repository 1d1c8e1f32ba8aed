"""Measures of I/O are exact on requests of known shape, and the kernel's pages are read as the kernel wrote them."""

import json
from dataclasses import asdict

import numpy as np
import pytest
from tests.tools.charts.test_report import check_page

from kvtier.errors import BadCallError
from kvtier.tools.characterize.block_devices import Spans, within
from kvtier.tools.characterize.block_events import SEEN, _carrier, _maker, _pair
from kvtier.tools.characterize.calls import joined
from kvtier.tools.characterize.io_trace import (
    REQUEST,
    IoKind,
    IoLayer,
    IoTrace,
    by_time,
    covering,
    kinds_of,
    pair,
    rows_of,
    transfers,
)
from kvtier.tools.characterize.measures import Steps, is_sequential, measure
from kvtier.tools.characterize.report import io_report, notes
from kvtier.tools.characterize.tracefs import PAGE_BYTES, PageEvents, event_format
from kvtier.tools.charts.chart import Rule

MIB = 1 << 20
NO_GAPS = np.zeros((0, 2), np.uint64)
TICK = 1 / 128  # exact as a float: a request ends just when the next is issued


def requests(count, *, size=MIB, took=TICK, every=TICK, stride=None, layer=IoLayer.DEVICE, **others):
    """`count` requests of `size` bytes, one each `every` seconds, that take `took`; addresses follow at `stride`."""
    number = np.arange(count)
    columns = {"place": 1, "process": 7} | others
    return rows_of(
        count,
        issued_s=number * every,
        completed_s=number * every + took,
        position=number * (size if stride is None else stride),
        bytes=size,
        layer=layer,
        **columns,
    )


def trace(*parts, seconds=1.0, **others):
    return IoTrace(
        "block", by_time(*parts), seconds, processes={7: "engine", 8: "other"}, places={1: "nvme0n1"}, **others
    )


# -- measures --------------------------------------------------------------------------------------------------------


def test_a_steady_sequential_reader_has_exactly_its_depth_rate_and_sizes():
    it = measure(trace(requests(128)))
    assert (it.requests, it.read_share_bytes, it.read_share_requests) == (128, 1.0, 1.0)
    assert it.request_bytes == {"p50": MIB, "p99": MIB, "share_over_1mb": 1.0, "share_of_bytes_over_1mb": 1.0}
    assert it.queue_depth == pytest.approx({"mean": 1.0, "peak": 1.0, "busy_mean": 1.0, "submitted": 1.0})
    assert it.gb_per_s["mean"] == pytest.approx(128 * MIB / 1e9)
    assert it.peak_gb_per_s == pytest.approx(dict.fromkeys(("1ms", "100ms", "1s"), 128 * MIB / 1e9), rel=1e-6)
    assert it.burst_factor == pytest.approx(1.0)
    assert it.latency_us == pytest.approx(dict.fromkeys(("p50", "p99", "p999", "max"), TICK * 1e6))
    assert it.sequential_share == {"device": 127 / 128, "per_process": 127 / 128}  # all but the first
    assert (it.bytes["read_again"], it.lost_events, it.unfinished) == (0, 0, 0)


def test_a_burst_has_the_depth_of_its_overlap_and_twice_the_mean():
    """Eight at once, for half of the second."""
    it = measure(trace(*(requests(64) for _ in range(8))))
    assert it.queue_depth == pytest.approx({"mean": 4.0, "peak": 8.0, "busy_mean": 8.0, "submitted": 4.0})
    assert it.busy_share == pytest.approx(0.5)
    assert it.burst_factor == pytest.approx(2.0)
    assert it.over_time.queue_depth[:60] == pytest.approx([8.0] * 60)
    assert it.over_time.queue_depth[60:] == pytest.approx([0.0] * 60)
    assert sum(it.over_time.read_gb_per_s) * it.over_time.interval_s == pytest.approx(512 * MIB / 1e9)


def test_what_waits_above_the_driver_is_in_the_submitted_depth_alone():
    bios = requests(64, took=4 * TICK, layer=IoLayer.FILE_SYSTEM)
    it = measure(trace(requests(64), bios))
    assert (it.queue_depth["peak"], it.queue_depth["submitted"]) == (1, 2.0)
    assert it.submitted_depth == pytest.approx({"mean": 2.0, "peak": 4.0, "busy_mean": 4 * 64 / 67})
    assert measure(trace(bios)).submitted_depth is None


def test_the_mix_by_bytes_differs_from_the_mix_by_requests():
    it = measure(trace(requests(90, size=4096), requests(10, size=10 * MIB, is_write=True)))
    assert it.read_share_requests == 0.9
    assert it.read_share_bytes == pytest.approx(90 * 4096 / (90 * 4096 + 100 * MIB))
    assert (it.request_bytes["p50"], it.request_bytes["p99"]) == (4096, 10 * MIB)
    assert it.bytes == {"read": 90 * 4096, "written": 100 * MIB, "read_again": 0, "written_again": 0}


def test_flushes_and_discards_are_counted_and_move_nothing():
    flushes = requests(5, size=0, kind=IoKind.FLUSH, is_write=True)
    discards = requests(3, size=1 << 30, kind=IoKind.DISCARD, is_write=True)
    it = measure(trace(requests(10), flushes, discards))
    assert (it.requests, it.flushes, it.discards, it.bytes["written"]) == (10, 5, 3, 0)


def test_interleaved_readers_are_sequential_each_and_random_together():
    """With N = 1 the device sees one reader after the other; with N = 8 it finds each again."""
    rows = np.concatenate([requests(200), requests(200)])[np.arange(400).reshape(2, 200).T.ravel()]
    rows["process"][1::2] = 8
    rows["position"][1::2] += np.uint64(1 << 40)
    assert is_sequential(rows, 1, per_process=False).sum() == 0
    assert is_sequential(rows, 8, per_process=False).sum() == 398
    assert is_sequential(rows, 1, per_process=True).sum() == 398


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"position": 64 << 10}, True),
        ({"position": (64 << 10) + 512}, False),
        ({"position": -512}, False),
        ({"is_write": True}, False),
        ({"place": 2}, False),
    ],
)
def test_the_definition_of_sequential_at_its_edges(change, expected):
    rows = requests(2)
    for name, value in change.items():
        rows[name][1] = int(rows[name][1]) + value if name == "position" else value
    assert is_sequential(rows, per_process=False).tolist() == [False, expected]


def test_bytes_read_again_are_exact_where_requests_overlap_in_part():
    rows = requests(5, size=100)
    rows["position"] = [0, 50, 1000, 1010, 1030]
    rows["bytes"] = [100, 100, 50, 10, 10]  # 50 twice, and two of 10 within 50
    assert measure(trace(rows)).bytes["read_again"] == 70
    rows["place"] = [1, 2, 1, 2, 3]
    assert measure(trace(rows)).bytes["read_again"] == 0


def test_requests_of_others_count_for_the_device_alone():
    own, others = requests(10, is_write=True), requests(30, process=8, is_write=True)
    writeback = requests(5, process=0, is_write=True)
    calls = requests(10, size=MIB // 2, layer=IoLayer.APPLICATION, is_write=True)
    it = measure(trace(own, others, writeback, calls, chosen=frozenset({7})))
    assert (it.requests, it.whole_device["requests"]) == (10, 45)
    assert it.not_attributed == {"requests": 5, "written_bytes": 5 * MIB}
    assert it.write_amplification == pytest.approx(45 / 5)
    assert list(it.layers) == ["application", "device"]
    assert any("kernel threads" in note for note in notes(it))


def test_write_amplification_is_unknown_where_calls_have_no_sizes():
    calls = requests(10, layer=IoLayer.APPLICATION, is_write=True)
    rows = requests(10, is_write=True)
    assert measure(trace(rows, calls)).write_amplification == 1.0
    assert measure(trace(rows, calls, counts={"aio_requests": 3})).write_amplification is None


def test_a_request_without_completion_is_said_and_left_out():
    rows = requests(10)
    rows["completed_s"][3] = np.nan
    it = measure(trace(rows))
    assert it.unfinished == 1
    assert it.queue_depth["mean"] == pytest.approx(9 * TICK)
    assert it.gb_per_s["mean"] == pytest.approx(10 * MIB / 1e9)
    assert any("no completion" in note for note in notes(it))


def test_no_requests_are_an_answer_too():
    it = measure(trace(np.zeros(0, REQUEST), chosen=frozenset({7})))
    assert (it.requests, it.read_share_bytes, it.sequential_share) == (0, None, {"device": None, "per_process": None})
    shown = io_report(trace(np.zeros(0, REQUEST)), it)
    assert shown.answer.startswith("No request")
    check_page(shown.html())


def test_rows_of_another_type_are_refused():
    with pytest.raises(BadCallError, match="dtype"):
        IoTrace("block", np.zeros(3), 1.0)


# -- report ----------------------------------------------------------------------------------------------------------


def test_json_has_the_keys_of_the_contract_and_the_report_is_whole():
    pytest.importorskip("matplotlib")
    seen = trace(requests(100), requests(20, is_write=True, process=8), lost_events=3, remarks=["<b>said</b>"])
    it = measure(seen)
    made = json.loads(json.dumps(asdict(it)))
    expected = {
        "read_share_bytes", "read_share_requests", "sequential_share", "request_bytes", "queue_depth", "gb_per_s",
        "latency_us", "seconds", "requests", "source",
    }  # fmt: skip
    assert expected <= set(made)
    assert {"device", "per_process"} == set(made["sequential_share"])
    assert {"p50", "p99", "share_over_1mb"} <= set(made["request_bytes"])
    assert {"mean", "peak"} <= set(made["queue_depth"]) & set(made["gb_per_s"])
    assert "submitted" in made["queue_depth"]
    assert {"p50", "p99"} <= set(made["latency_us"])
    page = io_report(seen, it).html()
    check_page(page)
    assert page.count("<svg") == 6
    assert "3 events were lost" in page
    assert "&lt;b&gt;said" in page


def test_metadata_are_no_part_of_the_sizes_and_large_bytes_are_in_the_headline():
    small = requests(300, size=4096, kind=IoKind.METADATA, is_write=True)
    seen = trace(requests(99), small, requests(1, size=2 * MIB))
    it = measure(seen)
    assert (it.requests, it.metadata) == (400, 300)
    assert it.request_bytes["p50"] == it.layers["device"].p50 == MIB
    answer = io_report(seen, it).answer
    assert "median request 1.05 MB, 100.0% of the bytes in requests over 1 MB" in answer
    half = trace(requests(2, size=MIB // 2), requests(1))
    assert "median request 524 kB, 50.0% of the bytes in requests over 1 MB" in io_report(half, measure(half)).answer
    alone = measure(trace(small))  # a size of nothing would be 0
    assert (alone.request_bytes["p50"], alone.metadata) == (4096, 300)


def test_the_picture_of_addresses_shows_where_allocation_groups_begin():
    facts = {"nvme0n1": {"allocation_groups": [{"count": 32, "bytes": 10 * MIB, "begin": MIB}]}}
    seen = trace(requests(64), device_facts=facts)
    charts = io_report(seen, measure(seen)).sections[0].charts()
    rules = [it.at for it in charts["addresses"].marks if isinstance(it, Rule)]
    assert rules == [(MIB + group * 10 * MIB) / 1e9 for group in range(8)]  # those that are reached, and the end
    assert "allocation groups" in charts["addresses"].caption
    plain = trace(requests(64), device_facts={"nvme0n1": {}})
    charts = io_report(plain, measure(plain)).sections[0].charts()
    assert not any(isinstance(it, Rule) for it in charts["addresses"].marks)


def test_requests_within_parts_of_a_disk():
    begin, size = np.array([10, 12, 40], np.uint64), np.array([10, 2, 5], np.uint64)
    spans = Spans(begin, np.maximum.accumulate(begin + size))
    places = np.array([0, 10, 13, 15, 19, 20, 39, 40, 44, 45], np.uint64)
    assert spans.hold(places).tolist() == [0, 1, 1, 1, 1, 0, 0, 1, 1, 0]
    nothing = Spans(*np.zeros((2, 0), np.uint64))
    assert not nothing.hold(places).any()
    rows = by_time(requests(3, stride=10), requests(2, layer=IoLayer.APPLICATION))
    assert len(within(rows, [nothing])) == 2
    assert within(rows, [spans, nothing])["position"].tolist() == [0, 10, MIB]


# -- joining events --------------------------------------------------------------------------------------------------


def test_pairs_by_key_and_time():
    found = pair(np.array([1, 2, 5, 6]), np.array([9, 4, 9, 8]), np.array([3, 4, 7, 0]), np.array([9, 4, 9, 8]))
    assert found.tolist() == [0, 1, 2, -1]
    same = np.array([5])
    assert pair(same, same, same, same).tolist() == [0]  # faster than the clock's step


def test_a_bio_that_was_advanced_is_found_by_its_end():
    queued, ended = np.zeros(1, SEEN), np.zeros(1, SEEN)
    queued["sector"], queued["bytes"] = 800, 4096
    ended["sector"], ended["bytes"], ended["time_ns"] = 808, 0, 9
    assert _pair(queued, ended, NO_GAPS, is_end=True).tolist() == [0]
    assert _pair(queued, ended, NO_GAPS).tolist() == [-1]


@pytest.mark.parametrize(
    ("gaps", "found"),
    [([(4, 5)], -1), ([(0, 1)], -1), ([(8, 20)], -1), ([(9, 20)], 0), ([(0, 0)], 0), ([(20, 30), (0, 0), (3, 4)], -1)],
)
def test_a_gap_of_lost_events_between_or_across_parts_a_pair(gaps, found):
    issued, ended = np.zeros(1, SEEN), np.zeros(1, SEEN)
    ended["time_ns"] = 9
    assert _pair(issued, ended, np.array(gaps, np.uint64)).tolist() == [found]


def test_nested_pairs_keep_the_sum_and_lost_completions_take_none_of_another():
    times, ends, key = np.array([1, 2]), np.array([5, 9]), np.array([3, 3])
    assert sorted(pair(times, key, ends, key).tolist()) == [0, 1]
    assert pair(times, key, ends, key, nested_max=1).tolist() == [-1, 0]


def test_the_newest_interval_that_covers_is_found_among_many():
    """The same object is read a thousand times; its later parts begin where no interval begins."""
    rounds = np.arange(1000)
    found = covering(np.zeros(1000, int), np.full(1000, 64), rounds * 10, np.full(1000, 40), rounds * 10 + 5)
    assert found.tolist() == rounds.tolist()
    assert covering(np.array([0]), np.array([64]), np.array([10]), np.array([40, 64, 5]), np.array([9, 20, 20])).tolist() == [-1, -1, 0]  # fmt: skip  # noqa: E501


def test_an_older_interval_that_begins_nearer_does_not_hide_the_newest():
    """A large read, and before or after it small ones and a write of the same sectors."""

    def seen(*rows):
        return np.array([(time_us * 1000, sector, size, 1, process, process, is_write, 0)
                         for time_us, sector, size, process, is_write in rows], SEEN)  # fmt: skip

    bios = seen((10, 1024, 4096, 7, False), (20, 1024, MIB, 9, True), (30, 0, MIB, 8, False))
    halves = seen((31, 0, MIB // 2, 0, False), (32, 1024, MIB // 2, 0, False), (90, 2040, 4096, 0, False))
    assert _maker(bios, halves, 0).tolist() == [2, 2, 2]
    assert _carrier(bios, halves, 0).tolist() == [1, -1, 1]  # not the small read that is issued much later
    generator = np.random.default_rng(1)
    start, when = generator.integers(0, 2000, 3000), generator.permutation(3000)
    end = start + generator.choice([1, 8, 100], 3000)
    wanted = generator.integers(0, 2200, 500)
    found = covering(start, end, when, wanted, np.full(500, 2000))
    fits = (start <= wanted[:, None]) & (end > wanted[:, None]) & (when <= 2000)
    newest = np.where(fits, when, -1)
    assert found.tolist() == np.where(fits.any(axis=1), newest.argmax(axis=1), -1).tolist()


def test_bios_of_one_call_that_follow_each_other_are_one_request():
    """Thread 5 reads 3 MiB in one call, then 1 MiB in each of two; thread 6 queues between."""
    bios = requests(6, every=1.0, took=0.5, layer=IoLayer.FILE_SYSTEM)
    bios["position"][2] = 100 * MIB
    bios["position"][3] = 2 * MIB
    thread = np.array([5, 5, 6, 5, 5, 5])
    bound_s, owner = np.array([0.0, 3.5, 3.6, 4.0, 5.0]), np.array([5, 5, 5, 5, 5])
    whole = by_time(joined(bios, thread, bound_s, owner, np.array([True, False, True, True, True])))
    assert whole["bytes"].tolist() == [3 * MIB, MIB, MIB, MIB]
    assert (whole["issued_s"][0], whole["completed_s"][0]) == (0.0, 3.5)
    assert len(joined(bios, thread, bound_s, owner, np.zeros(5, bool))) == 6
    assert len(joined(bios, thread, bound_s[:0], owner[:0], np.zeros(0, bool))) == 6


def test_a_recording_of_one_moment_has_sizes_and_no_rates():
    it = measure(trace(requests(3, every=0.0, took=0.0), seconds=0.0))
    assert (it.requests, it.bytes["read"], it.gb_per_s, it.burst_factor) == (
        3, 3 * MIB, {"mean": 0.0, "peak": 0.0, "busy_mean": 0.0}, None,
    )  # fmt: skip
    assert any("have the same time" in note for note in notes(it))
    json.dumps(asdict(it), allow_nan=False)


def test_steps_are_exact_between_any_edges():
    steps = Steps(np.array([0.0, 1.0]), np.array([2.0, 3.0]), np.array([1.0, 1.0]))
    assert (steps.peak, steps.total, steps.busy_s) == (2.0, 4.0, 3.0)
    assert steps.means(np.array([0.0, 1.0, 2.0, 2.5, 4.0])).tolist() == pytest.approx([1.0, 2.0, 1.0, 1 / 3])
    touching = Steps(np.array([0.0, 1.0]), np.array([1.0, 2.0]), np.array([1.0, 1.0]))
    assert touching.peak == 1.0


def test_letters_of_requests():
    letters = ["R", "RA", "RM", "W", "WS", "WSM", "FWFS", "WFS", "D", "DE", "F", "FF", "N", "ZAS", "FWM"]
    is_write, kind = kinds_of(np.array(letters, "S10"))
    data, metadata, flush, discard = IoKind
    expected = [data, data, metadata, data, data, metadata, data, data, discard, discard, flush, flush, flush, data, metadata]  # fmt: skip  # noqa: E501
    assert kind.tolist() == [int(it) for it in expected]
    assert [letter for letter, writes in zip(letters, is_write, strict=True) if not writes] == ["R", "RA", "RM"]
    assert len(transfers(requests(2, size=0))) == 0


# -- the kernel's pages ----------------------------------------------------------------------------------------------

FORMAT = """name: block_rq_issue
ID: 1234
format:
\tfield:unsigned short common_type;\toffset:0;\tsize:2;\tsigned:0;
\tfield:int common_pid;\toffset:4;\tsize:4;\tsigned:1;

\tfield:sector_t sector;\toffset:8;\tsize:8;\tsigned:0;
\tfield:char rwbs[10];\toffset:16;\tsize:10;\tsigned:0;
"""
WORD = 4


class Page:
    """A page as the kernel writes it."""

    def __init__(self, time_ns):
        self.words = [time_ns & 0xFFFF_FFFF, time_ns >> 32, 0, 0]

    def event(self, delta, number, sector, *, is_long=False):
        data = np.zeros(28, np.uint8)
        data[:2] = np.array([number], "<u2").view(np.uint8)
        data[8:16] = np.array([sector], "<u8").view(np.uint8)
        data[16:18] = list(b"WS")
        head = [delta << 5, len(data) + WORD] if is_long else [delta << 5 | len(data) // WORD]
        self.words += [*head, *data.view("<u4").tolist()]
        return self

    def time_extend(self, delta):
        self.words += [(delta & 0x7FF_FFFF) << 5 | 30, delta >> 27]
        return self

    def time_stamp(self, time_ns):
        self.words += [(time_ns & 0x7FF_FFFF) << 5 | 31, time_ns >> 27]
        return self

    def discarded(self, delta, words):
        self.words += [delta << 5 | 29, (words + 1) * WORD, *[0xDEAD_BEEF] * words]
        return self

    def bytes(self):
        self.words[2] = (len(self.words) - 4) * WORD | 1 << 31  # the flag that events were missed before
        filled = np.zeros(PAGE_BYTES // WORD, "<u4")
        filled[: len(self.words)] = self.words
        return filled.view(np.uint8)


def test_pages_are_walked_event_by_event():
    number, layout = event_format(FORMAT, ("sector", "rwbs"))
    one = Page(1_000).event(5, 1234, 80).event(5, 99, 1).discarded(10, 3).event(7, 1234, 81)
    two = Page(1 << 40).time_extend(1 << 30).event(1, 1234, 82, is_long=True).time_stamp(1 << 45).event(2, 1234, 83)
    events = PageEvents(np.concatenate([one.bytes(), Page(9).bytes(), two.bytes(), np.zeros(PAGE_BYTES, np.uint8)]))
    time_ns, fields = events.of(number, layout)
    order = np.argsort(fields["sector"])
    assert fields["sector"][order].tolist() == [80, 81, 82, 83]
    assert time_ns[order].tolist() == [1_005, 1_027, (1 << 40) + (1 << 30) + 1, (1 << 45) + 2]
    assert set(fields["rwbs"].tolist()) == {b"WS"}
    assert len(events.of(99, layout)[0]) == 1
    assert len(events.of(98, layout)[0]) == 0


def test_a_field_that_the_kernel_lacks_is_named():
    with pytest.raises(ValueError, match="no field nr_sector"):
        event_format(FORMAT, ("sector", "nr_sector"))


def test_pages_of_noise_end():
    noise = np.random.default_rng(3).integers(0, 256, 64 * PAGE_BYTES, np.uint8)
    PageEvents(noise).of(1234, event_format(FORMAT, ("sector",))[1])
