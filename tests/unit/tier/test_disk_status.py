"""What a disk store in use tells people: true when it is told, rarely told, and never believed."""

import json
import os
from dataclasses import asdict, replace

import pytest
from tests.core_driver import Driver, prefix_of
from tests.memory_tier import MemoryTier
from tests.system import until

from kvtier.cli.main import run
from kvtier.errors import TierError
from kvtier.observe.metric_definitions import EVICTIONS
from kvtier.observe.metrics import Metrics
from kvtier.runtime.executor import COUNT_MAX, TierView
from kvtier.runtime.mover import FIGURES_EVERY_S, FiguresSampler
from kvtier.runtime.observers.transfer_metrics import Gauges
from kvtier.testing.tier_contract import empty_frame, object_name
from kvtier.tier.disk import view as disk_view
from kvtier.tier.disk.status import (
    STATUS_NAME,
    DiskStatus,
    read_status,
    write_status,
)
from kvtier.tier.disk.tier import DiskTier
from kvtier.tier.files.checked_json import pack_json
from kvtier.types import Figures

STATUS = DiskStatus(
    time_s=1000.0,
    pid=1,
    is_open=True,
    is_up=None,
    faults=0,
    last_fault="",
    last_fault_s=None,
    objects=3,
    used_bytes=1 << 20,
    capacity_bytes=4 << 20,
    limit_bytes=4 << 20,
    free_bytes=1 << 30,
    reserve_bytes=0,
    frame_bytes=100,
    upkeep_bytes=50,
    avoided_bytes=0,
    write_bytes_per_day=0,
    direct_io=False,
)
FRAME = empty_frame(8192)


@pytest.fixture(autouse=True)
def _the_keeper_tells_once(monkeypatch):
    monkeypatch.setattr("kvtier.tier.disk.tier.STATUS_INTERVAL_S", 3600.0)


def opened(root, **settings):
    tier = DiskTier(root, capacity_bytes=4 << 20, segment_bytes=1 << 20, sync_interval_s=3600.0, **settings)
    until(lambda: (status := read_status(root)) and status.is_open, "it tells nothing when it is opened")
    return tier


def told_now(tier):
    """Its status as of now."""
    tier._write_status()
    return read_status(tier.root)


def test_it_tells_room_wear_faults_and_what_the_session_says(tmp_path, monkeypatch):
    tier = opened(tmp_path, write_bytes_per_day=1 << 40, reserve_bytes=1)
    assert tier.write(object_name(1), FRAME)
    status = told_now(tier)
    assert (status.is_open, status.is_up, status.faults, status.last_fault_s) == (True, None, 0, None)
    assert (status.objects, status.used_bytes, status.capacity_bytes) == (1, tier.used_bytes, 4 << 20)
    assert (status.frame_bytes, status.write_bytes_per_day, status.reserve_bytes) == (8192, 1 << 40, 1)
    assert status.free_bytes > 0
    tier.sync()
    assert told_now(tier).amplification > 1.0

    tier.note_use(is_up=False)
    monkeypatch.setattr("kvtier.tier.disk.segment.os.preadv", failing)
    with pytest.raises(TierError, match="planned"):
        tier.read(object_name(1), empty_frame(8192))
    monkeypatch.undo()
    status = told_now(tier)
    assert (status.is_up, status.faults) == (False, 1)
    assert "planned" in status.last_fault
    assert status.last_fault_s <= status.time_s
    tier.close()
    assert not read_status(tmp_path).is_open


def failing(*_given):
    raise OSError("planned")


def test_the_file_is_whole_or_not_there_and_read_back_as_written(tmp_path):
    write_status(tmp_path, STATUS)
    assert read_status(tmp_path) == STATUS
    loud = replace(STATUS, is_up=True, last_fault="EIO " * 60, last_fault_s=3.0, faults=9)
    write_status(tmp_path, loud)
    assert read_status(tmp_path) == loud
    assert [path.name for path in tmp_path.iterdir()] == [STATUS_NAME]


def checked(**changes):
    return pack_json({**asdict(STATUS), **changes})


WRONG = {
    "nothing": b"",
    "half": checked()[:-20],
    "without a checksum": json.dumps(asdict(STATUS)).encode(),
    "a list": b"[1]",
    "deep": b"[" * 4096,
    "long": checked(about="x" * 5000),
    "lacking": pack_json({name: value for name, value in asdict(STATUS).items() if name != "faults"}),
    "text": checked(faults="1"),
    "a switch for a number": checked(faults=True),
    "negative": checked(free_bytes=-1),
    "no number": checked(time_s=float("nan")),
    "a time out of mind": checked(last_fault_s=1e300),
    "no text": b"\xff\xfe\x00",
}


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: path.symlink_to("/dev/zero")])
def test_something_else_in_its_place_holds_up_nothing_and_is_replaced(tmp_path, make):
    make(tmp_path / STATUS_NAME)
    assert read_status(tmp_path) is None
    write_status(tmp_path, STATUS)
    assert read_status(tmp_path) == STATUS


