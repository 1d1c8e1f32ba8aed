"""Evicts the names with the least expected reuse per unit of time, learned from the stream of uses.

No fixed rule wins on all workloads: recency suits agents, frequency suits chats. What matters is which names are
already dead and which will be reused soon. So each use gets a kind from features of its prompt: how much of the prompt
is new, how long ago its reused part was last used, how often the name was used before, and whether the prompt ended
there. `ReuseModel` learns the value of keeping a name for each kind and age. The names of least value are evicted
first. If all kinds behave alike, that is LRU. Measurements are in docs/internals/eviction-study.md.

As in `Lru`, a name whose child is present is never the victim.

Hints about a conversation's next turn change the kind of names that only this conversation used. Their effect is
learned like everything else, so a wrong hint loses its effect.
"""

from collections.abc import Callable, Iterator
from heapq import heappop, heappush
from itertools import islice
from math import inf
from operator import attrgetter
from weakref import WeakValueDictionary

import numpy as np

from kvtier.policy.base import Use
from kvtier.policy.name_table import NameTable
from kvtier.policy.reuse import ReuseModel
from kvtier.types import NextTurn

_HASH_BITS = 20
_TIME_BITS = 40
_TIME_MASK = (1 << _TIME_BITS) - 1
_USES_BITS = 4
USES_MAX = (1 << _USES_BITS) - 1
"""Largest count of uses. The count saturates here."""
_PIECE_BITS = 18
_PIECE_MASK = (1 << _PIECE_BITS) - 1


class Ghosts:
    """A direct-mapped table of evicted names: a newer name replaces the older one in its slot.

    Names are identified by a 64-bit hash. Two names in a slot are confused once in 2^20, which costs a wrong guess.

    Args:
        places: number of slots, rounded up to a power of two.
    """

    def __init__(self, places: int) -> None:
        size = 1 << max(0, places - 1).bit_length()
        # A piece of 2 MiB takes no memory until it is written. From 4 MiB on, NumPy asks for huge pages, and the first
        # write takes 10 ms.
        pieces = range(-(-size >> _PIECE_BITS))
        self._pieces = [np.zeros(min(size, 1 << _PIECE_BITS), np.uint64).data for _ in pieces]
        self._mask = size - 1

    def __len__(self) -> int:
        return self._mask + 1

    def remember(self, name_hash: int, uses: int, time: int) -> None:
        """Remember an evicted name with its number of uses and the time of the last one."""
        uses = min(uses, USES_MAX)
        check = name_hash >> 64 - _HASH_BITS << _TIME_BITS
        place = name_hash & self._mask
        self._pieces[place >> _PIECE_BITS][place & _PIECE_MASK] = (check | time & _TIME_MASK) << _USES_BITS | uses

    def uses_of(self, name_hash: int) -> tuple[int, int]:
        """Return (uses, time of the last use) of an evicted name; zeros if it is unknown."""
        place = name_hash & self._mask
        item = self._pieces[place >> _PIECE_BITS][place & _PIECE_MASK]
        if not item or item >> _TIME_BITS + _USES_BITS != name_hash >> 64 - _HASH_BITS:
            return 0, 0
        return item & USES_MAX, item >> _USES_BITS & _TIME_MASK


SLACK = 64
"""Stale names or runs that are tolerated before a cleanup."""


class Owner:
    """A conversation that used names."""

    __slots__ = ("__weakref__", "is_over", "tip")

    def __init__(self) -> None:
        self.is_over = False
        self.tip: KeyNode | None = None  # the last present name of its last prompt


SHARED = Owner()
"""Placeholder for several conversations, or for none."""


class KeyNode:
    """A name that is present, or the parent of a present name."""

    __slots__ = ("children", "name", "name_hash", "owner", "parent", "run", "time", "uses")

    name_hash: int
    uses: int
    time: int
    """Time of the last use. `name_hash`, `uses` and `time` are set only once the name has been present."""

    def __init__(self, name: bytes) -> None:
        self.name = name
        self.parent: KeyNode | None = None
        self.children = 0  # number of present children
        self.run: KeyRun | None = None  # run of the last use; None when the name is not present
        self.owner: Owner | None = None  # the conversation that used the name


