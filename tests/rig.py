"""A small engine in host memory with a whole kvtier below it, to test the parts together."""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from inspect import CO_GENERATOR
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Self

import numpy as np
import numpy.typing as npt
from tests.memory_tier import GatedTier

import kvtier
from kvtier.config.sections import Config, HostConfig, LimitsConfig, StoreConfig
from kvtier.core.cache import Cache
from kvtier.core.limits import Limits, TierRules
from kvtier.device.copier import Copier, Fence
from kvtier.keys.chain import Chain
from kvtier.layout import GroupLayout, History, KvLayout, Part, Window
from kvtier.policy.registry import make_evictor
from kvtier.runtime import held_signals
from kvtier.runtime.arena import Arena, chunk_bytes
from kvtier.runtime.command_runner import CommandRunner
from kvtier.runtime.mover import Mover, Threads
from kvtier.runtime.observers.guards import Feature, Guards, Observer
from kvtier.runtime.open import OpenedSession, open_session
from kvtier.runtime.session import Session
from kvtier.testing.host_copier import HostCopier
from kvtier.tier.base import Tier
from kvtier.tier.directory.kind import DirectorySettings
from kvtier.tier.disk.kind import DiskSettings
from kvtier.tier.registry import TierSettings
from kvtier.types import LoadDone, Lookup, Place, Prefix, Presence, RequestId, StoreDone

_OURS = str(Path(kvtier.__file__).parent)
CHUNK_TOKENS = 16
BLOCK_TOKENS = 4
CHUNK_BLOCKS = CHUNK_TOKENS // BLOCK_TOKENS
PAGE_BYTES = 1024
LAYERS = 3
FINGERPRINT = bytes(range(32))
DEADLINE_S = 60.0

LAYOUT = KvLayout(
    CHUNK_TOKENS,
    (
        GroupLayout(History(), (PAGE_BYTES * CHUNK_BLOCKS,) * LAYERS, "rig/full"),
        GroupLayout(Window(24), (PAGE_BYTES * CHUNK_BLOCKS,), "rig/window"),
    ),
)


STAGE_LAYERS = ((2, 1), (1, 3))
"""Layers of each group in two pipeline stages. Neither stage is the larger one in both groups."""

STAGES = tuple(
    KvLayout(
        CHUNK_TOKENS,
        tuple(
            GroupLayout(
                group.validity,
                (PAGE_BYTES * CHUNK_BLOCKS,) * counts[number],
                group.pages,
                Part(before[number], before[number] + counts[number]),
            )
            for number, group in enumerate(LAYOUT.groups)
        ),
    )
    for counts, before in zip(STAGE_LAYERS, ((0, 0), STAGE_LAYERS[0]), strict=True)
)
"""Two ranks with different layers of one model."""


@dataclass
class Engine:
    """Blocks of every layer of every group, filled with bytes that depend on the seed."""

    blocks: int
    seed: int = 0
    layout: KvLayout = LAYOUT
    groups: list[list[npt.NDArray[np.uint8]]] = field(init=False)

    def __post_init__(self) -> None:
        draw = np.random.default_rng(self.seed)
        self.groups = [
            [draw.integers(0, 256, (self.blocks, PAGE_BYTES), np.uint8) for _ in group.layer_bytes]
            for group in self.layout.groups
        ]

    def copier(self) -> HostCopier:
        return HostCopier(self.layout, self.groups)

    def same(self, other: "Engine", places: Sequence[Place]) -> bool:
        return all(
            np.array_equal(mine[block], yours[block])
            for place in places
            for block in place.blocks
            for mine, yours in zip(self.groups[place.group], other.groups[place.group], strict=True)
        )


class GatedCopier:
    """The copies of an engine. Gathers first enter `gate` as "copy"."""

    def __init__(self, inner: Copier, gate: GatedTier) -> None:
        self.done, self.scatter = inner.done, inner.scatter
        self._inner, self._gate = inner, gate

    def gather(self, request: RequestId, group: int, blocks: tuple[int, ...], payload: memoryview) -> Fence | None:
        """Pass the gate, then gather as the engine's copier does."""
        self._gate.enter("copy")
        return self._inner.gather(request, group, blocks, payload)


def places_of(chunks: Sequence[int], groups: Sequence[int] = (0, 1)) -> list[Place]:
    """Return places in which chunk n lies in blocks from n * CHUNK_BLOCKS on."""
    return [
        Place(group, chunk, tuple(range(chunk * CHUNK_BLOCKS, (chunk + 1) * CHUNK_BLOCKS)))
        for group in groups
        for chunk in chunks
    ]


def load_places(tokens: int) -> list[Place]:
    """Return what a load of the leading `tokens` needs: all chunks of the history, and the window's last ones."""
    full = tokens // CHUNK_TOKENS
    first = max(0, tokens - 24) // CHUNK_TOKENS
    return places_of(range(full), (0,)) + places_of(range(first, full), (1,))


def prefix_of(chunks: int, root: bytes = bytes(32), seed: int = 0) -> Prefix:
    chain = Chain(root, CHUNK_TOKENS)
    chain.extend(np.random.default_rng(seed).integers(0, 1000, chunks * CHUNK_TOKENS).tolist())
    return chain.prefix()


