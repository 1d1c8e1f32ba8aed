"""A circuit breaker for the reads or writes of a tier: consecutive failures open it, a successful trial closes it."""

from dataclasses import dataclass

RETRY_GROWTH = 2.0
RETRY_SECONDS_MAX = 60.0


@dataclass(slots=True)
class CircuitBreaker:
    """Decides whether a tier gets operations of one kind.

    Args:
        failures_max: consecutive failures that open the breaker.
        retry_s: delay before the first trial; doubles with each failed trial, up to a minute.
    """

    failures_max: int
    retry_s: float
    failures: int = 0
    retry_delay_s: float = 0.0
    retry_at_s: float = 0.0
    is_trial: bool = False

    def open_now(self) -> None:
        """Start open: the first operation is a trial."""
        self.retry_delay_s = self.retry_s

    def is_up(self) -> bool:
        """Whether the breaker is closed."""
        return self.retry_delay_s == 0.0

    def allows(self, now_s: float) -> bool:
        """Whether to start an operation. While open, one trial is allowed after each delay."""
        return self.retry_delay_s == 0.0 or (not self.is_trial and now_s >= self.retry_at_s)

    def attempted(self) -> None:
        """An operation started; while open, it is the trial."""
        if not self.is_up():
            self.is_trial = True

    def succeeded(self) -> bool:
        """An operation succeeded; returns whether that closed the breaker."""
        was_open = not self.is_up()
        self.failures, self.retry_delay_s, self.is_trial = 0, 0.0, False
        return was_open

    def retry_now(self, now_s: float) -> None:
        """Allow a trial at once."""
        self.retry_at_s = min(self.retry_at_s, now_s)

    def inconclusive(self) -> None:
        """An operation was cancelled; if it was the trial, another one is allowed."""
        self.is_trial = False

    def failed(self, now_s: float) -> bool:
        """An operation failed or was late; returns whether that opened the breaker."""
        self.failures += 1
        is_opening = self.is_up() and self.failures >= self.failures_max
        if is_opening or (not self.is_up() and self.is_trial):
            self.retry_delay_s = (
                self.retry_s if is_opening else min(self.retry_delay_s * RETRY_GROWTH, RETRY_SECONDS_MAX)
            )
            self.retry_at_s = now_s + self.retry_delay_s
        self.is_trial = False
        return is_opening
