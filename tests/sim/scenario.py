"""Draws sizes, budgets, delays and faults, all from one seed."""

from dataclasses import dataclass, replace
from enum import Enum
from random import Random
from typing import Any

from kvtier.core.limits import Limits, TierRules, WritePolicy
from kvtier.layout import GroupLayout, History, KvLayout, State, Validity, Window

EVICTORS = ("lru", "adaptive", "fifo", "random")
OBJECT_BYTES = 4096
"""Size of an object in every group."""
AGES_S = 10_000.0
"""A deadline that no run without faults reaches."""


class Mode(Enum):
    """Concurrency and faults, which decide how exact the checks can be."""

    QUIET = "quiet"  # no faults, one request at a time, so everything stored is restored
    CALM = "calm"  # no faults, many requests, long deadlines, so everything present is delivered
    STORM = "storm"  # faults, aborts and short deadlines


@dataclass(frozen=True, slots=True)
class Outage:
    """A period in which a tier fails at once or hangs. With `spares_reads` only writes fail, as on a full disk."""

    tier: str
    start_s: float
    end_s: float
    hangs: bool
    spares_reads: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """Chances between 0 and 1, which are all zero in quiet and calm seeds."""

    copy_fails: float = 0.0
    read_fails: float = 0.0
    write_fails: float = 0.0
    flipped: float = 0.0
    """Chance that the copy of a write fails verification."""
    late: float = 0.0
    """Chance that an answer comes long after the deadline."""
    probe_fails: float = 0.0
    probe_late: float = 0.0
    other_writers: float = 0.0
    """Chance per step that another process adds, removes or damages an object in a tier."""
    aborts: float = 0.0
    """Chance per engine step that a request is aborted."""
    outages: tuple[Outage, ...] = ()


