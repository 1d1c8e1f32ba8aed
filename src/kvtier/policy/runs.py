"""What the adaptive policy keeps of names, of those that one prompt used, and of who used them. Plain records."""

SLACK = 64
"""Names or runs that may be left over before they are thrown out, so that few never are."""


class Session:
    """Whose use it was."""

    __slots__ = ("__weakref__", "is_over", "tip")

    def __init__(self) -> None:
        self.is_over = False
        self.tip: Entry | None = None  # last name, of those still here, of its last prompt


SEVERAL = Session()
"""Stands for more than one."""


class Entry:
    """A name that is present, or the parent of one that is."""

    __slots__ = ("children", "mark", "name", "owner", "parent", "run", "time", "uses")

    mark: int
    uses: int
    time: int
    """Of its last use; the three are known of who was ever present."""

    def __init__(self, name: bytes) -> None:
        self.name = name
        self.parent: Entry | None = None
        self.children = 0  # present ones
        self.run: Run | None = None  # of its last use; None for who is not present
        self.owner: Session | None = None  # who uses it


NOBODY = Entry(b"")
"""Stands for who is not expected."""


class Run:
    """Names of one kind that one prompt used: they grow old together.

    Each is the parent of the next, so the last is the next to leave, and while that has a child none may. A name that
    was used again, or left, may still be among them: its own run is another.
    """

    __slots__ = ("count", "entries", "kind", "number", "owner", "time")

    def __init__(self, kind: int, owner: Session | None, time: int, entries: list[Entry]) -> None:
        self.kind = kind
        self.owner = owner
        self.time = time
        self.entries = entries
        self.count = len(entries)  # of those whose run this is
        self.number = 0  # under which a heap has it; 0 if none does

    def last(self) -> Entry:
        """Its last name; there must be one."""
        entries = self.entries
        while entries[-1].run is not self:
            entries.pop()
        return entries[-1]

    def lost(self) -> None:
        """A name of it was used again, or left."""
        self.count -= 1
        if 2 * self.count + SLACK < len(self.entries):
            self.entries = [entry for entry in self.entries if entry.run is self]


TOLD = Run(0, None, 0, [])
"""Stands for the runs of the prompt that is being told: which they are is known at its end."""
