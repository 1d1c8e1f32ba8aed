"""What storage sees: requests at application, file system and device, and what they measure."""

from kvtier.characterize.events import IoKind, IoLayer, IoTrace, by_time, rows_of, transfers

__all__ = ["IoKind", "IoLayer", "IoTrace", "by_time", "rows_of", "transfers"]
