"""Files that commands are given may hold anything: an error in one line, in seconds and bounded memory, no traceback.

All cases of a kind run in one child process, whose address space is limited and which each case may use for a while.
"""

import functools
import gzip
import json
import os
import random
import subprocess
import sys

import msgpack
import pytest
import zstandard

CASE_S = 60
"""Each takes at most a second or two on an idle machine."""
MEMORY_BYTES = 3 << 29
CASES = 50
"""Drawn for each kind, besides those that are written down."""

CHILD = f"""
import contextlib, io, json, resource, signal, sys, traceback
from kvtier.cli.main import run

class Late(BaseException):
    pass

def late(*_):
    raise Late

signal.signal(signal.SIGALRM, late)
resource.setrlimit(resource.RLIMIT_AS, ({MEMORY_BYTES}, {MEMORY_BYTES}))
for line in sys.stdin:
    arguments, told = json.loads(line), io.StringIO()
    signal.alarm({CASE_S})
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(told):
            code = run(arguments)
    except BaseException as error:
        code, trace = None, traceback.format_exc()
        told.write(trace[:1000] + "..." + trace[-1500:])
    signal.alarm(0)
    print(json.dumps([code, told.getvalue()]), flush=True)
"""


def outcomes(commands):
    """The exit code (None: a traceback, or too late) and what was printed to stderr, of each command."""
    done = subprocess.run(  # noqa: PLW1510  its output shows what failed
        [sys.executable, "-c", CHILD],
        input="".join(f"{json.dumps(it)}\n" for it in commands),
        capture_output=True,
        text=True,
        timeout=1800,
        # Each thread of a library would take address space for a stack and an arena of its own.
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"},
    )
    told = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(told) == len(commands), (commands[len(told)], done.stderr[-2000:])
    return told


def check(commands, *, must_fail):
    """Every command ends as its caller should see it; with `must_fail`, every one is refused."""
    for command, (code, told) in zip(commands, outcomes(commands), strict=True):
        assert code is not None, (command, told)
        assert "Traceback" not in told, (command, told)
        assert code == 2 if must_fail else code in (0, 1, 2), (command, code, told)
        if code == 2:
            assert len(told) < 2000, (command, told[:300])
            assert told.count("\n") == 1 or told.startswith("Usage:"), (command, told)


RAW = {"huge": "1" + "0" * 400, "digits": "9" * 5000, "infinite": "1e400", "nan": "NaN", "minus": "-Infinity"}
"""What JSON's own writer does not write; put in by name."""
VALUES = [
    *(f"<{name}>" for name in RAW),
    *(None, True, -1, 0, 1.5, 1e300, -1e300, 1 << 31, 1 << 63, 1 << 64, (1 << 53) + 1),
    *("", "x", "\0", "9" * 50, "x" * 300_000, "\ud800", [], {}, [[]], [{}], [None], [[1, 2], [3, 4]], ["a", 1]),
    *({"a": []}, [0] * 5000, [[0, 1 << 20]] * 3, [[1 << 30, 1]]),
]


def deep(levels, opening="[", closing="]"):
    return opening * levels + closing * levels


def as_json(value):
    text = json.dumps(value)
    for name, raw in RAW.items():
        text = text.replace(f'"<{name}>"', raw)
    return text


def mutated(value, chance):
    """`value` with something else in one place of it, or without that place."""
    if isinstance(value, dict | list) and value and chance.random() < 0.9:
        copy = value.copy()
        place = chance.choice(list(copy) if isinstance(copy, dict) else range(len(copy)))
        if chance.random() < 0.1:
            del copy[place]
        else:
            copy[place] = mutated(copy[place], chance)
        return copy
    return chance.choice(VALUES)


def damaged(content, chance):
    """Bytes of which some are others, or are not there."""
    out = bytearray(content)
    for _ in range(chance.randrange(1, 4)):
        place = chance.randrange(len(out))
        if chance.random() < 0.5:
            out[place] = chance.randrange(256)
        else:
            del out[place : place + chance.choice((1, 10, len(out)))]
        if not out:
            break
    return bytes(out)


def bomb(size, unit, compressor):
    parts = [compressor.compress(unit * (1 << 20)) for _ in range(size >> 20)]
    return b"".join([*parts, compressor.flush()])


class Gzip:
    """zlib as gzip, written part by part."""

    def __new__(cls):
        import zlib

        return zlib.compressobj(9, zlib.DEFLATED, 31)


