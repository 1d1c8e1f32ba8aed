"""The kernel's binary trace pages as arrays.

A page of `trace_pipe_raw` is a header (time stamp, length) and events of variable length, each with the time since the
event before. All pages of a batch are walked at once, one event of each page per step, so the cost per event is that of
a few array operations. The layout is described in the kernel's `events/header_page` and `events/header_event`, and in
`include/linux/ring_buffer.h`.
"""

import re
from typing import Any, NamedTuple

import numpy as np

PAGE_BYTES = 4096
HEADER_BYTES = 16
"""Time stamp (8 bytes) and the number of bytes in use (8 bytes, flags in the upper bits)."""
LENGTH_MASK = 0x3FFF_FFFF
MISSED = 1 << 31
"""Flag of a page before which events of its processor were lost."""
PADDING, TIME_EXTEND, TIME_STAMP = 29, 30, 31
"""Values of an event's five bits of type; 1 to 28 are its length in words of four bytes, 0 says that a word has it."""
DELTA_BITS = 27
EVENT_BYTES_MAX = 512
"""More than any event that is read here."""

_FIELD = re.compile(r"field:(?P<text>[^;]+);\s*offset:(?P<at>\d+);\s*size:(?P<size>\d+);\s*signed:(?P<signed>\d);")


class EventFormat(NamedTuple):
    """The number of a kernel event and the layout of some of its fields."""

    number: int
    layout: np.dtype[Any]


def event_format(text: str, wanted: tuple[str, ...]) -> EventFormat:
    """The format of an event, from the text of its `format` file, with the fields `wanted`.

    Raises:
        ValueError: the text has no number, or lacks a wanted field.
    """
    number = re.search(r"^ID: (\d+)$", text, re.MULTILINE)
    if number is None:
        raise ValueError("the format of a kernel event has no line 'ID: ...'")
    names: list[str] = []
    forms: list[str] = []
    offsets: list[int] = []
    for hit in _FIELD.finditer(text):
        declared = hit["text"].strip()
        name = re.sub(r"\[.*\]$", "", declared).split()[-1].lstrip("*")
        size = int(hit["size"])
        if name not in wanted:
            continue
        is_text = declared.startswith("char ") and "[" in declared
        names.append(name)
        forms.append(f"S{size}" if is_text else f"<{'i' if int(hit['signed']) else 'u'}{size}")
        offsets.append(int(hit["at"]))
    missing = sorted(set(wanted) - set(names))
    if missing:
        raise ValueError(f"the kernel's event has no field {', '.join(missing)}; found: {', '.join(names)}")
    size = max(at + np.dtype(form).itemsize for at, form in zip(offsets, forms, strict=True))
    layout = np.dtype({"names": names, "formats": forms, "offsets": offsets, "itemsize": size})
    return EventFormat(int(number[1]), layout)


class PageEvents:
    """The events of a batch of pages.

    Args:
        pages: bytes of whole pages; a page of zeros has no events.
    """

    def __init__(self, pages: np.ndarray) -> None:
        count = len(pages) // PAGE_BYTES
        self._bytes = np.concatenate([pages[: count * PAGE_BYTES], np.zeros(EVENT_BYTES_MAX, np.uint8)])
        self._at, self._time_ns = _walk(self._bytes.view("<u4"), count)
        self._number = self._bytes.view("<u2")[self._at // 2]
        headers = self._bytes[: count * PAGE_BYTES].reshape(count, PAGE_BYTES)[:, :HEADER_BYTES]
        words = np.ascontiguousarray(headers).view("<u8")
        self.lost_ns = words[words[:, 1] & MISSED > 0, 0]
        """Until when events were lost, for each page with such a gap before it."""

    def of(self, number: int, layout: np.dtype[Any]) -> tuple[np.ndarray, np.ndarray]:
        """Times in nanoseconds and fields of all events of this number."""
        here = np.flatnonzero(self._number == number)
        if not here.size:
            return np.zeros(0, np.uint64), np.zeros(0, layout)
        rows = self._bytes[self._at[here, None] + np.arange(layout.itemsize)]
        return self._time_ns[here], np.ascontiguousarray(rows).view(layout)[:, 0]


def _walk(words: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """The byte offset of each event's data in `words`, and its time in nanoseconds."""
    base = np.arange(count) * (PAGE_BYTES // 4)
    time_ns = words[base].astype(np.uint64) | words[base + 1].astype(np.uint64) << np.uint64(32)
    used = np.minimum(words[base + 2] & LENGTH_MASK, PAGE_BYTES - HEADER_BYTES).astype(np.int64)
    at = base + HEADER_BYTES // 4
    end = at + used // 4
    found: list[np.ndarray] = [np.zeros(0, np.int64)]
    times: list[np.ndarray] = [np.zeros(0, np.uint64)]
    live = at < end
    while live.any():
        if not live.all():
            at, end, time_ns = at[live], end[live], time_ns[live]
        head, next_word = words[at], words[at + 1].astype(np.int64)
        kind = (head & 31).astype(np.int64)
        delta = (head >> 5).astype(np.uint64)
        has_length_word = (kind == 0) | (kind == PADDING)
        # After the header: its own length word, one word of time, or as many words as the type says.
        length = np.where(has_length_word, next_word // 4, np.where(kind >= TIME_EXTEND, 1, kind))
        is_last = (kind == PADDING) & (delta == 0)
        wide = (next_word.astype(np.uint64) << np.uint64(DELTA_BITS)) + delta
        time_ns = np.where(kind == TIME_STAMP, wide, time_ns + np.where(kind == TIME_EXTEND, wide, delta))
        is_data = kind < PADDING
        found.append((at + 1 + (kind == 0))[is_data] * 4)
        times.append(time_ns[is_data])
        at = at + 1 + length
        live = (at < end) & ~is_last & (length > 0)
    return np.concatenate(found), np.concatenate(times)
