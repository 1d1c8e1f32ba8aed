"""Accesses vLLM's block pool: pins the source blocks of stores, and orders the free list.

A freed block keeps its bytes until it is handed out again. But the pool first hands out blocks without a hash: blocks
that slid out of a window, or all blocks if prefix caching is off. So a store pins each source block while the request
uses it. When only the pin is left, the block goes to the end of the free list and counts as free. The pool calls back
when it hands the block out (`BlockPool.unpin_blocks`, which vLLM's HiSparse also uses).
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from kvtier.connect.vllm.engine_hooks import free_blocks, hand_out_first
from kvtier.connect.vllm.vllm_types import Block, BlockPool


class BlockContent(NamedTuple):
    """A block, and its hash at the time of the lookup."""

    block: int
    hash: Any
    """vLLM's hash of the block, or None if the prefix cache cannot find it."""


class BlockPins:
    """Pins on blocks of vLLM's pool, and its free list. Only the scheduler's thread uses them.

    Args:
        pool: vLLM's block pool.
        on_reuse: called when a watched block is handed out, before anything is written to it.
        guarded: wraps a callback so that it cannot raise into vLLM's pool.
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
        self._pins: Counter[int] = Counter()
        """Number of pins on each block, because stores of several requests may read it. Bounded by the number of
        blocks."""

    def pin(self, blocks: Collection[int]) -> None:
        """Pin `blocks`, which are in use."""
        self._pool.touch(self._blocks(blocks))
        self._pins.update(blocks)

    def yield_idle(self, blocks: Sequence[int], *, is_thorough: bool) -> list[int]:
        """Unpin those of `blocks` that nothing else uses, watch them for reuse, and return them.

        Args:
            blocks: block ids of one request and one group, deepest first.
            is_thorough: whether to check every block. Otherwise only the first and last are checked: a request frees
                its blocks together, and a window frees the shallowest.
        """
        ends = (blocks[:1], blocks[-1:])
        if not is_thorough and not any(self._is_idle(block) for end in ends for block in self._blocks(end)):
            return []
        idle = list(filter(self._is_idle, self._blocks(blocks)))
        numbers = [block.block_id for block in idle]
        self._pool.unpin_blocks(idle, self._watched)
        self._pins.subtract(numbers)
        return numbers

    def unpin(self, blocks: Collection[int]) -> None:
        """Release pinned `blocks`."""
        self._pool.free_blocks(self._blocks(blocks))
        self._pins.subtract(blocks)

    @property
    def is_idle(self) -> bool:
        """Whether no block is in use. Otherwise vLLM does not reset its prefix cache."""
        return self._pool.get_num_free_blocks() == self._pool.num_gpu_blocks - 1  # the null block is always in use

    @property
    def is_blank(self) -> bool:
        """Whether no block contains KV that a request uses or can find."""
        return self.is_idle and all(block.block_hash is None for block in self._pool.blocks)

    def free(self) -> Iterator[BlockContent]:
        """Return the free blocks in allocation order. Any change to the pool invalidates the iterator."""
        return map(_content, free_blocks(self._pool))

    def contents(self, blocks: Iterable[int]) -> list[BlockContent]:
        """Return `blocks` with their current hashes."""
        return list(map(_content, self._blocks(blocks)))

    def is_free(self, content: BlockContent) -> bool:
        """Return whether the block is free and its hash is unchanged."""
        block = self._pool.blocks[content.block]
        return block.next_free_block is not None and block.block_hash == content.hash

    def hand_out_first(self, blocks: Sequence[BlockContent]) -> None:
        """Move these free blocks to the front of the free list, in this order."""
        hand_out_first(self._pool, self._blocks(content.block for content in blocks))

    def _blocks(self, blocks: Iterable[int]) -> list[Block]:
        return [self._pool.blocks[block] for block in blocks]

    def _is_idle(self, block: Block) -> bool:
        return block.ref_cnt == self._pins[block.block_id]

    def _reused(self, block: Block) -> None:
        if block.next_free_block is None:
            self._on_reuse(block.block_id)
            return
        # The block is still free, and its bytes are intact. vLLM has only reset its prefix cache. Keep watching.
        self._pool.touch([block])
        self._pool.unpin_blocks([block], self._watched)


def _content(block: Block) -> BlockContent:
    return BlockContent(block.block_id, block.block_hash)