RUNS = {"timestamp": 0, "input_length": 64, "output_length": 1, "hash_runs": [[0, 2], [7, 1]]}
IDS = {"timestamp": 5.5, "input_length": 64, "hash_ids": [0, "b", 1 << 60], "session_id": "a", "next_turn": "user"}
SESSION = {
    "id": "s",
    "block_size": 64,
    "hash_id_scope": "local",
    "requests": [
        {"t": 0.0, "in": 128, "out": 5, "hash_runs": [[1, 2]], "stop": "end_turn"},
        {"t": 5.0, "requests": [{"t": 1.0, "in": 64, "out": 5, "hash_ids": [4]}]},
    ],
}
TEXT = {"timestamp": 1_760_428_258_635_837, "input": "a b c", "output": "d", "session_id": "s"}
BATCH = {
    "ts": 1.0,
    "events": [
        {"type": "BlockStored", "block_hashes": [1, 2], "parent_block_hash": None, "token_ids": [5], "block_size": 16},
        ["BlockStored", [3], 2, [5], 16, None, "GPU"],
        ["AllBlocksCleared"],
    ],
    "data_parallel_rank": 0,
}
ROWS = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:47,3,4\n"


@functools.cache
def trace_bombs():
    """Small files that ask for much, by name."""
    return list(_trace_bombs())


def _trace_bombs():
    runs = json.dumps({**RUNS, "input_length": (1 << 31) - 1, "hash_runs": [[0, 1 << 22]]}).encode()
    yield "a run of four million blocks", runs
    yield "many runs", json.dumps({**RUNS, "hash_runs": [[0, 1 << 20]] * 5000}).encode()
    part = {"t": 0, "in": 64, "out": 1, "hash_runs": [[1, 1 << 20]]}
    yield "a session of many runs", json.dumps({**SESSION, "requests": [part] * 5000}).encode()
    yield "ids of several dimensions", json.dumps({**RUNS, "hash_runs": None, "hash_ids": [[1, 2], [3, 4]]}).encode()
    texts = ["x" * 1_000_000, *(str(it) for it in range(50_000)), 1.5]
    yield "texts as ids, one of them long", json.dumps({**IDS, "hash_ids": texts}).encode()
    yield "100 kB that expand to 3 GiB", bomb(3 << 30, b" ", zstandard.ZstdCompressor(level=1).compressobj())
    for name, unit in (("spaces", b" "), ("empty lines", b"\n"), ("lists", b"[],"), ("brackets", b"[")):
        yield f"zstd of {name}", bomb(80 << 20, unit, zstandard.ZstdCompressor(level=1).compressobj())
        yield f"gzip of {name}", bomb(80 << 20, unit, Gzip())
    yield "zstd of numbers", bomb(80 << 20, b"7\n", zstandard.ZstdCompressor(level=1).compressobj())
    yield "a long line", b'{"timestamp": "' + b"x" * (40 << 20) + b'"}'
    yield "deep lists", deep(100_000).encode()
    yield "deep objects", deep(100_000, '{"a":', "}").encode()
    yield "a deep field", f'{{"timestamp": {deep(100_000)}, "hash_ids": []}}'.encode()
    nested = {"t": 0, "in": 64, "out": 1, "hash_ids": [1]}
    for _ in range(200):
        nested = {"t": 0, "requests": [nested]}
    yield "sub-agents of sub-agents", json.dumps({**SESSION, "requests": [nested]}).encode()
    yield "a wide cell", f"TIMESTAMP,ContextTokens,GeneratedTokens\n{'x' * 200_000},1,2\n".encode()
    yield "msgpack: a large array", b"\x93\xcb" + bytes(8) + b"\xdd\x0f\xff\xff\xff"
    yield "msgpack: arrays of arrays", b"\xdd\x00\x0f\xff\xff" * 2000
    yield "msgpack: deep", b"\x91" * 100_000
    yield "msgpack: a large text", b"\x93\xdb\x0f\xff\xff\xff"
    yield "msgpack: a list as a key", b"\x81\x91\x01\x02"
    yield "msgpack: a list as a rank", msgpack.packb([1.0, [["BlockStored", [1], None, [5], 16]], [1]])
    stored = {"type": "BlockStored", "token_ids": [], "block_size": (1 << 31) - 1}
    overflow = {"ts": 1.0, "events": [{**stored, "block_hashes": [1, 2, 3], "parent_block_hash": None}]}
    yield "events: more tokens than a number holds", json.dumps(overflow).encode()
    yield "nothing but a byte", b"\x00"


