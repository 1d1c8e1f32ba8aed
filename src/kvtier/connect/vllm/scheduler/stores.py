"""Selects the objects to store, and tracks open stores and the vLLM blocks that they read.

vLLM never waits for a store. Meanwhile it may free a store's blocks, because the request ends, is preempted, or has a
window that slides on. A freed block keeps its bytes until the pool hands it out again (`block_pool`). Reusing any
source block cancels the store: pending copies are not made, and running copies are discarded.
"""

import itertools
from collections.abc import Callable, Collection, Iterable, Sequence

from kvtier.connect.vllm.geometry import Geometry
from kvtier.connect.vllm.requests.tracked import TrackedRequest
from kvtier.connect.vllm.scheduler.block_pool import BlockPins
from kvtier.connect.vllm.vllm_types import BlockTables, StateOffer
from kvtier.layout import History, Window
from kvtier.runtime.session import Session
from kvtier.types import Place, Prefix, RequestId


class StoreSelection:
    """Selects which objects of a request to store.

    History groups store every chunk. Window groups store the chunks that a request requires to resume at a likely
    boundary. Likely boundaries are the end of each step, and the point where another prompt diverged (in vLLM's own
    cache or in kvtier). To serve every boundary, kvtier would have to store all KV of the window layers, in some models
    five of six layers. So the first request with a shared system prompt stores its history. The second request finds
    that history without a window at its end, and stores the window. The third request can load both. State groups store
    the states that vLLM offers. vLLM chooses them by the same reasoning
    (`CacheConfig.prefix_cache_retention_interval`).

    A prompt of whole chunks is looked up without its last chunk, so the boundary before the last chunk is likely, too.

    Args:
        geometry: locates chunks in block tables.
    """

    def __init__(self, geometry: Geometry) -> None:
        self._geometry = geometry
        groups = list(enumerate(geometry.groups))
        self._histories = [number for number, group in groups if isinstance(group.validity, History)]
        self._windows = {
            number: group.validity.tokens for number, group in groups if isinstance(group.validity, Window)
        }

    def mark_cached(self, tracked: TrackedRequest, tokens: int) -> None:
        """Record that the leading `tokens` can be loaded, so they need not be stored."""
        tracked.handed_tokens = tracked.published_tokens = tokens
        tracked.windows = {number: self._needed(window, tokens) for number, window in self._windows.items()}

    def usable(self, offers: Iterable[Sequence[int]], tracked: TrackedRequest) -> list[StateOffer]:
        """Return those of vLLM's offers that are at chunk boundaries and are not stored yet."""
        size = self._geometry.chunk_tokens
        states = itertools.starmap(StateOffer, offers)
        return [it for it in states if it.tokens % size == 0 and it.tokens > tracked.handed_tokens and it.block > 0]

    def take(self, tracked: TrackedRequest, tokens: int, tables: BlockTables) -> list[Place]:
        """Return the places to store now that the leading `tokens` are computed, and mark them as cached."""
        size = self._geometry.chunk_tokens
        before = tracked.handed_tokens
        wanted = {number: set(range(before // size, tokens // size)) for number in self._histories}
        junctions = {getattr(tracked.request, "shared_prefix_boundary", 0) // size * size, tracked.junction_tokens}
        if tokens == tracked.request.num_prompt_tokens:
            # A prompt that is repeated, or sent to a decode engine, is not loaded to its end.
            junctions.add(self._geometry.hit_tokens(tokens))
        for number, window in self._windows.items():
            needed = self._needed(window, tokens)
            for junction in junctions:
                if before < junction < tokens:
                    needed |= self._needed(window, junction)
            known = tracked.windows.setdefault(number, set())
            wanted[number] = needed - known
            known |= needed
        chunks = sorted({*range(before // size, tokens // size)}.union(*wanted.values()))
        places = self._geometry.sources(chunks, tables, tracked.offers)
        tracked.handed_tokens = tokens
        ends = [it.tokens for it in tracked.offers if it.tokens <= tokens] if self._geometry.has_states else [tokens]
        tracked.published_tokens = max(ends, default=tracked.published_tokens)
        return [place for place in places if place.group not in wanted or place.chunk in wanted[place.group]]

    def _needed(self, window: int, boundary: int) -> set[int]:
        """Return the chunks that overlap the last `window` tokens before `boundary`."""
        size = self._geometry.chunk_tokens
        return set(range(max(0, boundary - window) // size, boundary // size))


class Stores:
    """All open stores of one engine. Only the scheduler's thread uses them.

    Args:
        session: receives the stores.
        open_pins: opens vLLM's block pool, given the callback for reused blocks.
    """

    def __init__(self, session: Session, open_pins: Callable[[Callable[[int], None]], BlockPins]) -> None:
        self._session = session
        self.pins = open_pins(self._reused)
        self._read: dict[RequestId, frozenset[int]] = {}
        """Source blocks of each open store."""
        self._pinned: dict[RequestId, list[list[int]]] = {}
        """Pinned source blocks, per group, deepest first. The pool first reuses the block that was freed first, and a
        prefix without its start is useless."""
        self._lost: dict[RequestId, None] = {}
        """Stores with a reused block that `cancel_lost` has not canceled yet."""
        self.revoked: list[RequestId] = []
        """Canceled stores that no orders have named yet."""
        self._unsent: dict[RequestId, tuple[Prefix, Sequence[Place], str | None]] = {}
        """Stores that the session does not know yet."""
        self._numbers = itertools.count()

    @property
    def has_pins(self) -> bool:
        """Whether any block is pinned."""
        return any(map(any, self._pinned.values()))

    def begin(self, request: str, prefix: Prefix, places: Sequence[Place], conversation: str | None) -> None:
        """Open a store of the chunks at `places`. Their blocks have final bytes and are in use. `send` starts it."""
        name = RequestId(f"S{next(self._numbers)}/{request}")
        deepest_first = sorted(places, key=lambda place: place.chunk, reverse=True)
        groups: dict[int, dict[int, None]] = {}
        for place in deepest_first:
            groups.setdefault(place.group, {}).update((block, None) for block in reversed(place.blocks) if block > 0)
        pinned = [list(blocks) for blocks in groups.values()]
        self.pins.pin(list(itertools.chain.from_iterable(pinned)))  # one call: an exception leaves none pinned
        self._read[name], self._pinned[name] = frozenset().union(*pinned), pinned
        self._unsent[name] = (prefix, places, conversation)

    def send(self) -> None:
        """Pass all new stores to the session, now that the step that filled their blocks is known to be good."""
        for name, given in list(self._unsent.items()):
            try:
                self._session.store(name, *given)
            except BaseException:
                self.forget(name)  # no StoreDone will come
                raise
            del self._unsent[name]

    def yield_idle(self, *, is_thorough: bool = False) -> bool:
        """Release blocks that only stores use, as `BlockPins.yield_idle` does. Return whether any were released."""
        has_yielded = False
        for pinned in reversed(self._pinned.values()):  # a request's last store has its deepest blocks
            for number, blocks in enumerate(pinned):
                idle = set(self.pins.yield_idle(blocks, is_thorough=is_thorough))
                if idle:
                    pinned[number] = list(itertools.filterfalse(idle.__contains__, blocks))
                    has_yielded = True
        return has_yielded

    def reading(self, blocks: Collection[int]) -> set[RequestId]:
        """Return open stores that read any of `blocks`, including canceled ones."""
        return {name for name, read in self._read.items() if not read.isdisjoint(blocks)}

    def cancel_lost(self) -> None:
        """Cancel the stores that lost a block since the last call."""
        lost = [name for name in self._lost if name in self._read]
        self._lost.clear()
        for name in lost:
            self._session.release(name)
            if name in self._unsent:
                self.forget(name)  # no StoreDone will come
        self.revoked += lost

    def cancel_all(self) -> None:
        """Cancel all stores."""
        self._lost.update(dict.fromkeys(self._read))
        self.cancel_lost()

    def forget_offers(self, tracked: TrackedRequest) -> None:
        """Unpin the states that vLLM has offered for a request."""
        if tracked.offers:
            self.pins.unpin([it.block for it in tracked.offers])
            tracked.offers.clear()

    @property
    def open(self) -> list[RequestId]:
        """The open stores."""
        return list(self._read)

    def abandon(self) -> None:
        """Unpin all blocks. The open stores must have been revoked."""
        for name in self.open:
            self.forget(name)

    def _reused(self, block: int) -> None:
        # vLLM's block allocation calls this, so only record it.
        self._lost.update(dict.fromkeys(self.reading((block,))))

    def forget(self, name: RequestId) -> None:
        """Close a store and unpin its blocks."""
        pinned = self._pinned.get(name, [])
        while pinned:  # unpins each block once, even if this raises and is called again
            self.pins.unpin(pinned[-1])
            pinned.pop()
        self._pinned.pop(name, None)
        self._unsent.pop(name, None)
        self._read.pop(name, None)
