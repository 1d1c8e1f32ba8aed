"""Encodes sections, and verifies that they decode correctly before they can be read.

An exact codec must restore all bytes, and a lossy one numbers within the error that its stored form allows.

A codec that changed bytes or failed is refused from then on in this process. Objects are then written raw, and objects
that it coded count as unreadable. The frame's format does not change, so deployed readers read it as before.
"""

import logging
from collections.abc import Generator
from contextlib import contextmanager
from functools import cache

import numpy as np

from kvtier.codec.base import Codec, LossyCodec
from kvtier.layout import Cut, Element

logger = logging.getLogger(__name__)

_refused: dict[str, object] = {}
"""Refused codecs by name. There are at most as many as installed codecs."""


class InexactError(Exception):
    """A codec changed bytes or failed, and is refused."""


def encoded(codec: Codec, raw: memoryview, into: memoryview, back: memoryview, element: Element) -> int:
    """Encode `raw` into the front of `into`, verify the result if it is shorter, and return the bytes used.

    Another instance decodes, as in another process, so it cannot use data of `raw` that the first one kept.

    Args:
        codec: a codec that is not refused.
        raw: a section. The codec gets it read-only.
        into: room for the coded section.
        back: `len(raw)` bytes for `decode` to fill, which do not overlap `raw` or `into`.
        element: type of the section's numbers.

    Raises:
        InexactError: the codec changes bytes or fails. It is then refused.
    """
    with _refusing(codec):
        used = codec.encode(raw.toreadonly(), into, element)
        if not 0 < used <= len(into):
            raise ValueError(f"the codec used {used} bytes; allowed: 1 to {len(into)}")
        if used < len(raw):
            expected, found = np.frombuffer(raw, np.uint8), np.frombuffer(back, np.uint8)
            np.invert(expected, out=found)  # so that a byte that `decode` does not write is wrong
            _another(type(codec)).decode(into[:used].toreadonly(), back, element)
            if not np.array_equal(expected, found):
                raise ValueError(f"{np.count_nonzero(expected != found)} of {len(raw)} bytes differ when decoded")
    return used


def encoded_lossy(
    codec: LossyCodec, raw: memoryview, into: memoryview, back: memoryview, cut: Cut, *, is_first: bool
) -> int:
    """Encode as `encoded` does, with a lossy codec. `cut` must have axes; `is_first` is as for `LossyCodec.encode`.

    Raises:
        InexactError: the codec fails, or its error exceeds the limit. It is then refused.
    """
    with _refusing(codec):
        used = codec.encode(raw.toreadonly(), into, cut, is_first=is_first)
        if not 0 < used <= len(raw):
            raise ValueError(f"the codec used {used} bytes; allowed: 1 to {len(raw)}")
        if used < len(raw):
            np.invert(np.frombuffer(raw, np.uint8), out=np.frombuffer(back, np.uint8))
            stored = into[:used].toreadonly()
            codec.decode(stored, back, cut)
            if found := codec.error(raw, stored, back.toreadonly(), cut):
                raise ValueError(found)
    return used


def decode(codec: Codec, stored: memoryview, back: memoryview, element: Element) -> None:
    """Decode a section that `encoded` wrote. Raise `InexactError` if that fails."""
    with _refusing(codec):
        codec.decode(stored, back, element)


@contextmanager
def _refusing(codec: Codec | LossyCodec) -> Generator[None]:
    """Refuse `codec` if the ``with`` statement's body fails, and log its first failure as an error."""
    try:
        yield
    except MemoryError:
        raise
    except Exception as error:
        if _refused.setdefault(codec.name, mine := object()) is mine:
            logger.error(  # noqa: TRY400 - the message contains the error's text
                "codec %r has changed bytes or failed, and is no longer used: %s: %.300s. Objects are written raw "
                "until the next start, and coded ones are misses. Choose another codec, and report this to its authors",
                codec.name,
                type(error).__name__,
                error,
            )
        raise InexactError(codec.name) from error


def is_refused(codec: Codec | LossyCodec) -> bool:
    """Return whether `codec` has changed bytes or failed in this process."""
    return codec.name in _refused


@cache
def _another(kind: type[Codec]) -> Codec:
    return kind()
