"""What every reader gives: requests in the order of time, and what a trace says of itself."""

from collections.abc import Iterator
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from kvtier.types import NextTurn

Ids = npt.NDArray[np.int64]


class Request(NamedTuple):
    """One prompt of a trace."""

    time_s: float
    """From the start of the trace."""
    input_tokens: int
    output_tokens: int
    blocks: Ids
    """Ids of the prompt's blocks, each naming the whole prefix up to its end; the last block may be partial."""
    session: str | None
    line: int
    """Where it stands in the file, from 1."""
    next_turn: NextTurn | None = None
    """Who goes on after its answer, where the trace tells."""


class Wrong(str):
    """A note that says what is wrong with a trace."""

    __slots__ = ()


class Trace(Protocol):
    """A trace that can be read as often as needed; nothing of it is kept."""

    @property
    def name(self) -> str:
        """The file, as it was given."""
        ...

    @property
    def block_tokens(self) -> int:
        """Tokens of a whole block."""
        ...

    @property
    def has_blocks(self) -> bool:
        """Whether requests tell which blocks they have; if not, nothing can be said about reuse."""
        ...

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader of figures should know of how the trace was read; complete once it has been."""
        ...

    def requests(self) -> Iterator[Request]:
        """The requests, in the order of the file or, where sessions are merged, of time.

        Raises:
            ConfigError: the file cannot be read or a line is malformed; names file, line and field.
        """
        ...
