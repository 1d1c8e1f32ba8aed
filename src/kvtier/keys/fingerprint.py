r"""The fingerprint of everything that determines the KV, except tokens, and the root key derived from it.

    digest = SHA-256( "kvtier.fingerprint\0" | canonical JSON )
    digest of a class = SHA-256( "kvtier.class\0" | digest | canonical JSON of the class )
    root   = HMAC-SHA-256( secret, "kvtier.root\0" | u32 version | fingerprint digest | u32 chunk_tokens | n(tenant) )

`n(tenant)` is the tenant's length as u32, then its bytes.

Canonical JSON has its members sorted by name (by code point), no whitespace, and ASCII escapes. A number with an
integer value is written as that integer, so 10000 and 10000.0 are one value, and -0.0 is 0. Any other number is written
as the shortest decimal that reads back as the same IEEE 754 double (Python's `repr`). NaN and infinities are refused.
"""

import hashlib
import hmac
import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from kvtier.errors import ConfigError

DIGEST_BYTES = 32
SECRET_BYTES = 32
_FINGERPRINT_DOMAIN = b"kvtier.fingerprint\0"
_CLASS_DOMAIN = b"kvtier.class\0"
_ROOT_DOMAIN = b"kvtier.root\0"
_VERSION = 1
_ROOT_VERSION = 2
_ROOT_HEAD = struct.Struct("<I32sII")
_DEPTH_MAX = 32
_INTEGER_BITS_MAX = 1024  # as many bits as in the largest double; Python refuses to print much larger integers
_COUNT_MAX = (1 << 32) - 1
_NOTHING: Mapping[str, object] = {}


@dataclass(frozen=True, kw_only=True)
class Fingerprint:
    """Everything that determines the KV, except tokens. Two fingerprints are equal when their digests are.

    The digest is computed at construction. Later changes to a mapping do not change it.

    Args:
        weights: 32-byte digest of the weights (`kvtier.keys.weights`).
        revision: name of the weights, such as a commit of a model repository; may be empty.
        attention: settings of attention, such as its implementation, scale, window and soft cap.
        rope: settings of the position encoding: base, scaling and factors.
        dtype: type of the numbers in the KV cache, such as ``bfloat16``.
        epoch: number of in-place updates of the weights, which no file shows.
        other: other values that change the KV, by name.

    Raises:
        ConfigError: a value is out of range or has no canonical JSON form; the message gives its path.
    """

    weights: bytes = field(compare=False)
    revision: str = field(default="", compare=False)
    attention: Mapping[str, object] = field(default_factory=lambda: _NOTHING, compare=False)
    rope: Mapping[str, object] = field(default_factory=lambda: _NOTHING, compare=False)
    dtype: str = field(compare=False)
    epoch: int = field(default=0, compare=False)
    other: Mapping[str, object] = field(default_factory=lambda: _NOTHING, compare=False)
    digest: bytes = field(init=False, repr=False)
    """32 bytes."""
    canonical: bytes = field(init=False, repr=False, compare=False)
    """The canonical JSON. The digest covers a fixed prefix followed by it."""

    def __post_init__(self) -> None:
        if len(self.weights) != DIGEST_BYTES:
            raise ConfigError(f"fingerprint.weights must be a digest of {DIGEST_BYTES} bytes, got {len(self.weights)}")
        if self.epoch < 0:
            raise ConfigError(f"fingerprint.epoch must be at least 0, got {self.epoch}")
        fields = {
            "version": _VERSION,
            "weights": self.weights.hex(),
            "revision": self.revision,
            "attention": self.attention,
            "rope": self.rope,
            "dtype": self.dtype,
            "epoch": self.epoch,
            "other": self.other,
        }
        canonical = canonical_json(fields, "fingerprint")
        object.__setattr__(self, "canonical", canonical)
        object.__setattr__(self, "digest", hashlib.sha256(_FINGERPRINT_DOMAIN + canonical).digest())


