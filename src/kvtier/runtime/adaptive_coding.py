"""Decides whether to write an object raw or coded: whichever should be faster to read back.

An object is coded if coding saves its read more than `WRITE_WEIGHT` times the time that it costs its write. A write
counts less, because no request waits for it. The read must also become `GAIN_MIN` times faster. The choice then stands
until coded objects are slower to read than raw ones.

All measurements take place during normal work. A tier's own reads and writes measure its link; one section of every
`EVERY`th object written measures the codec. Objects are written raw until both are measured.

Reading threads share the link and decode in parallel, so decoding is partly hidden. Mean value analysis of a closed
queue with one link gives the expected time (Reiser and Lavenberg, JACM 1980).

Decoding threads slow each other down, and the engine slows them down too. So a load decodes more slowly than a single
section on an idle machine. Reads of coded objects measure this slowdown. Before the first of them, it is assumed to be
the number of reading threads. If objects are written raw only because of this assumption, one in `TRIED_EVERY` is coded
to measure the slowdown.
"""

import math
import os
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from kvtier.codec import roundtrip
from kvtier.codec.base import Codec
from kvtier.codec.frame import Seals, unpack_in_place
from kvtier.codec.frame_header import Identity, frame_layout
from kvtier.errors import TierError
from kvtier.layout import GroupLayout
from kvtier.tier.base import Read, Write
from kvtier.types import ObjectName

EVERY = 16
"""Number of objects of a group written between two decisions."""
GAIN_MIN = 1.05
"""A group switches to coded objects if they are faster to read by this factor, and back once they are slower."""
WRITE_WEIGHT = 0.25
WEIGHT = 0.25
"""Weight of the newest measurement in each geometric mean."""
KEPT = 0.9
"""Each measurement of the link multiplies the old sums by this."""
HICCUP = 8.0
"""A slow transfer counts as at most this many times slower than the mean."""
LATENCY_SHARE_MAX = 0.9
"""At most this share of a transfer counts as latency; no codec shortens it."""
TRIED_EVERY = 256
TRIES = 2
"""Number of measurements of each section; the best time counts."""

_Item = TypeVar("_Item")
_Answer = TypeVar("_Answer")


class LinkMeter:
    """Measures one direction of a link from the transfers of all threads.

    Thread-safe without a lock, because a lost measurement does not matter.
    """

    def __init__(self) -> None:
        self.bytes_per_s = 0.0
        """Combined rate of all threads; 0 if not measured."""
        self._sums = (0.0, 0.0)
        """Bytes moved, and the seconds during which the link was busy. Older transfers count less."""
        self._ended_s = 0.0
        self._on_link: list[None] = []
        """One entry per call in progress."""

    def timed(
        self, call: Callable[[list[_Item]], list[_Answer]], batch: list[_Item]
    ) -> tuple[list[_Answer], float, float, int]:
        """Time `call(batch)`.

        Returns:
            The answers; the duration of the call in seconds; the part of it after the last end of another call; and
            the number of calls in progress at its start, including this one.
        """
        self._on_link.append(None)
        on_link, start_s = len(self._on_link), time.perf_counter()
        try:
            answers = call(batch)
        finally:
            self._on_link.pop()
        end_s = time.perf_counter()
        alone_s = end_s - max(start_s, self._ended_s)
        self._ended_s = end_s
        return answers, end_s - start_s, alone_s, on_link

    def add(self, size_bytes: int, alone_s: float, latency_s: float = 0.0) -> None:
        """Record that the link moved `size_bytes` in `alone_s`, during which no other transfer ended."""
        if size_bytes and alone_s > 0:
            longest_s = HICCUP * size_bytes / self.bytes_per_s if self.bytes_per_s else math.inf
            moving_s = min(longest_s, max(alone_s - latency_s, alone_s * (1 - LATENCY_SHARE_MAX)))
            before, before_s = self._sums
            self._sums = sums = before * KEPT + size_bytes, before_s * KEPT + moving_s
            self.bytes_per_s = sums[0] / sums[1]


