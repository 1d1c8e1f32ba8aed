"""Drives the real core step by step. The test is the engine, the mover and the clock."""

from collections.abc import Callable, Sequence
from typing import Any

from kvtier.core.cache import Cache
from kvtier.core.limits import Limits, TierRules
from kvtier.layout import GroupLayout, History, KvLayout, Validity
from kvtier.policy.base import Evictor
from kvtier.policy.lru import Lru
from kvtier.types import (
    Cancel,
    ChunkKey,
    Direction,
    Drop,
    Event,
    LoadDone,
    Lookup,
    NextTurn,
    Outcome,
    Place,
    Prefix,
    Priority,
    Probe,
    RequestId,
    StoreDone,
    Tell,
    TierNotice,
    Transfer,
)

CHUNK = 4
"""Tokens of a chunk in these tests."""
LONG_S = 1000.0

Item = tuple[ChunkKey, int]


def prefix_of(text: str) -> Prefix:
    """Return a prefix with one chunk for each letter of `text`."""
    return Prefix(tuple(ChunkKey(text[: end + 1].encode()) for end in range(len(text))), CHUNK)


def key(text: str) -> ChunkKey:
    return ChunkKey(text.encode())


class Driver:
    """A core, its commands in flight, and the content of its tiers. Time stands still unless a test moves `now_s`."""

    def __init__(
        self,
        *,
        groups: Sequence[Validity] = (History(),),
        payloads: Sequence[int] = (),
        slots: int | Sequence[int] = 8,
        tiers: Sequence[str | TierRules] = ("disk",),
        evictor: Callable[[], Evictor] = Lru,
        down: Sequence[str] = (),
        **limits: object,
    ) -> None:
        sizes = payloads or (1,) * len(groups)
        layout = KvLayout(
            CHUNK, tuple(GroupLayout(kind, (size,), "test") for kind, size in zip(groups, sizes, strict=True))
        )
        settings: dict[str, object] = {"load_deadline_s": LONG_S, "store_deadline_s": LONG_S}
        of_tiers: dict[str, object] = {"probe_deadline_s": LONG_S, "transfer_deadline_s": LONG_S}
        for name, value in limits.items():
            (of_tiers if name in TierRules.__dataclass_fields__ else settings)[name] = value
        rules = [it if isinstance(it, TierRules) else TierRules(name=it, **of_tiers) for it in tiers]
        self.cache = Cache(
            layout=layout,
            slots=[slots] * len(groups) if isinstance(slots, int) else slots,
            tiers=rules,
            evictor=evictor,
            limits=Limits(**settings),
            down=down,
        )
        self.layout = layout
        self.now_s = 0.0
        self.held: dict[str, set[Item]] = {it.name: set() for it in rules}
        """The content of each tier. Only `run` uses it."""
        self.out: dict[int, Transfer] = {}
        self.probes: dict[int, Probe] = {}
        self.drops: list[Drop] = []
        self.tells: list[Tell] = []
        self.cancelled: list[int] = []
        self.events: list[Event] = []
        self.sent: list[Transfer] = []
        self.asked = dict.fromkeys(self.held, 0)
        """Number of probes with names that each tier got."""

    # ---- the engine ------------------------------------------------------------------------------------------------

    def lookup(self, request: str, prefix: Prefix, **given: float) -> Lookup:
        answer = self.cache.lookup(RequestId(request), prefix, self.now_s, **given)
        self._take()
        return answer

    def load(
        self,
        request: str,
        prefix: Prefix,
        tokens: int | None = None,
        *,
        resident_tokens: int = 0,
        chunks: object = None,
        conversation: str | None = None,
    ) -> None:
        """Load everything that `tokens` needs (default: all full chunks), or only `chunks`."""
        from kvtier.core.prefix import needed_chunks

        tokens = len(prefix.keys) * CHUNK if tokens is None else tokens
        places = [
            Place(index, chunk, (chunk,))
            for index, group in enumerate(self.layout.groups)
            for chunk in needed_chunks(group, prefix, tokens)
            if (chunk + 1) * CHUNK > resident_tokens and (chunks is None or chunk in chunks)
        ]
        self.cache.load(
            RequestId(request),
            prefix,
            tokens,
            places,
            self.now_s,
            resident_tokens=resident_tokens,
            conversation=conversation,
        )
        self._take()

    def store(self, request: str, prefix: Prefix, *places: tuple[int, int], conversation: str | None = None) -> None:
        """Store the objects at `places` (group, chunk). By default all."""
        everything = [(group, chunk) for chunk in range(len(prefix.keys)) for group in range(len(self.layout.groups))]
        asked = [Place(group, chunk, (chunk,)) for group, chunk in places or everything]
        self.cache.store(RequestId(request), prefix, asked, self.now_s, conversation)
        self._take()

    def release(self, request: str) -> None:
        self.cache.release(RequestId(request), self.now_s)
        self._take()

    def expects(self, conversation: str, next_turn: NextTurn | None) -> None:
        self.cache.expects(conversation, next_turn)
        self.cache.tick(self.now_s)
        self._take()

    def retain(self, prefix: Prefix, seconds: float, priority: Priority = Priority.NORMAL) -> None:
        self.cache.hints.retain(prefix, self.now_s + seconds, self.now_s, priority)
        self.wait(0)

    def lower(self, prefix: Prefix, conversation: str | None = None) -> None:
        self.cache.hints.lower(prefix, conversation)
        self.wait(0)

    def prefetch(
        self,
        request: str,
        prefix: Prefix,
        in_s: float = 0.0,
        conversation: str | None = None,
        priority: Priority = Priority.NORMAL,
    ) -> None:
        at_s = self.now_s + in_s
        self.cache.hints.prefetch(RequestId(request), prefix, at_s, self.now_s, conversation, priority=priority)
        self.wait(0)

    def flush(self) -> None:
        self.cache.flush(self.now_s)
        self._take()

    def check_tiers(self, *watched: Item) -> None:
        self.cache.check_tiers(self.now_s, lambda _tier: watched)
        self._take()

    def wait(self, seconds: float) -> None:
        """Let time pass."""
        self.now_s += seconds
        self.cache.tick(self.now_s)
        self._take()

    # ---- the mover -------------------------------------------------------------------------------------------------

    def going(self, direction: Direction, tier: str = "") -> list[Transfer]:
        """Return the transfers of `direction` in flight, oldest first."""
        return [one for one in self.out.values() if one.direction is direction and (not tier or one.tier == tier)]

    def answer(self, transfer: Transfer, outcome: Outcome = Outcome.DONE, *, is_fault: bool = False) -> None:
        """Answer a transfer."""
        self.cache.complete(transfer.id, outcome, self.now_s, is_fault=is_fault)
        self.cache.advance(self.now_s)
        self.out.pop(transfer.id, None)
        self._take()

    def tell(self, probe: Probe, present: Sequence[bool] | None) -> None:
        """Answer a probe."""
        self.cache.probed(probe.id, present, self.now_s)
        self.cache.advance(self.now_s)
        self.probes.pop(probe.id, None)
        self._take()

    def run(
        self,
        *,
        directions: Sequence[Direction] = tuple(Direction),
        keep: Callable[[Transfer], bool] = lambda one: False,
    ) -> None:
        """Answer all probes, and the transfers in `directions` except those to `keep`, until nothing is left."""
        while True:
            for probe in list(self.probes.values()):
                self.tell(probe, [item in self.held[probe.tier] for item in probe.objects])
            ready = [one for one in self.out.values() if one.direction in directions and not keep(one)]
            if not ready and not self.probes:
                return
            for transfer in ready:
                self._move(transfer)

    def lookup_and_run(self, request: str, prefix: Prefix, **given: float) -> None:
        """Look up, and answer everything."""
        self.lookup(request, prefix, **given)
        self.run()

    def load_and_run(self, request: str, prefix: Prefix, tokens: int | None = None, **given: Any) -> None:
        """Load, and answer everything."""
        self.load(request, prefix, tokens, **given)
        self.run()

    def store_and_run(self, request: str, prefix: Prefix, *places: tuple[int, int], **given: Any) -> None:
        """Store, and answer everything."""
        self.store(request, prefix, *places, **given)
        self.run()

    def store_and_gather(self, request: str, prefix: Prefix, *places: tuple[int, int]) -> None:
        """Store, and answer only the gathers. Writes to tiers stay open."""
        self.store(request, prefix, *places)
        self.run(directions=[Direction.GATHER])

    def _move(self, transfer: Transfer) -> None:
        item = (transfer.key, transfer.group)
        outcome = Outcome.DONE
        if transfer.direction is Direction.DEMOTE:
            self.held[transfer.tier].add(item)
        elif transfer.direction is Direction.PROMOTE and item not in self.held[transfer.tier]:
            outcome = Outcome.ABSENT
        self.answer(transfer, outcome)

    def _take(self) -> None:
        self.cache.check()
        for command in self.cache.take_commands():
            if isinstance(command, Transfer):
                self.out[command.id] = command
                self.sent.append(command)
            elif isinstance(command, Probe):
                self.probes[command.id] = command
                self.asked[command.tier] += bool(command.objects)
            elif isinstance(command, Drop):
                self.drops.append(command)
                self.held[command.tier].discard((command.key, command.group))
            elif isinstance(command, Tell):
                self.tells.append(command)
            else:
                assert isinstance(command, Cancel)
                self.cancelled.extend(command.ids)
        self.events += self.cache.take_events()

    # ---- what happened ---------------------------------------------------------------------------------------------

    def fill(self, tier: str, prefix: Prefix) -> None:
        """Put every object of `prefix` into `tier`."""
        for chunk in range(len(prefix.keys)):
            for group in range(len(self.layout.groups)):
                self.held[tier].add((prefix.keys[chunk], group))

    def loaded(self) -> list[LoadDone]:
        return self._taken(LoadDone)

    def stored(self) -> list[StoreDone]:
        return self._taken(StoreDone)

    def notices(self) -> list[TierNotice]:
        return self._taken(TierNotice)

    def _taken(self, kind: type) -> list:
        taken = [event for event in self.events if isinstance(event, kind)]
        self.events = [event for event in self.events if not isinstance(event, kind)]
        return taken

    def present(self) -> set[str]:
        """Keys that are readable in host memory, for group 0."""
        return {name.decode() for name in self.cache.host.readable[0]}
