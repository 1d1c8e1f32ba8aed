"""A trace through tiers: the real core on each node, in virtual time, and the same nodes without it."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

import numpy as np

from kvtier.core.cache import Cache
from kvtier.core.limits import Limits, WritePolicy
from kvtier.errors import ConfigError
from kvtier.layout import GroupLayout, History, KvLayout
from kvtier.policy.registry import make_admitter, make_evictor
from kvtier.replay.cost import Prefill
from kvtier.replay.links import Agenda, Link, LinkUse, Shelf, TierSpec
from kvtier.replay.node import Job, Node, key_of
from kvtier.replay.routing import ROUTERS, make_router
from kvtier.trace.packed import Packed
from kvtier.types import Hint, Prefix, RequestId

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
    admitter: str = "all"
    write_policy: WritePolicy = WritePolicy.THROUGH

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Latency:
    """Times to the first token, in seconds."""

    mean_s: float
    p50_s: float
    p95_s: float
    p99_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TierOutcome:
    """What one tier did; of tiers that each node has, all together."""

    name: str
    capacity_bytes: int
    hit_tokens: int
    """Delivered to engines from bytes that lay here."""
    hit_rate: float
    """Of all input tokens."""
    reads: LinkUse
    """For host memory: to the engine, whatever tier it came from."""
    writes: LinkUse
    evictions: int
    writes_per_day: float
    """How often a day's writes, at this rate, would fill the tier."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiered:
    """What the tiers did with a trace."""

    requests: int
    nodes: int
    servers: int
    """Of each node."""
    duration_s: float
    """Until the last first token."""
    hit_rate: float
    ttft: Latency
    ttft_without: Latency
    """The same requests on the same nodes, everything computed."""
    tiers: tuple[TierOutcome, ...]
    loads: int
    cut_loads: int
    convoys: int
    """Loads that found something on its way for another."""
    skipped_tokens: int
    """Present, but computing was expected to be sooner."""
    dropped_chunks: int
    """Not stored: not admitted, or no room in time."""
    busy_share: float
    """Of the prefill servers' time."""
    busy_share_without: float


def replay_tiers(packed: Packed, setup: Setup, advance: Callable[[int], None] | None = None) -> Tiered:
    """Replay a trace through tiers.

    Only whole blocks are kept. Times are the trace's own.

    Raises:
        ConfigError: the trace has no blocks, or host memory holds fewer than two.
    """
    if not packed.has_blocks:
        raise ConfigError(f"trace {packed.name} tells no blocks, so nothing can be kept; allowed: one that does")
    return _Run(packed, setup, advance).outcome()


