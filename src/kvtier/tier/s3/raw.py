"""The client of an S3 bucket, with which the tier is compared."""

import numpy as np
import obstore
from obstore.store import S3Store

from kvtier.tier.s3.bucket import is_there
from kvtier.tier.s3.tier import PART_BYTES
from kvtier.types import ObjectName


class RawBucket:
    """A `RawClient` with unsigned payloads in one request, and loads that copy parts, which is fastest on loopback.

    Args:
        store: the client.
        prefix: prefix of the objects' keys.
    """

    def __init__(self, store: S3Store, prefix: str) -> None:
        self._store, self._prefix = store, prefix

    def put(self, name: ObjectName, frame: memoryview) -> None:
        """Write `frame` so that it becomes visible as a whole, if the tier does so."""
        obstore.put(self._store, self._key(name), frame, use_multipart=False, mode="create")

    def get(self, name: ObjectName, into: memoryview) -> None:
        """Load an object of as many bytes as `into` has."""
        found, target, count = obstore.get(self._store, self._key(name)), np.frombuffer(into, np.uint8), 0
        for part in found.stream(PART_BYTES):
            np.copyto(target[count : count + len(part)], np.frombuffer(part, np.uint8))
            count += len(part)
        if count != into.nbytes:
            raise OSError(None, f"{count} of {into.nbytes} bytes came")

    def has(self, name: ObjectName) -> bool:
        """Whether the object exists, with one request."""
        return is_there(self._store, self._key(name))

    def delete(self, name: ObjectName) -> None:
        """Delete an object that exists."""
        obstore.delete(self._store, self._key(name))

    def close(self) -> None:
        """Release all resources."""

    def _key(self, name: ObjectName) -> str:
        return f"{self._prefix}raw/{name.hex()}"
