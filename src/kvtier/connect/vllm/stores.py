"""The stores that are open, and the fence around the blocks that they read.

Nothing that vLLM does waits for a store. Its blocks may be freed meanwhile: the request ends, is preempted, or slides
its window on. They keep their bytes until the pool hands them out again (`pool`). A store of which that happens to one
block has lost: what has not been copied never will be, and what is being copied does not count.
"""

import itertools
from collections.abc import Callable, Collection, Sequence

from kvtier.connect.vllm.pool import Pins
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
        self._pinned: dict[RequestId, list[int]] = {}
        """Those of them that we keep from being freed, deepest first: in that order the pool hands them out again, and
        a prefix without its beginning is of no use to anybody."""
        self._lost: dict[RequestId, None] = {}
        self._numbers = itertools.count()
        self.lost_count = 0
        """Stores that lost a block before they had ended."""

    def __len__(self) -> int:
        return len(self._read)

    @property
    def has_pins(self) -> bool:
        """Whether some block is kept from being freed."""
        return any(self._pinned.values())

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
        blocks = list(dict.fromkeys(block for place in deepest_first for block in reversed(place.blocks) if block > 0))
        self.pins.pin(blocks)
        self._read[name], self._pinned[name] = frozenset(blocks), blocks
        try:
            self._session.store(name, prefix, places, hint)
        except BaseException:
            self._forget(name)  # no StoreDone will
            raise

    def yield_idle(self) -> bool:
        """Let vLLM have the blocks that only stores still need; whether there were any."""
        has_yielded = False
        for name, pinned in reversed(self._pinned.items()):  # what a request stored last is its deepest
            idle = set(self.pins.yield_idle(pinned))
            if idle:
                self._pinned[name] = [block for block in pinned if block not in idle]
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

    def abandon(self) -> list[RequestId]:
        """Give every block back; the stores that read them, and must not any more."""
        names = list(self._read)
        for name in names:
            self._forget(name)
        return names

    def _reused(self, block: int) -> None:
        # In the middle of vLLM's allocation: only take note.
        self._lost.update(dict.fromkeys(self.reading((block,))))

    def _forget(self, name: RequestId) -> None:
        self._read.pop(name, None)
        self.pins.unpin(self._pinned.pop(name, ()))
