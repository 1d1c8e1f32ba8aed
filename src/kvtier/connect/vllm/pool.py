"""vLLM's block pool, as far as stores need it: blocks that are read stay readable as long as possible, at no cost.

A block that vLLM frees keeps its bytes until it is handed out again. But blocks without a hash are handed out first:
those that slid out of a window, or all of them without prefix caching. So each block of a store is pinned while its
owner has it; when it is ours alone it goes to the very end of the queue, where it counts as free, and the pool says
when it hands it out after all (`BlockPool.unpin_blocks`, which vLLM's HiSparse uses in the same way).
"""

from collections.abc import Callable, Collection
from typing import Protocol

from kvtier.connect.vllm.upstream import Block, BlockPool


class Pins(Protocol):
    """What stores ask of the pool."""

    def pin(self, blocks: Collection[int]) -> None:
        """Keep `blocks`, which are in use."""
        ...

    def yield_idle(self, blocks: Collection[int]) -> list[int]:
        """Give up those of the pinned `blocks` that nobody else uses; returns which. From now on they are watched."""
        ...

    def unpin(self, blocks: Collection[int]) -> None:
        """Give up pinned `blocks`."""
        ...

    def hide(self, blocks: Collection[int]) -> None:
        """Let the prefix cache find `blocks` no more; whoever has them keeps them."""
        ...


class PoolPins:
    """The pins of one engine. Belongs to the scheduler's thread.

    Args:
        pool: vLLM's.
        on_reuse: told of a watched block that is handed out again, before anything is written to it.
    """

    def __init__(self, pool: BlockPool, on_reuse: Callable[[int], None]) -> None:
        self._pool = pool
        self._on_reuse = on_reuse

    def pin(self, blocks: Collection[int]) -> None:
        """See `Pins`."""
        self._pool.touch(self._blocks(blocks))

    def yield_idle(self, blocks: Collection[int]) -> list[int]:
        """See `Pins`."""
        idle = [block for block in self._blocks(blocks) if block.ref_cnt == 1]
        self._pool.unpin_blocks(idle, self._reused)
        return [block.block_id for block in idle]

    def unpin(self, blocks: Collection[int]) -> None:
        """See `Pins`."""
        self._pool.free_blocks(self._blocks(blocks))

    def hide(self, blocks: Collection[int]) -> None:
        """See `Pins`."""
        self._pool.evict_blocks(set(blocks))

    def _blocks(self, blocks: Collection[int]) -> list[Block]:
        return [self._pool.blocks[block] for block in blocks]

    def _reused(self, block: Block) -> None:
        if block.next_free_block is None:
            self._on_reuse(block.block_id)
            return
        # Still in the queue: only the prefix cache was reset, which leaves the bytes alone. Watch on.
        self._pool.touch([block])
        self._pool.unpin_blocks([block], self._reused)
