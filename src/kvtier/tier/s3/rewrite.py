"""Rewrites used objects of a bucket whose lifecycle rule expires objects by age.

A prefix's first objects are the oldest. Expiry removes these parents first, and then their children are of no use.
A read of an object past half of its lifetime therefore has it rewritten, which begins its lifetime again.

S3 copies an object onto itself only with changed metadata, which the client cannot set, so the bytes are sent again.
They are not those of the read: a thread loads the object once more. So the read pays nothing, the thread holds one
object at a time, and it sees whether another node was faster. It verifies the whole frame and its name before it stores
it: a damaged or foreign object is left to expire. Valid frames of one name are interchangeable, so that two writers at
once are harmless.
"""

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

import obstore
from obstore.store import S3Store

from kvtier.codec.frame import verify_frame
from kvtier.errors import CorruptChunkError, UnreadableChunkError
from kvtier.tier.s3.bucket import read_body
from kvtier.tier.s3.upkeep import BucketWork, StoreClock, Upkeep

if TYPE_CHECKING:
    from obstore import ObjectMeta  # exists for type checkers only

OBJECT_BYTES_MAX = 256 << 20
"""Larger objects are not rewritten: one object at a time is held in memory."""
WAITING_MAX = 4096
"""Keys that wait. Further ones are dropped; a later read offers them again."""

FAILURE_PAUSE_S = 10.0


class S3Rewriter(BucketWork):
    """Rewrites objects that are read in the second half of their lifetime.

    Args:
        tier: the tier's name.
        store: client of the bucket.
        folder: of the objects; ends with a slash.
        upkeep: the lifetime, and the budget: after each object the thread rests for as long as its bytes cost.
        written: called with the bytes of each rewritten object.
    """

    def __init__(
        self,
        tier: str,
        store: S3Store,
        folder: str,
        upkeep: Upkeep,
        written: Callable[[int], None],
    ) -> None:
        super().__init__(tier, "rewrites", StoreClock(store, folder, upkeep.clock), FAILURE_PAUSE_S)
        self._store = store
        self._least_age_s = upkeep.lifetime_s / 2
        self._bytes_per_s = upkeep.rewrite_bytes_per_s
        self._written = written
        self._lock = threading.Lock()
        self._waiting: dict[str, None] = {}

    def used(self, key: str, meta: "ObjectMeta") -> None:
        """The object at `key` was read. Sends nothing and does not wait."""
        if self._is_due(meta):
            with self._lock:
                if len(self._waiting) < WAITING_MAX:
                    self._waiting[key] = None

    def _is_due(self, meta: "ObjectMeta") -> bool:
        age_s = self._clock.age_s(meta["last_modified"])
        return age_s is not None and age_s > self._least_age_s and meta["size"] <= OBJECT_BYTES_MAX

    def _work(self) -> float | None:
        with self._lock:
            key = next(iter(self._waiting), None)
            if key is None:
                return None
            del self._waiting[key]
        return self._rewrite(key) / self._bytes_per_s

    def _rewrite(self, key: str) -> int:
        """Load, verify and store the object at `key`. Returns the bytes that this cost."""
        try:
            found = obstore.get(self._store, key)
        except FileNotFoundError:
            return 0
        if not self._is_due(found.meta):
            return 0
        frame = memoryview(read_body(found, found.meta["size"]))
        try:
            is_right = verify_frame(frame).identity.name.hex() == key.rpartition("/")[2]
        except (CorruptChunkError, UnreadableChunkError):
            is_right = False
        if is_right:
            obstore.put(self._store, key, frame, use_multipart=False)
            self._written(len(frame))
        return len(frame)