@dataclass(slots=True)
class GroupState:
    """Measurements of a group's objects. Times are seconds per raw byte in one thread.

    To open an object is to verify and decode it after its read.
    """

    ratio: float = 0.0
    """Stored bytes of a coded object, divided by its raw bytes; 0 if not measured."""
    encode_s: float = 0.0
    """Time to encode an object and to verify that decoding returns the same bytes."""
    decode_s: float = 0.0
    verify_s: float = 0.0
    """Time to open a raw object that was read."""
    open_s: float = 0.0
    """Time to open an object that was read, whether raw or coded."""
    slowdown: float = 0.0
    """Time to open a coded object that was read, divided by `quiet_s`; 0 if not measured."""
    written: int = 0
    is_coded: bool | None = None
    """Whether objects are written coded; None until the link has been measured."""
    is_tried: bool = False

    @property
    def quiet_s(self) -> float:
        """Return the time to open a coded object while nothing else runs."""
        return self.decode_s + self.ratio * self.verify_s


class CodecChoice:
    """Chooses raw or coded for the objects of one tier. Thread-safe without a lock, like `LinkMeter`.

    Args:
        codec: any codec except raw.
        read_threads: number of threads that read from the tier.
        write_threads: number of threads that write to the tier.
        cores: number of cores; 0 for the cores that this process may use.
    """

    def __init__(self, codec: Codec, read_threads: int, write_threads: int, cores: int = 0) -> None:
        self.reads, self.writes = LinkMeter(), LinkMeter()
        self.latency_s = 0.0
        """Time that the tier takes to look up names."""
        self.groups: defaultdict[int, GroupState] = defaultdict(GroupState)
        self._codec = codec
        self._read_threads, self._write_threads = read_threads, write_threads
        self._readers = 1.0
        """Mean number of threads that read or open objects at the same time."""
        self._cores = cores or len(os.sched_getaffinity(0))

    def read_many(
        self, call: Callable[[list[Read]], list[int | TierError | None]], number: int, batch: list[Read]
    ) -> list[int | TierError | None]:
        """Run the read `call(batch)` and measure it; `number` is the group of its first object."""
        answers, took_s, alone_s, on_link = self.reads.timed(call, batch)
        moved = sum(answer for answer in answers if isinstance(answer, int))
        open_s = self.groups[number].open_s * sum(len(read.into) for read in batch)
        self._readers = _mean(self._readers, min(self._read_threads, on_link * (1 + open_s / max(took_s, 1e-9))))
        self.reads.add(moved, alone_s, self.latency_s / on_link)
        return answers

    def write_many(
        self, call: Callable[[list[Write]], list[bool | TierError]], batch: list[Write]
    ) -> list[bool | TierError]:
        """Run the write `call(batch)` and measure it."""
        answers, _, alone_s, on_link = self.writes.timed(call, batch)
        moved = sum(len(write.frame) for write, answer in zip(batch, answers, strict=False) if answer is True)
        self.writes.add(moved, alone_s, self.latency_s / on_link)
        return answers

    def open(
        self,
        number: int,
        slot: memoryview,
        stored_bytes: int,
        group: GroupLayout,
        identity: Identity,
        scratch: memoryview,
        seals: Seals | None,
    ) -> None:
        """Open an object of group `number` with `unpack_in_place`, and measure it."""
        start_s = time.perf_counter()
        unpack_in_place(slot, stored_bytes, group, identity, scratch, seals)
        took_s, state = (time.perf_counter() - start_s) / len(slot), self.groups[number]
        state.open_s = _mean(state.open_s, took_s)
        if stored_bytes == len(slot):
            state.verify_s = _mean(state.verify_s, took_s)
        elif state.ratio:
            # A coded object among raw ones has the cores to itself, so it says little about loads of only coded
            # objects.
            state.slowdown = _mean(
                state.slowdown or self._readers, took_s / state.quiet_s, WEIGHT if state.is_coded else WEIGHT / EVERY
            )

    def contains(
        self, call: Callable[[Sequence[ObjectName]], Sequence[bool]], names: Sequence[ObjectName]
    ) -> Sequence[bool]:
        """Return `call(names)`. The duration of the call counts as the tier's latency."""
        start_s = time.perf_counter()
        answers = call(names)
        if names:
            self.latency_s = _mean(self.latency_s, time.perf_counter() - start_s)
        return answers

    def codes(self, number: int, group: GroupLayout, slot: memoryview, scratch: memoryview) -> bool:
        """Decide whether to code the object of group `number` in `slot`; sometimes measure the codec on it."""
        state = self.groups[number]
        written, state.written = state.written, state.written + 1
        if roundtrip.is_refused(self._codec):
            return False
        if written % EVERY == 0:
            try:
                self._measure(state, written // EVERY, group, slot, scratch)
            except roundtrip.InexactError:
                return False
        rate = self.reads.bytes_per_s or self.writes.bytes_per_s
        if rate and state.ratio and (written % EVERY == 0 or state.is_coded is None):
            self._decide(state, group.payload_bytes, rate)
        return bool(state.is_coded) or (state.is_tried and written % TRIED_EVERY == TRIED_EVERY - 1)

    def _decide(self, state: GroupState, size_bytes: int, read_rate: float) -> None:
        write_rate = self.writes.bytes_per_s or read_rate

        def seconds(rate: float, threads: int, own_s: float, ratio: float = 1.0, slowdown: float = 1.0) -> float:
            link_s, beside_s = ratio * size_bytes / rate, own_s * size_bytes
            return object_s(link_s, beside_s, threads, self._cores, self.latency_s, slowdown)

        ratio, readers, writers = state.ratio, max(1, round(self._readers)), self._write_threads
        raw_s = seconds(read_rate, readers, state.verify_s)
        coded_s = seconds(read_rate, readers, state.quiet_s, ratio, state.slowdown or readers)
        quiet_s = seconds(read_rate, readers, state.quiet_s, ratio)
        behind_s = seconds(write_rate, writers, state.encode_s, ratio) - seconds(write_rate, writers, 0.0)
        lost_s = max(0.0, WRITE_WEIGHT * behind_s)
        state.is_tried = raw_s - GAIN_MIN * quiet_s > lost_s
        state.is_coded = raw_s - (1.0 if state.is_coded else GAIN_MIN) * coded_s > lost_s

    def _measure(self, state: GroupState, turn: int, group: GroupLayout, slot: memoryview, scratch: memoryview) -> None:
        """Code and decode one section of the object in `slot`. Each `turn` takes the next section."""
        at = turn % len(group.sections)
        raw_bytes, element = group.sections[at].size_bytes, group.sections[at].element
        raw, bound = slot[frame_layout(group).extents[at][0] :][:raw_bytes], self._codec.bound(raw_bytes)
        room, back = scratch[:bound], scratch[bound : bound + raw_bytes]
        stored_bytes, encode_s, decode_s = 0, math.inf, math.inf
        for _ in range(TRIES):
            start_s = time.perf_counter()
            stored_bytes = roundtrip.encoded(self._codec, raw, room, back, element)
            encoded_s = time.perf_counter()
            roundtrip.decode(self._codec, room[:stored_bytes], back, element)
            encode_s = min(encode_s, encoded_s - start_s)
            decode_s = min(decode_s, time.perf_counter() - encoded_s)
        state.encode_s = _mean(state.encode_s, encode_s / raw_bytes)
        state.decode_s = _mean(state.decode_s, decode_s / raw_bytes)
        state.ratio = _mean(state.ratio, min(1.0, stored_bytes / raw_bytes))


def object_s(
    link_s: float, beside_s: float, threads: int, cores: int, latency_s: float = 0.0, slowdown: float = 1.0
) -> float:
    """Return the seconds per object when `threads` move many objects.

    Args:
        link_s: time for which an object occupies the link.
        beside_s: time of a thread's other work on an object while nothing else runs.
        threads: number of threads that move objects.
        cores: number of cores.
        latency_s: time before an object reaches the link.
        slowdown: factor by which that other work slows down while the other threads work.
    """
    queued = total_s = 0.0
    for others in range(threads):
        there_s = link_s * (1 + queued)
        total_s = latency_s + there_s + slowdown * beside_s
        queued = (others + 1) * there_s / total_s
    return max(total_s / threads, beside_s / min(threads, cores))


def _mean(usual: float, newest: float, weight: float = WEIGHT) -> float:
    return usual * (newest / usual) ** weight if usual else newest
