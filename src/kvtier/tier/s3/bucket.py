"""A bucket: its URL, its credentials and the client that reaches it."""

import os
import re
import threading
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast
from urllib.parse import urlsplit

import obstore
from obstore.store import S3Store

from kvtier.config.value_types import PrivateText, shown_place, through_proxy
from kvtier.errors import ConfigError, TierError, UnusablePathError
from kvtier.keys.secret import read_private
from kvtier.tier.s3.errors import hint, refusal_of

if TYPE_CHECKING:
    from obstore import GetResult, ObjectMeta  # exists for type checkers only

MARKER_NAME = "kvtier"
MARKER = b"kvtier objects, format 1\n"

STALL_SHARE = 0.2
STALL_S_MIN = 1.0
"""A read without a byte for this part of the deadline has stalled, but not before the minimum: a store with slow disks
may take so long for its first byte, whatever the deadline is."""

_FORMAT = re.compile(rb"kvtier objects, format \d+\n?")
KEY_ID = re.compile(r"[0-9a-f]{32}")
_PREFIX_PART = re.compile(r"(?!\.\.?$)[A-Za-z0-9._=-]{1,128}")
_HOST = re.compile(r"[A-Za-z0-9.:\[\]-]{1,255}")
_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")


class Credentials(NamedTuple):
    """Named keys. Empty: the client's chain (environment, web identity, container, machine)."""

    access_key_id: PrivateText = PrivateText()
    secret_access_key: PrivateText = PrivateText()
    session_token: PrivateText = PrivateText()


class Bucket(NamedTuple):
    """A bucket, a prefix in it, and its clients."""

    store: S3Store
    lookups: S3Store
    """A client whose requests end with the probe's deadline."""
    reads: S3Store
    """A client whose requests end when no byte comes. Writes get none before their own are sent."""
    prefix: str
    """Empty, or with a slash at its end."""
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
    ca_file: Path | None = None,
    deadline_s: float = 10.0,
    probe_deadline_s: float = 0.5,
    connect_deadline_s: float = 2.0,
) -> Bucket:
    """The clients of a bucket. Sends nothing.

    Args:
        name: the tier's name, for errors.
        url: ``bucket/prefix``, also with ``s3://`` before it; the prefix may be empty.
        endpoint: URL of the server; empty: AWS.
        region: empty: the environment's, or ``us-east-1``.
        credentials: named keys.
        allow_http: permit an endpoint without TLS.
        virtual_host: the endpoint's host name begins with the bucket.
        ca_file: PEM file of further trusted authorities.
        deadline_s: longest time of an operation, all attempts together.
        probe_deadline_s: longest time of a lookup.
        connect_deadline_s: longest time to connect.

    Raises:
        ConfigError: the URL or the endpoint is wrong.
        UnusablePathError: the client does not take the settings, or `ca_file` cannot be read.
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
            disable_bulk_delete=True,  # not every server has it
            virtual_hosted_style_request=virtual_host,
        )

    if ca_file is not None:
        client["root_certificate"] = read_private(ca_file, f"tier {name!r}: ca_file", any_owner=True, any_reader=True)
    try:
        place = f"bucket {bucket!r} at {endpoint or 'AWS'}{through_proxy(endpoint or 'https://s3.amazonaws.com')}"
        half_s = deadline_s / 2
        reads = store(half_s, min(half_s, max(STALL_S_MIN, deadline_s * STALL_SHARE)))
        return Bucket(store(half_s, half_s), store(probe_deadline_s, probe_deadline_s), reads, prefix, place)
    except Exception:  # noqa: BLE001 - its text may have the options
        why = "the client refuses the settings; check ca_file"
        raise UnusablePathError(f"tier {name!r}: bucket {bucket!r}: {why}") from None


def stored_roots(bucket: Bucket) -> list[tuple[bytes, bytes]]:
    """(key id, model id) of everything below the prefix. Lists two levels.

    Raises:
        OSError: the listing fails; the text has no secret.
    """
    try:
        store, prefix = bucket.store, bucket.prefix
        ids = _folders(store, prefix)
        return [(id_, model) for id_ in ids for model in _folders(store, f"{prefix}{id_.hex()}/")]
    except Exception as error:  # noqa: BLE001 - of the client, of which some have no common class
        refusal = refusal_of(error)
        raise OSError(None, f"cannot list: {refusal.cause}: {hint(refusal)}") from None


def read_body(found: "GetResult", most: int) -> bytes:
    """The body of an answer. More than `most` bytes, and not much more, when the server sends more."""
    return next(iter(found.stream(most + 1)), b"")


def read_marker(store: S3Store, key: str) -> bytes | None:
    """The marker's bytes, or as many as show that they are wrong; None: the bucket does not have it."""
    try:
        return read_body(obstore.get(store, key), len(MARKER))
    except FileNotFoundError as error:
        if refusal_of(error).code == "NoSuchKey":
            return None
        raise


def flaw(found: bytes) -> str:
    """What is wrong with a marker other than `MARKER`, and how to mend it."""
    if _FORMAT.fullmatch(found):
        return f"is of another version of kvtier ({found!r}); if you have none, remove the object and start again"
    what = "it is damaged, another program uses this prefix, or the server does not speak S3"
    return (
        f"has {found[:40]!r} and not {MARKER!r}: {what}. If it is damaged, remove the object: the next start writes it "
        "again"
    )


def is_there(store: S3Store, key: str) -> bool:
    """Whether the bucket has an object at `key`."""
    try:
        obstore.head(store, key)
    except FileNotFoundError:
        return False
    return True


def pages(store: S3Store, prefix: str, most: int) -> Iterator[Sequence["ObjectMeta"]]:
    """What is below `prefix`, in pages of `most` objects. Each page is a request."""
    return iter(cast("Any", obstore).list(store, prefix or None, chunk_size=most))


def parse_url(url: str) -> tuple[str, str]:
    """Bucket and prefix (empty, or with a slash at its end) of ``s3://bucket/prefix``.

    Raises:
        ConfigError: it is not such a URL.
    """
    rest = url.removeprefix("s3:")
    bucket, _, prefix = rest.removeprefix("//").partition("/")
    parts = prefix.strip("/").split("/") if prefix.strip("/") else []
    if not _BUCKET.fullmatch(bucket) or not all(_PREFIX_PART.fullmatch(part) for part in parts):
        shown = shown_place(f"s3:{rest}")
        raise ConfigError(
            f"S3 URL {shown!r}: allowed: s3://BUCKET or s3://BUCKET/PREFIX; BUCKET: 3 to 63 lower-case letters, "
            "digits, dots and hyphens; PREFIX: letters, digits and . _ = - between slashes"
        )
    return bucket, "".join(f"{part}/" for part in parts)


def check_endpoint(endpoint: str, *, allow_http: bool) -> None:
    """Check the URL of a server; empty is AWS.

    Raises:
        ConfigError: it is not one, or has no TLS without `allow_http`.
    """
    if not endpoint:
        return
    shown = shown_place(endpoint)
    try:
        parts = urlsplit(endpoint)
        is_plain = bool(parts.hostname) and parts.port != 0
    except ValueError:
        raise ConfigError(f"S3 endpoint {shown!r}: not a URL; allowed: https://HOST[:PORT]") from None
    if parts.username is not None or parts.password is not None:
        raise ConfigError("S3 endpoint (hidden): has a user name or password; name them in the tier's own settings")
    beyond = parts.path.rstrip("/") or parts.query or parts.fragment
    if parts.scheme not in {"http", "https"} or not is_plain or beyond or not _HOST.fullmatch(parts.netloc):
        raise ConfigError(f"S3 endpoint {shown!r}: allowed: https://HOST[:PORT]")
    if parts.scheme == "http" and not allow_http:
        raise ConfigError(f"S3 endpoint {shown!r}: has no TLS; allowed: https://, or set allow_http = true")


def _folders(store: S3Store, prefix: str) -> list[bytes]:
    found: Sequence[str] = cast("Any", obstore).list_with_delimiter(store, prefix or None)["common_prefixes"]
    names = [path.rstrip("/").rpartition("/")[2] for path in found]
    return [bytes.fromhex(name) for name in names if KEY_ID.fullmatch(name)]


def _refuse_fork(name: str) -> None:
    """The client's threads exist in the process that used it first, and not in its forks."""
    global _process  # noqa: PLW0603 - the client's own threads are global
    with _process_lock:
        if _process is None:
            _process = os.getpid()
        if _process != os.getpid():
            raise TierError(name, f"S3 was used in process {_process}, of which this is a fork; start it anew instead")


_process: int | None = None
_process_lock = threading.Lock()
