"""What a request says of its session: `session_id`, or `session` and `next_turn` in its `kv_transfer_params`.

A name counts within one `cache_salt` only: tenants who share nothing cannot speak of each other's sessions either.
Nothing depends on what is said, so whatever makes no sense is ignored, with one line in the log.
"""

import logging
from hashlib import blake2b
from reprlib import repr as short
from typing import Any, NamedTuple, cast

from kvtier.connect.vllm.vllm_types import Request
from kvtier.types import NextTurn

logger = logging.getLogger(__name__)

NAME_BYTES = 16
_NEXT_TURNS = {it.value: it for it in NextTurn}
_ALLOWED = ", ".join(map(repr, _NEXT_TURNS))


class Said(NamedTuple):
    """What one request says."""

    session: str | None = None
    """Not as the client calls it, but a name that no other tenant's session has."""
    next_turn: NextTurn | None = None
    """Who goes on after the response; None without a session."""


class Sessions:
    """Reads it from requests. Not thread-safe."""

    def __init__(self) -> None:
        self._has_warned = False

    def said(self, request: Request) -> Said:
        """What `request` says."""
        params: Any = request.kv_transfer_params
        told = cast("dict[str, object]", params) if isinstance(params, dict) else {}
        next_turn, session = told.get("next_turn"), told.get("session")
        if session is None:
            session = cast("object", getattr(request, "session_id", None))
        if session is None:
            if next_turn is not None:
                self._warn(request, "next_turn", next_turn, "with session or session_id, and there is none")
            return Said()
        if not isinstance(session, str) or not session:
            self._warn(request, "session", session, "a text of at least one character")
            return Said()
        name = _name(request.cache_salt or "", session)
        if next_turn is None:
            return Said(name)
        known = _NEXT_TURNS.get(next_turn) if isinstance(next_turn, str) else None
        if known is None:
            self._warn(request, "next_turn", next_turn, _ALLOWED)
        return Said(name, known)

    def _warn(self, request: Request, field: str, value: object, allowed: str) -> None:
        if self._has_warned:
            return
        self._has_warned = True
        try:
            told = short(value)
        except (ValueError, RecursionError):  # a number of too many digits, lists too deep in one another
            told = f"a value of type {type(value).__name__}"
        logger.warning(
            "request %s says %s = %s; allowed: %s. It is ignored, and this is said once",
            *(request.request_id, field, told, allowed),
        )


def _name(salt: str, session: str) -> str:
    digest = blake2b(digest_size=NAME_BYTES)
    for text in (salt, session):
        told = text.encode("utf-8", "surrogatepass")
        digest.update(len(told).to_bytes(8, "little") + told)
    return digest.hexdigest()
