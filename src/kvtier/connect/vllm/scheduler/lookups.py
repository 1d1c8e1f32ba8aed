"""Finds what can be loaded for a request: the lookup in the session, and the planner's choice to load or to compute."""

import itertools
import time
from collections import Counter
from collections.abc import Mapping

from kvtier.connect.vllm.requests.request_events import RequestEvents
from kvtier.connect.vllm.requests.tracked import LookupAnswer, PrefixMatch, TrackedRequest
from kvtier.connect.vllm.scheduler.step_timer import StepTimer
from kvtier.core.planner import Planner
from kvtier.runtime.rank_group import Ranks
from kvtier.runtime.session import Session
from kvtier.types import Lookup, Prefix, Presence

PROBE_WAIT_S = 0.002
"""Seconds that the lookups of a step may wait for the tiers' answers. A local directory answers sooner. Without the
answer, the request starts a step later, which costs more."""

ANSWER_S = 0.1
"""Seconds that a lookup's answer is reused while vLLM asks about a request in every step but lacks room for it. A
lookup of 64,000 tokens on a disk takes 1 ms."""

UNKNOWN_PLACE = "external_unspecified"
"""The `CacheHitSource` of vLLM for a place that is neither the engine's host memory nor a drive of its machine."""


class Lookups:
    """Looks up requests between the steps of one engine. Only the scheduler's thread uses it.

    Args:
        session: the session.
        ranks: the workers. Nothing is loaded after a worker is lost.
        planner: decides between loading and computing.
        step_timer: estimates how long prompts that are queued before a request will take.
        log: observes the requests.
    """

    def __init__(
        self, session: Session, ranks: Ranks, planner: Planner, step_timer: StepTimer, log: RequestEvents
    ) -> None:
        self._session, self._ranks, self._planner = session, ranks, planner
        self._step_timer, self._log = step_timer, log
        self._wait_s = PROBE_WAIT_S
        """Seconds that the lookups of this step may still wait."""
        self._is_busy = False
        """Whether the last step computed something."""

    def step_goes_out(self, *, is_busy: bool) -> None:
        """Record that vLLM has scheduled a step, which computes something if `is_busy`."""
        self._wait_s, self._is_busy = PROBE_WAIT_S, is_busy

    def look_up(self, tracked: TrackedRequest, prefix: Prefix, resident_tokens: int) -> Lookup:
        """Return what the cache has of `prefix`, beyond the `resident_tokens` in vLLM's own cache."""
        known, now_s = tracked.answer, time.monotonic()
        if (
            known is not None
            and known.prefix is prefix
            and known.resident_tokens == resident_tokens
            and known.lookup.presence is not Presence.PROBING
            and now_s < known.time_s + ANSWER_S
        ):
            return known.lookup
        announced = tracked.announced_tokens if tracked.announced_tokens > resident_tokens else 0
        lookup = self._session.lookup(
            tracked.question,
            prefix,
            resident_tokens=resident_tokens,
            compute_s=self._planner.waits_for_s(tracked.request.num_tokens - resident_tokens, resident_tokens),
            announced_tokens=announced,
            # Announced chunks may take a long time, and other requests need the step.
            wait_s=0.0 if announced and known is not None and self._is_busy else max(0.0, self._wait_s),
        )
        self._wait_s -= time.monotonic() - now_s
        tracked.answer = LookupAnswer(prefix, resident_tokens, now_s, lookup)
        return lookup

    def choose(
        self, tracked: TrackedRequest, prefix: Prefix, lookup: Lookup, resident_tokens: int
    ) -> PrefixMatch | None:
        """Return the load that should be faster than computing, or None if there is none."""
        if lookup.tokens < prefix.tokens:
            self._log.missed(tracked, self._ranks.lost)
        if self._ranks.lost:
            return None
        plan = self._planner.plan(
            lookup,
            tracked.request.num_tokens,
            resident_tokens=resident_tokens,
            now_s=time.monotonic(),
            ahead_s=self._step_timer.ahead_s(tracked.id),
        )
        self._log.planned(tracked, lookup, plan, self._planner)
        return PrefixMatch(plan, prefix) if plan.tokens > resident_tokens else None


def hit_sources(tracked: TrackedRequest, tokens: int, names: Mapping[str, str]) -> dict[str, int]:
    """Count a load's `tokens` by the slowest place that each token requires, under the names in `names`.

    A chunk that is only announced has no place yet.
    """
    assert tracked.match is not None
    end, options = tracked.match.plan.tokens, tracked.answer.lookup.options if tracked.answer else ()
    options = sorted(options, key=lambda it: it.tokens)
    places = [*(names.get(it.source, it.source) for it in options), UNKNOWN_PLACE]
    bounds = [end - tokens, *(max(end - tokens, min(it.tokens, end)) for it in options), end]
    found = Counter[str]()
    for place, (start, stop) in zip(places, itertools.pairwise(bounds), strict=True):
        found[place] += stop - start
    return +found
