# SPDX-License-Identifier: Apache-2.0
"""`boundary` and `post` that keep fewer streams for backward, registered as the operators of ops.py are.

Results are those of mhc_boundary and mhc_post. The six tensors `from_*`, a source, are what `post` made x of. Where
they are there, they are kept instead of x, which costs nothing as their own operator keeps them too, and backward makes
x again. With keep=False `boundary` does not keep y, and its backward pass rebuilds y as it goes over x.

To make x again is part of the gradient's operator and not a call of its own: in a compiled graph a call that depends on
forward alone may be moved to the forward pass, with its result kept."""

from __future__ import annotations

import torch

from .ops import BOUNDARY, BOUNDARY_SCALARS, BOUNDARY_TENSORS, without_gain
from .register import OPERATORS, Operator, operator

_SOURCE = ("from_x", "from_f", "from_post", "from_res", "from_bias", "from_step")
_FROM_TENSORS = ", ".join(f"Tensor? {t}" for t in _SOURCE)
_FROM_SCALARS = "float from_p, int from_base"


def _with_streams(gradient: Operator, results: tuple, args: tuple, add: int) -> tuple:
    """Arguments with the streams that `post` made of the source, where x was not kept."""
    if args[gradient.place["x"]] is not None:
        return args
    post = OPERATORS["mhc_post"]
    source = tuple(args[gradient.place[t]] for t in _SOURCE)
    scalars = (args[gradient.place[s]] for s in ("numerics", "from_p", "from_base"))
    x = torch.empty_like(source[0])
    post.fill(x, (*source, *scalars))
    return gradient.replaced(args, x=x)


def _with_streams_without_gain(gradient: Operator, results: tuple, args: tuple, add: int) -> tuple:
    return without_gain(gradient, results, _with_streams(gradient, results, args, add), add)


def _has_source(arguments: dict) -> bool:
    return arguments["from_x"] is not None


operator(
    "mhc_boundary_rebuild",
    f"{BOUNDARY_TENSORS}, {_FROM_TENSORS}, {BOUNDARY_SCALARS}, {_FROM_SCALARS}, bool keep",
    library="mhc_boundary",
    **BOUNDARY,
    forward_only=("keep",),
    spare={"x": _has_source, "y": lambda arguments: not arguments["keep"]},
    likes={"x": "from_x"},
    needs=("x", "d_u"),
    complete=_with_streams_without_gain,
)
operator(
    "mhc_post_rebuild",
    f"x, f, post, res, bias, step, {_FROM_TENSORS}, numerics, p, token_base, {_FROM_SCALARS}",
    library="mhc_post",
    spare={"x": _has_source},
    likes={"x": "from_x"},
    needs=("x",),
    complete=_with_streams,
)
