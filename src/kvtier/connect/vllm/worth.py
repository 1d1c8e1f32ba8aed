"""Which objects of a request are worth storing.

History: every chunk. Windows: what those boundaries need at which a request may resume. These are the last one of each
step, and those up to which another prompt was alike, in vLLM's own cache or in kvtier's. For every boundary it would be
the whole text, in models of which five layers of six have a window. So of a system prompt the first request stores the
history. The second finds it without a window at its end, and stores that one. The third can be given both. States: the
ones that vLLM offers, by the same reasoning (`CacheConfig.prefix_cache_retention_interval`).
"""

from collections.abc import Iterable

from kvtier.connect.vllm.geometry import Geometry
from kvtier.connect.vllm.tracked import Tracked
from kvtier.connect.vllm.vllm_types import BlockTables, Offer
from kvtier.layout import History, Window
from kvtier.types import Place


class Worth:
    """Chooses for one engine.

    Args:
        geometry: where chunks lie in block tables.
    """

    def __init__(self, geometry: Geometry) -> None:
        self._geometry = geometry
        groups = list(enumerate(geometry.groups))
        self._histories = [number for number, group in groups if isinstance(group.validity, History)]
        self._windows = {
            number: group.validity.tokens for number, group in groups if isinstance(group.validity, Window)
        }

    def known(self, tracked: Tracked, tokens: int) -> None:
        """The cache can give the leading `tokens` of a request, so it has what is needed there."""
        tracked.handed_tokens = tokens
        tracked.windows = {number: self._needed(window, tokens) for number, window in self._windows.items()}

    def parted(self, tracked: Tracked, tokens: int) -> None:
        """The cache has the history of the leading `tokens` from another request, which went on in another way."""
        tracked.junction_tokens = tokens

    def offers(self, offers: Iterable[Offer], tracked: Tracked) -> list[Offer]:
        """Those of `offers` that we can use."""
        size = self._geometry.chunk_tokens
        return [offer for offer in offers if offer[2] % size == 0 and offer[2] > tracked.handed_tokens and offer[1] > 0]

    def hand_over(self, tracked: Tracked, tokens: int, tables: BlockTables) -> list[Place]:
        """What is to be stored, now that the leading `tokens` have been computed; it counts as known from then on."""
        size = self._geometry.chunk_tokens
        before = tracked.handed_tokens
        wanted = {number: set(range(before // size, tokens // size)) for number in self._histories}
        junctions = {getattr(tracked.request, "shared_prefix_boundary", 0) // size * size, tracked.junction_tokens}
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
        return [place for place in places if place.group not in wanted or place.chunk in wanted[place.group]]

    def _needed(self, window: int, boundary: int) -> set[int]:
        """The chunks that reach into the last `window` tokens before `boundary`."""
        size = self._geometry.chunk_tokens
        return set(range(max(0, boundary - window) // size, boundary // size))