@pytest.mark.parametrize("command", ["describe", "convert"])
def test_small_traces_that_ask_for_much_are_refused(tmp_path, command):
    commands = []
    for number, (_name, content) in enumerate(trace_bombs()):
        path = tmp_path / str(number)
        path.write_bytes(content)
        ending = {"describe": ["replay", "describe", str(path)], "convert": ["trace", "convert", str(path)]}[command]
        commands.append(ending if command == "describe" else [*ending, str(tmp_path / "out")])
    check(commands, must_fail=True)
    assert not (tmp_path / "out").exists()


def test_what_is_no_file_is_refused_before_it_is_opened(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    paths = [str(tmp_path / "fifo"), "/dev/zero", "/dev/null"]
    check([["replay", "describe", it] for it in paths], must_fail=True)


@pytest.mark.parametrize("form", ["requests", "sessions", "texts", "events", "msgpack", "rows"])
def test_traces_with_anything_in_them_are_read_or_refused(tmp_path, form):
    chance = random.Random(f"trace {form}")
    valid = {"requests": [RUNS, IDS], "sessions": [SESSION, SESSION], "texts": [TEXT, TEXT], "events": [BATCH, BATCH]}
    commands = []
    for number in range(CASES):
        path = tmp_path / str(number)
        lines = valid.get(form, [BATCH, BATCH]).copy()
        place = chance.randrange(2)
        if form == "msgpack":
            content = b"".join(msgpack.packb(it) for it in lines)
        elif form == "rows":
            content = ROWS.encode()
        else:
            lines[place] = mutated(lines[place], chance)
            content = "".join(f"{as_json(it)}\n" for it in lines).encode()
        if form in ("msgpack", "rows") or chance.random() < 0.2:
            content = damaged(content, chance)
        packing = chance.choice((bytes, bytes, gzip.compress, zstandard.compress))
        content = packing(content)
        if packing is not bytes and chance.random() < 0.3:
            content = damaged(content, chance)
        path.write_bytes(content)
        commands.append(["replay", "describe", str(path), "--json"])
        if number % 5 == 0:
            commands.append(["replay", str(path), "--policy", "lru", "--capacity-tokens", "1k", "--jobs", "1"])
    check(commands, must_fail=False)


TOML = {
    "deep lists": f"[host]\na = {deep(100_000)}\n",
    "deep tables": "[host]\na = " + deep(50_000, "{b=", "}") + "\n",
    "a long dotted key": "a." * 100_000 + "a = 1\n",
    "a long dotted table": "[" + "a." * 100_000 + "a]\nb = 1\n",
    "a long number": f"[host]\ncapacity_bytes = {'9' * 5000}\n",
    "a section that is a number": "host = 1\n",
    "an unknown section": "[nothing]\na = 1\n",
    "zeros": "\0" * 1000,
    "too long": "# " + "x" * (1 << 20),
}
TOML_VALUES = [
    *("nan", "inf", "-inf", "1e400", "9" * 400, "-1", "true", "''", "[]", "{}", "[[1]]", "1979-05-27", "07:32:00"),
    *("1979-05-27T07:32:00Z", "'1e400GiB'", "'nan'", "'inf'", "'-1'", f"'{'9' * 5000}'", "'\\u0000'", "'0x10'"),
    *(
        f"'{'9' * 30}GiB'",
        f'"{"x" * 100_000}"',
        "[1, 'a', {b = 2}]",
        "0.0",
        "1e-320",
        "'1e308 s'",
        "9223372036854775808",
    ),
]


@pytest.mark.parametrize("command", ["config show", "config check", "plan"])
def test_settings_with_anything_in_them_are_read_or_refused(tmp_path, command):
    from kvtier.config.schema import settings
    from kvtier.config.sections import SECTIONS
    from kvtier.tools.plan.inputs import SETTINGS

    def run_with(name, text):
        path = tmp_path / name
        path.write_text(text)
        arguments = ["plan", "llama-3.1-8b", "--json"] if command == "plan" else command.split()
        return [*arguments, "--file", str(path)]

    check([run_with(f"bad{number}", it) for number, it in enumerate(TOML.values())], must_fail=True)
    known = [(it.section, it.key) for kind in SECTIONS.values() for it in settings(kind)]
    if command == "plan":
        known = [(it.section, it.key) for it in SETTINGS.values()]
    chance = random.Random(command)
    drawn = [(*chance.choice(known), chance.choice(TOML_VALUES)) for _ in range(CASES)]
    texts = [f"[{section}]\n{key} = {value}\n" for section, key, value in drawn]
    check([run_with(f"drawn{number}", it) for number, it in enumerate(texts)], must_fail=False)


def test_model_configurations_with_anything_in_them_are_sized_or_refused(tmp_path):
    bad = [deep(100_000), deep(100_000, '{"a":', "}"), f'{{"num_hidden_layers": {deep(100_000)}}}', "[]", "1", '"x"']
    bad += [f'{{"num_hidden_layers": {it}}}' for it in (*RAW.values(), '"32"', "null", "[]", "{}", "true", "-1", "1.5")]
    bad += ["", "\0", "{", "9" * 5000, '{"text_config": {"text_config": ' + deep(900, '{"text_config":', "}") + "}}"]
    for number, text in enumerate(bad):
        (tmp_path / f"bad{number}.json").write_text(text)
    check([["size", str(tmp_path / f"bad{number}.json")] for number in range(len(bad))], must_fail=True)

    from importlib.resources import files

    models = sorted(it for it in (files("kvtier.tools.size") / "catalogue").iterdir() if it.name.endswith(".json"))
    known = [json.loads(it.read_text()) for it in models] or [LLAMA]
    chance = random.Random("models")
    commands = []
    for number in range(CASES):
        path = tmp_path / f"{number}.json"
        value = chance.choice(known)
        for _ in range(chance.randrange(1, 4)):
            value = mutated(value, chance)
        path.write_bytes(as_json(value).encode() if chance.random() < 0.8 else damaged(as_json(value).encode(), chance))
        commands.append(["size", str(path), *(["--json"] if number % 2 else [])])
    check(commands, must_fail=False)


LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rope_scaling": {"rope_type": "llama3", "factor": 8.0},
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}
MEASURE = {"op": "read", "bytes": 1 << 20, "depth": 4, "gb_per_s": 5.0, "latency_us_p50": 100.0}
PROBE = {"results": {"links": [{"name": "disk", "measures": [MEASURE]}, {"name": "host", "measures": [MEASURE]}]}}


