"""`kvtier bench multiturn` as pictures, and as one HTML file that needs nothing else."""
# matplotlib's own stubs leave keyword arguments without a type:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from html import escape
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kvtier.bench.multiturn import ARMS, DISK, HOST, RECOMPUTE, Settings
from kvtier.bench.multiturn_record import notes, table
from kvtier.bench.multiturn_result import MultiturnResult, Summary
from kvtier.bench.record import machine
from kvtier.config.kinds import size_text
from kvtier.plan.drawing import LIGHT, MARKED, RC, Colours, dress, figure_bytes, for_page
from kvtier.plan.files import write_whole
from kvtier.plan.page import page, table_html

COLOURS = {RECOMPUTE: "computed", HOST: "host", DISK: "disk"}
NAMES = {RECOMPUTE: "recompute", HOST: "kvtier, host memory", DISK: "kvtier, host memory and disk"}
SOURCES = (("resident", "gpu"), ("host", "host"), ("disk", "disk"), ("computed", "computed"))

Draw = Callable[[Axes, Sequence[Summary], Colours], None]


def write_picture(path: Path, result: MultiturnResult) -> None:
    """Write the curves to one file, on a light ground.

    Raises:
        ConfigError: the file cannot be written.
    """
    drawn = list(_pictures(result).values())[:2]
    with mpl.rc_context(RC):
        figure = Figure(figsize=(11.0, 4.4), layout="constrained", facecolor=LIGHT["ground"])
        for axes, (title, draw) in zip(figure.subplots(1, 2), drawn, strict=True):
            draw(axes, result.summaries(), LIGHT)
            axes.set_title(title)
            dress(axes, LIGHT)
        write_whole("--picture", path, figure_bytes(figure, path.suffix.lower().removeprefix("."), dpi=100))


def write_report(path: Path, settings: Settings, result: MultiturnResult) -> None:
    """Write the report, whole or not at all.

    Raises:
        ConfigError: the file cannot be written.
    """
    write_whole("--report", path, render_report(settings, result, datetime.now(UTC)).encode())


def render_report(settings: Settings, result: MultiturnResult, made: datetime) -> str:
    """The whole page."""
    work, facts = settings.workload, machine()
    found = result.summaries()
    drawn = "".join(
        f"<figure><h3>{escape(title)}</h3>{_svg(draw, found, name)}</figure>"
        for name, (title, draw) in _pictures(result).items()
    )
    said = "".join(f"<li>{escape(text)}</li>" for text in notes(result))
    lengths = "as in ShareGPT around a mean of" if work.real_lengths else "all of"
    pace = f"{work.rate_per_user:g} questions/s of each user" if work.rate_per_user else "no pause between questions"
    body = (
        "<header><h1>Conversations, with less room on the device than they need</h1>"
        f'<p class="soft">Made by <code>kvtier bench multiturn</code>, {made:%Y-%m-%d %H:%M} UTC; '
        f"{escape(result.device)}, {facts['cores']} cores.</p></header>"
        f"<p>Each user asks {work.rounds} questions. Prompts begin with {work.system_tokens:,} tokens that all share "
        f"and {work.history_tokens:,} of the user's own; lengths are {lengths} {work.question_tokens} tokens for "
        f"questions and {work.answer_tokens} for answers; {pace}. The device holds {result.budget_tokens:,} tokens of "
        f"KV ({size_text(settings.budget_bytes)}), host memory {size_text(settings.host_bytes)}. The model has the "
        f"shape of {escape(result.shape)} and random weights. The server is a small one of our own, the same in every "
        "arm: figures compare arms, they are no engine's figures.</p>"
        f'<div class="pictures">{drawn}</div>{f"<ul>{said}</ul>" if said else ""}{table_html(table(result))}'
    )
    return page("kvtier bench multiturn", body)


def _pictures(result: MultiturnResult) -> dict[str, tuple[str, Draw]]:
    drawn: dict[str, tuple[str, Draw]] = {
        "ttft": ("Time to first token against users", _draw_ttft),
        "rate": ("Output tokens a second against users", _draw_rate),
        "sources": ("Where the KV of prompts came from", _draw_sources),
    }
    if any(it.joules_per_output_token is not None for it in result.summaries()):
        drawn["energy"] = ("Energy of an output token", _draw_energy)
    return drawn


def _svg(draw: Draw, found: Sequence[Summary], name: str) -> str:
    with mpl.rc_context(RC):
        figure = Figure(figsize=(6.6, 4.2), layout="constrained")
        axes = figure.subplots()
        draw(axes, found, MARKED)
        dress(axes, MARKED)
        return for_page(figure_bytes(figure, "svg").decode(), name)


def _draw_ttft(axes: Axes, found: Sequence[Summary], colours: Colours) -> None:
    for arm, points in _by_arm(found):
        colour, users = colours[COLOURS[arm]], [it.users for it in points]
        axes.plot(users, [it.ttft_ms["p50"] for it in points], "o-", color=colour, label=NAMES[arm], markersize=5)
        axes.plot(users, [it.ttft_ms["p95"] for it in points], ":", color=colour, linewidth=1.4)
    axes.set(yscale="log", xlabel="users", ylabel="ms, later turns; median, dotted: p95")
    _finish(axes, found)


def _draw_rate(axes: Axes, found: Sequence[Summary], colours: Colours) -> None:
    for arm, points in _by_arm(found):
        rates = [it.output_tokens_per_s for it in points]
        axes.plot([it.users for it in points], rates, "o-", color=colours[COLOURS[arm]], label=NAMES[arm], markersize=5)
    axes.set(xlabel="users", ylabel="output tokens/s", ylim=(0, None))
    _finish(axes, found)


def _draw_energy(axes: Axes, found: Sequence[Summary], colours: Colours) -> None:
    for arm, points in _by_arm(found):
        told = [(it.users, it.joules_per_output_token) for it in points if it.joules_per_output_token is not None]
        users, joules = [pair[0] for pair in told], [pair[1] for pair in told]
        axes.plot(users, joules, "o-", color=colours[COLOURS[arm]], label=NAMES[arm], markersize=5)
    axes.set(xlabel="users", ylabel="J for an output token", ylim=(0, None))
    _finish(axes, found)


def _draw_sources(axes: Axes, found: Sequence[Summary], colours: Colours) -> None:
    places = range(len(found))
    begins = [0.0] * len(found)
    for source, colour in SOURCES:
        shares = [_tokens(it, source) / it.prompt_tokens for it in found]
        axes.barh(places, shares, left=begins, color=colours[colour], label=source, height=0.7)
        begins = [begin + share for begin, share in zip(begins, shares, strict=True)]
    axes.set_yticks(places, [f"{it.users} users, {it.arm}" for it in found], fontsize=8)
    axes.invert_yaxis()
    axes.set(xlabel="of all prompt tokens", xlim=(0, 1))
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=4, borderaxespad=0.2, handlelength=1.2)


def _tokens(it: Summary, source: str) -> int:
    if source in {"resident", "computed"}:
        return it.resident_tokens if source == "resident" else it.computed_tokens
    return sum(tokens for place, tokens in it.restored_tokens.items() if (place == "host") == (source == "host"))


def _by_arm(found: Sequence[Summary]) -> list[tuple[str, list[Summary]]]:
    return [(arm, points) for arm in ARMS if (points := [it for it in found if it.arm == arm])]


def _finish(axes: Axes, found: Sequence[Summary]) -> None:
    axes.set_xticks(sorted({it.users for it in found}))
    axes.legend(loc="best")
