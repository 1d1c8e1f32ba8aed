"""The kind `s3`: its settings and how it opens."""
# ruff: noqa: RUF009 - setting is dataclasses.field with our metadata

import configparser
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import obstore
from obstore.store import S3Store as _  # noqa: F401 - a broken package, or a release without it, is refused with the settings

from kvtier.config.schema import needed, setting
from kvtier.config.value_types import Count, FileLocation, HiddenText, PrivateText, Seconds, Size, Switch, Text
from kvtier.errors import ConfigError, TierError, UnusablePathError
from kvtier.keys.secret import read_private
from kvtier.tier.base import RawClient, Tier
from kvtier.tier.files.path_checks import tier_file
from kvtier.tier.registry import TierContext, TierKind, TierSettings
from kvtier.tier.s3.address import Credentials, check_endpoint, parse_url
from kvtier.tier.s3.errors import hint, refusal_of
from kvtier.tier.store_view import ScannedTier, StoreView

if TYPE_CHECKING:
    from kvtier.tier.s3.bucket import Bucket

_WHAT = "S3 credentials file"


@dataclass(frozen=True, slots=True, kw_only=True)
class S3Settings(TierSettings):
    """Objects in a bucket."""

    kind: ClassVar[str] = "s3"

    url: str = needed(Text(3), "Bucket and prefix: s3://bucket/prefix.")
    endpoint: str = setting("", Text(), "URL of the server, such as https://s3.example.com; empty: AWS.")
    region: str = setting("", Text(0, 64), "Region; empty: the environment's, or us-east-1.")
    access_key_id: PrivateText = setting(
        PrivateText(), HiddenText(), "Access key; empty: a profile's, or the usual chain (environment, machine)."
    )
    secret_access_key: PrivateText = setting(PrivateText(), HiddenText(), "Secret of the access key.")
    session_token: PrivateText = setting(PrivateText(), HiddenText(), "Token of temporary keys.")
    profile: str = setting("", Text(0, 128), "Profile in `credentials_file`; empty: none.")
    credentials_file: Path | None = setting(None, FileLocation(), "File of profiles; empty: ~/.aws/credentials.")
    allow_http: bool = setting(default=False, kind=Switch(), help="Permit an endpoint without TLS.")
    virtual_host: bool = setting(
        default=False, kind=Switch(), help="The endpoint's host name begins with the bucket, instead of the path."
    )
    any_owner: bool = setting(
        default=False,
        kind=Switch(),
        help="Use credential files of another ordinary user; false: refuse them.",
    )
    ca_file: Path | None = setting(None, FileLocation(pem="CERTIFICATE"), "PEM file of further trusted authorities.")
    connect_deadline_s: float = setting(2.0, Seconds(1e-2, 60), "How long a connection may take.")
    capacity_bytes: int = setting(0, Size(0), "Cap of all objects of this secret; the oldest are deleted; 0: none.")
    sweep_interval_s: float = setting(
        3600.0, Seconds(1, 30 * 86400), "How often the objects are listed for `capacity_bytes`, by all nodes together."
    )
    read_threads: int = setting(32, Count(1, 256), "Threads that read objects.")
    write_threads: int = setting(16, Count(1, 256), "Threads that write objects.")
    loads_in_flight: int = setting(32, Count(1, 1024), "Concurrent promotions (tier to host).")
    writes_in_flight: int = setting(16, Count(1, 1024), "Concurrent demotions (host to tier).")

    def __post_init__(self) -> None:
        TierSettings.__post_init__(self)
        bucket, prefix = parse_url(self.url, f"{self.label}.url")
        object.__setattr__(self, "url", f"s3://{bucket}/{prefix}")
        check_endpoint(self.endpoint, f"{self.label}.endpoint", allow_http=self.allow_http)
        if bool(self.access_key_id) != bool(self.secret_access_key):
            missing = "secret_access_key" if self.access_key_id else "access_key_id"
            raise ConfigError("missing", setting=f"{self.label}.{missing}", allowed="both keys, or neither")
        if self.profile and self.access_key_id:
            raise ConfigError(
                setting=f"{self.label}.profile",
                value=repr(self.profile),
                allowed="a profile or access_key_id, not both",
            )


