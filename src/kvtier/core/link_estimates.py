"""Estimates the speed of each link from the transfers that use it.

A link has two parameters: the latency of the first objects of a burst, and the bandwidth after them. A burst begins
when an idle link gets a transfer. Objects that arrive soon after the first one count as part of the first batch. The
bandwidth is that of the rest, so both parameters are measured directly and nothing is fitted. A worse measurement
replaces the estimate. After a better one, the estimate becomes the geometric mean of both. So plans assume a link's
slower periods, and one good measurement recovers half of the difference.

The longest pause between arrivals is estimated as well. It decays with each burst and with each better measurement. A
link with a quota (a throttled control group, a cloud volume) passes some objects immediately and then none until its
next period. A pause longer than the estimate may be a single hiccup, so it lowers the bandwidth only if it recurs.

Sizes are those of raw objects, and times include decoding. So the bandwidth of a tier with a codec is that of its usual
mix of raw and coded objects. The core does not know which objects are coded. So it misjudges a load of one kind after
loads of the other kind, by up to the ratio of their bandwidths.

A link without measurements is assumed to be fast, since only a transfer can show otherwise.
"""

from dataclasses import dataclass, field
from math import sqrt

DEFAULT_BYTES_PER_S = 20e9
DEFAULT_FIRST_S = 1e-3
SAMPLE_S = 0.25
"""Seconds between two measurements of a link that is never idle. The interval doubles if arrivals never pause."""
INSTANT_S = 1e-6
PAUSE_KEPT = 0.9
"""Share of the estimated pause that remains when the next burst begins."""
FIRST_BATCH_SHARE = 0.5
"""Objects that arrive within this share of the latency after the first one belong to the first batch."""


