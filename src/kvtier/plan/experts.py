"""Routed experts of a mixture: their number, how many a token uses, and the weights that a decode step reads."""

import tomllib
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple, cast

from kvtier import size
from kvtier.size.model_config import load

_COUNTS = ("n_routed_experts", "num_experts", "num_local_experts")
_USED = ("num_experts_per_tok", "num_experts_per_token", "experts_per_token", "top_k_experts")


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


@cache
def _catalogue() -> dict[str, list[int]]:
    return tomllib.loads((files("kvtier.plan") / "experts.toml").read_text(encoding="utf-8"))


def experts_of(model: size.Model) -> Experts:
    """The experts of a model: of the catalogue, or of the fields of its config.json."""
    if model.date:
        return Experts(*_catalogue().get(model.name, (0, 0)))
    fields = load(Path(model.source)).values
    count, used = (
        next((cast("int", fields[name]) for name in names if isinstance(fields.get(name), int)), 0)
        for names in (_COUNTS, _USED)
    )
    return Experts(count, used) if 0 < used <= count else Experts(0, 0)
