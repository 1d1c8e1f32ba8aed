"""Keeps a shared directory within its cap, by claims and sweeps in one thread. Reads and writes do no I/O for it.

A write takes bytes from an allowance in memory. The keeper thread raises this writer's claim before the allowance is
used up. It sweeps the store when the bytes approach the cap. Writes beyond the allowance are dropped if the file system
is slow or another node has claimed the bytes. Reads continue.
"""

import logging
import random
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from kvtier.layout import ALIGNMENT
from kvtier.tier.files.full_disk import EffectiveCap
from kvtier.tier.files.safe_open import MISSING, SuppressErrno
from kvtier.tier.shared_directory.claims import Claims, Declared
from kvtier.tier.shared_directory.sweep import StoppedError, Sweep
from kvtier.types import ObjectName

logger = logging.getLogger(__name__)

CLAIM_SHARE = 512
"""A claim is raised in steps of 1/512 of the cap."""
CLAIM_BYTES_MAX = 1 << 30

HIGH = 15 / 16
"""Share of the cap above which a sweep evicts."""
LOW = 14 / 16
"""Share of the cap that a sweep leaves in use."""

TAKE_WAIT_S = 0.5
"""How long a write waits for a claim or a sweep before it is dropped."""
TICK_S = 5.0
"""Interval at which uses are published and the claim of an idle writer is lowered."""
RETRY_S = 1.0
"""Minimum time between a round of the keeper that failed or found no room and the next round."""
CLAIM_EXPIRES_S = 3600.0
"""A sweep removes claims not renewed for this long. A writer starts a new claim after half this time."""
SWEEP_EVERY_S = 3600.0
"""A round sweeps if the last sweep is older than this, so that files of dead writers do not stay."""
TOUCH_AFTER_NS = 60 * 10**9
"""Minimum time between two updates of an object's mtime after uses."""
USES_MAX = 4096
"""Maximum number of uses that wait for publication. Further ones are dropped."""
JOIN_S = 2.0
_S = 10**9


