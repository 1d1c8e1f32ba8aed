"""Renders pages in a real browser: what Chromium makes of a file or an address, as text, and how wide it is."""

import shutil
import subprocess
import tempfile
from html import escape
from pathlib import Path

import pytest

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
DEADLINE_S = 60
QUIET = (
    "--headless",
    "--no-sandbox",  # refused to root otherwise
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
)


def chromium() -> str:
    """Return the browser's path. Without a browser the calling test is skipped."""
    found = next(filter(None, map(shutil.which, PROGRAMS)), None)
    if found is None:
        pytest.skip(f"needs a browser: {', '.join(PROGRAMS)}")
    return found


def rendered(page: Path | str, *, settle_s: float = 0.0) -> str:
    """Return the document as HTML after it was loaded and drawn. `page` is a file or an address of this machine.

    `settle_s`: time that passes for the page's own timers before that, if the page asks a server for its content.
    """
    settle = [f"--virtual-time-budget={settle_s * 1000:.0f}"] if settle_s else []
    return _run(page, "--dump-dom", "--window-size=1280,1000", *settle).decode()


def overflow(page: Path, *, width: int) -> int:
    """Return by how many pixels an HTML file is wider than a window of `width`, so that a reader must scroll."""
    return _measured(page, width, "root.scrollWidth - root.clientWidth")


def broken_words(page: Path, *, width: int) -> int:
    """Count the names in tables that a window of `width` breaks within a word."""
    longest = "Math.max(...cell.textContent.split(/[ -]+/).map(word => pen.measureText(word).width))"
    return _measured(
        page,
        width,
        "[...root.querySelectorAll('td.name')].filter(cell => {"
        "const style = frame.contentWindow.getComputedStyle(cell);"
        "pen.font = style.font;"
        "const room = cell.clientWidth - parseFloat(style.paddingLeft) - parseFloat(style.paddingRight);"
        f"return {longest} > room + 1"
        "}).length",
    )


def _measured(page: Path, width: int, script: str) -> int:
    """Run `script` on a page in a window of `width`. It has the page's `root`, its `frame`, and a `pen` to measure."""
    with tempfile.TemporaryDirectory(prefix="kvtier-page-") as folder:
        # A window is at least 500 pixels wide, but a frame may be narrower.
        frame = Path(folder, "frame.html")
        measure = (
            "const frame = document.getElementById('page'), root = frame.contentDocument.documentElement;"
            "const pen = document.createElement('canvas').getContext('2d');"
            f"document.body.dataset.measured = {script}"
        )
        frame.write_text(
            f'<body><iframe id="page" style="width:{width}px;height:900px;border:0" src="{page.resolve().as_uri()}"'
            f' onload="{escape(measure)}"></iframe></body>'
        )
        dom = _run(frame, "--dump-dom", "--allow-file-access-from-files", "--window-size=1600,1000").decode()
    return int(dom.partition('data-measured="')[2].partition('"')[0])


def _run(page: Path | str, *options: str) -> bytes:
    address = page.resolve().as_uri() if isinstance(page, Path) else page
    with tempfile.TemporaryDirectory(prefix="kvtier-browser-", ignore_cleanup_errors=True) as profile:
        command = [chromium(), *QUIET, f"--user-data-dir={profile}", *options, address]
        done = subprocess.run(command, capture_output=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == 0, done.stderr.decode(errors="replace")[-2000:]
    return done.stdout
