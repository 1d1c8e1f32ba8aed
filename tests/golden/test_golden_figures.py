"""The figures that users see stay as recorded: replays, sizes and plans, by path of their JSON.

`python tests/golden/test_golden_figures.py` prints the record. A field that is renamed on purpose gets a line in
`RENAMED`; the figures stay.
"""

import contextlib
import gzip
import io
import json
import math
import tempfile
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from kvtier.cli.main import run
from kvtier.tools import size
from kvtier.tools.plan.plan import make_plan, to_json
from kvtier.tools.plan.read_inputs import load

HERE = Path(__file__).parent
LINES = 800
SESSIONS = 7
"""Of each trace, or of one of whole sessions; all of them take too long for every change."""
LISTED = 12
"""Longer lists are series for charts, and left out."""
POLICIES = "default,lru,fifo,arc,s3-fifo,min,infinite"
CAPACITIES = {
    "claude_code_17sessions": "100k,300k",
    "lmcache_magagent_b64": "20k,60k",
    "lmcache_miniswe_b64": "20k,60k",
    "mooncake_conversation_runs": "300k,1M",
    "mooncake_synthetic_runs": "300k,1M",
    "taubench_airline_b64": "20k,60k",
}
TIERED = "--tier host=1GiB --tier disk=32GiB?read=3GB/s&write=1GB/s --model llama-3.1-8b --gpu 1xh100-sxm --policy lru"
TOKENS = 32_768
PLANS = {
    "samsung": {"example": "samsung"},
    "llama-3.1-8b": {"options": {"model.name": "llama-3.1-8b"}},
    "llama-3.3-70b": {"options": {"model.name": "llama-3.3-70b", "model.tp": 4, "traffic.users": 200}},
}
RENAMED: dict[str, str] = {}
"""A field's name today -> its name when the figures were recorded."""


def numbers(value: object, path: str = "") -> Iterator[tuple[str, float | None]]:
    """(path, number) of every number in a JSON value."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from numbers(inner, f"{path}/{RENAMED.get(name, name)}".lstrip("/"))
    elif isinstance(value, list):
        for place, inner in enumerate(value if len(value) <= LISTED else ()):
            yield from numbers(inner, f"{path}/{place}")
    elif value is None or isinstance(value, int | float):
        yield path, value


def replayed(trace: str, folder: Path, options: str) -> object:
    lines = gzip.decompress((HERE / "traces" / f"{trace}.jsonl.gz").read_bytes()).splitlines(keepends=True)
    path = folder / f"{trace}.jsonl"
    path.write_bytes(b"".join(lines[: SESSIONS if "sessions" in trace else LINES]))
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert run(["replay", "run", str(path), *options.split(), "--json", "--jobs", "1"]) == 0
    return json.loads(out.getvalue())


def hits(trace: str, folder: Path) -> object:
    output = replayed(trace, folder, f"--capacity-tokens {CAPACITIES[trace]} --policy {POLICIES} --draws 1")
    fields = ("hit_tokens", "evictions", "written_tokens")
    return {
        "requests": output["requests"],
        "input_tokens": output["input_tokens"],
        **{f"{it['policy']} {it['capacity_tokens']}": {name: it[name] for name in fields} for it in output["results"]},
    }


def sizes() -> object:
    found = {}
    for name in size.names():
        of = {dtype: size.of(name, dtype=dtype) for dtype in ("bf16", "fp8")}
        found[name] = {
            dtype: {"bytes_per_token": kv.bytes_per_token, "session_bytes": kv.session_bytes(TOKENS)}
            for dtype, kv in of.items()
        }
    return found


def plans(name: str) -> object:
    return to_json(make_plan(load(**PLANS[name]), with_sensitivities=name == "samsung"))


def sections(folder: Path) -> Iterator[tuple[str, object]]:
    for trace in CAPACITIES:
        yield f"replay {trace}", hits(trace, folder)
    yield "tiered replay", replayed("lmcache_magagent_b64", folder, TIERED)
    yield "size", sizes()
    for name in PLANS:
        yield f"plan {name}", plans(name)


def is_same(a: float | None, b: float | None) -> bool:
    return a == b or (a is not None and b is not None and math.isclose(a, b, rel_tol=1e-9))


def recorded() -> dict[str, dict[str, float | None]]:
    return json.loads((HERE / "figures.json").read_text(encoding="utf-8"))


def test_figures_are_as_recorded(tmp_path):
    record, seen = recorded(), dict(sections(tmp_path))
    assert seen.keys() == record.keys()
    for section, value in seen.items():
        found = dict(numbers(value))
        different = {
            path: (found.get(path), expected)
            for path, expected in record[section].items()
            if not is_same(found.get(path), expected)
        }
        assert dict(islice(different.items(), 10)) == {}, f"{section}: {len(different)} figures (now, recorded)"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        print(json.dumps({name: dict(numbers(value)) for name, value in sections(Path(made))}, indent=0))
