"""Captures of the kernel's block events agree with fio's own account, count what they lose and leave nothing behind."""

import itertools
import json
import os
import shutil
import signal
import stat
import struct
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvtier.cli.main import run as kvtier
from kvtier.errors import ConfigError
from kvtier.tools.characterize import block_devices, tracefs
from kvtier.tools.characterize.block_devices import SYSFS, BlockDevice, allocation_groups, disks, find_device, spans_of
from kvtier.tools.characterize.calls import _Files
from kvtier.tools.characterize.capture import CaptureSettings, _Run, run
from kvtier.tools.characterize.io_trace import IoLayer, transfers
from kvtier.tools.characterize.measures import Steps, measure
from kvtier.tools.characterize.process_tree import ProcessTree
from kvtier.tools.machine_facts import Mount

MIB = 1 << 20


@pytest.fixture
def instances():
    """The folder of tracing instances. It stays mounted: an open descriptor refuses other processes' umount."""
    if os.geteuid():
        pytest.skip("needs root: tracefs is closed to others")
    with ExitStack() as stack:
        for _ in range(100):  # another process may unmount it before the descriptor is open
            try:
                folder = stack.enter_context(tracefs.mounted()) / "instances"
                descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            except ConfigError as error:
                pytest.skip(str(error))
            except FileNotFoundError:
                continue
            stack.callback(os.close, descriptor)
            break
        yield folder


@pytest.fixture
def drive(tmp_path, instances):
    """A folder on a disk, without instances left behind at the end."""
    try:
        find_device(str(tmp_path))
    except ConfigError as error:
        pytest.skip(str(error))
    before = own_instances(instances)
    yield tmp_path
    assert own_instances(instances) == before


def own_instances(instances):
    return {it.name for it in instances.glob(f"kvtier-{os.getpid()}-*")}


def fio(folder, **options):
    """The command of one job, whose account goes to `account(folder)`."""
    if shutil.which("fio") is None:
        pytest.skip("fio is not installed")
    settings = {
        "name": "job", "filename": folder / "data", "size": "64M", "bs": "128k", "direct": 1, "ioengine": "libaio",
        "output-format": "json", "output": folder / "account.json",
    } | options  # fmt: skip
    return ["fio", *(f"--{name}={value}" for name, value in settings.items())]


def account(folder):
    return json.loads((folder / "account.json").read_text())["jobs"][0]


def of_file(trace, folder):
    """The requests of the data file alone: fio also loads its program."""
    seen = subprocess.run(["filefrag", "-v", "-b512", folder / "data"], capture_output=True, text=True, timeout=10, check=False)  # fmt: skip  # noqa: E501
    if seen.returncode:
        pytest.skip(f"needs filefrag: {seen.stderr}")
    ranges = [line.split(":")[2].strip().split("..") for line in seen.stdout.splitlines() if line.strip()[:1].isdigit()]
    rows = transfers(trace.of_chosen(trace.at(IoLayer.DEVICE)))
    inside = np.zeros(len(rows), bool)
    for first, last in ranges:
        sector = rows["position"] // 512
        inside |= (sector >= int(first)) & (sector <= int(last))
    return rows[inside]


