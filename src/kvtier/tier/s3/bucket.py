"""A bucket, with its URL, its credentials and the clients that reach it."""

import os
import re
import threading
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import obstore
from obstore.store import S3Store

from kvtier.config.value_types import through_proxy
from kvtier.errors import TierError, UnusablePathError
from kvtier.tier.s3.address import Credentials, check_endpoint, parse_url
from kvtier.tier.s3.errors import hint, refusal_of

if TYPE_CHECKING:
    from obstore import GetResult, ObjectMeta  # they exist only for type checkers

MARKER_NAME = "kvtier"
MARKER = b"kvtier objects, format 1\n"

STALL_SHARE = 0.2
STALL_S_MIN = 1.0
"""A read has stalled if no byte arrives for `STALL_SHARE` of the deadline, or for `STALL_S_MIN` if that is longer, but
at most for half of the deadline. A store with slow disks may need `STALL_S_MIN` for its first byte."""

_FORMAT = re.compile(rb"kvtier objects, format \d+\n?")
KEY_ID = re.compile(r"[0-9a-f]{32}")


class Bucket(NamedTuple):
    """A bucket, a prefix in it, and its clients."""

    store: S3Store
    lookups: S3Store
    """A client whose requests end at the probe's deadline."""
    reads: S3Store
    """A client whose requests end when no byte arrives for a while. Writes do not use it, because they receive no byte
    until they have sent all of theirs."""
    prefix: str
    """Prefix of all keys, empty or with a slash at its end."""
    place: str
    """Bucket and server, for messages."""


def connect(
    name: str,
    url: str,
    *,
    endpoint: str = "",
    region: str = "",
    credentials: Credentials | None = None,
    allow_http: bool = False,
    virtual_host: bool = False,
    authorities: bytes | None = None,
    deadline_s: float = 10.0,
    probe_deadline_s: float = 0.5,
    connect_deadline_s: float = 2.0,
) -> Bucket:
    """Make the clients of a bucket. This sends nothing.

    Args:
        name: the tier's name, for errors.
        url: ``bucket/prefix``, optionally after ``s3://``; the prefix may be empty.
        endpoint: URL of the server; empty for AWS.
        region: region of the bucket; empty for the environment's, or ``us-east-1``.
        credentials: explicit keys.
        allow_http: permit an endpoint without TLS.
        virtual_host: whether the endpoint's host name begins with the bucket's name.
        authorities: further trusted authorities, in PEM.
        deadline_s: longest time of an operation, all attempts together.
        probe_deadline_s: longest time of a lookup.
        connect_deadline_s: longest time to connect.

    Raises:
        ConfigError: the URL or the endpoint is wrong.
        UnusablePathError: the client does not accept the settings.
        TierError: the process is a fork of one that used S3.
    """
    bucket, prefix = parse_url(url)
    check_endpoint(endpoint, allow_http=allow_http)
    _refuse_fork(name)
    keys = credentials or Credentials()
    options: dict[str, Any] = {
        "access_key_id": keys.access_key_id.reveal(),
        "secret_access_key": keys.secret_access_key.reveal(),
        "session_token": keys.session_token.reveal(),
        "endpoint": endpoint,
        "region": region,
    }
    client: dict[str, Any] = {"allow_http": allow_http}

    def store(attempt_s: float, stall_s: float) -> S3Store:
        attempt = timedelta(seconds=attempt_s)
        limits = {
            "timeout": attempt,
            "connect_timeout": timedelta(seconds=min(connect_deadline_s, attempt_s)),
            "read_timeout": timedelta(seconds=stall_s),
        }
        return S3Store(
            bucket,
            config=cast("Any", {key: value for key, value in options.items() if value}),
            client_options=cast("Any", client | limits),
            retry_config={"max_retries": 0, "retry_timeout": attempt},
            unsigned_payload=True,
            disable_bulk_delete=True,  # not every server supports it
            virtual_hosted_style_request=virtual_host,
        )

    if authorities is not None:
        client["root_certificate"] = authorities
    try:
        place = f"bucket {bucket!r} at {endpoint or 'AWS'}{through_proxy(endpoint or 'https://s3.amazonaws.com')}"
        half_s = deadline_s / 2
        reads = store(half_s, min(half_s, max(STALL_S_MIN, deadline_s * STALL_SHARE)))
        return Bucket(store(half_s, half_s), store(probe_deadline_s, probe_deadline_s), reads, prefix, place)
    except Exception:  # noqa: BLE001 - its text may contain the options
        why = "the client refuses the settings; check ca_file"
        raise UnusablePathError(f"tier {name!r}: bucket {bucket!r}: {why}") from None


def stored_roots(bucket: Bucket) -> list[tuple[bytes, bytes]]:
    """Return the key id and model id of everything below the prefix, by listing two levels.

    Raises:
        OSError: the listing fails; the text contains no secret.
    """
    try:
        store, prefix = bucket.store, bucket.prefix
        ids = _folders(store, prefix)
        return [(id_, model) for id_ in ids for model in _folders(store, f"{prefix}{id_.hex()}/")]
    except Exception as error:  # noqa: BLE001 - some of the client's errors have no common class
        refusal = refusal_of(error)
        raise OSError(None, f"cannot list: {refusal.cause}: {hint(refusal)}") from None


def read_body(found: "GetResult", most: int) -> bytes:
    """Read the body of an answer. Return slightly more than `most` bytes if the server sends more."""
    return next(iter(found.stream(most + 1)), b"")


def read_marker(store: S3Store, key: str) -> bytes | None:
    """Read the marker's bytes, or enough to show that they are wrong. Return None if the bucket does not have it."""
    try:
        return read_body(obstore.get(store, key), len(MARKER))
    except FileNotFoundError as error:
        if refusal_of(error).code == "NoSuchKey":
            return None
        raise


def flaw(found: bytes) -> str:
    """Describe the flaw of a marker that is not `MARKER`, and how to repair it."""
    if _FORMAT.fullmatch(found):
        what = "if no engine uses that version, remove the object and start again"
        return f"is of another version of kvtier ({found!r}); {what}"
    what = "it is damaged, another program uses this prefix, or the server does not speak S3"
    return (
        f"contains {found[:40]!r} instead of {MARKER!r}: {what}. If it is damaged, remove the object: the next start "
        "writes it again"
    )


def is_there(store: S3Store, key: str) -> bool:
    """Return whether the bucket has an object at `key`."""
    try:
        obstore.head(store, key)
    except FileNotFoundError:
        return False
    return True


def pages(store: S3Store, prefix: str, most: int) -> Iterator[Sequence["ObjectMeta"]]:
    """Yield the objects below `prefix`, in pages of `most` objects. Each page costs a request."""
    return iter(cast("Any", obstore).list(store, prefix or None, chunk_size=most))


def _folders(store: S3Store, prefix: str) -> list[bytes]:
    found: Sequence[str] = cast("Any", obstore).list_with_delimiter(store, prefix or None)["common_prefixes"]
    names = [path.rstrip("/").rpartition("/")[2] for path in found]
    return [bytes.fromhex(name) for name in names if KEY_ID.fullmatch(name)]


def _refuse_fork(name: str) -> None:
    """Refuse a fork: the client's threads exist only in the process that first used it."""
    global _process  # noqa: PLW0603 - the client's own threads are global
    with _process_lock:
        if _process is None:
            _process = os.getpid()
        if _process != os.getpid():
            raise TierError(name, f"S3 was used in process {_process}, and this is a fork of it; use a new process")


_process: int | None = None
_process_lock = threading.Lock()