@dataclass(frozen=True, slots=True)
class RankTraits:
    """How one rank differs from the others."""

    faults: Faults
    """The seed's faults, or some of them."""
    share: float = 1.0
    """Size of its objects as a share of the largest rank's. More of the smaller ones fit into its tiers."""
    pace: float = 1.0
    """Time of its transfers as a share of the slowest rank's."""
    filled_by: int | None = None
    """The rank whose slots and tiers it uses. It has the same KV, and only scatters."""
    lacks: frozenset[int] = frozenset()
    """Groups that only other ranks have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """Everything that defines a run except its random generators."""

    seed: int
    mode: Mode
    steps: int
    """Number of steps before arrivals stop. The run then continues until everything has ended."""
    layout: KvLayout
    slots: tuple[int, ...]
    rules: tuple[TierRules, ...]
    tier_objects: int | None
    """Capacity of each tier in objects. None: unlimited."""
    tier_evicts: bool
    """Whether a full tier evicts. Otherwise it refuses."""
    limits: Limits
    waiting: int
    """`WAITING_MAX` of this run."""
    requests: int
    """`REQUESTS_MAX` of this run."""
    evictor: str
    device_s: tuple[float, float]
    """Shortest and longest time of a copy between engine and host."""
    tier_s: tuple[tuple[float, float], ...]
    arrival_s: float
    """Mean time between requests."""
    chunks_max: int
    branches: int
    """Number of possible next chunks after each chunk. Few make many shared prefixes."""
    prefilled: int
    """Number of conversations in the tiers at the start."""
    readers: float
    """Share of the requests that store nothing."""
    faults: Faults
    announced: float = 0.0
    """Share of the requests for which another engine announces chunks, truly or not."""
    hinted: float = 0.0
    """Share of the released requests after which the engine retains, lowers or prefetches a prefix."""
    waits: float | None = None
    """Seconds that computing a prompt takes. The engine states them at each lookup."""

    operators: float = 0.0
    """Chance per step that a person asks for all places of a prompt, or clears host memory."""
    most_ranks: int = 1
    """Most ranks, with different sizes, speeds and faults. The core sees what `RankGroup` makes of them."""
    copied: float = 0.4
    """Chance that a further rank shares the slots of an earlier one."""
    absent: float = 0.4
    """Chance that with several ranks a history is several groups, and that a rank lacks some of these."""
    ranks: tuple[RankTraits, ...] = ()
    """The ranks, drawn if there may be several. Empty: one rank."""

    deaths: float = 0.0
    """Chance per step of a storm that a copy in a tier dies. Until a new write every read of it fails or hangs."""

    @property
    def has_remote(self) -> bool:
        """Whether any tier is asked in rounds."""
        return any(rules.is_remote for rules in self.rules)

    @property
    def tiers(self) -> tuple[str, ...]:
        """Names of the tiers, fastest first."""
        return tuple(rules.name for rules in self.rules)

    @property
    def has_history_only(self) -> bool:
        """Whether every group is a history."""
        return all(isinstance(group.validity, History) for group in self.layout.groups)


def draw(seed: int, steps: int | None = None, **overrides: object) -> Scenario:
    """Draw the scenario of `seed`. `overrides` replace fields of `Scenario` after the draw.

    Raises:
        TypeError: an override is not a field of `Scenario`.
    """
    dice = Random(f"scenario {seed}")
    given = overrides.pop("mode", None)
    drawn = dice.choices(list(Mode), (12, 15, 73))[0]
    mode = given if isinstance(given, Mode) else drawn
    chunk_tokens = dice.choice((4, 8))
    groups = _draw_groups(dice, chunk_tokens)
    tiers = ("disk", "shared", "far")[: dice.choices((0, 1, 2, 3), (5, 45, 35, 15))[0]]
    slots_base = dice.choice((3, 5, 8, 12, 20))
    steps = steps or dice.randint(80, 240)
    scenario = Scenario(
        seed=seed,
        mode=mode,
        steps=steps,
        rules=(),
        layout=KvLayout(chunk_tokens, groups),
        slots=tuple(max(2, slots_base + dice.randint(-2, 2)) for _ in groups),
        tier_objects=dice.randint(4, 40) if mode is Mode.STORM and dice.random() < 0.4 else None,
        tier_evicts=dice.random() < 0.6,
        limits=_draw_limits(dice, mode, rules := {"small_bytes_in_flight": _draw_small_bytes(seed)}),
        waiting=dice.choice((0, 3, 10, 4096, 4096, 4096)) if mode is Mode.STORM else 4096,
        requests=dice.choice((1, 3, 4096, 4096)) if mode is Mode.STORM else 4096,
        evictor=dice.choices(EVICTORS, (35, 35, 15, 15))[0],
        device_s=(0.001, dice.uniform(0.002, 0.02)),
        tier_s=tuple((0.001, dice.choice((0.005, 0.02, 0.1))) for _ in tiers),
        arrival_s=dice.choice((0.01, 0.05, 0.2)),
        chunks_max=dice.choice((2, 4, 6, 8, 12)),
        branches=dice.randint(1, 3),
        prefilled=dice.choice((0, 3, 6)) if tiers else 0,
        readers=dice.choice((0.0, 0.3, 0.7)),
        faults=_draw_faults(dice, mode, tiers, more=Random(f"writes {seed}")),
    )
    scenario = replace(scenario, rules=tuple(TierRules(name=name, **rules) for name in tiers))
    if len(tiers) > 1:
        scenario = _with_hierarchy(scenario, Random(f"tiers {seed}"))
    scenario = replace(scenario, **overrides)
    if scenario.announced:
        publishes = Random(f"publishes {seed}").random() < 0.5
        scenario = replace(scenario, limits=replace(scenario.limits, publishes=publishes))
    if scenario.most_ranks > 1:
        scenario = replace(scenario, ranks=_draw_ranks(scenario, Random(f"ranks {seed}")))
        shares = Random(f"shares {seed}")
        if shares.random() < scenario.absent:
            scenario = _with_absent_groups(scenario, shares)
    return scenario


def _with_hierarchy(scenario: Scenario, dice: Random) -> Scenario:
    """Add tiers that differ: slower ones behind faster ones and remote ones, each with limits of its own."""
    is_storm = scenario.mode is Mode.STORM
    rules: list[TierRules] = []
    tier_s: list[tuple[float, float]] = []
    is_slow = dice.random() < 0.5  # then objects wait to be relayed
    for number, (same, (low, high)) in enumerate(zip(scenario.rules, scenario.tier_s, strict=True)):
        rules.append(
            replace(
                same,
                persists=dice.random() < 0.8,
                is_remote=number > 0 and dice.random() < 0.6,
                loads_in_flight=dice.randint(1, 6),
                writes_in_flight=1 if is_slow and number else dice.randint(1, 6),
                probe_deadline_s=same.probe_deadline_s * dice.choice((1, 1, 3)) if is_storm else AGES_S,
                transfer_deadline_s=same.transfer_deadline_s * dice.choice((1, 1, 3)) if is_storm else AGES_S,
                failures=dice.randint(1, 4),
            )
        )
        slower = dice.choice((10, 30) if is_slow else (1, 3, 10)) if number else 1
        tier_s.append((low * slower, high * slower))
    more = dice.choice((0, 3, 6, 16))
    return replace(
        scenario,
        rules=tuple(rules),
        tier_s=tuple(tier_s),
        slots=tuple(count + more for count in scenario.slots),
        waits=dice.choice((None, None, 0.05, 1.0)),
    )


def _draw_ranks(scenario: Scenario, dice: Random) -> tuple[RankTraits, ...]:
    """Draw at least two ranks. At least one is as slow as the seed says, and one has all of the seed's faults."""
    ranks: list[RankTraits] = []
    for number in range(dice.randint(2, scenario.most_ranks)):
        faults = scenario.faults
        if number and dice.random() < 0.7:
            names = ("copy_fails", "read_fails", "write_fails", "flipped", "late", "probe_fails", "probe_late")
            changes: dict[str, Any] = {name: getattr(faults, name) * dice.choice((0, 0, 1)) for name in names}
            changes["outages"] = tuple(it for it in faults.outages if dice.random() < 0.5)
            faults = replace(faults, **changes)
        ranks.append(RankTraits(faults, dice.uniform(0.2, 1.0), dice.uniform(0.1, 1.0)))
    slowest = dice.randrange(len(ranks))
    ranks[slowest] = replace(ranks[slowest], share=1.0, pace=1.0)
    dice.shuffle(ranks)
    for number in range(1, len(ranks)):
        first = dice.randrange(number)
        if dice.random() < scenario.copied and ranks[first].filled_by is None:
            ranks[number] = replace(ranks[number], filled_by=first)
    return tuple(ranks)


