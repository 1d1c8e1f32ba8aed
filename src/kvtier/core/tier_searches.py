"""Probes of lower tiers and their answers. An answer is only a hint: promotions verify the bytes.

A search asks one tier after another, each for the objects that faster sources lack. A tier with an index is asked for
all of them in one probe. A remote tier is asked for few names, in rounds, because each name costs a request:

    1. the first missing chunk, of every history group
    2. about 23 chunks, evenly spaced over the rest
    3. about 23 chunks between the last present one and the first absent one
    4. for windows and states: the last chunk of each of the four longest boundaries within the run

A prompt of 131,072 tokens has fewer than 23 * 23 chunks, so the leading run is exact unless it has holes. Reading it
finds the holes.

Another engine may announce that it is writing the leading chunks of a prompt. Then remote tiers are asked repeatedly,
and round 3 includes the last chunks before the end of the run: an engine writes several chunks concurrently, so holes
can only be there.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import repeat
from math import inf

from kvtier.core.core_output import Output
from kvtier.core.host_residency import READABLE, HostMemory, Item
from kvtier.core.limits import Limits
from kvtier.core.link_estimates import LinkEstimator
from kvtier.core.prefix import longest_boundary, needed_chunks
from kvtier.core.survey import REMOTE_NAMES, Survey
from kvtier.core.tier_state import TierState, TierStates
from kvtier.layout import KvLayout
from kvtier.types import ChunkKey, Direction, ObjectsDone, Outcome, Prefix, Probe, RequestId

NO_REQUEST = RequestId("")
NO_PREFIX = Prefix((), 1)
"""Placeholder for the prefix in a search for a list of objects."""

REQUESTS_MAX = 4096
"""Maximum number of requests whose answers are kept. Further ones are looked up in host memory only."""

ROUND_NAMES = 23
"""Number of evenly spaced names in one round of a remote tier."""

BOUNDARIES_MAX = 4
"""Maximum number of boundaries of windows and states that a remote tier is asked for."""

ASK_AGAIN_S_MIN = 0.005
ASK_AGAIN_S_MAX = 0.02
"""Shortest and longest pause before a remote tier is asked again for announced chunks. The pause doubles until more of
them are found.
"""

ASKING_MAX = 64
"""Maximum number of open searches for announced chunks. Other requests ask later."""

STALL_S = 0.5
"""A request stops waiting for announced chunks when no further one has been found for this long."""

WAIT_SHARE = 0.01
"""However rare hits are, a request waits for this share of the time to compute the tokens that a remote tier may have.
"""


@dataclass(slots=True, eq=False)
class Search:
    """One search of the tiers for objects of a request. At most one of its probes is open."""

    request: RequestId
    answers: "ProbeAnswers"
    prefix: Prefix
    missing: list[Item]
    """Objects that no source has reported yet."""
    tier: int = 0
    """Position of the tier that is asked."""
    round: int = 0
    """Round of a remote tier, numbered as above; 0 for a tier that is asked for everything in one probe."""
    chunks: list[int] = field(default_factory=list[int])
    """Chunks of history that were missing when the tier was first asked."""
    low: int = -1
    """Position in `chunks` of the last one known to be present."""
    high: int = 0
    """Position in `chunks` of the first one known to be absent."""
    sampled: list[int] = field(default_factory=list[int])
    """Positions in `chunks` that the current round asks for."""
    boundaries: list[tuple[list[Item], list[Item]]] = field(default_factory=list[tuple[list[Item], list[Item]]])
    """For each boundary, the objects of windows and states that it lacks, and those of them that are asked for."""
    is_wanted: bool = True
    """Whether the request has not been released yet."""
    is_repeated: bool = False
    """Whether a remote tier is asked again for announced chunks."""
    objects: Sequence[Item] | None = None
    """The objects of `search_objects`, whose search ends with an event; None for a prompt."""
    is_for_put: bool = False
    """Whether only the first tier is asked, and copies that may be bad count as absent."""
    run: list[Item] = field(default_factory=list[Item])
    """Objects of `search_objects` that were missing when the tier was first asked. Each counts as a chunk."""
    asks_all: bool = False
    """Whether remote tiers, like others, are asked for everything in one probe instead of in rounds."""


@dataclass(slots=True, eq=False)
class OpenProbe:
    """One open probe."""

    tier: str
    search: Search | None
    """None for a health check or a survey."""
    objects: tuple[Item, ...]
    deadline_s: float
    survey: Survey | None = None


@dataclass(slots=True, eq=False)
class AnnouncedWait:
    """A request's wait for chunks that another engine has announced. It lasts no longer than computing them would."""

    keys: frozenset[ChunkKey]
    tokens: int
    """Leading tokens of the prompt that are announced, in whole chunks."""
    until_s: float
    found_s: float
    """Time at which an object was last found, or at which the wait began."""
    found: int = 0
    """Number of objects that had been found by `found_s`."""
    has_asked: bool = False
    """Whether a search has begun since `found_s`. Without one, nothing has stalled: the engine may just call rarely."""
    again_s: float = 0.0
    """Time of the next search."""
    pause_s: float = ASK_AGAIN_S_MIN