NO_NODE = KeyNode(b"")
"""Sentinel for no adjacent node."""


class KeyRun:
    """Names of one kind that one prompt used. They age together.

    Each name is the parent of the next, so the last name is evicted first. Names that were used again or removed may
    still be in `entries`, but their `run` differs.
    """

    __slots__ = ("count", "entries", "kind", "number", "owner", "time")

    def __init__(self, kind: int, owner: Owner | None, time: int, entries: list[KeyNode]) -> None:
        self.kind = kind
        self.owner = owner
        self.time = time
        self.entries = entries
        self.count = len(entries)  # names whose `run` is this
        self.number = 0  # its number in a heap; 0 when it is in none

    def last(self) -> KeyNode:
        """Return the last name. The run must not be empty."""
        entries = self.entries
        while entries[-1].run is not self:
            entries.pop()
        return entries[-1]

    def drop_one(self) -> None:
        """Record that one name was used again or removed."""
        self.count -= 1
        if 2 * self.count + SLACK < len(self.entries):
            self.entries = [entry for entry in self.entries if entry.run is self]


CURRENT = KeyRun(0, None, 0, [])
"""Sentinel for the run of the current prompt, whose kinds are not known yet."""


_GHOSTS = 8
"""Number of evicted names that are remembered, as a multiple of the names present."""
_LEARN_EVERY = 1 / 2
"""Number of uses between two trainings, as a share of the names present. It is smaller at first."""
_LEARN_USES_MIN = 512
_DOUBT_USES = 50
"""Sets the bonus on the value of new prompts while little has been learned. The bonus halves as the uses double."""
_RANK_EVERY = 1 / 4
"""Every run is revalued once in this many uses, as a share of the names present, because runs age."""
_RANK_AT_ONCE = 64
"""Maximum number of runs revalued in one call, so that no call takes long."""
_SOME_MAX = 64
"""Number of names compared in one call when no leaf is queued."""
_DISCARDED_MAX = 128
"""Maximum number of queued runs discarded in one call, at a few microseconds each. A bulk removal leaves many."""
_STALE_AT_ONCE = 16
"""Number of stale runs revalued in one call because they appear to have the least value."""
_TIDY_AT_ONCE = 8
"""Number of runs revalued, or discarded if empty, for each run that is queued while there are too many."""

_NEW_KINDS = 12
_USE_KINDS = 4
_PAUSE_KINDS = 20
_PAUSE_BITS_MIN = 6
"""All pauses shorter than two to this power are of one kind."""
_PAUSE_OF_BITS = tuple(min(max(bits - _PAUSE_BITS_MIN, 1), _PAUSE_KINDS - 1) for bits in range(65))
"""Kind of each pause, by its number of bits."""
_KIND_OF_USES = tuple(min(max(0, uses - 1).bit_length(), _USE_KINDS - 1) for uses in range(USES_MAX + 1))
"""Kind of each number of uses, which includes the current use."""
_HINTS: dict[NextTurn | None, int] = {None: 0} | {it: place for place, it in enumerate(NextTurn, 1)}
"""Number of each hint, as part of a kind. A hint applies to names that only its conversation used."""
_OVER = _HINTS[NextTurn.NOBODY]


_Ranked = tuple[float, int, int, KeyRun]
"""(value of the run's names, time of their use, unique number, run)"""


