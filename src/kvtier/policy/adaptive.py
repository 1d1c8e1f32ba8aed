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
from math import inf
from operator import attrgetter
from weakref import WeakValueDictionary

from kvtier.policy.base import Held
from kvtier.policy.ghosts import USES_MAX, Ghosts
from kvtier.policy.reuse import ReuseModel
from kvtier.policy.runs import NOBODY, SEVERAL, SLACK, TOLD, Entry, Run, Session
from kvtier.types import NextTurn

_GHOSTS = 8
"""Names that left are remembered for so many times the names held."""
_LEARN_EVERY = 1 / 2
"""What names are worth is learned anew after so many uses, in names held; sooner at first."""
_LEARN_USES_MIN = 512
_TRUST_USES = 50
"""When all names held were used so many times over, what was learned of new prompts counts half, later more."""
_RANK_EVERY = 1 / 4
"""All runs are ranked anew, since they have aged, in the course of so many uses, in names held."""
_RANK_AT_ONCE = 64
"""Runs that one call ranks anew, so that none takes long."""
_TRIES = 16
"""Runs that a call ranks anew at most because they seem to be worth least."""
_TIDY_AT_ONCE = 8
"""Runs that are ranked anew, and thrown out if empty, for each that is queued when there are too many."""

_NEW_KINDS = 12
_USE_KINDS = 4
_PAUSE_KINDS = 20
_PAUSE_BITS_MIN = 6
"""All pauses below so many doublings of one use are alike."""
_KIND_OF_USES = tuple(min(max(0, uses - 1).bit_length(), _USE_KINDS - 1) for uses in range(USES_MAX + 1))
"""By uses, the one that is to be sorted included."""
_HINTS: dict[NextTurn | None, int] = {None: 0} | {it: place for place, it in enumerate(NextTurn, 1)}
"""What a session has said of its next turn, for names that only it used."""
_OVER = _HINTS[NextTurn.NOBODY]


