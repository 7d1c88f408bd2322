# SPDX-License-Identifier: Apache-2.0
"""`boundary` and `post` that keep fewer streams for backward, registered as the operators of ops.py are.

Results are those of mhc_boundary and mhc_post. The six tensors `from_*`, a source, are what `post` made x of. Where
they are there, they are kept instead of x, which costs nothing as their own operator keeps them too, and backward makes
x again. With keep=False `boundary` does not keep y, and its backward pass rebuilds y as it goes over x.

To make x again is part of the gradient's operator and not a call of its own: in a compiled graph a call that depends on
forward alone may be moved to the forward pass, with its result kept."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .ops import POST_SCALARS, POST_TENSORS, dense, rows_of
from .ops_fused import BOUNDARY_SCALARS, BOUNDARY_TENSORS
from .register import DEFINITIONS, define, differentiate

_FROM_TENSORS = (
    "Tensor? from_x, Tensor? from_f, Tensor? from_post, Tensor? from_res, Tensor? from_bias, Tensor? from_step"
)
_FROM_SCALARS = "float from_p, int from_base"
_FROM = _FROM_TENSORS.count("Tensor")
_POST, _BOUNDARY = (t.count("Tensor") for t in (POST_TENSORS, BOUNDARY_TENSORS))


def _made_again(source: tuple, numerics: list[float], p: float, token_base: int) -> Tensor:
    """The streams that `post` made of a source."""
    x = torch.empty_like(source[0])
    DEFINITIONS["mhc_post"].launch(x, *source, numerics, p, token_base)
    return x


def _define(
    name: str, tensors: str, scalars: str, upstream: str, save: Callable, backward: Callable, options: str = ""
) -> None:
    """Registers `name`_rebuild and its gradient: operator `name` with a source between its tensors and its scalars, and
    after those the source's scalars and `options`. `upstream` are the tensors that the gradient has besides."""
    plain, plain_bwd = DEFINITIONS[name], DEFINITIONS[f"{name}_bwd"]
    own, added = tensors.count("Tensor"), 1 + (_FROM_SCALARS + options).count(",")

    def outputs(*args):
        return plain.outputs(*args[:own], *args[own + _FROM : -added])

    def plan(*values):
        return plain.plan(*values[:-added])

    def without_source(args: tuple) -> tuple[tuple, tuple]:
        """Arguments of the plain gradient, and those of _made_again."""
        source, (*rest, p, token_base, want) = args[own : own + _FROM], args[own + _FROM :]
        numerics = rest[upstream.count("Tensor")]
        return (*args[:own], *rest, want), (source, numerics, p, token_base)

    def outputs_bwd(*args):
        (x, *rest), (source, *_) = without_source(args)
        return plain_bwd.outputs(source[0] if x is None else x, *rest)

    def launch_bwd(results, *args, add=()):
        (x, *rest), source = without_source(args)
        plain_bwd.launch(results, _made_again(*source) if x is None else x, *rest, add=add)

    results, results_bwd = (str(d.op._schema).partition(" -> ")[2] for d in (plain, plain_bwd))
    define(
        f"{name}_rebuild({tensors}, {_FROM_TENSORS}, {scalars}, {_FROM_SCALARS}{options}) -> {results}",
        outputs,
        plan,
        save,
        backward,
    )
    define(
        f"{name}_rebuild_bwd({tensors.replace('Tensor x', 'Tensor? x')}, {_FROM_TENSORS}, {upstream}, {scalars},"
        f" {_FROM_SCALARS}, bool[] want) -> {results_bwd}",
        outputs_bwd,
        None,
        launch=launch_bwd,
    )


def _split(inputs: tuple, own: int) -> tuple[tuple, tuple]:
    """The tensors that are kept of an operator's inputs, x not among them where it has a source, and the scalars."""
    x, *rest = inputs[: own + _FROM]
    return (None if inputs[own] is not None else x, *rest), inputs[own + _FROM :]


def _like(saved: tuple, own: int) -> Tensor:
    """x, or streams that lie in memory as x did."""
    return saved[own] if saved[0] is None else saved[0]


# ---- boundary ----------------------------------------------------------------------------------------------------


def _boundary_save(ctx, inputs, output):
    tensors, (*ctx.rest, keep) = _split(inputs, _BOUNDARY)
    y, raw_outputs = output[0], output[5:]
    ctx.mark_non_differentiable(*raw_outputs)
    ctx.save_for_backward(*tensors, y if keep else None, *raw_outputs)


def _boundary_backward(ctx, d_y, d_u, d_pre, d_post, d_res, *unused):
    want = list(ctx.needs_input_grad[: _BOUNDARY - 1])
    saved = ctx.saved_tensors
    upstream = (rows_of(d_y, _like(saved, _BOUNDARY)), dense(d_u), dense(d_pre), dense(d_post), dense(d_res))
    grads = differentiate(ctx, "mhc_boundary_rebuild_bwd", want, *saved, *upstream, *ctx.rest, want)
    return *grads, None, *(None,) * (_FROM + len(ctx.rest) + 1)


_define(
    "mhc_boundary",
    BOUNDARY_TENSORS,
    BOUNDARY_SCALARS,
    "Tensor? y, Tensor h, Tensor ms, Tensor? d_y, Tensor? d_u, Tensor? d_pre, Tensor? d_post, Tensor? d_res",
    _boundary_save,
    _boundary_backward,
    ", bool keep",
)

# ---- post --------------------------------------------------------------------------------------------------------


def _post_save(ctx, inputs, output):
    tensors, ctx.rest = _split(inputs, _POST)
    ctx.save_for_backward(*tensors)


def _post_backward(ctx, d_y):
    want = list(ctx.needs_input_grad[: _POST - 1])
    saved = ctx.saved_tensors
    args = (*saved, rows_of(d_y, _like(saved, _POST)), *ctx.rest, want)
    grads = differentiate(ctx, "mhc_post_rebuild_bwd", want, *args)
    return *grads, None, *(None,) * (_FROM + len(ctx.rest))


_define("mhc_post", POST_TENSORS, POST_SCALARS, "Tensor d_y", _post_save, _post_backward)
