"""How likely a use is to be followed by another, by kind of use and by age, learned from the stream itself.

Ages count uses, and are sorted into buckets in units of the number of names the place holds: nothing here knows bytes,
seconds or tokens. For each kind and bucket two counts are kept: how many watched uses were followed by another within
the bucket, and how many passed its end without. Their ratio is a hazard. Names that left go on being watched, so the
model also sees what keeping them longer would have brought.
"""

from bisect import bisect_right
from collections.abc import Iterable

ENDS = (1 / 8, 1 / 4, 1 / 2, 0.7, 1.0, 1.4, 2.0, 2.8, 4.0, 8.0, 16.0, 32.0, 64.0)
"""Ages at which buckets end, in names held: close together where recency alone would draw the line."""
BUCKETS = len(ENDS)
WATCHED_MAX = 1 << 15
"""Uses that are watched at once; when there are more, half of the names are watched no longer."""
_DOUBT = 30.0
"""Uses that it takes for a kind's own experience to weigh as much as what it is expected to be like."""
_DOUBT_OVERALL = 3.0
"""The same for the factor between a kind and the average."""
_FORGET = 64.0
"""After so many times the names held, what was learned weighs half."""
_FADE = 0.5
"""How likely a reuse is at an age that nobody has reached yet, against the age before: a guess on the side of LRU."""
_HAZARD_MAX = 0.95


class _Use:
    """A use of a sampled name, and after how many uses of any name the next one came."""

    __slots__ = ("age", "kind", "mark", "names", "time")

    def __init__(self, mark: int, kind: int, time: int, names: int) -> None:
        self.mark = mark
        self.kind = kind
        self.time = time
        self.names = names
        self.age = 0  # not used again yet


class ReuseModel:
    """Counts outcomes of uses, and turns them into the value of a name of each kind and age.

    A name is known here by its mark, a 64-bit hash of it. Every event costs O(1) amortised.

    Args:
        kinds: how many kinds of uses there are.
    """

    def __init__(self, kinds: int) -> None:
        self._again = [[0.0] * (BUCKETS + 1) for _ in range(kinds)]
        self._passed = [[0.0] * (BUCKETS + 1) for _ in range(kinds)]
        self._uses: list[_Use] = []  # in the order of their times
        self._reached = [0] * (BUCKETS + 1)  # for each bucket, how many of `_uses` have passed its end
        self._open: dict[int, _Use] = {}  # by mark: the latest use, not followed by another yet
        self._sample_mask = 0
        self._learned_at = 0
        self.ends = [2.0**62 * end for end in ENDS]
        """Ages at which buckets end; the last, number `BUCKETS`, does not. Nobody is old before the first `learn`."""

    def __len__(self) -> int:
        return len(self._uses)

    def used(self, mark: int, now: int) -> None:
        """The name of `mark` is used: that is the outcome of its use before."""
        use = self._open.pop(mark, None)
        if use is not None:
            use.age = max(1, now - use.time)

    def watch(self, mark: int, kind: int, time: int, names: int) -> None:
        """The use at `time` was of `kind`; it stands for so many `names`. Times may not go back."""
        if mark & self._sample_mask:
            return
        if len(self._uses) >= WATCHED_MAX:
            self._watch_fewer()
        use = _Use(mark, kind, time, names)
        self._uses.append(use)
        self._open[mark] = use

    def bucket(self, age: int) -> int:
        """The bucket of an age."""
        return bisect_right(self.ends, age)

    def learn(self, now: int, held: int) -> None:
        """Count what has become certain by `now`; the place holds `held` names."""
        self.ends = [held * end for end in ENDS]
        self._forget(now, held)
        for bucket, end in enumerate(self.ends):
            self._count(bucket, end, now)
        done = self._reached[BUCKETS - 1]
        for use in self._uses[:done]:
            if self._open.get(use.mark) is use:
                del self._open[use.mark]
        del self._uses[:done]
        self._reached = [max(0, reached - done) for reached in self._reached]

    def values(self, kinds: Iterable[int]) -> dict[int, list[float]]:
        """For each of these kinds, by bucket: reuses for the time that a name is kept, if for as long as pays best.

        That is the highest ratio, over all ages at which one could give up, of the probability of a reuse until then to
        the time until either (Gittins' index). What a kind has not lived to see is taken from the average of all,
        times the factor by which the kind differed from it so far.
        """
        average = self._average()
        return {kind: self._value(kind, average) for kind in kinds}

    def _average(self) -> list[float]:
        hazards: list[float] = []
        for bucket in range(BUCKETS):
            again = sum(row[bucket] for row in self._again)
            passed = sum(row[bucket] for row in self._passed)
            before = hazards[-1] * _FADE if hazards else 0.0
            hazards.append((again + _DOUBT * before) / (again + passed + _DOUBT))
        return hazards

    def _value(self, kind: int, average: list[float]) -> list[float]:
        again, passed = self._again[kind], self._passed[kind]
        expected = sum((again[it] + passed[it]) * average[it] for it in range(BUCKETS))
        factor = (sum(again) + _DOUBT_OVERALL) / (expected + _DOUBT_OVERALL)
        left, time, start = 1.0, 0.0, 0.0
        points = [(0.0, 0.0)]  # (time spent, probability of a reuse) at each bucket's end
        for bucket, end in enumerate(self.ends):
            guess = min(_HAZARD_MAX, factor * average[bucket])
            hazard = (again[bucket] + _DOUBT * guess) / (again[bucket] + passed[bucket] + _DOUBT)
            time += left * (end - start) * (1 - hazard / 2)
            left *= 1 - hazard
            start = end
            points.append((time, 1 - left))
        values: list[float] = []
        for number, (time, reused) in enumerate(points[:-1]):
            values.append(max((more - reused) / (later - time) for later, more in points[number + 1 :]))
        return [*values, values[-1] / 2]

    def _count(self, bucket: int, end: float, now: int) -> None:
        """Each use that has reached `end`: did another follow within the bucket, or none until its end?"""
        uses = self._uses
        start = self.ends[bucket - 1] if bucket else 0.0
        reached = self._reached[bucket]
        while reached < len(uses) and now - uses[reached].time >= end:
            use = uses[reached]
            if not use.age or use.age > end:
                self._passed[use.kind][bucket] += use.names
            elif use.age > start:
                self._again[use.kind][bucket] += use.names
            reached += 1
        self._reached[bucket] = reached

    def _forget(self, now: int, held: int) -> None:
        share = 0.5 ** ((now - self._learned_at) / (_FORGET * max(1, held)))
        self._learned_at = now
        for rows in (self._again, self._passed):
            for row in rows:
                for bucket in range(BUCKETS):
                    row[bucket] *= share

    def _watch_fewer(self) -> None:
        self._sample_mask = 2 * self._sample_mask + 1
        keeps = [not use.mark & self._sample_mask for use in self._uses]
        self._reached = [sum(keeps[:reached]) for reached in self._reached]
        self._uses = [use for use, keep in zip(self._uses, keeps, strict=True) if keep]
        self._open = {mark: use for mark, use in self._open.items() if not mark & self._sample_mask}
