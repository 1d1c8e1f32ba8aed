"""Whether a vLLM that was never tried gives and takes the right bytes: a test on the engine, and its result.

Names and signatures do not prove what lies in a page. The test (`kvtier vllm doctor --selftest`) does, for one build of
vLLM, one model and one layout of its KV. Its result is a note beside the store. Engines of that build look for it.
"""

import hashlib
import logging
from functools import partial
from pathlib import Path

from kvtier.config.sections import Config
from kvtier.connect.vllm import versions
from kvtier.errors import ConfigError
from kvtier.layout import KvLayout
from kvtier.runtime.open import within
from kvtier.tier import notes

logger = logging.getLogger(__name__)


def place_of(config: Config) -> Path | None:
    """Where results are kept: with the first tier."""
    return config.directory.path or config.disk.path


def check(config: Config, build: str, fingerprint: bytes, layout: KvLayout) -> None:
    """Refuse an engine of a build that was never tried and has no result for this model and layout.

    Args:
        config: the settings.
        build: `versions.build_of`.
        fingerprint: digest of the model's.
        layout: of a worker.

    Raises:
        ConfigError: there is no result; the message names the command that makes one.
    """
    if versions.is_tried(build):
        return
    subject = _subject(build, fingerprint, layout)
    place = place_of(config)
    if config.vllm.unsupported == "selftest":
        logger.warning("vLLM %s is under test; this engine's answers may be wrong", build)
        if place is not None:
            place.mkdir(mode=0o700, parents=True, exist_ok=True)
            notes.write(place, "selftest", _name(subject), {**subject, "passed": False})
        return
    if place is None:
        raise ConfigError(
            f"vLLM {build} was never tried, and without a tier there is no place for the result of its test; allowed: "
            "directory.path or disk.path"
        )
    try:
        is_passed = within(config.limits.open_deadline_s, partial(_is_passed, place, subject), "kvtier selftest")
    except TimeoutError:
        is_passed = False
    if not is_passed:
        raise ConfigError(
            f"vLLM {build} was never tried, and {place} holds no result of its test for this model and layout; run "
            "`kvtier vllm doctor --selftest` with the server's settings, --model and --engine-args"
        )


def publish(tested: Path, place: Path) -> int:
    """Write the results that the engines of a test left in `tested` to `place`, as passed; how many.

    Raises:
        OSError: they cannot be written.
    """
    found = notes.read(tested, "selftest")
    for note in found:
        subject = {key: value for key, value in note.items() if key != "passed"}
        notes.write(place, "selftest", _name(subject), {**subject, "passed": True})
    return len(found)


def _is_passed(place: Path, subject: dict[str, object]) -> bool:
    return {**subject, "passed": True} in notes.read(place, "selftest")


def _subject(build: str, fingerprint: bytes, layout: KvLayout) -> dict[str, object]:
    pages = [layout.digest(group).hex() for group in range(len(layout.groups))]
    return {"build": build, "fingerprint": fingerprint.hex(), "layout": pages}


def _name(subject: dict[str, object]) -> bytes:
    return hashlib.sha256(repr(sorted(subject.items())).encode()).digest()
