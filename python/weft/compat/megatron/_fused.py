# SPDX-License-Identifier: Apache-2.0
"""The free functions of branch dev, computed by weft, what binds them to a module, and bias, dropout, add."""

import functools
from collections.abc import Callable

from torch import Tensor, nn

from weft.compat import _into
from weft.compat import _require as require
from weft.torch import CheckpointWithoutOutput, Numerics
from weft.torch import functional as weft
from weft.torch.grads import any_takes_part, lend
from weft.torch.numerics import pack

from . import _arguments as check
from . import _gdn_class
from . import _native as plain
from ._switch import uses_native

# Looked up once: torch.compile cannot follow a call into the library's C interface.
PRESETS = {name: Numerics.preset(name) for name in ("megatron_main", "megatron_dev", "megatron_dsv4")}


def fused_sinkhorn(input_logits: Tensor, num_iterations: int, eps: float = 1e-6) -> Tensor:
    """Logits [..., n, n] -> a matrix whose columns sum to one, in the logits' dtype."""
    return sinkhorn("megatron_dev", input_logits, num_iterations, eps)


def fused_h_aggregate(x: Tensor, h_pre: Tensor) -> Tensor:
    """sum_j h_pre[j] x[j]: x [..., n, C], h_pre [..., n] -> [..., C]."""
    check.streams_and("fused_h_aggregate", x, h_pre=(h_pre, 1))
    return plain.native_h_aggregate(x, h_pre) if uses_native() else weft.aggregate(x, h_pre)


def fused_h_aggregate_into(x: Tensor, h_pre: Tensor, out: Tensor) -> Tensor:
    """fused_h_aggregate, written into out, whose address a captured graph may know. Returned is out's memory with
    the result's history; out itself stays outside of autograd and can be given again."""
    op = "fused_h_aggregate_into"
    check.streams_and(op, x, h_pre=(h_pre, 1))
    _into.same_memory(op, out, x, (*x.shape[:-2], x.shape[-1]))
    if uses_native():
        return plain.native_h_aggregate_into(x, h_pre, out)
    return _into.write("mhc_aggregate", (x, h_pre), out)


def fused_h_post_bda(
    h_res: Tensor, original_residual: Tensor, h_post: Tensor, x: Tensor, bias: Tensor | None
) -> Tensor:
    """h_res^T residual + h_post (x + bias): original_residual [s, b, n, C], x [s, b, C], bias [C] -> [s, b, n, C]."""
    return h_post_bda("megatron_dev", h_res, original_residual, h_post, x, bias)


def fused_h_post_bda_into(
    h_res: Tensor, original_residual: Tensor, h_post: Tensor, x: Tensor, bias: Tensor | None, out: Tensor
) -> Tensor:
    """fused_h_post_bda, written into out as by fused_h_aggregate_into."""
    op = "fused_h_post_bda_into"
    check.merge(op, h_res, original_residual, h_post, x, bias)
    _into.same_memory(op, out, original_residual, original_residual.shape)
    if uses_native():
        return out.detach().copy_(plain.merge(h_res.mT, original_residual, h_post, x, bias, 0.0, False))
    f, numerics = x.to(original_residual.dtype), pack(PRESETS["megatron_dev"])
    return _into.write("mhc_post", (original_residual, f, h_post, h_res, bias, None, numerics, 0.0, 0), out)


