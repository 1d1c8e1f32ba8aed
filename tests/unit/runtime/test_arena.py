"""The arena: slots are disjoint, aligned and within the capacity, and are released with their last view."""

import gc
import mmap
import os
import signal
from collections.abc import Callable

import numpy as np
import pytest

from kvtier.codec.frame import frame_bytes, head_bytes
from kvtier.errors import ConfigError
from kvtier.layout import ALIGNMENT, GroupLayout, History, KvLayout, State
from kvtier.runtime.arena import Arena, as_bytes, chunk_bytes, page_aligned, slots_for


def _layout() -> KvLayout:
    return KvLayout(
        256, (GroupLayout(History(), (70_000, 4096, 1), "test"), GroupLayout(State(), (5_000_000,), "test"))
    )


def _address(view: memoryview) -> int:
    return int(np.frombuffer(view, np.uint8).__array_interface__["data"][0])


def test_slots_are_page_aligned_and_hold_head_room_and_payload() -> None:
    layout = _layout()
    arena = Arena(layout, (3, 2))
    for number, (group, count) in enumerate(zip(layout.groups, (3, 2), strict=True)):
        for slot in range(count):
            frame, payload = arena.frame(number, slot), arena.payload(number, slot)
            assert len(frame) == frame_bytes(group)
            assert len(payload) == group.payload_bytes
            assert _address(payload) == _address(frame) + head_bytes(group)
            assert _address(frame) % ALIGNMENT == _address(payload) % ALIGNMENT == 0
            assert not frame.readonly
            assert frame.format == "B"
    assert arena.slots == (3, 2)
    assert arena.size_bytes == 3 * frame_bytes(layout.groups[0]) + 2 * frame_bytes(layout.groups[1])


@pytest.mark.parametrize("populate", [False, True])
def test_slots_begin_as_zeros_and_do_not_overlap(populate: bool) -> None:
    arena = Arena(_layout(), (3, 2), populate=populate)
    places = [(group, slot) for group, count in enumerate(arena.slots) for slot in range(count)]
    for place in places:
        assert not any(arena.frame(*place))
    for number, place in enumerate(places):
        arena.frame(*place)[:] = bytes([number + 1]) * len(arena.frame(*place))
    for number, place in enumerate(places):
        assert arena.frame(*place) == bytes([number + 1]) * len(arena.frame(*place))


@pytest.mark.parametrize("has_lock", [False, True])
def test_pages_are_given_back_and_taken_again(has_lock: bool) -> None:
    locked: list[tuple[int, int]] = []

    def lock(address: int, size_bytes: int, slot_bytes: int) -> Callable[[], None]:
        locked.append((address, size_bytes))
        return lambda: locked.remove((address, size_bytes))

    arena = Arena(_layout(), (3, 2), page_lock=lock if has_lock else None)
    frames = [arena.frame(group, 1) for group in (0, 1)]
    before = list(locked)
    for _ in range(2):
        for frame in frames:
            frame[:] = bytes([7]) * len(frame)
        assert arena.free() == (0, 0)
        assert not locked
        assert not any(map(any, frames)), "their pages are new"
        arena.take()
        assert locked == before
    arena.close()
    del frames, frame
    gc.collect()
    assert not locked


def test_memory_that_stays_locked_is_kept() -> None:
    def lock(address: int, size_bytes: int, slot_bytes: int) -> Callable[[], None]:
        return [].pop

    arena = Arena(_layout(), (3, 2), page_lock=lock)
    frame = arena.frame(0, 1)
    frame[:] = bytes([7]) * len(frame)
    for _ in range(2):
        assert arena.free() == (0, arena.size_bytes)
        assert frame[0] == 7, "a device may write to it"
        arena.take()


def test_memory_that_ranks_share_is_kept() -> None:
    shared = page_aligned(3 * frame_bytes(_layout().groups[0]))
    arena = Arena(_layout(), (3, 2), shared={0: shared})
    for group in (0, 1):
        arena.frame(group, 1)[:] = bytes([7]) * len(arena.frame(group, 1))
    assert arena.free() == (len(shared), 0)
    assert [arena.frame(group, 1)[0] for group in (0, 1)] == [7, 0]


@pytest.mark.parametrize("place", [(0, 3), (0, -1), (1, 2), (2, 0), (-1, 0)])
def test_a_slot_that_is_not_there_is_refused(place: tuple[int, int]) -> None:
    arena = Arena(_layout(), (3, 2))
    for view in (arena.frame, arena.payload):
        with pytest.raises(IndexError, match="no slot"):
            view(*place)


