"""Traces that nobody has recorded: sessions of some source, merged by time, as request lines.

A source gives sessions in the order of their starts: what each asks, when, and which blocks it shares with whom. Here
they get their place among all others and block ids of their own. Memory is needed for the sessions that are open, not
for the trace.
"""

import heapq
from collections.abc import Iterator
from typing import NamedTuple, Protocol

from kvtier.errors import ConfigError
from kvtier.trace.formats.block_ids import RUN_IDS_MAX
from kvtier.types import NextTurn

REQUESTS_MAX = 10**9


class Run(NamedTuple):
    """Neighbouring block ids of a prompt."""

    first: int
    """Of those that the whole trace shares, or of the session's own."""
    blocks: int
    is_shared: bool


class Step(NamedTuple):
    """One request of a session."""

    after_s: float
    """Since the session began; never less than the step before."""
    input_tokens: int
    output_tokens: int
    runs: tuple[Run, ...]
    speaker: int
    """Which of the session's own conversations it belongs to; -1: none is named."""
    next_turn: NextTurn | None = None
    """Who goes on after its answer, where that is known."""


class Session(NamedTuple):
    """What belongs together: a conversation, an agent with its sub-agents, a document and who asks about it."""

    steps: tuple[Step, ...]
    """In the order of time, at least one."""
    own_blocks: int
    """Blocks that no other session has: 0 to one less."""
    speakers: int


class Source(Protocol):
    """Where sessions come from."""

    @property
    def block_tokens(self) -> int:
        """Tokens of a block."""
        ...

    @property
    def shared_blocks(self) -> int:
        """Blocks that sessions share: 0 to one less."""
        ...

    def sessions(self) -> Iterator[tuple[float, Session]]:
        """Sessions without end, with the seconds at which they begin, never going back. The same ones each time."""
        ...


def synthesized(source: Source, requests: int) -> Iterator[str]:
    """The lines of a trace of so many requests.

    Raises:
        ConfigError: too many requests, or more blocks than a trace can have.
    """
    if not 1 <= requests <= REQUESTS_MAX:
        raise ConfigError(f"--requests {requests}; allowed: 1 to {REQUESTS_MAX}")
    next_block, next_speaker = source.shared_blocks, 0
    open_steps: list[tuple[float, int, int, int, int, Session, float]] = []
    """(time, number of the session, which step, its first block, its first speaker, itself, its start)"""
    coming = source.sessions()
    start_s, session = next(coming)
    began_s, number = start_s, 0
    head = f'{{"block_size":{source.block_tokens},'
    for _ in range(requests):
        while not open_steps or start_s <= open_steps[0][0]:
            first = session.steps[0]
            heapq.heappush(open_steps, (start_s + first.after_s, number, 0, next_block, next_speaker, session, start_s))
            next_block += session.own_blocks
            next_speaker += session.speakers
            number += 1
            if next_block > RUN_IDS_MAX:
                raise ConfigError(f"--requests {requests} need more than {RUN_IDS_MAX} blocks; allowed: larger blocks")
            start_s, session = next(coming)
        time_s, owner, place, block, speaker, asking, since_s = open_steps[0]
        step = asking.steps[place]
        yield head + _line(step, time_s - began_s, block, speaker)
        head = "{"
        if place + 1 < len(asking.steps):
            after = since_s + asking.steps[place + 1].after_s
            heapq.heapreplace(open_steps, (after, owner, place + 1, block, speaker, asking, since_s))
        else:
            heapq.heappop(open_steps)


def _line(step: Step, time_s: float, block: int, speaker: int) -> str:
    runs = ",".join([f"[{first if shared else first + block},{blocks}]" for first, blocks, shared in step.runs])
    who = f'"session_id":{speaker + step.speaker},' if step.speaker >= 0 else ""
    who += f'"next_turn":"{step.next_turn.value}",' if step.next_turn is not None else ""
    return (
        f'"timestamp":{time_s * 1000:.3f},"input_length":{step.input_tokens},"output_length":{step.output_tokens},'
        f'{who}"hash_runs":[{runs}]}}\n'
    )
