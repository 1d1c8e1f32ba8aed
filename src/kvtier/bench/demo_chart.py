"""Charts as SVG text, drawn here: no library, no script, no font; colours come from the page's style sheet."""

import math
from collections.abc import Iterable, Sequence
from html import escape
from statistics import median

from kvtier.bench.demo_result import Pass
from kvtier.bench.demo_summary import milliseconds, place_name

WIDTH = 1040
LEFT, RIGHT = 84, 100


def ttft_by_turn(passes: Sequence[Pass]) -> str:
    """The time to first token over the turn of a conversation: a dot for each request, a line through the medians."""
    height, top, bottom = 380, 16, 64
    turns = max(it.turn for it in passes[0].samples) + 1
    highest_ms = max(sample.ttft_ms for it in passes for sample in it.samples)
    axis = _Axis(highest_ms, height - bottom, top)
    step = (WIDTH - LEFT - RIGHT) / turns
    parts = [axis.draw("time to first token, ms")]

    def x_of(turn: float) -> float:
        return LEFT + (turn + 0.5) * step

    counts = [sum(sample.turn == turn for sample in passes[0].samples) for turn in range(turns)]
    every = math.ceil(turns / 20)
    for turn in range(0, turns, every):
        parts.append(_text(x_of(turn), height - bottom + 18, str(turn + 1), "middle"))
        parts.append(_text(x_of(turn), height - bottom + 34, f"n={counts[turn]}", "middle", "faint"))
    parts.append(_text(LEFT + (WIDTH - LEFT - RIGHT) / 2, height - 6, "turn of the conversation", "middle", "label"))
    # Passes beside each other within a turn, so that their dots do not hide one another.
    offsets = {it.name: (place - (len(passes) - 1) / 2) * step * 0.16 for place, it in enumerate(passes)}
    ends: list[tuple[float, str, str]] = []
    for it in passes:
        dots = "".join(
            f'<circle cx="{x_of(sample.turn) + offsets[it.name]:.1f}" cy="{axis.y_of(sample.ttft_ms):.1f}" r="2.6">'
            f"<title>{escape(_sample_title(it.name, place, it))}</title></circle>"
            for place, sample in enumerate(it.samples)
        )
        medians = [
            (x_of(turn), median(sample.ttft_ms for sample in it.samples if sample.turn == turn))
            for turn in range(turns)
            if counts[turn]
        ]
        points = " ".join(f"{x:.1f},{axis.y_of(value):.1f}" for x, value in medians)
        parts.append(f'<g class="pass-{it.name} dots">{dots}</g>')
        parts.append(f'<polyline class="pass-{it.name} line" points="{points}"/>')
        ends.append((axis.y_of(medians[-1][1]), it.name, it.name))
    parts += _end_labels(ends)
    return _svg(height, "Time to first token by turn of the conversation, for each pass", parts)


def ttft_by_request(passes: Sequence[Pass]) -> str:
    """The time to first token of each request as a bar: one row of bars for each pass, all to the same scale."""
    row, gap, top, bottom = 110, 20, 8, 28
    height = top + len(passes) * (row + gap) + bottom
    highest_ms = max(sample.ttft_ms for it in passes for sample in it.samples)
    order = _by_conversation(passes[0])
    step = (WIDTH - LEFT - RIGHT) / len(order)
    parts: list[str] = []
    floor = 0.0
    for line, it in enumerate(passes):
        ceiling = top + line * (row + gap)
        floor = ceiling + row
        axis = _Axis(highest_ms, floor, ceiling, ticks=2)
        parts.append(axis.draw("ms" if line == 0 else ""))
        bars = "".join(
            f'<rect x="{LEFT + place * step:.2f}" y="{axis.y_of(it.samples[position].ttft_ms):.1f}" '
            f'width="{max(step * 0.8, 0.5):.2f}" height="{floor - axis.y_of(it.samples[position].ttft_ms):.1f}">'
            f"<title>{escape(_sample_title(it.name, position, it))}</title></rect>"
            for place, position in enumerate(order)
        )
        parts.append(f'<g class="pass-{it.name} bars">{bars}</g>')
        parts.append(_text(WIDTH - RIGHT + 10, floor - row / 2 + 5, it.name, "start", f"name pass-{it.name}"))
    parts += _conversation_marks(passes[0], order, step, top, floor)
    parts.append(
        _text(
            LEFT + (WIDTH - LEFT - RIGHT) / 2, height - 4, "requests, by conversation (number below)", "middle", "label"
        )
    )
    return _svg(height, "Time to first token of each request, for each pass", parts)


