"""The S3 client library alone: what `kvtier bench tier` compares the S3 tier with."""

import numpy as np
import obstore
from obstore.store import S3Store

from kvtier.errors import TierError
from kvtier.tier.s3.bucket import MARKER_NAME, pages
from kvtier.tier.s3.errors import hint, refusal_of
from kvtier.tier.s3.tier import PART_BYTES, is_there
from kvtier.types import ObjectName


class RawBucket:
    """A `RawClient`: unsigned payloads in one request, and loads that copy parts, the fastest of its ways on loopback.

    Args:
        store: the client.
        prefix: of the objects' keys.
    """

    def __init__(self, store: S3Store, prefix: str) -> None:
        self._store, self._prefix = store, prefix

    def put(self, name: ObjectName, frame: memoryview) -> None:
        """See `RawClient`."""
        obstore.put(self._store, self._key(name), frame, use_multipart=False, mode="create")

    def get(self, name: ObjectName, into: memoryview) -> None:
        """See `RawClient`."""
        found, target, count = obstore.get(self._store, self._key(name)), np.frombuffer(into, np.uint8), 0
        for part in found.stream(PART_BYTES):
            np.copyto(target[count : count + len(part)], np.frombuffer(part, np.uint8))
            count += len(part)
        if count != into.nbytes:
            raise OSError(None, f"{count} of {into.nbytes} bytes came")

    def has(self, name: ObjectName) -> bool:
        """See `RawClient`."""
        return is_there(self._store, self._key(name))

    def delete(self, name: ObjectName) -> None:
        """See `RawClient`."""
        obstore.delete(self._store, self._key(name))

    def close(self) -> None:
        """See `RawClient`."""

    def _key(self, name: ObjectName) -> str:
        return f"{self._prefix}raw/{name.hex()}"


def discard(tier: str, store: S3Store, prefix: str, fingerprint: str) -> None:
    """Delete every object of `fingerprint` below `prefix`, which ends with a key id; and its marker if nothing is left.

    A node that uses the key id and has stored nothing yet works without the marker, and the next one writes it again.

    Raises:
        TierError: the server refuses.
    """
    try:
        for page in pages(store, f"{prefix}{fingerprint}/", 1000):
            obstore.delete(store, [row["path"] for row in page])
        remaining = next(pages(store, prefix, 2), ())
        if [row["path"] for row in remaining] == [prefix + MARKER_NAME]:
            obstore.delete(store, prefix + MARKER_NAME)
    except Exception as error:  # noqa: BLE001 - of the client; its text may have the request
        refusal = refusal_of(error)
        raise TierError(tier, f"cannot remove what was measured: {refusal.cause}: {hint(refusal)}") from None