def test_records_with_anything_in_them_are_read_or_refused(tmp_path):
    trace = tmp_path / "trace.jsonl"
    trace.write_text(f"{json.dumps(RUNS)}\n")
    tiers = ["replay", str(trace), "--tier", "host=1GiB", "--tier", "disk=1TiB", "--jobs", "1", "--json"]

    def users(path):
        return [
            ["plan", "llama-3.1-8b", "--json", "--probe", str(path)],
            [*tiers, "--probe", str(path)],
        ]

    bad = [deep(100_000), deep(100_000, '{"results":', "}"), "[]", "", "{", "\0", "9" * 5000, '{"results": {}}']
    bad += [as_json({"links": [{"name": "disk", "measures": [{**MEASURE, "depth": f"<{it}>"}]}]}) for it in RAW]
    commands = []
    for number, text in enumerate(bad):
        (tmp_path / f"bad{number}").write_text(text)
        commands += users(tmp_path / f"bad{number}")
    check(commands, must_fail=True)

    # What was kept of replays: a run goes on with it, or its error names what is wrong.
    kept = tmp_path / "kept"
    replay = ["replay", str(trace), "--policy", "lru", "--capacity-tokens", "1k", "--jobs", "1", "--keep", str(kept)]
    check([replay], must_fail=False)
    (entry,) = map(json.loads, kept.read_text().splitlines())
    chance = random.Random("records")
    commands = []
    for number in range(CASES // 5):
        path = tmp_path / f"probe{number}"
        content = as_json(mutated(PROBE, chance)).encode()
        path.write_bytes(content if chance.random() < 0.8 else damaged(content, chance))
        commands += users(path)
        path = tmp_path / f"kept{number}"
        content = f"{as_json(mutated(entry, chance))}\n".encode()
        path.write_bytes(content if chance.random() < 0.8 else damaged(content, chance))
        commands.append([*replay[:-1], str(path)])
    for number, text in enumerate((deep(100_000), deep(100_000, '{"a":', "}"), "9" * 5000, "\0", "[]", "1")):
        (tmp_path / f"keep{number}").write_text(f"{text}\n")
        commands.append([*replay[:-1], str(tmp_path / f"keep{number}")])
    check(commands, must_fail=False)