@pytest.mark.parametrize("slots", [(3,), (3, 2, 1), (3, 0)])
def test_slots_must_fit_the_layout(slots: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="at least 1 for each of the 2 groups"):
        Arena(_layout(), slots)


def test_the_capacity_is_filled_and_never_exceeded() -> None:
    layout = _layout()
    one = chunk_bytes(layout)
    assert one == sum(frame_bytes(group) for group in layout.groups)
    for capacity in (2 * one, 3 * one - 1, 3 * one, 100 * one + 7):
        slots = slots_for(layout, capacity)
        assert slots == (capacity // one,) * 2
        assert Arena(layout, slots).size_bytes <= capacity < Arena(layout, slots).size_bytes + one


@pytest.mark.parametrize("capacity", [0, 1, -5])
def test_too_small_a_capacity_is_refused_with_the_size_of_a_chunk(capacity: int) -> None:
    one = chunk_bytes(_layout())
    with pytest.raises(ConfigError) as caught:
        slots_for(_layout(), capacity or 2 * one - 1)
    for told in ("host.capacity_bytes", "256 tokens", f"takes {one} bytes", f"at least {2 * one}"):
        assert told in str(caught.value)


def test_more_memory_than_there_is_is_a_setting_to_mend() -> None:
    with pytest.raises(ConfigError, match="bytes of host memory"):
        Arena(_layout(), (1 << 40, 2))
    with pytest.raises(ConfigError, match="bytes of host memory"):
        Arena(_layout(), (1 << 60, 2))


def test_a_closed_arena_gives_nothing_and_closes_twice() -> None:
    arena = Arena(_layout(), (3, 2))
    arena.close()
    arena.close()
    for view in (arena.frame, arena.payload):
        with pytest.raises(ValueError, match="the arena is closed"):
            view(0, 0)


def test_a_view_outlives_the_arena() -> None:
    arena = Arena(_layout(), (3, 2))
    view = arena.payload(1, 1)
    arena.close()
    del arena
    gc.collect()
    view[:] = b"\x07" * len(view)
    assert view[-1] == 7


class _PageLocks:
    def __init__(self) -> None:
        self.locked: dict[int, int] = {}
        self.told: list[tuple[int, int]] = []

    def __call__(self, address: int, size_bytes: int, slot_bytes: int) -> "object":
        self.locked[address] = size_bytes
        self.told.append((address, size_bytes))
        return lambda: self.locked.pop(address)


def test_page_locked_memory_stays_locked_while_a_view_is_out() -> None:
    locks = _PageLocks()
    arena = Arena(_layout(), (3, 2), page_lock=locks)  # type: ignore[arg-type]
    view: object = np.frombuffer(arena.payload(1, 1), np.uint8)  # what a copier makes of it
    arena.close()
    gc.collect()
    assert list(locks.locked.values()) == [2 * frame_bytes(_layout().groups[1])]
    del view
    gc.collect()
    assert not locks.locked


def test_an_unlock_that_fails_is_logged_and_no_more(caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> None:
        raise RuntimeError("planned")

    Arena(_layout(), (3, 2), page_lock=lambda _address, _bytes, _slot: fail).close()
    gc.collect()
    assert [record.getMessage() for record in caplog.records] == [
        "page-locked host memory could not be unlocked, and stays locked until the process ends: planned"
    ] * 2


def test_a_page_lock_that_fails_leaves_nothing_locked() -> None:
    locks = _PageLocks()

    def second_fails(address: int, size_bytes: int, slot_bytes: int) -> object:
        if locks.told:
            raise RuntimeError("planned")
        return locks(address, size_bytes, slot_bytes)

    with pytest.raises(RuntimeError, match="planned"):
        Arena(_layout(), (3, 2), page_lock=second_fails)  # type: ignore[arg-type]
    gc.collect()
    assert not locks.locked
    assert locks.told


def test_shared_memory_must_have_room_for_the_slots() -> None:
    with pytest.raises(ValueError, match="do not fit in 4096 bytes of shared memory"):
        Arena(_layout(), (3, 2), shared={0: page_aligned(4096)})


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.parametrize("is_shared", [False, True])
def test_a_forked_child_does_not_take_the_slots_with_it(is_shared: bool) -> None:
    memory = as_bytes(mmap.mmap(-1, 1 << 20))  # mapped by several processes
    arena = Arena(_layout(), (3, 2), shared={0: memory} if is_shared else {})
    view = arena.payload(0, 0)
    view[0] = 1
    child = os.fork()
    if not child:  # nothing of pytest may run here
        signal.signal(signal.SIGSEGV, signal.SIG_DFL)
        os._exit(0 if view[0] else 1)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGSEGV
    assert view[0] == 1
