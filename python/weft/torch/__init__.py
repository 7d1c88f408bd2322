# SPDX-License-Identifier: Apache-2.0
"""weft for PyTorch: operators, modules, recompute."""

from .convert import Normed, block_names, convert_blocks
from .distributed import sum_gradients
from .functional import (
    Boundary,
    Pre,
    ReplayLayer,
    Source,
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
from .gdn import GdnHeads, GdnOptions, GdnPre, GdnSections, gdn_norm, gdn_pre, gdn_pre_step, gdn_rule, gdn_rule_step
from .gdn_modules import GatedDeltaFront, GatedDeltaNet, GatedRMSNorm, GdnCache
from .gdn_pieces import GdnPieces
from .grads import GradX
from .modules import Contract, Expand, Head, HyperConnection, HyperConnectionLayer
from .numerics import Numerics
from .recompute import CheckpointWithoutOutput, CheckpointWithoutOutputManager, RecomputePhase, bypass_recompute
from .recompute_plan import (
    StreamBytes,
    best_group,
    build_mhc_recompute_layer_plan,
    finalize_mhc_recompute_layer,
    stream_bytes,
)
from .rng import register_rng_tracker
from .stack import HyperConnectionStack

__all__ = [
    "Boundary",
    "CheckpointWithoutOutput",
    "CheckpointWithoutOutputManager",
    "Contract",
    "Expand",
    "GatedDeltaFront",
    "GatedDeltaNet",
    "GatedRMSNorm",
    "GdnCache",
    "GdnHeads",
    "GdnOptions",
    "GdnPieces",
    "GdnPre",
    "GdnSections",
    "GradX",
    "Head",
    "HyperConnection",
    "HyperConnectionLayer",
    "HyperConnectionStack",
    "Normed",
    "Numerics",
    "Pre",
    "RecomputePhase",
    "ReplayLayer",
    "Source",
    "StreamBytes",
    "aggregate",
    "best_group",
    "block_names",
    "boundary",
    "build_mhc_recompute_layer_plan",
    "bypass_recompute",
    "coef",
    "contract",
    "convert_blocks",
    "draw_step",
    "expand",
    "finalize_mhc_recompute_layer",
    "gdn_norm",
    "gdn_pre",
    "gdn_pre_step",
    "gdn_rule",
    "gdn_rule_step",
    "head",
    "post",
    "pre",
    "project",
    "register_rng_tracker",
    "replay",
    "rmsnorm",
    "scale",
    "sinkhorn",
    "stream_bytes",
    "sum_gradients",
]
