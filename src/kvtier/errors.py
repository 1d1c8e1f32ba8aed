"""What can go wrong, by who can mend it.

Raised low, caught once in the mover, and there turned into an `Outcome`. What goes wrong with *data* ends as a miss;
only a mistake in a *setting* or a *call* reaches the user as an exception.
"""


class KvError(Exception):
    """Anything that kvtier raises on purpose."""


class ConfigError(KvError):
    """A setting is wrong. The message names the value, where it came from and what is allowed."""


class BadCallError(KvError, ValueError):
    """The arguments of a call do not fit. Nothing has begun."""


class UnsupportedModelError(KvError):
    """The model, its cache class or a generation option cannot be served correctly, so it is refused."""


class TierError(KvError):
    """A place failed: an I/O error, no space, a time-out. It may pass, and the data may still be good."""

    def __init__(self, tier: str, detail: str) -> None:
        super().__init__(f"tier {tier!r}: {detail}")
        self.tier, self.detail = tier, detail


class CorruptChunkError(KvError):
    """Bytes came back, but not the bytes that were written. Retrying will not help: the copy is to be dropped."""

    def __init__(self, name: bytes, detail: str) -> None:
        super().__init__(f"object {name.hex()[:12]}: {detail}")
        self.name, self.detail = name, detail
