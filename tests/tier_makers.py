"""Tiers that tests open: all of them are closed after the test."""

import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from typing import Any

_numbers = itertools.count()
_opened: list[Any] = []


def fresh_prefix() -> str:
    """A prefix in a shared store that no other test uses."""
    return f"test-{next(_numbers)}"


def kept(tier: Any) -> Any:
    """The tier, which `close_all` closes."""
    _opened.append(tier)
    return tier


def close_all() -> None:
    """Close every tier that was `kept` since the last call."""
    while _opened:
        _opened.pop().close()


def makes(open_tier: Callable[[int], Any]) -> Iterator[Callable[[int], Any]]:
    """A `make_tier` fixture: a function that calls `open_tier` with a capacity; in the end all tiers are closed."""
    with ExitStack() as stack:
        yield lambda capacity_bytes: stack.enter_context(closing(open_tier(capacity_bytes)))
