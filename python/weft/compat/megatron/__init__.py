# SPDX-License-Identifier: Apache-2.0
"""Megatron-LM's hyper connections, and the front of its GatedDeltaNet, computed by weft.

    HyperConnectionModule                      for the layer spec of branch main: same parameters, same methods
    fused_*, native_*, learned_output_contract for branch dev (megatron.core.fusions.fused_mhc_kernels and
                                               megatron.core.transformer.hyper_connection), and `bind`, which
                                               puts them into the slots of dev's or dsv4's own module
    get_bias_dropout_add                       with dev's mhc_recompute_manager
    build_mhc_recompute_layer_plan, finalize_mhc_recompute_layer    as in weft.torch
    GatedDeltaNet                              to be put before branch dev's class of that name; `bind` does the same
                                               to a module of it
    fused_mega_pre_gated_delta_rule, fused_streamed_pre_gated_delta_rule, native_pre_gated_delta_rule
                                               what GatedDeltaNet does between its projection and the gated delta rule
    gated_delta_rule                           the rule, as the class calls it

Where Megatron is installed the module derives from Megatron's, elsewhere from a small base here with the same
constructor, so a checkpoint fits either.

The branches do not compute the same function. main mixes y[i] = sum_j H_res[i, j] x[j], dev the transpose; dev
starts Sinkhorn with a softmax and adds 1e-6 to H_pre. The class follows main, the free functions follow dev.
Both differ from Megatron in one point: coefficients are fp32 all the way, whatever the activations are.

On a GPU, HyperConnectionModule.forward without a recompute manager and learned_output_contract are fused kernels over the
streams under the conditions of weft.torch.pre (the PyTorch guide): bf16 or fp16, 2 or 4 streams, a multiple of 8 channels,
forward up to 7168 (4 streams) or 14336 (2), code for compute capability 9.0. Everything else here is one operator after the
other.

Gradients of the streams are summed in place in HyperConnectionModule (the PyTorch guide, "Gradients of the streams"); dev's own
module projects a view of them, whose gradient autograd adds.

native_* are plain PyTorch. use_native(True), or WEFT_COMPAT_NATIVE=1 in the environment, makes everything else
here run as plain PyTorch too, to tell a problem of the kernels from one of the model.

The argument `fused` is accepted everywhere and ignored: there is one way to compute, and it is fused."""

from weft.torch import build_mhc_recompute_layer_plan, finalize_mhc_recompute_layer

from ._fused import (
    bind,
    fused_add_3,
    fused_h_aggregate,
    fused_h_aggregate_into,
    fused_h_post_bda,
    fused_h_post_bda_into,
    fused_proj_rms,
    fused_proj_rms_compute_h,
    fused_sinkhorn,
    get_bias_dropout_add,
    learned_output_contract,
)
from ._gdn import (
    fused_mega_pre_gated_delta_rule,
    fused_streamed_pre_gated_delta_rule,
    native_pre_gated_delta_rule,
)
from ._gdn_class import (
    GatedDeltaNet,
    gated_delta_rule,
)
from ._module import (
    HyperConnectionModule,
    SinkhornKnopp,
)
from ._native import (
    native_fused_add_3,
    native_h_aggregate,
    native_h_aggregate_into,
    native_h_post_bda,
    native_proj_rms,
    native_proj_rms_compute_h,
    native_sinkhorn,
)
from ._switch import (
    use_native,
    uses_native,
)

__all__ = [
    "GatedDeltaNet",
    "HyperConnectionModule",
    "SinkhornKnopp",
    "bind",
    "build_mhc_recompute_layer_plan",
    "finalize_mhc_recompute_layer",
    "fused_add_3",
    "fused_h_aggregate",
    "fused_h_aggregate_into",
    "fused_h_post_bda",
    "fused_h_post_bda_into",
    "fused_mega_pre_gated_delta_rule",
    "fused_proj_rms",
    "fused_proj_rms_compute_h",
    "fused_sinkhorn",
    "fused_streamed_pre_gated_delta_rule",
    "gated_delta_rule",
    "get_bias_dropout_add",
    "learned_output_contract",
    "native_fused_add_3",
    "native_h_aggregate",
    "native_h_aggregate_into",
    "native_h_post_bda",
    "native_pre_gated_delta_rule",
    "native_proj_rms",
    "native_proj_rms_compute_h",
    "native_sinkhorn",
    "use_native",
    "uses_native",
]
