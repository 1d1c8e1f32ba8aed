"""Learns which uses are followed by another, and lets go who is least likely to be used in the room it takes.

No fixed rule wins on all traffic: recency is right for agents and wrong for chats, frequency the other way round. What
decides is which names are dead already, and which come back soon. So a use is sorted by what can be seen of its prompt:
how much of the prompt was new, how long ago what it continues was used, how often the name itself was used before,
whether the prompt ended there. `ReuseModel` learns for each kind, and for each age, what keeping such a name for longer
is worth, and names of the least worth leave first. If kinds do not differ, that is LRU. (ADR 10 has the measurements.)

As in `Lru`, a name with a present child is never the victim.
"""

from collections.abc import Callable
from heapq import heapify, heappop, heappush
from operator import attrgetter

from kvtier.policy.base import Held
from kvtier.policy.ghosts import Ghosts
from kvtier.policy.reuse import ReuseModel

_GHOSTS = 8
"""Names that left are remembered for so many times the names held."""
_LEARN_EVERY = 1 / 4
"""What names are worth is learned anew after so many uses, in names held."""
_LEARN_USES_MIN = 1024
_ORDER_EVERY = 1 / 16
"""Names are put in order anew, since they have aged, after so many uses, in names held."""
_ORDER_USES_MIN = 32
_SLACK = 64
"""Items of runs that may be left over before they are thrown out, so that few never are."""

_NEW_KINDS = 12
_USE_KINDS = 4
_PAUSE_KINDS = 20
_PAUSE_BITS_MIN = 6
"""All pauses below so many doublings of one use are alike."""


class _Entry:
    """One present name."""

    __slots__ = ("before", "is_present", "kind", "mark", "name", "parent", "run", "time", "uses")

    def __init__(self, name: bytes, mark: int, uses: int, time: int) -> None:
        self.name = name
        self.mark = mark
        self.parent: bytes | None = None
        self.is_present = True
        self.uses = uses
        self.kind = 0
        self.time = time  # of its last use
        self.before = 0  # of the use before the last
        self.run: _Run | None = None  # where it is queued


class _Run:
    """Names of one kind that one prompt used: they grow old together. The next to leave is the last.

    A name that was used again, or left, may still be among them.
    """

    __slots__ = ("entries", "kind", "time")

    def __init__(self, kind: int, time: int, entries: list[_Entry]) -> None:
        self.kind = kind
        self.time = time
        self.entries = entries

    def trim(self) -> int:
        """Take names off the end until one is queued here; returns how many."""
        entries = self.entries
        before = len(entries)
        while entries and entries[-1].run is not self:
            entries.pop()
        return before - len(entries)


_Ordered = tuple[float, int, _Run]
"""What its names are worth, a number that is higher for who was queued later, and the run."""


class Adaptive:
    """Least expected reuse first, over leaves. Every event costs O(log n) amortised.

    The uses of one prompt are told one after the other, along its chain from either end; they are sorted when the next
    prompt begins, since only then is known how much of this one was new. Until then only its last name may be chosen,
    by what is known so far.

    A pinned leaf that stands in the way counts as used at that moment, because whoever pins it is using it.
    """

    def __init__(self) -> None:
        self._entries: dict[bytes, _Entry] = {}
        self._children: dict[bytes, int] = {}  # present children of each name, whether that is present or not
        self._model = ReuseModel(_USE_KINDS * 2, _NEW_KINDS, _PAUSE_KINDS)
        self._ghosts: Ghosts | None = None  # made when a name must leave: then we know how many there are
        self._now = 0  # uses so far
        self._prompt: list[_Entry] = []  # used by the prompt that is being told
        self._prompt_end: tuple[bytes, bytes | None] | None = None  # the last name told, and its parent
        self._prompt_new = 0  # names of the prompt that nobody remembers
        self._prompt_tip: _Entry | None = None  # the first told that somebody does
        self._prompt_tail = 0  # of the prompt, who was looked at as its last present name
        self._heap: list[_Ordered] = []
        self._number = 0  # of runs so far
        self._queued = 0  # names in runs, still valid or not
        self._is_full = False
        self._learn_at = self._order_at = 0

    def __len__(self) -> int:
        return len(self._entries)

    def added(self, held: Held) -> None:
        """`held` entered. Adding a name twice counts as a touch, and tells its parent if that was unknown."""
        entry = self._entries.get(held.name)
        if entry is None:
            mark = _mark(held.name)
            entry = _Entry(held.name, mark, *(self._ghosts.find(mark) if self._ghosts else (0, 0)))
            self._entries[held.name] = entry
        if entry.parent is None and held.parent is not None and held.parent != held.name:
            entry.parent = held.parent
            self._children[held.parent] = self._children.get(held.parent, 0) + 1
        self._use(entry, held)

    def touched(self, held: Held) -> None:
        """`held` was used. A name that was never added is ignored."""
        entry = self._entries.get(held.name)
        if entry is not None:
            self._use(entry, held)

    def removed(self, name: bytes) -> None:
        """`name` left, for whatever reason. A name that was never added is ignored."""
        entry = self._entries.pop(name, None)
        if entry is None:
            return
        entry.is_present = False
        entry.run = None
        if self._ghosts:
            self._ghosts.remember(entry.mark, max(1, entry.uses), entry.time)
        if entry.parent is not None:
            self._unlink(entry.parent)

    def victim(self, is_pinned: Callable[[bytes], bool]) -> bytes | None:
        """The leaf that is worth least of those that are not pinned; None when all leaves are. Does not remove it."""
        if not self._entries:
            return None
        if self._now >= self._learn_at or not self._is_full:
            self._learn()
        if self._now >= self._order_at:
            self._order()
        pinned: list[_Entry] = []
        entry = self._least(is_pinned, pinned)
        if entry is None and self._prompt:
            self._sort_prompt()
            entry = self._least(is_pinned, pinned)
        elif entry is not None and len(self._prompt) > 1:
            entry = self._own_tail(self._heap[0][0], is_pinned) or entry
        for other in pinned:
            self._now += 1
            other.time = self._now
            self._enqueue(_Run(other.kind, self._now, [other]))
        if entry is not None:
            return entry.name
        return None if pinned else self._oldest_in_ring(is_pinned)

    def _use(self, entry: _Entry, held: Held) -> None:
        end = self._prompt_end
        if end is not None and held.parent != end[0] and held.name != end[1]:
            self._sort_prompt()
        self._prompt_end = (held.name, held.parent)
        self._now += 1
        self._model.used(entry.mark, self._now)
        entry.before = entry.time
        entry.time = self._now
        entry.run = None
        self._prompt.append(entry)
        if not entry.uses:
            self._prompt_new += 1
        elif self._prompt_tip is None:
            self._prompt_tip = entry

    def _sort_prompt(self) -> None:
        """The prompt is complete: what kind of use was it for each of its names?"""
        prompt = self._prompt
        if len(prompt) > 1 and prompt[1].parent == prompt[0].name:
            prompt.reverse()
            # Who is told from the start is used up to the end: its last name counts as the first to grow old.
            times = [entry.time for entry in reversed(prompt)]
            for entry, time in zip(prompt, times, strict=True):
                entry.time = time
            self._prompt_tip = next((entry for entry in prompt if entry.uses), None)
        first = min(self._prompt_new.bit_length(), _NEW_KINDS - 1)
        second = _pause_kind(self._prompt_tip)
        is_last = 1
        run: list[_Entry] = []
        for entry in prompt:
            kind = self._model.kind(_base(entry, is_last), first, second)
            is_last = 0
            if run and run[-1].kind != kind:
                self._end_run(run)
                run = []
            run.append(entry)
            entry.kind = kind
            entry.uses += 1
        self._end_run(run)
        self._prompt = []
        self._prompt_end = None
        self._prompt_tip = None
        self._prompt_new = self._prompt_tail = 0

    def _own_tail(self, worth: float, is_pinned: Callable[[bytes], bool]) -> _Entry | None:
        """The last name of the prompt that is being told, if it is worth less: a prompt need not drive out its betters.

        Only for who is told from the end: a name whose child is about to come must stay for its sake.
        """
        prompt, tail = self._prompt, self._prompt_tail
        if prompt[0].parent != prompt[1].name:
            return None
        while tail < len(prompt) - 1 and (not prompt[tail].is_present or prompt[tail].name in self._children):
            tail += 1
        self._prompt_tail = tail
        entry = prompt[tail]
        if not entry.is_present or entry.name in self._children or is_pinned(entry.name):
            return None
        first = min(self._prompt_new.bit_length(), _NEW_KINDS - 1)
        kind = self._model.kind(_base(entry, int(not tail)), first, _pause_kind(self._prompt_tip))
        return entry if self._model.value(kind, 0) < worth else None

    def _end_run(self, entries: list[_Entry]) -> None:
        """Names of one kind that one prompt used share their fate: one of them stands for all in the model."""
        kind, time = entries[0].kind, entries[0].time
        self._model.watch(min(entries, key=_mark_of).mark, kind, time)
        present = [entry for entry in reversed(entries) if entry.is_present]
        if present:
            self._enqueue(_Run(kind, time, present))

    def _least(self, is_pinned: Callable[[bytes], bool], pinned: list[_Entry]) -> _Entry | None:
        heap = self._heap
        while heap:
            run = heap[0][2]
            self._queued -= run.trim()
            if not run.entries:
                heappop(heap)
                continue
            entry = run.entries[-1]
            if entry.name in self._children:
                entry.run = None  # queued again when the last child has left
            elif is_pinned(entry.name):
                entry.run = None
                pinned.append(entry)
            else:
                return entry
        return None

    def _enqueue(self, run: _Run) -> None:
        for entry in run.entries:
            entry.run = run
        self._queued += len(run.entries)
        self._number += 1
        heappush(self._heap, (self._model.value(run.kind, self._now - run.time), self._number, run))
        if self._queued > 2 * len(self._entries) + _SLACK:
            self._compact()

    def _unlink(self, parent: bytes) -> None:
        left = self._children[parent] - 1
        if left:
            self._children[parent] = left
            return
        del self._children[parent]
        entry = self._entries.get(parent)
        if entry is not None and entry.run is None and not self._is_told(entry):
            self._enqueue(_Run(entry.kind, entry.time, [entry]))

    def _is_told(self, entry: _Entry) -> bool:
        """Whether the prompt that is being told used it: then it will be queued at the prompt's end."""
        return bool(self._prompt) and entry.time >= self._prompt[0].time

    def _learn(self) -> None:
        held = len(self._entries)
        self._is_full = True
        if self._ghosts is None or len(self._ghosts) < _GHOSTS * held / 2:
            self._ghosts = Ghosts(_GHOSTS * held)
        self._learn_at = self._now + max(_LEARN_USES_MIN, int(held * _LEARN_EVERY))
        self._order_at = self._now
        self._model.learn(self._now, held)

    def _order(self) -> None:
        """What is each run worth now?"""
        self._order_at = self._now + max(_ORDER_USES_MIN, int(len(self._entries) * _ORDER_EVERY))
        heap: list[tuple[int, _Run]] = []
        for _, number, run in self._heap:
            self._queued -= run.trim()
            if run.entries:
                heap.append((number, run))
        now = self._now
        values = self._model.values([run.kind for _, run in heap], [now - run.time for _, run in heap])
        self._heap = [(value, number, run) for value, (number, run) in zip(values, heap, strict=True)]
        heapify(self._heap)

    def _compact(self) -> None:
        for _, _, run in self._heap:
            run.entries = [entry for entry in run.entries if entry.run is run]
        self._heap = [item for item in self._heap if item[2].entries]
        heapify(self._heap)
        self._queued = sum(len(run.entries) for _, _, run in self._heap)

    def _oldest_in_ring(self, is_pinned: Callable[[bytes], bool]) -> bytes | None:
        """The oldest of names that all have children: only possible when parents form a ring, which no prompt makes.

        Such links can only come from outside (a damaged hint); without this nothing could ever leave again.
        """
        free = [entry for entry in self._entries.values() if not is_pinned(entry.name)]
        return min(free, key=lambda entry: entry.time).name if free else None


def _base(entry: _Entry, is_last: int) -> int:
    return min(entry.uses.bit_length(), _USE_KINDS - 1) * 2 + is_last


def _pause_kind(tip: _Entry | None) -> int:
    """How long ago what a prompt continues was used: its deepest name that is not new. 0 where all are."""
    if tip is None:
        return 0
    return min(max((tip.time - tip.before).bit_length() - _PAUSE_BITS_MIN, 1), _PAUSE_KINDS - 1)


_mark_of = attrgetter("mark")


def _mark(name: bytes) -> int:
    """A 64-bit hash: names are digests, but nothing here may break when they are not."""
    return int.from_bytes(name[-8:]) * 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF
