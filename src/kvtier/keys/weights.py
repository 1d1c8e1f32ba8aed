r"""Digest of a model's weights, from the files of a checkpoint or from tensors in memory.

Fixed pieces of 8 MiB are hashed in parallel (SHA-256 releases the interpreter lock) and combined into one digest:

    part   = SHA-256( "kvtier.weights.part\0" | u64 n | head | u64 bytes | SHA-256 of each piece )
    digest = SHA-256( "kvtier.weights\0" | u64 parts | parts, sorted by name: u64 n | name | part digest )

n is the length of the next field. The name of a file is its path below the common directory of all files, so a
checkpoint may move. The head of a file is empty, and the head of a tensor is its dtype and shape. Files and tensors of
the same weights give different digests.
"""

import hashlib
import itertools
import json
import logging
import os
import struct
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from time import perf_counter
from types import MappingProxyType
from typing import NamedTuple

from kvtier.errors import ConfigError

PIECE_BYTES = 8 << 20
"""Size of a piece. It is part of the definition of the digest, so it must never change."""

THREADS_MAX = 8
CACHE_BYTES_MAX = 4 << 20
CACHE_ENTRIES_MAX = 4096
STABLE_S = 2.0
"""Coarsest resolution of file times. A file that changed this recently may change again without a new time."""

_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json")
_NOT_WEIGHTS = ("training_args.bin", "optimizer.bin", "optimizer.pt", "scheduler.bin", "scheduler.pt", "scaler.pt")
_U64 = struct.Struct("<Q")
_DIGEST_BYTES = 32
_log = logging.getLogger(__name__)


Bytes = bytes | bytearray | memoryview


class FileVersion(NamedTuple):
    """Identifies the content of a file without reading it."""

    inode: int
    device: int
    size_bytes: int
    mtime_ns: int
    ctime_ns: int


class WeightsDigest(NamedTuple):
    """A digest and its cost."""

    digest: bytes
    """32 bytes."""
    total_bytes: int
    hashed_bytes: int
    """Bytes that were read and hashed. The digests of other files came from the cache file."""
    seconds: float
    versions: Mapping[Path, FileVersion] = MappingProxyType({})
    """The version of each file that the digest covers, by absolute path; empty for tensors."""


class _WeightsPart(NamedTuple):
    """One file or tensor, hashed in pieces."""

    name: str
    head: bytes
    size_bytes: int
    piece: Callable[[int, int], bytes]
    """Takes (offset, length) and returns the SHA-256 of that piece."""


def checkpoint_files(path: str | os.PathLike[str]) -> list[Path]:
    """Return the weight files of a checkpoint: the ones directly in a directory, or `path` itself if it is a file.

    Weights are safetensors, PyTorch and GGUF files, and the indexes of sharded files. All kinds count, because the
    loader's choice is not known here.

    Raises:
        ConfigError: `path` is missing, unreadable or without weights.
    """
    place = Path(path)
    if place.is_file():
        return [place]
    try:
        found = sorted(place.iterdir())
    except OSError as error:
        raise ConfigError(f"checkpoint {place} cannot be read: {error.strerror}") from error
    files = [file for file in found if file.name.endswith(_WEIGHT_SUFFIXES) and file.name not in _NOT_WEIGHTS]
    files = [file for file in files if not file.is_dir()]
    if not files:
        raise ConfigError(f"checkpoint {place} contains no weights; kvtier looked for *{', *'.join(_WEIGHT_SUFFIXES)}")
    return files


def home_cache() -> Path | None:
    """Return the path of the digest cache in the user's home directory; None if its folder cannot be made."""
    try:
        place = Path.home() / ".cache" / "kvtier"
        for folder in (place.parent, place):
            folder.mkdir(exist_ok=True, mode=0o700)
    except (OSError, RuntimeError) as error:
        _log.info("digests of weights files are not cached: %s", error)
        return None
    return place / "weights.json"


