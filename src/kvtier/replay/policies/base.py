"""What a replay asks of a policy: one cache of so many blocks, told of each access, deepest block first."""

from collections.abc import Sequence


class Policy:
    """A cache of `capacity` blocks. Subclasses say what `touch` and `insert` do, or what `access` does.

    Args:
        capacity: blocks that fit.
        block_count: distinct blocks of the trace.
    """

    def __init__(self, capacity: int, block_count: int) -> None:
        self.capacity = capacity
        self.present = bytearray(block_count)
        """1 for each block that is here."""
        self.held = 0
        """Blocks that are here."""
        self.evictions = 0
        self.request = -1

    def begin(self, request: int, time_s: float, blocks: Sequence[int]) -> None:  # noqa: ARG002  for those who care
        """A request begins; its lookup is done after this, and before its accesses."""
        self.request = request

    def access(self, blocks: Sequence[int]) -> tuple[int, int]:
        """All blocks of the request are accessed, from the last to the first: how many were here, and were inserted."""
        present, touch, insert = self.present, self.touch, self.insert
        hits = inserted = 0
        for place in range(len(blocks) - 1, -1, -1):
            block = blocks[place]
            if present[block]:
                hits += 1
                touch(block, place)
            elif insert(block, place):
                inserted += 1
        return hits, inserted

    def touch(self, block: int, place: int) -> None:
        """A block that is here is used; `place` is its position in the prompt."""

    def insert(self, block: int, place: int) -> bool:
        """A block that is not here was computed; returns whether it is kept."""
        raise NotImplementedError

    def _enter(self, block: int) -> None:
        self.present[block] = 1
        self.held += 1

    def _leave(self, block: int) -> None:
        self._drop(block)
        self.evictions += 1

    def _drop(self, block: int) -> None:
        """Not to make room, but because nobody will use it again."""
        self.present[block] = 0
        self.held -= 1
