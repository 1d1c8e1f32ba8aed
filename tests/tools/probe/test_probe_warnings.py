"""Warnings of `kvtier probe` from recorded facts: each appears, and only where it should."""

from dataclasses import replace
from pathlib import Path

import pytest

from kvtier.config.sections import Config, HostConfig
from kvtier.device.control_groups import control_groups
from kvtier.tier.registry import by_name
from kvtier.tools.machine_facts import (
    Facts,
    mount_of,
    parse_choice,
    parse_io_max,
    parse_meminfo,
    parse_mounts,
    parse_throttle,
)
from kvtier.tools.probe.links import LinkMeasures, Measure
from kvtier.tools.probe.run import (
    machine_warnings,
    order_warnings,
    sharing_warnings,
    speed_warnings,
    tier_warnings,
)
from kvtier.tools.probe.tiers import TierFacts

MOUNTINFO = r"""22 27 0:21 / /proc rw,relatime - proc proc rw
27 1 259:2 / / rw,relatime shared:1 - ext4 /dev/nvme0n1p2 rw,discard
28 27 259:5 / /mnt/nvme rw,noatime shared:7 - xfs /dev/nvme1n1 rw,attr2,inode64
29 27 259:5 /sub /mnt/other rw,noatime - xfs /dev/nvme1n1 rw
30 27 0:25 / /dev/shm rw,nosuid shared:9 - tmpfs tmpfs rw,size=24684096k
31 27 0:50 / /mnt/soft rw,relatime - nfs4 server:/export rw,vers=4.2,soft,timeo=600,retrans=2
32 27 0:51 / /mnt/hard rw,relatime - nfs4 server:/export rw,vers=4.2,hard,timeo=600,retrans=2
33 27 0:52 / /mnt/share rw,relatime - cifs //server/share rw,vers=3.1.1,cache=strict
34 27 0:53 / /mnt/with\040space ro,relatime - ext4 /dev/sdb1 rw,data=journal
35 27 0:54 / /mnt/layer rw,relatime - overlay overlay rw,lowerdir=/a,upperdir=/b
36 27 0:55 / /mnt/pool rw,relatime - zfs pool/kv rw,xattr
37 27 0:56 / /mnt/sync rw,sync,relatime - ext4 /dev/sdc1 rw
38 28 259:9 / /mnt/nvme/kv rw,noatime - ext4 /dev/nvme2n1 rw
39 28 0:60 / /mnt/nvme/kv rw - tmpfs hides rw
this is no line of a mountinfo
"""
MOUNTS = parse_mounts(MOUNTINFO)
FACTS = Facts(memory_bytes=64 << 30, memory_available_bytes=60 << 30, mounts=tuple(MOUNTS), cores=8, load=1.0)
CONFIG = Config()


def place_at(path, tier="directory", **changes):
    mount = mount_of(Path(path), MOUNTS)
    place = TierFacts(
        tier=tier,
        path=path,
        measured_in=path,
        file_system=mount.kind,
        source=mount.source,
        mount_options=(),
        size_bytes=1 << 40,
        free_bytes=1 << 39,
        direct_io=True,
        alignment_bytes=512,
    )
    return replace(place, **changes), mount


def warned(path, tier="directory", facts=FACTS, *, wants_direct=True, **changes):
    place, mount = place_at(path, tier, **changes)
    needs_drive = by_name(tier).needs_drive
    return list(tier_warnings(place, mount, facts, wants_direct=wants_direct, needs_drive=needs_drive))


@pytest.mark.parametrize(
    ("path", "point", "kind"),
    [
        ("/etc/x", "/", "ext4"),
        ("/mnt/nvme", "/mnt/nvme", "xfs"),
        ("/mnt/nvme/x/y", "/mnt/nvme", "xfs"),
        ("/mnt/nvmeother", "/", "ext4"),
        ("/mnt/with space/x", "/mnt/with space", "ext4"),
        ("/mnt/nvme/kv/x", "/mnt/nvme/kv", "tmpfs"),  # which hides an earlier one at the same point
    ],
)
def test_a_path_lies_on_the_longest_mount_above_it(path, point, kind):
    assert mount_of(Path(path), MOUNTS)[:2] == (point, kind)


def test_lines_that_are_none_are_passed_over():
    assert len(MOUNTS) == len(MOUNTINFO.splitlines()) - 1
    assert parse_mounts("") == []
    assert mount_of(Path("/"), []) is None


def test_a_good_place_gets_no_warning():
    assert warned("/mnt/nvme") == []
    assert warned("/mnt/nvme", "disk") == []
    assert warned("/mnt/hard") == []
    assert list(machine_warnings(CONFIG, FACTS)) == []


@pytest.mark.parametrize(
    ("path", "tier", "words"),
    [
        ("/mnt/soft", "directory", "mounted soft"),
        ("/mnt/share", "directory", "mounted soft (its default)"),
        ("/mnt/hard", "disk", "nfs4 is a network file system"),
        ("/dev/shm", "disk", "tmpfs is memory, not a disk"),
        ("/mnt/layer", "directory", "a container's own layer"),
        ("/mnt/pool", "directory", "ZFS before 2.3"),
        ("/mnt/sync", "directory", "mounted with sync"),
        ("/mnt/with space", "directory", "mounted read-only"),
        ("/mnt/with space", "directory", "data=journal"),
    ],
)
def test_each_kind_of_mount_gets_its_warning(path, tier, words):
    found = [text for text in warned(path, tier) if words in text]
    assert len(found) == 1
    assert found[0].startswith(f"{tier} ({path}): ")


