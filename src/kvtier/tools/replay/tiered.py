"""Replays a trace through tiers in virtual time, on nodes that run the real core.

A router chooses the node of each request. For comparison, the same nodes also compute every prompt without a cache.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from heapq import heappop, heappush
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtier.core.cache import Cache
from kvtier.core.limits import Limits, TierRules, WritePolicy
from kvtier.core.planner import Planner
from kvtier.errors import ConfigError
from kvtier.layout import GroupLayout, History, KvLayout
from kvtier.policy.registry import make_evictor
from kvtier.tier.registry import SMALL_BYTES_IN_FLIGHT
from kvtier.tools.replay.node import NodeRequest, ReplayNode, key_of
from kvtier.tools.replay.results import (
    HOST,
    PARTS,
    PlanningStats,
    PrefillSpeed,
    TieredResult,
    TieredSeries,
    TierResult,
    TierSeries,
    TierSpec,
    TtftStats,
)
from kvtier.tools.replay.sweep import replay_all
from kvtier.tools.replay.virtual_tiers import EventQueue, LinkSeries, ReplayLink, ReplayTier, SecondSums, link_stats
from kvtier.tools.trace.arrays import TraceArrays
from kvtier.types import Prefix, RequestId

BUSY_SHARE = 0.8
"""The default number of servers is chosen so that, without a cache, they would be busy for this share of the time."""
COUNT_MAX = 65_536
"""Maximum number of nodes in a replay, and of servers in a node. Each takes memory before the first request."""
_DAY_S = 86_400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TieredSetup:
    """Nodes, tiers and policies of a replay."""

    tiers: tuple[TierSpec, ...]
    """The tiers. Host memory comes first, and each node has its own."""
    token_bytes: float
    """Bytes of a token's KV, over all ranks of a node."""
    prefill: PrefillSpeed = field(default_factory=PrefillSpeed)
    servers: int | None = None
    """Number of prompts that a node computes at the same time; None means a number that follows from `BUSY_SHARE`."""
    nodes: int = 1
    router: str = "round-robin"
    seed: int = 1
    evictor: str = "lru"
    write_policy: WritePolicy = WritePolicy.THROUGH
    is_planned: bool = True
    """Whether the planner chooses the loads. Otherwise every cached chunk is loaded, even if computing it is faster."""

    def __post_init__(self) -> None:
        if not self.tiers or self.tiers[0].name != HOST:
            raise ConfigError(
                "--tier: host memory is missing or not first; begin with it: --tier host=64GiB --tier ..."
            )
        names, host = [it.name for it in self.tiers], self.tiers[0]
        checks = (
            (len(set(names)) == len(names), f"--tier names a tier twice ({', '.join(names)}); name each tier once"),
            (
                not host.is_shared and not host.is_remote,
                "--tier host cannot be shared or remote; every node has its own",
            ),
            (1 <= self.nodes <= COUNT_MAX, f"--nodes {self.nodes}; allowed: 1 to {COUNT_MAX}"),
            (
                1 <= (1 if self.servers is None else self.servers) <= COUNT_MAX,
                f"--servers {self.servers}; allowed: 1 to {COUNT_MAX}",
            ),
            (self.router in ROUTERS, f"--router {self.router!r}; allowed: {', '.join(ROUTERS)}"),
        )
        for is_allowed, message in checks:
            if not is_allowed:
                raise ConfigError(message)


