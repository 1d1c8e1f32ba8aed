"""How replays are watched, broken off and told, through one cache and through tiers alike."""

import signal
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from kvtier.cli.options import tell_written
from kvtier.report.output import print_json, progress

INTERRUPTED = 128 + signal.SIGINT
"""Exit code after Ctrl-C, as a shell would report it."""


@contextmanager
def interruptible() -> Generator[Callable[[], bool]]:
    """Let the first Ctrl-C only be noted, so that what is done can be told; yields whether there was one.

    The second one ends the process as usual.
    """
    was_asked = False

    def note(_number: int, _frame: FrameType | None) -> None:
        nonlocal was_asked
        was_asked = True
        signal.signal(signal.SIGINT, before)

    before = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, note)
    try:
        yield lambda: was_asked
    finally:
        signal.signal(signal.SIGINT, before)


class Ending:
    """What a command has to tell when its replays have ended, or were broken off.

    Args:
        report: where an HTML report goes; None for none.
        as_json: print JSON instead of tables.
    """

    def __init__(self, report: Path | None, *, as_json: bool) -> None:
        self.report = report
        self.as_json = as_json
        self.was_stopped = False
        self._told: list[dict[str, object]] = []

    @contextmanager
    def watch(self, label: str, requests: int) -> Generator[tuple[Callable[[float], None], Callable[[], bool]]]:
        """Show progress, and note Ctrl-C; yields what advances the one and what tells of the other."""
        with interruptible() as should_stop, progress(label, requests) as advance:
            yield advance, should_stop
            self.was_stopped = should_stop()

    def tell(self, told: dict[str, object]) -> None:
        """One more object for JSON."""
        self._told.append(told)

    def end(self, write_report: Callable[[Path], None], *, is_list: bool) -> int:
        """Write and print what is left; returns the exit code."""
        if self.report is not None:
            write_report(self.report)
            tell_written(self.report)
        if self.as_json:
            print_json(self._told if is_list or not self._told else self._told[0])
        return INTERRUPTED if self.was_stopped else 0