class Adaptive:
    """Evicts the leaf with the least expected reuse. Each event costs O(log n) amortized. Training is done in steps.

    The uses of one prompt arrive in order along its chain, from either end. They get their kinds when the next prompt
    begins, because only then is it known how much of the prompt was new. Until then only the prompt's last name may be
    the victim, valued by the information so far.

    Runs are in two heaps. A run's value changes with its age and with training, so all runs are revalued periodically.
    A few runs at a time move from one heap to the other. They are taken from the end of the list, so the rest remains
    a heap. When one heap is empty, the two swap roles. The minimum is the smaller of the two tops.

    A pinned leaf at the top counts as used at that moment, because its reader uses it.
    """

    def __init__(self) -> None:
        self._entries: NameTable[KeyNode] = NameTable()
        self._size = 0  # names present
        self._model = ReuseModel(_USE_KINDS * 2, _NEW_KINDS, _PAUSE_KINDS, len(NextTurn))
        self._ghosts = Ghosts(0)  # resized on the first eviction, when the number of names is known
        self._now = 0  # uses so far
        self._prompt: list[KeyNode] = []  # names used by the current prompt
        self._above: KeyNode | None = NO_NODE  # next node, if the prompt arrives from its end
        self._below: KeyNode = NO_NODE  # parent of the next node, if the prompt arrives from its start
        self._prompt_new = 0  # names of the prompt that are neither present nor remembered
        self._prompt_pauses = (0, 0)  # kinds of the pauses of the first and the last remembered name
        self._tail = 0  # index in the prompt of its last name present
        self._tail_worth: float | None = None  # None until computed
        self._heap: list[_Ranked] = []
        self._aged: list[_Ranked] = []  # to be revalued
        self._number = 0  # number of the latest run
        self._conversations: WeakValueDictionary[str, Owner] = WeakValueDictionary()  # conversations with names in use
        self._owner: Owner | None = None  # owner of the current prompt
        self._conversation: str | None = None
        self._training: Iterator[None] | None = None
        self._trainings = 0
        self._work_at = 0  # earliest time of the next background step
        self._learn_at = 0
        self._rank_at = 0
        self._rank_now = 0  # runs still to be revalued since the last training

    def __len__(self) -> int:
        return self._size

    def added(self, use: Use) -> None:
        """Record the use that added a name. A second call counts as a touch, and adds the parent if it was unknown."""
        name, parent_name = use.name, use.parent
        entry = self._entries.get(name)
        if entry is None:
            self._entries[name] = entry = KeyNode(name)
        if entry.run is None:
            entry.name_hash = name_hash = _name_hash(name)
            entry.uses, entry.time = self._ghosts.uses_of(name_hash)
            self._size += 1
        if parent_name is not None and entry.parent is None and parent_name != name:
            parent = self._entries.get(parent_name)
            if parent is None:
                self._entries[parent_name] = parent = KeyNode(parent_name)
            entry.parent = parent
            parent.children += 1
        self._use(entry, use.conversation)

    def touched(self, use: Use) -> None:
        """Record a further use. Ignore unknown names."""
        entry = self._entries.get(use.name)
        if entry is not None and entry.run is not None:
            self._use(entry, use.conversation)

    def removed(self, name: bytes) -> None:
        """Record that `name` was removed, for any reason. Ignore unknown names."""
        entry = self._entries.get(name)
        if entry is None or entry.run is None:
            return
        run, entry.run = entry.run, None
        uses = entry.uses
        if run is CURRENT:
            self._tail_worth = None
            uses = max(1, uses - 1)
        elif run.entries[-1] is entry:
            run.entries.pop()
            run.count -= 1
        else:
            run.drop_one()
        parent = entry.parent
        if entry.owner is not None and entry.owner.tip is entry:
            entry.owner.tip = parent if parent is not None and parent.run is not None else None
        self._ghosts.remember(entry.name_hash, uses, entry.time)
        self._size -= 1
        if not entry.children:
            self._entries.pop(name)
        if parent is not None:
            entry.parent = None
            parent.children -= 1
            if not parent.children:
                self._became_leaf(parent)

    def expects(self, conversation: str, next_turn: NextTurn | None) -> None:
        """Use `next_turn` as a hint about the next turn of `conversation`.

        The names of the conversation's last prompt change their kinds, except names that others also used. When the
        conversation is over, all names that only it used change their kinds once they are revalued or become leaves.
        """
        conversation_owner = self._conversations.get(conversation)
        if conversation_owner is None:
            return
        hint = _HINTS[next_turn]
        if conversation_owner is self._owner and self._prompt:
            self._sort_prompt(hint)
        if hint == _OVER:
            conversation_owner.is_over = True
            del self._conversations[conversation]
            if conversation_owner is self._owner:
                self._conversation = self._owner = None
            self._rank_now = len(self._heap) + len(self._aged)
            self._work_at = 0
        entry, before = conversation_owner.tip, None
        for _ in range(self._size):  # bounded, because parents may form a cycle
            if entry is None or entry.owner is not conversation_owner:
                return
            run = entry.run
            if run is not None and run is not before and self._apply_hint(run, hint) and run.number:
                self._queue(run)
            entry, before = entry.parent, run

    def victim(self, is_pinned: Callable[[bytes], bool]) -> bytes | None:
        """Return the unpinned leaf with the least value without removing it; None when all leaves are pinned."""
        if not self._size:
            return None
        if self._now >= self._work_at:
            self._work()
        pinned: list[KeyRun] = []
        least = self._least(is_pinned, pinned)
        if least is None and self._prompt:
            self._sort_prompt()
            least = self._least(is_pinned, pinned)
        for run in pinned:
            # This is not a use, so the clock stands still. Otherwise pinned names would age the others.
            run.time = run.last().time = self._now
            self._queue(run)
        if least is None:
            return None if pinned else self._oldest_of_some(is_pinned)
        # The last name of the current prompt is evicted first if it has less value.
        worth = self._tail_worth
        if worth is None:
            worth = self._value_tail()
        if worth < least[0]:
            tail = self._prompt[self._tail]
            if not tail.children and not is_pinned(tail.name):  # a cycle of parents may give it a child
                return tail.name
        return least[3].entries[-1].name

    def _use(self, entry: KeyNode, conversation: str | None) -> None:
        if conversation != self._conversation or entry.run is CURRENT:
            self._begin_prompt(conversation)
        if entry is self._above:
            self._above, self._below = entry.parent, NO_NODE
        elif entry.parent is self._below:
            self._above, self._below = NO_NODE, entry
        else:
            if self._prompt:
                self._sort_prompt()
            self._above, self._below = entry.parent, entry
        self._now = now = self._now + 1
        if entry.name_hash in self._model.watched:
            self._model.used(entry.name_hash, now)
        if entry.uses:
            self._remembered(entry, now)
        else:
            entry.uses = 1
            self._prompt_new = new = self._prompt_new + 1
            if not new & (new - 1):
                self._tail_worth = None  # the kind of new prompts has changed
        run = entry.run
        if run is None:
            entry.owner = self._owner
        else:
            run.drop_one()
            if entry.owner is not self._owner:
                entry.owner = SHARED
        entry.run = CURRENT
        entry.time = now
        self._prompt.append(entry)

    def _remembered(self, entry: KeyNode, now: int) -> None:
        """Count another use of a known name, and note its pause."""
        if entry.uses < USES_MAX:
            entry.uses += 1
        pause = _PAUSE_OF_BITS[(now - entry.time).bit_length()]
        first, _ = self._prompt_pauses
        if not first:
            self._tail_worth = None
        self._prompt_pauses = first or pause, pause

    def _begin_prompt(self, conversation: str | None) -> None:
        """Begin a prompt of `conversation`."""
        if self._prompt:
            self._sort_prompt()
        if conversation == self._conversation:
            return
        self._conversation = conversation
        if conversation is None:
            self._owner = None
        else:
            # Not setdefault, because the dictionary has only weak references.
            self._owner = self._conversations.get(conversation) or Owner()
            self._conversations[conversation] = self._owner

    def _sort_prompt(self, hint: int = 0) -> None:
        """Give each name of the complete prompt a kind."""
        path, time = self._prompt, self._prompt[0].time
        is_from_start = self._above is NO_NODE
        if not is_from_start:
            path.reverse()
        first = min(self._prompt_new.bit_length(), _NEW_KINDS - 1)
        second = self._prompt_pauses[is_from_start]
        self._prompt = []
        self._above = self._below = NO_NODE
        self._prompt_new = self._tail = 0
        self._prompt_pauses = 0, 0
        self._tail_worth = None
        conversation_owner = self._owner
        if conversation_owner is not None:
            conversation_owner.tip = next((entry for entry in reversed(path) if entry.run), None)
        is_last, before = 1, -1
        end = len(path)
        while end:
            # A run has neighbors with about the same number of uses. The prompt's last name has its own kind.
            start = end - 1
            uses_kind, owner = _KIND_OF_USES[path[start].uses], path[start].owner
            while not is_last and start:
                entry = path[start - 1]
                if _KIND_OF_USES[entry.uses] != uses_kind or entry.owner is not owner:
                    break
                start -= 1
            kind = self._model.kind(uses_kind * 2 + is_last, first, second, hint if owner is conversation_owner else 0)
            run = KeyRun(kind, owner, time, path[start:end])
            if kind != before:
                # The names of a run have the same outcome, so the model watches one of them.
                self._model.watch(min(map(_name_hash_of, run.entries)), kind, time)
            # If the prompt arrived from its start, its last name was used last but counts as the oldest.
            time += end - start
            end, is_last, before = start, 0, kind
            self._make_evictable(run)

    def _make_evictable(self, run: KeyRun) -> None:
        """Make the names of `run`, which are from a complete prompt, possible victims from now on."""
        for entry in run.entries:
            if entry.run is CURRENT:
                entry.run = run
            else:
                run.count -= 1
        if run.count < len(run.entries):
            # Names that were removed meanwhile may have left leaves in the middle of the run.
            for entry in run.entries[:]:
                if entry.run is run and not entry.children:
                    self._queue(self._split_off(entry))
        if run.count and not run.last().children:
            self._queue(run)

    def _value_tail(self) -> float:
        """Return the value of the current prompt's last name, so that a prompt need not evict more valuable names.

        It is infinite for prompts that arrive from the start, where the name's child comes next. While little has been
        learned, the value is raised: keeping a worthless prompt costs its space once, but losing a useful one costs a
        miss at each turn.
        """
        prompt, tail = self._prompt, self._tail
        if self._below is not NO_NODE or not prompt:
            return inf
        while (prompt[tail].run is None or prompt[tail].children) and tail < len(prompt) - 1:
            tail += 1
        self._tail, entry = tail, prompt[tail]
        if entry.run is None or entry.children:
            return inf
        base = _KIND_OF_USES[entry.uses] * 2 + (not tail)
        kind = self._model.kind(base, min(self._prompt_new.bit_length(), _NEW_KINDS - 1), self._prompt_pauses[0])
        doubt = _DOUBT_USES * len(self._entries) / self._now
        self._tail_worth = self._model.value(kind, 0) * (1 + doubt)
        return self._tail_worth

    def _least(self, is_pinned: Callable[[bytes], bool], pinned: list[KeyRun]) -> _Ranked | None:
        """Return the run whose last name has the least value. Add pinned runs found on the way to `pinned`.

        Return None if no such run is queued, or if this call has already discarded more than `_DISCARDED_MAX` stale
        runs. The next calls discard the rest.
        """
        tries, stop = _STALE_AT_ONCE, len(self._heap) + len(self._aged) + len(pinned) - _DISCARDED_MAX
        while True:
            heap, aged = self._heap, self._aged
            is_aged = bool(aged) and (not heap or (aged[0] < heap[0] and tries > 0))
            if is_aged:
                heap = aged
            if not heap or len(self._heap) + len(self._aged) + len(pinned) < stop:
                return None
            number, run = heap[0][2:]
            if number != run.number:
                heappop(heap)  # stale, because the run was queued again
            elif not run.count or (entry := run.last()).children:
                heappop(heap)
                run.number = 0  # queued again when the last child of its last name is removed
            elif is_pinned(entry.name):
                if run.count > 1:
                    run = self._split_off(entry)
                else:
                    heappop(heap)
                pinned.append(run)
            elif not is_aged:
                return heap[0]
            else:
                # The value is old, so revalue the run.
                heappop(heap)
                self._retire(run)
                heappush(self._heap, (self._model.value(run.kind, self._now - run.time), run.time, number, run))
                tries -= 1

    def _became_leaf(self, entry: KeyNode) -> None:
        """Queue `entry`, whose last child was removed."""
        run = entry.run
        if run is None:
            self._entries.pop(entry.name)
        elif run is CURRENT:
            pass  # queued when the prompt is complete
        elif run.entries[-1] is not entry and run.last() is not entry:
            self._queue(self._split_off(entry))
        elif not run.number:
            self._queue(run)

    def _split_off(self, entry: KeyNode) -> KeyRun:
        """Move `entry` to its own run."""
        old = entry.run
        assert old is not None, "a removed name is queued"
        entry.run = run = KeyRun(old.kind, old.owner, old.time, [entry])
        old.drop_one()
        return run

    def _queue(self, run: KeyRun) -> None:
        self._retire(run)
        self._number += 1
        run.number = self._number
        heappush(self._heap, (self._model.value(run.kind, self._now - run.time), run.time, self._number, run))
        if len(self._heap) + len(self._aged) > 2 * self._size + SLACK:
            self._rank(_TIDY_AT_ONCE)

    def _retire(self, run: KeyRun) -> None:
        """If the only conversation of `run` has ended, apply the hint `NextTurn.NOBODY` to the kind of `run`."""
        if run.owner is not None and run.owner.is_over:
            self._apply_hint(run, _OVER)
            run.owner = None

    def _apply_hint(self, run: KeyRun, hint: int) -> bool:
        """Apply a hint about the only conversation of `run` to its kind. Return whether that changed its kind."""
        if run is CURRENT or (kind := self._model.hinted(run.kind, hint)) == run.kind:
            return False
        watch = self._model.watch if self._model.is_hinted(run.kind) else self._model.watch_hinted
        run.kind, run.time = kind, self._now
        watch(min(map(_name_hash_of, run.entries)), kind, self._now)
        self._model.value(kind, 0)
        return True

    def _work(self) -> None:
        """Do one background step of training or revaluing."""
        now = self._now
        self._tail_worth = None
        if self._training is not None:
            if next(self._training, True):
                self._training = None
                self._rank_now = len(self._heap) + len(self._aged)
        elif now >= self._learn_at:
            size = self._size
            self._trainings += 1
            self._learn_at = now + max(_LEARN_USES_MIN, int(size * _LEARN_EVERY * min(1.0, self._trainings / 4)))
            if len(self._ghosts) < _GHOSTS * size / 2:
                self._ghosts = Ghosts(_GHOSTS * size)
            self._training = self._model.training(now, size)
        elif now >= self._rank_at or self._rank_now > 0:
            self._rank(_RANK_AT_ONCE)
            self._rank_now -= _RANK_AT_ONCE
            runs = len(self._heap) + len(self._aged)
            self._rank_at = now + int(_RANK_EVERY * self._size * min(1.0, _RANK_AT_ONCE / (runs + 1)))
        is_busy = self._training is not None or self._rank_now > 0
        self._work_at = 0 if is_busy else min(self._learn_at, self._rank_at)

    def _rank(self, count: int) -> None:
        """Revalue `count` runs."""
        if not self._aged:
            self._aged, self._heap = self._heap, self._aged
        items = self._aged[-count:]
        del self._aged[-count:]
        kept: list[_Ranked] = []
        for item in items:
            run = item[3]
            if item[2] != run.number:
                continue  # stale, because the run was queued again
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

    def _oldest_of_some(self, is_pinned: Callable[[bytes], bool]) -> bytes | None:
        """Return the oldest of some unpinned names, a leaf if possible, when no leaf is found.

        Every name can have a child only if parents form a cycle. A damaged index may contain such links, and without
        this method nothing could be evicted again.
        """
        free = (it for it in self._entries.values() if it.run is not None and not is_pinned(it.name))
        some = islice(free, _SOME_MAX)
        oldest = min(some, key=lambda entry: (entry.children > 0, entry.time), default=None)
        return None if oldest is None else oldest.name


_name_hash_of = attrgetter("name_hash")


def _name_hash(name: bytes) -> int:
    """Return a 64-bit hash. Names are usually digests, but need not be."""
    return int.from_bytes(name[-8:]) * 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF
