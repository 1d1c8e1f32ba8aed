"""What a tier tells its evictor."""

from kvtier.policy.base import Held
from kvtier.tier.base import About
from kvtier.types import ObjectName


def held(name: ObjectName, size_bytes: int, time_s: float, about: About) -> Held:
    """The event that `name` entered a tier or was used there."""
    hint = about.hint
    saved_s = hint.seconds_saved_per_token * about.tokens
    return Held(name, about.parent, about.depth, size_bytes, about.group, time_s, hint.session, hint.turn, saved_s)


def nobody_is_pinned(_name: bytes) -> bool:
    """A lower tier pins nothing: a reader that has opened a frame keeps it, whatever happens to its name."""
    return False
