"""Counts what the repository is made of: `python tests/census.py [--imports] [--json]`.

Statements are `ast.stmt` nodes without docstrings. Tell-tale words are those that CONTRIBUTING asks to avoid for data.
`--imports` runs the commands of `COMMANDS` and counts kvtier's own modules that each has loaded at exit.
`tests/census.json` holds earlier values, for comparison.
"""

import argparse
import ast
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "kvtier"
TREES = ("src", "bench", "tests")
TELL_TALE = re.compile(r"\b(who|nobody|somebody|told|whoever|so many)\b", re.IGNORECASE)
DOCUMENTS = ("README.md", "ARCHITECTURE.md", "FORMAT.md", "CONTRIBUTING.md", "docs/**/*.md")

TRACE = "tests/golden/traces/lmcache_miniswe_b64.jsonl.gz"
MODEL = "Qwen/Qwen3-8B"
COMMANDS = {
    "replay --report": f"replay run {TRACE} --capacity-tokens 1M --report {{out}}/report.html",
    "size": "size llama-3.1-8b",
    "plan": "plan llama-3.1-8b",
    "demo --help": "demo --help",
    "bench io --help": "bench io --help",
    "inspect": "inspect stat {out}",
    "probe": "probe --quick --dir {out} --seconds 0.02s --bytes 64MiB",
    "sglang config": "sglang config --tier directory:{out}",
    "vllm config": "vllm config --tier directory:{out}",
}
PROBE = """
import sys
try:
    {run}
finally:
    loaded = sum(name.partition(".")[0] == "kvtier" for name in sys.modules)
    open({result!r}, "w").write(str(loaded))
"""


def statements(tree: ast.AST) -> int:
    """Statements without docstrings."""
    return sum(isinstance(node, ast.stmt) and not _is_docstring(node) for node in ast.walk(tree))


def _is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def tell_tale_words(root: Path = ROOT) -> tuple[Counter[str], Counter[str]]:
    """Words by room of the package, and by document."""
    rooms: Counter[str] = Counter()
    for path in sorted((root / "src" / "kvtier").rglob("*.py")):
        rooms[path.relative_to(root / "src" / "kvtier").parts[0]] += len(TELL_TALE.findall(path.read_text("utf-8")))
    documents = Counter(
        {
            path.relative_to(root).as_posix(): len(TELL_TALE.findall(path.read_text("utf-8")))
            for pattern in DOCUMENTS
            for path in sorted(root.glob(pattern))
        }
    )
    return rooms, documents


def class_names() -> dict[str, list[str]]:
    """Class names that `src` defines more than once, with their files."""
    places: defaultdict[str, list[str]] = defaultdict(list)
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(path.relative_to(PACKAGE).as_posix())
    return {name: files for name, files in sorted(places.items()) if len(files) > 1}


def imported(run: str) -> int:
    """How many of kvtier's modules a process has loaded after the Python statement `run`."""
    with tempfile.TemporaryDirectory() as out:
        result = f"{out}/loaded"
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "HF_HUB_OFFLINE": "1"}
        subprocess.run(
            [sys.executable, "-c", PROBE.format(run=run.replace("{out}", out), result=result)],
            cwd=ROOT, env=environment, capture_output=True, timeout=600, check=False,
        )  # fmt: skip
        return int(Path(result).read_text())


def census(*, with_imports: bool) -> dict[str, object]:
    """All counts."""
    rooms, documents = tell_tale_words()
    found: dict[str, object] = {
        "statements": {
            tree: sum(statements(ast.parse(path.read_text("utf-8"))) for path in sorted((ROOT / tree).rglob("*.py")))
            for tree in TREES
        },
        "statements by room": dict(
            sum(
                (
                    Counter({path.relative_to(PACKAGE).parts[0]: statements(ast.parse(path.read_text("utf-8")))})
                    for path in PACKAGE.rglob("*.py")
                ),
                Counter[str](),
            ).most_common()
        ),
        "class names twice": class_names(),
        "tell-tale words in src": sum(rooms.values()),
        "tell-tale words by room": dict(rooms.most_common()),
        "tell-tale words in documents": sum(documents.values()),
        "tell-tale words by document": dict(documents.most_common()),
    }
    if with_imports:
        runs = {name: f"from kvtier.cli.main import run; run({line.split()!r})" for name, line in COMMANDS.items()}
        runs["import kvtier.plan"] = "import kvtier.plan"
        found["files imported"] = {name: imported(run) for name, run in runs.items()}
    return found


def _print(found: dict[str, object]) -> None:
    before = json.loads((ROOT / "tests" / "census.json").read_text("utf-8"))["before"]
    print(f"in brackets: {before['commit']}")
    for title, value in found.items():
        then = before[title]
        if isinstance(value, dict):
            print(f"{title}: {len(value)} [{len(then) if isinstance(then, dict) else then}]")
            for name, count in value.items():
                old = f" [{then[name]:,}]" if isinstance(then, dict) and name in then else ""
                print(f"  {name:<40} {' '.join(count) if isinstance(count, list) else format(count, ',')}{old}")
        else:
            print(f"{title}: {value:,} [{then:,}]")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--imports", action="store_true", help="run the commands and count the modules they load")
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args()
    counts = census(with_imports=arguments.imports)
    if arguments.json:
        print(json.dumps(counts, indent=1))
    else:
        _print(counts)
