"""Files that other tools wrote, as one `IoTrace`: the content tells which tool."""

from collections.abc import Sequence
from pathlib import Path

from kvtier.characterize.blktrace import looks_like_blkparse, read_blkparse
from kvtier.characterize.events import IoTrace
from kvtier.characterize.objects import looks_like_journal, read_objects
from kvtier.errors import ConfigError
from kvtier.trace.trace_files import short, text_lines

ALLOWED = "the text of blkparse (without -f), and kvtier's journal"


def read_recordings(paths: Sequence[Path]) -> IoTrace:
    """Read recordings of one run.

    Args:
        paths: one text of blkparse, or kvtier's journals; plain, gzip or zstd.

    Raises:
        ConfigError: a file cannot be read, its format is unknown, or the files do not go together.
    """
    tools = {_tool(path) for path in paths}
    if len(tools) != 1 or (len(paths) > 1 and tools == {"blkparse"}):
        raise ConfigError(
            f"{len(paths)} recordings ({', '.join(sorted(tools)) or 'none'}); allowed: one text of blkparse, or "
            "journals"
        )
    return read_objects(paths).trace if tools == {"journal"} else read_blkparse(paths[0])


def _tool(path: Path) -> str:
    number, first = next(text_lines(path), (0, ""))
    if not number:
        raise ConfigError(f"trace {path} is empty; allowed: {ALLOWED}")
    if looks_like_blkparse(first):
        return "blkparse"
    if looks_like_journal(first):
        return "journal"
    raise ConfigError(f"trace {path}, line {number}: {short(first.strip())}: unknown format; allowed: {ALLOWED}")
