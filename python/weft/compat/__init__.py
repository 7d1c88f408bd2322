# SPDX-License-Identifier: Apache-2.0
"""Drop-ins: public functions of other projects for mHC and Gated DeltaNet, with their names, arguments and
conventions, computed by weft. The guide to drop-ins lists the names that are not here.

    from weft.compat.transformer_engine import mhc_fused_projection, mhc_fused_expand_combine, ...
    from weft.compat.megatron import HyperConnectionModule
    from weft.compat.tile_kernels import mhc_pre, mhc_post, mhc_head
    from weft.compat.liger import LigerMHC
    from weft.compat.fla import ShortConvolution, causal_conv1d, l2norm, fused_gdn_gate, chunk_gated_delta_rule

None of those projects has to be installed. What they only serve for some sizes (4 streams, 16-bit
activations, a GPU) works for all sizes here. Nothing is imported by this package itself: take the file that
is wanted."""
