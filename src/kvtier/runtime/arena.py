"""The arena: host memory divided into slots. Every payload in host memory lies in a slot.

    group 0   | head room | payload | head room | payload | ...     one anonymous mapping, slots without gaps
    group 1   | head room | payload | ...

A slot consists of head room (for the header of a frame) and payload, contiguous and page-aligned. Both sizes are
multiples of `ALIGNMENT`, so a raw frame is built and verified in place, and moved with direct I/O.
"""

import logging
import mmap
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType
from typing import cast

import numpy as np
import numpy.typing as npt

from kvtier.codec.frame import frame_bytes, head_bytes
from kvtier.errors import ConfigError
from kvtier.layout import ALIGNMENT, GroupLayout, KvLayout, align_up

SLOTS_MIN = 2
"""Minimum number of slots in a group: one is filled while another is read."""

PageLock = Callable[[int, int, int], Callable[[], None]]
"""(address, bytes, bytes of a slot) -> unlock. Page-locks memory, perhaps later, in ranges of whole slots.

`unlock` raises if some memory may stay locked."""

Bytes = npt.NDArray[np.uint8]

_HUGE_PAGE_BYTES = 2 << 20

_log = logging.getLogger(__name__)

_kept: list[object] = []
"""Memory that may still be page-locked. It stays mapped until the process ends, so that nothing else is mapped at a
locked address."""


def slot_bytes(group: GroupLayout) -> int:
    """Return the size of a slot in bytes, or 0 on a rank without the group."""
    return 0 if group.is_absent else frame_bytes(group)


def chunk_bytes(layout: KvLayout) -> int:
    """Return the bytes of host memory that one chunk takes: a slot of every group."""
    return sum(slot_bytes(group) for group in layout.groups)


def slots_for(
    layout: KvLayout, capacity_bytes: int, one: int = 0, setting: str = "host.capacity_bytes"
) -> tuple[int, ...]:
    """Return how many slots of each group fit in `capacity_bytes`.

    The number is the same for every group, because a chunk needs one slot of each.

    Args:
        layout: the layout of one rank.
        capacity_bytes: total host memory of all ranks.
        one: total host bytes of one chunk on all ranks; 0 if this rank is the only one.
        setting: name of the setting that gives `capacity_bytes`, for the error.

    Raises:
        ConfigError: fewer than `SLOTS_MIN` fit.
    """
    one = one or chunk_bytes(layout)
    count = capacity_bytes // one
    if count < SLOTS_MIN:
        raise ConfigError(
            f"is too small, because a chunk of {layout.chunk_tokens} tokens of this model takes {one} bytes of host "
            "memory",
            setting=setting,
            value=str(capacity_bytes),
            allowed=f"at least {SLOTS_MIN * one}",
        )
    return (count,) * len(layout.groups)


def page_aligned(size_bytes: int) -> Bytes:
    """Allocate `size_bytes` of zeroed, page-aligned memory, which lives as long as any view of it.

    Raises:
        ConfigError: the system cannot provide it.
    """
    # The slack lets the memory start on a huge page. Untouched pages take no memory.
    slack = _HUGE_PAGE_BYTES if size_bytes >= _HUGE_PAGE_BYTES else 0
    try:
        mapping = mmap.mmap(-1, align_up(max(size_bytes, 1)) + slack, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError, ValueError) as error:
        raise ConfigError(f"{size_bytes} bytes of host memory cannot be allocated: {error}") from error
    whole = as_bytes(mapping)
    start = -_address(whole) % _HUGE_PAGE_BYTES if slack else 0
    return whole[start : start + size_bytes]


def as_bytes(mapping: mmap.mmap) -> Bytes:
    """Return the bytes of a mapping for slots. The mapping lives as long as any view of it."""
    # A forked child does not use the arena, but it would make the kernel copy each page that the parent writes.
    for advice in (mmap.MADV_HUGEPAGE, mmap.MADV_DONTFORK):
        with suppress(OSError):  # some kernels support only one of the two
            mapping.madvise(advice)
    return np.frombuffer(mapping, np.uint8)


