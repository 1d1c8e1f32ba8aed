"""A state of the model in `async_steps`: blocks, requests, copies, steps under way, and what kvtier has published."""

from collections.abc import Sequence
from typing import Any, NamedTuple

GARBAGE, TORN = -1, -2
"""The content of a block with other bytes, and of one that is being written. Others are ``2 * text + weights``."""

SCHEDULED, LAUNCHED, RUN, COUNTED = range(4)
"""A step: vLLM has scheduled it, the worker has launched it, the device has run it, vLLM has counted its tokens."""
UNSENT, QUEUED, COPYING, ENDED = range(4)
"""A copy."""
NEVER, DUE, REVOKED = 99, 98, -9
"""A copy is not revoked, is to be revoked, is revoked at the worker. Between: the position of the step that says so."""
LOST = 97
"""A report is never made."""
FAILED, DONE = 1, 2

STORES_MAX = 2
"""Open stores. Further ones are dropped, which kvtier may do at any time."""


class Violation(Exception):  # noqa: N818 - the checker looks for it
    """A promise is broken."""


class Load(NamedTuple):
    key: int
    content: int
    blocked: bool
    """It waits for stores that read its block."""
    ended: int = 0
    """`DONE` or `FAILED`; 0 while it is open."""
    void: bool = False
    ordered: int = NEVER
    """Position of the step whose orders report it."""
    told: int = NEVER
    """Position of the step with which the worker reports it."""


class Request(NamedTuple):
    """A request: it waits, loads, runs, was aborted while it loads, or is gone ("WLRA-")."""

    status: str = "W"
    table: tuple[int, ...] = ()
    computed: int = 0
    """Units in its blocks, those of steps under way included: 1 is the chunk, 2 the tail as well."""
    epoch: int = 0
    """The epoch of its keys; -1 if it has none."""
    handed: bool = False
    """Its chunk is cached or was handed to the session."""
    began: bool = False
    load: Load | None = None
    reported: bool = False
    failed: bool = False
    is_fresh: bool = False
    """Its chunk was loaded, and it has not begun since."""


class Store(NamedTuple):
    block: int
    key: int
    phase: int = UNSENT
    pinned: bool = True
    seen: int = GARBAGE
    """What the copy has read so far."""
    revoke: int = NEVER


class Scatter(NamedTuple):
    request: int
    block: int
    content: int
    phase: int = QUEUED
    revoke: int = NEVER


class Item(NamedTuple):
    """What a step computes: the chunk (unit 0) or the tail (unit 1) of a request."""

    request: int
    unit: int
    chunk: int
    tail: int = -1
    is_alive: bool = True
    """Its request still has these blocks."""
    begins: bool = False
    """It is the first of its request in these blocks."""


class Step(NamedTuple):
    phase: int
    items: tuple[Item, ...]
    base: int
    """Epoch of the last reset before it that has emptied vLLM's own cache."""
    is_off: bool
    weights: int = 0
    changed: bool = False


class World(NamedTuple):
    """A state. Events work on a `Draft` of it."""

    content: tuple[int, ...]
    hashes: tuple[int, ...]
    """The text that vLLM's own cache finds in each block; -1: none."""
    watched: tuple[bool, ...]
    requests: tuple[Request, ...]
    stores: tuple[Store, ...]
    scatters: tuple[Scatter, ...]
    queue: tuple[Step, ...]
    """Steps that have not returned, the oldest first."""
    deferred: tuple[tuple[int, tuple[int, ...]], ...]
    """Blocks that vLLM frees when so many more steps have returned."""
    objects: tuple[tuple[int, int], ...]
    """Published chunks: key and content."""
    meaning: tuple[int, ...]
    """The weights that the keys of each epoch stand for; -1: any."""
    weights: int
    oldest: int
    """The oldest weights that vLLM's own cache may have KV of."""
    base: int
    worker_base: int
    known: int
    """The weights that the worker compares with."""
    is_off: bool
    is_broken: bool
    left: tuple[int, int, int, int]
    """Aborts, changes, resets and internal errors that may still come."""