def tokens_by_pass(passes: Sequence[Pass]) -> str:
    """Prompt tokens of each pass as one bar: what was restored, by place, and what was computed."""
    row, gap, top = 30, 16, 26
    height = top + len(passes) * (row + gap) + 6
    places = list(dict.fromkeys(place for it in passes for place in it.restored_by_tier))
    total = max(it.input_tokens for it in passes)
    scale = (WIDTH - LEFT - RIGHT) / total
    parts = _token_legend(places)
    for line, it in enumerate(passes):
        y = top + line * (row + gap) + 6
        parts.append(_text(LEFT - 8, y + row / 2 + 5, it.name, "end", f"name pass-{it.name}"))
        x = float(LEFT)
        shares = [("computed", "computed", it.computed_tokens)]
        shares += [(_place_class(place), place_name(place), it.restored_by_tier.get(place, 0)) for place in places]
        for kind, name, tokens in shares:
            width = tokens * scale
            if not tokens:
                continue
            share = f"{tokens / it.input_tokens:.0%}"
            parts.append(
                f'<rect class="{kind}" x="{x:.1f}" y="{y}" width="{width:.1f}" height="{row}">'
                f"<title>{escape(f'{it.name}: {tokens:,} tokens {name} ({share})')}</title></rect>"
            )
            if width > 110:
                parts.append(_text(x + 8, y + row / 2 + 5, f"{tokens:,} ({share})", "start", f"on-{kind}"))
            x += width
    return _svg(height, "Prompt tokens computed and restored, for each pass", parts)


class _Axis:
    """A vertical axis from 0, with lines at round numbers."""

    def __init__(self, highest: float, floor: float, ceiling: float, ticks: int = 5) -> None:
        self.step = round_step(highest / ticks)
        self.top = math.ceil(highest / self.step) * self.step
        self.floor, self.ceiling = floor, ceiling

    def y_of(self, value: float) -> float:
        return self.floor - value / self.top * (self.floor - self.ceiling)

    def draw(self, label: str) -> str:
        parts: list[str] = []
        for number in range(round(self.top / self.step) + 1):
            value = number * self.step
            y = self.y_of(value)
            kind = "axis" if number == 0 else "grid"
            parts.append(f'<line class="{kind}" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
            parts.append(_text(LEFT - 8, y + 4, f"{value:,g}", "end"))
        if label:
            x, y = 14, (self.floor + self.ceiling) / 2
            parts.append(
                f'<text class="label" text-anchor="middle" transform="translate({x},{y:.0f}) rotate(-90)">'
                f"{escape(label)}</text>"
            )
        return "".join(parts)


def round_step(least: float) -> float:
    """The smallest of 1, 2, 2.5, 5 times a power of ten that is at least `least`; 1 for nothing."""
    if least <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(least))
    return next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= least * (1 - 1e-9))


def _sample_title(name: str, position: int, it: Pass) -> str:
    sample = it.samples[position]
    return (
        f"{name}: conversation {sample.session + 1}, turn {sample.turn + 1}: {milliseconds(sample.ttft_ms)}; "
        f"{sample.prompt_tokens:,} prompt tokens, {sample.restored_tokens:,} restored"
    )


def _by_conversation(it: Pass) -> list[int]:
    """Positions of the requests, those of one conversation beside each other, otherwise in the order of sending."""
    return sorted(range(len(it.samples)), key=lambda place: (it.samples[place].session, place))


def _conversation_marks(it: Pass, order: Sequence[int], step: float, top: float, floor: float) -> Iterable[str]:
    places: dict[int, list[int]] = {}
    for place, position in enumerate(order):
        places.setdefault(it.samples[position].session, []).append(place)
    for session, found in places.items():
        middle = LEFT + (found[0] + found[-1] + 1) / 2 * step
        yield _text(middle, floor + 17, str(session + 1), "middle", "faint")
        if found[0]:
            x = LEFT + found[0] * step - step * 0.1
            yield f'<line class="mark" x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{floor + 6:.1f}"/>'


def _token_legend(places: Sequence[str]) -> list[str]:
    parts: list[str] = []
    x = LEFT
    for kind, name in [
        ("computed", "computed"),
        *((_place_class(p), f"restored from {place_name(p)}") for p in places),
    ]:
        parts.append(f'<rect class="{kind}" x="{x}" y="2" width="13" height="13" rx="2"/>')
        parts.append(_text(x + 19, 13, name, "start"))
        x += 44 + round(6.6 * len(name))
    return parts


def _place_class(place: str) -> str:
    return place if place in {"host", "directory"} else "elsewhere"


def _end_labels(ends: list[tuple[float, str, str]]) -> Iterable[str]:
    """Names at the right ends of lines, moved apart where they would lie on each other."""
    lowest = -math.inf
    for y, name, text in sorted(ends):
        lowest = max(y, lowest + 17)
        yield _text(WIDTH - RIGHT + 10, lowest + 5, text, "start", f"name pass-{name}")


def _text(x: float, y: float, text: str, anchor: str, kind: str = "tick") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _svg(height: float, title: str, parts: Iterable[str]) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{escape(title)}" '
        f'xmlns="http://www.w3.org/2000/svg">{"".join(parts)}</svg>'
    )
