"""The stores that are open, and the fence around the blocks that they read.

Nothing that vLLM does waits for a store. Its blocks may be freed meanwhile: the request ends, is preempted, or slides
its window on. They keep their bytes until the pool hands them out again (`pool`). A store of which that happens to one
block has lost: what has not been copied never will be, and what is being copied does not count.
"""

import itertools
from collections.abc import Callable, Collection, Sequence

from kvtier.connect.vllm.block_pool import Pins
from kvtier.runtime.base import Session
from kvtier.types import Hint, Place, Prefix, RequestId, StoreDone


class Stores:
    """All open stores of one engine. Belongs to the scheduler's thread.

    Args:
        session: where they go.
        open_pins: vLLM's block pool, given who is to be told of blocks that are handed out again.
    """

    def __init__(self, session: Session, open_pins: Callable[[Callable[[int], None]], Pins]) -> None:
        self._session = session
        self.pins = open_pins(self._reused)
        self._read: dict[RequestId, frozenset[int]] = {}
        """The blocks that each open store reads."""
        self._pinned: dict[RequestId, list[list[int]]] = {}
        """Those of them that are pinned, by group, deepest first. The pool hands out again what it got first, and a
        prefix without its beginning is of no use."""
        self._lost: dict[RequestId, None] = {}
        self._numbers = itertools.count()
        self.lost_count = 0
        """Stores that lost a block before they had ended."""

    def __len__(self) -> int:
        return len(self._read)

    @property
    def has_pins(self) -> bool:
        """Whether some block is kept from being freed."""
        return any(map(any, self._pinned.values()))

    def pin(self, blocks: Collection[int]) -> None:
        """Keep blocks that may soon be stored."""
        self.pins.pin(blocks)

    def unpin(self, blocks: Collection[int]) -> None:
        """They were not."""
        self.pins.unpin(blocks)

    def hide(self, blocks: Collection[int]) -> None:
        """VLLM's prefix cache is not to find `blocks`."""
        self.pins.hide(blocks)

    def begin(self, request: str, prefix: Prefix, places: Sequence[Place], hint: Hint) -> None:
        """Store the chunks at `places`, whose blocks hold their final bytes and are in use."""
        name = RequestId(f"S{next(self._numbers)}/{request}")
        deepest_first = sorted(places, key=lambda place: place.chunk, reverse=True)
        groups: dict[int, dict[int, None]] = {}
        for place in deepest_first:
            groups.setdefault(place.group, {}).update((block, None) for block in reversed(place.blocks) if block > 0)
        pinned = [list(blocks) for blocks in groups.values()]
        self.pins.pin(list(itertools.chain.from_iterable(pinned)))  # all or none, whatever raises
        self._read[name], self._pinned[name] = frozenset().union(*pinned), pinned
        try:
            self._session.store(name, prefix, places, hint)
        except BaseException:
            self._forget(name)  # no StoreDone will
            raise

    def yield_idle(self, *, is_thorough: bool = False) -> bool:
        """Let vLLM have the blocks that only stores still need; whether there were any. See `Pins.yield_idle`."""
        has_yielded = False
        for pinned in reversed(self._pinned.values()):  # what a request stored last is its deepest
            for number, blocks in enumerate(pinned):
                idle = set(self.pins.yield_idle(blocks, is_thorough=is_thorough))
                if idle:
                    pinned[number] = list(itertools.filterfalse(idle.__contains__, blocks))
                    has_yielded = True
        return has_yielded

    def reading(self, blocks: Collection[int]) -> set[RequestId]:
        """Open stores that read one of `blocks`, lost or not."""
        return {name for name, read in self._read.items() if not read.isdisjoint(blocks)}

    def give_up_lost(self) -> list[RequestId]:
        """Give up the stores that have lost a block since the last call."""
        lost = [name for name in self._lost if name in self._read]
        self._lost.clear()
        self.lost_count += len(lost)
        for name in lost:
            self._session.release(name)
        return lost

    def ended(self, done: StoreDone) -> None:
        """A store has ended."""
        self._forget(done.request)

    @property
    def open(self) -> list[RequestId]:
        """The stores that read blocks."""
        return list(self._read)

    def abandon(self) -> None:
        """Give every block back. The open stores have been revoked."""
        for name in self.open:
            self._forget(name)

    def _reused(self, block: int) -> None:
        # In the middle of vLLM's allocation: only take note.
        self._lost.update(dict.fromkeys(self.reading((block,))))

    def _forget(self, name: RequestId) -> None:
        pinned = self._pinned.get(name, [])
        while pinned:  # once each, also when this raises and is called again
            self.pins.unpin(pinned[-1])
            pinned.pop()
        self._pinned.pop(name, None)
        self._read.pop(name, None)