class Draft:
    """A copy of a state that can be changed."""

    def __init__(self, world: World, texts: Sequence[int]) -> None:
        self.texts = texts
        self.take(world)

    def take(self, world: World) -> None:
        """Become a copy of `world`."""
        fields = self.__dict__
        for name, value in zip(World._fields, world, strict=True):
            fields[name] = list(value) if isinstance(value, tuple) else value

    def set(self, number: int, **changes: Any) -> None:
        """Change a request."""
        self.requests[number] = self.requests[number]._replace(**changes)

    def raw(self) -> World:
        """The state as it is."""
        fields = [self.__dict__[name] for name in World._fields]
        return World(*[tuple(it) if isinstance(it, list) else it for it in fields])

    def frozen(self) -> World:
        """The state, in a form that is the same for states that differ only in names of blocks and requests."""
        signs: list[list[Any]] = [[c, h, w] for c, h, w in zip(self.content, self.hashes, self.watched, strict=True)]
        order = sorted(range(len(self.requests)), key=lambda r: (self.texts[r], _shape(self.requests[r], r, self)))
        place = {old: new for new, old in enumerate(order)}
        for new, old in enumerate(order):
            for unit, block in enumerate(self.requests[old].table):
                signs[block] += (1, new, unit)
        for number, step in enumerate(self.queue):
            for item in step.items:
                signs[item.chunk] += (2, number, place[item.request], item.unit)
                if item.tail >= 0:
                    signs[item.tail] += (3, number, place[item.request])
        for store in sorted(self.stores, key=lambda it: it[1:]):
            signs[store.block] += (4, *store[1:])
        for scatter in self.scatters:
            signs[scatter.block] += (5, place[scatter.request], *scatter[2:])
        for fence, blocks in self.deferred:
            for block in blocks:
                signs[block] += (6, fence)
        blocks = sorted(range(len(signs)), key=signs.__getitem__)
        if blocks == sorted(blocks) and order == sorted(order):
            self.stores.sort()
            self.scatters.sort()
            self.deferred.sort()
            self.objects.sort()
            return self.raw()
        name = {old: new for new, old in enumerate(blocks)}
        name[-1] = -1
        return World(
            tuple([self.content[old] for old in blocks]),
            tuple([self.hashes[old] for old in blocks]),
            tuple([self.watched[old] for old in blocks]),
            tuple([self.requests[r]._replace(table=tuple([name[b] for b in self.requests[r].table])) for r in order]),
            tuple(sorted(store._replace(block=name[store.block]) for store in self.stores)),
            tuple(sorted(it._replace(request=place[it.request], block=name[it.block]) for it in self.scatters)),
            tuple(
                [
                    step._replace(
                        items=tuple(
                            sorted(
                                it._replace(request=place[it.request], chunk=name[it.chunk], tail=name[it.tail])
                                for it in step.items
                            )
                        )
                    )
                    for step in self.queue
                ]
            ),
            tuple(sorted((fence, tuple(sorted(name[block] for block in gone))) for fence, gone in self.deferred)),
            tuple(sorted(self.objects)),
            tuple(self.meaning),
            *(self.weights, self.oldest, self.base, self.worker_base, self.known),
            *(self.is_off, self.is_broken, tuple(self.left)),
        )


def _shape(request: Request, number: int, draft: Draft) -> tuple[Any, ...]:
    """Tells requests of the same text apart, as far as their names do not matter."""
    _, table, *others = request
    where = [
        (position, item[1:2] + item[4:])
        for position, step in enumerate(draft.queue)
        for item in step.items
        if item.request == number
    ]
    copies = [scatter[2:] for scatter in draft.scatters if scatter.request == number]
    return request.status, len(table), *[() if it is None else it for it in others], where, copies


def said(content: int) -> str:
    """A block's content, in words."""
    if content < 0:
        return "other bytes" if content == GARBAGE else "torn bytes"
    return f"text {content // 2} of weights {content % 2}"
