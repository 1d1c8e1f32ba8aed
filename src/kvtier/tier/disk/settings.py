"""Settings of the disk tier: validation and defaults."""

import threading

from kvtier.errors import ConfigError
from kvtier.layout import ALIGNMENT
from kvtier.tier.disk.format import SEGMENT_BYTES_MAX, SEGMENT_BYTES_MIN, is_segment_size

SEGMENTS_WANTED = 64


def segment_bytes_for(capacity_bytes: int) -> int:
    """Default segment size of a new store."""
    least = min(64 << 20, capacity_bytes // 4)
    # Slightly below an even share, so that file system blocks do not cost a segment.
    wanted = min(max(capacity_bytes // SEGMENTS_WANTED, least), 1 << 30) * 1023 // 1024
    return max(wanted // ALIGNMENT * ALIGNMENT, SEGMENT_BYTES_MIN)


def check_settings(
    name: str, capacity_bytes: int, segment_bytes: int | None, direct_io: str, sync_interval_s: float
) -> None:
    """Validate the settings.

    Raises:
        ConfigError: a setting is invalid; the message names it and the allowed values.
    """
    if segment_bytes is not None and not is_segment_size(segment_bytes):
        raise ConfigError(
            f"tier {name!r}: segment_bytes must be a multiple of {ALIGNMENT}, at least {SEGMENT_BYTES_MIN} and at most "
            f"{SEGMENT_BYTES_MAX}, got {segment_bytes}"
        )
    least = segment_bytes or SEGMENT_BYTES_MIN
    if capacity_bytes < least:
        raise ConfigError(f"tier {name!r}: capacity_bytes must be at least {least}, one segment, got {capacity_bytes}")
    if direct_io not in {"auto", "on", "off"}:
        raise ConfigError(f"tier {name!r}: direct_io is {direct_io!r}; allowed: 'auto', 'on', 'off'")
    if not 0.01 <= sync_interval_s <= threading.TIMEOUT_MAX:
        raise ConfigError(f"tier {name!r}: sync_interval_s must be at least 0.01, got {sync_interval_s}")
