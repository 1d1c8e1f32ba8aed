"""Compares a model's weights in memory with the checkpoint that the caller names.

The library reads the files before `attach` is called, so kvtier does not know which files it read. Comparing a few
places of every weight costs far less than a digest of all bytes. The comparison suffices, because training changes
whole weights.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from itertools import chain
from typing import Any, cast

import torch
from safetensors import safe_open

from kvtier.connect.transformers.caches import Model
from kvtier.keys.weights import WeightsDigest, changed_file, file_versions

RUN_VALUES = 4096
"""Number of adjacent values compared in each of three places: the start, the middle and the end."""

_SUFFIX = ".safetensors"


def difference(model: Model, files: WeightsDigest) -> str:
    """Return why the weights in memory may differ from the digested files; empty if they match.

    The dtype may differ: values from the files are cast to the model's dtype, as the library does.
    """
    try:
        with ExitStack() as opened:
            read = [path for path in files.versions if path.name.endswith(_SUFFIX)]
            found = _differing(model, [opened.enter_context(safe_open(path, framework="pt")) for path in read])
    except Exception as error:  # noqa: BLE001 - errors of files and of any kind of tensor
        return f"the comparison failed: {error}"
    # The compared files must be the digested files.
    changed = changed_file(files.versions, file_versions(files.versions), may_download=False)
    return found if changed is None else f"{changed} has changed during the comparison"


def _differing(model: Model, files: Iterable[Any]) -> str:
    held = {str(name): file for file in files for name in file.keys()}  # noqa: SIM118 - no mapping
    if not held:
        return f"it contains no *{_SUFFIX} files, and only such files are compared"
    names: dict[torch.Tensor, list[str]] = defaultdict(list)
    tensors: Iterator[tuple[str, object]] = chain(
        model.named_parameters(remove_duplicate=False), model.state_dict(keep_vars=True).items()
    )
    for name, tensor in tensors:
        if isinstance(tensor, torch.Tensor):
            names[tensor].append(name)
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    for tensor, given in names.items():
        # Files of a model with an output head have the prefix. Files of its base model lack it.
        stored = {other for name in given for other in (name, name.removeprefix(prefix), prefix + name)} & held.keys()
        if not stored and isinstance(tensor, torch.nn.Parameter):
            return f"{given[0]} is in none of the files"
        # The files may also hold an unused copy of a tied weight.
        if stored and not any(_is_equal(tensor.detach(), held[name].get_slice(name)) for name in stored):
            return f"{given[0]} has other values"
    return ""


def _is_equal(tensor: torch.Tensor, stored: Any) -> bool:  # noqa: ANN401 - safetensors has no types
    shape = tuple(tensor.shape)
    if tuple(stored.get_shape()) != shape:
        return False
    for part in (0, 1, 2) if tensor.numel() else ():
        place = tuple(slice(at := (size - 1) * part // 2, at + 1) for size in shape[:-1])
        if shape:
            start = max(0, shape[-1] - RUN_VALUES) * part // 2
            place += (slice(start, start + RUN_VALUES),)
        values = cast("torch.Tensor", stored[place] if place else stored[...])
        if not torch.equal(_bits(values.to(tensor.dtype)), _bits(tensor[place].cpu())):
            return False
    return True


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)
