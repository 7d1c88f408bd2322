# SPDX-License-Identifier: Apache-2.0
"""weft for PyTorch: operators, modules, recompute."""

from .functional import (
    Boundary,
    Pre,
    ReplayLayer,
    aggregate,
    boundary,
    coef,
    contract,
    draw_step,
    expand,
    head,
    post,
    pre,
    project,
    replay,
    rmsnorm,
    scale,
    sinkhorn,
)
from .grads import GradX
from .modules import Contract, Expand, Head, HyperConnection, HyperConnectionLayer, HyperConnectionStack
from .numerics import Numerics

__all__ = [
    "Boundary",
    "Contract",
    "Expand",
    "GradX",
    "Head",
    "HyperConnection",
    "HyperConnectionLayer",
    "HyperConnectionStack",
    "Numerics",
    "Pre",
    "ReplayLayer",
    "aggregate",
    "boundary",
    "coef",
    "contract",
    "draw_step",
    "expand",
    "head",
    "post",
    "pre",
    "project",
    "replay",
    "rmsnorm",
    "scale",
    "sinkhorn",
]
