"""Lines and fields of trace files, plain, gzip or zstd; errors name file and line."""

import gzip
import io
import json
import os
import stat
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeVar, cast

from kvtier.errors import ConfigError, install_hint

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

LINE_BYTES_MAX = 1 << 25
"""JSON values take up to 25 times their text in memory: 800 MiB for one line."""
EMPTY_LINES_MAX = 1 << 20
"""Consecutive ones."""
EXPANDED_BYTES_FREE = 1 << 28
"""Any compressed file may expand to this."""
EXPANSION_MAX = 1000
"""Limit of the compression ratio beyond `EXPANDED_BYTES_FREE`. Traces compress 5 to 50 times."""
FILES_MAX = 1 << 14
"""Files of a directory."""
WHOLE_MAX = (1 << 31) - 1
"""Limit of token counts."""
NUMBER_MAX = 1e19
"""Limit of timestamps: nanoseconds since 1970 are 2e18."""
SHORT_CHARACTERS = 60
_GZIP = b"\x1f\x8b"
_ZSTD = b"\x28\xb5\x2f\xfd"
_ZSTD_INPUT_BYTES = 512
"""Input of one zstd call: at most 128 zstd blocks, which expand to at most 16 MiB."""
_PART_BYTES = 1 << 16
_LINES_SUFFIXES = (".json", ".jsonl")
_COMPRESSED_SUFFIXES = ("", ".gz", ".zst")

Parsed = TypeVar("Parsed")


class LineErrors:
    """Adds file and line to errors: wrap what may raise in ``with LineErrors(path, line)``."""

    __slots__ = ("_line", "_path", "_unit")

    def __init__(self, path: Path, line: int, unit: str = "line") -> None:
        self._path, self._line, self._unit = path, line, unit

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        text = None if error is None else _line_error(error)
        if text is not None and not text.startswith("trace "):  # the message of an inner one
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
    """The files of a trace: `path`, or the JSON-lines files of the directory `path`, sorted by name.

    Raises:
        ConfigError: the directory cannot be read, or has no such file or more than `FILES_MAX`.
    """
    if not path.is_dir():
        return [path]
    endings = tuple(lines + end for lines in _LINES_SUFFIXES for end in _COMPRESSED_SUFFIXES)
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
    """Open a file; its first bytes, not its name, tell plain, gzip or zstd.

    Raises:
        ConfigError: it cannot be opened or is not a regular file. Reading raises it if zstandard is not installed, or
            if a compressed file expands beyond `EXPANDED_BYTES_FREE` and `EXPANSION_MAX`.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise ConfigError(f"trace {path} is not a regular file; allowed: a file, which is read twice")
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
    """Whether a file begins with a msgpack array or map; UTF-8 text never does.

    Raises:
        ConfigError: as `open_binary`, or it is damaged.
    """
    try:
        with open_binary(path) as stream:
            first = stream.read(1)
    except OSError as error:
        raise ConfigError(f"trace {path}: {error.strerror or error}") from error
    return bool(first) and (0x80 <= first[0] <= 0x9F or 0xDC <= first[0] <= 0xDF)


class _Decompressed(io.RawIOBase):
    """Stream of a compressed file in bounded memory, whatever it expands to; damage is an OSError."""

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
        import zstandard  # noqa: PLC0415  an extra
    except ImportError:
        raise ConfigError(
            f"trace {path} is zstd, and zstandard is not installed; allowed: {install_hint('zstd')}"
        ) from None
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
    """Non-empty lines with their numbers from 1.

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
                        f"trace {path}, line {number}: empty lines in a row; allowed: at most {EMPTY_LINES_MAX}"
                    )
    except OSError as error:
        raise ConfigError(f"trace {path}, after line {number}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"trace {path}, line {number}: not a trace: not UTF-8: {error.reason} at byte {error.start + 1}"
        ) from error


def json_lines(path: Path, parse: Callable[[Path, int, dict[str, Any]], Parsed]) -> Iterator[Parsed]:
    """What `parse` makes of each JSON object of a trace; its arguments are the file, the line number and the object.

    Raises:
        ConfigError: as `files_of` and `text_lines`, a line is not a JSON object, or `parse` refuses it.
    """
    for file in files_of(path):
        for number, text in text_lines(file):
            with LineErrors(file, number):
                value: object = json.loads(text)
                if not isinstance(value, dict):
                    raise ConfigError(f"{short(text.strip())} is not a JSON object")
                parsed = parse(file, number, cast("dict[str, Any]", value))
            yield parsed


def whole(fields: dict[str, Any], name: str, *, least: int = 0) -> int:
    """The field `name` as an integer of at most `WHOLE_MAX`.

    Raises:
        ConfigError: it is not an integer, below `least` or too large.
        KeyError: it is missing.
    """
    value = fields[name]
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not least <= value <= WHOLE_MAX or value != int(value):
        raise ConfigError(f"{name} is {short(value)}; allowed: a whole number from {least} to {WHOLE_MAX}")
    return int(value)


def number(fields: dict[str, Any], name: str) -> float:
    """The field `name` as a finite number.

    Raises:
        ConfigError: it is not a finite number.
        KeyError: it is missing.
    """
    value = fields[name]
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= NUMBER_MAX:
        raise ConfigError(f"{name} is {short(value)}; allowed: a number of at most {NUMBER_MAX:g}")
    return float(value)


def short(value: object) -> str:
    """`value` for a message, truncated."""
    text = repr(value)
    return text if len(text) <= SHORT_CHARACTERS else f"{text[:SHORT_CHARACTERS]}…"