TIER_LIMITS = ("probe_deadline_s", "transfer_deadline_s", "failures", "retry_s")


def config(directory: Path | None, *, host_chunks: int = 8, disk: Path | None = None, **limits: float) -> Config:
    """Return settings with one directory tier or none, and with a disk tier above it if `disk` is its path.

    `limits` apply to the directory tier (`TIER_LIMITS`) and to the session.
    """
    own: dict[str, Any] = {name: limits.pop(name) for name in TIER_LIMITS if name in limits}
    tiers: list[TierSettings] = [] if disk is None else [DiskSettings(path=disk, capacity_bytes=64 << 20)]
    if directory is not None:
        tiers.append(DirectorySettings(path=directory, capacity_bytes=64 << 20, **own))
    return Config(
        host=HostConfig(capacity_bytes=max(1 << 20, host_chunks * chunk_bytes(LAYOUT))),
        tiers=tuple(tiers),
        store=StoreConfig(),
        limits=LimitsConfig(**limits),
    )


def opened(directory: Path | None, engine: Engine, **options: float) -> OpenedSession:
    return open_session(config(directory, **options), LAYOUT, FINGERPRINT, engine.copier())


def local(
    copier: Copier,
    tiers: dict[str, Tier],
    *,
    slots: int = 8,
    limits: Limits | None = None,
    rules: Mapping[str, object] | None = None,
    threads: Threads | None = None,
    observer: Observer | None = None,
    evictor: str = "lru",
) -> tuple[Session, Cache, Mover]:
    """Make a session without settings. Return it with its parts."""
    of_groups = (slots,) * len(LAYOUT.groups)
    arena = Arena(LAYOUT, of_groups)
    mover = Mover(
        CommandRunner(
            layout=LAYOUT,
            model=FINGERPRINT[:16],
            arena=arena,
            copier=copier,
            tiers=tiers,
        ),
        threads=threads,
    )
    cache = Cache(
        layout=LAYOUT,
        slots=of_groups,
        tiers=[TierRules(name=name, **(rules or {})) for name in tiers],
        evictor=lambda: make_evictor(evictor),
        limits=limits,
    )
    guards = Guards()
    if observer is not None:
        guards.register(Feature.METRICS, observer)
    return Session(cache, mover, guards=guards), cache, mover


def looked_up(session, request: str, prefix: Prefix) -> Lookup:
    """Repeat a lookup until no probe is open."""
    answer = session.lookup(RequestId(request), prefix)
    for _ in range(200):
        if answer.presence is not Presence.PROBING:
            return answer
        session.poll(0.05)
        answer = session.lookup(RequestId(request), prefix)
    raise AssertionError("still probing")


def stored(session, request: str, prefix: Prefix, places: Sequence[Place]) -> StoreDone:
    session.store(RequestId(request), prefix, places)
    return ended(session, request, StoreDone)


def loaded(session, request: str, prefix: Prefix, tokens: int, places: Sequence[Place]) -> LoadDone:
    session.load(RequestId(request), prefix, tokens, places)
    return ended(session, request, LoadDone)


def ended(session, request: str, kind: type):
    """Poll until an event of `kind` for `request`."""
    for _ in range(int(DEADLINE_S / 0.05)):
        for event in session.poll(0.05):
            if isinstance(event, kind) and event.request == request:
                return event
    raise AssertionError(f"no {kind.__name__} for {request}")


Site = tuple[CodeType, CodeType, int]
"""The code that is called, the code that calls it, and the line."""


class Raise:
    """Raises when this thread enters a function of kvtier; see `sys.setprofile`.

    Args:
        where: raise in the k-th function entered, or in the first call from a site. 0 or None: never.
        error: what is raised.
        is_spared: frames in which it is not raised.
    """

    def __init__(
        self, where: int | Site | None, error: type[Exception], is_spared: Callable[[FrameType], bool]
    ) -> None:
        self._wanted, self._error, self._is_spared = where, error, is_spared
        self.calls: list[Site] = []
        self.where = ""
        """Where the error was raised. Empty if it was not."""

    @property
    def sites(self) -> list[Site]:
        """Return each site once."""
        return list(dict.fromkeys(self.calls))

    def __call__(self, frame: FrameType, event: str, _argument: object) -> None:
        code, caller = frame.f_code, frame.f_back
        # The end of a generator looks like a call too, and Python ignores what is raised in it.
        if event != "call" or code.co_flags & CO_GENERATOR or not code.co_filename.startswith(_OURS):
            return
        if caller is None or self._is_spared(frame):
            return
        site = (code, caller.f_code, caller.f_lineno)
        self.calls.append(site)
        if self._wanted in (site, len(self.calls)):
            self.where = f"{code.co_filename.removeprefix(_OURS)}:{code.co_name}, line {caller.f_lineno}"
            raise self._error(f"planted in {self.where}")

    def __enter__(self) -> Self:
        held_signals._known = ([], [])  # what an earlier run left there spares calls, and shifts the k-th one
        sys.setprofile(self)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
