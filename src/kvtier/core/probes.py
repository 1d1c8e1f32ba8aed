"""Probes of lower tiers and their answers. An answer is only a hint: promotions verify the bytes."""

from collections import deque
from collections.abc import Callable, Sequence

from kvtier.core.counters import Counters
from kvtier.core.host_memory import HostMemory
from kvtier.core.limits import Limits
from kvtier.core.records import Item, OpenProbe, ProbeAnswers
from kvtier.core.tier_state import TierStates
from kvtier.types import Command, Link, Prefix, Probe, RequestId

NO_REQUEST = RequestId("")


class Probes:
    """Open probes, and the answers for each request. Answers are kept until the request is released."""

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
        self._answers: dict[RequestId, ProbeAnswers] = {}
        self._order = list(tiers.by_name)
        self._open: dict[int, OpenProbe] = {}
        self._deadlines: deque[tuple[float, int]] = deque()

    def __len__(self) -> int:
        return len(self._open)

    def send(self, request: RequestId, prefix: Prefix, host: HostMemory, now_s: float) -> ProbeAnswers | None:
        """Probe every tier that can be read for the objects that host memory lacks, each object once per request.

        Returns:
            The answers so far; None without tiers, or with too many tracked requests.
        """
        answers = self._answers.get(request)
        if answers is None:
            if not len(self._tiers):
                return None
            if len(self._answers) >= self._limits.requests:
                self._counters.unprobed += 1
                return None
            answers = self._answers[request] = ProbeAnswers()
        if answers.prefix is prefix and answers.removals == host.removals:
            return answers
        answers.prefix, answers.removals = prefix, host.removals
        unprobed = tuple(
            (key, group)
            for group, entries in enumerate(host.entries)
            for key in prefix.keys
            if key not in entries and (key, group) not in answers.probed
        )
        if unprobed:
            answers.probed.update(unprobed)
            for tier_state in self._tiers:
                if tier_state.can_read(now_s):
                    tier_state.breakers[Link.PROMOTE].attempted()
                    self._send(request, answers, tier_state.name, unprobed, now_s)
        return answers

    def send_health_checks(self, now_s: float) -> None:
        """Send an empty probe to each tier without an open one, as a health check that needs no request."""
        probed = {open_probe.tier for open_probe in self._open.values()}
        for tier_state in self._tiers:
            if tier_state.name not in probed and tier_state.can_read(now_s):
                tier_state.breakers[Link.PROMOTE].attempted()
                self._send(NO_REQUEST, ProbeAnswers(), tier_state.name, (), now_s)

    def answered(self, probe_id: int, present: Sequence[bool] | None, now_s: float) -> None:
        """Handle one rank's answer; None means that the tier failed. Answers to closed probes are ignored."""
        open_probe = self._open.get(probe_id)
        if open_probe is None:
            return
        if present is None:
            open_probe.is_failed = True
        else:
            open_probe.present = [a and b for a, b in zip(open_probe.present, present, strict=True)]
        open_probe.ranks_left -= 1
        if open_probe.ranks_left:
            return
        answers = self._close(probe_id, open_probe, now_s)
        if answers is not None and not open_probe.is_failed:
            for item, is_there in zip(open_probe.objects, open_probe.present, strict=True):
                if is_there:
                    tiers = answers.held_by.setdefault(item, [])
                    tiers.append(open_probe.tier)
                    if len(tiers) > 1:
                        tiers.sort(key=self._order.index)  # fastest tier first

    def expire(self, now_s: float) -> bool:
        """Close overdue probes as failed; returns whether there were any."""
        changed = False
        while self._deadlines and self._deadlines[0][0] <= now_s:
            probe_id = self._deadlines.popleft()[1]
            open_probe = self._open.get(probe_id)
            if open_probe is not None:
                open_probe.is_failed = True
                self._close(probe_id, open_probe, now_s)
                changed = True
        return changed

    def next_deadline(self) -> float | None:
        """The time at which `expire` has work to do."""
        while self._deadlines and self._deadlines[0][1] not in self._open:
            self._deadlines.popleft()
        return self._deadlines[0][0] if self._deadlines else None

    def forget(self, request: RequestId) -> None:
        """Drop the answers of a released request."""
        answers = self._answers.pop(request, None)
        for probe_id in answers.open_probes if answers is not None else ():
            self._open[probe_id].request = NO_REQUEST

    def tiers_for(self, request: RequestId, item: Item) -> Sequence[str]:
        """The tiers to try for an object: those that reported it, or all of them when none did.

        Loads request only objects that lookup found. Without a report, the object was in host memory at the lookup.
        """
        answers = self._answers.get(request)
        tiers = answers.held_by.get(item) if answers is not None else None
        return tiers or self._order

    def _send(
        self, request: RequestId, answers: ProbeAnswers, tier: str, objects: tuple[Item, ...], now_s: float
    ) -> None:
        probe = Probe(self._new_id(), tier, objects, now_s + self._tiers[tier].rules.probe_deadline_s)
        self._open[probe.id] = OpenProbe(tier, request, objects, self._ranks, [True] * len(objects))
        self._deadlines.append((probe.deadline_s, probe.id))
        answers.open_probes.add(probe.id)
        self._commands.append(probe)

    def _close(self, probe_id: int, open_probe: OpenProbe, now_s: float) -> ProbeAnswers | None:
        del self._open[probe_id]
        self._tiers.record(open_probe.tier, Link.PROMOTE, now_s, is_fault=open_probe.is_failed)
        answers = self._answers.get(open_probe.request)
        if answers is not None:
            answers.open_probes.discard(probe_id)
        return answers
