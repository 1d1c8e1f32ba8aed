"""Calls shipped policies through the interfaces that the core uses."""

from collections.abc import Sequence

from kvtier.policy.base import Evictor, Hinted, Use
from kvtier.tier.base import never_pinned
from kvtier.tools.replay.policies.base import Policy
from kvtier.tools.trace.arrays import NEXT_TURNS, TraceArrays
from kvtier.types import NextTurn


class Shipped(Policy):
    """A cache with an `Evictor`.

    Args:
        capacity: blocks that fit.
        trace: the trace.
        evictor: chooses victims.
        turns: pass the trace's `next_turn` to the evictor after each request.
        ends: pass the end of a session to the evictor after its last request.
    """

    def __init__(
        self,
        capacity: int,
        trace: TraceArrays,
        evictor: Evictor,
        *,
        turns: bool = False,
        ends: bool = False,
    ) -> None:
        super().__init__(capacity, trace)
        self._hinted = evictor if (turns or ends) and isinstance(evictor, Hinted) else None
        self._next_turns = _next_turns(trace, turns=turns, ends=ends) if self._hinted is not None else ()
        self._trace = trace
        self._evictor = evictor
        self._names: list[bytes | None] = [block.to_bytes(8, "big") for block in range(trace.block_count)]
        self._names.append(None)  # for parent -1 of first blocks
        self._parent_names: list[bytes | None] = [self._names[parent] for parent in trace.parents.tolist()]
        self._session: str | None = None

    def begin(self, request: int) -> None:
        """Pass the hint of the previous request to the evictor, and record the session of this request."""
        if self._hinted is not None and self._session is not None and request:
            self._hinted.expects(self._session, self._next_turns[request - 1])
        session = int(self._trace.session[request])
        self._session = None if session < 0 else str(session)

    def access(self, blocks: Sequence[int]) -> tuple[int, int]:
        """Touch the hits. Cache a miss if there is room or the evictor has a victim."""
        names, parent_names, session = self._names, self._parent_names, self._session
        present, capacity = self.present, self.capacity
        added, touched = self._evictor.added, self._evictor.touched
        hits = inserted = 0
        for block in reversed(blocks):
            # The constructor of `Use` would take twice as long, and this code runs for each access.
            use: Use = tuple.__new__(  # pyright: ignore[reportUnknownMemberType]
                Use, (names[block], parent_names[block], session)
            )
            if present[block]:
                hits += 1
                touched(use)
            elif self.held < capacity or self._make_room():
                added(use)
                present[block] = 1
                self.held += 1
                inserted += 1
        return hits, inserted

    def _make_room(self) -> bool:
        victim = self._evictor.victim(never_pinned)
        if victim is None:
            return False
        self._evictor.removed(victim)
        self._evict(int.from_bytes(victim))
        return True


def _next_turns(trace: TraceArrays, *, turns: bool, ends: bool) -> Sequence[NextTurn | None]:
    """Return for each request the hint that follows it, or None if there is none."""
    known: list[NextTurn | None] = [None] * len(trace)
    if turns:
        known = [NEXT_TURNS[place] if place >= 0 else None for place in trace.next_turn.tolist()]
    if ends:
        last = {session: request for request, session in enumerate(trace.session.tolist())}
        for request in last.values():
            known[request] = NextTurn.NOBODY
    return known
