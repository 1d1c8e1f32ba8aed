"""The loads that are under way, and what becomes of each in vLLM."""

import itertools
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from kvtier.connect.vllm.geometry import Geometry
from kvtier.connect.vllm.meta import Awaited, Ended
from kvtier.connect.vllm.tracked import Match, Tracked
from kvtier.connect.vllm.vllm_types import BlockTables
from kvtier.runtime.base import Session
from kvtier.types import ChunkKey, Hint, LoadDone, Place, Prefix, RequestId


@dataclass(slots=True, eq=False)
class Load:
    """One load."""

    name: RequestId
    tracked: Tracked
    match: Match
    tables: BlockTables
    began_s: float
    ended_s: float = 0.0
    """When the session said so."""
    places: Sequence[Place] = ()
    blocked_by: set[RequestId] = field(default_factory=set[RequestId])
    """Open stores that read a block which it is to fill; it begins when they have ended."""
    is_void: bool = False
    """What it brings does not count."""
    is_dropped: bool = False
    """Its request is gone."""
    is_reported: bool = False
    """Orders that went out report its end, but it is still open."""

    @property
    def leading_keys(self) -> tuple[ChunkKey, ...]:
        """The chunks that vLLM will hold when it has ended."""
        return self.match.prefix.keys[: self.match.plan.tokens // self.match.prefix.chunk_tokens]


class Loads:
    """All open loads of one engine. Belongs to the scheduler's thread, but for `report`.

    Args:
        session: where they go.
        geometry: where chunks lie in block tables.
    """

    def __init__(self, session: Session, geometry: Geometry) -> None:
        self._session = session
        self._geometry = geometry
        self._open: dict[RequestId, Load] = {}
        self.awaited: list[Awaited] = []
        """What the forward of the next step waits for."""
        self._landed: dict[str, Load] = {}
        """By request: those that have brought everything, of which vLLM does not know yet."""
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._open)

    # ---- from vLLM to the session ----------------------------------------------------------------------------------

    def register(self, tracked: Tracked, match: Match, tables: BlockTables) -> Load:
        """A load of `match` into the blocks of `tables`. From now on vLLM waits for it, so it has to be reported."""
        name = RequestId(f"L{next(self._numbers)}/{tracked.id}")
        load = Load(name, tracked, match, tables, time.monotonic())
        awaited = () if match.is_async else (self._awaited(load),)
        # All or nothing, whatever raises: the forward waits for exactly those that are open.
        self._open[name] = load
        self.awaited += awaited
        tracked.load = name
        return load

    def is_open(self, tracked: Tracked) -> bool:
        """Whether a load of a request is open."""
        return tracked.load in self._open

    def aim(self, load: Load) -> set[int]:
        """Find out where it has to go; the blocks that it will write to. It is void when it cannot be done."""
        plan = load.match.plan
        places = self._geometry.targets(plan.tokens, load.tables, plan.resident_tokens)
        load.is_void |= places is None
        load.places = places or ()
        return {block for place in load.places for block in place.blocks if block > 0}

    def start(self, load: Load) -> bool:
        """Give it to the session, from which a LoadDone will come; False when nothing of it is wanted."""
        if load.is_void:
            return False
        plan = load.match.plan
        self._session.load(
            load.name,
            load.match.prefix,
            plan.tokens,
            load.places,
            resident_tokens=plan.resident_tokens,
            patience=plan.patience,
            hint=Hint(load.tracked.said.session),
        )
        return True

    def drop(self, name: RequestId) -> Load:
        """Its request is gone; it still has to be reported when it has ended."""
        load = self.void(name)
        load.is_dropped = True
        return load

    def void(self, name: RequestId) -> Load:
        """Its request goes on, but with nothing of what the load brings."""
        load = self._open[name]
        load.is_void = True
        self._session.release(name)
        return load

    def unblocked(self, store: RequestId) -> list[Load]:
        """The loads that only waited for `store`, which has ended."""
        freed: list[Load] = []
        for load in self._open.values():
            if store in load.blocked_by:
                load.blocked_by.discard(store)
                if not load.blocked_by:
                    freed.append(load)
        return freed

    def brings(self, prefix: Prefix, resident_tokens: int) -> int:
        """Most leading tokens of `prefix` that some load brings, or has brought when vLLM does not know of it yet.

        Not more than `resident_tokens`: none does.
        """
        first = resident_tokens // prefix.chunk_tokens
        best = 0
        for load in itertools.chain(self._open.values(), self._landed.values()):
            if not load.is_void and load.leading_keys[first : first + 1] == prefix.keys[first : first + 1]:
                best = max(best, _shared(load.leading_keys, prefix.keys))
        return best * prefix.chunk_tokens

    # ---- from the session to vLLM ----------------------------------------------------------------------------------

    def report(self, done: LoadDone) -> Ended | None:
        """What vLLM is to be told of a load that has ended just now. In the courier's thread."""
        load = self._open.get(done.request)
        if load is None:
            return None
        load.ended_s = time.monotonic()
        return self._report(load, done.tokens)

    def nothing(self, load: Load) -> LoadDone:
        """What a load says that was never begun."""
        plan = load.match.plan
        return LoadDone(load.name, plan.resident_tokens, plan.tokens, ())

    def _awaited(self, load: Load) -> Awaited:
        """What workers wait for before the forward."""
        plan = load.match.plan
        blocks = self._geometry.unfilled(load.tables, plan.resident_tokens, plan.tokens)
        return Awaited(load.name, tuple(sorted(blocks)))

    def ended(self, done: LoadDone) -> Load | None:
        """A load has ended; it is open no more."""
        load = self._open.pop(done.request, None)
        if load is not None and load.tracked.load == load.name:
            load.tracked.load = None
        return load

    def land(self, load: Load) -> None:
        """A load has brought everything; its request begins with the next step but one."""
        self._landed[load.tracked.id] = load

    def took_off(self, request: str) -> None:
        """A request begins, or begins anew, or is gone."""
        self._landed.pop(request, None)

    def forget_landed(self) -> None:
        """What has been brought is not to be found any more."""
        self._landed.clear()

    def reported(self, ended: Iterable[Ended]) -> None:
        """The orders that go out report the end of these."""
        for each in ended:
            load = self._open.get(each.load)
            if load is not None:
                load.is_reported = True

    def unreported(self, ended: Iterable[Ended]) -> list[Ended]:
        """Reports of the open loads that no orders and none of `ended` report: they have brought nothing."""
        known = {each.load for each in ended}
        open_loads = [load for load in self._open.values() if not load.is_reported]
        return [self._report(load, 0) for load in open_loads if load.name not in known]

    def abandon(self) -> None:
        """Forget the open loads. Later events of them are not reported to vLLM."""
        self._open.clear()
        self._landed.clear()
        self.awaited.clear()

    def _report(self, load: Load, tokens: int) -> Ended:
        plan = load.match.plan
        there = plan.resident_tokens if load.is_void else max(tokens, plan.resident_tokens)
        is_whole = there >= plan.tokens
        bad_blocks: set[int] = set()
        if not is_whole and self._geometry.can_load_in_part:
            bad_blocks = self._geometry.unfilled(load.tables, there, plan.tokens)
        is_failed = not is_whole and not self._geometry.can_load_in_part
        return Ended(load.name, tuple(sorted(bad_blocks)), is_failed, load.match.is_async)


def _shared(one: tuple[ChunkKey, ...], other: tuple[ChunkKey, ...]) -> int:
    """How many leading chunks two texts share: a key names all that comes before it, too."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[middle - 1] == other[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low
