"""How soon a use is likely to be followed by another, by kind of use and by age, learned from the stream itself.

Ages count uses of any name: nothing here knows bytes, seconds or tokens. They are sorted into buckets, two for each
doubling. For each bucket two things are added up: how many watched uses were followed by another at such an age, and
how long uses were watched at such an age. Their ratio is a rate. Whoever is watched no longer, for whatever reason,
has told what it could; nothing is waited for.

A kind has three features: a base, and two more that are learned apart from one another given the base. What each of
the two says, as a factor to the rate of its base, is multiplied: so that few uses teach something about many kinds. A
hint is a fourth, of a kind that somebody gave one; to other kinds it makes no difference, though their base learns from
these uses, too.
"""

from array import array
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[Any]

_FIRST_END = 16
ENDS = tuple(round(_FIRST_END * 2 ** (step / 2)) for step in range(45))
"""Ages at which buckets end; one more has no end."""
BUCKETS = len(ENDS) + 1
WATCHED_MAX = 1 << 14
"""Uses that are watched at once; the oldest is watched no longer when there are more."""
_HORIZON = 8
"""When the watched span fewer uses than so many times the names held, half of the names are watched from then on."""
_DOUBT = 1.0
"""Uses that it takes to weigh as much as what is expected without them."""
_FORGET = 64.0
"""After so many times the names held, what was learned weighs half."""
_FADE = 0.35
"""The rate in a bucket that nobody has reached yet, against the one before: a guess on the side of LRU."""
_FIRST_RATE = 0.01 / _FIRST_END
_FACTOR_MAX = 8.0
"""A feature raises or lowers a rate so many times at most."""
_HINT_FACTOR_MAX = 64.0
"""A hint does: it may say that a name is dead."""

_AGE_MAX = 64
"""Ages above so many times the names held are not told apart."""
_DONE_MAX = 256
"""Outcomes that wait to be counted; so many are counted at once."""
_OPEN_AT_ONCE = 2048
"""Uses still watched that one step of a lesson looks at."""
_EARLIER = 1 << 63
"""Told from its mark, by this bit, is a name whose watch goes on beside a later one."""
_KINDS_AT_ONCE = 12
"""Kinds whose value one step of a lesson works out."""

_ENDS: Numbers = np.array(ENDS)
_STARTS: Numbers = np.array((0, *ENDS))
_BEYOND: Numbers = 0.5 ** np.arange(1, BUCKETS + 2)
_WIDTHS: Numbers = np.diff(np.array((0, *ENDS, 2 * ENDS[-1])))