@dataclass(slots=True, eq=False)
class ProbeAnswers:
    """The answers of lower tiers for one request, kept until its release."""

    compute_s: float | None
    """Expected time to compute the prompt."""
    waits_until_s: float | None = None
    """The request waits for remote tiers until this time. Later answers are remembered for other requests. None if no
    remote tier has been asked."""
    prefix: Prefix | None = None
    """Prefix of the last lookup. A lookup of the same prefix sends new probes only if objects have left host memory
    since.
    """
    removals: int = 0
    """`HostMemory.removals` at that lookup."""
    probed: set[Item] = field(default_factory=set[Item])
    found_in: dict[Item, str] = field(default_factory=dict[Item, str])
    """The fastest tier that reported each object."""
    searches: set[Search] = field(default_factory=set[Search])
    """Searches that have not ended."""
    announced: AnnouncedWait | None = None


class Probes:
    """Open probes, and the answers for each request. Answers are kept until the request is released."""

    def __init__(
        self,
        *,
        layout: KvLayout,
        host: HostMemory,
        tiers: TierStates,
        limits: Limits,
        estimators: Mapping[str, LinkEstimator],
        output: Output,
    ) -> None:
        self._layout = layout
        self._is_history = (True,) * len(host.slots) if host.stages_only else host.is_history
        self._host = host
        self._tiers = tiers
        self._limits = limits
        self._output = output
        self._estimators = estimators
        self._answers: dict[RequestId, ProbeAnswers] = {}
        self._order = list(tiers.by_name)
        self._open: dict[int, OpenProbe] = {}
        self._deadlines: list[tuple[float, int]] = []
        """Heap of (time, probe) for the deadline of each probe, and for the end of the wait of each request."""
        self._asking = 0
        """Number of repeated searches that are open."""

    def __len__(self) -> int:
        return len(self._open)

    def search(
        self,
        request: RequestId,
        prefix: Prefix,
        compute_s: float | None,
        now_s: float,
        *,
        resident_tokens: int = 0,
        announced_tokens: int = 0,
    ) -> ProbeAnswers | None:
        """Search the tiers for the objects that host memory lacks.

        A request asks for an object once, and again if the object was absent and has left host memory since.

        Args:
            request: name of the request.
            prefix: prefix of its prompt.
            compute_s: expected time to compute the rest of the prompt. If None, the request waits for all answers.
            now_s: the time.
            resident_tokens: leading tokens that the engine holds.
            announced_tokens: leading tokens that another engine says it has stored or is storing.

        Returns:
            The answers so far; None if there are no tiers, or if `REQUESTS_MAX` requests are tracked already.
        """
        answers = self._answers.get(request)
        if answers is None:
            if not len(self._tiers):
                return None
            if len(self._answers) >= REQUESTS_MAX:
                self._output.counters.unprobed += 1
                return None
            answers = self._answers[request] = ProbeAnswers(compute_s, removals=self._host.removals)
        if announced_tokens > resident_tokens and answers.announced is None:
            answers.announced = self._announced(prefix, announced_tokens, resident_tokens, compute_s, now_s)
        if answers.prefix is prefix and answers.removals == self._host.removals:
            return answers
        # An absent object may have been stored since, and may have left host memory for a tier. An object that a tier
        # has is not asked for again, because it may leave often, and each probe delays the request.
        left = self._host.left_since(answers.removals)
        answers.probed.difference_update(item for item in left if item not in answers.found_in)
        answers.prefix, answers.removals = prefix, self._host.removals
        missing = [
            (key, group)
            for group, entries in enumerate(self._host.entries)
            for key in prefix.keys
            if key not in entries and (key, group) not in answers.probed
        ]
        if missing:
            answers.probed.update(missing)
            search = Search(request, answers, prefix, missing)
            answers.searches.add(search)
            self._ask_next_tier(search, now_s)
        return answers

    def search_objects(
        self,
        request: RequestId,
        objects: Sequence[Item],
        now_s: float,
        *,
        is_run: bool,
        is_for_put: bool = False,
    ) -> None:
        """Search the tiers for `objects`, even for those that host memory has. One ObjectsDone follows.

        Args:
            request: name of the request.
            objects: the objects, in the order of the prefix.
            now_s: the time.
            is_run: whether only the leading run matters. If so, remote tiers are asked in rounds.
            is_for_put: whether only the first tier is asked. A copy that may be bad then counts as absent, because a
                put replaces it.
        """
        first = self._tiers.all[0]
        asked = [each for each in objects if not first.is_suspect(each)] if is_for_put else [*objects]
        answers = self._answers[request] = ProbeAnswers(compute_s=None)
        search = Search(request, answers, NO_PREFIX, asked, objects=objects, is_for_put=is_for_put, asks_all=not is_run)
        answers.searches.add(search)
        self._ask_next_tier(search, now_s)

    def survey(self, prefix: Prefix, now_s: float) -> Survey:
        """Ask every readable tier for all objects of `prefix`. A remote tier gets several probes."""
        survey = Survey.of(prefix, self._layout.groups, self._host)
        for tier_state in self._tiers.all:
            survey.found[tier_state.name] = set()
            if not tier_state.can_read(now_s):
                survey.silent[tier_state.name] = "is down"
            elif items := survey.items:
                survey.unasked[tier_state.name] = items
                self._ask_survey(survey, tier_state, now_s)
        return survey

    def _ask_survey(self, survey: Survey, tier_state: TierState, now_s: float) -> None:
        items = survey.unasked.get(tier_state.name)
        if items and survey.is_wanted:
            count = REMOTE_NAMES if tier_state.rules.is_remote else len(items)
            self._send(tier_state, None, tuple(items[:count]), now_s, survey)

    def is_waiting(self, answers: ProbeAnswers, now_s: float) -> bool:
        """Return whether the request waits for an answer that may still come."""
        is_patient = answers.waits_until_s is None or now_s < answers.waits_until_s
        return any(is_patient or not self._tiers.all[search.tier].rules.is_remote for search in answers.searches)

    def awaits_announced(self, request: RequestId, answers: ProbeAnswers, tokens: int, now_s: float) -> bool:
        """Return whether the request, which found or holds `tokens`, waits for announced chunks.

        It waits while further objects appear, and never longer than computing the announced tokens would take. So a
        wrong announcement costs at most that time or `STALL_S`, whichever is shorter.
        """
        wait, prefix = answers.announced, answers.prefix
        if wait is None or prefix is None or tokens >= wait.tokens:
            return False
        if len(answers.found_in) > wait.found:
            wait.found, wait.found_s, wait.pause_s = len(answers.found_in), now_s, ASK_AGAIN_S_MIN
            wait.has_asked = False
        cannot_ask = bool(answers.searches) or now_s < wait.again_s or self._asking >= ASKING_MAX
        if now_s >= wait.found_s + STALL_S and (wait.has_asked or cannot_ask):
            wait.until_s = min(wait.until_s, now_s)
        if now_s >= wait.until_s:
            return False
        if cannot_ask:
            return True
        first = next((it.number for it in self._tiers.all if it.rules.is_remote and it.can_read(now_s)), None)
        if first is None:
            wait.until_s = now_s  # nothing can be found
            return False
        wait.has_asked, wait.again_s = True, now_s + wait.pause_s
        wait.pause_s = min(2 * wait.pause_s, ASK_AGAIN_S_MAX)
        keys, found_in = prefix.keys[: wait.tokens // prefix.chunk_tokens], answers.found_in
        missing = [
            item
            for group, entries in enumerate(self._host.entries)
            for item in zip(keys, repeat(group), strict=False)
            if item[0] not in entries and item not in found_in
        ]
        search = Search(request, answers, prefix, missing, first, is_repeated=True)
        self._asking += 1
        answers.searches.add(search)
        self._ask_next_tier(search, now_s)
        return True

    def _announced(
        self, prefix: Prefix, announced_tokens: int, resident_tokens: int, compute_s: float | None, now_s: float
    ) -> AnnouncedWait | None:
        chunks = min(announced_tokens // prefix.chunk_tokens, len(prefix.keys))
        tokens = chunks * prefix.chunk_tokens
        if tokens <= resident_tokens:
            return None
        share = (tokens - resident_tokens) / (prefix.tokens - resident_tokens)
        computing_s = inf if compute_s is None else compute_s * share
        until_s = now_s + min(self._limits.announced_wait_s, computing_s)
        return AnnouncedWait(frozenset(prefix.keys[:chunks]), tokens, until_s, now_s)

    def _wait_s(self, search: Search, tier_state: TierState, now_s: float) -> float:
        """Return how long to wait for remote tiers: as long as the expected hits justify, and at least `WAIT_SHARE`.

        The wait is 0 if an answer usually takes longer. The hit rate includes late answers.
        """
        compute_s = search.answers.compute_s
        if compute_s is None:
            return inf
        saved_s = compute_s * len({key for key, _ in search.missing}) / len(search.prefix.keys)
        estimator = self._estimators[tier_state.name]
        size_bytes = sum(self._host.object_bytes[group] for _, group in search.missing)
        load_s = estimator.seconds(size_bytes, 0, now_s)[1] if estimator.is_known else saved_s / 2
        wait_s = max(WAIT_SHARE * saved_s, tier_state.hit_rate * (saved_s - load_s))
        return wait_s if wait_s >= tier_state.answer_s else 0.0

    def send_health_checks(self, now_s: float, watched: Callable[[str], tuple[Item, ...]]) -> None:
        """Send a health check, which is a probe without a request, to each tier that has no open probe.

        A tier with open probes of requests is still asked for the objects that observers watch.

        Args:
            now_s: the time.
            watched: returns the objects that the check of a tier asks for. The core does not use the answer.
        """
        probed = {open_probe.tier for open_probe in self._open.values()}
        checked = {it.tier for it in self._open.values() if it.search is None and it.survey is None}
        for tier_state in self._tiers.all:
            if tier_state.name not in checked and tier_state.can_read(now_s):
                objects = watched(tier_state.name)
                if objects or tier_state.name not in probed:
                    self._send(tier_state, None, objects, now_s)

    def answered(self, probe_id: int, present: Sequence[bool] | None, now_s: float) -> None:
        """Handle an answer. `present` is None if the tier failed. Answers to closed probes are ignored."""
        open_probe = self._open.pop(probe_id, None)
        if open_probe is not None:
            self._close(probe_id, open_probe, present, now_s)

    def expire(self, now_s: float) -> bool:
        """Close overdue probes as failed. Return whether a probe was closed or a wait has ended."""
        changed = False
        while self._deadlines and self._deadlines[0][0] <= now_s:
            probe_id = heappop(self._deadlines)[1]
            open_probe = self._open.get(probe_id)
            if open_probe is not None:
                changed = True
                if open_probe.deadline_s <= now_s:
                    self.answered(probe_id, None, now_s)
        return changed

    def next_deadline(self) -> float | None:
        """Return the time at which `expire` next has work to do; None if no probe is open."""
        while self._deadlines and self._deadlines[0][1] not in self._open:
            heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    def forget(self, request: RequestId) -> None:
        """Drop the answers of a released request. Each of its open searches ends with its next answer.

        That answer is still remembered for other requests.
        """
        answers = self._answers.pop(request, None)
        if answers is not None:
            for search in answers.searches:
                self._report(search)
                search.is_wanted = False

    def lost(self, item: Item, tier: str) -> None:
        """Record that `tier` could not deliver `item`, so that no request relies on that copy any longer."""
        for answers in self._answers.values():
            if answers.found_in.get(item) == tier:
                del answers.found_in[item]

    def object_searches(self) -> list[RequestId]:
        """Return the requests with an open search for objects."""
        return [it.request for answers in self._answers.values() for it in answers.searches if it.objects is not None]

    def tiers_for(self, request: RequestId, item: Item) -> Sequence[str]:
        """Return the tiers to try for an object: the one that reported it and slower ones, or all if none reported it.

        Loads request only objects that lookup found. Without a report, the object was in host memory at the lookup.
        """
        answers = self._answers.get(request)
        tier = answers.found_in.get(item) if answers is not None else None
        return self._order if tier is None else self._order[self._tiers.by_name[tier].number :]

    # ---- a search --------------------------------------------------------------------------------------------------

    def _ask_next_tier(self, search: Search, now_s: float) -> None:
        """Ask the first readable tier, starting at `search.tier`, or end the search."""
        tiers = 1 if search.is_for_put else len(self._tiers)
        while search.is_wanted and search.missing and search.tier < tiers:
            tier_state = self._tiers.all[search.tier]
            if tier_state.can_read(now_s) and self._ask_tier(search, tier_state, now_s):
                return
            search.tier += 1
        search.answers.searches.discard(search)
        self._asking -= search.is_repeated
        if search.is_wanted:
            self._report(search)

    def _report(self, search: Search) -> None:
        """Report the result of a search for objects."""
        if search.objects is not None:
            self._answers.pop(search.request, None)
            found, first = search.answers.found_in, self._tiers.all[0]
            if search.is_for_put:  # a copy may have become suspect meanwhile
                found = {item: tier for item, tier in found.items() if not first.is_suspect(item)}
            done, absent = Outcome.DONE, Outcome.ABSENT
            if 0 < len(found) < len(search.objects):
                outcomes = [done if item in found else absent for item in search.objects]
            else:
                outcomes = [done if found else absent] * len(search.objects)
            self._output.events.append(ObjectsDone(search.request, tuple(outcomes)))

    def _ask_tier(self, search: Search, tier_state: TierState, now_s: float) -> bool:
        """Start asking one tier. Return whether a probe is open."""
        if search.asks_all or not tier_state.rules.is_remote:
            search.round = 0
            self._send(tier_state, search, tuple(search.missing), now_s)
            return True
        if search.answers.waits_until_s is None:
            search.answers.waits_until_s = now_s + self._wait_s(search, tier_state, now_s)
        if search.objects is None:
            missing = {key for key, group in search.missing if self._is_history[group]}
            search.chunks = [chunk for chunk, key in enumerate(search.prefix.keys) if key in missing]
        else:
            search.run = search.missing
            search.chunks = [*range(len(search.run))]
        search.low, search.high = -1, len(search.chunks)
        search.round = 1 if search.chunks else 4
        return self._ask_round(search, tier_state, now_s)

    def _ask_round(self, search: Search, tier_state: TierState, now_s: float) -> bool:
        """Ask a remote tier for the names of the current round. Return whether a probe is open."""
        while search.is_wanted and search.round <= 4:
            if search.round == 4:
                self._take_run(search, tier_state)
                names = self._boundary_names(search)
            else:
                names = self._history_names(search)
            answers = [self._remembered(search, tier_state, item, now_s) for item in names]
            if names and None in answers:
                self._send(tier_state, search, tuple(names), now_s)
                return True
            self._use_round(search, tier_state, names, [bool(answer) for answer in answers])
        return False

    def _remembered(self, search: Search, tier_state: TierState, item: Item, now_s: float) -> bool | None:
        """Return the remembered answer for `item`, or None if the tier must be asked.

        The tier is asked again for an announced object that was absent, because the object may have been written since.
        """
        answer = tier_state.remembered(item, now_s)
        wait = search.answers.announced
        return None if answer is False and wait is not None and item[0] in wait.keys else answer

    def _history_names(self, search: Search) -> list[Item]:
        """Return the names for rounds 1 to 3, and set `search.sampled` to their positions in `search.chunks`."""
        missing = set(search.missing)
        if search.round == 1:
            search.sampled = [0]
            if search.objects is not None:
                return search.run[:1]
            key = search.prefix.keys[search.chunks[0]]
            return [(key, g) for g, is_history in enumerate(self._is_history) if is_history and (key, g) in missing]
        first, count = search.low + 1, search.high - search.low - 1
        samples = min(count, ROUND_NAMES)
        search.sampled = [first + -(-(number + 1) * count // samples) - 1 for number in range(samples)]
        if search.round == 3 and search.answers.announced is not None:
            search.sampled = [*range(max(0, first - ROUND_NAMES), first), *search.sampled]
        if search.objects is not None:
            return [search.run[position] for position in search.sampled]
        names: list[Item] = []
        for position in search.sampled:
            key = search.prefix.keys[search.chunks[position]]
            names.append(
                next((key, g) for g, is_history in enumerate(self._is_history) if is_history and (key, g) in missing)
            )
        return names

    def _boundary_names(self, search: Search) -> list[Item]:
        """Return the last chunk of each window and state at the longest boundaries that this tier could make valid."""
        others = [group for group, is_history in enumerate(self._is_history) if not is_history]
        search.boundaries = []
        if not others:
            return []
        prefix, missing = search.prefix, set(search.missing)
        groups, size = self._layout.groups, search.prefix.chunk_tokens

        def is_there(group: int, chunk: int) -> bool:
            return self._is_found(search, (prefix.keys[chunk], group))

        reached = longest_boundary(groups, prefix, is_there)
        run = next(
            (
                chunk
                for chunk in range(len(prefix.keys))
                if not all(is_there(group, chunk) for group, is_history in enumerate(self._is_history) if is_history)
            ),
            len(prefix.keys),
        )
        names: list[Item] = []
        for tokens in range(run * size, reached, -size):
            wanted = [
                [(prefix.keys[chunk], group) for chunk in needed_chunks(groups[group], prefix, tokens)]
                for group in others
            ]
            lacking = [[item for item in items if not self._is_found(search, item)] for items in wanted]
            if all(item in missing for items in lacking for item in items):
                asked = [items[-1] for items in lacking if items]
                search.boundaries.append(([item for items in lacking for item in items], asked))
                names += [item for item in asked if item not in names]
                if len(search.boundaries) == BOUNDARIES_MAX:
                    break
        return names

    def _is_found(self, search: Search, item: Item) -> bool:
        entry = self._host.entry(*item)
        return (entry is not None and entry.residency in READABLE) or item in search.answers.found_in

    def _use_round(self, search: Search, tier_state: TierState, names: Sequence[Item], present: Sequence[bool]) -> None:
        """Use a remote tier's answers to one round, and set the next round."""
        if search.round == 1:
            is_hit = all(present)
            if search.answers.announced is None:  # chunks that are being written show nothing about other prompts
                tier_state.probed_first(is_hit=is_hit)
            search.low = 0 if is_hit else -1
            search.round = 2 if is_hit and search.high > 1 else 4
        elif search.round < 4:
            for position, is_there in zip(search.sampled, present, strict=True):
                if not is_there:
                    search.high, search.low = position, min(search.low, position - 1)
                    break
                search.low = max(search.low, position)
            is_exact = search.low + 1 >= search.high
            if search.answers.announced is not None and len(search.chunks) > len(search.sampled) + 1:
                is_exact = False  # spaced names may have missed holes
            search.round = 4 if is_exact or search.round == 3 else 3
        else:
            found = {item for item, is_there in zip(names, present, strict=True) if is_there}
            for lacking, asked in search.boundaries:
                if found.issuperset(asked):
                    self._found(search, lacking, tier_state)
                    break
            search.round = 5

    def _take_run(self, search: Search, tier_state: TierState) -> None:
        """Assume that the tier holds all missing history objects up to the last chunk of the run."""
        if search.low < 0 or not search.chunks:
            return
        if search.objects is not None:
            self._found(search, search.run[: search.low + 1], tier_state)
            return
        keys = {search.prefix.keys[chunk] for chunk in search.chunks[: search.low + 1]}
        self._found(search, [it for it in search.missing if self._is_history[it[1]] and it[0] in keys], tier_state)

    def _found(self, search: Search, items: Sequence[Item], tier_state: TierState) -> None:
        search.answers.found_in.update(dict.fromkeys(items, tier_state.name))
        found = set(items) if len(items) < len(search.missing) else None
        search.missing = [] if found is None else [item for item in search.missing if item not in found]

    def _send(
        self,
        tier_state: TierState,
        search: Search | None,
        objects: tuple[Item, ...],
        now_s: float,
        survey: Survey | None = None,
    ) -> None:
        probe = Probe(self._output.new_id(), tier_state.name, objects, now_s + tier_state.rules.probe_deadline_s)
        tier_state.breakers[Direction.PROMOTE].attempted(probe.id)
        self._open[probe.id] = OpenProbe(tier_state.name, search, objects, probe.deadline_s, survey)
        heappush(self._deadlines, (probe.deadline_s, probe.id))
        until_s = search.answers.waits_until_s if search is not None and tier_state.rules.is_remote else None
        if until_s is not None and now_s < until_s < probe.deadline_s:
            heappush(self._deadlines, (until_s, probe.id))
        self._output.commands.append(probe)

    def _close(self, probe_id: int, open_probe: OpenProbe, present: Sequence[bool] | None, now_s: float) -> None:
        tier_state, search, objects = self._tiers.by_name[open_probe.tier], open_probe.search, open_probe.objects
        tier_state.record(
            *(Direction.PROMOTE, probe_id, now_s), is_fault=present is None, is_late=now_s >= open_probe.deadline_s
        )
        if present is not None:
            present = tier_state.answered(objects, present, now_s)
        if open_probe.survey is not None:
            open_probe.survey.answered(tier_state.name, objects, present)
            self._ask_survey(open_probe.survey, tier_state, now_s)
        if search is None:
            return
        took_s = now_s - (open_probe.deadline_s - tier_state.rules.probe_deadline_s)
        tier_state.probe_took(took_s)
        if search.round == 0:
            if present is not None:
                there = [item for item, is_there in zip(objects, present, strict=True) if is_there]
                if there:
                    self._found(search, there, tier_state)
        elif present is not None:
            self._use_round(search, tier_state, objects, present)
            if self._ask_round(search, tier_state, now_s):
                return
        else:
            self._take_run(search, tier_state)
        search.tier += 1
        self._ask_next_tier(search, now_s)
