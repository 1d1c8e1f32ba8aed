"""A real file system on a real block device that fills up, hangs, loses its second half, is taken away and comes back.

The device is a file behind a loop device, which only root may make; elsewhere these tests are skipped, and the injected
faults of the other files stand alone.
"""

import os
import shutil
import subprocess
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from disk_world import look, write_all

from kvtier.errors import TierError
from kvtier.testing.tier_contract import empty_frame, frame_of, object_name
from kvtier.tier.disk.tier import DiskTier

WAIT_S = 60.0
IMAGE_BYTES = 48 << 20
SEGMENT_BYTES = 4 << 20
FRAME_BYTES = 1 << 18
TOOLS = ("mkfs.ext4", "mount", "umount", "fsfreeze", "losetup")


def command(*words: object) -> None:
    """Run a program that must succeed."""
    subprocess.run([str(word) for word in words], check=True, capture_output=True, timeout=WAIT_S)


class Device:
    """An ext4 file system in `image`, mounted at `place`."""

    def __init__(self, root: Path) -> None:
        self.image, self.place = root / "image", root / "mnt"
        self.place.mkdir()
        self.make()

    def make(self) -> None:
        """A new, empty one."""
        self.image.unlink(missing_ok=True)
        self.image.touch()
        os.truncate(self.image, IMAGE_BYTES)
        command("mkfs.ext4", "-q", "-F", "-m", 0, self.image)
        command("mount", "-o", "loop", self.image, self.place)

    def freeze(self) -> None:
        """Writes hang from now on."""
        command("fsfreeze", "--freeze", self.place)

    def thaw(self) -> None:
        """And go on."""
        command("fsfreeze", "--unfreeze", self.place)

    def abort(self) -> None:
        """What the kernel does when the device has failed: nothing can be written until it is mounted anew."""
        command("mount", "-o", "remount,abort", self.place)

    def remove(self) -> None:
        """Remove the files; open descriptors stay valid."""
        command("umount", "--lazy", self.place)


@pytest.fixture
def device(tmp_path: Path) -> Iterator[Device]:
    """A device of our own.

    Needs root and a loop device.
    """
    if os.geteuid() != 0 or not all(map(shutil.which, TOOLS)):
        pytest.skip("a loop device needs root, and mkfs.ext4, mount and fsfreeze")
    try:
        made = Device(tmp_path)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no loop device here: {error.stderr!r}")
    try:
        yield made
    finally:
        with suppress(subprocess.CalledProcessError):
            made.thaw()
        with suppress(subprocess.CalledProcessError):
            made.remove()


def opened(device: Device, capacity_bytes: int = 4 * SEGMENT_BYTES) -> DiskTier:
    """A tier on it whose keeper leaves it alone."""
    return DiskTier(
        device.place / "store",
        capacity_bytes=capacity_bytes,
        segment_bytes=SEGMENT_BYTES,
        sync_interval_s=3600.0,
        lock_deadline_s=0.2,
    )


def write(tier: DiskTier, number: int) -> bool:
    """Object `number`."""
    return tier.write(object_name(number), frame_of(number, FRAME_BYTES))


def is_right(tier: DiskTier, number: int) -> bool:
    """Whether object `number` comes back as it was."""
    into = empty_frame(FRAME_BYTES)
    return tier.read(object_name(number), into) == FRAME_BYTES and into == frame_of(number, FRAME_BYTES)


def test_another_programs_file_that_grows_does_not_empty_the_cache(device: Device) -> None:
    tier = opened(device, capacity_bytes=4 * IMAGE_BYTES)
    foreign, before = device.place / "other", 0
    with foreign.open("wb", buffering=0) as other:
        for number in range(400):
            with suppress(OSError):
                other.write(bytes(1 << 19))
            assert write(tier, number)
            assert is_right(tier, number)
            assert tier.used_bytes > before - SEGMENT_BYTES, "no segment is given back"  # blocks of ext4's own may be
            before = tier.used_bytes
    assert SEGMENT_BYTES < before < IMAGE_BYTES - foreign.stat().st_size
    held = sum(tier.contains([object_name(number) for number in range(400)]))
    full = before // SEGMENT_BYTES - 2  # one is filled, and one may be kept empty ahead of the writers
    assert held >= full * (SEGMENT_BYTES // FRAME_BYTES - 1) > 0
    foreign.unlink()
    for number in range(400, 500):
        assert write(tier, number)
    assert tier.used_bytes > before
    tier.close()


def test_a_hanging_device_holds_up_writes_alone(device: Device) -> None:
    tier = opened(device)
    assert write(tier, 1)
    device.freeze()
    answers: list[bool] = []
    writer = threading.Thread(target=lambda: answers.append(write(tier, 2)), daemon=True)
    writer.start()
    assert tier.contains([object_name(1), object_name(2)]) == [True, False]
    assert is_right(tier, 1)
    assert writer.is_alive()
    device.thaw()
    writer.join(WAIT_S)
    assert answers == [True]
    assert is_right(tier, 2)
    tier.close()


def test_a_device_that_loses_its_second_half_loses_what_lay_there(device: Device) -> None:
    """Blocks that are gone are an error or zeros, as the kernel likes: never bytes that pass the check."""
    tier = opened(device)
    numbers = range(400)
    for first in range(0, len(numbers), 5):
        write_all(tier, numbers[first : first + 5])
    tier.sync()
    assert [look(tier, number) for number in (0, 399)] == ["right", "right"]
    os.truncate(device.image, IMAGE_BYTES // 6)
    seen: Counter[str] = Counter()
    for number in numbers:
        try:
            seen[look(tier, number)] += 1
        except TierError:
            seen["failed"] += 1
    assert seen["wrong"] == 0
    assert seen["failed"] + seen["refused"] > 0, "the device did not fail"
    tier.close()


def test_a_device_that_is_taken_away_and_replaced_heals_by_itself(device: Device) -> None:
    tier = opened(device)
    assert write(tier, 1)
    tier.sync()
    device.abort()
    with pytest.raises(TierError):
        write(tier, 2)
    assert is_right(tier, 1)
    device.remove()
    device.make()
    tier_elsewhere = opened(device)  # as the operator's script would: a new store at the old place
    assert write(tier_elsewhere, 3)
    tier_elsewhere.close()
    with pytest.raises(TierError):
        write(tier, 4)  # the last error makes the next caller look around
    assert write(tier, 4)
    assert is_right(tier, 4)
    assert is_right(tier, 3)
    assert tier.contains([object_name(1)]) == [False]
    tier.close()
