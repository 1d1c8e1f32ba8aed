"""Measures the engine's compute speed for the planner: the time of each step, and the prefill work in its queue."""

from kvtier.connect.vllm.requests.tracked import TrackedRequest
from kvtier.core.planner import Piece, Planner


class StepTimer:
    """Times the steps of one engine. Only the scheduler's thread uses it.

    Args:
        planner: receives the time of every step.
    """

    def __init__(self, planner: Planner) -> None:
        self._planner = planner
        self._steps: dict[int, tuple[float, list[Piece]]] = {}
        """Steps in flight that compute something, with their start time and pieces."""
        self._computed_s = 0.0
        """Total time of all steps that computed something."""
        self._began_s = 0.0
        """Start of the last such step."""
        self._ended_s = 0.0
        """End of the last such step."""
        self._computing: dict[str, TrackedRequest] = {}
        """Requests that have prompt tokens left to compute and no open load."""

    def will_compute(self, tracked: TrackedRequest) -> None:
        """Queue a request's prompt. The request loads nothing, or its load has ended."""
        self._computing[tracked.id] = tracked

    def forget(self, name: str) -> None:
        """Remove a request that has ended, or that is looked up and may load its prompt."""
        self._computing.pop(name, None)

    def ahead_s(self, name: str) -> float:
        """Return the expected compute time of all prompts queued before request `name`."""
        return sum(
            self._planner.seconds(tracked.request.num_tokens - done, done)
            for other, tracked in self._computing.items()
            if other != name and (done := tracked.request.num_computed_tokens) < tracked.request.num_tokens
        )

    def scheduled(self, tracked: TrackedRequest, tokens: int) -> Piece:
        """Return a request's share of the step that is being scheduled."""
        done = tracked.request.num_computed_tokens
        if done + tokens < tracked.request.num_prompt_tokens:
            self._computing[tracked.id] = tracked
        else:
            self._computing.pop(tracked.id, None)
        return Piece(tokens, done)

    def step_began(self, step: int, pieces: list[Piece], now_s: float) -> None:
        """Record the start of a step that computes `pieces`."""
        if pieces:
            self._steps[step] = (now_s, pieces)

    def step_ended(self, step: int, now_s: float) -> None:
        """Record a step's end. A step that overlaps its predecessor is timed from the predecessor's end."""
        started = self._steps.pop(step, None)
        if started is not None:
            began_s, pieces = max(started[0], self._ended_s), started[1]
            self._planner.prefilled(pieces, now_s - began_s)
            self._computed_s += now_s - began_s
            self._began_s, self._ended_s = began_s, now_s

    def computed_s(self, at_s: float) -> float:
        """Return the total compute time up to `at_s`, which must not precede the start of the last step that ended."""
        since_s = min((began_s for began_s, _ in self._steps.values()), default=at_s)
        not_yet_s = max(0.0, self._ended_s - max(at_s, self._began_s))
        return self._computed_s - not_yet_s + max(0.0, at_s - max(since_s, self._ended_s))
