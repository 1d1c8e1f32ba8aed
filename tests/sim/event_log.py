"""An independent record of commands, answers and faults, which checks budgets and explains every missing chunk."""

from collections import defaultdict
from dataclasses import dataclass, field
from math import inf

from tests.sim.engine import Operation, SimJob
from tests.sim.failed_reads import ReadRecord
from tests.sim.scenario import OBJECT_BYTES, Mode
from tests.sim.trace import RecordKind
from tests.sim.world import Item, Violation, World

from kvtier.core.cache import Cache
from kvtier.core.host_residency import Residency
from kvtier.core.tier_state import WAYS
from kvtier.layout import History
from kvtier.types import (
    Cancel,
    ChunkKey,
    Command,
    Direction,
    Drop,
    LoadDone,
    NextTurn,
    Outcome,
    Prefix,
    Probe,
    RequestId,
    Tell,
    TierNotice,
    Transfer,
    Way,
)


@dataclass(slots=True, eq=False)
class OpenTransfer:
    """One transfer in flight."""

    transfer: Transfer
    is_cancelled: bool = False
    is_given_up: bool = False
    """Whether reads of its tier stopped while it was in flight."""
    only_load: Operation | None = None
    """The load that needs this promotion, if exactly one does."""
    operation: Operation | None = None
    """The load whose blocks a scatter writes."""
    replaces_since_s: float | None = None
    """For a demotion that follows the drop of a bad copy, the time of the drop."""


@dataclass(slots=True, eq=False)
class OpenProbe:
    """One probe in flight."""

    probe: Probe
    request: RequestId


@dataclass(slots=True)
class TierAnswers:
    """The tiers' answers to one request's probes."""

    probed: set[Item] = field(default_factory=set[Item])
    holders: dict[Item, list[str]] = field(default_factory=dict[Item, list[str]])
    sure: set[tuple[str, Item]] = field(default_factory=set[tuple[str, Item]])
    """The (tier, object) pairs that no read has made doubtful."""
    open: int = 0
    is_unsure: bool = False
    """Whether an answer arrived at its deadline, so that the core may or may not have counted it."""


@dataclass(slots=True)
class OpenLoad:
    """One open load, with the objects that were available when it began."""

    job: SimJob
    operation: Operation
    present: dict[Item, bool]


TICK_LATENESS_S_MAX = 0.01
"""Longest delay of a tick after its deadline."""

_NO_ANSWERS = TierAnswers()
_HOST = "host memory"
_NO_HINT = object()


