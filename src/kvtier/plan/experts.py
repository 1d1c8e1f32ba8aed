"""Routed experts of a mixture: their number, how many a token uses, and the weights that a decode step reads."""

from typing import NamedTuple


class Experts(NamedTuple):
    """Routed experts of one layer; none in a dense model, or where the configuration does not tell."""

    routed: int
    used: int
    """Of one token."""

    def bytes_of(self, weight_bytes: float, total: float, active: float) -> float:
        """Bytes of all routed experts among `weight_bytes` of `total` parameters.

        A token skips ``1 - used / count`` of them and nothing else, so they hold ``(total - active)`` over that.
        """
        if self.routed <= self.used or active >= total:
            return 0.0
        return weight_bytes * min((1 - active / total) / (1 - self.used / self.routed), 1.0)

    def read_share(self, tokens: float) -> float:
        """Share of the experts that a step for `tokens` tokens reads: ``1 - (1 - used / count)^tokens``.

        The expectation for independent tokens that use every expert equally often. Tokens of one subject use fewer.
        """
        return 1 - (1 - self.used / self.routed) ** max(tokens, 1.0) if self.routed else 1.0