class Arena:
    """Slots for every KV group, with one mapping per group.

    Args:
        layout: the KV groups.
        slots: number of slots of each group (`slots_for`).
        populate: whether to touch every page now (about a second for 4 GiB) instead of at its first use.
        page_lock: page-locks each mapping until its last view is gone.
        shared: memory of the groups whose slots other ranks also use (`shared_memory`).

    Memory stays mapped after `close` while a stuck thread holds a view of it.

    Raises:
        ConfigError: the system cannot provide the memory.
        ValueError: `slots` does not fit the layout.
    """

    def __init__(
        self,
        layout: KvLayout,
        slots: Sequence[int],
        *,
        populate: bool = False,
        page_lock: PageLock | None = None,
        shared: Mapping[int, Bytes] = MappingProxyType({}),
    ) -> None:
        if len(slots) != len(layout.groups) or min(slots) < 1:
            raise ValueError(f"slots must be at least 1 for each of the {len(layout.groups)} groups, got {slots}")
        self.slots = tuple(slots)
        self._heads = [head_bytes(group) for group in layout.groups]
        self._sizes = [slot_bytes(group) for group in layout.groups]
        self.filled_elsewhere = frozenset(
            number for number, group in enumerate(layout.groups) if group.is_absent or (group.copy and number in shared)
        )
        """The groups whose slots only another rank fills."""
        self._shared = frozenset(shared)
        self._stuck: set[int] = set()
        """The groups whose memory may stay page-locked."""
        self._populate, self._page_lock = populate, page_lock
        self._taken: dict[int, weakref.finalize[[Callable[[], None], object], Bytes] | None] = {}
        """The groups whose memory is in use, and their page locks."""
        self._views: list[memoryview] | None = [
            _region(size * count, shared.get(group))
            for group, (size, count) in enumerate(zip(self._sizes, self.slots, strict=True))
        ]
        self.take()

    @property
    def size_bytes(self) -> int:
        """Total bytes of all slots."""
        return sum(size * count for size, count in zip(self._sizes, self.slots, strict=True))

    @property
    def memory(self) -> tuple[memoryview, ...]:
        """The memory of each group that this rank has; empty after `close`."""
        return tuple(view for view in self._views or () if view.nbytes)

    def frame(self, group: int, slot: int) -> memoryview:
        """Return the whole slot, head room and payload, writable and page-aligned.

        Raises:
            IndexError: there is no such slot.
            ValueError: the arena is closed.
        """
        # A memoryview does not reject slices with a negative or too large offset.
        if not 0 <= group < len(self.slots) or not 0 <= slot < self.slots[group]:
            raise IndexError(f"group {group} has no slot {slot}; the groups have {self.slots} slots")
        if self._views is None:
            raise ValueError("the arena is closed")
        size = self._sizes[group]
        return self._views[group][slot * size : (slot + 1) * size]

    def payload(self, group: int, slot: int) -> memoryview:
        """Return the payload of the slot, writable and page-aligned.

        Raises:
            IndexError: there is no such slot.
            ValueError: the arena is closed.
        """
        return self.frame(group, slot)[self._heads[group] :]

    def take(self) -> None:
        """Populate and page-lock the memory, at the start and after `free`."""
        for group, view in enumerate(self._views or ()):
            if group in self._taken or not view.nbytes:
                continue
            region, self._taken[group] = cast("Bytes", view.obj), None
            if self._populate:
                region[::ALIGNMENT] = 0
            if self._page_lock is not None:
                unlock = self._page_lock(_address(region), region.nbytes, self._sizes[group])
                # The array is freed with its last view and before its mapping, so memory is unlocked before it is
                # unmapped. At exit, the system unlocks the memory instead, because a thread may still be copying.
                lock = self._taken[group] = weakref.finalize(region, _unlock, unlock, region.base)
                lock.atexit = False

    def free(self) -> tuple[int, int]:
        """Return the pages to the system until `take` is called. The contents are lost. No slot may be in use.

        Returns:
            The bytes kept because other ranks also use them, and the bytes kept because they may still be page-locked.
            A device would not see the pages that replace locked ones.
        """
        for group in [it for it in self._taken if it not in self._shared | self._stuck]:
            lock = self._taken[group]
            if lock is not None and lock() is False:
                self._stuck.add(group)
                continue
            del self._taken[group]
            region = cast("Bytes", (self._views or [])[group].obj)
            whole = cast("Bytes", region if region.base is None else region.base)
            mapping = cast("mmap.mmap", cast("memoryview", whole.base).obj)
            mapping.madvise(mmap.MADV_DONTNEED, _address(region) - _address(whole), region.nbytes)
        shared, stuck = (sum(self._sizes[it] * self.slots[it] for it in some) for some in (self._shared, self._stuck))
        return shared, stuck

    def close(self) -> None:
        """Release each mapping once its last view is gone. Idempotent."""
        self._views = None


def _region(size_bytes: int, shared: Bytes | None) -> memoryview:
    region = page_aligned(size_bytes) if shared is None else shared[:size_bytes]
    if len(region) < size_bytes:
        raise ValueError(f"slots of {size_bytes} bytes do not fit in {len(region)} bytes of shared memory")
    return region.data


def _unlock(unlock: Callable[[], None], memory: object) -> bool:
    try:
        unlock()
    except Exception as error:  # noqa: BLE001 - a finalizer has no caller
        _kept.append(memory)
        _log.warning(
            "page-locked host memory could not be unlocked, and stays locked until the process ends: %s", str(error)
        )
        return False
    return True


def _address(region: Bytes) -> int:
    return int(region.__array_interface__["data"][0])
