"""The arena: host memory as slots. All chunks pass through it, and no other memory of ours holds a payload.

    group 0   | head room | payload | head room | payload | ...     one anonymous mapping, slots without gaps
    group 1   | head room | payload | ...

A slot is head room and payload in one piece, each a multiple of `ALIGNMENT` and page-aligned, so that a raw frame is
built, written, read and verified where it lies, with direct I/O.
"""

import logging
import mmap
import weakref
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from kvtier.codec.frame import frame_bytes, head_bytes
from kvtier.errors import ConfigError
from kvtier.layout import ALIGNMENT, KvLayout, align_up

SLOTS_MIN = 2
"""Fewest slots of a group: one can be filled while the other is read."""

PageLock = Callable[[int, int, int], Callable[[], None]]
"""Page-locks `bytes` from `address` on, perhaps later, in parts that are multiples of the third number, a slot's bytes;
returns what unlocks them. Given by whoever has a device."""

Bytes = npt.NDArray[np.uint8]

_HUGE_PAGE_BYTES = 2 << 20

_log = logging.getLogger(__name__)


def chunk_bytes(layout: KvLayout) -> int:
    """Host bytes that one chunk takes: a slot of every group."""
    return sum(frame_bytes(group) for group in layout.groups)


def slots_for(layout: KvLayout, capacity_bytes: int, ranks: int = 1) -> tuple[int, ...]:
    """How many slots of each group fit in `capacity_bytes`: the same number, because a chunk needs one of each.

    Args:
        layout: of one rank.
        capacity_bytes: of all ranks together.
        ranks: how many there are; a chunk takes a slot on each.

    Raises:
        ConfigError: fewer than `SLOTS_MIN` fit; the message says what a chunk costs and the least capacity.
    """
    one = chunk_bytes(layout) * ranks
    count = capacity_bytes // one
    if count < SLOTS_MIN:
        raise ConfigError(
            f"host.capacity_bytes = {capacity_bytes} is too small: a chunk of {layout.chunk_tokens} tokens of this "
            f"model takes {one} bytes of host memory; allowed: at least {SLOTS_MIN * one}"
        )
    return (count,) * len(layout.groups)


def page_aligned(size_bytes: int) -> Bytes:
    """`size_bytes` of zeroed, page-aligned memory of our own; it lives as long as any view of it.

    Raises:
        ConfigError: the system does not give that much.
    """
    # Room to begin at a huge page; untouched memory costs nothing.
    slack = _HUGE_PAGE_BYTES if size_bytes >= _HUGE_PAGE_BYTES else 0
    try:
        mapping = mmap.mmap(
            -1, align_up(max(size_bytes, 1)) + slack, flags=mmap.MAP_PRIVATE | getattr(mmap, "MAP_ANONYMOUS", 0)
        )
    except (OSError, OverflowError, ValueError) as error:
        raise ConfigError(f"{size_bytes} bytes of host memory cannot be had: {error}") from error
    # A child made by fork has no mover, and would make us copy each page that we write while it lives.
    for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):
        _advise(mapping, advice)
    whole = np.frombuffer(mapping, np.uint8)
    start = -_address(whole) % _HUGE_PAGE_BYTES if slack else 0
    return whole[start : start + size_bytes]


class Arena:
    """Slots for every KV group, one mapping each.

    Args:
        layout: the KV groups.
        slots: how many slots each group has (`slots_for`).
        populate: touch every page now, which takes about a second for 4 GiB, instead of at its first use.
        page_lock: page-locks each mapping; undone when the last view of the mapping is gone.

    `close` may come while a stuck thread still holds a view: that memory then stays until the view goes.

    Raises:
        ConfigError: the system does not give the memory.
        ValueError: `slots` does not fit the layout.
    """

    def __init__(
        self, layout: KvLayout, slots: Sequence[int], *, populate: bool = False, page_lock: PageLock | None = None
    ) -> None:
        if len(slots) != len(layout.groups) or min(slots) < 1:
            raise ValueError(f"slots must name at least 1 for each of the {len(layout.groups)} groups, got {slots}")
        self.slots = tuple(slots)
        self._heads = [head_bytes(group) for group in layout.groups]
        self._sizes = [frame_bytes(group) for group in layout.groups]
        if any(size % ALIGNMENT for size in (*self._heads, *self._sizes)):
            raise AssertionError(f"slots must be multiples of {ALIGNMENT} bytes")
        self._views: list[memoryview] | None = [
            _region(size * count, size, populate=populate, page_lock=page_lock)
            for size, count in zip(self._sizes, self.slots, strict=True)
        ]

    @property
    def size_bytes(self) -> int:
        """Bytes of all slots together."""
        return sum(size * count for size, count in zip(self._sizes, self.slots, strict=True))

    def frame(self, group: int, slot: int) -> memoryview:
        """The whole slot, head room and payload; writable and page-aligned.

        Raises:
            IndexError: no such slot.
            ValueError: the arena is closed.
        """
        start = self._start(group, slot)
        return self._view(group)[start : start + self._sizes[group]]

    def payload(self, group: int, slot: int) -> memoryview:
        """The slot's payload; writable and page-aligned.

        Raises:
            IndexError: no such slot.
            ValueError: the arena is closed.
        """
        start = self._start(group, slot)
        return self._view(group)[start + self._heads[group] : start + self._sizes[group]]

    def close(self) -> None:
        """Give the memory back, each mapping when the last view of it is gone. Twice is fine."""
        self._views = None

    def _view(self, group: int) -> memoryview:
        if self._views is None:
            raise ValueError("the arena is closed")
        return self._views[group]

    def _start(self, group: int, slot: int) -> int:
        # Checked here because a view would silently take a negative or too large slot for something else.
        if not 0 <= group < len(self.slots) or not 0 <= slot < self.slots[group]:
            raise IndexError(f"no slot {slot} of group {group}; there are {self.slots}")
        return slot * self._sizes[group]


def _region(size_bytes: int, slot_bytes: int, *, populate: bool, page_lock: PageLock | None) -> memoryview:
    region = page_aligned(size_bytes)
    if populate:
        region[::ALIGNMENT] = 0
    if page_lock is not None:
        unlock = page_lock(_address(region), size_bytes, slot_bytes)
        # The array dies with its last view and before its mapping, so that memory is unlocked first and unmapped then.
        # Not at exit: a thread may still be copying there, and the system cleans up anyway.
        weakref.finalize(region, _unlock, unlock).atexit = False
    return region.data


def _unlock(unlock: Callable[[], None]) -> None:
    try:
        unlock()
    except Exception as error:  # noqa: BLE001 - from a finalizer nobody could catch it; the memory goes back in any case
        _log.warning("page-locked memory could not be unlocked: %s", error)


def _advise(mapping: mmap.mmap, advice: str) -> None:
    number = getattr(mmap, advice, None)
    if number is None:
        return
    try:
        mapping.madvise(number)
    except OSError as error:
        _log.debug("%s is not to be had: %s", advice, error)


def _address(region: Bytes) -> int:
    return int(region.__array_interface__["data"][0])
