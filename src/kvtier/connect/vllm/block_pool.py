"""vLLM's block pool, as far as stores need it: blocks that are read stay readable as long as possible, at no cost.

A block that vLLM frees keeps its bytes until it is handed out again. But blocks without a hash are handed out first:
those that slid out of a window, or all of them without prefix caching. So each block of a store is pinned while its
owner has it; when it is ours alone it goes to the very end of the queue, where it counts as free, and the pool says
when it hands it out after all (`BlockPool.unpin_blocks`, which vLLM's HiSparse uses in the same way).
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

from kvtier.connect.vllm.vllm_types import Block, BlockPool


class Held(NamedTuple):
    """A block, and what it held when somebody looked."""

    block: int
    hash: Any
    """VLLM's; None: nothing that its prefix cache could find."""


class Pins(Protocol):
    """What stores ask of the pool."""

    def pin(self, blocks: Collection[int]) -> None:
        """Keep `blocks`, which are in use."""
        ...

    def yield_idle(self, blocks: Sequence[int], *, is_thorough: bool) -> list[int]:
        """Give up those of the pinned `blocks` that only the pin keeps; returns which. From now on they are watched.

        Args:
            blocks: of one request and one group, the deepest first.
            is_thorough: look at every block. Otherwise the two ends decide: a request gives its blocks back together,
                and a window slides off the shallowest. What the ends do not show waits for a thorough call.
        """
        ...

    def unpin(self, blocks: Collection[int]) -> None:
        """Give up pinned `blocks`."""
        ...

    def hide(self, blocks: Collection[int]) -> None:
        """Let the prefix cache find `blocks` no more; whoever has them keeps them."""
        ...

    def free(self) -> Iterator[Held]:
        """The free blocks, in the order in which they will be handed out. Not to be gone on with after a change."""
        ...

    def held(self, blocks: Iterable[int]) -> list[Held]:
        """What `blocks` hold now."""
        ...

    def is_free(self, held: Held) -> bool:
        """Whether a block is free and still holds that."""
        ...

    def hand_out_first(self, blocks: Sequence[Held]) -> None:
        """Hand out these free blocks before all others, in this order."""
        ...


class BlockPins:
    """The pins of one engine. Belongs to the scheduler's thread.

    Args:
        pool: vLLM's.
        on_reuse: told of a watched block that is handed out again, before anything is written to it.
        guarded: makes a callback that does not raise into vLLM's pool.
    """

    def __init__(
        self,
        pool: BlockPool,
        on_reuse: Callable[[int], None],
        guarded: Callable[[Callable[[Block], None]], Callable[[Block], None]] = lambda act: act,
    ) -> None:
        self._pool = pool
        self._on_reuse = on_reuse
        self._watched = guarded(self._reused)

    def pin(self, blocks: Collection[int]) -> None:
        """See `Pins`."""
        self._pool.touch(self._blocks(blocks))

    def yield_idle(self, blocks: Sequence[int], *, is_thorough: bool) -> list[int]:
        """See `Pins`."""
        ends = (blocks[:1], blocks[-1:])
        if not is_thorough and all(block.ref_cnt != 1 for end in ends for block in self._blocks(end)):
            return []
        idle = [block for block in self._blocks(blocks) if block.ref_cnt == 1]
        numbers = [block.block_id for block in idle]
        self._pool.unpin_blocks(idle, self._watched)
        return numbers

    def unpin(self, blocks: Collection[int]) -> None:
        """See `Pins`."""
        self._pool.free_blocks(self._blocks(blocks))

    def hide(self, blocks: Collection[int]) -> None:
        """See `Pins`."""
        self._pool.evict_blocks(set(blocks))

    def free(self) -> Iterator[Held]:
        """See `Pins`."""
        return map(_held, self._pool.free_block_queue.iter_blocks_after(None))

    def held(self, blocks: Iterable[int]) -> list[Held]:
        """See `Pins`."""
        return list(map(_held, self._blocks(blocks)))

    def is_free(self, held: Held) -> bool:
        """See `Pins`."""
        block = self._pool.blocks[held.block]
        return block.next_free_block is not None and block.block_hash == held.hash

    def hand_out_first(self, blocks: Sequence[Held]) -> None:
        """See `Pins`."""
        free = self._blocks(held.block for held in blocks)
        for block in free:
            self._pool.free_block_queue.remove(block)
        self._pool.free_block_queue.prepend_n(free)

    def _blocks(self, blocks: Iterable[int]) -> list[Block]:
        return [self._pool.blocks[block] for block in blocks]

    def _reused(self, block: Block) -> None:
        if block.next_free_block is None:
            self._on_reuse(block.block_id)
            return
        # Still in the queue: only the prefix cache was reset, which leaves the bytes alone. Watch on.
        self._pool.touch([block])
        self._pool.unpin_blocks([block], self._watched)


def _held(block: Block) -> Held:
    return Held(block.block_id, block.block_hash)
