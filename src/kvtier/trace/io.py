"""Lines of trace files, plain, gzip or zstd, and errors that say in which line of which file something is wrong."""

import gzip
import io
import json
import os
import stat
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

from kvtier.errors import ConfigError

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

LINE_BYTES_MAX = 1 << 25
"""JSON values take up to 25 times the bytes of their text in memory: 800 MiB for one line."""
EMPTY_LINES_MAX = 1 << 20
"""In a row."""
EXPANDED_BYTES_FREE = 1 << 28
"""Bytes that any packed file may expand to."""
EXPANSION_MAX = 1000
"""Beyond `EXPANDED_BYTES_FREE`, bytes for each packed byte. Traces are packed 5 to 50 times."""
FILES_MAX = 1 << 14
"""Of a trace that is a directory."""
WHOLE_MAX = (1 << 31) - 1
"""Tokens of a prompt, at most."""
NUMBER_MAX = 1e19
"""Of times: nanoseconds since 1970 are 2e18."""
SHORT_CHARACTERS = 60
_GZIP = b"\x1f\x8b"
_ZSTD = b"\x28\xb5\x2f\xfd"
_PACKED_BYTES = 512
"""Packed bytes that zstd is given at a time: they are 128 blocks at most, and expand to 16 MiB at most."""
_PART_BYTES = 1 << 16
_LINES_NAMES = (".json", ".jsonl")
_PACKED_NAMES = ("", ".gz", ".zst")


class Place:
    """Says in which line of which file something was wrong: wrap what may raise in ``with Place(path, line)``."""

    __slots__ = ("_line", "_path", "_unit")

    def __init__(self, path: Path, line: int, unit: str = "line") -> None:
        self._path, self._line, self._unit = path, line, unit

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, ConfigError):
            if str(error).startswith("trace "):
                return
            raise ConfigError(f"trace {self._path}, {self._unit} {self._line}: {error}") from None
        if isinstance(error, KeyError):
            raise ConfigError(f"trace {self._path}, {self._unit} {self._line}: {error.args[0]!r} is missing") from None
        if isinstance(error, json.JSONDecodeError):
            # Positions of the decoder name lines of its own, of which there is one.
            raise ConfigError(
                f"trace {self._path}, {self._unit} {self._line}: not JSON: {error.msg} at character {error.pos + 1}; "
                "allowed: a JSON value on each line"
            ) from None
        if isinstance(error, RecursionError):
            raise ConfigError(
                f"trace {self._path}, {self._unit} {self._line}: nested too deep; allowed: a few hundred levels"
            ) from None
        if isinstance(error, TypeError | ValueError | AttributeError | OverflowError):
            raise ConfigError(f"trace {self._path}, {self._unit} {self._line}: {error}") from None


def files_of(path: Path) -> list[Path]:
    """The files of a trace: `path`, or those of JSON lines in the directory `path`, in the order of their names.

    Raises:
        ConfigError: the directory cannot be read, holds none, or more than `FILES_MAX`.
    """
    if not path.is_dir():
        return [path]
    endings = tuple(lines + packed for lines in _LINES_NAMES for packed in _PACKED_NAMES)
    try:
        files = sorted(it for it in path.iterdir() if it.name.endswith(endings) and it.is_file())
    except OSError as error:
        raise ConfigError(f"trace {path}: {error.strerror or error}; allowed: a readable directory") from error
    if not 0 < len(files) <= FILES_MAX:
        raise ConfigError(
            f"trace {path}: {len(files)} files of this directory are traces; allowed: 1 to {FILES_MAX}, named "
            f"*{', *'.join(endings)}"
        )
    return files