class EventLog:
    """Reconstructs state from commands and answers alone, and compares it with the core's decisions."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._scenario = world.scenario
        self.cache: Cache
        self.transfers: dict[int, OpenTransfer] = {}
        self.down: set[tuple[str, Way]] = set()
        self._unusable_s: dict[str, float] = {}
        """For each tier, the time at which its reads were last late or stopped."""
        self._incidents: dict[Item, float] = {}
        self._evictions: dict[Item, float] = {}
        self.probes: dict[int, OpenProbe] = {}
        self._answers: dict[RequestId, TierAnswers] = {}
        self._wanted: dict[Operation, OpenLoad] = {}
        self._prefetched: dict[RequestId, set[Item]] = {}
        """Objects of each prefetch that the engine has asked for."""
        self._refused: set[tuple[Operation, str, Item]] = set()
        self.arrivals: dict[Operation, list[tuple[float, Item]]] = {}
        """Arrival times of the objects of each open load."""
        self._drops_due: list[tuple[str, Item]] = []
        self._dropped: dict[tuple[str, Item], float] = {}
        """Time of the drop, for each copy that was dropped and not yet replaced."""
        self._doubted: set[tuple[str, Item]] = set()
        """Copies that the core may replace, because a read failed or the tier gave an open load a corrupt object."""
        self._replacing: tuple[str, Item] | None = None
        """A doubted copy that was just dropped. The next command must be the demotion that replaces it."""
        self.reads = ReadRecord(self._doubt)
        self._harmed: dict[Item, float] = {}
        """For each object, the time at which something other than the core last removed or damaged a tier's copy."""
        self._hints_due: dict[tuple[str, str], NextTurn | None] = {}
        """By (host or tier, conversation), the hint that its evictor has not received yet."""
        self._back_due: set[tuple[str, Way]] = set()
        self._faults_in_a_row: defaultdict[tuple[str, Way], int] = defaultdict(int)
        self._troubled_s: dict[tuple[str, Way], float] = {}
        """Time of the last failure or late answer."""
        self._noticed_s: dict[tuple[str, Way], float] = {}
        """Time of the last notice. One notice may stand for several answers."""
        self.incident_counts: defaultdict[str, int] = defaultdict(int)
        count = max(1, len(world.scenario.tiers))
        self._slots_most = max(count, min(world.scenario.slots) // 4)
        self._tier_most = self._slots_most - (count - 1) * max(1, self._slots_most // (2 * count))

    # ---- faults ----------------------------------------------------------------------------------------------------

    def incident(self, item: Item, what: str) -> None:
        """Record a fault that may lose an object."""
        self.incident_counts[what] += 1
        self._incidents[item] = self._world.now_s
        if what in {"flipped", "removed", "damaged"}:
            self._harmed[item] = self._world.now_s

    def evicted(self, key: bytes, group: int) -> None:
        """Note that the core evicted an object from host memory."""
        self.incident_counts["evicted"] += 1
        self._world.note(RecordKind.EVICTED, key, group)
        self._evictions[ChunkKey(key), group] = self._world.now_s

    def evicted_s(self, key: bytes, group: int) -> float:
        """Time of the last eviction."""
        return self._evictions.get((ChunkKey(key), group), -inf)

    # ---- commands --------------------------------------------------------------------------------------------------

    def ordered(self, command: Command, jobs: dict[RequestId, SimJob]) -> None:
        """Record and check one command of the core."""
        replacing, self._replacing = self._replacing, None
        if replacing is not None and not (isinstance(command, Transfer) and replacing == _demoted(command)):
            raise Violation(f"a doubted copy was dropped and not replaced: {replacing}")
        if isinstance(command, Transfer):
            self._sent(command, jobs)
        elif isinstance(command, Probe):
            self._asked(command)
        elif isinstance(command, Cancel):
            for number in command.ids:
                if number in self.transfers:
                    self.transfers[number].is_cancelled = True
        elif isinstance(command, Tell):
            self._hint_to_tier(command, jobs)
        else:
            self._drop_ordered(command)

    def _drop_ordered(self, drop: Drop) -> None:
        self._note_late()
        which = (drop.tier, (drop.key, drop.group))
        if which in self._drops_due:
            self._drops_due.remove(which)
        elif which in self._doubted:
            self._doubted.remove(which)
            self._replacing = which
        else:
            raise Violation(f"{drop} of a copy that is neither bad nor doubted")
        self._dropped[which] = self._world.now_s
        for sent in self.transfers.values():
            if _demoted(sent.transfer) == which:
                sent.replaces_since_s = None

    def prefetched(self, request: RequestId, prefix: Prefix) -> None:
        """Note that the engine asks for a prefetch, which may begin later and reports no end."""
        groups = range(len(self._scenario.slots))
        self._prefetched[request] = {(key, group) for key in prefix.keys for group in groups}

    def expected(self, conversation: str, next_turn: NextTurn | None) -> None:
        """Note that the engine gives a next-turn hint for a conversation."""
        for place in (_HOST, *self._scenario.tiers):
            self._hints_due[place, conversation] = next_turn

    def hint_to_host(self, conversation: str, next_turn: NextTurn | None) -> None:
        """Note that the evictor of host memory's first group received a hint."""
        self._hinted(_HOST, conversation, next_turn)

    def _hint_to_tier(self, tell: Tell, jobs: dict[RequestId, SimJob]) -> None:
        self._hinted(tell.tier, tell.conversation, tell.next_turn)
        # A store that begins at this moment may have come after the hint.
        stores = [store for job in jobs.values() if job.conversation == tell.conversation for store in job.stores]
        if any(store.start_s < self._world.now_s for store in stores):
            raise Violation(f"{tell} while the conversation still stores")

    def _hinted(self, place: str, conversation: str, next_turn: NextTurn | None) -> None:
        if self._hints_due.pop((place, conversation), _NO_HINT) is not next_turn:
            raise Violation(f"{place} got the hint {next_turn} for {conversation}, which is not the last one given")

    def at_end(self) -> None:
        """Check that every hint has been delivered."""
        if self._hints_due:
            raise Violation(f"hints not delivered: {self._hints_due}")

    def _sent(self, transfer: Transfer, jobs: dict[RequestId, SimJob]) -> None:
        sent = self.transfers[transfer.id] = OpenTransfer(transfer)
        sent.replaces_since_s = self._dropped.get(_demoted(transfer))
        if transfer.request is not None:
            job = jobs.get(transfer.request)
            sent.operation = job.load if job is not None else None
            if job is None or job.released_s is not None:
                raise Violation(f"{transfer.direction.value} {transfer.id} begins after its request was released")
        if transfer.direction is Direction.PROMOTE:
            item = (transfer.key, transfer.group)
            self.reads.begins(transfer, self._world.now_s)
            if any(entry.slot == transfer.slot for entry in self.cache.host.relayed if entry.group == transfer.group):
                self._check_relay(transfer)
                return
            wanting = [wanted.operation for wanted in self._wanted.values() if item in wanted.present]
            if any(item in items for items in self._prefetched.values()):
                return
            if not wanting:
                raise Violation(f"promote {transfer.id} that no load needs")
            if len(wanting) == 1:
                sent.only_load = wanting[0]
                if (wanting[0], transfer.tier, item) in self._refused:
                    raise Violation(f"promote {transfer.id} from {transfer.tier!r}, which failed to give it already")

    def _check_relay(self, promote: Transfer) -> None:
        """Check that a relay reads from a persistent tier with slower ones, and that the staging area is small."""
        count = self._scenario.slots[promote.group]
        if not any(it.persists and it.name == promote.tier for it in self._scenario.rules[:-1]):
            raise Violation(f"relay {promote.id} from {promote.tier!r}, whose objects are not relayed")
        taken = sum(
            entry.is_staged
            for entry in (*self.cache.host.relayed, *self.cache.host.lost)
            if entry.group == promote.group
        )
        if taken > (min(8, max(1, count // 32)) if count >= 8 else 0):
            raise Violation(f"{taken} slots of {count} are in the staging area")

    def answered(self, transfer: Transfer, outcome: Outcome, *, is_fault: bool) -> None:
        """Record an answer before the core gets it."""
        sent = self.transfers.pop(transfer.id)
        item = (transfer.key, transfer.group)
        if outcome is Outcome.CORRUPT and transfer.direction is Direction.PROMOTE:
            self._drops_due.append((transfer.tier, item))
            wanting = [wanted.present for wanted in self._wanted.values() if item in wanted.present]
            fetching = [items for items in self._prefetched.values() if item in items]
            self._doubted.update((transfer.tier, other) for items in (*wanting, *fetching) for other in items)
        if transfer.direction is Direction.PROMOTE:
            # One rank's copy may be dropped while another's read fails. A dropped copy need not be left alone.
            is_failed = is_fault and outcome is not Outcome.CORRUPT
            self.reads.read(transfer, outcome, self._world.now_s, is_fault=is_failed)
        elif transfer.direction is Direction.DEMOTE and outcome is Outcome.DONE:
            which = (transfer.tier, item)
            self.reads.written(which, is_doubted=which in self._doubted)
        if sent.replaces_since_s is not None and outcome is Outcome.DONE:
            is_harmed = self._harmed.get(item, -inf) >= sent.replaces_since_s
            if not is_harmed and not self._world.tiers[transfer.tier].holds(item):
                raise Violation(f"demote {transfer.id} was to replace a bad copy in {transfer.tier!r} and did not")
            self._dropped.pop((transfer.tier, item), None)
        if transfer.direction is Direction.SCATTER and outcome is Outcome.DONE and sent.operation in self.arrivals:
            self.arrivals[sent.operation].append((self._world.now_s, item))
        if sent.only_load is not None and outcome not in (Outcome.DONE, Outcome.CANCELLED):
            self._refused.add((sent.only_load, transfer.tier, item))
        if transfer.tier and outcome is not Outcome.CANCELLED:
            self._count_fault(transfer.tier, WAYS[transfer.direction], is_fault, transfer.deadline_s)

    def _doubt(self, which: tuple[str, Item]) -> None:
        self._doubted.add(which)
        for answers in self._answers.values():
            answers.sure.discard(which)

    def _count_fault(self, tier: str, way: Way, is_fault: bool, deadline_s: float) -> None:
        is_in_time = self._world.now_s < deadline_s
        which: tuple[str, Way] = (tier, way)
        if is_fault or not is_in_time:
            self._troubled_s[which] = self._world.now_s
        if not is_fault:
            self._faults_in_a_row[which] = 0
            if is_in_time and which in self.down:
                self._back_due.add(which)
        elif is_in_time:
            self._faults_in_a_row[which] += 1

    def is_read(self, tier: str) -> bool:
        """Whether reads of the tier are up."""
        return (tier, "read") not in self.down

    def notice(self, notice: TierNotice) -> None:
        """Check that a tier's reads or writes had a reason to stop or resume."""
        self._note_late()
        which = (notice.tier, notice.way)
        self.incident_counts[f"{notice.way} {'up' if notice.is_up else 'down'}"] += 1
        if notice.is_up == (which not in self.down):
            raise Violation(f"{notice} repeats the current state")
        self._faults_in_a_row[which] = 0
        if notice.is_up:
            if notice.way == "read":
                self.reads.is_back(notice.tier)
                self._unusable_s[notice.tier] = self._world.now_s
            self.down.discard(which)
            self._back_due.discard(which)
        elif self._troubled_s.get(which, -inf) < self._noticed_s.get(which, 0.0) < self._world.now_s:
            raise Violation(f"{notice}, without a failed or late operation")
        else:
            self.down.add(which)
            for sent in self.transfers.values():
                sent.is_given_up |= WAYS.get(sent.transfer.direction) == "read" == notice.way and (
                    sent.transfer.tier == notice.tier
                )
        self._noticed_s[which] = self._world.now_s

    # ---- probes -------------------------------------------------------------------------------------------------

    def _asked(self, probe: Probe) -> None:
        # The core asks the next tier when the previous one has answered, so no call shows the request.
        pending = self.cache._probes._open.get(probe.id)
        if pending is not None and pending.survey is not None:
            self.probes[probe.id] = OpenProbe(probe, RequestId("survey"))
            return
        asker = pending.search.request if pending is not None and pending.search is not None else RequestId("none")
        answers = self._answers.setdefault(asker, TierAnswers())
        answers.open += 1
        answers.probed.update(probe.objects)
        self.probes[probe.id] = OpenProbe(probe, asker)

    def probed(self, probe: Probe, present: list[bool] | None) -> None:
        """Record an answer before the core gets it."""
        pending = self.probes.pop(probe.id)
        if self._world.now_s >= probe.deadline_s:
            present = None
        self._count_fault(probe.tier, "read", present is None, probe.deadline_s)
        if self._world.now_s >= probe.deadline_s:
            # Whether this is an answer or a failure depends on whether the core has ticked since.
            self._faults_in_a_row[probe.tier, "read"] = 0
        answers = self._answers.get(pending.request)
        if answers is None or answers.open == 0:
            return
        answers.open -= 1
        if present is None:
            answers.is_unsure = True
            return
        for item, is_there in zip(probe.objects, present, strict=True):
            if is_there:
                answers.holders.setdefault(item, []).append(probe.tier)
                if self.reads.is_surely_read(probe.tier, item):
                    answers.sure.add((probe.tier, item))

    def forgotten(self, request: RequestId) -> None:
        """Forget the answers of a released request."""
        self._answers.pop(request, None)
        for pending in self.probes.values():
            if pending.request == request:
                pending.request = RequestId(f"{request} before")

    def holders(self, request: RequestId, item: Item, *, is_sure: bool = False) -> list[str]:
        """Return the tiers that answered that they have an object. `is_sure`: only those that the core reads it
        from."""
        answers = self._answers.get(request, _NO_ANSWERS)
        return [tier for tier in answers.holders.get(item, []) if not is_sure or (tier, item) in answers.sure]

    def is_asking(self, request: RequestId) -> bool:
        """Whether a probe of `request` is open."""
        return self._answers.get(request, _NO_ANSWERS).open > 0

    def is_unsure(self, request: RequestId) -> bool:
        """Whether an answer arrived at its deadline and may or may not count."""
        return self._answers.get(request, _NO_ANSWERS).is_unsure

    # ---- loads -----------------------------------------------------------------------------------------------------

    def load_begun(self, job: SimJob, operation: Operation) -> None:
        """Record which objects are available in host memory or in a tier that the core may try."""
        present: dict[Item, bool] = {}
        answers = self._answers.get(job.request, _NO_ANSWERS)
        for place in operation.blocks:
            item = operation.item(place)
            tiers = list(self._scenario.tiers)
            if self._scenario.has_remote:  # the core assumes that a remote tier has what lies between two answers
                tiers = list(self.cache._probes.tiers_for(job.request, item))
            elif item in answers.probed and answers.holders.get(item):
                tiers = tiers[tiers.index(answers.holders[item][0]) :]
            in_tier = any(self._world.tiers[tier].holds(item) for tier in tiers)
            entry = self.cache.host.entry(*item)
            present[item] = in_tier or (entry is not None and entry.residency is not Residency.PROMOTING)
        self._wanted[operation] = OpenLoad(job, operation, present)
        self.arrivals[operation] = []

    def explain(self, job: SimJob, operation: Operation, done: LoadDone) -> None:
        """Check that each missing chunk has a reason."""
        self._note_late()
        wanted = self._wanted.pop(operation)
        self._refused = {refused for refused in self._refused if refused[0] is not operation}
        now_s, storm = self._world.now_s, self._scenario.mode is Mode.STORM
        is_too_late = now_s >= operation.start_s + self._scenario.limits.load_deadline_s
        if job.released_s is not None or (is_too_late and storm):
            return
        groups = self._scenario.layout.groups
        holes = [chunk for group, chunk in done.failed if isinstance(groups[group].validity, History)]
        held_up = any(since_s >= operation.start_s for since_s in self._unusable_s.values())
        tiers_in_trouble = held_up or not all(map(self.is_read, self._scenario.tiers))
        for group, chunk in done.failed:
            item = operation.item((group, chunk))
            reasons = (
                not wanted.present[item],
                bool(holes) and min(holes) < chunk,
                storm and self._incidents.get(item, -inf) >= operation.start_s,
                any(not self.reads.is_surely_read(tier, item) for tier in self._scenario.tiers),
                storm and tiers_in_trouble,
                done.was_cut,  # `Invariants` checks the cut itself
            )
            if not any(reasons):
                raise Violation(f"group {group} chunk {chunk} did not arrive without a reason: {done}")

    def _note_late(self) -> None:
        now_s = self._world.now_s
        for sent in self.transfers.values():
            transfer = sent.transfer
            if transfer.tier and now_s >= transfer.deadline_s:
                self._troubled_s[transfer.tier, WAYS[transfer.direction]] = now_s
                if transfer.direction is Direction.PROMOTE:
                    self._unusable_s[transfer.tier] = now_s
                    self.reads.is_late(transfer, now_s, TICK_LATENESS_S_MAX)
                self._incidents[transfer.key, transfer.group] = now_s
            elif sent.is_given_up:  # its thread still counts towards the tier's limit
                self._unusable_s[transfer.tier] = now_s
        overdue = [pending.probe for pending in self.probes.values() if now_s >= pending.probe.deadline_s]
        self._troubled_s.update(((probe.tier, "read"), now_s) for probe in overdue)

    # ---- after each step -------------------------------------------------------------------------------------------

    def check_budgets(self) -> None:
        """Check budgets by a count of its own, and that bad copies are dropped at once."""
        self._note_late()
        now_s, limits = self._world.now_s, self._scenario.limits
        out: defaultdict[tuple[Direction, str], int] = defaultdict(int)
        for sent in self.transfers.values():
            transfer = sent.transfer
            out[transfer.direction, transfer.tier] += 1
            is_late = transfer.tier and now_s > transfer.deadline_s + TICK_LATENESS_S_MAX
            if is_late and not sent.is_cancelled:
                raise Violation(f"{transfer.direction.value} {transfer.id} is past its deadline and was not cancelled")
        by_name = {rules.name: rules for rules in self._scenario.rules}
        for (direction, tier), count in out.items():
            rules = by_name.get(tier)
            small = rules.small_bytes_in_flight // OBJECT_BYTES if rules else 0
            most = {
                Direction.GATHER: limits.stores_in_flight,
                Direction.SCATTER: limits.scatters,
                Direction.PROMOTE: min(max(rules.loads_in_flight if rules else 0, small), self._tier_most),
                Direction.DEMOTE: min(max(rules.writes_in_flight if rules else 0, small), self._tier_most),
            }[direction]
            if count > most:
                raise Violation(f"{count} {direction.value}s {tier} in flight, {most} allowed")
        kept = len(self._answers.keys() - self._prefetched.keys())
        if kept > self._scenario.requests:
            raise Violation(f"the answers of {kept} requests are kept, {self._scenario.requests} allowed")
        if self._back_due:
            raise Violation(f"{self._back_due} have succeeded and still count as down")
        if self._drops_due:
            raise Violation(f"a corrupt copy was not dropped: {self._drops_due}")
        for which, count in self._faults_in_a_row.items():
            if count >= by_name[which[0]].failures and which not in self.down:
                raise Violation(f"{which} failed {count} times in a row and still counts as healthy")


def _demoted(transfer: Transfer) -> tuple[str, Item]:
    """Return (tier, object) of a demotion. The tier is empty for other transfers."""
    return transfer.tier if transfer.direction is Direction.DEMOTE else "", (transfer.key, transfer.group)
