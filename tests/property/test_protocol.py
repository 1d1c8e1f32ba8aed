"""What travels between processes arrives as it was, however it is cut; anything else is refused."""

import json
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.runtime.executor import COUNT_MAX, Completion
from kvtier.runtime.protocol import (
    MESSAGE_BYTES_MAX,
    CommandMessage,
    CompletionMessage,
    Leave,
    MessageReader,
    Note,
    Ping,
    ProtocolError,
    TierReport,
    decode,
    encode,
)
from kvtier.types import (
    WRITE_KINDS,
    Cancel,
    ChunkKey,
    ChunkRecord,
    Direction,
    Drop,
    Figures,
    NextTurn,
    Outcome,
    Probe,
    Recall,
    RecallPage,
    RequestId,
    Tell,
    Transfer,
)

integers = st.integers(-(2**63), 2**64)
small = st.integers(0, 2**31)
keys = st.binary(min_size=32, max_size=32).map(ChunkKey)
words = st.text(max_size=20)
seconds = st.floats(allow_nan=False)
transfers = st.builds(
    Transfer,
    integers,
    st.sampled_from(Direction),
    keys,
    small,
    small,
    words,
    st.none() | words.map(RequestId),
    st.lists(integers, max_size=40).map(tuple),
    st.none() | keys,
    small,
    seconds,
    st.none() | words,
    st.binary(max_size=40),
    st.booleans(),
)
probes = st.builds(Probe, integers, words, st.lists(st.tuples(keys, small), max_size=40).map(tuple), seconds)
drops = st.builds(Drop, words, keys, small)
tells = st.builds(Tell, words, words, st.none() | st.sampled_from(NextTurn))
recalls = st.builds(Recall, words, integers, integers, integers)
orders = st.builds(CommandMessage, integers, transfers | probes | drops | tells | recalls)
records = st.builds(ChunkRecord, keys, st.none() | keys, integers, st.binary(max_size=40), st.binary(max_size=40))
pages = st.builds(RecallPage, st.lists(records, max_size=3).map(tuple), st.booleans())
answers = st.builds(
    CompletionMessage,
    integers,
    st.sampled_from(Outcome),
    st.lists(st.booleans(), max_size=40).map(tuple),
    integers,
    seconds,
    seconds,
    words,
    st.booleans(),
    words,
    st.none() | pages,
)
notes = st.builds(Note, words, words.map(RequestId), st.lists(integers, max_size=40).map(tuple), st.booleans())
cancels = st.lists(integers, max_size=40).map(lambda ids: Cancel(tuple(ids)))
counts = st.integers(0, COUNT_MAX)
figures = st.builds(
    Figures, *(st.none() | counts for _ in range(3)), st.dictionaries(st.sampled_from(WRITE_KINDS), counts), st.none()
)
reports = st.builds(TierReport, words, figures, counts)
messages = orders | answers | notes | cancels | reports | st.just(Ping()) | st.just(Leave())


@given(st.lists(messages, max_size=6), st.data())
def test_every_message_arrives_as_it_was_however_the_stream_is_cut(sent, data):
    stream = b"".join(map(encode, sent))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    reader = MessageReader()
    heard = []
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        heard += [decode(body) for body in reader.feed(stream[start:end])]
    assert heard == sent
    assert [type(message) for message in heard] == [type(message) for message in sent]
    assert [type(order.command) for order in heard if isinstance(order, CommandMessage)] == [
        type(order.command) for order in sent if isinstance(order, CommandMessage)
    ]


@given(st.binary(max_size=200))
def test_random_bytes_are_refused(body):
    with pytest.raises(ProtocolError):
        decode(body)


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4),
)
word, number, count = (str, type(None)), (int, float), (int, type(None))
FIELDS = {
    CommandMessage: (int, (Transfer, Probe, Drop, Tell, Recall)),
    Transfer: (int, Direction, bytes, int, int, str, word, tuple, (bytes, type(None)), int, number, word, bytes, bool),
    Probe: (int, str, tuple, number),
    Drop: (str, bytes, int),
    Tell: (str, str, (NextTurn, type(None))),
    Recall: (str, int, int, int),
    CompletionMessage: (int, Outcome, tuple, int, number, number, str, bool, str, (RecallPage, type(None))),
    RecallPage: (tuple, bool),
    ChunkRecord: (bytes, (bytes, type(None)), int, bytes, bytes),
    Note: (str, str, tuple, bool),
    Cancel: (tuple,),
    TierReport: (str, Figures, int),
    Figures: (count, count, count, dict, type(None)),
    Ping: (),
}


def test_no_field_is_left_behind():
    """A field that is added to a command must be added to its message."""
    assert {kind: len(kind._fields) for kind in FIELDS} == {kind: len(fields) for kind, fields in FIELDS.items()}
    assert CompletionMessage._fields[1:] == Completion._fields[1:]


def check_fields(value):
    kinds = FIELDS.get(type(value), ())
    assert len(value) == len(kinds)
    for field, kind in zip(value, kinds, strict=True):
        assert isinstance(field, kind), value
        if type(field) in FIELDS:
            check_fields(field)
        elif isinstance(value, RecallPage) and isinstance(field, tuple):
            assert all(type(record) is ChunkRecord for record in field)
            for record in field:
                check_fields(record)
        elif isinstance(field, tuple):
            assert all(type(item) in (int, bool) or (type(item[0]), type(item[1])) == (bytes, int) for item in field)


@given(messages, plain | st.lists(plain, min_size=1, max_size=3), st.data())
def test_a_field_of_another_kind_is_refused(message, value, data):
    whole = json.loads(encode(message)[4:])
    values = data.draw(st.sampled_from((whole, whole[2])))
    position = data.draw(st.integers(0, len(values)))
    values[position : position + data.draw(st.integers(0, 1))] = [value]
    try:
        heard = decode(json.dumps(whole).encode())
    except ProtocolError:
        return
    check_fields(heard)


@given(messages, st.data())
def test_a_damaged_message_is_refused_or_another_message_of_good_fields(message, data):
    body = bytearray(encode(message)[4:])
    position = data.draw(st.integers(0, len(body) - 1))
    body[position] ^= data.draw(st.integers(1, 255))
    try:
        other = decode(bytes(body))
    except ProtocolError:
        return
    check_fields(other)


@pytest.mark.parametrize(
    "values",
    [
        ["d", [-1, 2, 3, {}, None], 0],
        ["d", [1, COUNT_MAX + 1, 3, {}, None], 0],
        ["d", [1, 2, True, {}, None], 0],
        ["d", [1, 2, 3, {"bytes": 1}, None], 0],
        ["d", [1, 2, 3, {"frames": 10**400}, None], 0],
        ["d", [1, 2, 3, {"frames": None}, None], 0],
        ["d", [1, 2, 3, {}, 1], 0],
        ["d", [1, 2, 3, {}], 0],
        ["d", [1, 2, 3, {}, None, None], 0],
        ["d", [1, 2, 3, [], None], 0],
        ["d", [1, 2, 3, {}, None], 0.5],
    ],
)
def test_figures_that_the_metrics_cannot_hold_are_refused(values):
    good = TierReport("d", Figures(1, 2, 3, {"frames": 4}), 5)
    assert decode(b'["TierReport",0,["d",[1,2,3,{"frames":4},null],5]]') == good
    with pytest.raises(ProtocolError):
        decode(json.dumps(["TierReport", 0, values]).encode())


def test_infinite_deadlines_travel():
    order = CommandMessage(1, Probe(1, "below", (), float("inf")))
    assert decode(encode(order)[4:]) == order


def test_block_numbers_may_be_numpys():
    cancel = Cancel((np.int64(3), np.uint32(4)))
    assert decode(encode(cancel)[4:]) == Cancel((3, 4))


def test_a_length_that_is_too_large_is_refused_before_it_has_come():
    reader = MessageReader()
    with pytest.raises(ProtocolError, match=rf"{MESSAGE_BYTES_MAX + 1} bytes; allowed: at most {MESSAGE_BYTES_MAX}"):
        list(reader.feed(struct.pack("<I", MESSAGE_BYTES_MAX + 1)))


def test_a_message_that_is_too_long_is_not_made():
    probe = Probe(1, "below", ((ChunkKey(bytes(32)), 0),) * (MESSAGE_BYTES_MAX // 60), 1.0)
    with pytest.raises(ProtocolError, match="allowed: at most"):
        encode(CommandMessage(1, probe))


def test_nested_beyond_reason_is_refused():
    with pytest.raises(ProtocolError):
        decode(b"[" * 100_000)