@dataclass(slots=True)
class LinkEstimator:
    """Estimates the latency, the bandwidth and the pauses of one link."""

    first_s: float = DEFAULT_FIRST_S
    """Latency of the first batch of a burst."""
    first_bytes: int = 0
    """Number of bytes in the first batch."""
    bytes_per_s: float = DEFAULT_BYTES_PER_S
    """Bandwidth after the first batch."""
    pause_s: float = 0.0
    """Longest time between two arrivals after the first batch of a burst."""
    lead_s: float = 0.0
    """Time until a load has its first usable chunk, which need not arrive first."""
    is_known: bool = False
    out: int = 0
    out_bytes: int = 0
    """Bytes of the transfers in flight."""
    _has_bandwidth: bool = field(default=False, init=False)
    _is_waiting: bool = field(default=False, init=False)
    """Whether nothing of this burst has arrived yet."""
    _moved_s: float = field(default=0.0, init=False)
    """Time of the last arrival, or of the start of the burst."""
    _batch_until_s: float = field(default=0.0, init=False)
    _batch_bytes: int = field(default=0, init=False)
    _flow_since_s: float = field(default=0.0, init=False)
    _flow_bytes: int = field(default=0, init=False)
    _round_s: float = field(default=0.0, init=False)
    """End of the last whole round. Threads that read one object each deliver together, so samples end with a round."""
    _round_bytes: int = field(default=0, init=False)
    """Bytes of the current sample that had arrived by `_round_s`."""
    _flow_pause_s: float = field(default=0.0, init=False)
    """Longest time between arrivals since the last sample."""
    _usual_pause_s: float = field(default=0.0, init=False)
    """The estimated pause when the burst began."""
    _is_sampled: bool = field(default=False, init=False)
    """Whether the bandwidth of this burst was measured."""

    def began(self, size_bytes: int, now_s: float) -> None:
        """Record that a transfer starts."""
        if not self.out:
            self._is_waiting = True
            self._flow_since_s = self._moved_s = now_s
        self.out += 1
        self.out_bytes += size_bytes

    def ended(self, size_bytes: int, now_s: float, *, is_moved: bool) -> None:
        """Record that a transfer has ended, with (`is_moved`) or without moving its bytes."""
        self.out -= 1
        self.out_bytes -= size_bytes
        if is_moved:
            self._moved(size_bytes, now_s)
        elif self._is_waiting and not self.out:
            # All transfers ended without moving bytes, so the latency is at least this long.
            self._update_latency(max(self.first_s, now_s - self._moved_s))
        elif not self.out and self._flow_bytes:
            self._end_burst(self._moved_s)

    def seconds(self, size_bytes: int, queue_bytes: int, now_s: float) -> tuple[float, float]:
        """Return the expected seconds until the first part of a new transfer is usable, and until all has arrived.

        Args:
            size_bytes: bytes that would be added.
            queue_bytes: bytes that are ahead of them, in flight or queued.
            now_s: the time.
        """
        first_s = self.first_s
        if self.out:
            # Without a better estimate, a wait is expected to last as long again as it has lasted.
            first_s = max(first_s, now_s - self._moved_s)
        queue_s = queue_bytes / self.bytes_per_s
        flow_s = max(0, size_bytes - self.first_bytes) / self.bytes_per_s
        lead_s = max(first_s, self.lead_s)
        return queue_s + lead_s, queue_s + max(lead_s, first_s + flow_s)

    def record_lead(self, seconds: float, *, has_come: bool) -> None:
        """Record that a load alone on the link got its first chunk, or stopped without one, after `seconds`."""
        seconds = seconds if has_come else max(seconds, self.lead_s)
        self.lead_s = max(seconds, sqrt(self.lead_s * seconds))

    def _moved(self, size_bytes: int, now_s: float) -> None:
        if self._is_waiting:
            wait_s = now_s - self._moved_s
            self._update_latency(wait_s)
            self._is_waiting = False
            self._flow_since_s, self._flow_bytes, self._round_bytes = now_s, 0, 0
            self._flow_pause_s, self._is_sampled = 0.0, False
            self.pause_s *= PAUSE_KEPT
            self._usual_pause_s = self.pause_s
            self._batch_until_s, self._batch_bytes = now_s + FIRST_BATCH_SHARE * wait_s, 0
        if now_s <= self._batch_until_s:
            self._batch_bytes += size_bytes
            self.first_bytes = max(self.first_bytes, self._batch_bytes)
            if not self._has_bandwidth:
                self.bytes_per_s = self.first_bytes / self.first_s  # a lower bound: the next batch may take as long
        else:
            pause_s = now_s - self._moved_s
            if pause_s > FIRST_BATCH_SHARE * self.first_s:
                self._round_s, self._round_bytes = self._moved_s, self._flow_bytes
                self._sample(SAMPLE_S)
            self._flow_pause_s = max(self._flow_pause_s, pause_s)
            self.pause_s = max(self.pause_s, pause_s)
            self._flow_bytes += size_bytes
            self.first_bytes = self._batch_bytes  # only bytes that have arrived, although more were in flight
            if not self.out:
                self._end_burst(now_s)
            elif now_s - self._flow_since_s >= 2 * SAMPLE_S:
                self._round_s, self._round_bytes = now_s, self._flow_bytes
                self._sample(0.0)
        self._moved_s = now_s

    def _end_burst(self, now_s: float) -> None:
        if not self._round_bytes:  # otherwise the last round may be incomplete
            self._round_s, self._round_bytes = now_s, self._flow_bytes
        if self._is_sampled:
            self._sample(SAMPLE_S)  # the rest of the burst may be shorter than a period of the quota
            return
        # Apart from a hiccup, the link was not faster than this, even if a whole batch was about to arrive.
        hiccup_s = max(0.0, self._flow_pause_s - self._usual_pause_s) if self._has_bandwidth else 0.0
        flow_s = max(self.first_s, now_s - self._flow_since_s - hiccup_s)
        limit = (self._flow_bytes + self.first_bytes) / flow_s
        self._sample(0.0)
        self.bytes_per_s = min(self.bytes_per_s, limit)

    def _sample(self, seconds_min: float) -> None:
        """Measure the bandwidth until the end of the last whole round, if that is long enough.

        Samples that are smaller or shorter than the first batch say nothing about the bandwidth. A sample that is
        mostly one pause does not worsen the estimate.
        """
        flow_s = self._round_s - self._flow_since_s
        if self._round_bytes < self.first_bytes or flow_s < max(self.first_s, seconds_min):
            return
        bytes_per_s = self._round_bytes / flow_s
        if self._has_bandwidth and bytes_per_s < self.bytes_per_s and flow_s < 2 * self._flow_pause_s:
            return
        self._update_bandwidth(bytes_per_s)
        self.pause_s = sqrt(self.pause_s * self._flow_pause_s)
        self._flow_pause_s, self._is_sampled = 0.0, True
        self._flow_since_s, self._flow_bytes = self._round_s, self._flow_bytes - self._round_bytes
        self._round_bytes = 0

    def _update_latency(self, seconds: float) -> None:
        seconds = max(seconds, INSTANT_S)
        self.first_s = max(seconds, sqrt(self.first_s * seconds)) if self.is_known else seconds
        self.is_known = True

    def _update_bandwidth(self, bytes_per_s: float) -> None:
        usual = sqrt(self.bytes_per_s * bytes_per_s) if self._has_bandwidth else bytes_per_s
        self.bytes_per_s = min(bytes_per_s, usual)
        self._has_bandwidth = True