def _with_absent_groups(scenario: Scenario, dice: Random) -> Scenario:
    """Split a history into groups. Each group is on at least one rank, and each rank has at least one group."""
    groups: list[GroupLayout] = []
    slots: list[int] = []
    for group, count in zip(scenario.layout.groups, scenario.slots, strict=True):
        shares = dice.randint(2, 4) if isinstance(group.validity, History) else 1
        groups += [group] * shares
        slots += [max(2, count + dice.randint(-1, 1)) for _ in range(shares)]
    firsts = [number if it.filled_by is None else it.filled_by for number, it in enumerate(scenario.ranks)]
    held: dict[int, set[int]] = {first: set() for first in firsts}
    more = dice.choice((0.0, 0.4))
    for group in range(len(groups)):
        first = dice.choice(firsts)
        for number, own in held.items():
            if number == first or dice.random() < more:
                own.add(group)
    for own in held.values():
        if not own:
            own.add(dice.randrange(len(groups)))
    lacks = [frozenset(range(len(groups))) - held[first] for first in firsts]
    return replace(
        scenario,
        layout=KvLayout(scenario.layout.chunk_tokens, tuple(groups)),
        slots=tuple(slots),
        ranks=tuple(replace(rank, lacks=it) for rank, it in zip(scenario.ranks, lacks, strict=True)),
    )


def _draw_groups(dice: Random, chunk_tokens: int) -> tuple[GroupLayout, ...]:
    kinds: list[Validity] = [History()]
    if dice.random() < 0.45:
        kinds.append(Window(dice.randint(1, 3 * chunk_tokens)))
        if dice.random() < 0.5:
            kinds.append(State())
        dice.shuffle(kinds)
    return tuple(GroupLayout(kind, (OBJECT_BYTES,), "sim") for kind in kinds)


def _draw_limits(dice: Random, mode: Mode, rules: dict[str, Any]) -> Limits:
    """Draw the limits of the core. Limits of each tier go into `rules`."""
    is_calm = mode is not Mode.STORM
    drawn: dict[str, Any] = {
        "stores_in_flight": dice.randint(1, 6),
        "scatters": dice.randint(1, 6),
        "loads_in_flight": dice.randint(1, 6),
        "writes_in_flight": dice.randint(1, 6),
        "probe_deadline_s": AGES_S if is_calm else dice.uniform(0.02, 0.3),
        "load_deadline_s": AGES_S if is_calm else dice.uniform(0.1, 1.5),
        "transfer_deadline_s": AGES_S if is_calm else dice.uniform(0.1, 1.0),
        "store_deadline_s": AGES_S if is_calm else dice.uniform(0.02, 1.0),
        "failures": dice.randint(1, 4),
        "retry_s": dice.uniform(0.02, 0.5),
        "write_policy": dice.choice(list(WritePolicy)),
        "selective_uses": dice.randint(1, 3),
    }
    for name in (
        "loads_in_flight",
        "writes_in_flight",
        "probe_deadline_s",
        "transfer_deadline_s",
        "failures",
        "retry_s",
    ):
        rules[name] = drawn.pop(name)
    return Limits(**drawn)


def _draw_small_bytes(seed: int) -> int:
    # This has dice of its own, because a seed's other draws are older.
    return Random(f"small {seed}").choice((0, 0, 1, 3, 6, 12)) * OBJECT_BYTES


def _draw_faults(dice: Random, mode: Mode, tiers: tuple[str, ...], more: Random) -> Faults:
    if mode is not Mode.STORM:
        return Faults()

    def some(chance: float, most: float) -> float:
        return dice.uniform(0, most) if dice.random() < chance else 0.0

    outages: list[Outage] = []
    for tier in tiers:
        if dice.random() < 0.6:
            start = dice.uniform(0, 1.0)
            outages.append(Outage(tier, start, start + dice.uniform(0.05, 1.5), hangs=dice.random() < 0.7))
        if more.random() < 0.3:
            start = more.uniform(0, 1.5)
            hangs, end = more.random() < 0.3, start + more.uniform(0.2, 2.0)
            outages.append(Outage(tier, start, end, hangs=hangs, spares_reads=True))
    return Faults(
        copy_fails=some(0.3, 0.15),
        read_fails=some(0.4, 0.3),
        write_fails=some(0.4, 0.3),
        flipped=some(0.5, 0.5),
        late=some(0.5, 0.5),
        probe_fails=some(0.3, 0.3),
        probe_late=some(0.3, 0.3),
        other_writers=some(0.5, 0.4),
        aborts=some(0.5, 0.4),
        outages=tuple(outages),
    )