def digest_of_class(fingerprint_digest: bytes, loss: Mapping[str, object]) -> bytes:
    """Return the digest for an engine with a lossy class, or `fingerprint_digest` if it has none.

    Args:
        fingerprint_digest: `Fingerprint.digest`.
        loss: the class (`codec.registry.class_of`); empty for an exact engine.
    """
    if not loss:
        return fingerprint_digest
    return hashlib.sha256(_CLASS_DOMAIN + fingerprint_digest + canonical_json(loss, "loss")).digest()


def ingredients(fingerprint: Fingerprint, loss: Mapping[str, object]) -> dict[str, object]:
    """Return everything that `digest_of_class` covers, as JSON values. The class is the member ``loss``."""
    return json.loads(fingerprint.canonical) | ({"loss": dict(loss)} if loss else {})


def canonical_json(value: object, where: str = "value") -> bytes:
    """Return `value` in the canonical form that the module's docstring defines.

    Args:
        value: None, booleans, finite numbers, strings, lists, tuples, mappings with string names; nested up to 32 deep.
        where: name of the value in errors.

    Raises:
        ConfigError: any other value; the message gives its path, for example ``fingerprint.rope.factors[3]``.
    """
    plain = _plain(value, where, 0)
    return json.dumps(plain, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False).encode()


def root_key(secret: bytes, fingerprint_digest: bytes, chunk_tokens: int, tenant: str = "") -> bytes:
    """Return the 32-byte root of all key chains of one model under one secret.

    Args:
        secret: 32 bytes (`kvtier.keys.secret`); to anyone without it, keys reveal nothing.
        fingerprint_digest: `Fingerprint.digest`.
        chunk_tokens: tokens in a full chunk. Different sizes give different keys.
        tenant: the engine's tenant. Different tenants have different keys.

    Raises:
        ValueError: a secret or digest is not 32 bytes, or `chunk_tokens` is out of range. The secret is never shown.
    """
    if len(secret) != SECRET_BYTES:
        raise ValueError(f"secret must be {SECRET_BYTES} bytes, got {len(secret)}")
    if len(fingerprint_digest) != DIGEST_BYTES:
        raise ValueError(f"fingerprint digest must be {DIGEST_BYTES} bytes, got {len(fingerprint_digest)}")
    if not 1 <= chunk_tokens <= _COUNT_MAX:
        raise ValueError(f"chunk_tokens must be in 1..{_COUNT_MAX}, got {chunk_tokens}")
    owner = tenant.encode()
    fields = _ROOT_DOMAIN + _ROOT_HEAD.pack(_ROOT_VERSION, fingerprint_digest, chunk_tokens, len(owner)) + owner
    return hmac.digest(secret, fields, "sha256")


def _plain(value: object, where: str, depth: int) -> object:
    if depth > _DEPTH_MAX:
        raise ConfigError(f"{where}: nested more than {_DEPTH_MAX} deep")
    if isinstance(value, Mapping):
        return _plain_mapping(cast("Mapping[Any, Any]", value), where, depth)
    if isinstance(value, (list, tuple)):
        items = cast("list[Any] | tuple[Any, ...]", value)
        return [_plain(item, f"{where}[{index}]", depth + 1) for index, item in enumerate(items)]
    if isinstance(value, float):
        return _plain_float(value, where)
    # Exact types: subclasses such as enums may have another text form.
    if value is None or type(value) in {bool, str} or (type(value) is int and value.bit_length() <= _INTEGER_BITS_MAX):
        return value
    raise ConfigError(
        f"{where}: {value!r} of type {type(value).__name__} has no canonical form; allowed: None, booleans, "
        "finite numbers (integers of at most 1024 bits), strings, lists and mappings with string names"
    )


def _plain_mapping(mapping: Mapping[Any, Any], where: str, depth: int) -> dict[str, object]:
    plain: dict[str, object] = {}
    for name, item in mapping.items():
        if type(name) is not str:
            raise ConfigError(f"{where}: names must be strings, got {name!r} of type {type(name).__name__}")
        plain[name] = _plain(item, f"{where}.{name}", depth + 1)
    return plain


def _plain_float(value: float, where: str) -> int | float:
    if not math.isfinite(value):
        raise ConfigError(f"{where}: numbers must be finite, got {value}")
    # float(value) turns subclasses (numpy's float64) into the plain type, whose repr is the shortest decimal.
    return int(value) if value.is_integer() else float(value)
