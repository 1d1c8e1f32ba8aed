"""Compares a plan's step times with published ones: decode steps, first tokens, and throughput at full load.

    python bench/published_steps.py

The figures are in ``parts/published_steps.toml``, each with its source. Figures that set an input of the plan are
called calibrated, and the others were held out. InferenceX and the vendors keep the number of requests in the engine
constant, so each answer's steps also wait for the prompts of the others.
"""

import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # not this folder: bench/vllm.py would hide vLLM
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import click
from bench.parts.command import run as run_script

from kvtier.report.format import digits
from kvtier.report.table import Table, print_table
from kvtier.tools.plan.operating_point import prefill_s, step_s
from kvtier.tools.plan.read_inputs import load
from kvtier.tools.plan.resolve import Deployment, resolve

TABLES = tomllib.loads((Path(__file__).parent / "parts" / "published_steps.toml").read_text(encoding="utf-8"))
WHAT = {"tpot": "ms a token", "ttft": "ms to the first token", "rate": "tokens/s of a GPU"}


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedStep:
    """One published figure and the plan's."""

    series: dict[str, Any]
    tp: int
    requests: int
    prompt_tokens: int
    answer_tokens: int
    what: str
    published: float
    predicted: float
    is_held_out: bool

    @property
    def ratio(self) -> float:
        """The plan's figure divided by the published one, or the inverse for a rate. Above 1 the plan is slower."""
        return self.published / self.predicted if self.what == "rate" else self.predicted / self.published


def compare(**changes: object) -> Iterator[PublishedStep]:
    """Yield every published figure. A keyword such as ``gpu__layer_s=1e-12`` changes an input of all plans."""
    for series in TABLES["series"]:
        for key in ("calibrated", "held_out"):
            for tp, requests, prompt, answer, what, figure in series.get(key, ()):
                deployment = _deployment(series, tp, prompt, answer, changes)
                yield PublishedStep(
                    series=series,
                    tp=tp,
                    requests=requests,
                    prompt_tokens=prompt,
                    answer_tokens=answer,
                    what=what,
                    published=figure,
                    predicted=_predicted(deployment, requests, prompt, answer, what),
                    is_held_out=key == "held_out",
                )


def _deployment(series: dict[str, Any], tp: int, prompt: int, answer: int, changes: dict[str, object]) -> Deployment:
    options: dict[str, object] = {
        "model.name": series["model"], "model.weights": series["weights"], "model.tp": tp,
        "model.kv_dtype": series.get("kv", "bf16"),
        "gpu.name": series["gpu"], "gpu.count": tp, "traffic.turns": 1, "traffic.prefix_tokens": 0,
        "traffic.history_tokens": prompt - 1, "traffic.question_tokens": 1, "traffic.answer_tokens": answer,
    }  # fmt: skip
    return resolve(load(options=options | {name.replace("__", "."): it for name, it in changes.items()}))


def _predicted(deployment: Deployment, requests: int, prompt: int, answer: int, what: str) -> float:
    first_s = prefill_s(deployment, prompt, prompt)
    if what == "ttft":
        return first_s * 1e3
    requests = requests or deployment.batch
    # While one answer is generated, the engine computes one prompt of every other request.
    token_s = step_s(deployment, requests, prompt + answer / 2) + (requests - 1) * first_s / answer
    return requests / token_s / deployment.server_gpus if what == "rate" else token_s * 1e3


def table(steps: list[PublishedStep]) -> Table:
    """Return the table of all figures, one per row."""
    rows = [
        (
            it.series["model"], it.series["gpu"], it.series["engine"], str(it.tp), str(it.requests or "full"),
            f"{it.prompt_tokens}/{it.answer_tokens}", WHAT[it.what], digits(it.published), digits(it.predicted),
            f"{it.ratio:.2f}", "held out" if it.is_held_out else "calibrated",
        )
        for it in steps
    ]  # fmt: skip
    columns = ("model", "GPU", "engine", "TP", "requests", "tokens", "what", "published", "plan", "ratio", "")
    return Table(columns, rows, title="Published times and the plan's; above 1 the plan is slower")


def summary(steps: list[PublishedStep]) -> list[tuple[str, ...]]:
    """Return for each model, GPU, engine and kind of figure the number of figures and the range of their ratios."""
    groups: dict[tuple[str, ...], list[PublishedStep]] = {}
    for it in steps:
        how = "held out" if it.is_held_out else "calibrated"
        groups.setdefault((it.series["model"], it.series["gpu"], it.series["engine"], WHAT[it.what], how), []).append(
            it
        )
    return [
        (*key, ", ".join(sorted({f"TP {it.tp}" for it in found})), str(len(found)), _range(found))
        for key, found in groups.items()
    ]


def _range(steps: list[PublishedStep]) -> str:
    ratios = sorted(it.ratio for it in steps)
    return f"{ratios[0]:.2f}" if len(ratios) == 1 else f"{ratios[0]:.2f} to {ratios[-1]:.2f}"


@click.command()
def published_steps() -> None:
    """Print every published figure beside the plan's."""
    steps = list(compare())
    print_table(table(steps))
    for source in TABLES["source"].values():
        click.echo(f"- {source['text']}; read {source['read']}")


if __name__ == "__main__":
    run_script(published_steps)
