"""Progress, interruption and output of replays through one cache and through tiers."""

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
    """Yield a function that returns whether Ctrl-C was pressed. The second Ctrl-C ends the process as usual."""
    is_pressed = False

    def note(_number: int, _frame: FrameType | None) -> None:
        nonlocal is_pressed
        is_pressed = True
        signal.signal(signal.SIGINT, before)

    before = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, note)
    try:
        yield lambda: is_pressed
    finally:
        signal.signal(signal.SIGINT, before)


class ReplayOutput:
    """Collects the results of a command until they are printed.

    Args:
        report: path of the HTML report, if any.
        as_json: print JSON instead of tables.
    """

    def __init__(self, report: Path | None, *, as_json: bool) -> None:
        self.report = report
        self.as_json = as_json
        self.is_interrupted = False
        self.json: list[dict[str, object]] = []
        """Objects to print."""

    @contextmanager
    def watch(self, label: str, requests: int) -> Generator[tuple[Callable[[float], None], Callable[[], bool]]]:
        """Show progress and note Ctrl-C; yields `advance` and `should_stop`."""
        with interruptible() as should_stop, progress(label, requests) as advance:
            yield advance, should_stop
            self.is_interrupted = should_stop()

    def finish(self, write_report: Callable[[Path], None], *, is_list: bool) -> int:
        """Write the report and print JSON; returns the exit code."""
        if self.report is not None:
            write_report(self.report)
            tell_written(self.report)
        if self.as_json:
            print_json(self.json if is_list or not self.json else self.json[0])
        return INTERRUPTED if self.is_interrupted else 0
