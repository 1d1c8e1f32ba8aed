"""What `kvtier replay` does with its results: progress, Ctrl-C, JSON, report and charts."""

import signal
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

from kvtier.cli.options import tell_written
from kvtier.cli.signals import noted_signals
from kvtier.errors import ConfigError
from kvtier.report.output import print_json, progress
from kvtier.report.report import Report


class ReplayOutput:
    """Collects the results of a command until they are printed.

    Args:
        report: path of the HTML report, if any.
        picture: path of the file of charts, if any.
        as_json: print JSON instead of tables.
    """

    def __init__(self, report: Path | None, picture: Path | None, *, as_json: bool) -> None:
        self.report = report
        self.picture = picture
        self.as_json = as_json
        self.is_interrupted = False
        self.json: list[dict[str, object]] = []
        """Objects to print."""

    @contextmanager
    def watch(self, label: str, requests: int) -> Generator[tuple[Callable[[float], None], Callable[[], bool]]]:
        """Show progress and note Ctrl-C; yields `advance` and `should_stop`."""
        with noted_signals(signal.SIGINT) as noted, progress(label, requests) as advance:
            yield advance, lambda: noted() is not None
            self.is_interrupted = noted() is not None

    @property
    def is_drawn(self) -> bool:
        """Whether there will be charts."""
        return self.report is not None or self.picture is not None

    def refuse_several(self, what: str, count: int) -> None:
        """Refuse a picture of more than one replay.

        Raises:
            ConfigError: there are several.
        """
        if self.picture is not None and count > 1:
            raise ConfigError(f"--picture: {count} {what}; allowed: one, or --report, which has charts of each")

    def finish(self, shown: Report, *, is_list: bool) -> int:
        """Write the report and the charts, and print JSON; returns the exit code.

        Args:
            shown: the report.
            is_list: the JSON is a list, also of one object.
        """
        tell_written(*shown.write(self.report, self.picture))
        if self.as_json:
            print_json(self.json if is_list or not self.json else self.json[0])
        return 128 + signal.SIGINT if self.is_interrupted else 0
