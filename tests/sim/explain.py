"""What the core was told and what befell each object, so that every chunk that does not arrive can be explained."""

from collections import defaultdict
from dataclasses import dataclass, field
from math import inf

from tests.sim.engine import Job, Ticket
from tests.sim.scenario import OBJECT_BYTES, Mode
from tests.sim.trace import Kind
from tests.sim.world import Item, Violation, World

from kvtier.core.cache import Cache
from kvtier.core.lower import WAYS
from kvtier.core.residency import Residency
from kvtier.layout import History
from kvtier.types import (
    Cancel,
    ChunkKey,
    Command,
    Drop,
    Link,
    LoadDone,
    NextTurn,
    Outcome,
    Probe,
    RequestId,
    Tell,
    TierNotice,
    Transfer,
    Way,
)


@dataclass(slots=True, eq=False)
class Flight:
    """One transfer that is out."""

    transfer: Transfer
    ranks_left: int
    worst: Outcome = Outcome.DONE
    is_fault: bool = False
    is_cancelled: bool = False
    only_load: Ticket | None = None
    """The load that a promotion was made for, when only one wanted it."""
    ticket: Ticket | None = None
    """The load whose blocks a scatter writes."""
    replaces_since_s: float | None = None
    """Of a demotion before which the drop of a bad copy was ordered: when that was."""


@dataclass(slots=True, eq=False)
class Question:
    """One probe that is out."""

    probe: Probe
    request: RequestId
    ranks_left: int
    present: list[bool]
    is_troubled: bool = False


@dataclass(slots=True)
class Told:
    """What the tiers have said about one request's objects."""

    asked: set[Item] = field(default_factory=set[Item])
    said: dict[Item, list[str]] = field(default_factory=dict[Item, list[str]])
    open: int = 0
    is_unsure: bool = False
    """An answer came so late that the core may or may not have counted it."""


@dataclass(slots=True)
class Wanted:
    """One open load: what it waits for, and what could be had when it began."""

    job: Job
    ticket: Ticket
    present: dict[Item, bool]


TICK_LATENESS_S_MAX = 0.01
"""How much later than it should the core is told the time, at most."""

_HOST_TOLD = "host memory"
_NOTHING = object()
SEVERITY = (Outcome.DONE, Outcome.CANCELLED, Outcome.ABSENT, Outcome.FAILED, Outcome.CORRUPT)


