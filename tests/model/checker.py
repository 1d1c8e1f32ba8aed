"""Visits every state of a model, breadth first, and tells how the first broken promise comes about."""

import gc
from collections import deque
from dataclasses import dataclass, field

from tests.model.async_steps import Model
from tests.model.world import Violation, World


@dataclass
class Found:
    """What a search has found."""

    states: int = 0
    steps: int = 0
    broken: str = ""
    """The promise; empty if all are kept."""
    trace: list[str] = field(default_factory=list)
    """The shortest way there."""

    def __str__(self) -> str:
        lines = [f"{number:3} {label}" for number, label in enumerate(self.trace, 1)]
        return "\n".join([f"{self.states} states, {self.steps} events", *lines, self.broken or "every promise is kept"])


def check(model: Model, *, states_max: int = 10**7) -> Found:
    """Visit the states, up to the first that breaks a promise, or all; then see that from each all requests can end."""
    gc.disable()  # the states have no cycles, and are many
    try:
        return _check(model, states_max)
    finally:
        gc.enable()


def _check(model: Model, states_max: int) -> Found:
    first = model.first()
    numbers: dict[World, int] = {first: 0}
    worlds: deque[World] = deque([first])
    parents: list[tuple[int, str]] = [(-1, "")]
    before: list[list[int]] = [[]]
    ends: list[int] = []
    found = Found()
    number = -1
    while worlds:
        number += 1
        world = worlds.popleft()
        if model.is_end(world):
            ends.append(number)
        for label, new in model.successors(world):
            found.steps += 1
            if isinstance(new, Violation):
                found.states, found.broken, found.trace = len(numbers), str(new), [*_trace(parents, number), label]
                return found
            known = numbers.setdefault(new, len(parents))
            if known == len(parents):
                assert known < states_max, f"more than {states_max} states"
                parents.append((number, label))
                before.append([])
                worlds.append(new)
            before[known].append(number)
    found.states = len(numbers)
    can_end = bytearray(len(parents))
    todo = ends
    while todo:
        state = todo.pop()
        if not can_end[state]:
            can_end[state] = True
            todo += before[state]
    if 0 in can_end:
        found.broken = "a request can never end"
        found.trace = _trace(parents, can_end.index(0))
    return found


def _trace(parents: list[tuple[int, str]], state: int) -> list[str]:
    labels: list[str] = []
    while state > 0:
        state, label = parents[state]
        labels.append(label)
    return labels[::-1]
