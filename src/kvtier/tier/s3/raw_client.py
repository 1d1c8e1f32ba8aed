"""The client of an S3 bucket, for comparison with the tier."""

import numpy as np
import obstore
from obstore.store import S3Store

from kvtier.tier.s3.bucket import is_there
from kvtier.tier.s3.tier import PART_BYTES
from kvtier.types import ObjectName


class RawBucket:
    """A `RawClient` that puts unsigned payloads in one request and copies loads in parts, which is fastest on loopback.

    Args:
        store: the client.
        prefix: prefix of the objects' keys.
    """

    def __init__(self, store: S3Store, prefix: str) -> None:
        self._store, self._prefix = store, prefix

    def put(self, name: ObjectName, frame: memoryview) -> None:
        """Write `frame`, atomically if the tier writes atomically."""
        obstore.put(self._store, self._key(name), frame, use_multipart=False, mode="create")

    def get(self, name: ObjectName, into: memoryview) -> None:
        """Load an object that is as large as `into`."""
        found, target, count = obstore.get(self._store, self._key(name)), np.frombuffer(into, np.uint8), 0
        for part in found.stream(PART_BYTES):
            np.copyto(target[count : count + len(part)], np.frombuffer(part, np.uint8))
            count += len(part)
        if count != into.nbytes:
            raise OSError(None, f"only {count} of {into.nbytes} bytes arrived")

    def has(self, name: ObjectName) -> bool:
        """Return whether the object exists, with one request."""
        return is_there(self._store, self._key(name))

    def delete(self, name: ObjectName) -> None:
        """Delete an object that exists."""
        obstore.delete(self._store, self._key(name))

    def close(self) -> None:
        """Release all resources."""

    def _key(self, name: ObjectName) -> str:
        return f"{self._prefix}raw/{name.hex()}"