class Log:
    """Books of its own, kept from commands and answers alone."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._scenario = world.scenario
        self.cache: Cache
        self.flights: dict[int, Flight] = {}
        self.down: set[tuple[str, Way]] = set()
        self._unusable_s: dict[str, float] = {}
        """When reads of a tier were last held up: late, or stopped."""
        self._incidents: dict[Item, float] = {}
        self._evictions: dict[Item, float] = {}
        self.questions: dict[int, Question] = {}
        self._told: dict[RequestId, Told] = {}
        self._wanted: dict[Ticket, Wanted] = {}
        self._refused: set[tuple[Ticket, str, Item]] = set()
        self.arrivals: dict[Ticket, list[tuple[float, Item]]] = {}
        """Of each open load, when each object came."""
        self._drops_due: list[tuple[str, Item]] = []
        self._dropped: dict[tuple[str, Item], float] = {}
        """When bad copies that have not been replaced were ordered to be dropped."""
        self._doubted: set[tuple[str, Item]] = set()
        """What a tier failed to read, and what loads wanted of a tier that gave one of them a bad copy."""
        self._replacing: tuple[str, Item] | None = None
        """A copy that was only doubted is to be dropped: the next order is the demotion that replaces it."""
        self._harmed: dict[Item, float] = {}
        """When a copy of an object in a tier was last removed or damaged, but by an order of the core."""
        self._tells_due: dict[tuple[str, str], NextTurn | None] = {}
        """(place, session) of what evictors are still to hear."""
        self._back_due: set[tuple[str, Way]] = set()
        self._faults_in_a_row: defaultdict[tuple[str, Way], int] = defaultdict(int)
        self._troubled_s: dict[tuple[str, Way], float] = {}
        """When it failed or was late last."""
        self._noticed_s: dict[tuple[str, Way], float] = {}
        """When its last notice came. Notices of several answers come together."""
        self.incident_counts: defaultdict[str, int] = defaultdict(int)
        slots = min(world.scenario.slots)
        self._tier_most = max(1, slots // (4 * max(1, len(world.scenario.tiers))))

    # ---- what the world tells --------------------------------------------------------------------------------------

    def incident(self, item: Item, what: str) -> None:
        """Something happened to an object that may cost it."""
        self.incident_counts[what] += 1
        self._incidents[item] = self._world.now_s
        if what in {"flipped", "removed", "damaged"}:
            self._harmed[item] = self._world.now_s

    def evicted(self, key: bytes, group: int) -> None:
        """The core evicted an object from host memory."""
        self.incident_counts["evicted"] += 1
        self._world.note(Kind.EVICTED, key, group)
        self._evictions[ChunkKey(key), group] = self._world.now_s

    def evicted_s(self, key: bytes, group: int) -> float:
        """When that happened last."""
        return self._evictions.get((ChunkKey(key), group), -inf)

    # ---- what the core orders --------------------------------------------------------------------------------------

    def ordered(self, command: Command, jobs: dict[RequestId, Job]) -> None:
        """One command went out."""
        replacing, self._replacing = self._replacing, None
        if replacing is not None and not (isinstance(command, Transfer) and replacing == _demoted(command)):
            raise Violation(f"a copy that was only doubted is dropped and not replaced: {replacing}")
        if isinstance(command, Transfer):
            self._sent(command, jobs)
        elif isinstance(command, Probe):
            self._asked(command)
        elif isinstance(command, Cancel):
            for number in command.ids:
                if number in self.flights:
                    self.flights[number].is_cancelled = True
        elif isinstance(command, Tell):
            self._told_tier(command, jobs)
        else:
            self._drop_ordered(command)

    def _drop_ordered(self, drop: Drop) -> None:
        which = (drop.tier, (drop.key, drop.group))
        if which in self._drops_due:
            self._drops_due.remove(which)
        elif which in self._doubted:
            self._doubted.remove(which)
            self._replacing = which
        else:
            raise Violation(f"{drop} of a copy that is neither bad nor doubted")
        self._dropped[which] = self._world.now_s
        for flight in self.flights.values():
            if _demoted(flight.transfer) == which:
                flight.replaces_since_s = None

    def expected(self, session: str, next_turn: NextTurn | None) -> None:
        """The engine says who goes on with a session."""
        for told in (_HOST_TOLD, *self._scenario.tiers):
            self._tells_due[told, session] = next_turn

    def told_host(self, session: str, next_turn: NextTurn | None) -> None:
        """The evictor of host memory's first group is told."""
        self._tell(_HOST_TOLD, session, next_turn)

    def _told_tier(self, tell: Tell, jobs: dict[RequestId, Job]) -> None:
        self._tell(tell.tier, tell.session, tell.next_turn)
        # A store that begins at this moment may have come after the news.
        stores = [store for job in jobs.values() if job.session == tell.session for store in job.stores]
        if any(store.start_s < self._world.now_s for store in stores):
            raise Violation(f"{tell} while the session still stores")

    def _tell(self, place: str, session: str, next_turn: NextTurn | None) -> None:
        if self._tells_due.pop((place, session), _NOTHING) is not next_turn:
            raise Violation(f"{place} is told {next_turn} of {session}, which nobody said last")

    def at_end(self) -> None:
        """Nobody waits for news any more."""
        if self._tells_due:
            raise Violation(f"never told: {self._tells_due}")

    def _sent(self, transfer: Transfer, jobs: dict[RequestId, Job]) -> None:
        flight = self.flights[transfer.id] = Flight(transfer, self._scenario.ranks)
        flight.replaces_since_s = self._dropped.get(_demoted(transfer))
        if transfer.request is not None:
            job = jobs.get(transfer.request)
            flight.ticket = job.load if job is not None else None
            if job is None or job.released_s is not None:
                raise Violation(f"{transfer.link.value} {transfer.id} begins after its request was released")
        if transfer.link is Link.PROMOTE:
            item = (transfer.key, transfer.group)
            wanting = [wanted.ticket for wanted in self._wanted.values() if item in wanted.present]
            if not wanting:
                raise Violation(f"promote {transfer.id} that no load asks for")
            if len(wanting) == 1:
                flight.only_load = wanting[0]
                if (wanting[0], transfer.tier, item) in self._refused:
                    raise Violation(f"promote {transfer.id} from {transfer.tier!r}, which failed to give it already")

    def answered(self, transfer: Transfer, outcome: Outcome, *, is_fault: bool) -> None:
        """One rank has answered; called before the core hears of it."""
        flight = self.flights[transfer.id]
        flight.worst = max(flight.worst, outcome, key=SEVERITY.index)
        flight.ranks_left -= 1
        if not flight.ranks_left:
            del self.flights[transfer.id]
            item = (transfer.key, transfer.group)
            if flight.worst is Outcome.CORRUPT and transfer.link is Link.PROMOTE:
                self._drops_due.append((transfer.tier, item))
                wanting = [wanted.present for wanted in self._wanted.values() if item in wanted.present]
                self._doubted.update((transfer.tier, other) for present in wanting for other in present)
            elif transfer.link is Link.PROMOTE and flight.worst is not Outcome.DONE and (is_fault or flight.is_fault):
                self._doubted.add((transfer.tier, item))
            if flight.replaces_since_s is not None and flight.worst is Outcome.DONE:
                is_harmed = self._harmed.get(item, -inf) >= flight.replaces_since_s
                if not is_harmed and not self._world.shelves[transfer.tier].holds(item):
                    raise Violation(f"demote {transfer.id} was to replace a bad copy in {transfer.tier!r} and did not")
                self._dropped.pop((transfer.tier, item), None)
            if transfer.link is Link.SCATTER and flight.worst is Outcome.DONE and flight.ticket in self.arrivals:
                self.arrivals[flight.ticket].append((self._world.now_s, item))
            if flight.worst is not Outcome.DONE:
                self._incidents[item] = self._world.now_s  # one rank may have failed long ago
            is_blamed = flight.worst not in (Outcome.DONE, Outcome.CANCELLED)
            if flight.only_load is not None and is_blamed:
                self._refused.add((flight.only_load, transfer.tier, item))
        flight.is_fault |= is_fault
        if transfer.tier and not flight.ranks_left and flight.worst is not Outcome.CANCELLED:
            self._count_fault(transfer.tier, WAYS[transfer.link], flight.is_fault, transfer.deadline_s)

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
        """Whether the core reads the tier."""
        return (tier, "read") not in self.down

    def notice(self, notice: TierNotice) -> None:
        """The reads or the writes of a tier stopped or began again."""
        self._note_late()
        which = (notice.tier, notice.way)
        self.incident_counts[f"{notice.way} {'up' if notice.is_up else 'down'}"] += 1
        if notice.is_up == (which not in self.down):
            raise Violation(f"{notice} tells nothing new")
        self._faults_in_a_row[which] = 0
        if notice.is_up:
            if notice.way == "read":
                self._unusable_s[notice.tier] = self._world.now_s
            self.down.discard(which)
            self._back_due.discard(which)
        elif self._troubled_s.get(which, -inf) < self._noticed_s.get(which, 0.0):
            raise Violation(f"{notice}, and no such operation has failed or was late")
        else:
            self.down.add(which)
        self._noticed_s[which] = self._world.now_s

    # ---- questions -------------------------------------------------------------------------------------------------

    def asking(self, request: RequestId) -> None:
        """`request` is about to be looked up: the probes that follow are its."""
        self._asker = request

    def _asked(self, probe: Probe) -> None:
        told = self._told.setdefault(self._asker, Told())
        told.open += 1
        told.asked.update(probe.objects)
        self.questions[probe.id] = Question(probe, self._asker, self._scenario.ranks, [True] * len(probe.objects))

    def probed(self, probe: Probe, present: list[bool] | None) -> None:
        """One rank has answered; called before the core hears of it."""
        question = self.questions[probe.id]
        question.ranks_left -= 1
        if self._world.now_s >= probe.deadline_s or present is None:
            question.is_troubled = True
        else:
            question.present = [a and b for a, b in zip(question.present, present, strict=True)]
        if question.ranks_left:
            return
        del self.questions[probe.id]
        self._count_fault(probe.tier, "read", question.is_troubled, probe.deadline_s)
        if self._world.now_s >= probe.deadline_s:
            # Whether this is an answer or a failure depends on whether the core has looked at the clock since.
            self._faults_in_a_row[probe.tier, "read"] = 0
        told = self._told.get(question.request)
        if told is None or told.open == 0:
            return
        told.open -= 1
        if question.is_troubled:
            told.is_unsure = True
            return
        for item, is_there in zip(probe.objects, question.present, strict=True):
            if is_there:
                told.said.setdefault(item, []).append(probe.tier)

    def forgotten(self, request: RequestId) -> None:
        """The request was released."""
        self._told.pop(request, None)
        for question in self.questions.values():
            if question.request == request:
                question.request = RequestId(f"{request} before")

    def said(self, request: RequestId, item: Item) -> list[str]:
        """Tiers that said they hold an object."""
        told = self._told.get(request)
        return told.said.get(item, []) if told is not None else []

    def is_asking(self, request: RequestId) -> bool:
        """Whether some rank has yet to answer a probe of `request`."""
        told = self._told.get(request)
        return told is not None and told.open > 0

    def is_unsure(self, request: RequestId) -> bool:
        """Whether an answer came so late that it may or may not count."""
        told = self._told.get(request)
        return told is not None and told.is_unsure

    # ---- loads -----------------------------------------------------------------------------------------------------

    def load_begun(self, job: Job, ticket: Ticket) -> None:
        """Note for each object whether it can be had: in host memory, or in a tier that the core has reason to try."""
        present: dict[Item, bool] = {}
        told = self._told.get(job.request)
        for place in ticket.blocks:
            item = ticket.item(place)
            tiers = list(self._scenario.tiers)
            if told is not None and item in told.asked and told.said.get(item):
                tiers = told.said[item]
            in_tier = any(self._world.shelves[tier].holds(item) for tier in tiers)
            entry = self.cache.host.find(*item)
            present[item] = in_tier or (entry is not None and entry.residency is not Residency.PROMOTING)
        self._wanted[ticket] = Wanted(job, ticket, present)
        self.arrivals[ticket] = []

    def explain(self, job: Job, ticket: Ticket, done: LoadDone) -> None:
        """Each chunk that did not arrive has a reason."""
        self._note_late()
        wanted = self._wanted.pop(ticket)
        self._refused = {refused for refused in self._refused if refused[0] is not ticket}
        now_s, storm = self._world.now_s, self._scenario.mode is Mode.STORM
        is_too_late = now_s >= ticket.start_s + self._scenario.limits.load_deadline_s
        if job.released_s is not None or (is_too_late and storm):
            return
        groups = self._scenario.layout.groups
        holes = [chunk for group, chunk in done.failed if isinstance(groups[group].validity, History)]
        held_up = any(since_s >= ticket.start_s for since_s in self._unusable_s.values())
        tiers_in_trouble = held_up or not all(map(self.is_read, self._scenario.tiers))
        for group, chunk in done.failed:
            item = ticket.item((group, chunk))
            reasons = (
                not wanted.present[item],
                bool(holes) and min(holes) < chunk,
                storm and self._incidents.get(item, -inf) >= ticket.start_s,
                storm and tiers_in_trouble,
                done.was_cut,  # whether that was right, the judge says
            )
            if not any(reasons):
                raise Violation(f"group {group} chunk {chunk} did not arrive, and nothing had happened to it: {done}")

    def _note_late(self) -> None:
        now_s = self._world.now_s
        for flight in self.flights.values():
            transfer = flight.transfer
            if transfer.tier and now_s >= transfer.deadline_s:
                self._troubled_s[transfer.tier, WAYS[transfer.link]] = now_s
                if transfer.link is Link.PROMOTE:
                    self._unusable_s[transfer.tier] = now_s
                self._incidents[transfer.key, transfer.group] = now_s
        overdue = [question.probe for question in self.questions.values() if now_s >= question.probe.deadline_s]
        self._troubled_s.update(((probe.tier, "read"), now_s) for probe in overdue)

    # ---- after each step -------------------------------------------------------------------------------------------

    def check_budgets(self) -> None:
        """Every budget holds, by our own count, and bad copies are dropped at once."""
        self._note_late()
        now_s, limits = self._world.now_s, self._scenario.limits
        out: defaultdict[tuple[Link, str], int] = defaultdict(int)
        for flight in self.flights.values():
            transfer = flight.transfer
            out[transfer.link, transfer.tier] += 1
            is_late = transfer.tier and now_s > transfer.deadline_s + TICK_LATENESS_S_MAX
            if is_late and not flight.is_cancelled:
                raise Violation(f"{transfer.link.value} {transfer.id} is past its deadline and was not given up")
        small = limits.small_bytes // OBJECT_BYTES
        for (link, tier), count in out.items():
            most = {
                Link.GATHER: limits.gathers,
                Link.SCATTER: limits.scatters,
                Link.PROMOTE: min(max(limits.promotes, small), self._tier_most),
                Link.DEMOTE: min(max(limits.demotes, small), self._tier_most),
            }[link]
            if count > most:
                raise Violation(f"{count} {link.value}s {tier} in flight, {most} allowed")
        if len(self._told) > limits.requests:
            raise Violation(f"the answers of {len(self._told)} requests are kept, {limits.requests} allowed")
        if self._back_due:
            raise Violation(f"{self._back_due} have succeeded and still count as down")
        if self._drops_due:
            raise Violation(f"a corrupt copy was not dropped: {self._drops_due}")
        for which, count in self._faults_in_a_row.items():
            if count >= limits.tier_failures and which not in self.down:
                raise Violation(f"{which} failed {count} times in a row and still counts as healthy")


def _demoted(transfer: Transfer) -> tuple[str, Item]:
    """What a demotion brings, and where; of another transfer what is nowhere."""
    return transfer.tier if transfer.link is Link.DEMOTE else "", (transfer.key, transfer.group)
