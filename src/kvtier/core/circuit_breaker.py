"""A circuit breaker for the reads or the writes of a tier: failures in a row open it, a trial closes it."""

from dataclasses import dataclass

RETRY_GROWTH = 2.0
RETRY_SECONDS_MAX = 60.0


@dataclass(slots=True)
class CircuitBreaker:
    """Whether work of one kind is worth giving to a tier.

    Args:
        failures_max: failures in a row that stop the work.
        retry_s: seconds of the first rest; doubles with each failed trial, up to a minute.
    """

    failures_max: int
    retry_s: float
    failures: int = 0
    retry_delay_s: float = 0.0
    retry_at_s: float = 0.0
    is_trial: bool = False

    def open_now(self) -> None:
        """It is known not to work: the first work that it is given is a trial."""
        self.retry_delay_s = self.retry_s

    def is_up(self) -> bool:
        """Whether the tier counts as healthy."""
        return self.retry_delay_s == 0.0

    def allows(self, now_s: float) -> bool:
        """Whether to give it work now. While it is down, one trial is let through after each rest."""
        return self.retry_delay_s == 0.0 or (not self.is_trial and now_s >= self.retry_at_s)

    def attempted(self) -> None:
        """Work was given to it; when it is down, that is its trial."""
        if not self.is_up():
            self.is_trial = True

    def succeeded(self) -> bool:
        """It answered well; returns whether it thereby came back up."""
        came_back = not self.is_up()
        self.failures, self.retry_delay_s, self.is_trial = 0, 0.0, False
        return came_back

    def retry_now(self, now_s: float) -> None:
        """There is a reason to try again: a trial may be made at once."""
        self.retry_at_s = min(self.retry_at_s, now_s)

    def inconclusive(self) -> None:
        """A trial ended without telling anything about the tier (it was cancelled); another may be made."""
        self.is_trial = False

    def failed(self, now_s: float) -> bool:
        """It failed or was late; returns whether it thereby went down."""
        self.failures += 1
        went_down = self.is_up() and self.failures >= self.failures_max
        if went_down or (not self.is_up() and self.is_trial):
            self.retry_delay_s = (
                self.retry_s if went_down else min(self.retry_delay_s * RETRY_GROWTH, RETRY_SECONDS_MAX)
            )
            self.retry_at_s = now_s + self.retry_delay_s
        self.is_trial = False
        return went_down
