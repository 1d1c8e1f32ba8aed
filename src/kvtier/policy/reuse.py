"""Learns the value of keeping a name from the stream of uses, by the kind and the age of the name's last use.

An age is a number of uses of any names, not of bytes, seconds or tokens. Ages fall into buckets, two for each doubling.
For each bucket the model counts the watched uses after which the name was used again at such an age. It also counts the
time for which uses were watched at such an age. The ratio is the rate of reuse. A watch counts when it ends, even
without a reuse.

A kind has three features: a base, and two more whose effects are learned separately for each base. The effects are
factors on the rate of the base, so that few uses inform the values of many kinds. A hint is a fourth feature of some
kinds. It does not affect other kinds, but their base also learns from hinted uses.
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
"""Upper bounds of the age buckets. One more bucket is unbounded."""
BUCKETS = len(ENDS) + 1
WATCHED_MAX = 1 << 14
"""Maximum number of uses watched at the same time. Beyond that, the oldest watch ends."""
_HORIZON = 8
"""Minimum span of the watched uses, as a multiple of the names present. Below it, the share of watched names is halved.
"""
_PRIOR_USES = 1.0
"""Weight of the prior, in uses."""
_HALF_LIFE = 64.0
"""Half-life of the learned counts, as a multiple of the names present."""
_PRIOR_DECAY = 0.35
"""Prior rate of a bucket relative to the one before. The rate decreases with age, as LRU assumes."""
_FIRST_RATE = 0.01 / _FIRST_END
_FACTOR_MAX = 8.0
"""Largest factor of a feature."""
_HINT_FACTOR_MAX = 64.0
"""Largest factor of a hint, which may say that a name is dead."""

_AGE_MAX = 64
"""All ages above this multiple of the names present are in one bucket."""
_DONE_MAX = 256
"""Number of outcomes that are buffered and counted together."""
_OPEN_AT_ONCE = 2048
"""Number of open watches examined in one step of a training."""
_EARLIER = 1 << 63
"""Bit that is flipped in a name's hash to make the key of the name's earlier watch."""
_KINDS_AT_ONCE = 12
"""Number of kinds whose values one step of a training computes."""

_ENDS: Numbers = np.array(ENDS)
_STARTS: Numbers = np.array((0, *ENDS))
_BEYOND: Numbers = 0.5 ** np.arange(1, BUCKETS + 2)
_WIDTHS: Numbers = np.diff(np.array((0, *ENDS, 2 * ENDS[-1])))


class ReuseModel:
    """Counts outcomes of uses, and derives the value of a name from its kind and age.

    Names are identified by a 64-bit hash. Each event costs O(1) amortized. Training is done in short steps, regardless
    of the number of names.

    Args:
        bases: number of values of the base feature.
        firsts: number of values of the second feature.
        seconds: number of values of the third feature.
        hints: number of different hints.
    """

    def __init__(self, bases: int, firsts: int, seconds: int, hints: int = 0) -> None:
        self._bases, self._firsts, self._seconds, self._hints = bases, firsts, seconds, hints
        self._unhinted = bases * firsts * seconds
        """Number of kinds without a hint. These kinds come first."""
        self._hint_rows = bases * (1 + firsts + seconds)
        self._rows = self._hint_rows + bases * hints
        """Number of table rows: one for each base, each base and first, each base and second, each base and hint."""
        self._again: Numbers = np.zeros((self._rows, BUCKETS))
        self._ended: Numbers = np.zeros((self._rows, BUCKETS))
        self._inside: Numbers = np.zeros((self._rows, BUCKETS))
        """Tables by row and bucket: uses followed by another, uses whose watch ended, and time watched."""
        self._kinds = array("q", [-1]) * WATCHED_MAX  # kinds of open watches, a ring buffer; -1 is free
        self._times = array("q", [-1]) * WATCHED_MAX
        self._hashes = array("Q", [0]) * WATCHED_MAX
        self._next = 0
        self.watched: dict[int, int] = {}
        """Positions in the ring, by hash."""
        self._done: tuple[array[int], array[int], array[int]] = (array("q"), array("q"), array("q"))
        """Kinds, ages, and 1 if another use followed, for ended watches that are not counted yet."""
        self._sample_mask = 0
        self._present = 0
        self._top = BUCKETS  # buckets in use
        self._learned_at = 0
        self._rates: tuple[Numbers, Numbers, Numbers, Numbers] | None = None
        self._known_kinds = kinds = self._unhinted * (1 + hints)
        self._values: Numbers = np.zeros((kinds, BUCKETS + 1))
        """Values by kind, at the start of each bucket, and after the last bucket."""
        self._has_values: Numbers = np.zeros(kinds, np.bool_)
        """Whether the values of each kind have been requested."""

    def kind(self, base: int, first: int, second: int, hint: int = 0) -> int:
        """Return the number of a kind. Hint 0 means no hint."""
        return ((hint * self._bases + base) * self._firsts + first) * self._seconds + second

    def hinted(self, kind: int, hint: int) -> int:
        """Return `kind` with another hint."""
        return kind % self._unhinted + hint * self._unhinted

    def is_hinted(self, kind: int) -> bool:
        """Return whether `kind` has a hint."""
        return kind >= self._unhinted

    def used(self, name_hash: int, now: int) -> None:
        """Record that the name was used again, which ends its watch."""
        place = self.watched.pop(name_hash, None)
        if place is not None:
            self._end(place, now, 1)
            earlier = self.watched.pop(name_hash ^ _EARLIER, None)
            if earlier is not None:
                self._end(earlier, now, 1)

    def watch(self, name_hash: int, kind: int, time: int) -> None:
        """Watch a use of `kind` at `time`. Times must not decrease."""
        if name_hash & self._sample_mask:
            return
        place = self._next
        self._next = (place + 1) % WATCHED_MAX
        if not place and self._times[0] >= 0 and time - self._times[0] < _HORIZON * self._present:
            self._sample_mask = 2 * self._sample_mask + 1
        if self._kinds[place] >= 0:
            self.watched.pop(self._hashes[place], None)
            self._end(place, time, 0)
        before = self.watched.get(name_hash)
        if before is not None:
            self._end(before, time, 0)
        self._kinds[place], self._times[place], self._hashes[place] = kind, time, name_hash
        self.watched[name_hash] = place

    def watch_hinted(self, name_hash: int, kind: int, time: int) -> None:
        """Watch a use that got a hint at `time`. Its outcome counts for the kinds with and without the hint.

        If the first watch ended here, its kind would learn nothing from later uses, because hints come before reuses.
        The second watch counts only for the hint.
        """
        if name_hash & self._sample_mask:
            return
        place = self.watched.pop(name_hash, None)
        if place is not None:
            older = self.watched.get(name_hash ^ _EARLIER)
            if older is not None:
                self._end(older, time, 0)
            self._hashes[place] = name_hash ^ _EARLIER
            self.watched[name_hash ^ _EARLIER] = place
        self.watch(name_hash, kind + self._known_kinds if place is not None else kind, time)

    def training(self, now: int, present: int) -> Iterator[None]:
        """Train in steps on everything up to `now`, for a policy with `present` names.

        Uses between two steps count in the next training.
        """
        self._present = present
        self._top = min(BUCKETS, bisect_right(ENDS, _AGE_MAX * present) + 1)
        self._count_done()
        share = 0.5 ** ((now - self._learned_at) / (_HALF_LIFE * max(1, present)))
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
                self._accumulate(kinds[is_open], np.maximum(1, now - times[is_open]), ended, inside)
                yield
        yield from self._learn_rates(again, ended, inside)
        asked = np.flatnonzero(self._has_values)
        for start in range(0, len(asked), _KINDS_AT_ONCE):
            self._compute_values(asked[start : start + _KINDS_AT_ONCE])
            yield

    def value(self, kind: int, age: int) -> float:
        """Return the probability of reuse per unit of time that a name is kept, for the best age at which to give up.

        This is the Gittins index: the maximum, over all ages at which to give up, of the probability of a reuse by then
        divided by the expected time until either event. It is 0 before the first training.
        """
        if not self._has_values.item(kind):
            self._has_values[kind] = True
            self._compute_values(np.array([kind]))
        if not age:
            return self._values.item(kind, 0)
        bucket = bisect_right(ENDS, age)
        if bucket == BUCKETS - 1:
            return self._values.item(kind, bucket) * ENDS[-1] / age
        start = ENDS[bucket - 1] if bucket else 0
        share = (age - start) / (ENDS[bucket] - start)
        return self._values.item(kind, bucket) * (1 - share) + self._values.item(kind, bucket + 1) * share

    def values(self, kinds: Sequence[int], ages: Sequence[int]) -> list[float]:
        """Return `value` for many kinds and ages. Each kind must have been passed to `value` before."""
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
        uses, places = self._accumulate(kinds, ages, self._ended, self._inside)
        self._again += np.bincount(places, again[uses], self._again.size).reshape(self._again.shape)

    def _accumulate(self, kinds: Numbers, ages: Numbers, ended: Numbers, inside: Numbers) -> tuple[Numbers, Numbers]:
        """Add to each row and bucket the uses whose age is in it, and the time that they spent in it.

        Returns:
            The index of each counted use, and its position in the tables. A use counts in three rows, a hinted use in
            four, and a second watch (`watch_hinted`) in one.
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
        """Return the rows of the hints of hinted kinds."""
        base = kinds % self._unhinted // (self._firsts * self._seconds)
        return self._hint_rows + base * self._hints + kinds // self._unhinted - 1

    def _learn_rates(self, again: Numbers, ended: Numbers, inside: Numbers) -> Iterator[None]:
        later = ended[:, ::-1].cumsum(1)[:, ::-1] - ended  # uses that lasted through the whole bucket
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

    def _compute_values(self, kinds: Numbers) -> None:
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
        reused = (
            left[:, :-1, None] - left[:, None, 1:]
        )  # between the starts of two buckets; negative pairs are never the maximum
        spent = time[:, None, 1:] - time[:, :-1, None]
        reused /= np.maximum(spent, 1e-9, out=spent)
        self._values[kinds, :top] = reused.max(2)
        # At ages without data the value of waiting decays.
        self._values[kinds, top:] = self._values[kinds, top - 1, None] * _BEYOND[: BUCKETS + 1 - top]


def _average(again: Numbers, watched: Numbers) -> Numbers:
    """Return the rate of each bucket over all kinds."""
    rates = np.empty(BUCKETS)
    guess = _FIRST_RATE
    for bucket in range(BUCKETS):
        if bucket:
            guess = rates[bucket - 1] * _PRIOR_DECAY
        rates[bucket] = (again[bucket] + _PRIOR_USES) / (watched[bucket] + _PRIOR_USES / guess)
    return rates


def _factors(again: Numbers, watched: Numbers, base: Numbers, most: float) -> Numbers:
    """Return the factors by which rows differ from their base."""
    above = base.repeat(len(again) // len(base), 0)
    return (_shrunk(again, watched, above) / above).clip(1 / most, most)


def _shrunk(again: Numbers, watched: Numbers, above: Numbers) -> Numbers:
    """Return the rates of rows, shrunk toward `above` times the row's own factor."""
    factor = (again.sum(1) + _PRIOR_USES) / ((watched * above).sum(1) + _PRIOR_USES)
    expected = factor[:, None] * above
    return (again + _PRIOR_USES) / (watched + _PRIOR_USES / expected)
