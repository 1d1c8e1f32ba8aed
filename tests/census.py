"""Counts what the repository is made of: `python tests/census.py`, which prints JSON.

Statements are `ast.stmt` nodes without docstrings. CONTRIBUTING asks to avoid tell-tale words for data.
"""

import ast
import json
import re
from collections import Counter, defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "kvtier"
TREES = ("src", "bench", "tests")
TELL_TALE = re.compile(r"\b(who|nobody|somebody|told|whoever|so many)\b", re.IGNORECASE)
DOCUMENTS = ("README.md", "ARCHITECTURE.md", "FORMAT.md", "CONTRIBUTING.md", "docs/**/*.md")


def statements(tree: ast.AST) -> int:
    """Count statements without docstrings."""
    return sum(isinstance(node, ast.stmt) and not _is_docstring(node) for node in ast.walk(tree))


def _is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def tell_tale_words(root: Path = ROOT) -> tuple[Counter[str], Counter[str]]:
    """Count tell-tale words by room of the package, and by document."""
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
    """Return the class names that `src` defines more than once, with their files."""
    places: defaultdict[str, list[str]] = defaultdict(list)
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(path.relative_to(PACKAGE).as_posix())
    return {name: files for name, files in sorted(places.items()) if len(files) > 1}


def census() -> dict[str, object]:
    """Return all counts."""
    rooms, documents = tell_tale_words()
    return {
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


if __name__ == "__main__":
    print(json.dumps(census(), indent=1))
