"""Frames of earlier epochs are sealed anew: each is read, sealed, deleted and written.

A writer replaces no object. So a failure between deleting and writing is a miss.
"""

from kvtier.codec.frame import Seals, reseal
from kvtier.codec.head import Head
from kvtier.errors import TierError
from kvtier.inspection.results import Finding
from kvtier.keys.keyring import CHECK_BYTES, SealKey
from kvtier.tier.base import Tier
from kvtier.tier.direct import aligned_buffer
from kvtier.tier.store_view import ObjectReader

_WRITES = 3
"""Attempts to write an object."""


class Renewal:
    """Seals objects anew, until one is lost. Thread-safe.

    Args:
        seals: the keys, and the tenant whose frames are sealed anew; None: all tenants with keys.
        plain_too: also seal frames without a seal, as frames of `seals.tenant`.
    """

    def __init__(self, seals: Seals, *, plain_too: bool) -> None:
        self._seals, self._plain_too = seals, plain_too
        self._has_lost = False

    def run(self, tier: Tier, reader: ObjectReader, head: Head) -> Finding:
        """Read, seal, delete and write one object.

        Raises:
            CorruptChunkError: it is damaged, forged, or of another tenant. It is left as it is.
            TierError: it cannot be deleted.
        """
        key = self._key(head)
        if key is not None and head.seal[:CHECK_BYTES] == key.check:
            return Finding("current")
        if key is None or self._has_lost:
            return Finding("left")
        old, scratch = aligned_buffer(head.frame_bytes), aligned_buffer(head.frame_bytes)
        new = reseal(old[: reader.read(old)], self._seals.keyring, key, scratch)
        tier.delete(head.identity.name)
        why = "the tier does not take it"
        try:
            # A shared directory may refuse a write until it has claimed the room.
            if any(tier.write(head.identity.name, new) for _ in range(_WRITES)):
                return Finding("resealed")
        except TierError as error:
            why = error.detail
        self._has_lost = True
        return Finding("lost", f"deleted, and not written again: {why}")

    def _key(self, head: Head) -> SealKey | None:
        """The present key of the frame's tenant; None: the frame is to be left."""
        keyring, tenant, _ = self._seals
        if not head.seal:
            return keyring.sealing(tenant or "") if self._plain_too else None
        known = keyring.knows(head.seal[:CHECK_BYTES])
        return None if known is None or tenant not in {None, known.tenant} else keyring.sealing(known.tenant)
