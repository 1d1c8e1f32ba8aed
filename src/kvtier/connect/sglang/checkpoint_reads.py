"""Records a model's files before SGLang reads them, to compare them with the files that the backend digests later.

SGLang reads the weights long before it creates a storage backend, and the folder may change in between. kvtier is a
plug-in (``sglang.srt.plugins``), which SGLang calls first in each process. The plug-in registers a hook. SGLang calls
the hook after publishing its arguments and before reading the model.
"""

import logging
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from kvtier.connect.sglang import weight_updates
from kvtier.connect.sglang.identity import leaves, model_files
from kvtier.keys.weights import FileVersion, changed_file

logger = logging.getLogger(__name__)

PUBLISH = "sglang.srt.runtime_context.publish"

_before: list[tuple[dict[Path, FileVersion], bool]] = []
"""The last record, if any: the versions, and whether SGLang may download more files."""


def register() -> None:
    """Ask SGLang to call kvtier in each process that is about to read the model. SGLang calls this as a plug-in."""
    hooks: Any = import_module("sglang.srt.plugins.hook_registry")
    hooks.HookRegistry.register(PUBLISH, _published, hooks.HookType.AFTER)


def _published(context: Any, *_: object, role: str = "", **__: object) -> None:  # noqa: ANN401 - SGLang's
    if role == "scheduler":
        try:
            look(context)
        except Exception:
            logger.exception("the model's files cannot be inspected, so kvtier will store and find nothing")


def look(context: Any) -> None:  # noqa: ANN401 - SGLang's runtime context
    """Record the versions of the model's files, which SGLang is about to read in this process.

    From then on, also detect changes of the weights in memory.
    """
    _before[:] = [model_files(leaves(context))]
    weight_updates.install()


def doubt(context: Any, digested: Mapping[Path, FileVersion]) -> str:  # noqa: ANN401 - SGLang's runtime context
    """Return why the files that SGLang read may differ from the digested ones.

    Return an empty string if none has changed since SGLang began to read.

    Args:
        context: SGLang's runtime context.
        digested: versions of the files that digests cover.
    """
    if not _before:
        return "SGLang has not loaded kvtier's plug-in; unset SGLANG_PLUGINS (environment), or add kvtier to it"
    versions, may_download = _before[0]
    changed = changed_file(versions, model_files(leaves(context))[0] | dict(digested), may_download=may_download)
    return "" if changed is None else f"{changed} has changed since SGLang began to read it"
