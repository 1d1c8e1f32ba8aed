"""What all tests share."""

import signal


def pytest_configure() -> None:
    """Let Ctrl-C be heard: what a shell starts in its background ignores it, with all children."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
