"""Learns which uses are followed by another, and lets go who is least likely to be used in the room it takes.

No fixed rule wins on all traffic: recency is right for agents and wrong for chats, frequency the other way round. What
decides is which names are dead already, and which come back soon. So a use is sorted by what can be seen of its prompt:
how much of the prompt was new, how long ago what it continues was used, how often the name itself was used before,
whether the prompt ended there. `ReuseModel` learns for each kind, and for each age, what keeping such a name for longer
is worth, and names of the least worth leave first. If kinds do not differ, that is LRU. (ADR 10 has the measurements.)

As in `Lru`, a name with a present child is never the victim.

Who is told that a session has ended learns what that means for names that only this session used; a lie is found out.
"""

from collections.abc import Callable, Iterator
from heapq import heappop, heappush
from operator import attrgetter
from weakref import WeakValueDictionary

from kvtier.policy.base import Held
from kvtier.policy.ghosts import Ghosts
from kvtier.policy.reuse import ReuseModel

_GHOSTS = 8
"""Names that left are remembered for so many times the names held."""
_LEARN_EVERY = 1 / 2
"""What names are worth is learned anew after so many uses, in names held; sooner at first."""
_LEARN_USES_MIN = 512
_RANK_EVERY = 1 / 4
"""All runs are ranked anew, since they have aged, in the course of so many uses, in names held."""
_RANK_AT_ONCE = 64
"""Runs that one call ranks anew, so that none takes long."""
_TRIES = 16
"""Runs that a call ranks anew at most because they seem to be worth least."""
_TIDY_AT_ONCE = 8
"""Runs that are ranked anew, and thrown out if empty, for each that is queued when there are too many."""
_SLACK = 64
"""Names or runs that may be left over before they are thrown out, so that few never are."""

_NEW_KINDS = 12
_USE_KINDS = 4
_PAUSE_KINDS = 20
_PAUSE_BITS_MIN = 6
"""All pauses below so many doublings of one use are alike."""
_USES_MAX = 15
"""More uses than that count as that."""
_KIND_OF_USES = tuple(min(uses.bit_length(), _USE_KINDS - 1) for uses in range(_USES_MAX + 1))
_UNKNOWN = -1
"""The kind of a run whose prompt is still being told."""
_FROM_END, _FROM_START = 1, 2
_KINDS_OF_BASE = _NEW_KINDS * _PAUSE_KINDS
_ENDED = _USE_KINDS * 2
"""The base of names that only one session used, which has ended."""


class _Session:
    """Whose use it was."""

    __slots__ = ("__weakref__", "ended_at")

    def __init__(self) -> None:
        self.ended_at: int | None = None


_SEVERAL = _Session()
"""Stands for more than one."""


class _Entry:
    """One present name."""

    __slots__ = ("before", "mark", "name", "owner", "parent", "run", "time", "uses")

    def __init__(self, name: bytes, mark: int, uses: int, time: int) -> None:
        self.name = name
        self.mark = mark
        self.parent: bytes | None = None
        self.uses = uses
        self.time = time  # of its last use
        self.before = 0  # of the use before the last
        self.owner: _Session | None = None  # who uses it
        self.run: _Run | None = None  # of its last use; None for who has left


class _Run:
    """Names of one kind that one prompt used: they grow old together.

    Each is the parent of the next, so the last is the next to leave, and while that has a child none may. A name that
    was used again, or left, may still be among them: its own run is another.
    """

    __slots__ = ("count", "entries", "is_queued", "kind", "owner", "time", "uses_kind")

    def __init__(self, uses_kind: int, owner: _Session | None, time: int, entries: list[_Entry]) -> None:
        self.uses_kind = uses_kind
        self.owner = owner
        self.kind = _UNKNOWN
        self.time = time
        self.entries = entries
        self.count = len(entries)  # of those whose run this is
        self.is_queued = False

    def last(self) -> _Entry:
        """Its last name; there must be one."""
        entries = self.entries
        while entries[-1].run is not self:
            entries.pop()
        return entries[-1]

    def lost(self) -> None:
        """A name of it was used again, or left."""
        self.count -= 1
        if 2 * self.count + _SLACK < len(self.entries) and self.kind != _UNKNOWN:
            self.entries = [entry for entry in self.entries if entry.run is self]


_Ranked = tuple[float, int, int, _Run]
"""What its names are worth, the time of their use, a number that no other has, and the run."""


