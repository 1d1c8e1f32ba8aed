"""How the engine tests attach models: small settings."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvtier.connect.transformers import Attachment

SMALL: dict[str, Any] = {"store__chunk_tokens": 16, "host__capacity_bytes": "16MiB"}

Attach = Callable[..., "Attachment"]
