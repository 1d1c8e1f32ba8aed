"""Re-read everything in a store's directory, and drop what is bad.

Reading disturbs nobody: no lock, no change of any file's age, nothing left in the kernel's cache. Only a repair opens
the store like any other process, so that the ledger stays exact.
"""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from kvtier.cli.store_view import head_in, marker_of, opened_object
from kvtier.codec.frame import verify_section
from kvtier.codec.head import Head
from kvtier.errors import CorruptChunkError
from kvtier.layout import SECTION_BYTES_MAX
from kvtier.tier.direct import forget_cached, read_part
from kvtier.tier.directory import DirectoryTier
from kvtier.tier.store_paths import Found, Paths, walk
from kvtier.types import ObjectName

THREADS = 4
_BATCH = 16 * THREADS
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
    reader = _Reader(root)

    def check(file: Found) -> str | None:
        return reader.problem(file.name)

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
    reader = _Reader(root)
    tier = DirectoryTier(root, capacity_bytes=_UNBOUNDED_BYTES, direct_io="off")
    with closing(tier):
        for bad in result.bad_objects:
            name = bytes.fromhex(bad.name)
            if reader.problem(name):
                tier.delete(ObjectName(name))
                result.dropped += 1


class _Reader:
    """Reads frames section by section, each thread into a buffer of its own."""

    def __init__(self, root: Path) -> None:
        self._paths = Paths(str(root))
        self._local = threading.local()

    def problem(self, name: bytes) -> str | None:
        """What is wrong with the object: "" when nothing is, None when it has vanished."""
        try:
            with opened_object(self._paths, name) as (descriptor, status):
                head = head_in(descriptor)
                if head.frame_bytes != status.st_size:
                    return f"{status.st_size} bytes stored of a frame of {head.frame_bytes}"
                self._verify(descriptor, head)
                forget_cached(descriptor, 0, status.st_size)
            if head.identity.name != name:
                return f"belongs to another object, {head.identity.name.hex()[:12]}"
        except FileNotFoundError:
            return None
        except CorruptChunkError as error:
            return error.detail
        except OSError as error:
            return f"cannot be read: {error.strerror}"
        return ""

    def _verify(self, descriptor: int, head: Head) -> None:
        buffer: bytearray | None = getattr(self._local, "buffer", None)
        if buffer is None:
            buffer = self._local.buffer = bytearray(SECTION_BYTES_MAX)
        for section in head.sections:
            extent = memoryview(buffer)[: section.extent_bytes]
            count = read_part(descriptor, extent, section.offset)
            verify_section(head, section, extent[:count])


def _batches(found: list[Found]) -> Iterator[list[Found]]:
    remaining = iter(found)
    while batch := list(islice(remaining, _BATCH)):
        yield batch
