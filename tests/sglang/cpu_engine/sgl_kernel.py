"""Stands in for SGLang's package of kernels, whose build for CPUs is on no index."""

from collections.abc import Callable
from typing import Any

import torch


def assign_req_to_token_pool_cpu(
    rows: torch.Tensor, table: torch.Tensor, starts: torch.Tensor, ends: torch.Tensor, places: torch.Tensor, width: int
) -> None:
    """Write the places of each request's new KV into the request's row of `table`."""
    at = 0
    for row, start, end in zip(rows.tolist(), starts.tolist(), ends.tolist(), strict=True):
        table[row, start:end] = places[at : at + end - start].to(table.dtype)
        at += end - start


def __getattr__(name: str) -> Callable[..., Any]:
    """Any other kernel imports, and raises when it is called."""
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_: object, **__: object) -> None:
        raise NotImplementedError(f"sgl_kernel.{name} has no stand-in")

    return missing