class Adaptive:
    """Least expected reuse first, over leaves. Every event costs O(log n) amortised, and learning is done in steps.

    The uses of one prompt are told one after the other, along its chain from either end; they are sorted when the next
    prompt begins, since only then is known how much of this one was new. Until then only its last name may be chosen,
    by what is known so far.

    Runs are in two heaps. What a run is worth changes with its age and with what is learned, so all are ranked anew
    again and again: a few at a time move from one heap to the other, taken from the end of its list, which leaves a
    heap; when one is empty they change places. The least of all is the lesser of the two tops.

    A pinned leaf that stands in the way counts as used at that moment, because whoever pins it is using it.
    """

    def __init__(self) -> None:
        self._entries: dict[bytes, _Entry] = {}
        self._children: dict[bytes, int] = {}  # present children of each name, whether that is present or not
        self._model = ReuseModel(_USE_KINDS * 2 + 1, _NEW_KINDS, _PAUSE_KINDS)
        self._ghosts: Ghosts | None = None  # made when a name must leave: then we know how many there are
        self._now = 0  # uses so far
        self._prompt: list[_Entry] = []  # used by the prompt that is being told
        self._prompt_runs: list[_Run] = []  # the same, those next to one another that were used about as often
        self._prompt_tip: _Entry | None = None  # the first told that somebody remembers
        self._prompt_order = 0  # from the end or the start, if more than one name has been told
        self._prompt_new = 0  # names of the prompt that nobody remembers
        self._prompt_tail = 0  # of the prompt, who was looked at as its last present name
        self._heap: list[_Ranked] = []
        self._aged: list[_Ranked] = []  # those that are to be ranked anew
        self._number = 0  # of runs so far
        self._sessions: WeakValueDictionary[str, _Session] = WeakValueDictionary()  # that use something and go on
        self._session: _Session | None = None  # of the prompt that is being told
        self._session_name: str | None = None
        self._lesson: Iterator[None] | None = None
        self._lessons = 0
        self._learn_at = 0
        self._rank_at = 0
        self._rank_now = 0  # runs that have not been ranked since the last lesson

    def __len__(self) -> int:
        return len(self._entries)

    def added(self, held: Held) -> None:
        """`held` entered. Adding a name twice counts as a touch, and tells its parent if that was unknown."""
        name, parent = held.name, held.parent
        entry = self._entries.get(name)
        if entry is None:
            mark = _mark(name)
            entry = _Entry(name, mark, *(self._ghosts.find(mark) if self._ghosts is not None else (0, 0)))
            self._entries[name] = entry
        if parent is not None and entry.parent is None and parent != name:
            entry.parent = parent
            self._children[parent] = self._children.get(parent, 0) + 1
        self._use(entry, held.session)

    def touched(self, held: Held) -> None:
        """`held` was used. A name that was never added is ignored."""
        entry = self._entries.get(held.name)
        if entry is not None:
            self._use(entry, held.session)

    def removed(self, name: bytes) -> None:
        """`name` left, for whatever reason. A name that was never added is ignored."""
        entry = self._entries.pop(name, None)
        if entry is None:
            return
        run, entry.run = entry.run, None
        if run is not None:
            run.lost()
        if self._ghosts is not None:
            is_told = run is not None and run.kind == _UNKNOWN
            self._ghosts.remember(entry.mark, max(1, entry.uses - is_told), entry.time)
        if entry.parent is not None:
            self._unlink(entry.parent)

    def ended(self, session: str) -> None:
        """No more uses are to be expected from `session`; one that nobody knows is ignored.

        What nobody else used is sorted anew, as soon as it is ranked or becomes a leaf.
        """
        ended = self._sessions.pop(session, None)
        if ended is None:
            return
        ended.ended_at = self._now
        if session == self._session_name:
            self._session_name = self._session = None
        self._rank_now = len(self._heap) + len(self._aged)

    def victim(self, is_pinned: Callable[[bytes], bool]) -> bytes | None:
        """The leaf that is worth least of those that are not pinned; None when all leaves are. Does not remove it."""
        if not self._entries:
            return None
        self._work()
        pinned: list[_Run] = []
        least = self._least(is_pinned, pinned)
        if least is None and self._prompt:
            self._sort_prompt()
            least = self._least(is_pinned, pinned)
        for run in pinned:
            self._now += 1
            run.time = run.entries[0].time = self._now
            self._queue(run)
        if least is not None:
            return self._own_tail(least[0], is_pinned) or least[3].last().name
        return None if pinned else self._oldest_in_ring(is_pinned)

    def _use(self, entry: _Entry, session: str | None) -> None:
        if session != self._session_name:
            self._enter(session)
        run, prompt = entry.run, self._prompt
        if prompt:
            end = prompt[-1]
            order = _FROM_END if end.parent == entry.name else _FROM_START if entry.parent == end.name else 0
            if not order or (len(prompt) > 1 and order != self._prompt_order) or (run and run.kind == _UNKNOWN):
                self._sort_prompt()
                run, prompt = entry.run, self._prompt
            else:
                self._prompt_order = order
        self._now = now = self._now + 1
        self._model.used(entry.mark, now)
        entry.before = entry.time
        entry.time = now
        uses_kind = _KIND_OF_USES[entry.uses]
        owner = entry.owner
        if run is None:
            entry.owner = owner = self._session
        else:
            run.lost()
            if owner is not self._session:
                entry.owner = owner = _SEVERAL
        runs = self._prompt_runs
        if not runs or runs[-1].uses_kind != uses_kind or runs[-1].owner is not owner:
            runs.append(_Run(uses_kind, owner, now, []))
            if uses_kind and self._prompt_tip is None:
                self._prompt_tip = entry
        entry.run = run = runs[-1]
        run.entries.append(entry)
        run.count += 1
        prompt.append(entry)
        if not entry.uses:
            self._prompt_new += 1
        if entry.uses < _USES_MAX:
            entry.uses += 1

    def _enter(self, session: str | None) -> None:
        """A prompt of another session begins."""
        if self._prompt:
            self._sort_prompt()
        self._session_name = session
        if session is None:
            self._session = None
        else:
            # Not setdefault: nobody else would hold the new one.
            self._session = self._sessions.get(session) or _Session()
            self._sessions[session] = self._session

    def _sort_prompt(self) -> None:
        """The prompt is complete: what kind of use was it for each of its names?"""
        runs, time = self._prompt_runs, self._prompt[0].time
        if self._prompt_order == _FROM_START:
            runs.reverse()
        else:
            for run in runs:
                run.entries.reverse()
        first = min(self._prompt_new.bit_length(), _NEW_KINDS - 1)
        second = _pause_kind(next((run.entries[-1] for run in runs if run.uses_kind), None))
        self._prompt, self._prompt_runs = [], []
        self._prompt_tip = None
        self._prompt_order = self._prompt_new = self._prompt_tail = 0
        if len(runs[0].entries) > 1:
            # The prompt's last name is of a kind of its own.
            end = runs[0].entries.pop()
            runs.insert(0, _Run(runs[0].uses_kind, runs[0].owner, time, [end]))
            if end.run is None:
                runs[0].count -= 1
            else:
                end.run = runs[0]
                runs[1].count -= 1
        is_last, before = 1, _UNKNOWN
        for run in runs:
            run.kind = kind = self._model.kind(run.uses_kind * 2 + is_last, first, second)
            run.time = time
            if kind != before:
                # Names that share their fate: one of them stands for all in the model.
                self._model.watch(min(run.entries, key=_mark_of).mark, kind, time)
            before = kind
            # Who is told from the start is used up to the end: the prompt's last name counts as the first to grow old.
            time += len(run.entries)
            is_last = 0
            self._begin(run)

    def _begin(self, run: _Run) -> None:
        """Its prompt is complete: from now on, names of `run` may leave."""
        if run.count < len(run.entries):
            # Some left while the prompt was told: those that are leaves thereby would not be found behind the last.
            for entry in run.entries[:]:
                if entry.run is run and entry.name not in self._children:
                    self._queue(self._apart(entry))
        if run.count and run.last().name not in self._children:
            self._queue(run)

    def _own_tail(self, worth: float, is_pinned: Callable[[bytes], bool]) -> bytes | None:
        """The last name of the prompt that is being told, if it is worth less: a prompt need not drive out its betters.

        Only for who is told from the end: a name whose child is about to come must stay for its sake.
        """
        prompt, tail = self._prompt, self._prompt_tail
        if self._prompt_order != _FROM_END:
            return None
        while tail < len(prompt) - 1 and (prompt[tail].run is None or prompt[tail].name in self._children):
            tail += 1
        self._prompt_tail = tail
        entry = prompt[tail]
        if entry.run is None or entry.name in self._children or is_pinned(entry.name):
            return None
        first = min(self._prompt_new.bit_length(), _NEW_KINDS - 1)
        second = _pause_kind(self._prompt_tip)
        kind = self._model.kind(entry.run.uses_kind * 2 + (not tail), first, second)
        return entry.name if self._model.value(kind, 0) < worth else None

    def _least(self, is_pinned: Callable[[bytes], bool], pinned: list[_Run]) -> _Ranked | None:
        """The run whose last name is worth least. Of those that are pinned, each becomes a run of `pinned`."""
        tries = _TRIES
        while True:
            heap = self._heap
            is_aged = bool(self._aged) and (not heap or (tries > 0 and self._aged[0] < heap[0]))
            if is_aged:
                heap = self._aged
            if not heap:
                return None
            run = heap[0][3]
            if not run.count or (entry := run.last()).name in self._children:
                heappop(heap)
                run.is_queued = False  # if it has names, until the last child of the last has left
            elif is_pinned(entry.name):
                pinned.append(self._apart(entry))
            elif not is_aged:
                return heap[0]
            else:
                # It seems to be least, but that was long ago.
                number = heappop(heap)[2]
                self._retire(run)
                heappush(self._heap, (self._model.value(run.kind, self._now - run.time), run.time, number, run))
                tries -= 1

    def _unlink(self, parent: bytes) -> None:
        left = self._children[parent] - 1
        if left:
            self._children[parent] = left
            return
        del self._children[parent]
        entry = self._entries.get(parent)
        run = entry.run if entry is not None else None
        if entry is None or run is None or run.kind == _UNKNOWN:
            return  # the prompt that is being told used it: it is queued at the prompt's end
        if run.last() is not entry:
            self._queue(self._apart(entry))
        elif not run.is_queued:
            self._queue(run)

    def _apart(self, entry: _Entry) -> _Run:
        """`entry` in a run of its own."""
        old = entry.run
        assert old is not None, "who has left is queued"
        entry.run = run = _Run(old.uses_kind, old.owner, old.time, [entry])
        run.kind = old.kind
        old.lost()
        return run

    def _queue(self, run: _Run) -> None:
        self._retire(run)
        run.is_queued = True
        self._number += 1
        heappush(self._heap, (self._model.value(run.kind, self._now - run.time), run.time, self._number, run))
        if len(self._heap) + len(self._aged) > 2 * len(self._entries) + _SLACK:
            self._rank(_TIDY_AT_ONCE)

    def _retire(self, run: _Run) -> None:
        """If its only session has ended, that is a kind of its own: whether it is dead is learned, like all else."""
        owner = run.owner
        if owner is None or owner.ended_at is None:
            return
        run.owner = None
        run.kind = _ENDED * _KINDS_OF_BASE + run.kind % _KINDS_OF_BASE
        run.time = max(run.time, owner.ended_at)
        self._model.watch(min(run.entries, key=_mark_of).mark, run.kind, self._now)
        self._model.value(run.kind, 0)

    def _work(self) -> None:
        """A step of what is to be done once in a while."""
        now = self._now
        if self._lesson is not None:
            for _ in self._lesson:
                return
            self._lesson = None
            self._rank_now = len(self._heap) + len(self._aged)
        elif now >= self._learn_at:
            held = len(self._entries)
            self._lessons += 1
            self._learn_at = now + max(_LEARN_USES_MIN, int(held * _LEARN_EVERY * min(1.0, self._lessons / 4)))
            if self._ghosts is None or len(self._ghosts) < _GHOSTS * held / 2:
                self._ghosts = Ghosts(_GHOSTS * held)
            self._lesson = self._model.lesson(now, held)
        elif now >= self._rank_at or self._rank_now > 0:
            self._rank(_RANK_AT_ONCE)
            self._rank_now -= _RANK_AT_ONCE
            runs = len(self._heap) + len(self._aged)
            self._rank_at = now + int(_RANK_EVERY * len(self._entries) * min(1.0, _RANK_AT_ONCE / (runs + 1)))

    def _rank(self, count: int) -> None:
        """What are so many runs worth now?"""
        if not self._aged:
            self._aged, self._heap = self._heap, self._aged
        items = self._aged[-count:]
        del self._aged[-count:]
        kept: list[_Ranked] = []
        for item in items:
            run = item[3]
            if run.count:
                if run.owner is not None:
                    self._retire(run)
                kept.append(item)
            else:
                run.is_queued = False
        now = self._now
        values = self._model.values([run.kind for *_, run in kept], [now - run.time for *_, run in kept])
        for value, (_, _, number, run) in zip(values, kept, strict=True):
            heappush(self._heap, (value, run.time, number, run))

    def _oldest_in_ring(self, is_pinned: Callable[[bytes], bool]) -> bytes | None:
        """The oldest of names that all have children: only possible when parents form a ring, which no prompt makes.

        Such links can only come from outside (a damaged hint); without this nothing could ever leave again.
        """
        free = [entry for entry in self._entries.values() if not is_pinned(entry.name)]
        return min(free, key=lambda entry: entry.time).name if free else None


def _pause_kind(tip: _Entry | None) -> int:
    """How long ago what a prompt continues was used: its deepest name that is not new. 0 where all are."""
    if tip is None:
        return 0
    return min(max((tip.time - tip.before).bit_length() - _PAUSE_BITS_MIN, 1), _PAUSE_KINDS - 1)


_mark_of = attrgetter("mark")


def _mark(name: bytes) -> int:
    """A 64-bit hash: names are digests, but nothing here may break when they are not."""
    return int.from_bytes(name[-8:]) * 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF
