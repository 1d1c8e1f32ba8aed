"""Learns which uses are followed by another, and lets go who is least likely to be used in the room it takes.

No fixed rule wins on all traffic: recency is right for agents and wrong for chats, frequency the other way round. What
decides is which names are dead already. So a use is sorted by what can be seen of its prompt: how much of the prompt
was new, how often the name itself was used before, whether the prompt ended there. `ReuseModel` learns for each kind,
and for each age, what keeping such a name for longer is worth, and names of the least worth leave first. If kinds do
not differ, that is LRU. (ADR 10 has the measurements.)

As in `Lru`, a name with a present child is never the victim.
"""

from collections import deque
from collections.abc import Callable
from operator import attrgetter

from kvtier.policy.base import Held
from kvtier.policy.ghosts import Ghosts
from kvtier.policy.reuse import BUCKETS, ReuseModel

_GHOSTS = 8
"""Names that left are remembered for so many times the names held."""
_LEARN_EVERY = 1 / 4
"""The order is learned anew after so many uses, in names held."""
_LEARN_USES_MIN = 1024
_AGE_EVERY = 1 / 16
"""Names are moved to the next age after so many uses, in names held: half of the first age bucket."""
_AGE_USES_MIN = 16
_SLACK = 64
"""Queue items that may be left over before queues are compacted, so that small ones never are."""

_NEW_KINDS = 12
_USE_KINDS = 4
_KINDS = _NEW_KINDS * _USE_KINDS * 2


class _Entry:
    """One present name."""

    __slots__ = ("is_present", "kind", "mark", "name", "parent", "run", "time", "uses")

    def __init__(self, name: bytes, mark: int, uses: int) -> None:
        self.name = name
        self.mark = mark
        self.parent: bytes | None = None
        self.is_present = True
        self.uses = uses
        self.kind = 0
        self.time = 0  # of its last use
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


class _Queue:
    """Runs of one kind and age, the oldest first."""

    __slots__ = ("bucket", "kind", "rank", "runs")

    def __init__(self, kind: int, bucket: int) -> None:
        self.kind = kind
        self.bucket = bucket
        self.runs: deque[_Run] = deque()
        self.rank = 0


class Adaptive:
    """Least expected reuse first, over leaves. Every event costs O(1) amortised.

    The uses of one prompt are told one after the other, along its chain from either end; they are sorted when the next
    prompt begins, since only then is known how much of this one was new. Until then they are not chosen unless nobody
    else is left.

    A pinned leaf that stands in the way counts as used at that moment, because whoever pins it is using it.
    """

    def __init__(self) -> None:
        self._entries: dict[bytes, _Entry] = {}
        self._children: dict[bytes, int] = {}  # present children of each name, whether that is present or not
        self._model = ReuseModel(_KINDS)
        self._ghosts: Ghosts | None = None  # made when a name must leave: then we know how many there are
        self._now = 0  # uses so far
        self._prompt: list[_Entry] = []  # used by the prompt that is being told
        self._prompt_end: tuple[bytes, bytes | None] | None = None  # the last name told, and its parent
        self._queues: dict[tuple[int, int], _Queue] = {}
        self._values: dict[int, list[float]] = {}  # by kind and bucket, of all kinds that are queued
        self._ranked: list[_Queue] = []
        self._busy = 0  # a bit for each rank whose queue has items
        self._queued = 0  # names in runs, still valid or not
        self._is_full = False
        self._learn_at = self._age_at = 0

    def __len__(self) -> int:
        return len(self._entries)

    def added(self, held: Held) -> None:
        """`held` entered. Adding a name twice counts as a touch, and tells its parent if that was unknown."""
        entry = self._entries.get(held.name)
        if entry is None:
            mark = _mark(held.name)
            entry = _Entry(held.name, mark, self._ghosts.uses(mark) if self._ghosts else 0)
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
            self._ghosts.remember(entry.mark, max(1, entry.uses))
        if entry.parent is not None:
            self._unlink(entry.parent)

    def victim(self, is_pinned: Callable[[bytes], bool]) -> bytes | None:
        """The leaf that is worth least of those that are not pinned; None when all leaves are. Does not remove it."""
        if not self._entries:
            return None
        if self._now >= self._learn_at or not self._is_full:
            self._learn()
        if self._now >= self._age_at:
            self._move_on()
        pinned: list[_Entry] = []
        entry = self._least(is_pinned, pinned)
        if entry is None and self._prompt:
            self._sort_prompt()
            entry = self._least(is_pinned, pinned)
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
        entry.time = self._now
        entry.run = None
        self._prompt.append(entry)

    def _sort_prompt(self) -> None:
        """The prompt is complete: what kind of use was it for each of its names?"""
        prompt = self._prompt
        if len(prompt) > 1 and prompt[1].parent == prompt[0].name:
            prompt.reverse()
            # Who is told from the start is used up to the end: its last name counts as the first to grow old.
            times = [entry.time for entry in reversed(prompt)]
            for entry, time in zip(prompt, times, strict=True):
                entry.time = time
        new = sum(not entry.uses for entry in prompt)
        kind_new = min(new.bit_length(), _NEW_KINDS - 1) * _USE_KINDS
        is_last = 1
        run: list[_Entry] = []
        for entry in prompt:
            kind = (kind_new + min(entry.uses.bit_length(), _USE_KINDS - 1)) * 2 + is_last
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

    def _end_run(self, entries: list[_Entry]) -> None:
        """Names of one kind that one prompt used share their fate: one of them stands for all in the model."""
        kind, time = entries[0].kind, entries[0].time
        self._model.watch(min(entries, key=_mark_of).mark, kind, time, len(entries))
        present = [entry for entry in reversed(entries) if entry.is_present]
        if present:
            self._enqueue(_Run(kind, time, present))

    def _least(self, is_pinned: Callable[[bytes], bool], pinned: list[_Entry]) -> _Entry | None:
        while self._busy:
            lowest = self._busy & -self._busy
            runs = self._ranked[lowest.bit_length() - 1].runs
            while runs:
                self._queued -= runs[0].trim()
                if not runs[0].entries:
                    runs.popleft()
                    continue
                entry = runs[0].entries[-1]
                if entry.name in self._children:
                    entry.run = None  # queued again when the last child has left
                elif is_pinned(entry.name):
                    entry.run = None
                    pinned.append(entry)
                else:
                    return entry
            self._busy ^= lowest
        return None

    def _enqueue(self, run: _Run, *, is_front: bool = False) -> None:
        """Queue the run; only for new runs `is_front` may be true or its names not yet its own."""
        for entry in run.entries:
            entry.run = run
        self._queued += len(run.entries)
        self._place(run, is_front=is_front)
        if self._queued > 2 * len(self._entries) + _SLACK:
            self._compact()

    def _place(self, run: _Run, *, is_front: bool = False) -> None:
        queue = self._queue(run.kind, self._model.bucket(self._now - run.time))
        if is_front:
            queue.runs.appendleft(run)
        else:
            queue.runs.append(run)
        self._busy |= 1 << queue.rank

    def _queue(self, kind: int, bucket: int) -> _Queue:
        queue = self._queues.get((kind, bucket))
        if queue is None:
            queue = self._queues[kind, bucket] = _Queue(kind, bucket)
            if kind not in self._values:
                self._values.update(self._model.values([kind]))
            self._rank()
        return queue

    def _unlink(self, parent: bytes) -> None:
        left = self._children[parent] - 1
        if left:
            self._children[parent] = left
            return
        del self._children[parent]
        entry = self._entries.get(parent)
        if entry is not None and entry.run is None and not self._is_told(entry):
            self._enqueue(_Run(entry.kind, entry.time, [entry]), is_front=True)

    def _is_told(self, entry: _Entry) -> bool:
        """Whether the prompt that is being told used it: then it will be queued at the prompt's end."""
        return bool(self._prompt) and entry.time >= self._prompt[0].time

    def _learn(self) -> None:
        held = len(self._entries)
        self._is_full = True
        if self._ghosts is None or len(self._ghosts) < _GHOSTS * held / 2:
            self._ghosts = Ghosts(_GHOSTS * held)
        self._learn_at = self._now + max(_LEARN_USES_MIN, int(held * _LEARN_EVERY))
        self._model.learn(self._now, held)
        self._values = self._model.values(self._values)
        self._rank()

    def _rank(self) -> None:
        """Who leaves first: the queue of least value; among equals the older one."""
        values = self._values
        self._ranked = sorted(
            self._queues.values(), key=lambda queue: (values[queue.kind][queue.bucket], -queue.bucket, queue.kind)
        )
        self._busy = 0
        for rank, queue in enumerate(self._ranked):
            queue.rank = rank
            if queue.runs:
                self._busy |= 1 << rank

    def _move_on(self) -> None:
        """Names that have outgrown their age bucket go to the next."""
        self._age_at = self._now + max(_AGE_USES_MIN, int(len(self._entries) * _AGE_EVERY))
        for queue in self._ranked:
            if queue.bucket >= BUCKETS:
                continue
            runs = queue.runs
            latest = self._now - self._model.ends[queue.bucket]
            while runs:
                self._queued -= runs[0].trim()
                if runs[0].entries and runs[0].time > latest:
                    break
                run = runs.popleft()
                if run.entries:
                    self._place(run)

    def _compact(self) -> None:
        self._queued = 0
        for queue in self._queues.values():
            for run in queue.runs:
                run.entries = [entry for entry in run.entries if entry.run is run]
                self._queued += len(run.entries)
            queue.runs = deque(run for run in queue.runs if run.entries)

    def _oldest_in_ring(self, is_pinned: Callable[[bytes], bool]) -> bytes | None:
        """The oldest of names that all have children: only possible when parents form a ring, which no prompt makes.

        Such links can only come from outside (a damaged hint); without this nothing could ever leave again.
        """
        free = [entry for entry in self._entries.values() if not is_pinned(entry.name)]
        return min(free, key=lambda entry: entry.time).name if free else None


_mark_of = attrgetter("mark")


def _mark(name: bytes) -> int:
    """A 64-bit hash: names are digests, but nothing here may break when they are not."""
    return int.from_bytes(name[-8:]) * 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF
