"""Lines of trace files, plain, gzip or zstd, and errors that say in which line of which file something is wrong."""

import gzip
import io
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

from kvtier.errors import ConfigError

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

LINE_BYTES_MAX = 1 << 27
FILES_MAX = 1 << 14
"""Of a trace that is a directory."""
WHOLE_MAX = (1 << 31) - 1
"""Tokens of a prompt, at most."""
_GZIP = b"\x1f\x8b"
_ZSTD = b"\x28\xb5\x2f\xfd"
_PACKED_BYTES = 1 << 16
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
        if isinstance(error, TypeError | ValueError | AttributeError | OverflowError | RecursionError):
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
        ConfigError: it cannot be opened, or it is zstd and the package for it is missing.
    """
    try:
        with path.open("rb") as stream:
            magic = stream.read(4)
        if magic.startswith(_GZIP):
            return cast("IO[bytes]", gzip.open(path, "rb"))
        if magic == _ZSTD:
            return _open_zstd(path)
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


def _open_zstd(path: Path) -> IO[bytes]:
    try:
        import zstandard  # noqa: PLC0415  an extra, wanted only here
    except ImportError:
        raise ConfigError(
            f"trace {path} is zstd, and zstandard is not installed; allowed: pip install 'kvtier[zstd]'"
        ) from None
    return io.BufferedReader(_Unpacked(path, zstandard))


class _Unpacked(io.RawIOBase):
    """Reads zstd as `gzip.open` reads gzip: a file that ends within a frame is an error, not a shorter file."""

    def __init__(self, path: Path, package: Any) -> None:  # noqa: ANN401  zstandard, which may be missing
        self._package = package
        self._stream = path.open("rb")
        self._decoder: Any = None
        self._packed = self._unpacked = b""
        self._given = 0

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._given

    def readinto(self, buffer: "WriteableBuffer", /) -> int:
        while not self._unpacked:
            self._packed = self._packed or self._stream.read(_PACKED_BYTES)
            if not self._packed:
                if self._decoder is not None:
                    raise EOFError("it ends within a zstd frame")
                return 0
            self._decoder = self._decoder or self._package.ZstdDecompressor().decompressobj()
            self._unpacked, self._packed = self._decoder.decompress(self._packed), b""
            if self._decoder.eof:
                self._packed, self._decoder = self._decoder.unused_data, None
        into = memoryview(buffer).cast("B")
        count = min(len(into), len(self._unpacked))
        into[:count] = self._unpacked[:count]
        self._unpacked = self._unpacked[count:]
        self._given += count
        return count

    def close(self) -> None:
        self._stream.close()
        super().close()


def text_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Lines of UTF-8 with their numbers from 1; empty ones are left out.

    Raises:
        ConfigError: the file cannot be read, is damaged, or is no text.
    """
    number = 0
    try:
        with open_binary(path) as stream:
            for number, line in enumerate(iter(lambda: stream.readline(LINE_BYTES_MAX), b""), 1):
                # Some programs begin a file with a mark that says it is UTF-8.
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                if text.strip():
                    yield number, text
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
                    raise ConfigError(f"{text[:40].strip()!r} is not a JSON object")
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
        raise ConfigError(f"{name} is {value!r}; allowed: a whole number from {least} to {WHOLE_MAX}")
    return int(value)


def number(fields: dict[str, Any], name: str) -> float:
    """The field `name` as a finite number.

    Raises:
        ConfigError: it is missing or no finite number.
    """
    if name not in fields:
        raise ConfigError(f"{name!r} is missing")
    value = fields[name]
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < float("inf"):
        raise ConfigError(f"{name} is {value!r}; allowed: a number")
    return float(value)
