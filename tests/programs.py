"""Programs that tests write, in place of others."""

from pathlib import Path


def program(path: Path, text: str) -> Path:
    """An executable script at `path`."""
    path.write_text(text)
    path.chmod(0o755)
    return path
