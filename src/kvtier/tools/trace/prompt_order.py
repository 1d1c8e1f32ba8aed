"""Finds a better order of the parts of prompts (components, or texts between separators) for a prefix cache.

Another order may change answers, so it is only advice, and no cache applies it by itself.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvtier.tools.trace.arrays import Column
from kvtier.tools.trace.formats.base import Contents

PARTS_MAX = 1 << 20
"""Maximum number of parts in all prompts together. The order of more parts is not examined."""
SLOTS_MAX = 12
"""Maximum number of slots (see `best_order`) for which moves are tried. Those with the most tokens are chosen."""
MOVES_MAX = 4
GAIN_LEAST = 0.001
"""A move must raise the hit rate by at least this."""
MOVED_LEAST = 0.1
"""Parts of a kind count as a list, not as fixed places, if more than this share of their reuse is at another place than
the first use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """Hit rates with the parts of prompts as sent and in the best order found.

    Both are None if the trace does not show parts.
    """

    as_sent: float | None = None
    best_online: float | None = None
    """Hit rate with all `moves`, if parts are sorted by their frequency in earlier requests only."""
    moves: tuple[tuple[str, float], ...] = ()
    """Each move, and the hit rate with this move and all earlier ones."""


class PromptPart(NamedTuple):
    """A part of a prompt."""

    kind: str
    content: int
    tokens: int


Move = tuple[str, bool]
"""A slot, and whether it is sorted by frequency instead of moved to the end."""


def parts_of(contents: Sequence[Contents | None], inputs: Column, separator: str) -> list[list[PromptPart]]:
    """Return the parts of each prompt, or an empty list if parts are unknown or there are more than `PARTS_MAX`.

    Args:
        contents: contents of each request.
        inputs: tokens of each prompt. Parts of a text have tokens in proportion to their characters.
        separator: separator of the parts of a text. If it is empty, texts have no known parts.
    """
    numbers: dict[str, int] = {}
    out: list[list[PromptPart]] = []
    for one, tokens in zip(contents, inputs.tolist(), strict=True):
        if one is None or (one.text and not separator):
            return []
        if not one.text:
            kinds = one.kinds or ("part",) * len(one.ids)
            out.append([PromptPart(*it) for it in zip(kinds, one.ids.tolist(), one.tokens.tolist(), strict=True)])
        else:
            texts = [it for it in one.text.split(separator) if it]
            scale = tokens / max(sum(map(len, texts)), 1)
            out.append(
                [PromptPart("part", numbers.setdefault(it, len(numbers)), round(len(it) * scale)) for it in texts]
            )
    return out if sum(map(len, out)) <= PARTS_MAX else []


def best_order(prompts: Sequence[Sequence[PromptPart]], block_tokens: int) -> Order:
    """Find moves that raise the hit rate of an unbounded cache, the best first.

    A move puts a slot at the end of every prompt, or sorts the slot's parts by the number of earlier requests that have
    them. A slot is a kind of parts, or one place among the parts of a kind whose parts keep their places.
    """
    slots = _slots(prompts)
    weights, widest = Counter[str](), Counter[str]()
    for prompt, names in zip(prompts, slots, strict=True):
        widest |= Counter(names)
        for part, name in zip(prompt, names, strict=True):
            weights[name] += part.tokens
    total = max(weights.total(), 1)
    names = [it for it, _ in weights.most_common(SLOTS_MAX)]
    left: list[Move] = [*((it, False) for it in names), *((it, True) for it in names if widest[it] > 1)]
    chosen: list[Move] = []
    rates = [_hits(prompts, slots, (), block_tokens) / total]
    while left and len(chosen) < MOVES_MAX:
        rate, move = max((_hits(prompts, slots, (*chosen, it), block_tokens) / total, it) for it in left)
        if rate < rates[-1] + GAIN_LEAST:
            break
        chosen.append(move)
        left.remove(move)
        rates.append(rate)
    texts = (f"{name} by frequency" if is_sorted else f"{name} to the end" for name, is_sorted in chosen)
    return Order(as_sent=rates[0], best_online=rates[-1], moves=tuple(zip(texts, rates[1:], strict=True)))


def _slots(prompts: Sequence[Sequence[PromptPart]]) -> list[list[str]]:
    """Return the name of each part's slot, for each prompt."""
    firsts: dict[tuple[str, int], int] = {}
    moved, reused, widest = Counter[str](), Counter[str](), Counter[str]()
    for prompt in prompts:
        for (kind, content, _), place in zip(prompt, _places(prompt), strict=True):
            reused[kind] += (kind, content) in firsts
            moved[kind] += firsts.setdefault((kind, content), place) != place
            widest[kind] = max(widest[kind], place + 1)
    lists = {kind for kind, most in widest.items() if most == 1 or moved[kind] > MOVED_LEAST * reused[kind]}
    return [
        [
            it.kind if it.kind in lists else f"{it.kind} {place + 1}"
            for it, place in zip(prompt, _places(prompt), strict=True)
        ]
        for prompt in prompts
    ]


def _places(prompt: Sequence[PromptPart]) -> Iterator[int]:
    """Yield the place of each part among the parts of its kind."""
    counts = Counter[str]()
    for part in prompt:
        yield counts[part.kind]
        counts[part.kind] += 1


def _hits(
    prompts: Sequence[Sequence[PromptPart]], slots: Sequence[Sequence[str]], moves: Sequence[Move], block_tokens: int
) -> int:
    """Return how many tokens an unbounded prefix cache finds after the moves. Only whole blocks count."""
    ends = {name: number for number, (name, is_sorted) in enumerate(moves) if not is_sorted}
    lists = {name for name, is_sorted in moves if is_sorted}
    nodes, uses, hits = dict[tuple[int, int], int](), Counter[int](), 0
    for prompt, names in zip(prompts, slots, strict=True):
        keyed = [
            (
                ends.get(name, -1),
                *((names.index(name), -uses[it.content], it.content) if name in lists else (place,)),
                it,
            )
            for place, (it, name) in enumerate(zip(prompt, names, strict=True))
        ]
        order = [it[-1] for it in sorted(keyed, key=lambda it: it[:-1])]
        node, found, is_hit = -1, 0, True
        for part in order:
            is_hit = is_hit and (node, part.content) in nodes
            found += part.tokens * is_hit
            node = nodes.setdefault((node, part.content), len(nodes))
        hits += found // block_tokens * block_tokens
        uses.update({it.content for it in prompt})
    return hits