def sweep_tiers(
    trace: TraceArrays,
    setups: Sequence[TieredSetup],
    *,
    jobs: int | None = None,
    keep: Path | None = None,
    advance: Callable[[int], None] = lambda _: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> dict[TieredSetup, TieredResult]:
    """Replay a trace through each setup.

    Args:
        trace: the trace.
        setups: setups, which are checked before any replay starts.
        jobs: largest number of processes; None means one for each core.
        keep: file of the journal, which keeps finished replays for the next call.
        advance: called with the number of requests done since the last call.
        should_stop: polled several times a second; once it returns True, no further replay starts.

    Returns:
        The results in the order of the setups. If stopped, some results are partial, and replays that did not start
        have none.

    Raises:
        ConfigError: the trace has no blocks, a setup is invalid, or the journal cannot be read.
    """
    for setup in setups:
        make_evictor(setup.evictor)
    return replay_all(
        trace,
        setups,
        replay_tiers,
        read=TieredResult.from_dict,
        is_complete=lambda result: result.is_complete,
        jobs=jobs,
        keep=keep,
        advance=advance,
        should_stop=should_stop,
    )


def replay_tiers(
    trace: TraceArrays,
    setup: TieredSetup,
    advance: Callable[[int], None] = lambda _: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> TieredResult:
    """Replay a trace through tiers. Requests arrive at the trace's times, and only whole blocks are stored.

    Args:
        trace: the trace.
        setup: nodes, tiers and policies.
        advance: called with 1 at each first token.
        should_stop: polled before each request except the first. Once it returns True, the result covers only the
            requests so far.

    Raises:
        ConfigError: the trace has no blocks, or host memory has room for fewer than two blocks.
    """
    if not trace.has_blocks:
        raise ConfigError(f"trace {trace.name} has no blocks, so nothing can be stored; use a trace with blocks")
    return _TieredReplay(trace, setup, advance, should_stop).run()


class _TieredReplay:
    def __init__(
        self,
        trace: TraceArrays,
        setup: TieredSetup,
        advance: Callable[[int], None],
        should_stop: Callable[[], bool],
    ) -> None:
        self._trace, self._setup, self._advance, self._should_stop = trace, setup, advance, should_stop
        self._events = EventQueue()
        group = GroupLayout(History(), (max(1, round(trace.block_tokens * setup.token_bytes)),), "replay")
        self._layout = KvLayout(trace.block_tokens, (group,))
        self._bytes = group.payload_bytes
        self._compute_s: list[float] = [setup.prefill.seconds(0, tokens) for tokens in trace.input_tokens.tolist()]
        self._servers = setup.servers or self._default_servers()
        self._first_s = float(trace.time_s[0])
        self._last_s = 0.0
        self._sample_every_s = (float(trace.time_s[-1]) - self._first_s) / PARTS
        self._arrived = 0
        self._link_series = {it.name: (LinkSeries(), LinkSeries()) for it in setup.tiers}
        shared = {it.name: self._tier(it) for it in setup.tiers[1:] if it.is_shared}
        self._nodes = [self._node(shared) for _ in range(setup.nodes)]
        self._tiers = {
            it.name: [shared[it.name]] if it.is_shared else [node.tiers[it.name] for node in self._nodes]
            for it in setup.tiers[1:]
        }
        self._router = Router(setup.router, trace, self._nodes, setup.seed)
        self._keys = [key_of(block) for block in range(trace.block_count)]
        self._ttft_s = np.zeros(len(trace))
        self._node_of = np.zeros(len(trace), np.int32)
        self._hits = {it.name: 0 for it in setup.tiers}
        self._input_tokens, self._skipped_tokens = SecondSums(), SecondSums()
        self._hit_tokens = {it.name: SecondSums() for it in setup.tiers}
        self._held = [(0.0, [0] * len(setup.tiers))]
        """Samples of (time, bytes stored in each tier)."""

    def run(self) -> TieredResult:
        self._schedule(0)
        self._events.run()
        self._sample()
        duration_s = max(self._last_s, 1e-9)
        setup, arrived, nodes = self._setup, self._arrived, self._nodes
        total = max(int(self._trace.input_tokens[:arrived].sum(dtype=np.int64)), 1)
        for node in nodes:
            node.cache.check()
        without_s, busy_without_s = self._without_tiers()
        server_s = duration_s * self._servers * setup.nodes
        planning = _planning([node.planning for node in nodes])
        return TieredResult(
            requests=arrived,
            is_complete=arrived == len(self._trace),
            nodes=setup.nodes,
            servers=self._servers,
            duration_s=duration_s,
            input_tokens=total,
            hit_rate=sum(self._hits.values()) / total,
            ttft=TtftStats.of(self._ttft_s[:arrived]),
            ttft_without=TtftStats.of(without_s),
            tiers=tuple(self._tier_result(it, total, duration_s) for it in setup.tiers),
            planning=planning,
            loads=planning.loads,
            cut_loads=planning.cut_loads,
            convoys=sum(node.convoys for node in nodes),
            skipped_tokens=planning.skipped_tokens,
            dropped_chunks=sum(node.dropped_chunks for node in nodes),
            dropped_demotions=sum(node.cache.counters.demotions_dropped for node in nodes),
            busy_share=sum(node.busy_s for node in nodes) / server_s,
            busy_share_without=busy_without_s / server_s,
            over_time=self._series(),
        )

    # ---- requests --------------------------------------------------------------------------------------------------

    def _schedule(self, number: int) -> None:
        """Start request `number` at its time, and then schedule the next request."""
        if number == len(self._trace) or (number and self._should_stop()):
            return

        def act() -> None:
            self._start(number)
            self._schedule(number + 1)

        self._events.at(float(self._trace.time_s[number]) - self._first_s, act)

    def _start(self, number: int) -> None:
        trace = self._trace
        self._arrived = number + 1
        if self._events.now_s >= self._held[-1][0] + self._sample_every_s:
            self._sample()
        tokens = int(trace.input_tokens[number])
        blocks: list[int] = trace.blocks(number)[: tokens // trace.block_tokens].tolist()
        session = None if trace.session[number] < 0 else str(trace.session[number])
        chosen = self._router.choose(number, blocks)
        self._node_of[number] = chosen
        prefix = Prefix(tuple(self._keys[block] for block in blocks), trace.block_tokens)
        request = NodeRequest(RequestId(str(number)), number, self._events.now_s, tokens, prefix, session)
        self._nodes[chosen].arrive(request)

    def _finished(self, request: NodeRequest) -> None:
        self._last_s = max(self._last_s, request.first_token_s)
        self._ttft_s[request.number] = request.first_token_s - request.arrived_s
        at_s = request.arrived_s
        self._input_tokens.add(at_s, at_s, request.input_tokens)
        if request.found:
            self._skipped_tokens.add(at_s, at_s, request.found - request.delivered)
        for tier, tokens in request.sources:
            self._hits[tier] += tokens
            self._hit_tokens[tier].add(at_s, at_s, tokens)
        self._advance(1)

    # ---- nodes and tiers -------------------------------------------------------------------------------------------

    def _node(self, shared: dict[str, ReplayTier]) -> ReplayNode:
        setup, host = self._setup, self._setup.tiers[0]
        slots = host.capacity_bytes // self._bytes
        if slots < 2:
            raise ConfigError(f"--tier host={host.capacity_bytes}: fewer than two blocks of {self._bytes} bytes fit")
        cache = Cache(
            layout=self._layout,
            slots=(slots,),
            tiers=[
                TierRules(name=it.name, is_remote=it.is_remote, small_bytes_in_flight=SMALL_BYTES_IN_FLIGHT)
                for it in setup.tiers[1:]
            ],
            evictor=lambda: make_evictor(setup.evictor),
            limits=Limits(write_policy=setup.write_policy),
        )
        up, down = self._link_series[HOST]
        return ReplayNode(
            self._events,
            cache,
            [Planner(is_on=setup.is_planned) for _ in range(self._servers)],
            object_bytes=self._bytes,
            up=ReplayLink(self._events, host.read_bytes_per_s, host.latency_s, up),
            down=ReplayLink(self._events, host.write_bytes_per_s, host.latency_s, down),
            tiers={it.name: shared.get(it.name) or self._tier(it) for it in setup.tiers[1:]},
            prefill=setup.prefill,
            finished=self._finished,
        )

    def _tier(self, spec: TierSpec) -> ReplayTier:
        series = self._link_series[spec.name]
        return ReplayTier(self._events, spec, self._bytes, make_evictor(self._setup.evictor), series)

    def _default_servers(self) -> int:
        span_s = max(float(self._trace.time_s[-1] - self._trace.time_s[0]), 1e-9)
        servers = math.ceil(sum(self._compute_s) / span_s / self._setup.nodes / BUSY_SHARE)
        return max(1, min(servers, len(self._trace)))

    # ---- results ---------------------------------------------------------------------------------------------------

    def _tier_result(self, spec: TierSpec, total: int, duration_s: float) -> TierResult:
        if spec.name == HOST:
            reads = [node.up for node in self._nodes]
            writes = [node.down for node in self._nodes]
            evictions = sum(node.cache.host.evictions for node in self._nodes)
        else:
            tiers = self._tiers[spec.name]
            reads, writes = [it.reads for it in tiers], [it.writes for it in tiers]
            evictions = sum(it.evictions for it in tiers)
        read_series, write_series = self._link_series[spec.name]
        written = link_stats(writes, write_series, duration_s)
        day_bytes = written.mean_bytes_per_s / len(writes) * _DAY_S
        return TierResult(
            name=spec.name,
            capacity_bytes=spec.capacity_bytes,
            count=len(writes),
            hit_tokens=self._hits[spec.name],
            hit_rate=self._hits[spec.name] / total,
            reads=link_stats(reads, read_series, duration_s),
            writes=written,
            evictions=evictions,
            writes_per_day=day_bytes / spec.capacity_bytes,
            drive_writes_per_day=day_bytes / (spec.drive_bytes or spec.capacity_bytes),
            rated_writes_per_day=spec.rated_writes_per_day,
            loads=sum(node.loads_of[spec.name] for node in self._nodes),
            trials=sum(node.trials_of[spec.name] for node in self._nodes),
        )

    def _sample(self) -> None:
        """Sample the bytes stored in each tier."""
        host_bytes = self._bytes * sum(node.cache.host.used(0) for node in self._nodes)
        below = [sum(it.held_bytes for it in tiers) for tiers in self._tiers.values()]
        self._held.append((self._events.now_s, [host_bytes, *below]))

    def _series(self) -> TieredSeries:
        depths = [it.depth for pair in self._link_series.values() for it in pair]
        span_s = max(it.span_s for it in (self._input_tokens, *depths))

        def means(sums: SecondSums) -> tuple[float, ...]:
            return tuple(sums.means(span_s, PARTS).tolist())

        ends_s = np.linspace(0, span_s, PARTS + 1)[1:]
        times_s = [time_s for time_s, _ in self._held]
        latest: list[int] = (np.searchsorted(times_s, ends_s, side="right") - 1).tolist()
        tiers = {
            name: TierSeries(
                hit_tokens_per_s=means(self._hit_tokens[name]),
                read_bytes_per_s=means(reads.moved),
                written_bytes_per_s=means(writes.moved),
                read_depth=means(reads.depth),
                write_depth=means(writes.depth),
                held_bytes=tuple(float(self._held[sample][1][number]) for sample in latest),
            )
            for number, (name, (reads, writes)) in enumerate(self._link_series.items())
        }
        return TieredSeries(
            part_s=span_s / PARTS,
            input_tokens_per_s=means(self._input_tokens),
            skipped_tokens_per_s=means(self._skipped_tokens),
            tiers=tiers,
        )

    def _without_tiers(self) -> tuple[npt.NDArray[np.float64], float]:
        """Return the times to first token and the total server time if everything is computed in FIFO order."""
        free_s = [[0.0] * self._servers for _ in self._nodes]
        out, busy_s = np.zeros(self._arrived), 0.0
        times = (np.asarray(self._trace.time_s[: self._arrived]) - self._first_s).tolist()
        for number, time_s in enumerate(times):
            servers, took_s = free_s[int(self._node_of[number])], self._compute_s[number]
            end_s = max(heappop(servers), time_s) + took_s
            heappush(servers, end_s)
            out[number] = end_s - time_s
            busy_s += took_s
        return out, busy_s


def _planning(nodes: Sequence[PlanningStats]) -> PlanningStats:
    names = [it.name for it in fields(PlanningStats)]
    totals: dict[str, Any] = {name: sum(getattr(it, name) for it in nodes) for name in names}
    totals["regret_most_s"] = max(it.regret_most_s for it in nodes)
    return PlanningStats(**totals)


BUSY_S = 2.0
"""The router load-and-prefix skips a node whose backlog exceeds the smallest backlog by more than this."""
_SAMPLES = 4
"""Number of nodes whose backlogs are compared. Comparing a few is nearly as good as comparing all (Mitzenmacher, 2001),
at constant cost."""
ROUTERS = ("random", "round-robin", "session", "prefix", "load-and-prefix")


class Router:
    """Chooses the node of each request. It remembers which node last served each block."""

    def __init__(self, name: str, trace: TraceArrays, nodes: Sequence[ReplayNode], seed: int) -> None:
        self._name = name
        self._sessions = trace.session
        self._nodes = nodes
        self._random = Random(seed)  # noqa: S311  seeded on purpose
        self._served = np.full(trace.block_count, -1, np.int32)
        self._next = 0
        self._of_session: dict[int, int] = {}

    def choose(self, request: int, blocks: Sequence[int]) -> int:
        """Choose the node of a request with these blocks."""
        if len(self._nodes) == 1:
            return 0
        chosen = self._choose(request, blocks)
        self._served[list(blocks)] = chosen
        return chosen

    def _choose(self, request: int, blocks: Sequence[int]) -> int:
        if self._name == "random":
            return self._random.randrange(len(self._nodes))
        if self._name == "round-robin":
            return self._round_robin()
        session = int(self._sessions[request])
        if self._name == "session" and session >= 0:
            if session not in self._of_session:
                self._of_session[session] = self._round_robin()
            return self._of_session[session]
        chosen = self._by_prefix(blocks)
        if self._name == "load-and-prefix":
            least = self._least_busy()
            if self._nodes[chosen].backlog_s() > self._nodes[least].backlog_s() + BUSY_S:
                return least
        return chosen

    def _by_prefix(self, blocks: Sequence[int]) -> int:
        """Return the node that last served the longest known prefix.

        A prefix of a single block does not count, because unrelated requests share it.
        """
        for block in reversed(blocks[1:]):
            if self._served[block] >= 0:
                return int(self._served[block])
        return self._least_busy() if self._name == "load-and-prefix" else self._round_robin()

    def _round_robin(self) -> int:
        self._next = (self._next + 1) % len(self._nodes)
        return self._next

    def _least_busy(self) -> int:
        count = len(self._nodes)
        seen = range(count) if count <= _SAMPLES else [self._random.randrange(count) for _ in range(_SAMPLES)]
        return min(seen, key=lambda it: self._nodes[it].backlog_s())