def profile_credentials(path: Path, profile: str, *, any_owner: bool = False) -> Credentials:
    """Read the keys of `profile` from a credentials file that AWS's tools wrote.

    Raises:
        UnusablePathError: the file or the profile is missing or has no keys.
    """
    parser = configparser.ConfigParser(interpolation=None)
    try:
        parser.read_string(read_private(path, _WHAT, any_owner=any_owner, any_reader=True).decode())
        section = parser[profile]
        key, secret = PrivateText(section["aws_access_key_id"]), PrivateText(section["aws_secret_access_key"])
        return Credentials(key, secret, PrivateText(section.get("aws_session_token", "")))
    except KeyError as error:
        raise UnusablePathError(f"{_WHAT} {path} has no {error.args[0]} for profile {profile!r}") from None
    except (configparser.Error, UnicodeError):  # their texts contain lines of the file
        raise UnusablePathError(f"{_WHAT} {path} does not have the format of AWS's credentials file") from None


def _credentials(settings: S3Settings) -> Credentials:
    if settings.profile:
        path = settings.credentials_file or Path("~/.aws/credentials").expanduser()
        return profile_credentials(path, settings.profile, any_owner=settings.any_owner)
    return Credentials(settings.access_key_id, settings.secret_access_key, settings.session_token)


def _bucket(settings: S3Settings) -> "Bucket":
    from kvtier.tier.s3.bucket import connect

    return connect(
        settings.name,
        settings.url,
        endpoint=settings.endpoint,
        region=settings.region,
        credentials=_credentials(settings),
        allow_http=settings.allow_http,
        virtual_host=settings.virtual_host,
        authorities=None if settings.ca_file is None else tier_file(settings, "ca_file"),
        deadline_s=settings.transfer_deadline_s,
        probe_deadline_s=settings.probe_deadline_s,
        connect_deadline_s=settings.connect_deadline_s,
    )


def _tier(settings: S3Settings, bucket: "Bucket", key_id: bytes, model: bytes, capacity_bytes: int = 0) -> Tier:
    from kvtier.tier.s3.tier import S3Tier

    return S3Tier(
        bucket,
        key_id=key_id,
        model=model,
        name=settings.name,
        deadline_s=settings.transfer_deadline_s,
        probe_deadline_s=settings.probe_deadline_s,
        capacity_bytes=capacity_bytes,
        sweep_interval_s=settings.sweep_interval_s,
    )


def _open(settings: S3Settings, context: TierContext) -> Tier:
    key_id = context.shared_key_id(settings.name)
    return _tier(settings, _bucket(settings), key_id, context.model, settings.capacity_bytes)


def _discard(settings: S3Settings, context: TierContext) -> None:
    """Delete the model's objects, and the marker if nothing else is below the key id.

    A node that uses the key id but has stored nothing yet works without the marker. The next node to start writes it
    again.
    """
    from kvtier.tier.s3.bucket import MARKER_NAME, pages

    bucket = _bucket(settings)
    own = f"{bucket.prefix}{context.shared_key_id(settings.name).hex()}/"
    try:
        for page in pages(bucket.store, f"{own}{context.model.hex()}/", 1000):
            obstore.delete(bucket.store, [row["path"] for row in page])
        remaining = next(pages(bucket.store, own, 2), ())
        if [row["path"] for row in remaining] == [own + MARKER_NAME]:
            obstore.delete(bucket.store, own + MARKER_NAME)
    except Exception as error:  # noqa: BLE001 - an error of the client, whose text may contain the request
        refusal = refusal_of(error)
        cause = f"{refusal.cause}: {hint(refusal)}"
        raise TierError(settings.name, f"cannot remove the measured objects: {cause}") from None


def _inspect(settings: S3Settings) -> Sequence[StoreView]:
    """Return a view for each secret and model below the prefix."""
    from kvtier.tier.s3.bucket import stored_roots

    bucket = _bucket(settings)
    return [
        ScannedTier(_tier(settings, bucket, key_id, model), f"{settings.url}{key_id.hex()}/{model.hex()}", model.hex())
        for key_id, model in stored_roots(bucket)
    ]


def _raw(settings: S3Settings, context: TierContext) -> RawClient:
    from kvtier.tier.s3.raw_client import RawBucket

    bucket, key_id = _bucket(settings), context.shared_key_id(settings.name)
    return RawBucket(bucket.store, f"{bucket.prefix}{key_id.hex()}/{context.model.hex()}/")


KIND = TierKind(
    name="s3",
    help="Objects in an S3 bucket that several nodes share.",
    settings=S3Settings,
    where="url",
    open=_open,
    keeps_memory=False,
    is_remote=True,
    is_shared=lambda _settings: True,
    has_cap=False,
    inspect=_inspect,
    discard=_discard,
    raw=_raw,
)
