"""Stores of each kind for engines, with a tier that codes with `split` and seals, and with access to its frames.

Every object is coded, as on a slow link.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tests.cluster.valkey_bed import Server, install
from tests.small_s3 import SmallS3

from kvtier.codec.frame_header import MAGIC, Head, head_bytes_of, read_head
from kvtier.runtime.adaptive_coding import CodecChoice
from kvtier.tier.valkey.parts import HEADER

KINDS = ("disk", "s3", "valkey")
LISTED_KINDS = ("directory", "shared_directory", *KINDS)
"""Kinds that list their objects."""


@contextmanager
def sealed_place(kind: str, folder: Path) -> Iterator[tuple[dict[str, Any], Callable[[], list[Head]]]]:
    """Yield settings of an engine with one tier of `kind`, and a function that reads the heads of all its frames.

    S3's server is the tests' own, and Valkey's is a real one. A busy machine may not answer a lookup within the default
    of 0.5 s.
    """
    folder.mkdir()
    secret = folder.with_name(f"{folder.name}-secret")
    secret.write_bytes(bytes(range(32)))
    secret.chmod(0o600)
    form = "codec=split&seal=on&probe_deadline_s=20"
    capacity = {"disk": "64MiB&reserve=0", "directory": "64MiB", "shared_directory": "1GiB"}
    with ExitStack() as stack:
        stack.enter_context(patch.object(CodecChoice, "codes", lambda *_: True))
        if kind in capacity:
            url, contents = f"{kind}:{folder}?capacity={capacity[kind]}&{form}", lambda: _files(folder)
        elif kind == "s3":
            s3 = stack.enter_context(SmallS3())
            access = "allow_http=true&access_key_id=id&secret_access_key=key"
            url = f"s3:s3%3A//bucket/kv?endpoint=http%3A//127.0.0.1%3A{s3.server_port}&{access}&{form}"
            contents = lambda: list(s3.objects.values())  # noqa: E731
        else:
            valkey = Server(folder, install())
            valkey.start()
            stack.callback(valkey.kill)
            valkey.wait()
            url, contents = f"valkey:127.0.0.1%3A{valkey.port}?{form}", lambda: _values(valkey)
        yield {"tiers": [url], "store.secret_file": str(secret)}, lambda: _heads(contents())


def _files(folder: Path) -> list[bytes]:
    return [path.read_bytes() for path in folder.rglob("*") if path.is_file()]


def _values(valkey: Server) -> list[bytes]:
    found = [valkey.call("GET", key) for key in valkey.call("KEYS", "*") if valkey.call("TYPE", key) != b"set"]
    return [value[HEADER.size :] for value in found if isinstance(value, bytes)]


def _heads(contents: list[bytes]) -> list[Head]:
    found: list[Head] = []
    for content in contents:
        at = content.find(MAGIC)
        while at >= 0:
            found.append(read_head(content[at : at + head_bytes_of(content[at : at + 256])]))
            at = content.find(MAGIC, at + 1)
    return found
