"""Join events into requests: an issue with its completion, a device request with the bio that caused it."""

import numpy as np

NESTED_MAX = 256
"""Requests for the same bytes in flight at once, beyond which issues stay without completion."""
TIME_BITS = 40
"""Of a time in microseconds: twelve days."""
STARTS_TRIED = 64
"""Starts of intervals that `covering` looks at for each position, the nearest first."""


def pair(
    issued_s: np.ndarray,
    issued_key: np.ndarray,
    ended_s: np.ndarray,
    ended_key: np.ndarray,
    *,
    nested_max: int = NESTED_MAX,
) -> np.ndarray:
    """Pair each issue with the completion that has the same key.

    A completion belongs to the newest issue of its key that has none. Two requests for the same bytes, in flight at
    once, may exchange their latencies; their sum and the queue depth are exact.

    Args:
        issued_s: times of the issues.
        issued_key: what they are about, as integers.
        ended_s: times of the completions.
        ended_key: their keys.
        nested_max: how many requests of one key may be in flight. After lost events take 1, so that an issue whose
            completion is lost does not get the completion of another.

    Returns:
        For each issue the index of its completion, or -1.
    """
    count = len(issued_s)
    key = np.concatenate([issued_key, ended_key])
    is_end = np.arange(len(key)) >= count
    order = np.lexsort((is_end, np.concatenate([issued_s, ended_s]), key))
    found = np.full(count, -1, np.int64)
    for _ in range(nested_max):
        ends, keys = is_end[order], key[order]
        first = np.flatnonzero(~ends[:-1] & ends[1:] & (keys[:-1] == keys[1:]))
        if not first.size:
            break
        found[order[first]] = order[first + 1] - count
        kept = np.ones(len(order), bool)
        kept[first] = kept[first + 1] = False
        order = order[kept]
    return found


def covering(
    start: np.ndarray, end: np.ndarray, since_us: np.ndarray, wanted: np.ndarray, when_us: np.ndarray
) -> np.ndarray:
    """For each wanted position the newest interval that covers it and began by then.

    Of intervals that begin at different positions, the one that begins nearest is taken.

    Args:
        start: first positions of the intervals.
        end: positions after their last.
        since_us: when each began, in whole microseconds; at most `TIME_BITS` bits.
        wanted: positions.
        when_us: the time of each position, in whole microseconds.

    Returns:
        For each position the index of the interval, or -1.
    """
    found = np.full(len(wanted), -1, np.int64)
    if not len(start):
        return found
    starts, group = np.unique(start, return_inverse=True)
    # One number for group and time, so that one search finds the newest of a group.
    ranked = group.astype(np.uint64) << np.uint64(TIME_BITS) | since_us.astype(np.uint64)
    order = np.argsort(ranked, kind="stable")
    ranked = ranked[order]
    at = np.searchsorted(starts, wanted, side="right") - 1
    open_ = np.flatnonzero(at >= 0)
    for _ in range(STARTS_TRIED):
        mark = at[open_].astype(np.uint64) << np.uint64(TIME_BITS) | when_us[open_].astype(np.uint64)
        place = np.searchsorted(ranked, mark, side="right") - 1
        candidate = order[place]
        fits = (place >= 0) & (group[candidate] == at[open_]) & (end[candidate] > wanted[open_])
        found[open_[fits]] = candidate[fits]
        at[open_] -= 1
        open_ = open_[~fits & (at[open_] >= 0)]
        if not open_.size:
            break
    return found