def test_buffered_fallback_is_named_and_the_setting_too():
    (fallback,) = warned("/mnt/nvme", direct_io=False, alignment_bytes=None)
    assert "has no direct I/O, so reads and writes are buffered" in fallback
    (chosen,) = warned("/mnt/nvme", direct_io=False, wants_direct=False)
    assert "direct I/O is turned off" in chosen


def test_a_nearly_full_file_system():
    (text,) = warned("/mnt/nvme", free_bytes=1 << 36)
    assert "nearly full, 64 GiB of 1 TiB are free" in text
    assert warned("/mnt/nvme", free_bytes=1 << 38) == []


def test_the_limit_of_a_control_group_on_the_whole_drive():
    facts = replace(FACTS, io_limits={"259:1": "rbps=1048576"}, drives={"259:5": "259:1"})
    (text,) = warned("/mnt/nvme", facts=facts)
    assert "a control group limits its drive (rbps=1048576)" in text
    assert warned("/mnt/nvme", facts=replace(facts, drives={"259:5": "259:4"})) == []


def test_memlock_below_the_arena_matters_where_memory_is_locked():
    low = replace(FACTS, memlock_bytes=8 << 20)
    assert list(machine_warnings(CONFIG, low)) == []
    for config, facts in (
        (CONFIG, replace(low, has_gpu=True)),
        (Config(host=HostConfig(page_lock="on")), low),
    ):
        (text,) = machine_warnings(config, facts)
        assert text.startswith("memlock: the limit is 8 MiB, but host memory takes 4 GiB")
    off = Config(host=HostConfig(page_lock="off"))
    assert list(machine_warnings(off, replace(low, has_gpu=True))) == []
    assert list(machine_warnings(CONFIG, replace(low, has_gpu=True, memlock_bytes=4 << 30))) == []


def test_memory_that_could_not_be_locked():
    (text,) = machine_warnings(CONFIG, FACTS, is_locked=False)
    assert text.startswith("page-lock:")
    assert list(machine_warnings(CONFIG, FACTS, is_locked=True)) == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"swap_used_bytes": 1 << 30}, "swap: 1 GiB is in use"),
        ({"huge_pages": "never"}, "huge pages:"),
        ({"load": 40.0}, "load: 40.0 runnable processes on 8 cores"),
        ({"memory_available_bytes": 2 << 30}, "only 2 GiB of memory is available"),
    ],
)
def test_each_trouble_of_the_machine(changes, words):
    (text,) = machine_warnings(CONFIG, replace(FACTS, **changes))
    assert words in text


def link(name, op, rate, latency_us=1000.0):
    return LinkMeasures(name, (Measure(op, 1 << 20, 1, rate, latency_us, latency_us, 10),))


def test_a_tier_that_is_asked_first_should_not_be_the_slower_one():
    links = [link("host", "copy", 10.0), link("directory", "read", 0.5), link("disk", "read", 3.0)]
    (text,) = order_warnings(["directory", "disk"], links)
    assert text.startswith("directory comes before disk, but reads 0.50 GB/s against 3.00 GB/s")
    assert list(order_warnings(["disk", "directory"], links)) == []
    assert list(order_warnings(["directory"], links)) == []


def test_a_tier_faster_than_host_memory():
    (text,) = order_warnings(["disk"], [link("host", "copy", 2.0), link("disk", "read", 6.0)])
    assert text.startswith("disk reads faster (6.00 GB/s) than host memory copies")


def test_tiers_on_one_device_share_it():
    places = [place_at("/mnt/nvme"), place_at("/mnt/other", "disk"), place_at("/dev/shm")]
    (text,) = sharing_warnings([it[0] for it in places], [it[1] for it in places])
    assert text == "directory and disk are on one device (/dev/nvme1n1) and share its bandwidth"
    apart = [place_at("/mnt/nvme"), place_at("/etc", "disk")]
    assert list(sharing_warnings([it[0] for it in apart], [it[1] for it in apart])) == []


def test_a_checksum_that_crawls():
    (text,) = speed_warnings([link("checksum", "hash", 1.0, 1048.576)])
    assert text.startswith("checksum: 1.00 GB/s in one thread")
    assert list(speed_warnings([link("checksum", "hash", 1.0, 100.0)])) == []


# ---- files of the kernel --------------------------------------------------------------------------------------------


IO_MAX = "8:0 rbps=max wbps=1048576 riops=max wiops=120\n259:0 rbps=max wbps=max riops=max wiops=max\n"
GROUPS = "0::/user.slice/x\n4:blkio:/docker/ab:c\nrubbish\n"
MEMINFO = "MemTotal:  24684096 kB\nHugePages_Total:  0\nSwapFree: 1 kB\n"


@pytest.mark.parametrize(
    ("found", "wanted"),
    [
        (parse_io_max(IO_MAX), {"8:0": "wbps=1048576 wiops=120"}),
        (parse_throttle("rbps", "8:0 1048576\n"), {"8:0": "rbps=1048576"}),
        (parse_throttle("rbps", ""), {}),
        (control_groups(GROUPS), [("", "/user.slice/x"), ("blkio", "/docker/ab:c")]),
        (parse_meminfo(MEMINFO), {"MemTotal": 24684096 * 1024, "SwapFree": 1024}),
        (parse_choice("always [madvise] never\n"), "madvise"),
        (parse_choice(""), None),
    ],
)
def test_files_of_the_kernel(found, wanted):
    assert found == wanted
