"""Reads the control groups of this process, from its own up to the root, and their limits."""

from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")


def control_groups(text: str) -> list[tuple[str, str]]:
    """Return (controllers, path) for each line of /proc/self/cgroup. For version 2, `controllers` is empty."""
    rows = [line.split(":", 2) for line in text.splitlines()]
    return [(row[1], row[2]) for row in rows if len(row) == 3]


def levels(controller: str, root: Path = ROOT, own: Path = OWN) -> Iterator[tuple[Path, bool]]:
    """Yield the folder of each group that may limit `controller`, innermost first, and whether it is version 2.

    The root is always included, because a container sees its own group there.

    Args:
        controller: the name of the controller in version 1.
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
    """Return the smallest memory limit among this process's groups and their ancestors, and the file that sets it."""
    files = [
        folder / ("memory.max" if is_version_2 else "memory.limit_in_bytes")
        for folder, is_version_2 in levels("memory", root, own)
    ]
    limits = [(text_of(file).strip(), file) for file in files]
    return min(((int(text), file) for text, file in limits if text.isdecimal()), default=None)  # not "max"


def text_of(path: Path) -> str:
    """Return the contents of a kernel file; empty if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return ""
