"""A trace through tiers: the real core on each node, in virtual time, and the same nodes without it."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from heapq import heappop, heappush
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtier.config.sections import LimitsConfig
from kvtier.core.cache import Cache
from kvtier.core.limits import Limits, WritePolicy
from kvtier.core.planner import Planner
from kvtier.errors import ConfigError
from kvtier.layout import GroupLayout, History, KvLayout
from kvtier.policy.registry import make_evictor
from kvtier.replay.cost import Prefill
from kvtier.replay.links import Agenda, Gauge, Link, Shelf, TierSpec, link_use
from kvtier.replay.node import Job, Node, NodeTally, key_of
from kvtier.replay.outcome import PARTS, Latency, OverTime, Planning, Tiered, TierOutcome, TierOverTime
from kvtier.replay.routing import ROUTERS, make_router
from kvtier.replay.series import Series
from kvtier.trace.arrays import TraceArrays
from kvtier.types import Prefix, RequestId

HOST = "host"
LOAD = 0.8
"""Share of the time that prefill servers are busy without any cache, where their number is not given."""
_DAY_S = 86_400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What a trace is replayed through."""

    tiers: tuple[TierSpec, ...]
    """Host memory first, which every node has for itself."""
    token_bytes: float
    """KV of a token, over all ranks of a node."""
    prefill: Prefill = field(default_factory=Prefill)
    servers: int | None = None
    """Prompts that a node computes at the same time; None: so many that they would be busy `LOAD` of the time."""
    nodes: int = 1
    router: str = "round-robin"
    seed: int = 1
    evictor: str = "lru"
    write_policy: WritePolicy = WritePolicy.THROUGH
    is_planned: bool = True
    """False: whatever is there is loaded, however long that takes."""

    def __post_init__(self) -> None:
        if not self.tiers or self.tiers[0].name != HOST:
            raise ConfigError("--tier: host memory is missing or not first; allowed: --tier host=64GiB --tier ...")
        names = [it.name for it in self.tiers]
        if len(set(names)) < len(names):
            raise ConfigError(f"--tier names {names} twice; allowed: each tier once")
        if self.tiers[0].is_shared:
            raise ConfigError("--tier host cannot be shared; every node has its own")
        for name, least, value in (("nodes", 1, self.nodes), ("servers", 1, self.servers or 1)):
            if value < least:
                raise ConfigError(f"--{name} {value}; allowed: at least {least}")
        if self.router not in ROUTERS:
            raise ConfigError(f"--router {self.router!r}; allowed: {', '.join(ROUTERS)}")


