"""Identifies images and other items in requests by digests of the data that the model gets.

vLLM's identifier of an item is a digest of its content, or a name from the client (a `uuid`). Nothing in a request says
which, because a client may also send what looks like a digest. vLLM keeps what it computes from an item under the
item's identifier, so another item with the same identifier may get that result. kvtier therefore stops caching requests
that contain an item once its identifier has stood for different or unknown data.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from reprlib import repr as short
from typing import Any, cast

import numpy as np
import torch

from kvtier.connect.vllm.vllm_types import Item
from kvtier.errors import ConfigError
from kvtier.keys.weights import Bytes, digest_tensors

ITEM_BYTES_MAX = 512 << 20
"""Maximum bytes of a request's items that the scheduler's thread digests, in at most a third of a second."""

IDENTIFIERS_MAX = 1 << 16
"""Maximum number of identifiers remembered, more than the items in vLLM's own caches. Each takes about 300 bytes."""

_DIGEST = "_kvtier_digest"
"""Attribute in which an item's data keep their digest. vLLM passes the same object for each request with a cached item.
"""

_UNKNOWN = b""

Leaf = tuple[str, str, tuple[int, ...], Bytes]
"""Name, type, shape and bytes of a piece of data."""


class Items:
    """Digests of items, and what each identifier stands for. Only one thread uses them.

    Args:
        doubted: called with an identifier whose data differed before, or are unknown now.
    """

    def __init__(self, doubted: Callable[[str], None]) -> None:
        self._doubted = doubted
        self._contents: OrderedDict[bytes, bytes] = OrderedDict()
        """The digest of an item's data, by the digest of its identifier; `_UNKNOWN` if the data are in doubt."""
        self._left_bytes = 0
        """Bytes of data that may still be digested for the current request."""

    def identify(self, items: Iterable[Item]) -> tuple[list[bytes], str]:
        """Return the digest of each item's data, and why an item cannot be identified, or ``""``.

        This checks every item, even after one that cannot be identified, because vLLM computes all of them.
        """
        self._left_bytes = ITEM_BYTES_MAX
        digests: list[bytes] = []
        reasons: list[str] = []
        for item in items:
            digest, reason = self._digest(item.data)
            name = hashlib.sha256(item.identifier.encode("utf-8", "surrogatepass")).digest()[:16]
            known = self._contents.pop(name, digest)
            self._contents[name] = digest if digest == known else _UNKNOWN
            if known not in {_UNKNOWN, digest}:
                self._doubted(item.identifier)
            if known != digest or not digest:
                called = f"an item of the request, called {short(item.identifier)},"
                reasons.append(
                    f"{called} {reason or 'had other data before, and vLLM may reuse what it computed from them'}"
                )
            digests.append(digest)
        while len(self._contents) > IDENTIFIERS_MAX:
            self._contents.popitem(last=False)
        return digests, next(iter(reasons), "")

    def _digest(self, data: Any) -> tuple[bytes, str]:  # noqa: ANN401 - vLLM's `MultiModalKwargsItem`
        """Return the digest of an item's data; or `_UNKNOWN` and the reason."""
        if data is None:
            return _UNKNOWN, "comes without data, so only its name is known"
        if known := cast("bytes", getattr(data, _DIGEST, b"")):
            return known, ""
        try:
            if "address" in data and "monotonic_id" in data:
                return _UNKNOWN, "has its data in shared memory; set mm_processor_cache_type to 'lru'"
            leaves = list(_leaves("", {name: element.data for name, element in data.items()}))
            self._left_bytes -= (size := sum(memoryview(leaf[3]).nbytes for leaf in leaves))
            if self._left_bytes < 0:
                return (
                    _UNKNOWN,
                    f"has {size} bytes of data; allowed: at most {ITEM_BYTES_MAX} for all items of a request",
                )
            digest = digest_tensors(leaves).digest
            setattr(data, _DIGEST, digest)
        except (AttributeError, ConfigError, MemoryError, RuntimeError, TypeError, ValueError) as error:
            return _UNKNOWN, f"has data that cannot be digested: {error}"
        return digest, ""


def _leaves(name: str, value: object) -> Iterator[Leaf]:
    """Yield the pieces of nested data.

    Raises:
        TypeError: a piece is of an unsupported class.
    """
    if isinstance(value, np.ndarray):
        yield from _leaves(name, torch.tensor(value))
    elif isinstance(value, torch.Tensor):
        flat = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        yield name, str(value.dtype), tuple(value.shape), memoryview(cast("bytes", flat))
    elif isinstance(value, (Mapping, list, tuple)):
        is_named = isinstance(value, Mapping)
        inner = cast("dict[object, object]", value if is_named else dict(enumerate(cast("list[object]", value))))
        yield name, "mapping" if is_named else "list", (len(inner),), b""
        for key, it in inner.items():
            yield from _leaves(f"{name}/{key}", it)
    elif value is None or type(value) in {bool, int, float, str}:
        yield name, type(value).__name__, (), repr(value).encode("utf-8", "surrogatepass")
    else:
        raise TypeError(f"{name} is of class {type(value).__name__}")