class _Run:
    """One replay."""

    def __init__(self, packed: Packed, setup: Setup, advance: Callable[[int], None] | None) -> None:
        self._packed, self._setup, self._advance = packed, setup, advance
        self._agenda = Agenda()
        group = GroupLayout(History(), (max(1, round(packed.block_tokens * setup.token_bytes)),), "replay")
        self._layout = KvLayout(packed.block_tokens, (group,))
        self._bytes = group.payload_bytes
        self._servers = setup.servers or self._enough_servers()
        self._first_s = float(packed.time_s[0])
        self._last_s = 0.0
        shared = {it.name: self._shelf(it) for it in setup.tiers[1:] if it.is_shared}
        self._nodes = [self._node(shared) for _ in range(setup.nodes)]
        self._router = make_router(setup.router, packed, self._nodes, setup.seed)
        self._keys = [key_of(block) for block in range(packed.block_count)]
        self._ttft = np.zeros(len(packed))
        self._node_of = np.zeros(len(packed), np.int32)

    def outcome(self) -> Tiered:
        self._arrive(0)
        self._agenda.run()
        duration_s = max(self._last_s, 1e-9)
        packed, setup = self._packed, self._setup
        total = max(int(packed.input_tokens.sum(dtype=np.int64)), 1)
        hits: dict[str, int] = {}
        for node in self._nodes:
            node.cache.check()
            for place, tokens in node.tally.hit_tokens.items():
                hits[place] = hits.get(place, 0) + tokens
        without, busy_without_s = self._without()
        tallies = [node.tally for node in self._nodes]
        server_s = duration_s * self._servers * setup.nodes
        return Tiered(
            requests=len(packed),
            nodes=setup.nodes,
            servers=self._servers,
            duration_s=duration_s,
            hit_rate=sum(hits.values()) / total,
            ttft=_latency(self._ttft),
            ttft_without=_latency(without),
            tiers=tuple(self._tier(it, hits.get(it.name, 0), total, duration_s) for it in setup.tiers),
            loads=sum(it.loads for it in tallies),
            cut_loads=sum(it.cut_loads for it in tallies),
            convoys=sum(it.convoys for it in tallies),
            skipped_tokens=sum(it.skipped_tokens for it in tallies),
            dropped_chunks=sum(it.dropped_chunks for it in tallies),
            busy_share=sum(it.busy_s for it in tallies) / server_s,
            busy_share_without=busy_without_s / server_s,
        )

    # ---- requests --------------------------------------------------------------------------------------------------

    def _arrive(self, number: int) -> None:
        """Let a request come in at its time, and then the next."""
        if number == len(self._packed):
            return

        def act() -> None:
            self._begin(number)
            self._arrive(number + 1)

        self._agenda.at(float(self._packed.time_s[number]) - self._first_s, act)

    def _begin(self, number: int) -> None:
        packed = self._packed
        tokens = int(packed.input_tokens[number])
        start = int(packed.starts[number])
        count = min(int(packed.starts[number + 1]) - start, tokens // packed.block_tokens)
        blocks: list[int] = packed.ids[start : start + count].tolist()
        session = int(packed.session[number])
        hint = Hint(
            None if session < 0 else str(session),
            None if session < 0 else int(packed.turn[number]),
            1.0 / self._setup.prefill.tokens_per_s,
        )
        chosen = self._router.choose(number, blocks)
        self._node_of[number] = chosen
        prefix = Prefix(tuple(self._keys[block] for block in blocks), packed.block_tokens)
        job = Job(RequestId(str(number)), number, self._agenda.now_s, tokens, prefix, hint)
        self._nodes[chosen].arrive(job)

    def _finished(self, job: Job) -> None:
        self._last_s = max(self._last_s, job.first_token_s)
        self._ttft[job.number] = job.first_token_s - job.arrived_s
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
            admitter=make_admitter(setup.admitter),
            limits=Limits(write_policy=setup.write_policy),
        )
        return Node(
            self._agenda,
            cache,
            object_bytes=self._bytes,
            up=Link(self._agenda, host.read_bytes_per_s, host.latency_s),
            down=Link(self._agenda, host.write_bytes_per_s, host.latency_s),
            shelves={it.name: shared.get(it.name) or self._shelf(it) for it in setup.tiers[1:]},
            servers=self._servers,
            prefill=setup.prefill,
            finished=self._finished,
        )

    def _shelf(self, tier: TierSpec) -> Shelf:
        return Shelf(self._agenda, tier, self._bytes, make_evictor(self._setup.evictor))

    def _tier(self, tier: TierSpec, hit_tokens: int, total: int, duration_s: float) -> TierOutcome:
        if tier.name == HOST:
            reads = [node.up for node in self._nodes]
            writes = [node.down for node in self._nodes]
            evictions = sum(node.cache.host.evictions for node in self._nodes)
        else:
            shelves = list({id(node.shelves[tier.name]): node.shelves[tier.name] for node in self._nodes}.values())
            reads, writes = [it.reads for it in shelves], [it.writes for it in shelves]
            evictions = sum(it.evictions for it in shelves)
        written = _together([it.use(duration_s) for it in writes])
        return TierOutcome(
            name=tier.name,
            capacity_bytes=tier.capacity_bytes,
            hit_tokens=hit_tokens,
            hit_rate=hit_tokens / total,
            reads=_together([it.use(duration_s) for it in reads]),
            writes=written,
            evictions=evictions,
            writes_per_day=written.total_bytes / len(writes) / duration_s * _DAY_S / tier.capacity_bytes,
        )

    def _compute_s(self) -> list[float]:
        return [self._setup.prefill.seconds(0, tokens) for tokens in self._packed.input_tokens.tolist()]

    def _enough_servers(self) -> int:
        span_s = max(float(self._packed.time_s[-1] - self._packed.time_s[0]), 1e-9)
        return max(1, math.ceil(sum(self._compute_s()) / span_s / self._setup.nodes / LOAD))

    def _without(self) -> tuple[np.ndarray, float]:
        """Times to the first token when everything is computed, first come, first served."""
        free_s = [[0.0] * self._servers for _ in self._nodes]
        out, busy_s = np.zeros(len(self._packed)), 0.0
        times = (np.asarray(self._packed.time_s) - self._first_s).tolist()
        for number, (time_s, took_s) in enumerate(zip(times, self._compute_s(), strict=True)):
            servers = free_s[int(self._node_of[number])]
            end_s = max(heappop(servers), time_s) + took_s
            heappush(servers, end_s)
            out[number] = end_s - time_s
            busy_s += took_s
        return out, busy_s


def _latency(times_s: np.ndarray) -> Latency:
    p50, p95, p99 = (float(np.quantile(times_s, it)) for it in (0.5, 0.95, 0.99))
    return Latency(mean_s=float(times_s.mean()), p50_s=p50, p95_s=p95, p99_s=p99)


def _together(uses: Sequence[LinkUse]) -> LinkUse:
    """Several links as one; a peak is that of the busiest of them."""
    return LinkUse(
        total_bytes=sum(it.total_bytes for it in uses),
        mean_bytes_per_s=sum(it.mean_bytes_per_s for it in uses),
        peak_bytes_per_s=max(it.peak_bytes_per_s for it in uses),
        mean_depth=sum(it.mean_depth for it in uses) / len(uses),
        peak_depth=max(it.peak_depth for it in uses),
    )
