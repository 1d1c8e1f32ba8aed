"""Frames as values of a Valkey server: the requests that write and read a frame, and the meaning of their answers.

A frame is one value, or several of at most `PART_BYTES`. The first has the object's key, and the others have the key
with ``/1``, ``/2`` and so on. Each value begins with `HEADER`, which is a magic number, a stamp and the frame's length.
Parts are written in one transaction, so that there is a whole object or none. A server may evict parts one by one. An
object that lacks parts, or has parts with different stamps, is torn, which is a miss.

Values are small because servers copy and send large ones slowly. Small values also let a pipeline send a part while the
previous one is stored.
"""

from collections.abc import Sequence
from struct import Struct

import xxhash

from kvtier.tier.valkey.connection import Buffer, Reader, RefusedError, Reply, command
from kvtier.tier.valkey.pipeline import Request, Transaction

PART_BYTES = (1 << 19) - 4096
"""Bytes of a frame in one value. The value fits an allocation of 512 KiB with this header and the server's own."""
FRAME_BYTES_MAX = 1 << 30
HEADER = Struct("<4sIQ")
"""Magic number, stamp, bytes of the frame."""
MAGIC = b"kvt1"
STAMPED_BYTES = 4096
"""The stamp is a checksum of this many bytes of the frame, which begins with checksums of the rest."""
FOREIGN_BYTES_MAX = 1 << 22
"""A foreign value up to this size is skipped. For a larger one, the connection is closed."""

NEW_ONLY = b"NX"
"""Option of SET that keeps an existing value."""

_TORN = b"torn"
"""Answer of a `ValuePart` whose value is not the expected one."""


def part_key(key: bytes, number: int) -> bytes:
    """Return the key of a part of the object with the key `key`."""
    return b"%b/%d" % (key, number) if number else key


