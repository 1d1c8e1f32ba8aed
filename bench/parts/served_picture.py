"""The picture of the answer of `kvtier bench serve`, which the documents show."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from kvtier.tools.bench.serve.report import answer_charts
from kvtier.tools.bench.serve.results import TTFT_LIMIT_S
from kvtier.tools.bench.serve.summary import ServeRecord
from kvtier.tools.charts.chart import Chart, Curve, write_charts

PICTURE_INCHES = (3.5, 3.6)
"""Size of each of the three charts in a picture. If they share 830 pixels, letters have ten pixels or more."""
PICTURE = {
    "ttft": "Time to first token: median",
    "ttft-p95": "p95: 95 of 100 come sooner",
    "goodput": "Goodput: first token within {limit:g} s",
}
"""Charts of `answer_charts` with their headings in a picture, which give the limit of goodput in seconds."""
PICTURE_NAMES = {"without": "no offloading", "native (memcpy stand-in)": "native", "native tiering": "native"}


def write_picture(path: Path, record: dict[str, Any]) -> None:
    """Write the picture of the answer, legible at a width of 830 pixels.

    Raises:
        ConfigError: the file cannot be written.
    """
    served = ServeRecord.of(record)
    charts = answer_charts(served)
    limit = served.results[0].ttft_limit_s or TTFT_LIMIT_S
    shown: dict[str, Chart] = {}
    for name, heading in PICTURE.items():
        if name not in charts:
            continue
        # Names stand at the ends of the lines instead of above them.
        marks = [
            replace(it, label="", end=PICTURE_NAMES.get(it.label, it.label)) if isinstance(it, Curve) else it
            for it in charts[name].marks
        ]
        shown[name] = replace(charts[name], heading=heading.format(limit=limit), marks=marks)
    write_charts("--picture", path, shown, PICTURE_INCHES, len(shown))
