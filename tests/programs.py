"""Writes programs that stand in for others in tests."""

from pathlib import Path


def program(path: Path, text: str) -> Path:
    """Write an executable script at `path`."""
    path.write_text(text)
    path.chmod(0o755)
    return path
