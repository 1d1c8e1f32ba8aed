"""The picture of a TTFT record: time to first token by context length. Needs the extra `plots`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from matplotlib.figure import Figure

from kvtier.plan.drawing import figure_bytes
from kvtier.plan.files import write_whole

_NAMES = {
    "recompute": ("computed anew", "#666666"),
    "host": ("from host memory", "#1f77b4"),
    "disk": ("from disk", "#d62728"),
    "store": ("computed and stored", "#bbbbbb"),
}


def draw(record: Mapping[str, Any], path: Path) -> None:
    """Write the picture of one record to `path`, in the format of its suffix.

    Raises:
        ConfigError: it cannot be written.
    """
    results = record["results"]
    figure = cast("Any", Figure(figsize=(7.0, 4.5), layout="constrained"))
    axes = figure.subplots()
    for name, (label, colour) in _NAMES.items():
        told = {int(context): ms for context, ms in results["ttft_ms"].get(name, {}).items()}
        if told:
            axes.plot(sorted(told), [told[context] for context in sorted(told)], "o-", label=label, color=colour)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("tokens of the prompt")
    axes.set_ylabel("time to first token, ms (median)")
    axes.set_title(f"{results['shape']}, {results['device']}")
    axes.grid(visible=True, alpha=0.3)
    axes.legend()
    write_whole("--picture", path, figure_bytes(figure, path.suffix.lower().removeprefix("."), dpi=100))
