# SPDX-License-Identifier: Apache-2.0
"""Facts: names and parameters of the functions that weft.compat has drop-ins for, by source file, in the notation of
signature_support.py. None stands for a name that is no function."""

from typing import NamedTuple


class Peer(NamedTuple):
    drop_in: str  # weft.compat.<drop_in>
    package: str  # as its metadata names it, or a branch
    version: str
    mark: str  # a file that this version has
    files: dict[str, dict[str, str | None]]  # parameters by name by path
    without: str = ""  # a file that this version has not


MERGE = "self, h_res, original_residual, h_post, layer_output_with_bias, dropout_prob, training, fused"
GATES = "x, weight, alpha_pre, alpha_post, alpha_res, bias, n, eps=1e-06, compute_h_eps=1e-06"
LIGER = "tmax=20, rms_eps=1e-06, pre_eps=0.0, sinkhorn_eps=1e-06, post_mult=2.0"
TE, TK = "transformer_engine/pytorch/triton/mhc.py", "tile_kernels/modeling/mhc"
CORE = "megatron/core"

PEERS = [
    Peer(
        "transformer_engine",
        "transformer-engine",
        "2.20.2",
        TE,
        {
            TE: {
                "ENFORCE_DETERMINISTIC": None,
                "mhc_generate_mix_and_aggregate": "x, phi, alpha, beta, norm_weight=None, use_tf32=True, "
                "fused_grad_x_acc_buffer=None, use_split_k=False",
                "mhc_fused_projection": "x, phi, use_tf32=True, norm_weight=None, fused_grad_x_acc_buffer=None, "
                "use_split_k=False",
                "mhc_fused_scale": "H, alpha, beta, ms, n",
                "mhc_fused_sinkhorn": "H_res, n=4, recompute_hist=True, iters=20",
                "mhc_fused_aggregate": "x, H_pre, n, use_tf32=True, fused_grad_x_acc_buffer=None",
                "mhc_fused_expand_combine": "f, bias, H_post, x, H_res, n, use_tf32=True, fused_grad_x_acc_buffer=None",
            }
        },
    ),
    Peer(
        "tile_kernels",
        "tile-kernels",
        "1.0.0",
        f"{TK}/functional.py",
        {
            f"{TK}/functional.py": {
                "expand_from_embedding": "x, mhc_mult=4",
                "mhc_pre": "residual, fn, scale, base, *, norm_weight=None, norm_eps=1e-06, mhc_mult=4, "
                "post_mult_value=1.0, pre_eps=1e-06, sinkhorn_eps=1e-06, sinkhorn_repeat=10, n_splits=16",
                "mhc_head": "residual, fn, scale, base, *, norm_weight=None, norm_eps=1e-06, mhc_mult=4, "
                "pre_eps=1e-06, n_splits=16",
            },
            f"{TK}/ops/expand.py": {"expand_to_mhc": "hidden, mhc_mult, out=None"},
            f"{TK}/ops/head_compute_mix.py": {
                "mhc_head_compute_mix": "input_mix, mhc_scale, mhc_base, mhc_pre_eps",
            },
            f"{TK}/ops/norm_fn.py": {
                "mhc_pre_norm_fn": "residual, mhc_fn, mhc_norm_weight, mhc_norm_eps, fuse_grad_acc=True, n_splits=16",
            },
            f"{TK}/ops/post.py": {"mhc_post": "x, residual, post_layer_mix, comb_res_mix, out=None"},
            f"{TK}/ops/pre_apply_mix.py": {"mhc_pre_apply_mix": "x, mix, out=None"},
            f"{TK}/ops/pre_big_fuse.py": {
                "mhc_pre_big_fuse": "residual, fn, mhc_scale, mhc_base, rms_eps, mhc_pre_eps, mhc_sinkhorn_eps, "
                "mhc_post_mult_value, sinkhorn_repeat, n_splits=16",
            },
            f"{TK}/ops/pre_split_mixes.py": {
                "mhc_pre_split_mixes": "input_mixes, mhc_scale, mhc_base, mhc_mult, mhc_post_mult_value, mhc_pre_eps",
            },
            f"{TK}/ops/sinkhorn.py": {"sinkhorn_normalize": "x, repeat=10, eps=1e-06"},
            "tile_kernels/mhc/post_kernel.py": {
                "mhc_post_fwd": "x, residual, post_layer_mix, comb_res_mix, out=None",
                "mhc_post_bwd": "x, residual, post_layer_mix, comb_res_mix, d_o, fuse_grad_acc=True",
            },
            "tile_kernels/mhc/multilayer_recompute_kernel.py": {
                "mhc_multilayer_recompute": "initial_residual, pre_mix_list, layer_output_list, post_mix_list, "
                "comb_mix_list, layer_input_list, residual_list",
            },
        },
    ),
    Peer(
        "liger",
        "liger-kernel",
        "0.8.5",
        "liger_kernel/transformers/mhc.py",
        {
            "liger_kernel/transformers/functional.py": {
                "liger_mhc_coeffs": f"x, phi, b, alpha_pre, alpha_post, alpha_res, *, allow_fp32=False, {LIGER}",
                "liger_mhc_pre": "x, h_pre",
                "liger_mhc_post_res": "x, f_out, h_post, h_res",
                "liger_mhc_apply": "x, f_out, h_pre, h_post, h_res, *, return_x_in=False",
                "liger_mhc_forward": "x, layer, phi, b, alpha_pre, alpha_post, alpha_res, *, allow_fp32=False, "
                f"{LIGER}, return_coeffs=False",
            },
            "liger_kernel/transformers/mhc.py": {
                "LigerMHC": f"layer, *, hc, c, {LIGER}, phi_dtype=torch.float16, allow_fp32=False",
                "LigerMHC.forward": "self, x",
            },
        },
    ),
    Peer(
        "fla",
        "fla-core",
        "0.6.0",
        "fla/modules/causal_conv1d/ops.py",
        {
            "fla/modules/causal_conv1d/ops.py": {
                "causal_conv1d": "x, weight=None, bias=None, residual=None, initial_state=None, "
                "output_final_state=False, activation=None, backend='triton', cu_seqlens=None, cu_seqlens_cpu=None, "
                "chunk_indices=None, cp_context=None, **kwargs",
                "causal_conv1d_update": "x, cache, residual=None, weight=None, bias=None, activation=None",
                "ShortConvolution": "hidden_size, kernel_size, bias=False, activation='silu', backend='triton', "
                "device=None, dtype=None, **kwargs",
                "ShortConvolution.forward": "self, x, residual=None, mask=None, cache=None, output_final_state=False, "
                "cu_seqlens=None, chunk_indices=None, **kwargs",
                "ShortConvolution.step": "self, x, residual, cache, output_final_state=False, cu_seqlens=None",
            },
            "fla/modules/norm/l2norm.py": {
                "l2norm": "x, eps=1e-06, output_dtype=None",
                "l2_norm": "x, eps=1e-06, output_dtype=None",
                "L2Norm": "eps=1e-06, output_dtype=None",
                "L2Norm.forward": "self, x",
            },
            "fla/modules/norm/fused_norm_gate.py": {
                "FusedRMSNormGated": "hidden_size, elementwise_affine=True, eps=1e-05, activation='swish', "
                "device=None, dtype=None",
                "FusedRMSNormGated.forward": "self, x, g, residual=None, prenorm=False, residual_in_fp32=False",
            },
            "fla/ops/gated_delta_rule/chunk.py": {
                "chunk_gated_delta_rule": "q, k, v, g, beta, scale=None, initial_state=None, "
                "output_final_state=False, use_qk_l2norm_in_kernel=False, use_beta_sigmoid_in_kernel=False, "
                "allow_neg_eigval=False, state_v_first=False, cu_seqlens=None, cu_seqlens_cpu=None, "
                "chunk_indices=None, cp_context=None, **kwargs",
            },
            "fla/ops/gated_delta_rule/fused_recurrent.py": {
                "fused_recurrent_gated_delta_rule": "q, k, v, g=None, gk=None, gv=None, beta=None, scale=None, "
                "initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False, "
                "use_gate_in_kernel=False, A_log=None, dt_bias=None, use_beta_sigmoid_in_kernel=False, "
                "allow_neg_eigval=False, state_v_first=False, cu_seqlens=None, **kwargs",
            },
            "fla/ops/gated_delta_rule/gate.py": {
                "fused_gdn_gate": "g, A_log, dt_bias=None, output_dtype=torch.float32",
            },
        },
    ),
    Peer(
        "megatron",
        "Megatron-LM, branch dev",
        "of August 2026",
        f"{CORE}/fusions/fused_mhc_kernels.py",
        {
            f"{CORE}/fusions/fused_mhc_kernels.py": {
                "fused_add_3": "a, b, c",
                "fused_sinkhorn": "input_logits, num_iterations, eps=1e-06",
                "fused_h_aggregate": "x, h_pre",
                "fused_h_aggregate_into": "x, h_pre, out",
                "fused_h_post_bda": "h_res, original_residual, h_post, x, bias",
                "fused_proj_rms_compute_h": GATES,
            },
            f"{CORE}/transformer/hyper_connection.py": {
                "native_sinkhorn": "input_logits, num_iterations, eps=1e-06",
                "native_h_aggregate": "x, h_pre",
                "native_h_aggregate_into": "x, h_pre, out",
                "native_h_post_bda": "h_res, original_residual, h_post, x, bias",
                "native_proj_rms": "x, weight, eps=1e-06",
                "native_fused_add_3": "a, b, c",
                "learned_output_contract": "hidden_states, head_fn, base, scale, n, eps",
            },
            f"{CORE}/fusions/fused_bias_dropout.py": {
                "get_bias_dropout_add": "training, fused, mhc_recompute_manager=None",
            },
            f"{CORE}/ssm/gated_delta_net/gdn.py": {
                "GatedDeltaNet._setup_variant_attrs": "self",
                "GatedDeltaNet._fused_streamed_pre_gated_delta_rule": "self, qkvzba, cu_seqlens_q=None, seq_idx=None, "
                "cp_group=None, cp_group_headwise=None",
                "GatedDeltaNet.pre_gated_delta_rule": "self, qkvzba, batch, seq_len, cp_size_headwise, "
                "cp_group_headwise, cu_seqlens_q=None, chunkwise_cp_context=None, packed_seq_params=None",
            },
            f"{CORE}/fusions/fused_pre_gated_delta_rule.py": {
                "fused_streamed_pre_gated_delta_rule": "qkvzba, conv1d_weight, conv1d_bias, A_log, dt_bias, *, "
                "num_key_heads, num_value_heads, key_head_dim, value_head_dim, use_qk_l2norm=True, cu_seqlens=None, "
                "seq_idx=None, cp_group=None",
            },
        },
    ),
    Peer(
        "megatron",
        "Megatron-LM, branch main",
        "of August 2026",
        f"{CORE}/transformer/hyper_connection.py",
        {
            f"{CORE}/transformer/hyper_connection.py": {
                "build_mhc_recompute_layer_plan": "num_layers, mhc_recompute_layer_num, use_mhc_recompute",
                "finalize_mhc_recompute_layer": "mhc_manager, hidden_states, is_last_in_recompute_block",
                "HyperConnectionModule": "config, layer_number",
                "HyperConnectionModule.forward": "self, hidden_states, mhc_recompute_manager=None",
                "HyperConnectionModule.compute_mappings": "self, x",
                "HyperConnectionModule._projection_and_get_norm": "self, x",
                "HyperConnectionModule._compute_h": "self, proj, r",
                "HyperConnectionModule.aggregate": "self, x, h_pre",
                "HyperConnectionModule.apply_h_res": "self, h_res, residual",
                "HyperConnectionModule._apply_h_post": "self, x, h_post",
                "HyperConnectionModule.apply_h_post": "self, x_with_bias, h_post, manager=None",
                "HyperConnectionModule.fused_h_res_h_post_bda": f"{MERGE}, manager=None",
                "HyperConnectionModule._fused_h_res_h_post_bda_native": MERGE,
                "HyperConnectionModule._fused_h_res_h_post_bda_with_checkpoint": f"{MERGE}, manager",
                "HyperConnectionModule.input_expand": "x, n",
                "HyperConnectionModule.output_contract": "x, n",
            },
        },
        without=f"{CORE}/fusions/fused_mhc_kernels.py",
    ),
]

# What drop-ins have beside the names of the peers.
OWN = {
    "megatron": {
        "SinkhornKnopp",  # called by its method apply, as main's autograd function is
        "bind",
        "fused_h_post_bda_into",
        "fused_mega_pre_gated_delta_rule",
        "fused_proj_rms",
        "gated_delta_rule",  # dev's protocol GatedDeltaRuleInterface
        "native_pre_gated_delta_rule",
        "native_proj_rms_compute_h",
        "use_native",
        "uses_native",
    },
}
