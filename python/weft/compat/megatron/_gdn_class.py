# SPDX-License-Identifier: Apache-2.0
"""The slots of branch dev's GatedDeltaNet: the two methods before the gated delta rule, and the rule itself."""

import copy
import types

import torch
from torch import Tensor, nn

from weft.compat.fla import chunk_gated_delta_rule, l2norm
from weft.torch.grads import deposit

from ._gdn import fused_streamed_pre_gated_delta_rule, pieces_of, several
from ._switch import uses_native

METHODS = ("_fused_streamed_pre_gated_delta_rule", "pre_gated_delta_rule")
_SILU = ("silu", "swish")


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    **kwargs,
) -> tuple[Tensor, Tensor | None]:
    """What Megatron calls self.gated_delta_rule: q, k [b, s, H, K], v [b, s, Hv, V], g and beta [b, s, Hv] -> the output and
    the state or None, by weft.torch.gdn_rule. With a cp_context whose group has several ranks each of them gives its
    tokens, after those of the rank before, and the cu_seqlens of the whole."""
    group = _ranks("gated_delta_rule: cp_context", kwargs.pop("cp_context", None))
    if several(group):
        if initial_state is not None:
            raise ValueError("gated_delta_rule: initial_state: expected None with a cp_context of several ranks")
        if kwargs:
            raise TypeError(f"gated_delta_rule: expected no arguments beside a cp_context, got {', '.join(kwargs)}")
        if use_qk_l2norm_in_kernel:
            q, k = l2norm(q), l2norm(k)
        pieces = pieces_of(group, v, cu_seqlens)
        return pieces.rule(q, k, v, beta, g, scale=scale, final_state=output_final_state)
    return chunk_gated_delta_rule(
        q,
        k,
        v,
        g,
        beta,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        cu_seqlens=cu_seqlens,
        **kwargs,
    )


class GatedDeltaNet:
    """comes before Megatron's class of the same name, of branch dev, among the bases of a class for a layer spec:

        from megatron.core.ssm.gated_delta_net import GatedDeltaNet as Megatron
        from weft.compat.megatron import GatedDeltaNet as Weft

        class GatedDeltaNet(Weft, Megatron): pass

    Both ways before the rule, with gdn_pre_gated_delta_rule_fusion and without, are then
    fused_streamed_pre_gated_delta_rule; parameters and checkpoints are Megatron's. That option goes together with
    deterministic_mode here. Heads or tokens may be divided among ranks (head-wise and chunk-wise context parallel).
    rule = False in the class leaves Megatron its own gated delta rule."""

    rule = True

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        after = cls.__mro__[cls.__mro__.index(GatedDeltaNet) + 1 :]
        if not all(any(name in vars(base) for base in after) for name in METHODS):
            raise TypeError(
                f"{cls.__name__}: bases: expected a class with {' and '.join(METHODS)} behind weft's, as branch dev of"
                " Megatron-LM has"
            )

    def __init__(self, *args, **kwargs):
        if type(self) is GatedDeltaNet:
            raise TypeError("GatedDeltaNet: expected a class that has Megatron's behind this one, got this one alone")
        super().__init__(*args, **kwargs)

    def _setup_variant_attrs(self) -> None:
        """Megatron's, without its error for the fusion in deterministic mode."""
        own = self.config
        self.config = copy.copy(own)
        self.config.gdn_pre_gated_delta_rule_fusion = False
        try:
            super()._setup_variant_attrs()
        finally:
            self.config = own
        self.gdn_pre_gated_delta_rule_fusion = own.gdn_pre_gated_delta_rule_fusion
        _activation(self)
        if self.rule:
            self.gated_delta_rule = gated_delta_rule

    def _fused_streamed_pre_gated_delta_rule(
        self, qkvzba, cu_seqlens_q=None, seq_idx=None, cp_group=None, cp_group_headwise=None
    ):
        """Projection rows [s, b, columns] of this rank's heads, or with a cp_group of its tokens -> query, key, value, gate,
        beta, g."""
        parameters, heads = _of_this_rank(self, cp_group_headwise)
        return fused_streamed_pre_gated_delta_rule(
            qkvzba,
            *parameters,
            **heads,
            use_qk_l2norm=self.use_qk_l2norm,
            cu_seqlens=cu_seqlens_q,
            seq_idx=seq_idx,
            cp_group=cp_group,
        )

    def pre_gated_delta_rule(
        self,
        qkvzba,
        batch,
        seq_len,
        cp_size_headwise,
        cp_group_headwise,
        cu_seqlens_q=None,
        chunkwise_cp_context=None,
        packed_seq_params=None,
    ):
        """The same, as it is called without the fusion."""
        op = "pre_gated_delta_rule"
        ranks = 1 if cp_group_headwise is None else cp_group_headwise.size()
        if ranks != cp_size_headwise:
            raise ValueError(f"{op}: cp_size_headwise: expected {ranks}, the size of its group, got {cp_size_headwise}")
        if tuple(qkvzba.shape[:2]) != (seq_len, batch):
            got = tuple(qkvzba.shape)
            raise ValueError(f"{op}: qkvzba: expected ({seq_len}, {batch}, columns), got {got}")
        return GatedDeltaNet._fused_streamed_pre_gated_delta_rule(
            self,
            qkvzba,
            cu_seqlens_q=cu_seqlens_q,
            cp_group=_ranks(f"{op}: chunkwise_cp_context", chunkwise_cp_context),
            cp_group_headwise=cp_group_headwise,
        )