class SharedCap:
    """The bytes that this open store may write, its keeper thread, and the uses that it has yet to publish.

    Args:
        root: root of the store.
        tier: name of the tier, for the log.
        effective_cap: the current cap, which is lower while the file system is full.
        capacity_bytes: the configured cap.
        touch: sets an object's mtime to the time on the store's clock.
        wait_s: how long `take` waits.
    """

    def __init__(
        self,
        root: str,
        tier: str,
        effective_cap: EffectiveCap,
        capacity_bytes: int,
        touch: Callable[[ObjectName], None],
        wait_s: float = TAKE_WAIT_S,
    ) -> None:
        self._root = root
        self._tier = tier
        self._effective_cap = effective_cap
        self._capacity_bytes = capacity_bytes
        self._step_bytes = max(min(capacity_bytes // CLAIM_SHARE, CLAIM_BYTES_MAX) // ALIGNMENT, 1) * ALIGNMENT
        self._touch = touch
        self._wait_s = wait_s
        self._claims = Claims(root)
        self._changed = threading.Condition()
        # Under `_changed`: bytes finished, taken by writes, and declared since the claim began.
        self._written = self._taken = self._claimed = 0
        self._taken_at_tick = 0
        self._waiting: list[int] = []
        self._uses: dict[ObjectName, None] = {}
        self._begun = self._ended = 0
        self._began_s: float | None = None
        self._is_closing = False
        # Only the keeper thread uses these.
        self._declared_s = 0.0
        self._not_before_s = 0.0
        self._was_refused = False
        self._sweep_s = 0.0
        self._failed = ""
        self.clock_offset_ns = 0
        """The store's clock minus this machine's."""
        self.evictions = 0
        """Number of objects evicted by this process."""
        self.used_bytes = 0
        """Upper bound of the store's bytes, over all nodes, at the last round."""
        self._thread = threading.Thread(target=self._keep, name=f"kvtier {tier} keeper", daemon=True)
        self._thread.start()

    def take(self, charge: int) -> bool:
        """Take `charge` bytes for a write. Return False if there is no room, or none is found in time.

        The caller must call `finish` once after each success.
        """
        with self._changed:
            if not self._has(charge) and not self._wait_for_room(charge):
                return False
            self._taken += charge
            if self._is_due():
                self._changed.notify_all()  # the keeper raises the claim ahead of need
            return True

    def _wait_for_room(self, charge: int) -> bool:
        """Wait for a round of the keeper that starts after this call. Return whether `charge` bytes then fit.

        This waits for the next round, until the same deadline, if another write takes the bytes that a round gained.
        """
        is_stuck = self._began_s is not None and time.monotonic() - self._began_s > self._wait_s
        if is_stuck or self._is_closing:
            return False
        until_s = time.monotonic() + self._wait_s
        self._waiting.append(charge)
        try:
            while True:
                number, claimed = self._begun + 1, self._claimed
                self._changed.notify_all()
                is_over = self._changed.wait_for(
                    lambda number=number: self._has(charge) or self._ended >= number or self._is_closing,
                    until_s - time.monotonic(),
                )
                if not is_over or self._claimed == claimed or self._has(charge):
                    return self._has(charge)
        finally:
            self._waiting.remove(charge)

    def finish(self, charge: int) -> None:
        """Record that a write has ended. The bytes of a failed write also count until the next sweep."""
        with self._changed:
            self._written += charge

    def used(self, name: ObjectName, mtime_ns: int) -> None:
        """Record that `name` was read, and queue the use for publication if the mtime is old."""
        if time.time_ns() + self.clock_offset_ns - mtime_ns < TOUCH_AFTER_NS:
            return
        with self._changed:
            if len(self._uses) < USES_MAX:
                self._uses[name] = None

    def close(self) -> None:
        """Publish the last uses, lower the claim to the bytes written, and end the thread. Waits at most `JOIN_S`."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        self._thread.join(JOIN_S)

    def _has(self, charge: int) -> bool:
        return self._taken + charge <= self._claimed

    # The methods below run in the keeper thread, which holds no lock during I/O.

    def _keep(self) -> None:
        while not self._is_closing:
            with self._changed:
                self._changed.wait_for(self._is_due, TICK_S)
                pause_s = self._not_before_s - time.monotonic()
                if pause_s > 0:
                    self._changed.wait_for(
                        lambda: self._is_closing or (self._waiting and not self._was_refused), pause_s
                    )
                if self._is_closing:
                    break
                is_due = self._is_due()
                wanted = sum(self._waiting)
                self._begun += is_due
                self._began_s = time.monotonic()
            try:
                if is_due:
                    self._round(wanted)
                self._publish_uses()
                self._renew_claim()
                self._failed = ""
            except StoppedError:
                pass
            except Exception as error:  # noqa: BLE001 - the thread continues, whatever other nodes wrote there
                self._was_refused = True
                self._not_before_s = time.monotonic() + RETRY_S
                if self._failed != str(error):
                    self._failed = str(error)
                    logger.info(
                        "tier %s: its keeper thread failed, so writes beyond the space already reserved are skipped "
                        "until a retry succeeds: %s",
                        self._tier,
                        error,
                    )
            finally:
                with self._changed:
                    self._ended = self._begun
                    self._began_s = None
                    self._changed.notify_all()
        with suppress(Exception):
            self._publish_uses()
            if self._claimed:
                self._claims.declare(self._written, self._taken)

    def _is_due(self) -> bool:
        """Return whether a claim must be raised."""
        if self._is_closing or sum(self._waiting) > self._claimed - self._taken:
            return True
        return self._taken != self._taken_at_tick and self._claimed - self._taken < self._step_bytes // 2

    def _round(self, wanted: int) -> None:
        """Raise the claim. Sweep if there is little or no room, or the last sweep was long ago."""
        if time.monotonic() - self._declared_s > CLAIM_EXPIRES_S / 2:
            self._begin_claim()
        usage = self._usage()
        is_granted = self._grant(usage, wanted)
        limit_bytes = self._effective_cap.now_bytes
        oldest_ns = time.time_ns() + self.clock_offset_ns - int(SWEEP_EVERY_S * _S)
        is_old = usage.record is None or usage.record.mtime_ns < oldest_ns
        if is_granted and not is_old and self.used_bytes <= HIGH * limit_bytes:
            return
        self._sweep(usage, 0 if is_granted else wanted)
        if not is_granted and not self._grant(self._usage(), wanted):
            self._was_refused = wanted > 0
            self._not_before_s = time.monotonic() + RETRY_S * random.uniform(0.5, 1.5)  # noqa: S311 - jitter

    def _begin_claim(self) -> None:
        """Start a new claim, because a sweep may have removed the old one."""
        with self._changed:
            in_flight = self._taken - self._written
            self._claims = Claims(self._root)
            self._written, self._taken, self._claimed = 0, in_flight, 0
            self._taken_at_tick = in_flight

    def _usage(self) -> Declared:
        """Return all claims, except those above the cap: no writer makes these, and they would stop all writes."""
        most = self._capacity_bytes
        with SuppressErrno(MISSING):
            usage = self._claims.usage()
            claims = {key: it for key, it in usage.claims.items() if it.claimed - it.written <= most}
            return usage._replace(claims=claims)
        return Declared(None, {})  # the next claim creates the directory

    def _grant(self, usage: Declared, wanted: int) -> bool:
        """Raise the claim by `wanted` bytes or a step, as far as there is room. Return False if no write fits."""
        limit_bytes = self._effective_cap.now_bytes
        with self._changed:
            written, taken, old = self._written, self._taken, max(self._claimed, self._taken)
            least = min(self._waiting, default=ALIGNMENT)
        bound = usage.bound(self._claims.owner, old)
        if bound is None:
            return False
        self.used_bytes = bound
        free = old - taken
        more = min(max(self._step_bytes, wanted - free), limit_bytes - bound)
        if more <= 0 or free + more < least:
            return free >= least
        self._declare(written, old + more)
        bound = self._usage().bound(self._claims.owner, old + more)
        if bound is None or bound > limit_bytes:  # another writer was faster
            self._declare(written, old)
            return False
        self.used_bytes = bound
        with self._changed:
            self._claimed = old + more
            self._changed.notify_all()
        return True

    def _declare(self, written: int, claimed: int) -> int:
        self._declared_s = time.monotonic()
        now_ns = self._claims.declare(written, claimed)
        self.clock_offset_ns = now_ns - time.time_ns()
        return now_ns

    def _sweep(self, seen: Declared, wanted: int) -> None:
        """Sweep the store, unless another node has done so since `seen`."""
        if len(seen.claims) > 1:
            time.sleep(random.random() * min(self._sweep_s, RETRY_S))  # noqa: S311 - jitter
        with self._changed:
            written, claimed = self._written, self._claimed
        start_s = time.monotonic()
        now_ns = self._declare(written, max(claimed, self._taken))
        before = self._usage()
        if seen.record is not None and before.record is not None and before.record.mtime_ns > seen.record.mtime_ns:
            return
        limit_bytes = self._effective_cap.now_bytes
        expired_ns = now_ns - int(CLAIM_EXPIRES_S * _S)
        high_bytes, low_bytes = int(HIGH * limit_bytes), int(LOW * limit_bytes)
        live = [claim for claim in before.claims.values() if claim.mtime_ns > expired_ns]
        if wanted:  # claims may be used up before the next sweep
            high_bytes = max(
                0, min(high_bytes, limit_bytes - wanted - sum(each.claimed - each.written for each in live))
            )
        sweep = Sweep(self._root, now_ns, self._capacity_bytes, lambda: self._is_closing)
        swept = sweep.run(min(low_bytes, high_bytes), high_bytes)
        self._claims.record(swept.used_bytes, before, expired_ns)
        self.evictions += swept.evictions
        self._sweep_s = time.monotonic() - start_s
        if swept.evictions or swept.removed_drafts:
            logger.debug(
                "tier %s: a sweep of %.3f s evicted %d objects and removed %d temporary files; %d bytes are left",
                self._tier, self._sweep_s, swept.evictions, swept.removed_drafts, swept.used_bytes,
            )  # fmt: skip

    def _publish_uses(self) -> None:
        """Set the mtimes of used objects, last use first, so that the start of a prefix becomes the newest."""
        with self._changed:
            uses, self._uses = list(self._uses), {}
        for name in reversed(uses):
            self._touch(name)

    def _renew_claim(self) -> None:
        """Give back the unused claim of an idle writer, and renew the claim of a slow one before it expires."""
        with self._changed:
            is_idle = self._taken == self._taken_at_tick and not self._waiting
            self._taken_at_tick = self._taken
            if self._claimed == self._taken:
                return
            if is_idle:
                self._claimed = self._taken  # lowered first, so that no write takes the bytes meanwhile
            elif time.monotonic() - self._declared_s < CLAIM_EXPIRES_S / 4:
                return
            written, claimed = self._written, self._claimed
        self._declare(written, claimed)
