"""Progress on stderr."""

import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager


@contextmanager
def progress(label: str, total: float | None) -> Generator[Callable[[float], None]]:
    """Show progress on stderr when it is a terminal; yields the function that advances it."""
    if not sys.stderr.isatty():
        yield lambda _advance: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=total)
        yield lambda advance: bar.advance(task, advance)
