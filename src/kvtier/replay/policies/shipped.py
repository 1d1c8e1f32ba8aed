"""The product's own policies, through the interfaces by which the core uses them."""

from collections.abc import Sequence
from enum import Flag

from kvtier.policy.admission import AdmitAll
from kvtier.policy.base import Admitter, Evictor, Held, Hinted
from kvtier.replay.cost import Prefill
from kvtier.replay.policies.base import Policy
from kvtier.trace.packed import NEXT_TURNS, Packed
from kvtier.types import NextTurn

PLACE = "host"
BYTES_PER_TOKEN = 1
"""All blocks are equally large here, so the unit does not matter."""


class Tells(Flag):
    """What a replay tells of sessions."""

    NOTHING = 0
    TURNS = 1
    """Who has the next turn, where the trace tells, after each request."""
    ENDS = 2
    """That nobody has, after the last request of each session."""


class Shipped(Policy):
    """A cache ruled by an `Evictor` and an `Admitter`.

    Args:
        capacity: blocks that fit.
        packed: the trace; sessions and turns are told where it has them.
        evictor: chooses who leaves.
        admitter: chooses who may enter.
        prefill: what a hit saves.
        tells: what an evictor that takes hints is told of sessions.
    """

    def __init__(
        self,
        capacity: int,
        packed: Packed,
        evictor: Evictor,
        admitter: Admitter,
        prefill: Prefill,
        *,
        tells: Tells = Tells.NOTHING,
    ) -> None:
        super().__init__(capacity, packed.block_count)
        self._hinted = evictor if tells and isinstance(evictor, Hinted) else None
        self._next_turns = _next_turns(packed, tells) if self._hinted is not None else ()
        self._packed = packed
        self._evictor = evictor
        self._admitter = admitter
        self._admits_all = type(admitter) is AdmitAll  # a call less for each block
        self._prefill = prefill
        self._block_tokens = packed.block_tokens
        self._size = packed.block_tokens * BYTES_PER_TOKEN
        self._names: list[bytes | None] = [block.to_bytes(8, "big") for block in range(packed.block_count)]
        self._names.append(None)  # the parent of who has none is -1
        self._parent_names: list[bytes | None] = [self._names[parent] for parent in packed.parents.tolist()]
        self._saved_s: list[float] = []
        self._time_s = 0.0
        self._session: str | None = None
        self._turn: int | None = None

    def begin(self, request: int, time_s: float, blocks: Sequence[int]) -> None:
        """Whose request it is."""
        self.request, self._time_s = request, time_s
        if self._hinted is not None and self._session is not None and request:
            self._hinted.expects(self._session, self._next_turns[request - 1])
        session = int(self._packed.session[request])
        self._session = None if session < 0 else str(session)
        self._turn = None if session < 0 else int(self._packed.turn[request])
        tokens = self._block_tokens
        while len(self._saved_s) < len(blocks):
            start = len(self._saved_s) * tokens
            self._saved_s.append(self._prefill.seconds(start, start + tokens))

    def access(self, blocks: Sequence[int]) -> tuple[int, int]:
        """The evictor is told of all; who is not here is kept if the admitter lets it in and somebody leaves for it."""
        names, parent_names, saved_s, size = self._names, self._parent_names, self._saved_s, self._size
        time_s, session, turn = self._time_s, self._session, self._turn
        present, capacity = self.present, self.capacity
        admits_all, admit, added = self._admits_all, self._admitter.admit, self._evictor.added
        hits = inserted = 0
        for place in range(len(blocks) - 1, -1, -1):
            block = blocks[place]
            # Not through Held's own constructor, which takes twice as long and is called for each access.
            held: Held = tuple.__new__(  # pyright: ignore[reportUnknownMemberType]
                Held, (names[block], parent_names[block], place, size, 0, time_s, session, turn, saved_s[place])
            )
            if present[block]:
                hits += 1
                self._evictor.touched(held)
            elif (admits_all or admit(held, PLACE)) and (self.held < capacity or self._make_room()):
                added(held)
                present[block] = 1
                self.held += 1
                inserted += 1
        return hits, inserted

    def _make_room(self) -> bool:
        victim = self._evictor.victim(_nobody_is_pinned)
        if victim is None:
            return False
        self._evictor.removed(victim)
        self.present[int.from_bytes(victim)] = 0
        self.held -= 1
        self.evictions += 1
        return True


def _next_turns(packed: Packed, tells: Tells) -> Sequence[NextTurn | None]:
    """For each request who goes on after its answer, as far as `tells` allows."""
    known: list[NextTurn | None] = [None] * len(packed)
    if Tells.TURNS in tells:
        known = [NEXT_TURNS[place] if place >= 0 else None for place in packed.next_turn.tolist()]
    if Tells.ENDS in tells:
        last = {session: request for request, session in enumerate(packed.session.tolist())}
        for request in last.values():
            known[request] = NextTurn.NOBODY
    return known


def _nobody_is_pinned(name: bytes) -> bool:  # noqa: ARG001  the interface's argument
    return False
