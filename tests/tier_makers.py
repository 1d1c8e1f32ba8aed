"""Opens tiers for tests, and closes all of them after the test."""

import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from typing import Any

_numbers = itertools.count()
_opened: list[Any] = []


def fresh_prefix() -> str:
    """Return a prefix in a shared store that no other test uses."""
    return f"test-{next(_numbers)}"


def kept(tier: Any) -> Any:
    """Note the tier, so that `close_all` closes it, and return it."""
    _opened.append(tier)
    return tier


def close_all() -> None:
    """Close every tier that was `kept` since the last call."""
    while _opened:
        _opened.pop().close()


def makes(open_tier: Callable[[int], Any]) -> Iterator[Callable[[int], Any]]:
    """Yield a `make_tier` function, which calls `open_tier` with a capacity. Close all tiers at the end."""
    with ExitStack() as stack:
        yield lambda capacity_bytes: stack.enter_context(closing(open_tier(capacity_bytes)))