_Ranked = tuple[float, int, int, Run]
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
        self._entries: dict[bytes, Entry] = {}
        self._held = 0  # names that are present
        self._model = ReuseModel(_USE_KINDS * 2, _NEW_KINDS, _PAUSE_KINDS, len(NextTurn))
        self._ghosts = Ghosts(0)  # larger ones are made when a name must leave: then we know how many there are
        self._now = 0  # uses so far
        self._prompt: list[Entry] = []  # used by the prompt that is being told
        self._above: Entry | None = NOBODY  # who comes next if it is told from its end
        self._below: Entry = NOBODY  # whose child comes next if it is told from its start
        self._prompt_new = 0  # names of the prompt that nobody remembers
        self._prompt_pauses = (0, 0)  # kinds, by the first name told that somebody remembers and by the last
        self._tail = 0  # of the prompt, who was looked at as its last present name
        self._tail_worth: float | None = None  # if it is known
        self._heap: list[_Ranked] = []
        self._aged: list[_Ranked] = []  # those that are to be ranked anew
        self._number = 0  # of runs so far
        self._sessions: WeakValueDictionary[str, Session] = WeakValueDictionary()  # that use something and go on
        self._session: Session | None = None  # of the prompt that is being told
        self._session_name: str | None = None
        self._lesson: Iterator[None] | None = None
        self._lessons = 0
        self._work_at = 0  # when there is something to do, at the soonest
        self._learn_at = 0
        self._rank_at = 0
        self._rank_now = 0  # runs that have not been ranked since the last lesson

    def __len__(self) -> int:
        return self._held

    def added(self, held: Held) -> None:
        """`held` entered. Adding a name twice counts as a touch, and tells its parent if that was unknown."""
        name, parent_name = held.name, held.parent
        entries = self._entries
        entry = entries.get(name)
        if entry is None:
            entries[name] = entry = Entry(name)
        if entry.run is None:
            entry.mark = mark = _mark(name)
            entry.uses, entry.time = self._ghosts.find(mark)
            self._held += 1
        if parent_name is not None and entry.parent is None and parent_name != name:
            parent = entries.get(parent_name)
            if parent is None:
                entries[parent_name] = parent = Entry(parent_name)
            entry.parent = parent
            parent.children += 1
        self._use(entry, held.session)

    def touched(self, held: Held) -> None:
        """`held` was used. A name that was never added is ignored."""
        entry = self._entries.get(held.name)
        if entry is not None and entry.run is not None:
            self._use(entry, held.session)

    def removed(self, name: bytes) -> None:
        """`name` left, for whatever reason. A name that was never added is ignored."""
        entry = self._entries.get(name)
        if entry is None or entry.run is None:
            return
        run, entry.run = entry.run, None
        uses = entry.uses
        if run is TOLD:
            self._tail_worth = None
            uses = max(1, uses - 1)
        elif run.entries[-1] is entry:
            run.entries.pop()
            run.count -= 1
        else:
            run.lost()
        parent = entry.parent
        if entry.owner is not None and entry.owner.tip is entry:
            entry.owner.tip = parent if parent is not None and parent.run is not None else None
        self._ghosts.remember(entry.mark, uses, entry.time)
        self._held -= 1
        if not entry.children:
            del self._entries[name]
        if parent is not None:
            entry.parent = None
            parent.children -= 1
            if not parent.children:
                self._lost_children(parent)

    def expects(self, session: str, next_turn: NextTurn | None) -> None:
        """A response to `session` is over, and `next_turn` is who goes on from what it has used so far.

        Its last prompt is sorted anew, without what others used too. When nobody goes on, all that only it used is, as
        soon as that is ranked or becomes a leaf.
        """
        teller = self._sessions.get(session)
        if teller is None:
            return
        hint = _HINTS[next_turn]
        if teller is self._session and self._prompt:
            self._sort_prompt(hint)
        if hint == _OVER:
            teller.is_over = True
            del self._sessions[session]
            if teller is self._session:
                self._session_name = self._session = None
            self._rank_now = len(self._heap) + len(self._aged)
            self._work_at = 0
        entry, before = teller.tip, None
        for _ in range(self._held):  # not for ever where parents form a ring
            if entry is None or entry.owner is not teller:
                return
            run = entry.run
            if run is not None and run is not before and self._hint(run, hint) and run.number:
                self._queue(run)
            entry, before = entry.parent, run

    def victim(self, is_pinned: Callable[[bytes], bool]) -> bytes | None:
        """The leaf that is worth least of those that are not pinned; None when all leaves are. Does not remove it."""
        if not self._held:
            return None
        if self._now >= self._work_at:
            self._work()
        pinned: list[Run] = []
        least = self._least(is_pinned, pinned)
        if least is None and self._prompt:
            self._sort_prompt()
            least = self._least(is_pinned, pinned)
        for run in pinned:
            # Not a use: time goes by with those alone, or the pinned would make the others old.
            run.time = run.last().time = self._now
            self._queue(run)
        if least is None:
            return None if pinned else self._oldest_in_ring(is_pinned)
        # The last name of the prompt that is being told leaves first if it is worth less.
        worth = self._tail_worth
        if worth is None:
            worth = self._value_tail()
        if worth < least[0]:
            tail = self._prompt[self._tail]
            if not tail.children and not is_pinned(tail.name):  # it may have got one, in a ring
                return tail.name
        return least[3].entries[-1].name

    def _use(self, entry: Entry, session: str | None) -> None:
        if session != self._session_name or entry.run is TOLD:
            self._enter(session)
        if entry is self._above:
            self._above, self._below = entry.parent, NOBODY
        elif entry.parent is self._below:
            self._above, self._below = NOBODY, entry
        else:
            if self._prompt:
                self._sort_prompt()
            self._above, self._below = entry.parent, entry
        self._now = now = self._now + 1
        if entry.mark in self._model.watched:
            self._model.used(entry.mark, now)
        if entry.uses:
            self._remembered(entry, now)
        else:
            entry.uses = 1
            self._prompt_new = new = self._prompt_new + 1
            if not new & (new - 1):
                self._tail_worth = None  # so many are another kind
        run = entry.run
        if run is None:
            entry.owner = self._session
        else:
            run.lost()
            if entry.owner is not self._session:
                entry.owner = SEVERAL
        entry.run = TOLD
        entry.time = now
        self._prompt.append(entry)

    def _remembered(self, entry: Entry, now: int) -> None:
        """A name that was used before is used."""
        entry.uses = min(entry.uses + 1, USES_MAX)
        pause = min(max((now - entry.time).bit_length() - _PAUSE_BITS_MIN, 1), _PAUSE_KINDS - 1)
        first, _ = self._prompt_pauses
        if not first:
            self._tail_worth = None
        self._prompt_pauses = first or pause, pause

    def _enter(self, session: str | None) -> None:
        """A prompt begins, of `session`."""
        if self._prompt:
            self._sort_prompt()
        if session == self._session_name:
            return
        self._session_name = session
        if session is None:
            self._session = None
        else:
            # Not setdefault: nobody else would hold the new one.
            self._session = self._sessions.get(session) or Session()
            self._sessions[session] = self._session

    def _sort_prompt(self, hint: int = 0) -> None:
        """The prompt is complete: what kind of use was it for each of its names?"""
        path, time = self._prompt, self._prompt[0].time
        is_from_start = self._above is NOBODY
        if not is_from_start:
            path.reverse()
        first = min(self._prompt_new.bit_length(), _NEW_KINDS - 1)
        second = self._prompt_pauses[is_from_start]
        self._prompt = []
        self._above = self._below = NOBODY
        self._prompt_new = self._tail = 0
        self._prompt_pauses = 0, 0
        self._tail_worth = None
        teller = self._session
        if teller is not None:
            teller.tip = next((entry for entry in reversed(path) if entry.run), None)
        is_last, before = 1, -1
        end = len(path)
        while end:
            # Names next to one another that were used about as often; the prompt's last name is of a kind of its own.
            start = end - 1
            uses_kind, owner = _KIND_OF_USES[path[start].uses], path[start].owner
            while not is_last and start:
                entry = path[start - 1]
                if _KIND_OF_USES[entry.uses] != uses_kind or entry.owner is not owner:
                    break
                start -= 1
            kind = self._model.kind(uses_kind * 2 + is_last, first, second, hint if owner is teller else 0)
            run = Run(kind, owner, time, path[start:end])
            if kind != before:
                # Names that share their fate: one of them stands for all in the model.
                self._model.watch(min(map(_mark_of, run.entries)), kind, time)
            # Who is told from the start is used up to the end: the prompt's last name counts as the first to grow old.
            time += end - start
            end, is_last, before = start, 0, kind
            self._begin(run)

    def _begin(self, run: Run) -> None:
        """Its prompt is complete: from now on, names of `run` may leave."""
        for entry in run.entries:
            if entry.run is TOLD:
                entry.run = run
            else:
                run.count -= 1
        if run.count < len(run.entries):
            # Some left while the prompt was told: those that are leaves thereby would not be found behind the last.
            for entry in run.entries[:]:
                if entry.run is run and not entry.children:
                    self._queue(self._apart(entry))
        if run.count and not run.last().children:
            self._queue(run)

    def _value_tail(self) -> float:
        """What the last name of the prompt that is being told is worth: a prompt need not drive out its betters.

        Only for who is told from the end: a name whose child is about to come must stay for its sake. While little has
        been learned it is thought to be worth more: a prompt that is let in and turns out worthless costs its room
        once, but one that is kept out by mistake is missed at each of its turns.
        """
        prompt, tail = self._prompt, self._tail
        if self._below is not NOBODY or not prompt:
            return inf
        while (prompt[tail].run is None or prompt[tail].children) and tail < len(prompt) - 1:
            tail += 1
        self._tail, entry = tail, prompt[tail]
        if entry.run is None or entry.children:
            return inf
        base = _KIND_OF_USES[entry.uses] * 2 + (not tail)
        kind = self._model.kind(base, min(self._prompt_new.bit_length(), _NEW_KINDS - 1), self._prompt_pauses[0])
        doubt = _TRUST_USES * len(self._entries) / self._now
        self._tail_worth = self._model.value(kind, 0) * (1 + doubt)
        return self._tail_worth

    def _least(self, is_pinned: Callable[[bytes], bool], pinned: list[Run]) -> _Ranked | None:
        """The run whose last name is worth least. Of those that are pinned, each becomes a run of `pinned`."""
        tries = _TRIES
        while True:
            heap, aged = self._heap, self._aged
            is_aged = bool(aged) and (not heap or (aged[0] < heap[0] and tries > 0))
            if is_aged:
                heap = aged
            if not heap:
                return None
            number, run = heap[0][2:]
            if number != run.number:
                heappop(heap)  # it was queued again
            elif not run.count or (entry := run.last()).children:
                heappop(heap)
                run.number = 0  # if it has names, until the last child of the last has left
            elif is_pinned(entry.name):
                if run.count > 1:
                    run = self._apart(entry)
                else:
                    heappop(heap)
                pinned.append(run)
            elif not is_aged:
                return heap[0]
            else:
                # It seems to be least, but that was long ago.
                heappop(heap)
                self._retire(run)
                heappush(self._heap, (self._model.value(run.kind, self._now - run.time), run.time, number, run))
                tries -= 1

    def _lost_children(self, entry: Entry) -> None:
        """The last present child of `entry` has left."""
        run = entry.run
        if run is None:
            del self._entries[entry.name]
        elif run is TOLD:
            pass  # it is queued at the prompt's end
        elif run.entries[-1] is not entry and run.last() is not entry:
            self._queue(self._apart(entry))
        elif not run.number:
            self._queue(run)

    def _apart(self, entry: Entry) -> Run:
        """`entry` in a run of its own."""
        old = entry.run
        assert old is not None, "who has left is queued"
        entry.run = run = Run(old.kind, old.owner, old.time, [entry])
        old.lost()
        return run

    def _queue(self, run: Run) -> None:
        self._retire(run)
        self._number += 1
        run.number = self._number
        heappush(self._heap, (self._model.value(run.kind, self._now - run.time), run.time, self._number, run))
        if len(self._heap) + len(self._aged) > 2 * self._held + SLACK:
            self._rank(_TIDY_AT_ONCE)

    def _retire(self, run: Run) -> None:
        """If its only session is over, that is a kind of its own: whether it is dead is learned, like all else."""
        if run.owner is not None and run.owner.is_over:
            self._hint(run, _OVER)
            run.owner = None

    def _hint(self, run: Run, hint: int) -> bool:
        """Sort `run` anew: its only session has said who goes on. Returns whether that was not known."""
        if run is TOLD or (kind := self._model.hinted(run.kind, hint)) == run.kind:
            return False
        watch = self._model.watch if self._model.is_hinted(run.kind) else self._model.watch_too
        run.kind, run.time = kind, self._now
        watch(min(map(_mark_of, run.entries)), kind, self._now)
        self._model.value(kind, 0)
        return True

    def _work(self) -> None:
        """A step of what is to be done once in a while."""
        now = self._now
        self._tail_worth = None
        if self._lesson is not None:
            if next(self._lesson, True):
                self._lesson = None
                self._rank_now = len(self._heap) + len(self._aged)
        elif now >= self._learn_at:
            held = self._held
            self._lessons += 1
            self._learn_at = now + max(_LEARN_USES_MIN, int(held * _LEARN_EVERY * min(1.0, self._lessons / 4)))
            if len(self._ghosts) < _GHOSTS * held / 2:
                self._ghosts = Ghosts(_GHOSTS * held)
            self._lesson = self._model.lesson(now, held)
        elif now >= self._rank_at or self._rank_now > 0:
            self._rank(_RANK_AT_ONCE)
            self._rank_now -= _RANK_AT_ONCE
            runs = len(self._heap) + len(self._aged)
            self._rank_at = now + int(_RANK_EVERY * self._held * min(1.0, _RANK_AT_ONCE / (runs + 1)))
        is_busy = self._lesson is not None or self._rank_now > 0
        self._work_at = 0 if is_busy else min(self._learn_at, self._rank_at)

    def _rank(self, count: int) -> None:
        """What are so many runs worth now?"""
        if not self._aged:
            self._aged, self._heap = self._heap, self._aged
        items = self._aged[-count:]
        del self._aged[-count:]
        kept: list[_Ranked] = []
        for item in items:
            run = item[3]
            if item[2] != run.number:
                continue  # it was queued again
            if run.count:
                if run.owner is not None:
                    self._retire(run)
                kept.append(item)
            else:
                run.number = 0
        now = self._now
        values = self._model.values([run.kind for *_, run in kept], [now - run.time for *_, run in kept])
        for value, (_, _, number, run) in zip(values, kept, strict=True):
            heappush(self._heap, (value, run.time, number, run))

    def _oldest_in_ring(self, is_pinned: Callable[[bytes], bool]) -> bytes | None:
        """The oldest of names that all have children: only possible when parents form a ring, which no prompt makes.

        Such links can only come from outside (a damaged hint); without this nothing could ever leave again.
        """
        free = [it for it in self._entries.values() if it.run is not None and not is_pinned(it.name)]
        return min(free, key=lambda entry: entry.time).name if free else None


_mark_of = attrgetter("mark")


def _mark(name: bytes) -> int:
    """A 64-bit hash: names are digests, but nothing here may break when they are not."""
    return int.from_bytes(name[-8:]) * 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF
