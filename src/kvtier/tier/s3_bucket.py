"""A bucket: its URL, its credentials and the client that reaches it."""

import os
import re
import threading
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, cast
from urllib.parse import urlsplit

import obstore
from obstore.store import S3Store

from kvtier.config.value_types import PrivateText, without_login
from kvtier.errors import ConfigError, TierError
from kvtier.tier.s3_errors import hint, refusal_of

KEY_ID = re.compile(r"[0-9a-f]{32}")
_PREFIX_PART = re.compile(r"(?!\.\.?$)[A-Za-z0-9._=-]{1,128}")
_HOST = re.compile(r"[A-Za-z0-9.:\[\]-]{1,255}")
_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")


class Credentials(NamedTuple):
    """Named keys. Empty: the client's chain (environment, web identity, container, machine)."""

    access_key_id: PrivateText = PrivateText()
    secret_access_key: PrivateText = PrivateText()
    session_token: PrivateText = PrivateText()


def connect(
    name: str,
    bucket: str,
    *,
    endpoint: str,
    region: str,
    credentials: Credentials | None,
    allow_http: bool,
    virtual_host: bool,
    ca_file: Path | None,
    deadline_s: float,
    connect_deadline_s: float,
) -> S3Store:
    """The client of a bucket. Sends nothing.

    Raises:
        ConfigError: the client does not take the settings, or `ca_file` cannot be read.
        TierError: the process is a fork of one that used S3.
    """
    _refuse_fork(name)
    attempt = timedelta(seconds=deadline_s / 2)
    keys = credentials or Credentials()
    options: dict[str, Any] = {
        "access_key_id": keys.access_key_id.reveal(),
        "secret_access_key": keys.secret_access_key.reveal(),
        "session_token": keys.session_token.reveal(),
        "endpoint": endpoint,
        "region": region,
    }
    client: dict[str, Any] = {
        "allow_http": allow_http,
        "timeout": attempt,
        "connect_timeout": timedelta(seconds=min(connect_deadline_s, deadline_s / 2)),
    }
    try:
        if ca_file is not None:
            client["root_certificate"] = ca_file.read_bytes()
        return S3Store(
            bucket,
            config=cast("Any", {key: value for key, value in options.items() if value}),
            client_options=cast("Any", client),
            retry_config={"max_retries": 0, "retry_timeout": attempt},
            unsigned_payload=True,
            disable_bulk_delete=True,  # not every server has it
            virtual_hosted_style_request=virtual_host,
        )
    except OSError as error:
        raise ConfigError(f"tier {name!r}: ca_file {str(ca_file)!r}: {error.strerror}") from error
    except Exception:  # noqa: BLE001 - its text may have the options
        raise ConfigError(f"tier {name!r}: bucket {bucket!r}: the client refuses the settings; check ca_file") from None


def stored_roots(store: S3Store, prefix: str) -> list[tuple[bytes, bytes]]:
    """(key id, first 16 bytes of the fingerprint) of everything below `prefix`. Lists two levels.

    Raises:
        OSError: the listing fails; the text has no secret.
    """
    try:
        ids = _folders(store, prefix)
        return [(id_, model) for id_ in ids for model in _folders(store, f"{prefix}{id_.hex()}/")]
    except Exception as error:  # noqa: BLE001 - of the client, of which some have no common class
        refusal = refusal_of(error)
        raise OSError(None, f"cannot list: {refusal.cause}: {hint(refusal)}") from None


def parse_url(url: str) -> tuple[str, str]:
    """Bucket and prefix (empty, or with a slash at its end) of ``s3://bucket/prefix``.

    Raises:
        ConfigError: it is not such a URL.
    """
    rest = url.removeprefix("s3:")
    bucket, _, prefix = rest.removeprefix("//").partition("/")
    parts = prefix.strip("/").split("/") if prefix.strip("/") else []
    if not _BUCKET.fullmatch(bucket) or not all(_PREFIX_PART.fullmatch(part) for part in parts):
        shown = without_login(f"s3:{rest}")[:200]
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
    try:
        parts = urlsplit(endpoint)
        is_plain = bool(parts.hostname) and parts.port != 0
    except ValueError:
        shown = without_login(endpoint)[:200]
        raise ConfigError(f"S3 endpoint {shown!r}: not a URL; allowed: https://HOST[:PORT]") from None
    if parts.username is not None or parts.password is not None:
        raise ConfigError("S3 endpoint (hidden): has a user name or password; name them in the tier's own settings")
    beyond = parts.path.rstrip("/") or parts.query or parts.fragment
    if parts.scheme not in {"http", "https"} or not is_plain or beyond or not _HOST.fullmatch(parts.netloc):
        raise ConfigError(f"S3 endpoint {endpoint[:200]!r}: allowed: https://HOST[:PORT]")
    if parts.scheme == "http" and not allow_http:
        raise ConfigError(f"S3 endpoint {endpoint[:200]!r}: has no TLS; allowed: https://, or set allow_http = true")


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
