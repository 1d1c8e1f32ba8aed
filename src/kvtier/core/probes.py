"""What lower tiers have been asked, and what they have tiers. Hints only: the reader verifies."""

from collections import deque
from collections.abc import Callable, Sequence

from kvtier.core.counters import Counters
from kvtier.core.host import HostMemory
from kvtier.core.limits import Limits
from kvtier.core.records import Item, OpenProbe, ProbeAnswers
from kvtier.core.tier_state import TierStates
from kvtier.types import Command, Link, Prefix, Probe, RequestId

NOBODY = RequestId("")


class Probes:
    """Probes, by request. Answers live as long as the request."""

    def __init__(
        self,
        tiers: TierStates,
        limits: Limits,
        ranks: int,
        new_id: Callable[[], int],
        commands: list[Command],
        counters: Counters,
    ) -> None:
        self._tiers = tiers
        self._limits = limits
        self._ranks = ranks
        self._new_id = new_id
        self._commands = commands
        self._counters = counters
        self._known: dict[RequestId, ProbeAnswers] = {}
        self._order = list(tiers.by_name)
        self._open: dict[int, OpenProbe] = {}
        self._deadlines: deque[tuple[float, int]] = deque()

    def __len__(self) -> int:
        return len(self._open)

    def ask(self, request: RequestId, prefix: Prefix, host: HostMemory, now_s: float) -> ProbeAnswers | None:
        """Ask every tier whose reads are healthy for what is not in host memory; each object once per request.

        Returns:
            What is known so far; None when there is nobody to ask or too many requests are tracked.
        """
        known = self._known.get(request)
        if known is None:
            if not len(self._tiers):
                return None
            if len(self._known) >= self._limits.requests:
                self._counters.unprobed += 1
                return None
            known = self._known[request] = ProbeAnswers()
        if known.prefix is prefix and known.departures == host.departures:
            return known
        known.prefix, known.departures = prefix, host.departures
        unprobed = tuple(
            (key, group)
            for group, entries in enumerate(host.entries)
            for key in prefix.keys
            if key not in entries and (key, group) not in known.probed
        )
        if unprobed:
            known.probed.update(unprobed)
            for tier_state in self._tiers:
                if tier_state.can_read(now_s):
                    tier_state.breakers[Link.PROMOTE].attempted()
                    self._send(request, known, tier_state.name, unprobed, now_s)
        return known

    def check(self, now_s: float) -> None:
        """Ask each tier that has no open probe_state about no objects: its health is known although no request asks."""
        asked = {probe_state.tier for probe_state in self._open.values()}
        for tier_state in self._tiers:
            if tier_state.name not in asked and tier_state.can_read(now_s):
                tier_state.breakers[Link.PROMOTE].attempted()
                self._send(NOBODY, ProbeAnswers(), tier_state.name, (), now_s)

    def answered(self, probe_id: int, present: Sequence[bool] | None, now_s: float) -> None:
        """One rank's answer; None when the tier failed. An answer that nobody waits for is ignored."""
        probe_state = self._open.get(probe_id)
        if probe_state is None:
            return
        if present is None:
            probe_state.is_failed = True
        else:
            probe_state.present = [a and b for a, b in zip(probe_state.present, present, strict=True)]
        probe_state.ranks_left -= 1
        if probe_state.ranks_left:
            return
        known = self._close(probe_id, probe_state, now_s)
        if known is not None and not probe_state.is_failed:
            for item, is_there in zip(probe_state.objects, probe_state.present, strict=True):
                if is_there:
                    tiers = known.held_by.setdefault(item, [])
                    tiers.append(probe_state.tier)
                    if len(tiers) > 1:
                        tiers.sort(key=self._order.index)  # the fastest first, whoever answered first

    def expire(self, now_s: float) -> bool:
        """Unanswered after the deadline means absent, and counts against the tier; returns whether anything changed."""
        changed = False
        while self._deadlines and self._deadlines[0][0] <= now_s:
            probe_id = self._deadlines.popleft()[1]
            probe_state = self._open.get(probe_id)
            if probe_state is not None:
                probe_state.is_failed = True
                self._close(probe_id, probe_state, now_s)
                changed = True
        return changed

    def next_deadline(self) -> float | None:
        """When `expire` has something to do."""
        while self._deadlines and self._deadlines[0][1] not in self._open:
            self._deadlines.popleft()
        return self._deadlines[0][0] if self._deadlines else None

    def forget(self, request: RequestId) -> None:
        """The request is gone."""
        known = self._known.pop(request, None)
        for probe_id in known.open_probes if known is not None else ():
            self._open[probe_id].request = NOBODY

    def tiers_for(self, request: RequestId, item: Item) -> Sequence[str]:
        """The tiers to try for an object: those that tiers they hold it, or all when none did.

        (A load asks only for what can be had. If no tier has it, it was in host memory at the lookup and left since.)
        """
        known = self._known.get(request)
        tiers = known.held_by.get(item) if known is not None else None
        return tiers or self._order

    def _send(
        self, request: RequestId, known: ProbeAnswers, tier: str, objects: tuple[Item, ...], now_s: float
    ) -> None:
        probe = Probe(self._new_id(), tier, objects, now_s + self._limits.probe_deadline_s)
        self._open[probe.id] = OpenProbe(tier, request, objects, self._ranks, [True] * len(objects))
        self._deadlines.append((probe.deadline_s, probe.id))
        known.open_probes.add(probe.id)
        self._commands.append(probe)

    def _close(self, probe_id: int, probe_state: OpenProbe, now_s: float) -> ProbeAnswers | None:
        del self._open[probe_id]
        self._tiers.judge(probe_state.tier, Link.PROMOTE, now_s, is_fault=probe_state.is_failed)
        known = self._known.get(probe_state.request)
        if known is not None:
            known.open_probes.discard(probe_id)
        return known
