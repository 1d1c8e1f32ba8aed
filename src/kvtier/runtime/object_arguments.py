"""Checks the arguments of calls to an object store. An invalid argument raises `BadCallError` before the call acts."""

from collections.abc import Iterable, Sequence
from numbers import Real
from reprlib import repr as short
from types import NoneType
from typing import Any, TypeVar, cast

import numpy as np
import numpy.typing as npt

from kvtier.errors import BadCallError
from kvtier.layout import KvLayout
from kvtier.tier.base import clear_frames
from kvtier.types import ObjectBytes, ObjectId, Origin

OBJECTS_MAX = 1 << 16
"""Maximum number of objects in one call."""

KEY_BYTES = 32

DEPTH_MAX = (1 << 32) - 1
"""Largest depth of an `Origin`. A frame has four bytes for it."""

DEADLINE_S_MAX = 86_400.0
"""Longest deadline. A longer one, such as infinity, is reduced to this."""

Memory = list[npt.NDArray[np.uint8]]
"""The pieces of an object in the caller's memory."""

_T = TypeVar("_T")


class ObjectArguments:
    """Checks arguments against one rank's layout, and returns copies because the caller may change the originals."""

    def __init__(self, layout: KvLayout) -> None:
        self._layers = [group.layer_bytes for group in layout.groups]
        self._groups = frozenset(range(len(layout.groups)))

    def objects(self, objects: Sequence[ObjectId]) -> list[ObjectId]:
        """Return a checked copy of `objects`.

        Raises:
            BadCallError: they are not a list of `ObjectId`, a key is not 32 bytes, or a group is unknown.
        """
        listed = _listed(objects, ObjectId)
        groups = [each.group for each in listed]
        if _are(groups, int) and self._groups.issuperset(groups) and _are_keys([each.key for each in listed]):
            return listed
        key, group = next(it for it in listed if not self._is_object(it))
        raise BadCallError(
            f"invalid object (key {key!r:.80}, group {group!r:.20}); allowed: a key of {KEY_BYTES} bytes, and a "
            f"group that is an int from 0 to {len(self._groups) - 1}"
        )

    def memory(
        self, items: Sequence[ObjectBytes], *, is_written: bool
    ) -> tuple[list[ObjectId], list[Origin], list[Memory]]:
        """Return the objects of `items`, their origins, and the pieces of each as byte arrays.

        Raises:
            BadCallError: see `objects`; or an origin is invalid, pieces do not fit the group's layers, or pieces are
                read-only although `is_written`.
        """
        items = _listed(items, ObjectBytes)
        objects, origins = self.objects([item.object for item in items]), [item.origin for item in items]
        if not _are_origins(origins):
            raise BadCallError(
                f"invalid origin {next(it for it in origins if not _are_origins([it]))!r:.120}; allowed: an Origin "
                f"with a parent of {KEY_BYTES} bytes or None, a depth of 0 to {DEPTH_MAX}, and a conversation that is "
                "a str or None"
            )
        try:
            return objects, origins, [self._pieces(item, is_written=is_written) for item in items]
        except BadCallError as error:
            clear_frames(error)  # their arrays would keep the caller's memory in use
            raise

    def _is_object(self, it: ObjectId) -> bool:
        return _are_keys((it.key,)) and _are((it.group,), int) and it.group in self._groups

    def _pieces(self, item: ObjectBytes, *, is_written: bool) -> Memory:
        group = item.object.group
        try:
            pieces: Memory = [np.frombuffer(piece, np.uint8) for piece in item.pieces]
        except (TypeError, ValueError, BufferError) as error:
            raise BadCallError(f"a piece of group {group} is not a contiguous buffer: {error}") from error
        sizes = tuple(piece.size for piece in pieces)
        if sizes != self._layers[group]:
            raise BadCallError(f"the pieces have {sizes} bytes; allowed in group {group}: {self._layers[group]} bytes")
        if is_written and not all(piece.flags.writeable for piece in pieces):
            raise BadCallError(f"a piece of group {group} is read-only; allowed: memory that can be written to")
        return pieces


def deadline_of(deadline_s: object) -> float:
    """Return a deadline in seconds, at least 0 and at most `DEADLINE_S_MAX`.

    Raises:
        BadCallError: `deadline_s` is not a number.
    """
    if isinstance(deadline_s, bool) or not isinstance(deadline_s, Real):
        raise BadCallError(f"deadline_s = {deadline_s!r:.40}; allowed: a number of seconds")
    seconds = cast("float", deadline_s)
    return min(seconds, DEADLINE_S_MAX) if seconds > 0 else 0.0


def _listed(items: Any, kind: type[_T]) -> list[_T]:  # noqa: ANN401 - a caller may pass anything
    """Return a checked copy of `items`, because the caller may change the original.

    Raises:
        BadCallError: `items` is not a sequence, is too long, or has an item of another type than `kind`.
    """
    given: list[Any] | None = None
    if isinstance(items, Sequence) and len(cast("Sequence[Any]", items)) <= OBJECTS_MAX:
        given = [*cast("Sequence[Any]", items)]
    if given is None or not _are(given, kind):
        wrong = [it for it in given or () if type(it) is not kind] or cast("object", items)
        raise BadCallError(f"{short(wrong)}; allowed: a sequence of at most {OBJECTS_MAX} {kind.__name__}")
    return given


def _are(values: Iterable[object], *kinds: type) -> bool:
    """Return whether all `values` are of these types. A set of their types is faster than a loop."""
    return {*map(type, values)} <= {*kinds}


def _are_keys(keys: Sequence[object]) -> bool:
    """Return whether all `keys` are bytes of the right length."""
    return _are(keys, bytes) and {*map(len, cast("Sequence[bytes]", keys))} <= {KEY_BYTES}


def _are_origins(origins: Sequence[Origin]) -> bool:
    """Return whether tiers and frames can hold all `origins`."""
    return (
        _are(origins, Origin)
        and _are_keys([it.parent for it in origins if it.parent is not None])
        and _are([it.depth for it in origins], int)
        and all(0 <= it.depth <= DEPTH_MAX for it in origins)
        and _are([it.conversation for it in origins], str, NoneType)
    )
