"""Packs and reads small JSON files that people can read. A checksum shows whether a crash truncated a file."""

import json
from collections.abc import Mapping
from typing import Any, Final

import xxhash

CHECKSUM_MEMBER: Final = "checksum"


def pack_json(members: Mapping[str, Any]) -> bytes:
    """Return a JSON file with `members` and their checksum."""
    return f"{json.dumps({**members, CHECKSUM_MEMBER: _json_checksum(members)}, indent=2)}\n".encode()


def read_json(text: bytes) -> tuple[dict[str, Any], bool | None]:
    """Return the members of a JSON file, and whether their checksum matches (None without a checksum).

    There are no members if `text` is not a JSON object.
    """
    try:
        parsed: Any = json.loads(text)
        if not isinstance(parsed, dict):
            return {}, None
        members: dict[str, Any] = {str(name): value for name, value in parsed.items()}  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType] - JSON
        checksum = members.pop(CHECKSUM_MEMBER, None)
        return members, None if checksum is None else checksum == _json_checksum(members)
    except (ValueError, RecursionError):
        return {}, None


def _json_checksum(members: Mapping[str, Any]) -> str:
    canonical = json.dumps(members, sort_keys=True, separators=(",", ":"))
    return f"{xxhash.xxh3_64_intdigest(canonical.encode()):016x}"
