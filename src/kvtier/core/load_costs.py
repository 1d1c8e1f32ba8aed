"""Lists the options for a load, with their costs: load from all sources, from all but the slowest, and so on.

The best place to stop loading is always where one source ends. Within one source, load time grows linearly with tokens,
while later tokens cost more to compute. So if the first chunk of a source is worth loading, all of its chunks are.
"""

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from kvtier.core.host_residency import HOST, READABLE, HostMemory
from kvtier.core.link_estimates import LinkEstimator
from kvtier.core.operations import LoadOperation
from kvtier.core.prefix import longest_boundary, needed_chunks
from kvtier.layout import History, KvLayout
from kvtier.types import LoadOption, Prefix


class LookupQuery(NamedTuple):
    """The lookup for which options are listed."""

    prefix: Prefix
    resident_tokens: int
    """Leading tokens that the engine holds."""
    source_of: Callable[[int, int], str | None]
    """Takes (group, chunk) and returns the source of that object; None if unavailable."""
    runs: Sequence[int]
    """Number of leading chunks of each group that are readable in host memory."""


class CostModel:
    """Estimates the cost of loads.

    Args:
        layout: the model's KV groups.
        host: host memory.
        estimators: one for each source, fastest first. The one of host memory describes the link to the engine.
        loads: a live view of the open loads.
        scatters: returns how many objects wait to be scattered.
        first_tier: returns the first tier to try for the next promotion of an open load.
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

    def options(self, query: LookupQuery, ready: int, tokens: int, now_s: float) -> tuple[LoadOption, ...]:
        """Return the loads to choose from, shortest first. No load that ends elsewhere can be better than all of them.

        Args:
            query: the lookup.
            ready: the longest boundary that host memory can serve now.
            tokens: the longest boundary that all sources together can serve.
            now_s: the time.
        """
        if tokens <= query.resident_tokens:
            return ()
        ends = {ready, tokens, *(self._without_slowest(query, count) for count in range(1, len(self._estimators) - 1))}
        return tuple(self._option(query, end, now_s) for end in sorted(ends) if end > query.resident_tokens)

    def _without_slowest(self, query: LookupQuery, count: int) -> int:
        allowed = list(self._estimators)[:-count]
        return longest_boundary(
            self._groups, query.prefix, lambda group, chunk: query.source_of(group, chunk) in allowed, query.runs
        )

    def _option(self, query: LookupQuery, end: int, now_s: float) -> LoadOption:
        total_bytes, added = self._bytes(query, end)
        queues = self._queues()
        scatter = self._estimators[HOST]
        scatter_first_s, scatter_s = scatter.seconds(total_bytes, queues[HOST], now_s)
        promote_s, wait_s = 0.0, scatter_first_s
        slowest, is_known = HOST, scatter.is_known
        for source, estimator in self._estimators.items():
            if source in added:
                first_s, all_s = estimator.seconds(added[source], queues[source], now_s)
                promote_s += all_s
                wait_s = max(wait_s, first_s, min(estimator.pause_s, all_s))
                slowest, is_known = source, is_known and estimator.is_known
        # Scatters overlap with promotions, except for the last scatter.
        seconds = max(scatter_s, promote_s + scatter_first_s)
        if not self._has_history_only:
            wait_s = seconds  # groups of other kinds are valid only at the full boundary
        chunk_tokens = query.prefix.chunk_tokens if self._has_history_only else 0
        return LoadOption(end, slowest, seconds, wait_s, is_known, chunk_tokens)

    def _bytes(self, query: LookupQuery, end: int) -> tuple[int, dict[str, int]]:
        """Return the bytes of a load up to `end`, and the bytes it adds to the queue of each tier that it waits for."""
        prefix, resident = query.prefix, query.resident_tokens // query.prefix.chunk_tokens
        shared = self._shared_chunks(prefix)
        total = 0
        added: dict[str, int] = {}
        for index, group in enumerate(self._groups):
            size = group.payload_bytes
            chunks = needed_chunks(group, prefix, end)
            if isinstance(group.validity, History):  # prefixes are long, so skip the readable part
                run = min(query.runs[index], len(chunks))
                total += size * max(0, run - resident)
                chunks = chunks[max(run, resident) :]
            else:
                chunks = chunks[max(0, resident - chunks.start) :]
            total += size * len(chunks)
            entries = self._host.entries[index]
            for chunk in chunks:
                entry = entries.get(prefix.keys[chunk])
                if entry is None:
                    source, is_queued = query.source_of(index, chunk) or HOST, chunk < shared
                else:
                    source, is_queued = HOST if entry.residency in READABLE else entry.source, True
                if source != HOST:
                    added[source] = added.get(source, 0) + (0 if is_queued else size)
        return total, added

    def _queues(self) -> dict[str, int]:
        """Return the bytes that open loads still have to transfer from each source."""
        queues = {source: estimator.out_bytes for source, estimator in self._estimators.items()}
        mean = sum(group.payload_bytes for group in self._groups) // len(self._groups)
        queues[HOST] += self._scatters() * mean
        for load in self._loads:
            if load.todo:
                queues[self._first_tier(load)] += len(load.todo) * mean
        return queues

    def _shared_chunks(self, prefix: Prefix) -> int:
        """Return how many leading chunks an open load transfers anyway.

        A key names a whole prefix, so bisection finds where two prompts diverge.
        """
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