def fused_add_3(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """a + b + c, rounded once. Plain PyTorch, as in Megatron: the library has no operator for it."""
    return plain.native_fused_add_3(a, b, c)


def fused_proj_rms(x: Tensor, weight: Tensor, eps: float = 1e-6) -> tuple[Tensor, Tensor]:
    """x [M, K], weight [N, K] -> x weight^T [M, N] and 1/(rms + eps) [M, 1], in x's dtype."""
    if uses_native():
        return plain.native_proj_rms(x, weight, eps)
    check.projection("fused_proj_rms", x, weight)
    # The rows need no streams: one of K channels is the same sum.
    h, ms = weft.project(x.unsqueeze(-2), weight, main_grad=any_takes_part(weight))
    return h.to(x.dtype), (1 / (plain.root(ms) + eps)).unsqueeze(-1).to(x.dtype)


def fused_proj_rms_compute_h(
    x: Tensor,
    weight: Tensor,
    alpha_pre: Tensor,
    alpha_post: Tensor,
    alpha_res: Tensor,
    bias: Tensor,
    n: int,
    eps: float = 1e-6,
    compute_h_eps: float = 1e-6,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x [M, n*C] -> h_pre [M, n], h_post [M, n], the logits of h_res [M, n*n] and the RMS [M, 1], all in fp32."""
    if uses_native():
        return plain.native_proj_rms_compute_h(x, weight, alpha_pre, alpha_post, alpha_res, bias, n, eps, compute_h_eps)
    alpha = check.gates("fused_proj_rms_compute_h", x, weight, alpha_pre, alpha_post, alpha_res, bias, n)
    numerics = PRESETS["megatron_dev"]._replace(rms_eps=eps, pre_eps=compute_h_eps)
    h, ms = weft.project(x.unflatten(-1, (n, -1)), weight, main_grad=any_takes_part(weight))
    pre, post, logits = weft.scale(h, ms, alpha, bias, numerics, main_grad=any_takes_part(bias))
    return pre, post, logits.flatten(-2), plain.root(ms).unsqueeze(-1)


def learned_output_contract(
    hidden_states: Tensor, head_fn: Tensor, base: Tensor, scale: Tensor, n: int, eps: float
) -> Tensor:
    """The learned exit: [..., n*C] -> [..., C]. One eps serves twice, inside the root and beside the sigmoid."""
    op = "learned_output_contract"
    require.tensor(op, "hidden_states", hidden_states, 1)
    width = hidden_states.shape[-1]
    if n < 1 or width % n:
        raise ValueError(f"{op}: hidden_states: expected a multiple of n = {n} channels, got {width}")
    require.shape(op, "head_fn", head_fn, (n, width))
    require.shape(op, "base", base, (n,))
    require.numel(op, "scale", scale, 1)
    if uses_native():
        return plain.contract(hidden_states, head_fn, base, scale, n, eps)
    streams = hidden_states.unflatten(-1, (n, -1))
    factor = lend(scale, lambda t: t.reshape(1))
    main_grad = any_takes_part(head_fn, factor, base)
    return weft.head(streams, head_fn, factor, base, rms_eps=eps, pre_eps=eps, main_grad=main_grad)


def bind(module: nn.Module, preset: str = "megatron_dev", *, rule: bool = True) -> nn.Module:
    """Puts weft into the slots of a HyperConnectionModule of branch dev ("megatron_dev"), of dsv4 ("megatron_dsv4")
    or of the 26.04 alpha ("megatron_main"): _sinkhorn_op, _h_aggregate_op, ... The slots carry no dropout. Into a
    GatedDeltaNet of branch dev go what comes before the gated delta rule and, unless rule is False, the rule."""
    if _gdn_class.is_one(module):
        return _gdn_class.bind(module, rule)
    if preset not in PRESETS:
        raise ValueError(f"bind: preset: expected one of {', '.join(PRESETS)}, got {preset!r}")
    slots: dict[str, Callable] = {
        "_sinkhorn_op": functools.partial(sinkhorn, preset),
        "_h_aggregate_op": fused_h_aggregate,
        "_h_aggregate_into_op": fused_h_aggregate_into,
        "_h_post_bda_op": functools.partial(h_post_bda, preset),
        "_proj_rms_op": fused_proj_rms,
    }
    if PRESETS[preset].pre_eps:  # the other branches gate by themselves, without an eps
        slots["_proj_rms_compute_h_op"] = fused_proj_rms_compute_h
    found = [name for name in slots if hasattr(module, name)]
    if not found:
        raise ValueError(
            "bind: module: expected a module with slots such as _sinkhorn_op, or a GatedDeltaNet of branch dev, got"
            f" {type(module).__name__}"
        )
    for name in found:
        setattr(module, name, slots[name])
    return module


def sinkhorn(preset: str, input_logits: Tensor, num_iterations: int, eps: float = 1e-6) -> Tensor:
    op = "fused_sinkhorn"
    require.tensor(op, "input_logits", input_logits, 2)
    require.shape(op, "input_logits", input_logits, (*input_logits.shape[:-1], input_logits.shape[-2]))
    check.positive(op, num_iterations)
    numerics = PRESETS[preset]._replace(sinkhorn_iters=num_iterations, sinkhorn_eps=eps)
    if uses_native() and numerics.sinkhorn == "softmax_eps":
        return plain.native_sinkhorn(input_logits, num_iterations, eps)
    if uses_native():
        wide = input_logits.to(require.full(input_logits))
        return plain.exp_sinkhorn(wide, num_iterations, eps, numerics.sinkhorn).to(input_logits.dtype)
    return weft.sinkhorn(input_logits, numerics).to(input_logits.dtype)


def h_post_bda(
    preset: str, h_res: Tensor, original_residual: Tensor, h_post: Tensor, x: Tensor, bias: Tensor | None
) -> Tensor:
    check.merge("fused_h_post_bda", h_res, original_residual, h_post, x, bias)
    numerics = PRESETS[preset]
    if uses_native():
        mix = h_res.mT if numerics.apply == "in_out" else h_res
        return plain.merge(mix, original_residual, h_post, x, bias, 0.0, False)
    return weft.post(original_residual, x.to(original_residual.dtype), h_post, h_res, bias, numerics=numerics)


# ---- bias, dropout, add ------------------------------------------------------------------------------------


def get_bias_dropout_add(training: bool, fused: bool, mhc_recompute_manager=None) -> Callable:
    """A function ((x, bias) or x, residual, prob) -> residual + dropout(x + bias). With a manager every call is an
    operation that the manager discards and replays; the function may then be called any number of times."""

    def compute(x: Tensor, bias: Tensor | None, residual: Tensor, prob: float) -> Tensor:
        x = x.to(residual.dtype)
        if bias is not None:
            x = x + bias.to(residual.dtype)
        return residual + nn.functional.dropout(x, prob, training)

    def bias_dropout_add(x_with_bias, residual: Tensor, prob: float) -> Tensor:
        x, bias = x_with_bias if isinstance(x_with_bias, tuple) else (x_with_bias, None)
        require.tensor("bias_dropout_add", "x", x)
        require.shape("bias_dropout_add", "residual", residual, x.shape)
        if not 0 <= prob < 1:
            raise ValueError(f"bias_dropout_add: prob: expected 0 <= prob < 1, got {prob}")
        return run(mhc_recompute_manager, compute, x, bias, residual, prob)

    return bias_dropout_add


def run(manager, function: Callable, *args):
    """function(*args), as a discardable operation where there is a manager."""
    if manager is None:
        return function(*args)
    checkpoint = CheckpointWithoutOutput
    if type(manager).__module__.split(".")[0] == "megatron":  # a manager takes operations of its own kind only
        from megatron.core.tensor_parallel.random import CheckpointWithoutOutput as checkpoint
    return checkpoint(ckpt_manager=manager).checkpoint(function, *args)
