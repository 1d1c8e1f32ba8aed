"""One small store of each kind and format: `tests/golden/stores/formatN/KIND.tar.gz`.

    python tests/golden/small_stores.py [KIND ...]    # writes those that are missing

The command writes the present format. Stores that exist stay as they are: tests of later versions open them.
Objects of S3 are files whose paths are their keys. Valkey's values are files whose paths are their keys,
below `values`; the members of a set are the lines of a file below `sets`. They come from a real server, and S3's from
the tests' own.
"""

import gzip
import io
import sys
import tarfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.rig import CHUNK_TOKENS, FINGERPRINT, LAYOUT, PAGE_BYTES, Engine, places_of, prefix_of, stored
from tests.small_s3 import SmallS3

from kvtier.codec.frame_header import VERSION
from kvtier.config.sections import Config, HostConfig, StoreConfig
from kvtier.config.value_types import PrivateText
from kvtier.keys.fingerprint import root_key
from kvtier.runtime.open import OpenedSession, open_session
from kvtier.tier.directory.kind import DirectorySettings
from kvtier.tier.disk.kind import DiskSettings
from kvtier.tier.registry import TierSettings
from kvtier.tier.s3.kind import S3Settings
from kvtier.tier.shared_directory.kind import SharedDirectorySettings
from kvtier.tier.valkey.kind import ValkeySettings

STORES = Path(__file__).parent / "stores"
FORMATS = (2, VERSION)
KINDS = ("directory", "disk", "shared_directory", "s3", "valkey")
SECRET = bytes(range(32))
ROOT = root_key(SECRET, FINGERPRINT, CHUNK_TOKENS)
CHUNKS = 3
TOKENS = CHUNKS * CHUNK_TOKENS
PREFIX = prefix_of(CHUNKS, ROOT)
CAPACITY_BYTES = 8 << 20


def engine() -> Engine:
    """The blocks that the stores hold: bytes that count up, which archives compress."""
    made = Engine(4 * CHUNKS)
    for number, layer in enumerate(layer for group in made.groups for layer in group):
        for block in range(len(layer)):
            layer[block] = [(number + 7 * block + byte // 64) % 256 for byte in range(PAGE_BYTES)]
    return made


def settings(kind: str, folder: Path, port: int = 0) -> TierSettings:
    """A tier of this kind in `folder`; the server of S3 or Valkey listens on `port`."""
    match kind:
        case "directory":
            return DirectorySettings(path=folder, capacity_bytes=CAPACITY_BYTES)
        case "disk":
            return DiskSettings(path=folder, capacity_bytes=CAPACITY_BYTES, reserve_bytes=0)
        case "shared_directory":
            # With a smaller cap a writer may find no room before the store is counted.
            return SharedDirectorySettings(path=folder, capacity_bytes=1 << 30)
        case "s3":
            keys = {"access_key_id": PrivateText("id"), "secret_access_key": PrivateText("key")}
            return S3Settings(url="s3://bucket/kv", endpoint=f"http://127.0.0.1:{port}", allow_http=True, **keys)
        case _:
            return ValkeySettings(addresses=f"127.0.0.1:{port}", prefix="kvtier", lifetime_s=0.0)


def opened(tier: TierSettings, engine: Engine, folder: Path, secret: bytes = SECRET) -> OpenedSession:
    """A session over this tier alone. Its secret is beside `folder`."""
    file = folder.parent / f"{folder.name}-secret"
    file.write_bytes(secret)
    file.chmod(0o600)
    config = Config(host=HostConfig(capacity_bytes=1 << 20), tiers=(tier,), store=StoreConfig(secret_file=file))
    return open_session(config, LAYOUT, FINGERPRINT, engine.copier())


@contextmanager
def placed(kind: str, folder: Path, version: int = VERSION) -> Iterator[TierSettings]:
    """The store of `kind`, in `folder` or on a server of its own; not of Valkey, which `tests/cluster` has."""
    unpacked(kind, folder, version)
    if kind != "s3":
        yield settings(kind, folder)
        return
    with SmallS3() as server:
        server.objects.update(files(kind, folder))
        yield settings(kind, folder, server.server_port)


def text_of(tier: TierSettings) -> str:
    """A placed store as `kvtier inspect` takes it."""
    if tier.kind != "s3":
        return f"{tier.kind}:{tier.path}"
    keys = "region=us-east-1&access_key_id=id&secret_access_key=key"
    return f"s3:{tier.url}?endpoint={tier.endpoint}&allow_http=true&{keys}"


def archive_of(kind: str, version: int = VERSION) -> Path:
    return STORES / f"format{version}" / f"{kind}.tar.gz"


def unpacked(kind: str, folder: Path, version: int = VERSION) -> Path:
    """The store of `kind`, in `folder`."""
    with tarfile.open(archive_of(kind, version)) as archive:
        archive.extractall(folder, filter="tar")
    return folder


def files(kind: str, folder: Path) -> dict[str, bytes]:
    """Contents of the objects below an unpacked store of S3 or Valkey, by key."""
    folder = folder / "values" if kind == "valkey" else folder
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def write(kind: str) -> None:
    """Write the store of `kind`."""
    with TemporaryDirectory() as temporary, ExitStack() as stack:
        folder, port, server, bucket = Path(temporary) / "store", 0, None, None
        folder.mkdir()
        if kind == "valkey":
            from tests.cluster.valkey_bed import Server, install

            (Path(temporary) / "server").mkdir()
            server = Server(Path(temporary) / "server", install())
            server.start()
            stack.callback(server.kill)
            server.wait()
            port = server.port
        elif kind == "s3":
            bucket = stack.enter_context(SmallS3())
            port = bucket.server_port
        session = opened(settings(kind, folder, port), engine(), folder).session
        assert stored(session, "a", PREFIX, places_of(range(CHUNKS))).dropped == 0
        assert session.close().flushed
        if server is not None:
            _dump(server, folder)
        for key, content in bucket.objects.items() if bucket else ():
            _put(folder / key, content)
        _pack(folder, archive_of(kind))


def _dump(server, folder: Path) -> None:
    for key in server.call("KEYS", "*"):
        is_set = server.call("TYPE", key) in {b"set", "set"}
        content = server.call("SMEMBERS" if is_set else "GET", key)
        path = folder / ("sets" if is_set else "values") / key.decode()
        _put(path, b"".join(line + b"\n" for line in sorted(content)) if is_set else content)


def _put(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def _pack(folder: Path, path: Path) -> None:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for each in sorted(folder.rglob("*")):
            entry = archive.gettarinfo(each, str(each.relative_to(folder)))
            entry.uid = entry.gid = 0
            entry.uname = entry.gname = ""
            with each.open("rb") if each.is_file() else io.BytesIO() as content:
                archive.addfile(entry, content if each.is_file() else None)
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_bytes(gzip.compress(packed.getvalue(), mtime=0))


if __name__ == "__main__":
    for each in sys.argv[1:] or KINDS:
        if not archive_of(each).exists():
            write(each)