@pytest.mark.parametrize("content", WRONG.values(), ids=WRONG.keys())
def test_what_makes_no_sense_is_nothing(tmp_path, content):
    (tmp_path / STATUS_NAME).write_bytes(content)
    assert read_status(tmp_path) is None


def test_a_store_with_a_status_that_makes_no_sense_is_as_good_as_any(tmp_path, capsys):
    opened(tmp_path).close()
    (tmp_path / STATUS_NAME).write_bytes(WRONG["half"])
    assert run(["inspect", "health", str(tmp_path)]) == 0
    assert "no status was ever written" in capsys.readouterr().out
    tier = opened(tmp_path)
    assert tier.write(object_name(1), FRAME), "nobody believes it"
    tier.close()


def test_a_status_that_cannot_be_written_is_no_fault(tmp_path, monkeypatch):
    tier = opened(tmp_path)
    monkeypatch.setattr("kvtier.tier.disk.tier.write_status", failing)
    tier._write_status()
    assert tier.write(object_name(1), FRAME)
    assert tier._faults == 0
    tier.close()


def test_nothing_is_told_where_another_disk_lies_at_the_path(tmp_path):
    root, elsewhere = tmp_path / "store", tmp_path / "taken away"
    tier = opened(root)
    root.rename(elsewhere)
    root.mkdir()
    told_now(tier)
    assert list(root.iterdir()) == []
    tier.close()


def test_a_session_says_whether_it_uses_the_tier(tmp_path):
    tier, core = opened(tmp_path), Driver(failures=1)
    view = TierView()
    gauges, sampler = Gauges(Metrics(), core.cache, [core.layout], [{"disk": view}]), FiguresSampler(tier, view)
    gauges.each_second()
    sampler.sample(0.0)
    assert told_now(tier).is_up is True
    core.lookup("r", prefix_of("a"))
    core.tell(next(iter(core.probes.values())), None)
    gauges.each_second()
    sampler.sample(FIGURES_EVERY_S)
    assert told_now(tier).is_up is False
    tier.close()


def test_figures_of_a_tier_that_make_no_sense_cost_no_session():
    """The gauges are refreshed under the session's lock, where an error ends the session."""
    core = Driver(tiers=("odd",))
    figures = [
        Figures(10, 20, 5, {"frames": 9}),
        Figures(10, 20, 1, {"frames": 2}),  # a tier that was opened anew
        Figures(-1, 10**400, 10**400, {"frames": 10**400}),
        Figures(None, None, None, {}),
        "no figures",
    ]

    class Odd(MemoryTier):
        def figures(self):
            return figures[number]

    view, metrics = TierView(), Metrics()
    gauges = Gauges(metrics, core.cache, [core.layout], [{"odd": view}])
    sampler = FiguresSampler(Odd("odd", capacity_bytes=1), view)
    for number in range(len(figures)):
        sampler.sample(number * FIGURES_EVERY_S)
        gauges.each_second()
    assert metrics.get(EVICTIONS, place="odd") == float(COUNT_MAX + 4)


def health(capsys, root):
    code = run(["inspect", "health", str(root), "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_inspect_tells_how_a_store_in_use_fares(tmp_path, capsys, monkeypatch):
    tier = opened(tmp_path)
    tier.note_use(is_up=True)
    tier.write(object_name(1), FRAME)
    told_now(tier)
    code, result = health(capsys, tmp_path)
    assert (code, result["state"], result["amplification"], result["status"]["objects"]) == (0, "in use", 1.0, 1)
    tier._effective_cap.record_full(3 << 20, OSError(28, "No space left on device"))
    told_now(tier)
    assert run(["inspect", "health", str(tmp_path)]) == 0
    assert "of 4 MiB; the cap is 3 MiB while the file system has no room" in " ".join(capsys.readouterr().out.split())
    tier.note_use(is_up=False)
    told_now(tier)
    assert health(capsys, tmp_path)[0] == 1
    assert health(capsys, tmp_path)[1]["state"] == "backed off"
    tier.note_use(is_up=True)
    told_now(tier)
    monkeypatch.setattr("kvtier.tier.disk.view.time", lambda: read_status(tmp_path).time_s + disk_view.SILENT_S + 1)
    code, result = health(capsys, tmp_path)
    assert (code, result["state"]) == (1, "silent")
    monkeypatch.undo()
    tier.close()
    code, result = health(capsys, tmp_path)
    assert (code, result["state"], result["status"]["is_open"]) == (0, "not open", False)
    assert run(["inspect", "health", str(tmp_path / "segments")]) == 2


def test_purge_takes_the_status_with_it(tmp_path):
    opened(tmp_path / "store").close()
    assert (tmp_path / "store" / STATUS_NAME).exists()
    assert run(["inspect", "purge", str(tmp_path / "store"), "--yes"]) == 0
    assert list((tmp_path / "store").iterdir()) == []
