"""Reads lines and fields of plain, gzip, zstd or parquet trace files. Errors name file and line."""

import codecs
import gzip
import io
import json
import os
import re
import stat
import zlib
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeVar, cast

from kvtier.errors import ConfigError, install_hint

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

LINE_BYTES_MAX = 1 << 25
"""Longest line in bytes. In memory, JSON takes up to 25 times as much, 800 MiB for one line."""
EMPTY_LINES_MAX = 1 << 20
"""Maximum number of consecutive empty lines."""
EXPANDED_BYTES_FREE = 1 << 28
"""Size in bytes to which a compressed file may expand, whatever its compression ratio."""
EXPANSION_MAX = 1000
"""Maximum compression ratio of a file that expands beyond `EXPANDED_BYTES_FREE`. Traces have ratios of 5 to 50."""
FILES_MAX = 1 << 14
"""Maximum number of trace files in a directory."""
WHOLE_MAX = (1 << 31) - 1
"""Largest token count."""
NUMBER_MAX = 1e19
"""Largest timestamp. The present time is 2e18 nanoseconds since 1970."""
SHORT_CHARACTERS = 60
_GZIP = b"\x1f\x8b"
_ZSTD = b"\x28\xb5\x2f\xfd"
_ZSTD_INPUT_BYTES = 512
"""Input bytes of one zstd call. They contain at most 128 zstd blocks, which expand to at most 16 MiB."""
_PART_BYTES = 1 << 16
_ENTRY_BYTES = 1 << 20
_PARQUET = b"PAR1"
_PARQUET_ROWS = 64
"""Maximum number of rows in memory at the same time."""
_ARRAY = re.compile(rb"(\xef\xbb\xbf)?\s*\[\s*\{")
"""Start of an array of objects. A line of KV events may be an array as well, but not of objects."""
_BEFORE_ENTRY = re.compile(r"\s*[\[,]?\s*")
_LINES_SUFFIXES = (".json", ".jsonl")
_PARQUET_SUFFIX = ".parquet"
_COMPRESSED_SUFFIXES = ("", ".gz", ".zst")

Parsed = TypeVar("Parsed")


class LineErrors:
    """A context manager that adds file and line to errors: ``with LineErrors(path, line)``."""

    __slots__ = ("_line", "_path", "_unit")

    def __init__(self, path: Path, line: int, unit: str = "line") -> None:
        self._path, self._line, self._unit = path, line, unit

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        text = None if error is None else _line_error(error)
        if text is not None and not text.startswith("trace "):  # an inner LineErrors has already named the trace
            raise ConfigError(f"trace {self._path}, {self._unit} {self._line}: {text}") from None


def _line_error(error: BaseException) -> str | None:
    if isinstance(error, KeyError):
        return f"{error.args[0]!r} is missing"
    if isinstance(error, json.JSONDecodeError):
        # The decoder's own line number is always 1.
        return f"not JSON: {error.msg} at character {error.pos + 1}; allowed: a JSON value on each line"
    if isinstance(error, RecursionError):
        return "nested too deep; allowed: a few hundred levels"
    is_data_error = isinstance(error, ConfigError | TypeError | ValueError | AttributeError | OverflowError)
    return str(error) if is_data_error else None


def files_of(path: Path) -> list[Path]:
    """Return the files of a trace: `path`, or the JSON-lines and parquet files of the directory `path`, sorted by name.

    Raises:
        ConfigError: the directory cannot be read, has no such file, or has more than `FILES_MAX`.
    """
    if not path.is_dir():
        return [path]
    endings = (*(lines + end for lines in _LINES_SUFFIXES for end in _COMPRESSED_SUFFIXES), _PARQUET_SUFFIX)
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
    """Open a file. The first bytes, not the name, decide between plain, gzip and zstd.

    Raises:
        ConfigError: the file cannot be opened or is not a regular file. Reading raises it if zstandard is not
        installed, or if a compressed file expands beyond `EXPANDED_BYTES_FREE` and `EXPANSION_MAX`.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise ConfigError(f"trace {path} is not a regular file; use one, because it is read twice")
        with path.open("rb") as stream:
            magic = stream.read(4)
        if magic.startswith(_GZIP):
            return io.BufferedReader(_Decompressed(path, _gzip_parts), _PART_BYTES)
        if magic == _ZSTD:
            return io.BufferedReader(_Decompressed(path, _zstd_parts), _PART_BYTES)
        return path.open("rb")
    except OSError as error:
        raise ConfigError(f"trace {path}: {error.strerror or error}; allowed: a readable file") from error


def is_msgpack(path: Path) -> bool:
    """Return whether a file starts with a msgpack array or map. JSON and CSV never start with such a byte.

    Raises:
        ConfigError: as in `open_binary`, or the file is damaged.
    """
    try:
        with open_binary(path) as stream:
            first = stream.read(1)
    except OSError as error:
        raise ConfigError(f"trace {path}: {error.strerror or error}") from error
    return bool(first) and (0x80 <= first[0] <= 0x9F or 0xDC <= first[0] <= 0xDF)


def _check_expansion(path: Path, expanded: int, size: int) -> None:
    most = max(EXPANDED_BYTES_FREE, EXPANSION_MAX * size)
    if expanded > most:
        raise ConfigError(
            f"trace {path} expands to more than {most} bytes; allowed: {EXPANDED_BYTES_FREE} bytes or {EXPANSION_MAX} "
            "times its size, whichever is more"
        )


class _Decompressed(io.RawIOBase):
    """Streams a compressed file in bounded memory, whatever its expanded size. A damaged file raises OSError."""

    def __init__(self, path: Path, parts: Callable[[Path, IO[bytes]], Iterator[bytes]]) -> None:
        self._path = path
        self._stream = path.open("rb")
        self._parts = parts(path, self._stream)
        self._part = memoryview(b"")
        self._given = 0
        self._size = os.fstat(self._stream.fileno()).st_size

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._given

    def readinto(self, buffer: "WriteableBuffer", /) -> int:
        while not self._part:
            try:
                part = next(self._parts, None)
            except (EOFError, zlib.error, gzip.BadGzipFile) as error:
                raise OSError(f"not a trace: {error}") from error
            if part is None:
                return 0
            self._part = memoryview(part)
        into = memoryview(buffer).cast("B")
        count = min(len(into), len(self._part))
        into[:count] = self._part[:count]
        self._part = self._part[count:]
        self._given += count
        _check_expansion(self._path, self._given, self._size)
        return count

    def close(self) -> None:
        self._stream.close()
        super().close()


def _gzip_parts(_path: Path, stream: IO[bytes]) -> Iterator[bytes]:
    with gzip.GzipFile(fileobj=stream, mode="rb") as file:
        yield from iter(lambda: file.read1(_PART_BYTES), b"")


def _zstd_parts(path: Path, stream: IO[bytes]) -> Iterator[bytes]:
    try:
        import zstandard  # noqa: PLC0415  an optional package
    except ImportError:
        raise ConfigError(f"trace {path} is zstd, and zstandard is not installed: {install_hint('zstd')}") from None
    decoder: Any = None
    while packed := stream.read(_ZSTD_INPUT_BYTES):
        while packed:
            decoder = decoder or zstandard.ZstdDecompressor().decompressobj()
            try:
                part = decoder.decompress(packed)
            except zstandard.ZstdError as error:
                raise EOFError(str(error)) from error
            yield part
            packed = b""
            if decoder.eof:
                packed, decoder = decoder.unused_data, None
    if decoder is not None:
        raise EOFError("truncated zstd frame")


def text_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield non-empty lines with their numbers from 1.

    Raises:
        ConfigError: the file cannot be read, is damaged or not UTF-8, or a line is longer than `LINE_BYTES_MAX`.
    """
    number = empty = 0
    try:
        with open_binary(path) as stream:
            for number, line in enumerate(iter(lambda: stream.readline(LINE_BYTES_MAX + 1), b""), 1):
                if len(line) > LINE_BYTES_MAX:
                    raise ConfigError(f"trace {path}, line {number}: too long; allowed: at most {LINE_BYTES_MAX} bytes")
                # Some programs write a byte order mark.
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                empty = 0 if text.strip() else empty + 1
                if not empty:
                    yield number, text
                if empty > EMPTY_LINES_MAX:
                    raise ConfigError(
                        f"trace {path}, line {number}: too many empty lines; allowed: at most {EMPTY_LINES_MAX}"
                    )
    except OSError as error:
        raise ConfigError(f"trace {path}, after line {number}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"trace {path}, line {number}: not a trace: not UTF-8: {error.reason} at byte {error.start + 1}"
        ) from error


def json_lines(path: Path, parse: Callable[[Path, int, dict[str, Any]], Parsed]) -> Iterator[Parsed]:
    """Call `parse` for each JSON object of a trace, and yield the results.

    `parse` is given the file, the object's number in the file, and the object.

    Raises:
        ConfigError: as in `files_of` and `records`, or a record is not a JSON object, or `parse` refuses it.
    """
    for file in files_of(path):
        for unit, number, value in records(file):
            with LineErrors(file, number, unit):
                if not isinstance(value, dict):
                    raise ConfigError(f"{short(value)} is not a JSON object")
                parsed = parse(file, number, cast("dict[str, Any]", value))
            yield parsed


def records(path: Path) -> Iterator[tuple[str, int, object]]:
    """Yield the unit (line, entry of an array, or row), the number from 1 and the value of each JSON value in a file.

    A row of parquet becomes an object without nulls, and with times in milliseconds since 1970.

    Raises:
        ConfigError: as in `text_lines`, or a value is not JSON or longer than `LINE_BYTES_MAX`, or pyarrow is missing.
    """
    try:
        with open_binary(path) as stream:
            head = stream.read(_PART_BYTES)
    except OSError as error:
        raise ConfigError(f"trace {path}: {error.strerror or error}") from error
    if head.startswith(_PARQUET):
        yield from (("row", number, value) for number, value in enumerate(_rows(path), 1))
        return
    if _ARRAY.match(head):
        yield from (("entry", number, value) for number, value in enumerate(_entries(path), 1))
        return
    for number, text in text_lines(path):
        with LineErrors(path, number):
            value = json.loads(text)
        yield "line", number, value


def _entries(path: Path) -> Iterator[object]:
    """Yield the values of a JSON array. Only the current value is in memory."""
    decoder, utf8 = json.JSONDecoder(), codecs.getincrementaldecoder("utf-8-sig")()
    text, at, number = "", 0, 1
    with open_binary(path) as stream:
        is_last = False
        while not is_last:
            with LineErrors(path, number, "entry"):
                try:
                    part = stream.read(_ENTRY_BYTES)
                except OSError as error:
                    raise ConfigError(f"not a trace: {error.strerror or error}") from error
                is_last = not part
                text, at = text[at:] + utf8.decode(part, is_last), 0
            while (at := _BEFORE_ENTRY.match(text, at).end()) < len(text):  # pyright: ignore[reportOptionalMemberAccess]
                if text[at] == "]":
                    return
                with LineErrors(path, number, "entry"):
                    try:
                        value, at = decoder.raw_decode(text, at)
                    except json.JSONDecodeError as error:
                        if is_last or len(text) - at > LINE_BYTES_MAX:
                            raise ConfigError(f"not JSON: {error.msg}; allowed: a JSON array of objects") from None
                        break
                yield value
                number += 1
    raise ConfigError(f"trace {path}, entry {number}: the array has no end, so the file is incomplete")


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    try:
        parquet: Any = import_module("pyarrow.parquet")
    except ImportError:
        raise ConfigError(f"trace {path} is parquet, and pyarrow is not installed: {install_hint('parquet')}") from None
    try:
        with parquet.ParquetFile(path) as file:
            groups = range(file.metadata.num_row_groups)
            expanded = sum(file.metadata.row_group(it).total_byte_size for it in groups)
            _check_expansion(path, expanded, path.stat().st_size)
            for batch in file.iter_batches(_PARQUET_ROWS):
                for row in batch.to_pylist():
                    yield {name: _as_json(value) for name, value in row.items() if value is not None}
    except (OSError, ValueError, NotImplementedError) as error:  # pyarrow's errors are subclasses of these
        raise ConfigError(f"trace {path}: not a trace: {error}") from error


def _as_json(value: object) -> object:
    if not isinstance(value, datetime):
        return value
    return (value if value.tzinfo else value.replace(tzinfo=UTC)).timestamp() * 1e3


def whole(fields: dict[str, Any], name: str, *, least: int = 0) -> int:
    """Return the field `name` as an integer of at most `WHOLE_MAX`.

    Raises:
        ConfigError: the field is not an integer, is below `least`, or is too large.
        KeyError: the field is missing.
    """
    value = fields[name]
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not least <= value <= WHOLE_MAX or value != int(value):
        raise ConfigError(f"{name} is {short(value)}; allowed: a whole number from {least} to {WHOLE_MAX}")
    return int(value)


def number(fields: dict[str, Any], name: str) -> float:
    """Return the field `name` as a finite number.

    Raises:
        ConfigError: the field is not a number, or its magnitude is above `NUMBER_MAX`.
        KeyError: the field is missing.
    """
    value = fields[name]
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= NUMBER_MAX:
        raise ConfigError(f"{name} is {short(value)}; allowed: a number from -{NUMBER_MAX:g} to {NUMBER_MAX:g}")
    return float(value)


def short(value: object) -> str:
    """Return `value` as text for a message, truncated."""
    text = repr(value)
    return text if len(text) <= SHORT_CHARACTERS else f"{text[:SHORT_CHARACTERS]}…"
