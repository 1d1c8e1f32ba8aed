"""How fast the engine computes, for the planner: what each step took, and what is to be computed first."""

from kvtier.connect.vllm.tracked import Tracked
from kvtier.core.planner import Piece, Planner


class StepTimer:
    """Watches the steps of one engine. Belongs to the scheduler's thread.

    Args:
        planner: told of every step.
    """

    def __init__(self, planner: Planner) -> None:
        self._planner = planner
        self._steps: dict[int, tuple[float, list[Piece]]] = {}
        """Those that are under way: when they went out, and what they compute, if nothing else is in their time."""
        self._computed_s = 0.0
        """All steps together, up to the end of the last one that computed something."""
        self._began_s = 0.0
        self._ended_s = 0.0
        """Of that one."""
        self._last_done_s = 0.0
        self._computing: dict[str, Tracked] = {}
        """Requests whose prompts are being computed, or will be."""

    def will_compute(self, tracked: Tracked) -> None:
        """Nothing, or nothing more, is loaded for a request."""
        self._computing[tracked.id] = tracked

    def forget(self, name: str) -> None:
        """A request is gone, or back in the queue."""
        self._computing.pop(name, None)

    def ahead_s(self, name: str) -> float:
        """Expected time of all prompts that are computed before the one of request `name`."""
        return sum(
            self._planner.seconds(tracked.request.num_tokens - done, done)
            for other, tracked in self._computing.items()
            if other != name and (done := tracked.request.num_computed_tokens) < tracked.request.num_tokens
        )

    def scheduled(self, tracked: Tracked, tokens: int) -> Piece:
        """A request's share of the step that goes out."""
        done = tracked.request.num_computed_tokens
        if done + tokens < tracked.request.num_prompt_tokens:
            self._computing[tracked.id] = tracked
        else:
            self._computing.pop(tracked.id, None)
        return Piece(tokens, done)

    def went(self, step: int, pieces: list[Piece], now_s: float, *, is_plain: bool) -> None:
        """A step goes out that computes `pieces`, and does nothing else if it `is_plain`."""
        if pieces:
            self._steps[step] = (now_s, pieces if is_plain else [])

    def came_back(self, step: int, now_s: float) -> None:
        """The step has come back. One that overlaps the one before it began with that one's end."""
        went = self._steps.pop(step, None)
        if went is not None:
            began_s, pieces = max(went[0], self._last_done_s), went[1]
            if pieces:
                self._planner.prefilled(pieces, now_s - began_s)
            self._computed_s += now_s - began_s
            self._began_s, self._ended_s = began_s, now_s
        self._last_done_s = now_s

    def computed_s(self, at_s: float) -> float:
        """How long the engine has computed up to `at_s`, which is not before the last step that came back began."""
        since_s = min((went_s for went_s, _ in self._steps.values()), default=at_s)
        not_yet_s = max(0.0, self._ended_s - max(at_s, self._began_s))
        return self._computed_s - not_yet_s + max(0.0, at_s - max(since_s, self._last_done_s))