def prepare(folder):
    data = folder / "data"
    data.write_bytes(os.urandom(MIB) * 64)
    descriptor = os.open(data, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


@pytest.mark.parametrize(("way", "depth"), [("read", 4), ("randread", 1), ("randwrite", 2)])
def test_a_capture_agrees_with_fios_account(drive, way, depth):
    """Bytes exactly, requests but for splits; latency and depth within what the application adds to the device's."""
    prepare(drive)
    load = fio(drive, rw=way, iodepth=depth, loops=4, norandommap=1)
    captured = run(CaptureSettings(device=str(drive), command=load, output=2))
    trace, said = captured.trace, account(drive)["write" if "write" in way else "read"]
    assert (captured.exit_code, trace.lost_events) == (0, 0)
    rows = of_file(trace, drive)
    assert int(rows["bytes"].sum()) == said["io_bytes"] == 256 * MIB
    assert (rows["is_write"] == ("write" in way)).all()
    parts = len(rows) / said["total_ios"]
    assert 0.7 < parts < 1.5  # neighbours may be merged, and a request is split at the end of an extent
    took = rows["completed_s"] - rows["issued_s"]
    assert not np.isnan(took).any()
    # From bio to completion is part of what fio waits for: most of its shortest wait, in which nothing else ran.
    asked_s = {name: ns / 1e9 for name, ns in said["lat_ns"].items()}
    bios = transfers(trace.of_chosen(trace.at(IoLayer.FILE_SYSTEM)))
    bios = bios[bios["bytes"] >= 64 << 10]
    bio_s = bios["completed_s"] - bios["issued_s"]
    assert bio_s.min() >= asked_s["min"] * 0.3
    assert bio_s.mean() <= asked_s["mean"] * 1.01
    assert np.median(took) <= np.median(bio_s) * 1.01  # the device's part is shorter
    trace.requests = rows
    it = measure(trace)
    assert it.queue_depth["peak"] <= depth * 1.5
    assert it.queue_depth["busy_mean"] >= (depth if way == "read" else 1) * 0.5
    sequential = it.sequential_share["per_process"]
    assert sequential > 0.95 if way == "read" else sequential < 0.25


@pytest.mark.parametrize("engine", ["libaio", "io_uring"])
def test_requests_count_once_and_waiting_ones_are_in_the_depth(drive, engine):
    """4 MiB from small pages: four bios each, which the block layer splits and merges, and the driver hands back."""
    prepare(drive)
    load = fio(drive, rw="randread", bs="4M", iodepth=16, loops=8, ioengine=engine, iomem=f"mmap:{drive}/memory")
    trace = run(CaptureSettings(device=str(drive), command=load, output=2)).trace
    said = account(drive)["read"]
    it = measure(trace)
    bios = transfers(trace.of_chosen(trace.at(IoLayer.FILE_SYSTEM)))
    own = bios[bios["bytes"] == 4 * MIB]
    assert 0.9 * said["total_ios"] <= len(own) <= said["total_ios"]  # the file may have gaps
    # The rest reads fio's program, which may be in memory or not.
    assert it.requests - np.count_nonzero(bios["bytes"] < MIB // 4) < 1.5 * said["total_ios"]
    assert it.submitted_depth is not None
    deepest = max(int(level) for level, percent in account(drive)["iodepth_level"].items() if percent)
    assert deepest / 2 < Steps.depth(own).peak <= deepest == 16
    assert it.submitted_depth["peak"] >= Steps.depth(own).peak
    assert it.submitted_depth["busy_mean"] > it.queue_depth["busy_mean"] * 0.99
    asked = transfers(trace.of_chosen(trace.at(IoLayer.APPLICATION)))
    seen = np.count_nonzero(asked["bytes"] == 4 * MIB) if engine == "io_uring" else it.counts["aio_requests"]
    assert seen == said["total_ios"] == 128


def test_programs_with_other_sizes_on_the_same_sectors_keep_their_own_requests(drive):
    """Large reads, then small ones in the same file: each program has its bytes, and no bio waits for the other's."""
    prepare(drive)
    large, small = (
        " ".join(map(str, fio(drive, output="/dev/null", ioengine="psync", **options)))
        for options in ({"rw": "read", "bs": "4M"}, {"rw": "randread", "bs": "4k", "io_size": "8M", "norandommap": 1})
    )
    rest = " ".join(
        map(str, fio(drive, output="/dev/null", ioengine="psync", rw="read", bs="4M", offset="2M", size="60M"))
    )
    command = ["sh", "-c", f"{large}; sleep 0.5; {small}; sleep 0.5; {rest}"]
    trace = run(CaptureSettings(device=str(drive), command=command, output=2)).trace
    rows = of_file(trace, drive)
    moved = sorted(int(rows["bytes"][rows["process"] == it].sum()) for it in np.unique(rows["process"]))
    assert moved == [8 * MIB, 60 * MIB, 64 * MIB]
    bios = transfers(trace.of_chosen(trace.at(IoLayer.FILE_SYSTEM)))
    for program in np.unique(rows["process"]):
        start = rows["issued_s"][rows["process"] == program].min()
        others = bios[bios["process"] != program]
        assert not np.any((others["issued_s"] < start) & (start < others["completed_s"]))


def test_a_reader_that_is_always_behind_ends_when_it_is_asked_to(drive, monkeypatch):
    add, busy_until = _Run._add, time.monotonic() + 1.5  # as if each batch were full until then
    monkeypatch.setattr(_Run, "_add", lambda self: add(self) or time.monotonic() < busy_until)
    trace = run(CaptureSettings(device=str(drive), seconds=20), lambda: True).trace
    assert trace.seconds < 1
    again = CaptureSettings(device=str(drive), seconds=20, events_max=0)
    busy_until = time.monotonic() + 1.5
    assert run(again).trace.seconds < 1


def test_a_command_that_is_ended_leaves_no_child_behind(drive):
    """Its children would keep its output open, and a pipe behind it would wait for them."""
    command = ["sh", "-c", "sleep 60 & sh -c 'trap \"\" TERM; sleep 61' & wait"]
    began_s = time.monotonic()
    captured = run(CaptureSettings(device=str(drive), command=command, seconds=0.5))
    assert captured.exit_code is None
    assert time.monotonic() - began_s < 10
    left = [Path(f"/proc/{it}/cmdline") for it in captured.trace.chosen]
    assert len(left) == 4
    assert not [it for it in left if it.exists() and it.read_bytes()]  # a dead one may wait for its new parent


def test_names_of_processes_may_be_any_bytes(drive):
    program = (
        "import ctypes, time; ctypes.CDLL(None).prctl(15, b'<b>\\xc3\\x28</b>', 0, 0, 0)\n"
        "print(flush=True); time.sleep(30)"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as process:
        try:
            process.stdout.readline()
            assert ProcessTree().names([process.pid]) == {process.pid: "<b>\ufffd(</b>"}
        finally:
            process.kill()


def test_lost_events_are_counted_and_what_is_left_is_kept(drive):
    """A ring buffer of two pages; the same load loses nothing in one of the usual size (tests above)."""
    prepare(drive)
    load = fio(drive, rw="randread", bs="4k", iodepth=16, size="16M", loops=4, norandommap=1)
    trace = run(CaptureSettings(device=str(drive), command=load, buffer_bytes=8192, output=2)).trace
    assert trace.lost_events > 1000
    rows = of_file(trace, drive)
    assert 0 < len(rows) < account(drive)["read"]["total_ios"]
    took = rows["completed_s"] - rows["issued_s"]
    # Without its completion a request has none of another's, which may be a whole loop later.
    assert np.nanmax(took) <= account(drive)["read"]["clat_ns"]["max"] / 1e9 * 1.05
    assert measure(trace).lost_events == trace.lost_events


def test_system_calls_are_the_application_and_writeback_belongs_to_no_process(drive, monkeypatch):
    script = (
        "import os, time\n"
        "def looked_up():\n"
        "    open('asks', 'w').close()\n"
        "    while os.path.exists('asks'): time.sleep(0.01)\n"
        "f = open('data', 'wb', buffering=0)\n"
        "[f.write(bytes(1 << 20)) for _ in range(32)]; looked_up()\n"
        "os.sync(); looked_up()\n"
        "[os.pread(os.open('data', os.O_RDONLY), 4096, 8192) for _ in range(10)]\n"
        "f = open('/dev/shm/kvtier-no-disk', 'wb', buffering=0); os.unlink(f.name)\n"
        "f.write(bytes(3 << 20)); ends = os.pipe(); os.write(ends[1], bytes(5000)); looked_up()\n"
    )
    add, asked = _Run._add, itertools.count(1)

    def answering(self):
        """Read twice after the program has asked: then its descriptors have been looked up, which it keeps open."""
        is_asked = (drive / "asks").exists()
        is_full = add(self)
        if is_asked and next(asked) % 2 == 0 and not is_full:
            (drive / "asks").unlink()
        return is_full

    monkeypatch.setattr(_Run, "_add", answering)
    command = ["sh", "-c", f'cd {drive}; {sys.executable} -c "$0"; exit 3', script]
    captured = run(CaptureSettings(device=str(drive), command=command, seconds=60.0))
    trace = captured.trace
    assert captured.exit_code == 3
    calls = trace.of_chosen(trace.at(IoLayer.APPLICATION))
    assert np.count_nonzero(calls["bytes"] == MIB) == 32
    assert np.count_nonzero(calls["bytes"] == 3 * MIB) == 0  # on a file in memory
    assert np.count_nonzero(calls["bytes"] == 5000) == 0  # into a pipe
    assert np.count_nonzero((calls["bytes"] == 4096) & (calls["position"] == 8192) & ~calls["is_write"]) == 10
    it = measure(trace)
    kernel = it.not_attributed["written_bytes"]
    assert it.bytes["written"] + kernel >= 32 * MIB
    assert it.whole_device["written_bytes"] >= 32 * MIB
    assert it.write_amplification == pytest.approx(it.whole_device["written_bytes"] / (32 * MIB), rel=0.1)


def test_a_write_to_a_descriptor_that_is_gone_leaves_the_amplification_unknown(drive):
    """dd has ended before its descriptor is looked up: what it wrote may not be a file on this device."""
    command = [
        "sh",
        "-c",
        f"dd if=/dev/zero of={drive}/data bs=1M count=16 conv=fsync; dd if={drive}/data of=/dev/null",
    ]
    trace = run(CaptureSettings(device=str(drive), command=command, output=2)).trace
    it = measure(trace)
    assert it.whole_device["written_bytes"] >= 16 * MIB
    written = trace.of_chosen(trace.at(IoLayer.APPLICATION))
    written = int(written["bytes"][written["is_write"]].sum())
    assert it.write_amplification is None or it.write_amplification == pytest.approx(
        it.whole_device["written_bytes"] / (16 * MIB), rel=0.02
    )
    assert it.counts["bytes_written_to_closed_files"] <= written


def test_a_process_is_measured_with_its_children_and_no_other(drive):
    prepare(drive)
    load = fio(drive, rw="read", bs="1M", ioengine="psync", time_based=1, runtime=20, rate="100m", output="/dev/null")
    chosen, other = (subprocess.Popen(load) for _ in range(2))
    try:
        time.sleep(1.5)
        trace = run(CaptureSettings(device=str(drive), pids=[chosen.pid], seconds=1.0)).trace
    finally:
        for process in (chosen, other):
            process.terminate()  # and fio ends its jobs
            process.wait(60)
    it = measure(trace)
    assert it.seconds > 0.9  # and more on a busy machine
    assert it.bytes["read"] < 150 * MIB * it.seconds  # both together read 200 MiB a second
    assert it.whole_device["read_bytes"] > 1.5 * it.bytes["read"] > 0
    assert {row.name for row in it.processes} == {"fio"}
    assert other.pid not in trace.chosen
    assert chosen.pid in trace.chosen
    assert len(trace.chosen) > 1  # fio's job is a child


def test_instances_are_removed_after_errors_and_signals_and_those_of_the_dead(drive, instances):
    with pytest.raises(ConfigError, match="cannot be started"):
        run(CaptureSettings(device=str(drive), command=["/nonexistent/program"]))
    stale = instances / "kvtier-999999999-block"
    stale.mkdir(exist_ok=True)
    reused = instances / f"kvtier-{os.getpid()}-calls"  # of a killed capture that had this process's id
    reused.mkdir()
    run(CaptureSettings(device=str(drive), seconds=0.1))
    assert not reused.exists()
    stale.mkdir(exist_ok=True)
    program = "from kvtier.cli.main import main; main()"
    command = [sys.executable, "-c", program, "characterize", "--json", "--device", str(drive), "--", "sleep", "30"]
    for number, code, wait_s in ((signal.SIGINT, 130, 2.0), (signal.SIGTERM, 128 + signal.SIGTERM, 0.0)):
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        deadline = time.monotonic() + 20
        while not list(instances.glob(f"kvtier-{process.pid}-calls")) and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(wait_s)  # a busy machine begins to measure some time after it has made the instances
        process.send_signal(number)
        made = json.loads(process.communicate(timeout=20)[0])
        assert (process.returncode, made["exit_code"]) == (code, None)
        assert made["seconds"] > wait_s * 0.15  # what was measured is kept
        assert not list(instances.glob(f"kvtier-{process.pid}-*"))
    assert not stale.exists()


def test_a_device_without_requests_is_counted_by_its_bios_and_may_vanish(drive):
    """A compressed disk in memory: what was measured before it is removed is kept."""
    control = Path("/sys/class/zram-control")
    if not control.exists():
        pytest.skip("needs a kernel with zram")
    number = (control / "hot_add").read_text().strip()
    folder, node = SYSFS / "block" / f"zram{number}", f"/dev/zram{number}"

    def remove():
        (control / "hot_remove").write_text(number)

    try:
        (folder / "disksize").write_text("64M")
        load = fio(drive, filename=node, rw="randrw", bs="64k", iodepth=1, size="32M")
        command = ["sh", "-c", f"{' '.join(map(str, load))}; touch {drive}/done; sleep 30"]

        def should_stop():
            if (drive / "done").exists() and folder.exists():
                remove()
            return False

        trace = run(CaptureSettings(device=node, command=command, output=2), should_stop).trace
    finally:
        if folder.exists():
            remove()
    assert trace.seconds < 25
    assert any("vanished" in it for it in trace.remarks)
    assert any("no request queue" in it for it in trace.remarks)
    rows = transfers(trace.of_chosen(trace.at(IoLayer.DEVICE)))
    rows = rows[rows["bytes"] == 64 << 10]
    said = account(drive)
    assert len(rows) == said["read"]["total_ios"] + said["write"]["total_ios"] == 512
    assert np.count_nonzero(rows["is_write"]) == said["write"]["total_ios"]
    assert not np.isnan(rows["completed_s"]).any()


def test_a_partition_has_its_own_requests_and_their_processes(drive):
    image = drive / "image"
    image.write_bytes(bytes(16 * MIB))
    made = subprocess.run(["losetup", "-f", "--show", image], capture_output=True, text=True, timeout=10, check=False)
    if made.returncode:
        pytest.skip(f"needs loop devices: {made.stderr}")
    disk = made.stdout.strip()
    try:
        nodes = [drive / "first", drive / "second"]
        for number, node in enumerate(nodes, 1):
            first = 2048 if number == 1 else 10240
            done = subprocess.run(["addpart", disk, str(number), str(first), "8192"], capture_output=True, timeout=10, check=False)  # fmt: skip  # noqa: E501
            if done.returncode:
                pytest.skip(f"needs partitions: {done.stderr}")
            name = Path(disk).name
            major, minor = (SYSFS / "block" / name / f"{name}p{number}" / "dev").read_text().split(":")
            os.mknod(node, 0o600 | stat.S_IFBLK, os.makedev(int(major), int(minor)))
        read = "; ".join(
            f"dd if={node} of=/dev/null bs=1M count={count} iflag=direct"
            for node, count in zip(nodes, (3, 2), strict=True)
        )
        it = measure(run(CaptureSettings(device=str(nodes[0]), command=["sh", "-c", read], output=2)).trace)
    finally:
        for number in (1, 2):
            subprocess.run(["delpart", disk, str(number)], capture_output=True, timeout=10, check=False)
        subprocess.run(["losetup", "-d", disk], timeout=10, check=False)
    assert (it.bytes["read"], it.whole_device["read_bytes"]) == (3 * MIB, 3 * MIB)
    assert [row.name for row in it.processes] == ["dd"]
    assert it.submitted_depth is not None


def test_a_stack_of_devices_has_one_lowest_layer(tmp_path, monkeypatch):
    """sysfs as the kernel shows it for a dm device on a partition and on a second disk."""
    for name, number in (("nvme0n1", "259:0"), ("nvme0n1/nvme0n1p1", "259:1"), ("sdb", "8:16"), ("dm-0", "252:0")):
        (tmp_path / "block" / name / "slaves").mkdir(parents=True)
        (tmp_path / "block" / name / "dev").write_text(number)
        for folder in ("dev/block", "class/block"):
            (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        (tmp_path / "dev/block" / number).symlink_to(tmp_path / "block" / name)
        (tmp_path / "class/block" / Path(name).name).symlink_to(tmp_path / "block" / name)
    for name, text in (("partition", "1"), ("start", "2048"), ("size", "4096")):
        (tmp_path / "block/nvme0n1/nvme0n1p1" / name).write_text(text)
    for name in ("nvme0n1p1", "sdb"):
        (tmp_path / "block/dm-0/slaves" / name).mkdir()
    monkeypatch.setattr(block_devices, "SYSFS", tmp_path)
    assert [it.name for it in disks()] == ["nvme0n1", "sdb"]
    stacked = block_devices.find_number(os.makedev(252, 0))
    assert [(it.name, it.disk) for it in block_devices.lowest(stacked)] == [("nvme0n1p1", "nvme0n1"), ("sdb", "sdb")]
    partition = block_devices.find_number(os.makedev(259, 1))
    assert (partition.first_sector, partition.sectors) == (2048, 4096)
    assert partition.disk_number == 259 << 20
    assert disks()[0].partitions == (259 << 20 | 1,)


def test_the_command_line_from_end_to_end(drive, capsys):
    report = drive / "report.html"
    prepare(drive)
    line = ["characterize", "--device", str(drive), "--json", "--report", str(report), "--"]
    assert kvtier([*line, *map(str, fio(drive, rw="read", iodepth=2))]) == 0
    made = json.loads(capsys.readouterr().out)
    assert made["source"] == "block"
    assert made["exit_code"] == 0
    assert made["bytes"]["read"] >= 64 * MIB
    assert made["device_facts"][find_device(str(drive)).disk]["max_sectors_kb"] > 0
    assert made["queue_depth"]["submitted"] == made["submitted_depth"]["mean"] > 0
    assert report.read_text().count("<svg") == 6
    assert kvtier(["characterize", "--device", str(drive), "--", "false"]) == 1
    assert "exit code of ['false']: 1" in capsys.readouterr().err


def test_a_capture_may_be_of_the_files_below_one_directory(drive, capsys):
    folders = [drive / "wanted", drive / "other"]
    for folder in folders:
        folder.mkdir()
        prepare(folder)
    reads = "for it in wanted other; do dd if=$it/data of=/dev/null bs=1M count=16 iflag=direct; done; sleep 1"
    command = ["--json", "--", "sh", "-c", f"cd {drive}; {reads}"]
    assert kvtier(["characterize", "--device", str(drive), *command]) == 0
    assert json.loads(capsys.readouterr().out)["bytes"]["read"] >= 32 * MIB
    assert kvtier(["characterize", "--dir", str(folders[0]), *command]) == 0
    made = json.loads(capsys.readouterr().out)
    assert made["bytes"]["read"] == made["whole_device"]["read_bytes"] == 16 * MIB
    assert made["request_bytes"]["share_of_bytes_over_1mb"] == 1.0
    assert any(f"below {folders[0]} count" in remark for remark in made["remarks"])
    perhaps = made["counts"]["calls_on_closed_files"] * MIB  # a dd may have ended before its descriptor is looked up
    assert 16 * MIB <= made["layers"]["application"]["bytes"] <= 16 * MIB + perhaps
    assert kvtier(["characterize", "--dir", str(drive), "--device", str(drive)]) == 2
    assert "give one of them" in capsys.readouterr().err


def test_a_call_on_a_closed_descriptor_counts_and_is_told_also_below_a_directory(tmp_path):
    gone = subprocess.Popen(["true"])
    gone.wait(10)
    calls = np.array([gone.pid, gone.pid, os.getpid()])
    with (tmp_path / "elsewhere").open("w") as file:
        descriptors = np.array([3, 4, file.fileno()])
        for directory in (None, tmp_path / "wanted"):
            for is_positioned in (False, True):
                files = _Files(set(), directory)
                kept, perhaps = files.count(calls, descriptors, is_positioned=is_positioned)
                doubtful = not is_positioned or directory is not None  # a position proves a file, but not where it is
                assert (kept[:2].tolist(), perhaps.tolist()) == ([True, True], [doubtful, doubtful, False])
                assert files.closed == 2 * doubtful
        assert not kept[2]


def test_allocation_groups_are_those_that_xfs_tells(tmp_path, instances):
    image, above = tmp_path / "image", tmp_path / "above"
    place = above / "xfs"
    place.mkdir(parents=True)
    with image.open("wb") as file:
        file.truncate(1024 * MIB)
    with ExitStack() as stack:
        for command in (["mkfs.xfs", "-q", "-d", "agcount=8", image], ["mount", "-o", "loop", image, place]):
            if shutil.which(command[0]) is None or subprocess.run(command, timeout=60, check=False).returncode:
                pytest.skip(f"needs {command[0]}")
        stack.callback(subprocess.run, ["umount", "--lazy", place], timeout=60, check=True)
        device = find_device(str(place))
        found = allocation_groups(device.disk)
        (place / "file").write_bytes(bytes(MIB))
        another = replace(device, number=device.number + 1)
        below, mounted = spans_of(place, device), spans_of(above, another)
    assert found == {"allocation_groups": [{"count": 8, "bytes": 128 * MIB, "begin": 0}]}
    assert allocation_groups("nosuch") == {}
    assert len(below.begin)
    assert not len(mounted.begin)  # the file is on another device than the directory
    assert not len(spans_of(tmp_path / "removed", device).begin)


def test_every_xfs_of_a_disk_has_its_groups_and_one_that_does_not_tell_has_none(tmp_path, monkeypatch):
    mounts = [Mount(str(tmp_path), "xfs", "", frozenset(), f"8:{minor}") for minor in (3, 1, 2, 1)]
    sizes = iter((512, None, 256, 512))

    def ioctl(_file, _request, geometry):
        if (blocks := next(sizes)) is None:
            raise OSError
        struct.pack_into("=4I", geometry, 0, 4096, 0, blocks, 4)

    def find(number):
        minor = os.minor(number)
        return BlockDevice(f"sda{minor}", number, "sda", os.makedev(8, 0), first_sector=1000 * minor)

    monkeypatch.setattr(block_devices, "read_mounts", lambda: mounts)
    monkeypatch.setattr(block_devices, "find_number", find)
    monkeypatch.setattr(block_devices.fcntl, "ioctl", ioctl)
    assert allocation_groups("sda")["allocation_groups"] == [
        {"count": 4, "bytes": blocks * 4096, "begin": 512_000 * minor}
        for minor, blocks in ((1, 512), (2, 256), (3, 512))
    ]
    sizes = iter([None] * 4)
    assert allocation_groups("sda") == {}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--device", "/dev/nosuch"], "--device /dev/nosuch: No such file or directory; allowed: a block device"),
        (["--device", "/proc"], "it is on no block device"),
        (["--device", ""], "--device : no name; allowed: a block device"),
        (["--pid", "999999999"], "--pid 999999999: no such process"),
        (["--seconds", "0s"], "0s: too small; allowed: seconds as a number"),
        (["--seconds", "soon"], "soon"),
        (["--pid", "0"], "0 is not in the range"),
    ],
)
def test_wrong_usage_is_named_before_anything_starts(options, message, capsys):
    assert kvtier(["characterize", *options]) == 2
    assert message in capsys.readouterr().err


def test_threads_are_no_processes(capsys):
    with ThreadPoolExecutor(1) as pool:
        thread = pool.submit(threading.get_native_id).result()
        assert kvtier(["characterize", "--pid", str(thread)]) == 2
    assert (
        f"--pid {thread}: it is a thread of process {os.getpid()}; give --pid {os.getpid()}" in capsys.readouterr().err
    )
    if Path("/proc/2/comm").read_text() == "kthreadd\n":
        assert kvtier(["characterize", "--pid", "2"]) == 2
        assert "--pid 2: it is a thread of the kernel" in capsys.readouterr().err
    tree = ProcessTree()
    with ThreadPoolExecutor(1) as pool:  # born after the tree, without an event
        assert tree.process_of(pool.submit(threading.get_native_id).result()) == os.getpid()


def test_a_folder_without_a_slash_is_a_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pts").mkdir()  # /dev has one, too
    try:
        device = find_device(str(tmp_path))
    except ConfigError as error:
        pytest.skip(str(error))
    assert find_device(".") == find_device("pts") == find_device(device.name) == device


@pytest.mark.usefixtures("instances")
def test_without_the_right_to_trace_the_error_says_what_would_do():
    program = (
        "import os\nfrom kvtier.tools.characterize.tracefs import mounted\nfrom kvtier.errors import ConfigError\n"
        "os.setgid(65534); os.setuid(65534)\n"
        "try:\n    with mounted(): pass\n"
        "except ConfigError as error: raise SystemExit(str(error))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=False)
    assert "no permission to write in" in done.stderr or "cannot be mounted" in done.stderr
    assert "run as root" in done.stderr
