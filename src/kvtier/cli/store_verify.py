"""Re-read everything in a store's directory, and drop what is bad.

Reading disturbs nobody: no lock, no change of any file's age, nothing left in the kernel's cache. Only a repair opens
the store like any other process, so that the ledger stays exact.
"""

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from kvtier.cli.store_view import head_of, marker_of, open_object
from kvtier.codec.frame import verify_frame
from kvtier.errors import CorruptChunkError
from kvtier.tier.direct import forget_cached, read_part
from kvtier.tier.directory import DirectoryTier
from kvtier.tier.tree import Found, Paths, walk
from kvtier.types import ObjectName

THREADS = 4
_BATCH = 16 * THREADS
_UNASKED_BYTES_MAX = 1 << 28
"""A file larger than this must say that it is a frame of that size before memory is given to it."""

_UNBOUNDED_BYTES = 1 << 62
"""A cap for who only deletes: it must not evict for a lower one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BadObject:
    """An object that a reader would refuse."""

    name: str
    size_bytes: int
    reason: str


@dataclass(slots=True, kw_only=True)
class Verification:
    """What a walk through all bytes found."""

    directory: str
    checked: int = 0
    bad: int = 0
    bytes: int = 0
    """Read and checked."""
    dropped: int = 0
    """Bad objects that a repair removed."""
    bad_objects: list[BadObject] = field(default_factory=list[BadObject])


def census(root: Path) -> list[Found]:
    """All objects of the store at `root`."""
    marker_of(root)
    return sorted(walk(Paths(str(root)).objects))


def verify(root: Path, found: list[Found], advance: Callable[[float], None]) -> Verification:
    """Read and check every object of `found`; calls `advance` with the bytes of each."""
    result = Verification(directory=str(root))
    paths, reader = Paths(str(root)), _Reader()

    def check(file: Found) -> str | None:
        return reader.problem(paths.object(file.name), file.name)

    with ThreadPoolExecutor(THREADS, thread_name_prefix="kvtier-verify") as pool:
        for batch in _batches(found):
            # In batches, so that Ctrl-C and memory do not wait for a hundred thousand tasks.
            answers = pool.map(check, batch)
            for file, answer in zip(batch, answers, strict=True):
                advance(file.size_bytes)
                if answer is None:
                    continue
                result.checked += 1
                result.bytes += file.size_bytes
                if answer:
                    result.bad += 1
                    result.bad_objects.append(
                        BadObject(name=file.name.hex(), size_bytes=file.size_bytes, reason=answer)
                    )
    return result


def repair(root: Path, result: Verification) -> None:
    """Drop what `result` found bad, through the tier; looks once more before, as it may have been stored anew."""
    if not result.bad_objects:
        return
    reader = _Reader()
    tier = DirectoryTier(root, capacity_bytes=_UNBOUNDED_BYTES, direct_io="off")
    with closing(tier):
        for bad in result.bad_objects:
            name = bytes.fromhex(bad.name)
            if reader.problem(Paths(str(root)).object(name), name):
                tier.delete(ObjectName(name))
                result.dropped += 1


class _Reader:
    """Reads whole frames, each thread into a buffer of its own that grows to the largest."""

    def __init__(self) -> None:
        self._local = threading.local()

    def problem(self, path: str, name: bytes) -> str | None:
        """What is wrong with the object at `path`: "" when nothing is, None when it has vanished."""
        try:
            descriptor = open_object(path)
            try:
                frame = self._read(descriptor, path)
            finally:
                os.close(descriptor)
            head = verify_frame(frame)
            if head.identity.name != name:
                return f"belongs to another object, {head.identity.name.hex()[:12]}"
        except FileNotFoundError:
            return None
        except CorruptChunkError as error:
            return error.detail
        except OSError as error:
            return f"cannot be read: {error.strerror}"
        return ""

    def _read(self, descriptor: int, path: str) -> memoryview:
        size_bytes = os.fstat(descriptor).st_size
        if size_bytes > _UNASKED_BYTES_MAX and head_of(path).frame_bytes != size_bytes:
            raise CorruptChunkError(b"", f"{size_bytes} bytes stored of a smaller frame")
        buffer: bytearray = getattr(self._local, "buffer", bytearray())
        if len(buffer) < size_bytes:
            buffer = self._local.buffer = bytearray(size_bytes)
        into = memoryview(buffer)[:size_bytes]
        count = read_part(descriptor, into, 0)
        forget_cached(descriptor, 0, count)
        return into[:count]


def _batches(found: list[Found]) -> Iterator[list[Found]]:
    remaining = iter(found)
    while batch := list(islice(remaining, _BATCH)):
        yield batch
