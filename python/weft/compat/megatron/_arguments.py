# SPDX-License-Identifier: Apache-2.0
"""What the functions and the module ask of their tensors."""

import torch
from torch import Tensor

from weft.compat import _require as require
from weft.torch.grads import deposit


def positive(op: str, iterations: int) -> None:
    if iterations < 1:
        raise ValueError(f"{op}: num_iterations: expected at least 1, got {iterations}")


def streams_and(op: str, x: Tensor, **coefficients: tuple[Tensor, int]) -> None:
    """x [..., n, C] and coefficients [..., n] or [..., n, n]."""
    require.tensor(op, "x", x, 2)
    for name, (value, axes) in coefficients.items():
        require.shape(op, name, value, (*x.shape[:-2], *x.shape[-2:-1] * axes))


def merge(op: str, h_res: Tensor, x: Tensor, h_post: Tensor, f: Tensor, bias: Tensor | None) -> None:
    streams_and(op, x, h_res=(h_res, 2), h_post=(h_post, 1))
    require.shape(op, "layer output", f, (*x.shape[:-2], x.shape[-1]))
    if bias is not None:
        require.shape(op, "bias", bias, x.shape[-1:])


def projection(op: str, x: Tensor, weight: Tensor) -> None:
    require.tensor(op, "x", x, 2)
    require.tensor(op, "weight", weight, 2)
    require.shape(op, "weight", weight, (weight.shape[0], x.shape[-1]))


def gates(
    op: str,
    x: Tensor,
    weight: Tensor,
    alpha_pre: Tensor,
    alpha_post: Tensor,
    alpha_res: Tensor,
    bias: Tensor,
    n: int,
) -> Tensor:
    projection(op, x, weight)
    require.shape(op, "weight", weight, (n * n + 2 * n, x.shape[-1]))
    require.shape(op, "bias", bias, weight.shape[:1])
    if n < 1 or x.shape[-1] % n:
        raise ValueError(f"{op}: x: expected a multiple of n = {n} channels, got {x.shape[-1]}")
    for name, alpha in (("alpha_pre", alpha_pre), ("alpha_post", alpha_post), ("alpha_res", alpha_res)):
        require.numel(op, name, alpha, 1)
    return torch.cat([deposit(alpha).reshape(1) for alpha in (alpha_pre, alpha_post, alpha_res)])
