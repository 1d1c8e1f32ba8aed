"""A bucket's endpoint and its access credentials."""

import re
from typing import NamedTuple
from urllib.parse import urlsplit

from kvtier.config.value_types import PrivateText, shown_place
from kvtier.errors import ConfigError

_PREFIX_PART = re.compile(r"(?!\.\.?$)[A-Za-z0-9._=-]{1,128}")
_HOST = re.compile(r"[A-Za-z0-9.:\[\]-]{1,255}")
_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")


class Credentials(NamedTuple):
    """Explicit keys. If they are empty, the client gets keys from the environment, web identity or machine."""

    access_key_id: PrivateText = PrivateText()
    secret_access_key: PrivateText = PrivateText()
    session_token: PrivateText = PrivateText()


def parse_url(url: str, setting: str = "url") -> tuple[str, str]:
    """Split ``s3://bucket/prefix`` into bucket and prefix (empty, or with a slash at its end).

    Args:
        url: the URL.
        setting: the name of its setting, for messages.

    Raises:
        ConfigError: `url` is not such a URL.
    """
    rest = url.removeprefix("s3:")
    bucket, _, prefix = rest.removeprefix("//").partition("/")
    parts = prefix.strip("/").split("/") if prefix.strip("/") else []
    if not _BUCKET.fullmatch(bucket) or not all(_PREFIX_PART.fullmatch(part) for part in parts):
        raise ConfigError(
            setting=setting,
            value=repr(shown_place(f"s3:{rest}")),
            allowed="s3://BUCKET or s3://BUCKET/PREFIX; BUCKET: 3 to 63 lower-case letters, "
            "digits, dots and hyphens; PREFIX: letters, digits and . _ = - between slashes",
        )
    return bucket, "".join(f"{part}/" for part in parts)


def check_endpoint(endpoint: str, setting: str = "endpoint", *, allow_http: bool) -> None:
    """Check the URL of a server; empty means AWS.

    Args:
        endpoint: the URL.
        setting: the name of its setting, for messages.
        allow_http: permit a URL without TLS.

    Raises:
        ConfigError: `endpoint` is not such a URL, or lacks TLS without `allow_http`.
    """
    if not endpoint:
        return
    fields = {"setting": setting, "value": repr(shown_place(endpoint)), "allowed": "https://HOST[:PORT]"}
    try:
        parts = urlsplit(endpoint)
        is_plain = bool(parts.hostname) and parts.port != 0
    except ValueError:
        raise ConfigError("is not a URL", **fields) from None
    if parts.username is not None or parts.password is not None:
        raise ConfigError(
            "contains a user name or password; put them in the tier's own settings", setting=setting, value="(hidden)"
        )
    beyond = parts.path.rstrip("/") or parts.query or parts.fragment
    if parts.scheme not in {"http", "https"} or not is_plain or beyond or not _HOST.fullmatch(parts.netloc):
        raise ConfigError(**fields)
    if parts.scheme == "http" and not allow_http:
        raise ConfigError(
            "does not use TLS", **fields | {"allowed": "an https:// URL, or this one with allow_http = true"}
        )
