"""Join events into requests: an issue with its completion, a device request with the bio that caused it."""

import numpy as np

NESTED_MAX = 256
"""Requests for the same bytes in flight at once, beyond which issues stay without completion."""
TIME_BITS = 40
"""Bits of a time in microseconds, which hold twelve days."""
STARTS_TRIED = 64
"""Starts of intervals of about one length that `covering` looks at for each position, the nearest first."""


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

    Args:
        start: first positions of the intervals.
        end: positions after their last.
        since_us: when each began, in whole microseconds; at most `TIME_BITS` bits.
        wanted: positions.
        when_us: the time of each position, in whole microseconds.

    Returns:
        For each position the index of the interval, or -1.
    """
    by_position = np.argsort(wanted, kind="stable")  # searches for neighbours are several times as fast
    wanted, when_us = wanted[by_position], when_us[by_position]
    found = np.full(len(wanted), -1, np.int64)
    newest_us = np.zeros(len(wanted), np.uint64)
    since_us, when_us = since_us.astype(np.uint64), when_us.astype(np.uint64)
    length = end - start
    # Of lengths that differ by less than twice few intervals begin near a position without covering it.
    magnitude = np.frexp(length.astype(np.float64))[1]
    for each in np.unique(magnitude[length > 0]).tolist():
        own = np.flatnonzero((magnitude == each) & (length > 0))
        starts, group = np.unique(start[own], return_inverse=True)
        # One number for group and time, so that one search finds the newest of a group.
        ranked = group.astype(np.uint64) << np.uint64(TIME_BITS) | since_us[own]
        order = np.argsort(ranked, kind="stable")
        ranked, longest = ranked[order], length[own].max()
        at = np.searchsorted(starts, wanted, side="right") - 1
        open_ = np.flatnonzero(at >= 0)
        for _ in range(STARTS_TRIED):
            open_ = open_[wanted[open_] - starts[at[open_]] < longest]
            if not open_.size:
                break
            mark = at[open_].astype(np.uint64) << np.uint64(TIME_BITS) | when_us[open_]
            place = np.searchsorted(ranked, mark, side="right") - 1
            in_group = order[place]
            candidate = own[in_group]
            fits = (place >= 0) & (group[in_group] == at[open_]) & (end[candidate] > wanted[open_])
            fits &= (found[open_] < 0) | (since_us[candidate] > newest_us[open_])
            found[open_[fits]], newest_us[open_[fits]] = candidate[fits], since_us[candidate[fits]]
            at[open_] -= 1
            open_ = open_[at[open_] >= 0]
    result = np.empty_like(found)
    result[by_position] = found
    return result
