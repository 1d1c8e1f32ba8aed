"""Finds where the objects of a prompt are. It reads host memory, and asks every tier for every chunk.

A lookup asks a tier only for objects that faster ones lack, and a remote tier for few names. A survey is for people,
and finds every place. `tier_searches` sends its probes. A survey changes no decision of the core, except that an
unanswered probe counts as a failure of its tier.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvtier.core.host_residency import COMING, HOST, READABLE, HostMemory, Item
from kvtier.core.prefix import history_run, longest_boundary
from kvtier.layout import GroupLayout, History
from kvtier.types import Prefix

CHUNKS_MAX = 1024
"""Maximum number of chunks in a survey: 262,144 tokens with chunks of 256."""

REMOTE_NAMES = 24
"""Maximum number of names in one probe of a remote tier, about as many as in a round of a lookup."""


@dataclass(slots=True, eq=False)
class Survey:
    """The places of a prompt's objects that are known so far."""

    prefix: Prefix
    groups: Sequence[GroupLayout]
    host: frozenset[Item]
    """Objects in host memory, or in transfer to it."""
    left: frozenset[Item]
    """Objects that have left host memory recently."""
    found: dict[str, set[Item]] = field(default_factory=dict[str, set[Item]])
    """Objects that each tier reported as present."""
    silent: dict[str, str] = field(default_factory=dict[str, str])
    """For each tier that did not answer for every object, the reason."""
    unasked: dict[str, list[Item]] = field(default_factory=dict[str, list[Item]])
    """Objects that each tier has not answered for. Its open probe or a later one asks for them."""
    is_wanted: bool = True
    """Whether answers are still accepted."""

    @classmethod
    def of(cls, prefix: Prefix, groups: Sequence[GroupLayout], host: HostMemory) -> "Survey":
        """Return a survey of the leading `CHUNKS_MAX` chunks that has asked no tier yet."""
        prefix = Prefix(prefix.keys[:CHUNKS_MAX], prefix.chunk_tokens)
        items = [(key, group) for key in prefix.keys for group in range(len(groups))]
        found = ((item, host.entry(*item)) for item in items)
        there = (item for item, entry in found if entry is not None and entry.residency in READABLE + COMING)
        return cls(prefix, groups, frozenset(there), frozenset(host.left_since(0)))

    @property
    def items(self) -> list[Item]:
        """All objects, chunk by chunk."""
        return [(key, group) for key in self.prefix.keys for group in range(len(self.groups))]

    @property
    def tokens(self) -> int:
        """Number of leading tokens that can be loaded."""
        return self.tokens_within(self.prefix.tokens)

    def tokens_within(self, most: int) -> int:
        """Return how many of the leading `most` tokens can be loaded.

        A window is then required before that earlier end, not before the end of the prompt.
        """
        size = self.prefix.chunk_tokens
        return longest_boundary(self.groups, Prefix(self.prefix.keys[: most // size], size), self._is_somewhere)

    @property
    def history_chunks(self) -> int:
        """Number of leading chunks present in every history group. Windows and states may end a hit earlier."""
        return history_run(self.groups, self.prefix, self._is_somewhere)

    def places(self, chunk: int) -> dict[str, str]:
        """Return the places that hold a chunk, each with ``all`` or ``part`` of its history groups."""
        history = [number for number, group in enumerate(self.groups) if isinstance(group.validity, History)]
        items = {(self.prefix.keys[chunk], group) for group in history or range(len(self.groups))}
        found = {place: len(items & present) for place, present in ((HOST, self.host), *self.found.items())}
        return {place: "all" if count == len(items) else "part" for place, count in found.items() if count}

    def has_left(self, chunk: int) -> bool:
        """Return whether objects of a chunk have left host memory recently."""
        return any((self.prefix.keys[chunk], group) in self.left for group in range(len(self.groups)))

    def answered(self, tier: str, objects: Sequence[Item], present: Sequence[bool] | None) -> None:
        """Record the answer to a probe. `present` is None if the tier failed."""
        if not self.is_wanted:
            return
        if present is None:
            self.silent[tier] = "did not answer"
            del self.unasked[tier]
            return
        self.found[tier].update(item for item, is_there in zip(objects, present, strict=True) if is_there)
        del self.unasked[tier][: len(objects)]
        if not self.unasked[tier]:
            del self.unasked[tier]

    def stop(self) -> None:
        """Accept no further answers."""
        self.is_wanted = False
        self.silent |= dict.fromkeys(self.unasked, "did not answer in time")

    def _is_somewhere(self, group: int, chunk: int) -> bool:
        item = (self.prefix.keys[chunk], group)
        return item in self.host or any(item in present for present in self.found.values())