def replay_tiers(
    packed: TraceArrays,
    setup: Setup,
    advance: Callable[[int], None] | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> Tiered:
    """Replay a trace through tiers.

    Only whole blocks are kept. Times are the trace's own.

    Args:
        packed: the trace.
        setup: what it is replayed through.
        advance: told of requests whose first token is there.
        should_stop: asked before each request but the first; once it says so, no more come, and the outcome is that of
            those that did.

    Raises:
        ConfigError: the trace has no blocks, or host memory holds fewer than two.
    """
    if not packed.has_blocks:
        raise ConfigError(f"trace {packed.name} has no blocks, so nothing can be kept; allowed: one that does")
    return _Run(packed, setup, advance, should_stop).outcome()


class _Run:
    """One replay."""

    def __init__(
        self,
        packed: TraceArrays,
        setup: Setup,
        advance: Callable[[int], None] | None,
        should_stop: Callable[[], bool],
    ) -> None:
        self._packed, self._setup, self._advance, self._should_stop = packed, setup, advance, should_stop
        self._agenda = Agenda()
        group = GroupLayout(History(), (max(1, round(packed.block_tokens * setup.token_bytes)),), "replay")
        self._layout = KvLayout(packed.block_tokens, (group,))
        self._bytes = group.payload_bytes
        self._compute_s: list[float] = [setup.prefill.seconds(0, tokens) for tokens in packed.input_tokens.tolist()]
        self._servers = setup.servers or self._enough_servers()
        self._first_s = float(packed.time_s[0])
        self._last_s = 0.0
        self._look_every_s = (float(packed.time_s[-1]) - self._first_s) / PARTS
        self._arrived = 0
        self._gauges = {it.name: (Gauge(), Gauge()) for it in setup.tiers}
        shared = {it.name: self._shelf(it) for it in setup.tiers[1:] if it.is_shared}
        self._nodes = [self._node(shared) for _ in range(setup.nodes)]
        self._shelves = {
            it.name: [shared[it.name]] if it.is_shared else [node.shelves[it.name] for node in self._nodes]
            for it in setup.tiers[1:]
        }
        self._router = make_router(setup.router, packed, self._nodes, setup.seed)
        self._keys = [key_of(block) for block in range(packed.block_count)]
        self._ttft = np.zeros(len(packed))
        self._node_of = np.zeros(len(packed), np.int32)
        self._hits = {it.name: 0 for it in setup.tiers}
        self._input_tokens, self._skipped_tokens = Series(), Series()
        self._hit_tokens = {it.name: Series() for it in setup.tiers}
        self._held = [(0.0, [0] * len(setup.tiers))]
        """Times, and what each tier held then."""

    def outcome(self) -> Tiered:
        self._arrive(0)
        self._agenda.run()
        self._look()
        duration_s = max(self._last_s, 1e-9)
        setup, arrived = self._setup, self._arrived
        total = max(int(self._packed.input_tokens[:arrived].sum(dtype=np.int64)), 1)
        for node in self._nodes:
            node.cache.check()
        without, busy_without_s = self._without()
        tallies = [node.tally for node in self._nodes]
        server_s = duration_s * self._servers * setup.nodes
        planning = _planning(tallies)
        return Tiered(
            requests=arrived,
            is_complete=arrived == len(self._packed),
            nodes=setup.nodes,
            servers=self._servers,
            duration_s=duration_s,
            input_tokens=total,
            hit_rate=sum(self._hits.values()) / total,
            ttft=Latency.of(self._ttft[:arrived]),
            ttft_without=Latency.of(without),
            tiers=tuple(self._tier(it, total, duration_s) for it in setup.tiers),
            planning=planning,
            loads=planning.loads,
            cut_loads=planning.cut_loads,
            convoys=sum(it.convoys for it in tallies),
            skipped_tokens=planning.skipped_tokens,
            dropped_chunks=sum(it.dropped_chunks for it in tallies),
            dropped_demotions=sum(node.cache.counters.demotions_dropped for node in self._nodes),
            busy_share=sum(it.busy_s for it in tallies) / server_s,
            busy_share_without=busy_without_s / server_s,
            over_time=self._over_time(),
        )

    # ---- requests --------------------------------------------------------------------------------------------------

    def _arrive(self, number: int) -> None:
        """Let a request come in at its time, and then the next."""
        if number == len(self._packed) or (number and self._should_stop()):
            return

        def act() -> None:
            self._begin(number)
            self._arrive(number + 1)

        self._agenda.at(float(self._packed.time_s[number]) - self._first_s, act)

    def _begin(self, number: int) -> None:
        packed = self._packed
        self._arrived = number + 1
        if self._agenda.now_s >= self._held[-1][0] + self._look_every_s:
            self._look()
        tokens = int(packed.input_tokens[number])
        start = int(packed.starts[number])
        count = min(int(packed.starts[number + 1]) - start, tokens // packed.block_tokens)
        blocks: list[int] = packed.ids[start : start + count].tolist()
        session = None if packed.session[number] < 0 else str(packed.session[number])
        chosen = self._router.choose(number, blocks)
        self._node_of[number] = chosen
        prefix = Prefix(tuple(self._keys[block] for block in blocks), packed.block_tokens)
        job = Job(RequestId(str(number)), number, self._agenda.now_s, tokens, prefix, session)
        self._nodes[chosen].arrive(job)

    def _finished(self, job: Job) -> None:
        self._last_s = max(self._last_s, job.first_token_s)
        self._ttft[job.number] = job.first_token_s - job.arrived_s
        at_s = job.arrived_s
        self._input_tokens.add(at_s, at_s, job.input_tokens)
        if job.found:
            self._skipped_tokens.add(at_s, at_s, job.found - job.delivered)
        for place, tokens in job.sources:
            self._hits[place] += tokens
            self._hit_tokens[place].add(at_s, at_s, tokens)
        if self._advance is not None:
            self._advance(1)

    # ---- parts -----------------------------------------------------------------------------------------------------

    def _node(self, shared: dict[str, Shelf]) -> Node:
        setup, host = self._setup, self._setup.tiers[0]
        slots = host.capacity_bytes // self._bytes
        if slots < 2:
            raise ConfigError(f"--tier host={host.capacity_bytes}: fewer than two blocks of {self._bytes} bytes fit")
        cache = Cache(
            layout=self._layout,
            slots=(slots,),
            tiers=[it.name for it in setup.tiers[1:]],
            evictor=lambda: make_evictor(setup.evictor),
            limits=Limits(write_policy=setup.write_policy, small_bytes=LimitsConfig().small_bytes_in_flight),
        )
        up, down = self._gauges[HOST]
        return Node(
            self._agenda,
            cache,
            [Planner(is_on=setup.is_planned) for _ in range(self._servers)],
            object_bytes=self._bytes,
            up=Link(self._agenda, host.read_bytes_per_s, host.latency_s, up),
            down=Link(self._agenda, host.write_bytes_per_s, host.latency_s, down),
            shelves={it.name: shared.get(it.name) or self._shelf(it) for it in setup.tiers[1:]},
            prefill=setup.prefill,
            finished=self._finished,
        )

    def _shelf(self, tier: TierSpec) -> Shelf:
        return Shelf(self._agenda, tier, self._bytes, make_evictor(self._setup.evictor), self._gauges[tier.name])

    def _tier(self, tier: TierSpec, total: int, duration_s: float) -> TierOutcome:
        if tier.name == HOST:
            reads = [node.up for node in self._nodes]
            writes = [node.down for node in self._nodes]
            evictions = sum(node.cache.host.evictions for node in self._nodes)
        else:
            shelves = self._shelves[tier.name]
            reads, writes = [it.reads for it in shelves], [it.writes for it in shelves]
            evictions = sum(it.evictions for it in shelves)
        read_gauge, write_gauge = self._gauges[tier.name]
        written = link_use(writes, write_gauge, duration_s)
        day_bytes = written.mean_bytes_per_s / len(writes) * _DAY_S
        return TierOutcome(
            name=tier.name,
            capacity_bytes=tier.capacity_bytes,
            count=len(writes),
            hit_tokens=self._hits[tier.name],
            hit_rate=self._hits[tier.name] / total,
            reads=link_use(reads, read_gauge, duration_s),
            writes=written,
            evictions=evictions,
            writes_per_day=day_bytes / tier.capacity_bytes,
            drive_writes_per_day=day_bytes / (tier.drive_bytes or tier.capacity_bytes),
            rated_writes_per_day=tier.rated_writes_per_day,
        )

    def _look(self) -> None:
        """Note what each tier holds now."""
        host_bytes = self._bytes * sum(node.cache.host.used(0) for node in self._nodes)
        below = [sum(it.held_bytes for it in shelves) for shelves in self._shelves.values()]
        self._held.append((self._agenda.now_s, [host_bytes, *below]))

    def _over_time(self) -> OverTime:
        gauges = [gauge for pair in self._gauges.values() for gauge in pair]
        span_s = max(it.span_s for it in (self._input_tokens, *(gauge.depth for gauge in gauges)))

        def told(series: Series) -> tuple[float, ...]:
            return tuple(series.parts(span_s, PARTS).tolist())

        ends_s = np.linspace(0, span_s, PARTS + 1)[1:]
        times_s = [time_s for time_s, _ in self._held]
        latest: list[int] = (np.searchsorted(times_s, ends_s, side="right") - 1).tolist()
        tiers: dict[str, TierOverTime] = {}
        for number, tier in enumerate(self._setup.tiers):
            reads, writes = self._gauges[tier.name]
            tiers[tier.name] = TierOverTime(
                hit_tokens_per_s=told(self._hit_tokens[tier.name]),
                read_bytes_per_s=told(reads.moved),
                written_bytes_per_s=told(writes.moved),
                read_depth=told(reads.depth),
                write_depth=told(writes.depth),
                held_bytes=tuple(float(self._held[place][1][number]) for place in latest),
            )
        return OverTime(
            part_s=span_s / PARTS,
            input_tokens_per_s=told(self._input_tokens),
            skipped_tokens_per_s=told(self._skipped_tokens),
            tiers=tiers,
        )

    def _enough_servers(self) -> int:
        span_s = max(float(self._packed.time_s[-1] - self._packed.time_s[0]), 1e-9)
        enough = math.ceil(sum(self._compute_s) / span_s / self._setup.nodes / LOAD)
        return max(1, min(enough, len(self._packed)))

    def _without(self) -> tuple[npt.NDArray[np.float64], float]:
        """Times to the first token when everything is computed, first come, first served."""
        free_s = [[0.0] * self._servers for _ in self._nodes]
        out, busy_s = np.zeros(self._arrived), 0.0
        times = (np.asarray(self._packed.time_s[: self._arrived]) - self._first_s).tolist()
        for number, time_s in enumerate(times):
            servers, took_s = free_s[int(self._node_of[number])], self._compute_s[number]
            end_s = max(heappop(servers), time_s) + took_s
            heappush(servers, end_s)
            out[number] = end_s - time_s
            busy_s += took_s
        return out, busy_s


def _planning(tallies: Sequence[NodeTally]) -> Planning:
    def total(name: str) -> Any:  # noqa: ANN401  whole numbers and seconds alike
        return sum(getattr(it, name) for it in tallies)

    names = [it.name for it in fields(Planning) if it.name != "regret_most_s"]
    most_s = max(it.regret_most_s for it in tallies)
    return Planning(**{name: total(name) for name in names}, regret_most_s=most_s)