def open_binary(path: Path) -> IO[bytes]:
    """Open a file, plain, gzip or zstd; what its first bytes say counts, not its name.

    Raises:
        ConfigError: it cannot be opened, is no regular file, or is zstd and the package for it is missing. Reading
            raises it too, when a packed file expands beyond `EXPANDED_BYTES_FREE` and `EXPANSION_MAX`.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise ConfigError(f"trace {path} is no regular file; allowed: a file, which is read twice")
        with path.open("rb") as stream:
            magic = stream.read(4)
        if magic.startswith(_GZIP):
            return io.BufferedReader(_Unpacked(path, _gzip_parts), _PART_BYTES)
        if magic == _ZSTD:
            return io.BufferedReader(_Unpacked(path, _zstd_parts), _PART_BYTES)
        return path.open("rb")
    except OSError as error:
        raise ConfigError(f"trace {path}: {error.strerror or error}; allowed: a readable file") from error


def is_msgpack(path: Path) -> bool:
    """Whether a file begins with a msgpack array or map, which no text does.

    Raises:
        ConfigError: as `open_binary`, or it is damaged.
    """
    try:
        with open_binary(path) as stream:
            first = stream.read(1)
    except (OSError, *damage_errors()) as error:
        raise ConfigError(f"trace {path}: not a trace: {error}") from error
    return bool(first) and (0x80 <= first[0] <= 0x9F or 0xDC <= first[0] <= 0xDF)


class _Unpacked(io.RawIOBase):
    """What a packed file expands to, part by part: its memory does not depend on how far the file expands."""

    def __init__(self, path: Path, parts: Callable[[Path, IO[bytes]], Iterator[bytes]]) -> None:
        self._path = path
        self._stream = path.open("rb")
        self._parts = parts(path, self._stream)
        self._part = memoryview(b"")
        self._given = 0
        self._most = max(EXPANDED_BYTES_FREE, EXPANSION_MAX * os.fstat(self._stream.fileno()).st_size)

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._given

    def readinto(self, buffer: "WriteableBuffer", /) -> int:
        while not self._part:
            part = next(self._parts, None)
            if part is None:
                return 0
            self._part = memoryview(part)
        into = memoryview(buffer).cast("B")
        count = min(len(into), len(self._part))
        into[:count] = self._part[:count]
        self._part = self._part[count:]
        self._given += count
        if self._given > self._most:
            raise ConfigError(
                f"trace {self._path} expands to more than {self._most} bytes; allowed: {EXPANDED_BYTES_FREE}, or "
                f"{EXPANSION_MAX} times its size"
            )
        return count

    def close(self) -> None:
        self._stream.close()
        super().close()


def _gzip_parts(_path: Path, stream: IO[bytes]) -> Iterator[bytes]:
    with gzip.GzipFile(fileobj=stream, mode="rb") as file:
        yield from iter(lambda: file.read1(_PART_BYTES), b"")


def _zstd_parts(path: Path, stream: IO[bytes]) -> Iterator[bytes]:
    try:
        import zstandard  # noqa: PLC0415  an extra, wanted only here
    except ImportError:
        raise ConfigError(
            f"trace {path} is zstd, and zstandard is not installed; allowed: pip install 'kvtier[zstd]'"
        ) from None
    decoder: Any = None
    while packed := stream.read(_PACKED_BYTES):
        while packed:
            decoder = decoder or zstandard.ZstdDecompressor().decompressobj()
            yield decoder.decompress(packed)
            packed = b""
            if decoder.eof:
                packed, decoder = decoder.unused_data, None
    if decoder is not None:
        raise EOFError("it ends within a zstd frame")


def text_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Lines of UTF-8 with their numbers from 1; empty ones are left out.

    Raises:
        ConfigError: the file cannot be read, is damaged, is no text, or a line is longer than `LINE_BYTES_MAX`.
    """
    number = empty = 0
    try:
        with open_binary(path) as stream:
            for number, line in enumerate(iter(lambda: stream.readline(LINE_BYTES_MAX + 1), b""), 1):
                if len(line) > LINE_BYTES_MAX:
                    raise ConfigError(
                        f"trace {path}, line {number}: longer than {LINE_BYTES_MAX} bytes; allowed: at most that"
                    )
                # Some programs begin a file with a mark that says it is UTF-8.
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                if text.strip():
                    empty = 0
                    yield number, text
                    continue
                empty += 1
                if empty > EMPTY_LINES_MAX:
                    raise ConfigError(
                        f"trace {path}, line {number}: more than {EMPTY_LINES_MAX} empty lines in a row; allowed: that"
                    )
    except OSError as error:
        raise ConfigError(f"trace {path}, after line {number}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"trace {path}, line {number}: not a trace: no UTF-8 text: {error.reason} at byte {error.start + 1}"
        ) from error
    except damage_errors() as error:
        raise ConfigError(f"trace {path}, after line {number}: not a trace: {error}") from error


def json_lines(path: Path) -> Iterator[tuple[Path, int, dict[str, Any]]]:
    """JSON objects of a trace, each with its file and the number of its line.

    Raises:
        ConfigError: as `files_of` and `text_lines`, or a line is no JSON object.
    """
    for file in files_of(path):
        for number, text in text_lines(file):
            with Place(file, number):
                value: object = json.loads(text)
                if not isinstance(value, dict):
                    raise ConfigError(f"{short(text.strip())} is not a JSON object")
            yield file, number, cast("dict[str, Any]", value)


def damage_errors() -> tuple[type[Exception], ...]:
    """What reading a damaged gzip or zstd file raises, besides OSError."""
    try:
        from zstandard import ZstdError  # noqa: PLC0415  an extra, wanted only here
    except ImportError:
        return (EOFError, zlib.error)
    return (EOFError, zlib.error, ZstdError)


def whole(fields: dict[str, Any], name: str, *, least: int = 0) -> int:
    """The field `name` as a whole number of at most `WHOLE_MAX`.

    Raises:
        ConfigError: it is missing, no whole number, below `least` or too large.
    """
    if name not in fields:
        raise ConfigError(f"{name!r} is missing")
    value = fields[name]
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not least <= value <= WHOLE_MAX or value != int(value):
        raise ConfigError(f"{name} is {short(value)}; allowed: a whole number from {least} to {WHOLE_MAX}")
    return int(value)


def number(fields: dict[str, Any], name: str) -> float:
    """The field `name` as a finite number.

    Raises:
        ConfigError: it is missing or no finite number.
    """
    if name not in fields:
        raise ConfigError(f"{name!r} is missing")
    value = fields[name]
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= NUMBER_MAX:
        raise ConfigError(f"{name} is {short(value)}; allowed: a number of at most {NUMBER_MAX:g}")
    return float(value)


def short(value: object) -> str:
    """`value` for a message: its beginning, where it is long."""
    text = repr(value)
    return text if len(text) <= SHORT_CHARACTERS else f"{text[:SHORT_CHARACTERS]}…"
