# SPDX-License-Identifier: Apache-2.0
"""What the drop-ins ask of their arguments; sentences have the library's form: operator: argument: expected, got."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def tensor(op: str, name: str, value: object, at_least: int = 0) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"{op}: {name}: expected a tensor, got {type(value).__name__}")
    if value.ndim < at_least:
        raise ValueError(f"{op}: {name}: expected at least {at_least} dimensions, got {tuple(value.shape)}")


def shape(op: str, name: str, value: object, want: Sequence[int]) -> None:
    tensor(op, name, value)
    if tuple(value.shape) != tuple(want):
        raise ValueError(f"{op}: {name}: expected shape {tuple(want)}, got {tuple(value.shape)}")


def numel(op: str, name: str, value: object, want: int) -> None:
    tensor(op, name, value)
    if value.numel() != want:
        raise ValueError(f"{op}: {name}: expected {want} elements, got {tuple(value.shape)}")


def equal(op: str, name: str, got: object, want: object, why: str) -> None:
    if got != want:
        raise ValueError(f"{op}: {name}: expected {want}, {why}, got {got}")


def streams_of_rows(op: str, name: str, rows: int) -> int:
    """n where rows = 2n + n*n."""
    n = math.isqrt(rows + 1) - 1
    if n < 1 or n * (n + 2) != rows:
        raise ValueError(f"{op}: {name}: expected 2n + n*n rows (3, 8, 15, 24, ...), got {rows}")
    return n


def full(x: Tensor) -> torch.dtype:
    """The dtype of coefficients beside activations like x."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32
