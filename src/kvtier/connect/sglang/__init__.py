"""A storage backend for SGLang's HiCache. SGLang imports it by name.

    --hicache-storage-backend dynamic
    --hicache-storage-backend-extra-config '{"backend_name": "kvtier", "module_path": "kvtier.connect.sglang",
        "class_name": "KvtierStorage", "interface_v1": 1, "tiers": ["disk:/path/to/kv"]}'

The backend is imported on demand, so that the other modules can be used and tested without SGLang.
"""

from typing import Any

__all__ = ["KvtierStorage", "register"]  # pyright: ignore[reportUnsupportedDunderAll] (see __getattr__)


def register() -> None:
    """Record the model's files before SGLang reads them (see `checkpoint_reads`). SGLang calls this as a plug-in."""
    from kvtier.connect.sglang.checkpoint_reads import register as at_publication  # noqa: PLC0415

    at_publication()


def __getattr__(name: str) -> Any:  # noqa: ANN401 - a class whose base is SGLang's
    if name == "KvtierStorage":
        from kvtier.connect.sglang.storage import KvtierStorage  # noqa: PLC0415

        return KvtierStorage
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
