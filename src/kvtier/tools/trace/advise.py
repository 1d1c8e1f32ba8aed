"""Computes what the layout of prompts costs a prefix cache, and what a better layout would save.

All figures assume an unbounded cache. A *cut* is the point at which a prompt begins to differ from an earlier one. A
*head* is the start of a prompt. Block ids that name whole prefixes show cuts, but not whether the text after a cut was
seen before. Texts, components, and ids that name only the contents of a block show both.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from os.path import commonprefix
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvtier.tools.trace.arrays import Column, TraceArrays
from kvtier.tools.trace.formats.base import Contents
from kvtier.tools.trace.prompt_order import Order, best_order, parts_of

CONTENTS_LEAST = 0.01
"""Ids are taken to name contents, not prefixes, if more than this share of accesses follow another block than the
first access to the same block."""
SIMILAR = (0.8, 1.25)
"""Two prompts are about equally long if the ratio of their numbers of blocks is in this range."""
EARLY = 0.5
"""A cut is early if it lies in the first half of the earlier prompt."""
LOST_TOKENS = 128
"""A cut counts only if the earlier prompt has more tokens than this after it, and more than one block."""
RETURNS = 0.1
"""A session alternates between heads if at least this share of its requests return to an earlier head."""
WINDOW_TOKENS = 32
"""Tokens of a text count as seen if they lie in a window of this many tokens that an earlier text contains."""
HEAD_TOKENS = 16
"""Number of tokens at the start of a text that identify its head."""
CONVERSATION_TOKENS = 256
"""Number of tokens at the start of a text that identify its session, if the trace does not name it."""
SEEN_MAX = 1 << 24
"""Maximum number of windows or parts that are remembered. Later ones are not, so repetition may be understated."""
CHUNKS = (1, 2, 4, 8, 16)
EXAMPLES = 3
LINE_CHARACTERS = 90
QUANTILES = (0.1, 0.25, 0.5, 0.75, 0.9)
_FACTOR = 0x9E3779B97F4A7C15
_INVERSE = pow(_FACTOR, -1, 1 << 64)

Prints = npt.NDArray[np.uint64]


class Prompt(NamedTuple):
    """What is known of a request but not in `TraceArrays`."""

    model: str | None
    contents: Contents | None


@dataclass(frozen=True, slots=True)
class Cost:
    """The tokens that are computed again for one reason."""

    count: int
    """Number of requests."""
    tokens: int
    share_of_tokens: float
    share_of_misses: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CutLines:
    """The line of text in which a cut lies, as it is in the earlier prompt and in the later one."""

    at_tokens: int
    before: str
    after: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlyCuts(Cost):
    """Requests that are about as long as the earlier request they are compared with, but share little with it.

    They differ from it in its first half.
    """

    sessions: int
    is_certain: bool
    """Whether each request is known to belong with the one it is compared with. If not, some requests have no session,
    so they may be from different conversations."""
    at_tokens: tuple[int, ...]
    """Quantiles, at 10, 25, 50, 75 and 90 %, of the number of tokens before the cut."""
    examples: tuple[CutLines, ...]
    """The most expensive cuts; empty if the trace has no texts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads(Cost):
    """Text that repeats, but that followed another head when it was seen before."""

    heads: int
    is_measured: bool
    """Whether contents were compared. Otherwise the figures follow from lengths, because ids name whole prefixes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound(Cost):
    """Upper bound of the savings that only reuse without a common prefix could bring."""

    is_measured: bool
    """Whether contents were compared. Otherwise all unexplained misses count, because ids name whole prefixes."""
    repeated_share_of_misses: float
    """Repeated tokens as a share of the misses, including those that a better layout would save."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """The cost of the layout of a trace's prompts."""

    trace: str
    requests: int
    block_tokens: int
    input_tokens: int
    missed_tokens: int
    hit_rate: float
    early_cuts: EarlyCuts
    heads: Heads
    order: Order
    chunks: tuple[tuple[int, float], ...]
    """Pairs of a chunk size in tokens and the hit rate with chunks of that size."""
    bound: Bound