def bind(module: nn.Module, rule: bool) -> nn.Module:
    """Puts the methods, and the rule, into a module of Megatron's class."""
    _activation(module)
    for name in METHODS:
        setattr(module, name, types.MethodType(getattr(GatedDeltaNet, name), module))
    if rule:
        module.gated_delta_rule = gated_delta_rule
    return module


def is_one(module: nn.Module) -> bool:
    return all(hasattr(module, name) for name in METHODS)


def _ranks(what: str, context):
    """The group of a context of fla's: the ranks that have the tokens one after another."""
    if context is None:
        return None
    if not hasattr(context, "group"):
        raise TypeError(f"{what}: expected a context of build_cp_context, got {type(context).__name__}")
    layout = getattr(context, "layout", "contiguous")
    if layout != "contiguous":
        raise NotImplementedError(f"{what}: layout: expected contiguous, got {layout}")
    return context.group


def _activation(module) -> None:
    if module.activation not in _SILU:
        raise NotImplementedError(
            f"GatedDeltaNet: activation: expected one of {', '.join(_SILU)}, got {module.activation}"
        )


def _of_this_rank(module, group) -> tuple[tuple, dict[str, int]]:
    """conv1d.weight, conv1d.bias, A_log and dt_bias for the heads of this rank, and how many heads these are."""
    channels = (module.qk_dim_local_tp, module.qk_dim_local_tp, module.v_dim_local_tp)
    bias = module.conv1d.bias if module.conv_bias else None
    parameters = (
        _slices(module.conv1d.weight, channels, group),
        None if bias is None else _slices(bias, channels, group),
        _slices(module.A_log, module.A_log.shape, group),
        _slices(module.dt_bias, module.dt_bias.shape, group),
    )
    values = parameters[2].numel()
    keys = (parameters[0].shape[0] - values * module.value_head_dim) // (2 * module.key_head_dim)
    dims = {"key_head_dim": module.key_head_dim, "value_head_dim": module.value_head_dim}
    return parameters, {"num_key_heads": keys, "num_value_heads": values, **dims}


def _slices(param: Tensor, sections: tuple[int, ...], group) -> Tensor:
    """This rank's part of every section of a parameter, one after the other."""
    ranks = 1 if group is None else group.size()
    if ranks == 1:
        return param
    for size in sections:
        if size % ranks:
            raise ValueError(f"GatedDeltaNet: cp_group_headwise: expected a divisor of {size}, got {ranks} ranks")
    param = param if uses_native() else deposit(param)
    return torch.cat([section.chunk(ranks)[group.rank()] for section in param.split(list(sections))])
