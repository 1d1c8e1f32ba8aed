"""The S3 client library at its best setting, without kvtier's tier: what the tier's speed is compared with."""

import asyncio
import os
from collections.abc import Sequence
from contextlib import suppress
from typing import Literal

import numpy as np
import obstore
from obstore.store import S3Store

from kvtier.tier.s3 import PART_BYTES


class RawS3:
    """A `SpeedPath`. Of the client's ways to store and load these were the fastest in `bench/s3.py --ways`.

    Args:
        store: the client, with unsigned payloads.
        prefix: of the objects' keys; they get a random part of their own.
        loads: "stream" copies parts into the buffer, "bytes" copies the whole object, "none" leaves it in the client.
        is_conditional: an existing object is not replaced.
    """

    def __init__(self, store: S3Store, prefix: str, *, loads: str = "stream", is_conditional: bool = True) -> None:
        self._store, self._loads = store, loads
        self._mode: Literal["create", "overwrite"] = "create" if is_conditional else "overwrite"
        self._prefix = f"{prefix}/raw-{os.urandom(8).hex()}/"

    def store(self, number: int, frame: memoryview) -> None:
        """See `SpeedPath`."""
        obstore.put(self._store, f"{self._prefix}{number}", frame, use_multipart=False, mode=self._mode)

    def load(self, number: int, into: memoryview) -> None:
        """See `SpeedPath`."""
        found, target, count = obstore.get(self._store, f"{self._prefix}{number}"), np.frombuffer(into, np.uint8), 0
        if self._loads == "stream":
            for part in found.stream(PART_BYTES):
                np.copyto(target[count : count + len(part)], np.frombuffer(part, np.uint8))
                count += len(part)
            return
        content = np.frombuffer(found.bytes(), np.uint8)
        np.copyto(
            target if self._loads == "bytes" else target[-8:], content if self._loads == "bytes" else content[-8:]
        )

    def delete(self, number: int) -> None:
        """See `SpeedPath`."""
        obstore.delete(self._store, f"{self._prefix}{number}")

    def lookup(self, numbers: Sequence[int]) -> None:
        """See `SpeedPath`."""
        asyncio.run(self._heads(numbers))

    async def _heads(self, numbers: Sequence[int]) -> None:
        async def head(number: int) -> None:
            with suppress(FileNotFoundError):
                await obstore.head_async(self._store, f"{self._prefix}{number}")

        await asyncio.gather(*map(head, numbers))
