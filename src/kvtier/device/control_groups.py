"""Reads the control groups of this process, from its own up to the root, and their limits."""

from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")


def control_groups(text: str) -> list[tuple[str, str]]:
    """Return (controllers, path) of each line of /proc/self/cgroup. Version 2 has no controllers there."""
    rows = [line.split(":", 2) for line in text.splitlines()]
    return [(row[1], row[2]) for row in rows if len(row) == 3]


def levels(controller: str, root: Path = ROOT, own: Path = OWN) -> Iterator[tuple[Path, bool]]:
    """Yield the folder of each group that may limit `controller`, innermost first, and whether it is of version 2.

    The root is among them even if the process is in a deeper group: a container sees its own group there.

    Args:
        controller: its name in version 1.
        root: where the hierarchies are mounted.
        own: a file like /proc/self/cgroup.
    """
    for controllers, path in control_groups(text_of(own)) or [("", "/"), (controller, "/")]:
        if controllers and controller not in controllers.split(","):
            continue
        below = Path(path.lstrip("/"))
        for level in (below, *below.parents):
            yield (root / controller if controllers else root) / level, not controllers


def memory_limit(root: Path = ROOT, own: Path = OWN) -> tuple[int, Path] | None:
    """Return the smallest memory limit of this process's groups, and its file. Every group above a process counts."""
    files = [
        folder / ("memory.max" if is_version_2 else "memory.limit_in_bytes")
        for folder, is_version_2 in levels("memory", root, own)
    ]
    limits = [(text_of(file).strip(), file) for file in files]
    return min(((int(text), file) for text, file in limits if text.isdecimal()), default=None)  # or "max"


def text_of(path: Path) -> str:
    """Return the content of one of the kernel's files; empty if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return ""