class _Cut(NamedTuple):
    request: int
    before: int
    at_tokens: int
    tokens: int
    session: int


def advise(trace: TraceArrays, prompts: Sequence[Prompt], separator: str = "") -> Advice:
    """Compute the cost of the layout of a trace's prompts.

    Args:
        trace: the trace, with blocks.
        prompts: what else is known of each request, in the order of the trace.
        separator: separator of the parts of a text. If it is empty, texts have no known parts.
    """
    block, inputs = trace.block_tokens, np.asarray(trace.input_tokens, np.int64)
    contents = [it.contents for it in prompts]
    if trace.prefix_violations > CONTENTS_LEAST * len(trace.ids):
        pairs = zip(_requests(trace), inputs.tolist(), strict=True)
        contents = [Contents(it, np.clip(tokens - block * np.arange(len(it)), 0, block)) for it, tokens in pairs]
        trace = _chained(trace)
    hits = _leading(trace)
    hit_tokens = np.minimum(hits * block, inputs)
    total, missed = max(int(inputs.sum()), 1), int((inputs - hit_tokens).sum())

    def shares(tokens: int) -> tuple[int, float, float]:
        return tokens, tokens / total, tokens / max(missed, 1)

    known, models = [it for it in contents if it is not None], [it.model for it in prompts]
    is_measured = len(known) == len(contents)
    find = _by_contents if is_measured else _by_prefixes
    cuts, behind, heads, repeated = find(trace, hits, hit_tokens, models, known)
    parts = parts_of(contents, inputs, separator)
    order = best_order(parts, block) if parts else Order()
    saved = sum(it.tokens for it in cuts) + sum(behind)
    if order.as_sent is not None and order.best_online is not None:
        saved = round((order.best_online - order.as_sent) * total)
    places: list[float] = np.quantile([it.at_tokens for it in cuts], QUANTILES).tolist() if cuts else []
    chunks = ((block * it, np.minimum(hits // it * it * block, inputs).sum() / total) for it in CHUNKS)
    return Advice(
        trace=trace.name,
        requests=len(trace),
        block_tokens=block,
        input_tokens=int(inputs.sum()),
        missed_tokens=missed,
        hit_rate=1 - missed / total,
        early_cuts=EarlyCuts(
            len(cuts),
            *shares(sum(it.tokens for it in cuts)),
            sessions=len({it.session for it in cuts} - {-1}),
            is_certain=is_measured or all(it.session >= 0 for it in cuts),
            at_tokens=tuple(int(it) for it in places),
            examples=tuple(_examples(cuts, contents)),
        ),
        heads=Heads(len(behind), *shares(sum(behind)), heads=heads, is_measured=is_measured),
        order=order,
        chunks=tuple((tokens, float(rate)) for tokens, rate in chunks),
        bound=Bound(
            sum(it > 0 for it in repeated),
            *shares(max(0, sum(repeated) - saved)),
            is_measured=is_measured,
            repeated_share_of_misses=sum(repeated) / max(missed, 1),
        ),
    )


class _Found(NamedTuple):
    cuts: list[_Cut]
    behind_heads: list[int]
    """Tokens that followed another head before, for each request with such tokens."""
    heads: int
    repeated: list[int]
    """The missed tokens of each request that may have been seen before."""


def _by_contents(
    trace: TraceArrays, hits: Column, hit_tokens: Column, models: Sequence[str | None], contents: Sequence[Contents]
) -> _Found:
    """Analyze contents. A cut counts only if the request's repeated tokens are at least half of the cut's cost."""
    heads = [_start(it, HEAD_TOKENS) for it in contents]
    pairs = zip(trace.session.tolist(), contents, strict=True)
    names = [name if name >= 0 else -2 - _start(it, CONVERSATION_TOKENS) for name, it in pairs]
    alternating, users = _alternating(names, heads), Counter(heads)
    found = _Repeated(contents, hit_tokens, heads, names, alternating)
    cuts = [
        found.measured(it)
        for it in _cuts(trace, hits, models, found.sources)
        if 2 * found.tokens[it.request] >= it.tokens
        and (
            heads[it.request] == heads[it.before]
            or (it.session not in alternating if it.session >= 0 else users[heads[it.request]] == 1)
        )
    ]
    is_cut = {it.request for it in cuts}
    behind = [it for request, it in enumerate(found.behind_heads) if it and request not in is_cut]
    return _Found(cuts, behind, len(found.heads) if behind else 0, found.tokens)


def _by_prefixes(
    trace: TraceArrays, hits: Column, hit_tokens: Column, models: Sequence[str | None], _: Sequence[Contents]
) -> _Found:
    """Analyze ids that name whole prefixes. The first block of a prompt is its head."""
    heads = [int(it[0]) if len(it) else -1 for it in _requests(trace)]
    names: list[int] = trace.session.tolist()
    alternating = _alternating(names, heads)
    cuts = [
        it
        for it in _cuts(trace, hits, models, None)
        if heads[it.request] == heads[it.before] or it.session not in alternating
    ]
    behind = _behind_heads(trace, hit_tokens, heads, alternating)
    kinds = Counter(name for name, _ in {(names[it], heads[it]) for it in behind})
    missed = np.asarray(trace.input_tokens, np.int64) - hit_tokens
    return _Found(cuts, list(behind.values()), max(kinds.values(), default=0), missed.tolist())


def _requests(trace: TraceArrays) -> Iterator[Column]:
    return (trace.blocks(it) for it in range(len(trace)))


def _prints(ids: Column) -> Prints:
    """Return a fingerprint modulo 2^64 of each prefix of `ids`, the empty prefix first."""
    factors = np.cumprod(np.full(len(ids), _INVERSE, np.uint64))
    return np.concatenate((np.zeros(1, np.uint64), np.cumsum((ids.astype(np.uint64) + np.uint64(7)) * factors)))


def _windows(prints: Prints, width: int) -> Prints:
    """Return a fingerprint of each window of `width` ids. It does not depend on the window's position."""
    count = max(0, len(prints) - width)
    factors = np.cumprod(np.full(count, _FACTOR, np.uint64))
    return (prints[width:] - prints[:count]) * factors


def _chained(trace: TraceArrays) -> TraceArrays:
    """Return the trace with ids that name whole prefixes instead of contents."""
    prints = np.concatenate([_prints(it)[1:] for it in _requests(trace)])
    known, ids = np.unique(prints, return_inverse=True)
    return replace(trace, ids=ids.reshape(-1).astype(np.int32), parents=np.zeros(len(known), np.int32))


def _common(one: Column, other: Column) -> int:
    """Return the number of leading ids that are equal in both."""
    count = min(len(one), len(other))
    differ = one[:count] != other[:count]
    return int(np.argmax(differ)) if differ.any() else count


def _leading(trace: TraceArrays) -> Column:
    """Return the number of leading blocks that each request finds in an unbounded cache."""
    is_seen, hits = np.zeros(trace.block_count, np.bool_), np.zeros(len(trace), np.int64)
    for request, ids in enumerate(_requests(trace)):
        seen = is_seen[ids]
        hits[request] = len(ids) if seen.all() else int(np.argmin(seen))
        is_seen[ids] = True
    return hits


def _cuts(
    trace: TraceArrays, hits: Column, models: Sequence[str | None], sources: Sequence[int] | None
) -> Iterator[_Cut]:
    """Yield the early cuts.

    A request is compared with the preceding one in its session. A request without a session is compared with the
    earlier request that it repeats most (`sources`) or, if `sources` is None, with the preceding request that has no
    session either. A cut costs the missed blocks after it, but at most the number of blocks that the earlier prompt has
    after the cut.
    """
    block, latest = trace.block_tokens, dict[int, int]()
    for request, (ids, name) in enumerate(zip(_requests(trace), trace.session.tolist(), strict=True)):
        before = latest.get(name, -1) if name >= 0 or sources is None else sources[request]
        latest[name] = request
        if before < 0 or models[before] != models[request]:
            continue
        earlier = trace.blocks(before)
        shared = _common(ids, earlier)
        lost = len(earlier) - shared
        is_similar = SIMILAR[0] <= len(ids) / max(len(earlier), 1) <= SIMILAR[1]
        if is_similar and lost > max(1, LOST_TOKENS // block) and shared < EARLY * len(earlier):
            missed = max(0, len(ids) - max(int(hits[request]), shared))
            yield _Cut(request, before, shared * block, min(missed, lost) * block, name)


def _alternating(names: Sequence[int], heads: Sequence[int]) -> set[int]:
    """Return the sessions in which many requests return to an earlier head."""
    latest, known = dict[int, int](), defaultdict[int, set[int]](set)
    requests, returns = Counter[int](names), Counter[int]()
    for name, head in zip(names, heads, strict=True):
        returns[name] += head in known[name] and head != latest[name]
        known[name].add(head)
        latest[name] = head
    return {name for name, count in returns.items() if name != -1 and count and count >= RETURNS * requests[name]}


def _behind_heads(
    trace: TraceArrays, hit_tokens: Column, heads: Sequence[int], alternating: set[int]
) -> dict[int, int]:
    """Estimate how many tokens of each request followed another head before, in sessions that alternate between heads.

    These are the missed tokens up to the length of the session's longest earlier prompt and answer with another head.
    Requests without such tokens are left out.
    """
    longest = {name: dict[int, int]() for name in alternating}
    out: dict[int, int] = {}
    for request, (name, head) in enumerate(zip(trace.session.tolist(), heads, strict=True)):
        if name in alternating:
            tokens, own = int(trace.input_tokens[request]), longest[name]
            others = max((it for other, it in own.items() if other != head), default=0)
            if (behind := min(tokens, others) - int(hit_tokens[request])) > 0:
                out[request] = behind
            own[head] = max(tokens + int(trace.output_tokens[request]), own.get(head, 0))
    return out


class _Repeated:
    """Counts, for each request, the prompt tokens that repeat an earlier prompt or answer but miss in a prefix cache.

    Tokens that followed another head before are also counted in `behind_heads`, but only under two conditions. The
    earlier request with most of the repeated tokens has another head, and either the session alternates between heads
    or both heads occur in several sessions.

    Args:
        contents: contents of each request.
        hit_tokens: tokens that each request finds in a prefix cache.
        heads: head of each request.
        names: session of each request.
        alternating: sessions that alternate between heads.
    """

    def __init__(
        self,
        contents: Sequence[Contents],
        hit_tokens: Column,
        heads: Sequence[int],
        names: Sequence[int],
        alternating: set[int],
    ) -> None:
        self._contents, self._heads = contents, heads
        users = defaultdict[int, set[int]](set)
        for head, name in zip(heads, names, strict=True):
            users[head].add(name)
        self._is_common = {head: len(it) > 1 for head, it in users.items()}
        self._seen: dict[int, int] = {}
        """The latest request that has each window or part, by fingerprint."""
        self._prefixes: set[int] = set()
        self.tokens: list[int] = []
        """Repeated tokens of each request."""
        self.behind_heads: list[int] = []
        """Repeated tokens of each request that followed another head before."""
        self.sources: list[int] = []
        """The earlier request that has most of the repeated tokens of each request, or -1."""
        self.heads: set[int] = set()
        for request, hit in enumerate(hit_tokens.tolist()):
            self._add(request, hit, is_alternating=names[request] in alternating)

    def measured(self, cut: _Cut) -> _Cut:
        """Move a cut to the point at which contents differ, and limit its tokens to the repeated ones."""
        one, other = self._contents[cut.request], self._contents[cut.before]
        shared = _common(one.ids, other.ids)
        place = int(one.tokens[:shared].sum()) if len(one.tokens) else shared
        return cut._replace(at_tokens=place, tokens=min(cut.tokens, self.tokens[cut.request]))

    def _add(self, request: int, hit_tokens: int, *, is_alternating: bool) -> None:
        contents, head = self._contents[request], self._heads[request]
        is_text, count = not len(contents.tokens), len(contents.ids)
        width = WINDOW_TOKENS if is_text else 1
        prints = _prints(np.concatenate((contents.ids, contents.answer)))
        tokens = np.ones(count, np.int64) if is_text else contents.tokens
        if is_text:  # because a prefix cache also finds answers
            chained = prints[HEAD_TOKENS::HEAD_TOKENS].tolist()
            run = next((n for n, it in enumerate(chained) if it not in self._prefixes), len(chained))
            hit_tokens = max(hit_tokens, min(HEAD_TOKENS * run, count))
            self._prefixes.update(chained[run:])
        ends = np.cumsum(tokens)
        beyond = np.clip(ends - hit_tokens, 0, tokens)
        low = max(0, int(np.searchsorted(ends, hit_tokens, "right")) - width + 1)
        windows = _windows(prints, width)[low:].tolist()
        sources = [self._seen.get(it, -1) for it in windows[: max(0, count - width + 1 - low)]]
        uses = Counter(it for it in sources if it >= 0)
        main = max(uses, key=uses.__getitem__, default=-1)
        others = {it for it in uses if self._heads[it] != head}
        if main not in others or not (is_alternating or (self._is_common[head] and self._is_common[self._heads[main]])):
            others = set[int]()
        self.tokens.append(int(beyond[_covered([it >= 0 for it in sources], low, width, count)].sum()))
        self.behind_heads.append(int(beyond[_covered([it in others for it in sources], low, width, count)].sum()))
        self.heads |= {head, *(self._heads[it] for it in others)} if others else set()
        self.sources.append(main)
        if len(self._seen) < SEEN_MAX:
            self._seen.update(dict.fromkeys(windows, request))


def _start(contents: Contents, tokens: int) -> int:
    """Return a fingerprint of the first `tokens` tokens of a text, or of the first part if the parts are known."""
    return int(_prints(contents.ids[: 1 if len(contents.tokens) else tokens])[-1])


def _covered(is_found: Sequence[bool], low: int, width: int, count: int) -> npt.NDArray[np.bool_]:
    """Return which of `count` ids lie in a found window. The first window starts at `low`."""
    steps = np.zeros(count + 1, np.int64)
    starts = np.flatnonzero(is_found) + low
    np.add.at(steps, starts, 1)
    np.add.at(steps, starts + width, -1)
    return np.cumsum(steps[:-1]) > 0


def _examples(cuts: Sequence[_Cut], contents: Sequence[Contents | None]) -> Iterator[CutLines]:
    for cut in sorted(cuts, key=lambda it: -it.tokens)[:EXAMPLES]:
        one, other = contents[cut.before], contents[cut.request]
        if one is not None and other is not None and other.text:
            place = len(commonprefix((one.text, other.text)))  # noqa: RUF071  texts, not paths
            lines = (_line(it.text, place) for it in (one, other))
            yield CutLines(at_tokens=cut.at_tokens, before=next(lines), after=next(lines))


def _line(text: str, place: int) -> str:
    """Return the line around `place`, shortened on both sides of `place`."""
    start = max(text.rfind("\n", 0, place) + 1, place - LINE_CHARACTERS // 2)
    end = text.find("\n", place)
    return text[start : min(len(text) if end < 0 else end, start + LINE_CHARACTERS)]
