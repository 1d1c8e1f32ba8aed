"""Records of the adaptive policy: names, runs of names, and the sessions that used them."""

SLACK = 64
"""Stale names or runs that are tolerated before a clean-up."""


class Owner:
    """A session that used names."""

    __slots__ = ("__weakref__", "is_over", "tip")

    def __init__(self) -> None:
        self.is_over = False
        self.tip: KeyNode | None = None  # last present name of its last prompt


SHARED = Owner()
"""Several sessions, or none."""


class KeyNode:
    """A present name, or the parent of one."""

    __slots__ = ("children", "name", "name_hash", "owner", "parent", "run", "time", "uses")

    name_hash: int
    uses: int
    time: int
    """Time of the last use. These three are set for names that were ever present."""

    def __init__(self, name: bytes) -> None:
        self.name = name
        self.parent: KeyNode | None = None
        self.children = 0  # present ones
        self.run: KeyRun | None = None  # of the last use; None when not present
        self.owner: Owner | None = None  # the session that used it


NO_NODE = KeyNode(b"")
"""Sentinel: no adjacent node."""


class KeyRun:
    """Names of one kind used by one prompt; they age together.

    Each is the parent of the next, so the last one is evicted first. Names that were used again or removed may still be
    in the list; their `run` is another.
    """

    __slots__ = ("count", "entries", "kind", "number", "owner", "time")

    def __init__(self, kind: int, owner: Owner | None, time: int, entries: list[KeyNode]) -> None:
        self.kind = kind
        self.owner = owner
        self.time = time
        self.entries = entries
        self.count = len(entries)  # names whose `run` is this
        self.number = 0  # its number in a heap, or 0

    def last(self) -> KeyNode:
        """The last name; the run must not be empty."""
        entries = self.entries
        while entries[-1].run is not self:
            entries.pop()
        return entries[-1]

    def drop_one(self) -> None:
        """One name was used again or removed."""
        self.count -= 1
        if 2 * self.count + SLACK < len(self.entries):
            self.entries = [entry for entry in self.entries if entry.run is self]


CURRENT = KeyRun(0, None, 0, [])
"""Sentinel: run of the current prompt, whose kinds are not known yet."""
