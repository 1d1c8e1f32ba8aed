"""Compares the versions of the checkpoint and adapter files that vLLM reads with those that kvtier identifies.

vLLM loads the weights before it makes a connector, minutes earlier if the model is large. The checkpoint may be
replaced in its folder in between. So kvtier records the versions twice, and they travel with vLLM's `LoadConfig` to
all of its processes:

early    while vLLM makes its configuration and reads settings and code: all files present. A download may come later
read     in each worker, after any download, when the loader is about to open its first file: all weights

An adapter is identified when a request arrives. The workers read the adapter in the first step that uses it, and again
after vLLM has evicted it from its cache. `AdaptersRead` records the versions before and after each read.

Only files that differ from the identified ones cause a doubt. The age of a file does not matter.
"""

import itertools
import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from kvtier.connect.model_files import adapter_versions, checkpoint_versions, digested_files, local_folder
from kvtier.connect.vllm.engine_hooks import has_room, watch_adapter_loads
from kvtier.connect.vllm.vllm_types import LoraRequest, VllmConfig
from kvtier.errors import ConfigError
from kvtier.keys.weights import FileVersion, changed_file, file_versions

logger = logging.getLogger(__name__)

_EARLY, _READ = "_kvtier_early", "_kvtier_read"
"""Attributes that kvtier adds to a `LoadConfig`."""


_Versions = dict[Path, FileVersion]


def look_early(config: VllmConfig) -> None:
    """Record the versions of all files of the model and its draft model while vLLM makes its configuration."""
    if _EARLY in config.load_config.__dict__:
        return  # vLLM copies its configuration for a draft model when it loads the weights
    for model, load in models_of(config):
        folder = local_folder(str(model.model_weights or model.model), model.revision, load.download_dir)
        now = checkpoint_versions(folder, is_code_trusted=bool(model.trust_remote_code))
        load.__dict__.setdefault(_EARLY, {}).update(now)


def models_of(config: VllmConfig) -> list[tuple[Any, Any]]:
    """Return the `ModelConfig` and `LoadConfig` of the model, and those of its draft model."""
    found = [(config.model_config, config.load_config)]
    drafting = config.speculative_config
    draft = getattr(drafting, "draft_model_config", None)
    if draft is not None:
        found.append((draft, getattr(drafting, "draft_load_config", None) or config.load_config))
    return found


def note(load: Any, name: str, folder: str, files: Iterable[str]) -> None:  # noqa: ANN401
    """Record the versions of files that vLLM is about to read.

    Args:
        load: vLLM's `LoadConfig`, which keeps the versions.
        name: the model's name, as vLLM received it.
        folder: the model's folder, if it is not `name`.
        files: the files of its weights.
    """
    paths = list(map(Path, files))
    with suppress(ConfigError):  # the digest will report it
        paths += digested_files(Path(folder or name), is_code_trusted=True)
    read: _Versions = load.__dict__.setdefault(_READ, {}).setdefault(name, {})
    # Keep the first version. If the file changes before it is read again, the version identified later differs from it.
    read.update({path: version for path, version in file_versions(paths).items() if path not in read})


def doubt(config: VllmConfig, identified: Mapping[Path, FileVersion]) -> str:
    """Return why workers in this process may have read files other than those identified; empty if there is no doubt.

    Args:
        config: the engine's configuration, after its weights were loaded in this process.
        identified: the versions that the digests of the weights cover.
    """
    models = models_of(config)
    loads: list[dict[str, Any]] = list({id(load): load.__dict__ for _, load in models}.values())
    reads: list[tuple[str, _Versions]] = list(itertools.chain(*(it.get(_READ, {}).items() for it in loads)))
    if not reads:
        return "kvtier did not see which files vLLM read; check that VLLM_PLUGINS, if it is set, names kvtier"
    other = next((name for name, _ in reads if all(name != str(model.model) for model, _ in models)), "")
    if other:
        return f"vLLM also reads weights of {other}, which kvtier does not identify"
    looks: list[_Versions] = [*(it.get(_EARLY, {}) for it in loads), *(versions for _, versions in reads)]
    for seen in looks:
        path = changed_file(seen, {**file_versions(seen), **identified}, may_download=True)
        if path is not None:
            return f"{path} changed while the engine started"
    new = next((path for path in identified if not any(path in seen for seen in looks)), None)
    return "" if new is None else f"{new} appeared after vLLM had read the weights"


def doubt_of(worker: Any, identified: Mapping[Path, FileVersion]) -> str:  # noqa: ANN401 - vLLM's `WorkerWrapperBase`
    """Run `doubt` in a worker's process. vLLM calls this in each worker."""
    return doubt(worker.vllm_config, identified)


class AdapterRead(NamedTuple):
    """An adapter that a worker has loaded or is about to load."""

    number: int
    """Its `lora_int_id`."""
    versions: Mapping[Path, FileVersion]
    """The versions of its files; empty if the files changed during the load."""


class AdaptersRead:
    """The adapters that one worker has read. Only the thread that runs the worker's steps uses them.

    Args:
        manager: vLLM's `LRUCacheWorkerLoRAManager`.
    """

    def __init__(self, manager: Any) -> None:  # noqa: ANN401
        self._manager = manager
        self._last: dict[int, AdapterRead] = {}
        """The last read of each adapter that vLLM keeps in memory."""
        self._new: list[AdapterRead] = []
        watch_adapter_loads(manager, self._watched)

    def take(self) -> tuple[AdapterRead, ...]:
        """Return the reads since the last call."""
        new, self._new = self._new, []
        return tuple(new)

    def has_read(self, adapter: LoraRequest, named: Collection[Mapping[Path, FileVersion]]) -> bool:
        """Return whether the next step would use files of this adapter whose versions are in `named`.

        Call this before the step's forward pass. It loads the adapter, unless that would evict another one. If the
        adapter is not loaded, the files on disk count.
        """
        manager, number = self._manager, adapter.lora_int_id
        try:
            if number not in manager.list_adapters() and has_room(manager):
                manager.add_adapter(adapter)
            is_held = number in manager.list_adapters()
            read = self._last[number] if is_held else AdapterRead(number, adapter_versions(adapter.lora_path))
        except Exception as error:  # noqa: BLE001 - vLLM meets the error in a step and handles it
            logger.warning("adapter %r cannot be loaded: %r", adapter.lora_name, error)
            read = AdapterRead(number, {})
        if read.versions not in named:
            self._new.append(read)
            return False
        return True

    def _watched(self, load: Callable[[LoraRequest], object], adapter: LoraRequest) -> object:
        before = adapter_versions(adapter.lora_path)
        loaded, after = load(adapter), adapter_versions(adapter.lora_path)
        # If there were no files before the load, vLLM has downloaded them.
        read = AdapterRead(adapter.lora_int_id, after if not before or before == after else {})
        held = self._manager.list_adapters()
        self._last = {number: it for number, it in self._last.items() if number in held} | {read.number: read}
        self._new.append(read)
        return loaded