class ReuseModel:
    """Counts outcomes of uses, and turns them into the value of a name of each kind and age.

    A name is known here by its mark, a 64-bit hash of it. Every event costs O(1) amortised; what is more, a lesson, is
    done in steps, of which none takes long, however many names there are.

    Args:
        bases: how many values the base of a kind has.
        firsts: how many the first of the other two features has.
        seconds: how many the second has.
        hints: how many different hints there are.
    """

    def __init__(self, bases: int, firsts: int, seconds: int, hints: int = 0) -> None:
        self._bases, self._firsts, self._seconds, self._hints = bases, firsts, seconds, hints
        self._unhinted = bases * firsts * seconds
        """Kinds without a hint; they come first."""
        self._hint_rows = bases * (1 + firsts + seconds)
        self._rows = self._hint_rows + bases * hints
        """Rows of the tables: for each base, for each base and first, base and second, base and hint."""
        self._again: Numbers = np.zeros((self._rows, BUCKETS))
        self._ended: Numbers = np.zeros((self._rows, BUCKETS))
        self._inside: Numbers = np.zeros((self._rows, BUCKETS))
        """Followed by another in this bucket; watched until this bucket; time for which the latter were in it."""
        self._kinds = array("q", [-1]) * WATCHED_MAX  # of those watched, a ring; -1 is a free place
        self._times = array("q", [-1]) * WATCHED_MAX
        self._marks = array("Q", [0]) * WATCHED_MAX
        self._next = 0
        self.watched: dict[int, int] = {}
        """Marks, with their places in the ring."""
        self._done: tuple[array[int], array[int], array[int]] = (array("q"), array("q"), array("q"))
        """Kind, age, and 1 if another followed, of those whose watch has ended and who are not counted yet."""
        self._sample_mask = 0
        self._held = 0
        self._top = BUCKETS  # buckets that are told apart
        self._learned_at = 0
        self._rates: tuple[Numbers, Numbers, Numbers, Numbers] | None = None
        self._known_kinds = kinds = self._unhinted * (1 + hints)
        self._values: Numbers = np.zeros((kinds, BUCKETS + 1))
        """By kind, at the start of each bucket, and after the last."""
        self._is_known: Numbers = np.zeros(kinds, np.bool_)
        """By kind, whether `_values` has it: those that were ever asked for."""

    def __len__(self) -> int:
        return len(self.watched)

    def kind(self, base: int, first: int, second: int, hint: int = 0) -> int:
        """The number of a kind; 0 is no hint."""
        return ((hint * self._bases + base) * self._firsts + first) * self._seconds + second

    def hinted(self, kind: int, hint: int) -> int:
        """The kind that differs from `kind` in the hint only."""
        return kind % self._unhinted + hint * self._unhinted

    def is_hinted(self, kind: int) -> bool:
        """Whether it has a hint."""
        return kind >= self._unhinted

    def used(self, mark: int, now: int) -> None:
        """The name of `mark` is used: that is the outcome of its use before."""
        place = self.watched.pop(mark, None)
        if place is not None:
            self._end(place, now, 1)
            earlier = self.watched.pop(mark ^ _EARLIER, None)
            if earlier is not None:
                self._end(earlier, now, 1)

    def watch(self, mark: int, kind: int, time: int) -> None:
        """The use at `time` was of `kind`. Times may not go back."""
        if mark & self._sample_mask:
            return
        place = self._next
        self._next = (place + 1) % WATCHED_MAX
        if not place and self._times[0] >= 0 and time - self._times[0] < _HORIZON * self._held:
            self._sample_mask = 2 * self._sample_mask + 1
        if self._kinds[place] >= 0:
            self.watched.pop(self._marks[place], None)
            self._end(place, time, 0)
        before = self.watched.get(mark)
        if before is not None:
            self._end(before, time, 0)
        self._kinds[place], self._times[place], self._marks[place] = kind, time, mark
        self.watched[mark] = place

    def watch_too(self, mark: int, kind: int, time: int) -> None:
        """At `time` is known that the use was of `kind`, too: what follows counts for both, for each from its own time.

        If the first watch ended here, its kind would learn nothing of what follows, since hints come before reuses. The
        second one teaches about its hint only: what its kind has in common with others is counted from the use.
        """
        if mark & self._sample_mask:
            return
        place = self.watched.pop(mark, None)
        if place is not None:
            older = self.watched.get(mark ^ _EARLIER)
            if older is not None:
                self._end(older, time, 0)
            self._marks[place] = mark ^ _EARLIER
            self.watched[mark ^ _EARLIER] = place
        self.watch(mark, kind + self._known_kinds if place is not None else kind, time)

    def learn(self, now: int, held: int) -> None:
        """Take account of all that happened until `now`; the place holds `held` names."""
        for _ in self.lesson(now, held):
            pass

    def lesson(self, now: int, held: int) -> Iterator[None]:
        """The same in steps. Uses may be told between two of them; they count in the next lesson."""
        self._held = held
        self._top = min(BUCKETS, bisect_right(ENDS, _AGE_MAX * held) + 1)
        self._count_done()
        share = 0.5 ** ((now - self._learned_at) / (_FORGET * max(1, held)))
        self._learned_at = now
        self._again *= share
        self._ended *= share
        self._inside *= share
        again, ended, inside = self._again.copy(), self._ended.copy(), self._inside.copy()
        all_kinds, all_times = np.array(self._kinds, np.int64), np.array(self._times, np.int64)
        yield
        for start in range(0, WATCHED_MAX, _OPEN_AT_ONCE):
            kinds, times = (column[start : start + _OPEN_AT_ONCE] for column in (all_kinds, all_times))
            is_open = kinds >= 0
            if is_open.any():
                self._tally(kinds[is_open], np.maximum(1, now - times[is_open]), ended, inside)
                yield
        yield from self._learn_rates(again, ended, inside)
        asked = np.flatnonzero(self._is_known)
        for start in range(0, len(asked), _KINDS_AT_ONCE):
            self._know(asked[start : start + _KINDS_AT_ONCE])
            yield

    def value(self, kind: int, age: int) -> float:
        """Reuses for the time that a name is kept, if for as long as pays best.

        That is the highest ratio, over all ages at which one could give up, of the probability of a reuse until then to
        the time until either (Gittins' index). 0 for all before the first lesson.
        """
        if not self._is_known.item(kind):
            self._is_known[kind] = True
            self._know(np.array([kind]))
        if not age:
            return self._values.item(kind, 0)
        bucket = bisect_right(ENDS, age)
        if bucket == BUCKETS - 1:
            return self._values.item(kind, bucket) * ENDS[-1] / age
        start = ENDS[bucket - 1] if bucket else 0
        share = (age - start) / (ENDS[bucket] - start)
        return self._values.item(kind, bucket) * (1 - share) + self._values.item(kind, bucket + 1) * share

    def values(self, kinds: Sequence[int], ages: Sequence[int]) -> list[float]:
        """The same for many at once, each of a kind that `value` was asked for."""
        kind, age = np.array(kinds, np.int64), np.array(ages, np.int64)
        bucket = _ENDS.searchsorted(age, "right")
        share = np.minimum(1.0, (age - _STARTS[bucket]) / _WIDTHS[bucket])
        value = self._values[kind, bucket] * (1 - share) + self._values[kind, bucket + 1] * share
        is_last = bucket == BUCKETS - 1
        value[is_last] = self._values[kind[is_last], BUCKETS - 1] * ENDS[-1] / age[is_last]
        return value.tolist()

    def _end(self, place: int, now: int, is_again: int) -> None:
        kinds, ages, again = self._done
        kinds.append(self._kinds[place])
        ages.append(max(1, now - self._times[place]))
        again.append(is_again)
        self._kinds[place] = -1
        if len(kinds) >= _DONE_MAX:
            self._count_done()

    def _count_done(self) -> None:
        kinds, ages, again = (np.array(column, np.int64) for column in self._done)
        self._done = (array("q"), array("q"), array("q"))
        uses, places = self._tally(kinds, ages, self._ended, self._inside)
        self._again += np.bincount(places, again[uses], self._again.size).reshape(self._again.shape)

    def _tally(self, kinds: Numbers, ages: Numbers, ended: Numbers, inside: Numbers) -> tuple[Numbers, Numbers]:
        """Add, for each row and bucket, how many have an age in it, and for how long they were in it.

        Returns:
            Which use was counted, and where; each counts in three rows, with a hint in four, with a late one in one.
        """
        hinted = np.flatnonzero(kinds >= self._unhinted)
        first = np.flatnonzero(kinds < self._known_kinds)
        uses = np.concatenate([first, first, first, hinted])
        rows = np.concatenate([*self._rows_of(kinds[first]), self._hint_rows_of(kinds[hinted] % self._known_kinds)])
        bucket = _ENDS.searchsorted(ages, "right")
        places = rows * BUCKETS + bucket[uses]
        ended += np.bincount(places, minlength=ended.size).reshape(ended.shape)
        into = (ages - _STARTS[bucket])[uses]
        inside += np.bincount(places, into, inside.size).reshape(inside.shape)
        return uses, places

    def _rows_of(self, kinds: Numbers) -> tuple[Numbers, Numbers, Numbers]:
        plain = kinds % self._unhinted
        base = plain // (self._firsts * self._seconds)
        first = self._bases + plain // self._seconds
        return base, first, self._bases * (1 + self._firsts) + base * self._seconds + plain % self._seconds

    def _hint_rows_of(self, kinds: Numbers) -> Numbers:
        """Of kinds that have one."""
        base = kinds % self._unhinted // (self._firsts * self._seconds)
        return self._hint_rows + base * self._hints + kinds // self._unhinted - 1

    def _learn_rates(self, again: Numbers, ended: Numbers, inside: Numbers) -> Iterator[None]:
        later = ended[:, ::-1].cumsum(1)[:, ::-1] - ended  # these have been in the whole bucket
        watched = inside + later * _WIDTHS
        average = _average(again[: self._bases].sum(0), watched[: self._bases].sum(0))
        base = _shrunk(again[: self._bases], watched[: self._bases], average)
        starts = (self._bases, self._bases * (1 + self._firsts), self._hint_rows)
        factors: list[Numbers] = []
        for start, end in pairwise(starts):
            yield
            factors.append(_factors(again[start:end], watched[start:end], base, _FACTOR_MAX))
        hints = slice(self._hint_rows, self._rows)
        factors.append(_factors(again[hints], watched[hints], base, _HINT_FACTOR_MAX))
        self._rates = base, factors[0], factors[1], factors[2]
        yield

    def _know(self, kinds: Numbers) -> None:
        if self._rates is None:
            return
        base, first, second = self._rows_of(kinds)
        rates = self._rates[0][base] * self._rates[1][first - self._bases]
        rates *= self._rates[2][second - self._bases * (1 + self._firsts)]
        hinted = np.flatnonzero(kinds >= self._unhinted)
        rates[hinted] *= self._rates[3][self._hint_rows_of(kinds[hinted]) - self._hint_rows]
        top = self._top
        kept = np.exp(-rates[:, :top] * _WIDTHS[:top])
        left = np.ones((len(kinds), top + 1))
        left[:, 1:] = kept.cumprod(1)
        time = np.zeros_like(left)
        time[:, 1:] = (left[:, :-1] * (1 - kept) / rates[:, :top]).cumsum(1)
        reused = left[:, :-1, None] - left[:, None, 1:]  # between the starts of two buckets; below 0 for who goes back
        spent = time[:, None, 1:] - time[:, :-1, None]
        reused /= np.maximum(spent, 1e-9, out=spent)
        self._values[kinds, :top] = reused.max(2)
        # Nobody has seen the ages beyond: taken together, it is worth less and less to wait.
        self._values[kinds, top:] = self._values[kinds, top - 1, None] * _BEYOND[: BUCKETS + 1 - top]


def _average(again: Numbers, watched: Numbers) -> Numbers:
    """The rate in each bucket, over all kinds."""
    rates = np.empty(BUCKETS)
    guess = _FIRST_RATE
    for bucket in range(BUCKETS):
        if bucket:
            guess = rates[bucket - 1] * _FADE
        rates[bucket] = (again[bucket] + _DOUBT) / (watched[bucket] + _DOUBT / guess)
    return rates


def _factors(again: Numbers, watched: Numbers, base: Numbers, most: float) -> Numbers:
    """By how much rows, several for each base, differ from it."""
    above = base.repeat(len(again) // len(base), 0)
    return (_shrunk(again, watched, above) / above).clip(1 / most, most)


def _shrunk(again: Numbers, watched: Numbers, above: Numbers) -> Numbers:
    """Rates of rows: what is expected from `above`, times the factor by which a row differs, until it knows better."""
    factor = (again.sum(1) + _DOUBT) / ((watched * above).sum(1) + _DOUBT)
    expected = factor[:, None] * above
    return (again + _DOUBT) / (watched + _DOUBT / expected)
