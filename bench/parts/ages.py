"""How old records are, and whether they were measured with the code that moves bytes now."""

import ast
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

TOP = Path(__file__).parents[2]
TRANSFER_PATH = ("src/kvtier/codec", "src/kvtier/core", "src/kvtier/runtime", "src/kvtier/tier", "src/kvtier/connect")
"""Directories that decide how bytes are stored and moved."""


def age(record: dict[str, Any]) -> tuple[str, str, str]:
    """Return the record's date, the commits since it ("?" if git lacks its own), and ``yes`` if `is_shipped`."""
    commit = record["commit"]["id"]
    count = _git("rev-list", "--count", f"{commit}..HEAD") if _is_known(commit) else "?"
    return record["time"][:10], count, "yes" if is_shipped(commit) else "no"


@cache
def is_shipped(commit: str) -> bool:
    """Return whether `TRANSFER_PATH` has the same code at `commit` and at HEAD, docstrings and comments aside."""
    return _is_known(commit) and all(_code(commit, name) == _code("HEAD", name) for name in _changed(commit))


def _is_known(commit: str) -> bool:
    """Return whether the history has a commit."""
    found = subprocess.run(["git", "cat-file", "-e", commit], cwd=TOP, capture_output=True, check=False)
    return found.returncode == 0


def _changed(commit: str) -> Iterator[str]:
    """Yield the modules of `TRANSFER_PATH` whose text differs."""
    yield from _git("diff", "--name-only", "--no-renames", commit, "HEAD", "--", *TRANSFER_PATH).splitlines()


def _code(commit: str, name: str) -> str | None:
    """Return the syntax tree of a module without its docstrings; None if the commit has no such file."""
    try:
        tree = ast.parse(_git("show", f"{commit}:{name}"))
    except subprocess.CalledProcessError:
        return None
    for node in ast.walk(tree):
        if isinstance(body := getattr(node, "body", None), list):
            node.body = [it for it in body if not _is_text(it)]  # type: ignore[attr-defined]
    return ast.dump(tree)


def _is_text(node: ast.stmt) -> bool:
    """Return whether a statement is only a string."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=TOP, capture_output=True, text=True, check=True).stdout.strip()
