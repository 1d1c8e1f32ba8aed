"""The journal: a line for each object that a tier reads or writes, and for each request that has ended.

It lists the events that the metrics only count. Sums over its lines equal the metrics, unless lines are lost; lost
lines are counted. The deciding threads only queue completions and requests. The thread of a `LineFile` formats and
writes the lines.

A line names an object by a digest, which is the same in every process of a store. So repeated reads can be counted. The
digest is keyed with the store's secret, so it reveals nothing about the content. FORMAT.md lists the fields.
"""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Final, NamedTuple

from kvtier.layout import KvLayout, Loss, engine_bytes, of_all_ranks
from kvtier.observe import metric_definitions as table
from kvtier.observe.metrics import Metrics
from kvtier.runtime.executor import Completion
from kvtier.runtime.observers.guards import Observer
from kvtier.runtime.observers.line_file import SUFFIX, LineFile, new_path
from kvtier.types import Direction, Outcome, Transfer

VERSION: Final = 1
"""Version of the lines, given in the first line of each file."""
STEM: Final = "journal"
NAME_BYTES: Final = 8
"""Bytes of an object's digest. Among ten million objects, two share a digest with a probability of 3 in a million."""
WAITING_MAX: Final = 1 << 14
"""Maximum number of queued lines, about 16 MB of memory."""
ID_CHARACTERS: Final = 256
"""Maximum length of a request id; a longer one is truncated."""

_WAYS: Final = {Direction.PROMOTE: "read", Direction.DEMOTE: "write"}


class Planned(NamedTuple):
    """The planner's choice for a request, and the times that it expected."""

    chosen_tokens: int
    """Leading tokens in the engine after the chosen load."""
    expected_s: float
    """Time of the chosen load and of computing the rest."""
    compute_s: float
    """Time of computing every token that was not in the engine."""
    best_offer_s: float | None
    """Shortest time of any other load, including computing the rest after it; None if there was no other load."""
    ahead_s: float
    """How long the engine was busy with other requests. The times above do not include it."""
    place: str
    """The slowest place from which the chosen load reads; empty if it reads nothing."""
    is_trial: bool


class RequestLine(NamedTuple):
    """One request that has ended. Tokens are counted from the start of its prompt."""

    id: str
    """The client's name for the request."""
    arrived_s: float
    """Arrival in Unix seconds."""
    prompt_tokens: int
    output_tokens: int
    resident_tokens: int
    """Tokens that were in the engine's own prefix cache."""
    found_tokens: Mapping[str, int]
    """Tokens that the lookup found, by place, including resident ones."""
    wanted_tokens: int
    """Tokens of the loads that were started."""
    loaded_tokens: Mapping[str, int]
    """Tokens that loads delivered, by place."""
    loaded_bytes: int
    """Bytes that loads copied into the engine's blocks, on all ranks."""
    load_s: float
    """Duration of the loads."""
    loads: int
    stored_tokens: int
    """Tokens passed to stores. Some may not have reached a tier."""
    planner: Planned | None
    """None without a lookup: the engine had the prompt, or the prompt has no full chunk. A disabled planner loads
    everything."""
    loss: Loss
    """Class of the stored KV that the request may have used; ``none`` if it demanded exact KV."""


class Journal(Observer):
    """One journal: a new file in a directory.

    Args:
        folder: the directory, created if missing.
        capacity_bytes: limit for all journals in `folder`, whose sizes are summed at the start.
        layouts: the KV groups of each rank, whose bytes are summed. A copy adds only the bytes that it scatters.
        root: keys the objects' digests (`keys.fingerprint.root_key`).
        metrics: counts recorded and lost lines.

    Raises:
        UnusablePathError: the file cannot be created.
    """

    def __init__(
        self, folder: Path, capacity_bytes: int, layouts: Sequence[KvLayout], root: bytes, metrics: Metrics
    ) -> None:
        self._root = root
        self._payloads = of_all_ranks(layouts, lambda group: 0 if group.copy else engine_bytes(group))
        head = {"kind": "journal", "version": VERSION, "began_s": time.time(), "chunk_tokens": layouts[0].chunk_tokens}
        self._file: LineFile[tuple[float, Completion | RequestLine]] = LineFile(
            new_path(folder, STEM),
            capacity_bytes=capacity_bytes,
            siblings=f"{STEM}-*{SUFFIX}",
            setting="journal.path",
            lines=self._lines,
            first=lambda line: _line(head) + line,
            waiting_max=WAITING_MAX,
            metrics=metrics,
            metric=table.JOURNAL_LINES,
        )
        self.path = self._file.path

    def completed(self, completion: Completion) -> None:
        """Queue the line of an object that a tier has read or written. Never block."""
        command = completion.command
        if isinstance(command, Transfer) and command.tier:
            self._file.put((time.time(), completion))

    def ended(self, request: RequestLine) -> None:
        """Queue the line of a request. Never block."""
        self._file.put((time.time(), request))

    def close(self, deadline_s: float) -> None:
        """Write the queued lines and end the thread. Idempotent."""
        self._file.close(deadline_s)

    # ---- the thread ------------------------------------------------------------------------------------------------

    def _lines(self, noted: tuple[float, Completion | RequestLine]) -> Iterator[bytes]:
        time_s, what = noted
        yield _line(
            {"kind": "request", "time_s": time_s, **_request(what)}
            if isinstance(what, RequestLine)
            else {"kind": "object", "time_s": time_s, **self._object(what)}
        )

    def _object(self, completion: Completion) -> dict[str, object]:
        command = completion.command
        assert isinstance(command, Transfer)
        name = blake2b(command.key, key=self._root, digest_size=NAME_BYTES, salt=command.group.to_bytes(8))
        return {
            "seconds": completion.seconds,
            "waited_s": completion.waited_s,
            "way": _WAYS[command.direction],
            "tier": command.tier,
            "outcome": completion.outcome.value,
            "bytes": completion.size_bytes,
            "payload_bytes": self._payloads[command.group] if completion.outcome is Outcome.DONE else 0,
            "group": command.group,
            "name": name.hexdigest(),
        }


def _request(request: RequestLine) -> dict[str, object]:
    line: dict[str, object] = request._asdict()
    line["id"] = request.id[:ID_CHARACTERS]
    line["planner"] = None if request.planner is None else request.planner._asdict()
    return line


def _line(fields: Mapping[str, object]) -> bytes:
    return json.dumps(fields, separators=(",", ":")).encode() + b"\n"
