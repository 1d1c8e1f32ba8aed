"""A tier that refuses all writes says why, once, and once that it takes them again. It is not taken for broken."""

import errno
import os

import pytest
from mover_world import World
from tests.memory_tier import MemoryTier
from tests.small_s3 import SmallS3, open_tier, refusing

from kvtier.errors import TierError
from kvtier.runtime.command_runner import REFUSED_MIN
from kvtier.tier import refusal_log
from kvtier.tier.directory.tier import DirectoryTier
from kvtier.tier.disk.tier import DiskTier
from kvtier.tier.shared_directory.tier import SharedDirectoryTier
from kvtier.types import Direction, Outcome

WRITES = 3 * REFUSED_MIN


class Full(MemoryTier):
    """A tier of another package: `write` returns False and logs nothing."""

    is_full = True

    def write_one(self, name, frame, about):
        return not self.is_full and super().write_one(name, frame, about)


class Raising(MemoryTier):
    """A tier of another package whose writes raise `error`."""

    error: Exception | None = None

    def write_one(self, name, frame, about):
        if self.error is not None:
            raise self.error
        return super().write_one(name, frame, about)


def wrapped(number: int) -> TierError:
    error = TierError("memory", os.strerror(number))
    error.__cause__ = OSError(number, os.strerror(number))
    return error


def demoted(world: World, count: int) -> set[Outcome]:
    """The outcomes of so many writes, none of which is a fault: no circuit breaker counts them."""
    answers = [world.run(world.transfer(Direction.DEMOTE, 1, 0))[0] for _ in range(count)]
    assert not any(answer.is_tier_fault for answer in answers)
    return {answer.outcome for answer in answers}


def lines(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
    found = [(record.levelname, record.getMessage()) for record in caplog.records]
    caplog.clear()
    return found


@pytest.fixture(autouse=True)
def _at_once(monkeypatch, caplog):
    monkeypatch.setattr(refusal_log, "QUIET_S", 0.0)
    caplog.set_level("INFO", "kvtier")


def test_a_tier_without_a_reason(caplog):
    tier = Full(capacity_bytes=1 << 24)
    with World({"memory": tier}) as world:
        world.done(world.transfer(Direction.GATHER, 1, 0))
        assert demoted(world, REFUSED_MIN - 1) == {Outcome.FAILED}
        assert lines(caplog) == [], "a policy may refuse some"
        assert demoted(world, WRITES) == {Outcome.FAILED}
        why = f"the last {REFUSED_MIN} objects were not admitted"
        assert lines(caplog) == [("WARNING", f"tier memory refuses writes: {why}")]
        tier.is_full = False
        assert demoted(world, 3) == {Outcome.DONE}
        assert lines(caplog) == [("INFO", "tier memory accepts writes again")]


@pytest.mark.parametrize(
    ("status", "code"),
    [
        (403, "QuotaExceeded"),
        (400, "XMinioAdminBucketQuotaExceeded"),
        (507, "XMinioStorageFull"),
        (507, ""),
    ],
)
def test_a_bucket_over_its_quota(caplog, status, code):
    with SmallS3() as server:
        tier = open_tier(server.endpoint, name="memory")
        with World({"memory": tier}) as world:
            world.done(world.transfer(Direction.GATHER, 1, 0))
            server.answers.append(refusing(status, code, "PUT"))
            assert demoted(world, 5) == {Outcome.FAILED}
            ((level, text),) = lines(caplog)
            assert level == "WARNING"
            assert text.startswith("tier memory refuses writes: bucket")
            assert f"HTTP {status}" in text
            server.answers.clear()
            assert demoted(world, 3) == {Outcome.DONE}
            assert lines(caplog) == [("INFO", "tier memory accepts writes again")]
        tier.close()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT], ids=["device", "quota"])
@pytest.mark.parametrize("make", [lambda number: OSError(number, os.strerror(number)), wrapped], ids=["raw", "cause"])
def test_no_room_is_named_whatever_the_tier_raises(caplog, make, number):
    tier = Raising(capacity_bytes=1 << 24)
    with World({"memory": tier}) as world:
        world.done(world.transfer(Direction.GATHER, 1, 0))
        tier.error = make(number)
        assert demoted(world, WRITES) == {Outcome.FAILED}
        ((level, text),) = lines(caplog)
        assert (level, text.startswith("tier memory refuses writes: ")) == ("WARNING", True)
        assert os.strerror(number) in text
        tier.error = OSError(errno.EIO, os.strerror(errno.EIO))
        broken = world.run(world.transfer(Direction.DEMOTE, 1, 0))[0]
        assert broken.is_tier_fault, "an error of the device is a fault"
        tier.error = None
        assert demoted(world, 3) == {Outcome.DONE}


@pytest.mark.parametrize("kind", ["directory", "shared_directory", "disk"])
def test_a_file_system_without_room_for_the_first_object_is_named(caplog, monkeypatch, tmp_path, kind):
    """It has no inode for a folder, or the reserve of the disk tier leaves nothing."""
    root, no_room = tmp_path / "s", OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    begin, reason = "tier memory refuses writes: cannot write object", no_room.strerror
    if kind == "disk":
        tier = DiskTier(root, capacity_bytes=1 << 24, name="memory", reserve_bytes=1 << 60)
        reason = f"disk.reserve_bytes keeps {1 << 60}"
    elif kind == "directory":
        tier = DirectoryTier(root, capacity_bytes=1 << 24, name="memory")
        begin = "tier memory: the file system is full"
    else:
        tier = SharedDirectoryTier(root, capacity_bytes=1 << 24, name="memory", key_id=bytes(16), model=bytes(16))
    lines(caplog)
    with World({"memory": tier}) as world:
        world.done(world.transfer(Direction.GATHER, 1, 0))
        make_folder = os.mkdir

        def refuse(path, *given, **more):  # a device without inodes
            if kind != "disk":
                raise no_room
            make_folder(path, *given, **more)

        monkeypatch.setattr(os, "mkdir", refuse)
        assert demoted(world, 5) == {Outcome.FAILED}
        said = [text for level, text in lines(caplog) if level == "WARNING"]
        assert len(said) == 1, said
        assert said[0].startswith(begin)
        assert reason in said[0]
    tier.close()