def digest_files(
    paths: Iterable[str | os.PathLike[str]],
    cache_file: str | os.PathLike[str] | None = None,
    stable_s: float = STABLE_S,
) -> WeightsDigest:
    """Digest files. The result depends on their contents and on their paths below their common directory.

    Args:
        paths: the files, in any order.
        cache_file: cache of the digests of single files, by `FileVersion`, with mode 0600. A cache that is damaged or
            writable by others is ignored and replaced. A failed write costs only time.
        stable_s: files changed more recently than this are not cached.

    Raises:
        ConfigError: there are no files; one is missing, unreadable, or changes during the read; or one is given
            twice.
    """
    started = perf_counter()
    files = _named([Path(os.path.abspath(path)) for path in paths])  # noqa: PTH100 (resolve() would follow links)
    versions = {name: _version(path) for name, path in files.items()}
    known = {} if cache_file is None else _read_cache(Path(cache_file))
    fresh = {name: version for name, version in versions.items() if version not in known}
    hashed_bytes = sum(version.size_bytes for version in fresh.values())
    parts = [_WeightsPart(name, b"", fresh[name].size_bytes, _reader_of_file(files[name])) for name in fresh]
    digests = _digests_of_parts(parts)
    for name, version in fresh.items():
        if _version(files[name]) != version:
            raise ConfigError(f"weights file {files[name]} changed while it was being read")
        known[version] = digests[name]
    if cache_file is not None and fresh:
        _write_cache(Path(cache_file), known, stable_s)
    combined = _combined({name: known[version] for name, version in versions.items()})
    total_bytes = sum(version.size_bytes for version in versions.values())
    covered = {files[name]: version for name, version in versions.items()}
    return WeightsDigest(combined, total_bytes, hashed_bytes, perf_counter() - started, covered)


def file_versions(paths: Iterable[str | os.PathLike[str]]) -> dict[Path, FileVersion]:
    """Return the version of each file now, by absolute path. A file that cannot be examined is left out."""
    found: dict[Path, FileVersion] = {}
    for path in paths:
        absolute = Path(os.path.abspath(path))  # noqa: PTH100 (resolve() would follow links)
        with suppress(ConfigError):
            found[absolute] = _version(absolute)
    return found


def changed_file(
    before: Mapping[Path, FileVersion], after: Mapping[Path, FileVersion], *, may_download: bool
) -> Path | None:
    """Return the first file, in order of paths, that differs between two checks; None if none does.

    Args:
        before: versions at the first check, before an engine reads the files.
        after: versions at a later check; for digested files, those that the digest covers.
        may_download: whether the first check may have come before a download, so that a new file is not a change.
    """
    changed = (path for path, version in before.items() if after.get(path) != version)
    new = (path for path in after if path not in before and not may_download)
    return min(itertools.chain(changed, new), default=None)


def digest_tensors(tensors: Iterable[tuple[str, str, tuple[int, ...], Bytes]]) -> WeightsDigest:
    """Digest tensors in memory, in any order. The result depends on names, dtypes, shapes and contents.

    Args:
        tensors: (name, dtype, shape, contiguous bytes) of each tensor; consumed as threads become free.

    Raises:
        ConfigError: there are no tensors, or two have the same name.
        ValueError: the bytes of a tensor are not contiguous.
    """
    started = perf_counter()
    sizes: list[int] = []

    def parts() -> Iterator[_WeightsPart]:
        for name, dtype, shape, content in tensors:
            view = _flat(name, content)
            sizes.append(view.nbytes)
            yield _WeightsPart(name, _head_of_tensor(dtype, shape), view.nbytes, _reader_of_bytes(view))

    combined = _combined(_digests_of_parts(parts()))
    return WeightsDigest(combined, sum(sizes), sum(sizes), perf_counter() - started)


def _named(paths: Sequence[Path]) -> dict[str, Path]:
    """Return each file by its path below the common directory."""
    if not paths:
        raise ConfigError("no weights files were given")
    root = Path(os.path.commonpath([path.parent for path in paths]))
    named = {path.relative_to(root).as_posix(): path for path in paths}
    if len(named) != len(paths):
        raise ConfigError(f"the same weights file was given twice, below {root}")
    return named


def _version(path: Path) -> FileVersion:
    try:
        about = path.stat()
    except OSError as error:
        raise ConfigError(f"weights file {path} cannot be read: {error.strerror}") from error
    return FileVersion(about.st_ino, about.st_dev, about.st_size, about.st_mtime_ns, about.st_ctime_ns)


class _Local(threading.local):
    """One buffer per thread, because allocating memory for each piece would take half as long as hashing it."""

    def __init__(self) -> None:
        self.view = memoryview(bytearray(PIECE_BYTES))


_local = _Local()


def _reader_of_file(path: Path) -> Callable[[int, int], bytes]:
    def piece(offset: int, length: int) -> bytes:
        view = _local.view[:length]
        try:
            with path.open("rb", buffering=0) as file:
                file.seek(offset)
                count = 0
                while count < length and (step := file.readinto(view[count:])):
                    count += step
        except OSError as error:
            raise ConfigError(f"weights file {path} cannot be read: {error.strerror}") from error
        if count < length:
            raise ConfigError(f"weights file {path} changed while it was being read")
        return hashlib.sha256(view).digest()

    return piece


def _reader_of_bytes(view: memoryview) -> Callable[[int, int], bytes]:
    return lambda offset, length: hashlib.sha256(view[offset : offset + length]).digest()


def _flat(name: str, content: Bytes) -> memoryview:
    view = memoryview(content)
    if view.nbytes == 0:
        return memoryview(b"")  # views with a zero in the shape cannot be cast
    if not view.c_contiguous:
        raise ValueError(f"tensor {name!r}: its bytes must be contiguous")
    return view.cast("B")


def _head_of_tensor(dtype: str, shape: tuple[int, ...]) -> bytes:
    return json.dumps([dtype, [int(size) for size in shape]], separators=(",", ":")).encode()


def _digests_of_parts(parts: Iterable[_WeightsPart]) -> dict[str, bytes]:
    """Return the digest of each part, by name. At most two pieces per thread are in flight."""
    threads = min(THREADS_MAX, len(os.sched_getaffinity(0)))
    # Parts are not kept, because their bytes may be copies of a device's memory.
    heads: dict[str, tuple[bytes, int]] = {}
    pieces: dict[str, list[bytes]] = {}
    flying: deque[tuple[str, Future[bytes]]] = deque()
    pool = ThreadPoolExecutor(threads, thread_name_prefix="kvtier-weights")
    try:
        for part in parts:
            if part.name in heads:
                raise ConfigError(f"two weights have the name {part.name!r}")
            heads[part.name], pieces[part.name] = (part.head, part.size_bytes), []
            for offset in range(0, part.size_bytes, PIECE_BYTES):
                length = min(PIECE_BYTES, part.size_bytes - offset)
                flying.append((part.name, pool.submit(part.piece, offset, length)))
                if len(flying) == 2 * threads:
                    name, oldest = flying.popleft()
                    pieces[name].append(oldest.result())
        for name, future in flying:
            pieces[name].append(future.result())
    finally:
        pool.shutdown(cancel_futures=True)
    return {name: _digest_of_part(head, size_bytes, pieces[name]) for name, (head, size_bytes) in heads.items()}


def _digest_of_part(head: bytes, size_bytes: int, pieces: Sequence[bytes]) -> bytes:
    fields = (_U64.pack(len(head)), head, _U64.pack(size_bytes), *pieces)
    return hashlib.sha256(b"kvtier.weights.part\0" + b"".join(fields)).digest()


def _combined(digests: dict[str, bytes]) -> bytes:
    if not digests:
        raise ConfigError("no weights were given")
    fields = [_U64.pack(len(digests))]
    # File names may contain bytes that are not UTF-8, which surrogateescape restores.
    for name, digest in sorted((name.encode(errors="surrogateescape"), digest) for name, digest in digests.items()):
        fields += [_U64.pack(len(name)), name, digest]
    return hashlib.sha256(b"kvtier.weights\0" + b"".join(fields)).digest()


def _read_cache(path: Path) -> dict[FileVersion, bytes]:
    """Return every digest in the cache file; none if `_write_cache` cannot have written the file."""
    try:
        return _cached(path)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        _log.warning("weights cache %s is ignored and replaced: %s", path, error)
        return {}


def _cached(path: Path) -> dict[FileVersion, bytes]:
    """Return the cache file's digests, or raise an error. A lost digest costs time; a wrong one, wrong tokens."""
    with path.open("rb") as file:
        about = os.fstat(file.fileno())
        if about.st_uid != os.geteuid() or about.st_mode & 0o022:
            raise ValueError("other users can write to it")
        text = file.read(CACHE_BYTES_MAX + 1)
    if len(text) > CACHE_BYTES_MAX:
        raise ValueError(f"it is larger than {CACHE_BYTES_MAX} bytes")
    document = json.loads(text)
    if document["version"] != 1:
        raise ValueError("it is of another version")
    known = {FileVersion(*map(int, label.split(":"))): bytes.fromhex(it) for label, it in document["digests"].items()}
    if any(len(digest) != _DIGEST_BYTES for digest in known.values()):
        raise ValueError("a digest is damaged")
    return known


def _write_cache(path: Path, known: dict[FileVersion, bytes], stable_s: float) -> None:
    """Replace the cache file atomically with the newest of the `known` digests whose files are stable."""
    temporary: Path | None = None
    try:
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)  # mode 0600
        temporary = Path(name)
        with os.fdopen(handle, "wb") as file:
            # Compare with the file system's own clock, through the time of the temporary file.
            latest_ns = os.fstat(file.fileno()).st_mtime_ns - int(stable_s * 1e9)
            kept = [it for it in known.items() if max(it[0].mtime_ns, it[0].ctime_ns) <= latest_ns]
            digests = {":".join(map(str, version)): digest.hex() for version, digest in kept[-CACHE_ENTRIES_MAX:]}
            file.write(json.dumps({"version": 1, "digests": digests}, indent=0).encode())
        temporary.replace(path)
    except OSError as error:
        _log.warning("weights cache %s cannot be written: %s", path, error)
        if temporary:
            with suppress(OSError):
                temporary.unlink()
