"""A process dies at every single step of every change: the count is never too low, and nothing partial shows."""

import os
from contextlib import suppress

import pytest
from test_directory_shared import used_exactly

from kvtier.testing.tier_contract import BLOCK_BYTES, empty_frame, frame_of, object_name
from kvtier.tier.base import Write
from kvtier.tier.directory.tier import DirectoryTier
from kvtier.tier.files.store_paths import charge_bytes

CAPACITY = 12 * BLOCK_BYTES
BATCH = {54: 2, 1: 2, 55: 1, 56: 3}
STEPS = ("open", "rename", "unlink", "pwrite", "pwritev", "ftruncate")


class Killed(BaseException):
    """The process is gone: from here on nothing that it does has any effect."""


class Dying:
    """Lets `steps_left` changes of the file system pass and none after them."""

    def __init__(self, monkeypatch, steps_left):
        self.steps_left, self.is_dead, self.opened = steps_left, False, set()
        for step in STEPS:
            monkeypatch.setattr(os, step, self.counted(getattr(os, step)))

    def counted(self, change):
        def maybe(*args, **kwargs):
            if self.steps_left == 0:
                self.is_dead = True
                raise Killed
            self.steps_left -= 1
            result = change(*args, **kwargs)
            if change.__name__ == "open":
                self.opened.add(result)
            return result

        return maybe


def frame(number, blocks):
    return frame_of(number, blocks * BLOCK_BYTES)


ACTS = {
    "write larger than its victim": lambda tier: tier.write(object_name(50), frame(50, 3)),
    "write smaller than its victim": lambda tier: tier.write(object_name(51), frame(51, 1)),
    "write as large as its victim": lambda tier: tier.write(object_name(52), frame(52, 2)),
    "write with several victims": lambda tier: tier.write(object_name(53), frame(53, 7)),
    "write a batch": lambda tier: tier.write_many(
        [Write(object_name(number), frame(number, blocks)) for number, blocks in BATCH.items()]
    ),
    "write what is there": lambda tier: tier.write(object_name(1), frame(1, 2)),
    "delete": lambda tier: tier.delete(object_name(1)),
}


def die_at(step, act, root, monkeypatch):
    """Do `act` in a tier that dies after `step` changes; whether it died."""
    tier = DirectoryTier(root, capacity_bytes=CAPACITY)
    with monkeypatch.context() as patch:
        dying = Dying(patch, step)
        with suppress(Killed):
            ACTS[act](tier)
    if not dying.is_dead:
        tier.close()
        return False
    # What the kernel does: it closes the files, and with them go the locks.
    for kept in (tier._cap_file._descriptor, tier._store_lock._descriptor, tier._store_lock._root):
        kept.close()
    for descriptor in dying.opened:
        with suppress(OSError):
            os.close(descriptor)
    return True


@pytest.mark.parametrize("held", [(2, 2), (2, 2, 2, 2, 2, 1), (2, 2, 2, 2, 2, 2)], ids=["empty", "nearly full", "full"])
@pytest.mark.parametrize("act", ACTS)
def test_dying_at_any_step_leaves_the_count_high_enough(tmp_path, monkeypatch, act, held):
    died_at = []
    for step in range(100):
        root = tmp_path / str(step)
        keeper = DirectoryTier(root, capacity_bytes=CAPACITY)
        for number, blocks in enumerate(held):
            assert keeper.write(object_name(number), frame(number, blocks))
        if not die_at(step, act, root, monkeypatch):
            keeper.close()
            break
        died_at.append(step)
        assert keeper.used_bytes >= drafted(root), step
        newcomer = DirectoryTier(root, capacity_bytes=CAPACITY)
        assert drafted(root) <= newcomer.used_bytes <= CAPACITY, step
        into = empty_frame(8 * BLOCK_BYTES)
        for name, size in newcomer.scan():
            assert newcomer.read(name, into) == size
            assert into[:size] in [frame(number, blocks) for number, blocks in enumerate(held)] + [
                frame(50, 3), frame(51, 1), frame(52, 2), frame(53, 7), frame(54, 2), frame(55, 1), frame(56, 3)
            ]  # fmt: skip
        for number in range(20, 32):
            assert newcomer.write(object_name(number), frame(number, 1))
            assert drafted(root) <= keeper.used_bytes <= CAPACITY, step
        newcomer.close()
        keeper.close()
        alone = DirectoryTier(root, capacity_bytes=CAPACITY)  # clears what the dead one left, and counts
        assert alone.used_bytes == used_exactly(root), step
        alone.close()
    else:
        pytest.fail("never got to the end")
    assert died_at == list(range(len(died_at)))
    assert len(died_at) >= (0 if act == "write what is there" else 2)


def drafted(root):
    """Objects by their length, drafts by what their names say: what the count must never be below."""
    used = 0
    for where, _, names in os.walk(root):
        for name in names:
            if where.endswith("drafts"):
                used += int(name.rsplit("-", 1)[1]) if "-" in name else 0
            elif len(name) == 64:
                used += charge_bytes(os.lstat(os.path.join(where, name)).st_size)
    return used
