"""What it takes to load what a lookup found: for each way of doing without the slowest places, one option.

Nothing between two options is worth considering. Along one place the time of a load grows evenly with its tokens, while
a token is the dearer to compute the later it comes. So if the first chunk of a place pays, all of its chunks do.
"""

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from kvtier.core.boundary import longest_boundary, needed_chunks
from kvtier.core.host import HostMemory
from kvtier.core.link_estimates import LinkEstimator
from kvtier.core.records import HOST, LoadOperation
from kvtier.core.residency import READABLE
from kvtier.layout import History, KvLayout
from kvtier.types import LoadOption, Prefix


class LookupQuery(NamedTuple):
    """One lookup."""

    prefix: Prefix
    resident_tokens: int
    """Leading tokens that the engine holds."""
    place_of: Callable[[int, int], str | None]
    """(group, chunk) -> the place that object would come from; None: it cannot be had."""
    runs: Sequence[int]
    """The leading chunks of each group that are readable in host memory."""


class CostModel:
    """Knows the links, and what is on its way over them.

    Args:
        layout: the model's KV groups.
        host: host memory.
        estimators: one for each place, fastest first; host memory's is of the link from there to the engine.
        loads: the open loads; asked each time.
        scatters: how many objects in host memory wait for their copy to the engine.
        first_tier: where the next promotion of an open load that has some left comes from first.
    """

    def __init__(
        self,
        *,
        layout: KvLayout,
        host: HostMemory,
        estimators: dict[str, LinkEstimator],
        loads: Collection[LoadOperation],
        scatters: Callable[[], int],
        first_tier: Callable[[LoadOperation], str],
    ) -> None:
        self._groups = layout.groups
        self._has_history_only = all(isinstance(group.validity, History) for group in layout.groups)
        self._host = host
        self._estimators = estimators
        self._loads = loads
        self._scatters = scatters
        self._first_tier = first_tier

    def options(self, asked: LookupQuery, ready: int, tokens: int, now_s: float) -> tuple[LoadOption, ...]:
        """The boundaries worth loading up to, shortest first.

        Args:
            asked: the lookup.
            ready: the longest boundary that host memory can give now.
            tokens: the longest boundary that can be given.
            now_s: the time.
        """
        if tokens <= asked.resident_tokens:
            return ()
        ends = {ready, tokens, *(self._without_slowest(asked, count) for count in range(1, len(self._estimators) - 1))}
        return tuple(self._option(asked, end, now_s) for end in sorted(ends) if end > asked.resident_tokens)

    def _without_slowest(self, asked: LookupQuery, count: int) -> int:
        allowed = list(self._estimators)[:-count]
        return longest_boundary(
            self._groups, asked.prefix, lambda group, chunk: asked.place_of(group, chunk) in allowed, asked.runs
        )

    def _option(self, asked: LookupQuery, end: int, now_s: float) -> LoadOption:
        total_bytes, wanted = self._bytes(asked, end)
        queues = self._queues()
        scatter = self._estimators[HOST]
        scatter_first_s, scatter_s = scatter.seconds(total_bytes, queues[HOST], now_s)
        promote_s, wait_s = 0.0, scatter_first_s
        slowest, is_known = HOST, scatter.is_known
        for place, estimator in self._estimators.items():
            if place in wanted:
                first_s, all_s = estimator.seconds(wanted[place], queues[place], now_s)
                promote_s += all_s
                wait_s = max(wait_s, first_s)
                slowest, is_known = place, is_known and estimator.is_known
        # What has been promoted is scattered while the next is promoted; the last one's scatter remains.
        seconds = max(scatter_s, promote_s + scatter_first_s)
        if not self._has_history_only:
            wait_s = seconds  # the boundary is valid as a whole, or not at all
        return LoadOption(end, slowest, seconds, wait_s, is_known)

    def _bytes(self, asked: LookupQuery, end: int) -> tuple[int, dict[str, int]]:
        """Bytes of a load up to `end`, and those that each lower tier that it waits for is still to be asked for."""
        prefix, here = asked.prefix, asked.resident_tokens // asked.prefix.chunk_tokens
        shared = self._shared_chunks(prefix)
        total = 0
        wanted: dict[str, int] = {}
        for index, group in enumerate(self._groups):
            size = group.payload_bytes
            chunks = needed_chunks(group, prefix, end)
            if isinstance(group.validity, History):  # the long ones: what is readable need not be looked at
                run = min(asked.runs[index], len(chunks))
                total += size * max(0, run - here)
                chunks = chunks[max(run, here) :]
            else:
                chunks = chunks[max(0, here - chunks.start) :]
            total += size * len(chunks)
            entries = self._host.entries[index]
            for chunk in chunks:
                entry = entries.get(prefix.keys[chunk])
                if entry is None:
                    place, is_asked_for = asked.place_of(index, chunk) or HOST, chunk < shared
                else:
                    place, is_asked_for = HOST if entry.residency in READABLE else entry.source, True
                if place != HOST:
                    wanted[place] = wanted.get(place, 0) + (0 if is_asked_for else size)
        return total, wanted

    def _queues(self) -> dict[str, int]:
        """Bytes that open loads are still to get from each place."""
        queues = {place: estimator.out_bytes for place, estimator in self._estimators.items()}
        mean = sum(group.payload_bytes for group in self._groups) // len(self._groups)
        queues[HOST] += self._scatters() * mean
        for load in self._loads:
            if load.todo:
                queues[self._first_tier(load)] += len(load.todo) * mean
        return queues

    def _shared_chunks(self, prefix: Prefix) -> int:
        """Leading chunks that open loads bring anyway. A key names all before it, so bisection finds the last."""
        most = 0
        for load in self._loads:
            low, high = most, min(len(prefix.keys), len(load.prefix.keys), load.tokens // prefix.chunk_tokens)
            while low < high and not load.is_over:
                middle = (low + high + 1) // 2
                if load.prefix.keys[middle - 1] == prefix.keys[middle - 1]:
                    low = middle
                else:
                    high = middle - 1
            most = low
        return most