def part_count(frame_bytes: int) -> int:
    """Return the number of values that a frame takes."""
    return max(1, -(-frame_bytes // PART_BYTES))


def header_request(slot: int, key: bytes) -> Request:
    """Make a request for the header alone, whose answer `frame_bytes` reads."""
    found = Request(slot, [command(b"GETRANGE", key, b"0", b"%d" % (HEADER.size - 1))])
    found.may_stall = True
    return found


def frame_bytes(answer: Reply) -> int | None:
    """Return the frame's length from `answer`, or None if that is not a header that kvtier wrote."""
    if not isinstance(answer, bytes) or len(answer) != HEADER.size:
        return None
    magic, _, length = HEADER.unpack(answer)
    return length if magic == MAGIC and length <= FRAME_BYTES_MAX else None


def removal(slot: int, key: bytes, length: int) -> Request:
    """Make a request that removes an object of `length` bytes."""
    return Request(slot, [command(b"UNLINK", *(part_key(key, number) for number in range(part_count(length))))])


def write_request(slot: int, key: bytes, frame: memoryview, lifetime: bytes) -> Request:
    """Make a request that writes `frame`. Its answer is None if the object is one value and already exists.

    A frame of several values replaces existing parts, which may be left over from an evicted object with other bytes.

    Args:
        slot: slot of the object.
        key: key of its first part.
        frame: bytes of the object.
        lifetime: lifetime in milliseconds; empty if unlimited.
    """
    count = part_count(frame.nbytes)
    options = [] if count > 1 else [NEW_ONLY]
    if lifetime:
        options += [b"PX", lifetime]
    end = b"\r\n" + b"".join(b"$%d\r\n%b\r\n" % (len(each), each) for each in options)
    stamp = xxhash.xxh3_64_intdigest(frame[:STAMPED_BYTES], seed=frame.nbytes) & 0xFFFFFFFF
    header = HEADER.pack(MAGIC, stamp, frame.nbytes)
    commands: list[Sequence[Buffer]] = []
    for number in range(count):
        name, content = part_key(key, number), frame[number * PART_BYTES : (number + 1) * PART_BYTES]
        size = HEADER.size + content.nbytes
        start = b"*%d\r\n$3\r\nSET\r\n$%d\r\n%b\r\n" % (3 + len(options), len(name), name)
        commands.append((start + b"$%d\r\n%b" % (size, header), content, end))
    return Transaction(slot, commands) if count > 1 else Request(slot, commands[0])


class ValuePart(Request):
    """Loads those bytes of one value that belong to `into`.

    The answer is 1 if they were loaded, None if the value does not exist, and b"torn" if it is not the expected one.

    Args:
        slot: slot of the key.
        key: key of the object.
        number: number of the part.
        into: filled from byte `offset` of the frame.
        offset: offset in the frame, at least 0.
        lifetime: the value's lifetime after this use, in milliseconds; empty if the use does not renew it.
    """

    payload_bytes_max = PART_BYTES
    may_stall = True

    def __init__(self, slot: int, key: bytes, number: int, into: memoryview, offset: int, lifetime: bytes) -> None:
        name = part_key(key, number)
        super().__init__(slot, [command(b"GETEX", name, b"PX", lifetime) if lifetime else command(b"GET", name)])
        self.payload_bytes = min(PART_BYTES, into.nbytes)
        self.number, self._into, self._offset = number, into, offset
        self.header: tuple[int, int] = (0, 0)
        """The frame's stamp and length."""

    def take(self, reader: Reader) -> Reply:
        """Move the payload from the socket to the buffer."""
        size = reader.bulk(FOREIGN_BYTES_MAX)
        if size is None or isinstance(size, RefusedError):
            return _TORN if size is not None and size.code == "WRONGTYPE" else size
        if size < HEADER.size:
            return _skipped(reader, size)
        header = bytearray(HEADER.size)
        reader.take(memoryview(header))
        magic, stamp, length = HEADER.unpack(header)
        first = self.number * PART_BYTES
        payload = size - HEADER.size
        if magic != MAGIC or length > FRAME_BYTES_MAX or payload != min(self.payload_bytes_max, length - first):
            return _skipped(reader, payload)
        self.header = (stamp, length)
        start = max(0, self._offset - first)
        stop = min(payload, self._offset + self._into.nbytes - first)
        if start < stop:
            reader.skip(start)
            place = first + start - self._offset
            reader.take(self._into[place : place + stop - start])
            reader.skip(payload - stop)
        else:
            reader.skip(payload)
        reader.end()
        return 1


class Front(ValuePart):
    """Loads only the front of an object's first value.

    The answer is as in `ValuePart`, except that it is b"torn", not None, if the value does not exist.

    Args:
        slot: slot of the key.
        key: key of the object.
        into: buffer of at most `PART_BYTES`.
    """

    def __init__(self, slot: int, key: bytes, into: memoryview) -> None:
        super().__init__(slot, key, 0, into, 0, b"")
        self.buffers = [command(b"GETRANGE", key, b"0", b"%d" % (HEADER.size + into.nbytes - 1))]
        self.payload_bytes_max = into.nbytes

    def byte_count(self) -> int | None:
        """Return the number of bytes loaded, or None if the object is absent or torn."""
        return min(self.payload_bytes_max, self.header[1]) if self.answer == 1 else None


class Loading:
    """One object that is being loaded from the servers.

    Args:
        slot: slot of the object.
        key: key of its first part.
        into: receives the frame from byte `offset`.
        offset: at least 0.
        lifetime: as in `ValuePart`.
    """

    def __init__(self, slot: int, key: bytes, into: memoryview, offset: int, lifetime: bytes) -> None:
        self.slot, self.key = slot, key
        self._into, self._offset, self._lifetime = into, offset, lifetime
        last = (offset + max(into.nbytes, 1) - 1) // PART_BYTES
        self.parts = [
            ValuePart(slot, key, number, into, offset, lifetime)
            for number in dict.fromkeys((0, *range(offset // PART_BYTES, min(last, part_count(FRAME_BYTES_MAX)) + 1)))
        ]

    @property
    def is_torn(self) -> bool:
        """Whether all parts were read, and those that exist do not form an object."""
        is_read = not any(part.has_failed for part in self.parts)
        return is_read and self._whole() is None and any(part.answer is not None for part in self.parts)

    def again(self) -> "Loading":
        """Return a new loading of the same bytes, for another attempt."""
        return Loading(self.slot, self.key, self._into, self._offset, self._lifetime)

    def is_like(self, other: "Loading") -> bool:
        """Return whether both found the same parts from the same writers."""
        return [part.header for part in self.parts] == [part.header for part in other.parts]

    def removal(self) -> Request:
        """Make a request that removes the remaining parts of the object."""
        return removal(self.slot, self.key, max(part.header[1] for part in self.parts))

    def byte_count(self) -> int | None:
        """Return how many bytes were loaded, or None if the object is absent or torn. Every part must be answered."""
        length = self._whole()
        return None if length is None else max(0, min(self._into.nbytes, length - self._offset))

    def _whole(self) -> int | None:
        """Return the frame's length, if the first part exists and the others match it.

        Further parts may be left over from a longer object that was evicted.
        """
        if self.parts[0].answer != 1:
            return None
        header = self.parts[0].header
        for part in self.parts:
            if part.number < part_count(header[1]) and (part.answer != 1 or part.header != header):
                return None
        return header[1]


def _skipped(reader: Reader, byte_count: int) -> bytes:
    reader.skip(byte_count)
    reader.end()
    return _TORN
