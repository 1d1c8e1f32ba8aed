"""A forked child changes nothing of its parent's store, and keeps no lock of it, however it ends."""

import gc
import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.system import in_child, snapshot, until

from kvtier.errors import TierError
from kvtier.testing.tier_contract import empty_frame, frame_of, object_name
from kvtier.tier.base import Tier
from kvtier.tier.directory.tier import DirectoryTier
from kvtier.tier.disk.status import STATUS_NAME
from kvtier.tier.disk.tier import DiskTier

OPENS: dict[str, Callable[..., Tier]] = {
    "directory": lambda root: DirectoryTier(root, capacity_bytes=8 << 20, lock_deadline_s=5.0),
    "disk": lambda root: DiskTier(root, capacity_bytes=8 << 20, sync_interval_s=3600.0, open_deadline_s=0.0),
}
HELD = range(8)


def opened(kind: str, root: Path) -> Tier:
    """A store that holds `HELD`, and writes nothing more by itself."""
    tier = OPENS[kind](root)
    for number in HELD:
        assert tier.write(object_name(number), frame_of(number))
    until(lambda: kind != "disk" or (root / STATUS_NAME).exists(), "its own thread writes a status once at the start")
    return tier


def holds(tier: Tier, number: int) -> bool:
    into = empty_frame(frame_of(number).nbytes)
    return tier.read(object_name(number), into) == into.nbytes and into == frame_of(number)


def multiprocessed(act: Callable[[], None]) -> int | None:
    """The exit code of a child that leaves as `multiprocessing` does."""
    process = multiprocessing.get_context("fork").Process(target=act)
    process.start()
    process.join(60.0)
    return process.exitcode


@pytest.mark.parametrize("fork", [in_child, multiprocessed])
@pytest.mark.parametrize("kind", OPENS)
def test_a_forked_child_changes_nothing_of_its_parents_store(root: Path, kind: str, fork: Any) -> None:
    tier = opened(kind, root)
    before = snapshot(root)

    def act() -> None:
        calls: list[Callable[[], object]] = [
            lambda: tier.write(object_name(30), frame_of(30)),
            lambda: tier.read(object_name(0), empty_frame(4096)),
            lambda: tier.contains([object_name(0)]),
            lambda: tier.delete(object_name(0)),
            tier.scan,
        ]
        for call in calls:
            with pytest.raises(TierError, match="this is a fork of it"):
                call()
        tier.close()
        gc.collect()

    assert fork(act) == 0
    assert snapshot(root) == before
    assert tier.write(object_name(30), frame_of(30))
    if kind == "disk":
        with pytest.raises(TierError, match="in use by another process"):
            OPENS[kind](root)
    tier.close()
    again = OPENS[kind](root)
    assert all(holds(again, number) for number in (*HELD, 30))
    again.close()


@pytest.mark.parametrize("kind", OPENS)
def test_a_child_that_lives_on_keeps_no_lock(tmp_path: Path, kind: str) -> None:
    """Its copies of the descriptors would keep the lock when the parent has ended."""
    tier = opened(kind, tmp_path / "store")
    end, begun = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        os.write(begun[1], b"1")
        os.read(end[0], 1)
        os._exit(0)
    try:
        os.read(begun[0], 1)  # it closes its copies when it begins
        tier.close()
        again = OPENS[kind](tmp_path / "store")
        assert kind == "disk" or again._store_lock.acquire(0.0), "the child keeps the store"
        assert holds(again, 1)
        again.close()
    finally:
        os.write(end[1], b"1")
        os.waitpid(child, 0)
        for descriptor in (*end, *begun):
            os.close(descriptor)
