# SPDX-License-Identifier: Apache-2.0
"""Megatron-LM's hyper connections over weft.

    HyperConnectionModule                      for the layer spec of branch main: same parameters, same methods
    fused_*, native_*, learned_output_contract for branch dev (megatron.core.fusions.fused_mhc_kernels and
                                               megatron.core.transformer.hyper_connection), and `bind`, which
                                               puts them into the slots of dev's or dsv4's own module
    get_bias_dropout_add                       with dev's mhc_recompute_manager
    build_mhc_recompute_layer_plan, finalize_mhc_recompute_layer    as in weft.torch

Where Megatron is installed the module derives from Megatron's, elsewhere from a small base here with the same
constructor, so a checkpoint fits either.

The branches do not compute the same function. main mixes y[i] = sum_j H_res[i, j] x[j], dev the transpose; dev
starts Sinkhorn with a softmax and adds 1e-6 to H_pre. The class follows main, the free functions follow dev.
Both differ from Megatron in one point: coefficients are fp32 all the way, whatever the activations are.

native_* are plain PyTorch. use_native(True), or WEFT_COMPAT_NATIVE=1 in the environment, makes everything else
here run as plain PyTorch too, to tell a problem of the kernels from one of the model.

The argument `fused` is accepted everywhere and ignored: there is one way to compute, and it is fused."""

import functools
import os
from collections.abc import Callable

import torch
from torch import Tensor, nn

from weft.compat import _require as require
from weft.torch import (
    CheckpointWithoutOutput,
    Numerics,
    build_mhc_recompute_layer_plan,
    finalize_mhc_recompute_layer,
)
from weft.torch import functional as weft

try:
    from megatron.core.transformer.hyper_connection import HyperConnectionModule as _MegatronModule
except ImportError:
    _MegatronModule = None

__all__ = [
    "HyperConnectionModule",
    "SinkhornKnopp",
    "bind",
    "build_mhc_recompute_layer_plan",
    "finalize_mhc_recompute_layer",
    "fused_h_aggregate",
    "fused_h_aggregate_into",
    "fused_h_post_bda",
    "fused_proj_rms",
    "fused_proj_rms_compute_h",
    "fused_sinkhorn",
    "get_bias_dropout_add",
    "learned_output_contract",
    "native_fused_add_3",
    "native_h_aggregate",
    "native_h_aggregate_into",
    "native_h_post_bda",
    "native_proj_rms",
    "native_proj_rms_compute_h",
    "native_sinkhorn",
    "use_native",
    "uses_native",
]

# Looked up once: torch.compile cannot follow a call into the library's C interface.
_PRESETS = {name: Numerics.preset(name) for name in ("megatron_main", "megatron_dev", "megatron_dsv4")}
_EPS = 1e-6  # of the RMS norm, of Sinkhorn and of dev's H_pre: constants in Megatron too
_native = os.environ.get("WEFT_COMPAT_NATIVE", "0") not in ("", "0")


def use_native(enabled: bool = True) -> None:
    """True: plain PyTorch from here on; False: weft."""
    global _native
    _native = bool(enabled)


def uses_native() -> bool:
    """Whether plain PyTorch is used."""
    return _native


# ---- plain PyTorch -----------------------------------------------------------------------------------------
# Written as the equations are: wide arithmetic, one rounding where a result is stored.


def native_sinkhorn(input_logits: Tensor, num_iterations: int, eps: float = 1e-6) -> Tensor:
    """dev's rule: softmax of the rows plus eps, a column step, then rounds of rows and columns."""
    _positive("native_sinkhorn", num_iterations)
    a = input_logits.to(require.full(input_logits)).softmax(-1) + eps
    a = a / (a.sum(-2, keepdim=True) + eps)
    for _ in range(num_iterations - 1):
        a = a / (a.sum(-1, keepdim=True) + eps)
        a = a / (a.sum(-2, keepdim=True) + eps)
    return a.to(input_logits.dtype)


def native_h_aggregate(x: Tensor, h_pre: Tensor) -> Tensor:
    """sum_j h_pre[j] x[j]: x [..., n, C], h_pre [..., n] -> [..., C]."""
    _streams_and("native_h_aggregate", x, h_pre=(h_pre, 1))
    full = require.full(x)
    return (h_pre.to(full).unsqueeze(-1) * x.to(full)).sum(-2).to(x.dtype)


def native_h_aggregate_into(x: Tensor, h_pre: Tensor, out: Tensor) -> Tensor:
    """native_h_aggregate, stored in out."""
    _check_into("native_h_aggregate_into", x, out)
    return _store(out, native_h_aggregate(x, h_pre))


def native_h_post_bda(
    h_res: Tensor, original_residual: Tensor, h_post: Tensor, x: Tensor, bias: Tensor | None
) -> Tensor:
    """dev's merge: h_res^T residual + h_post (x + bias); original_residual [s, b, n, C], x [s, b, C]."""
    _check_merge("native_h_post_bda", h_res, original_residual, h_post, x, bias)
    return _native_merge(h_res.mT, original_residual, h_post, x, bias, 0.0, False)


def native_proj_rms(x: Tensor, weight: Tensor, eps: float = 1e-6) -> tuple[Tensor, Tensor]:
    """x [M, K], weight [N, K] -> x weight^T [M, N] and 1/(rms + eps) [M, 1], in x's dtype."""
    _check_projection("native_proj_rms", x, weight)
    wide = x.to(require.full(x))
    r = 1 / (_rms(wide.square().mean(-1, keepdim=True)) + eps)
    return (wide @ weight.to(wide.dtype).T).to(x.dtype), r.to(x.dtype)


def native_proj_rms_compute_h(
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
    """What fused_proj_rms_compute_h computes."""
    alpha = _check_gates("native_proj_rms_compute_h", x, weight, alpha_pre, alpha_post, alpha_res, bias, n)
    wide = x.to(require.full(x))
    rms = _rms(wide.square().mean(-1, keepdim=True))
    h = wide @ weight.to(wide.dtype).T / (rms + eps)
    pre, post, logits = _native_gates(h, alpha.to(wide.dtype), bias.to(wide.dtype), n, compute_h_eps)
    return pre, post, logits, rms


def native_fused_add_3(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """a + b + c, rounded once."""
    for name, value in (("a", a), ("b", b), ("c", c)):
        require.shape("native_fused_add_3", name, value, a.shape)
    full = require.full(a)
    return (a.to(full) + b.to(full) + c.to(full)).to(a.dtype)


def _native_learned_output_contract(
    hidden_states: Tensor, head_fn: Tensor, base: Tensor, scale: Tensor, n: int, eps: float
) -> Tensor:
    full = require.full(hidden_states)
    wide = hidden_states.to(full)
    inverse = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    gate = torch.sigmoid(scale.to(full) * inverse * (wide @ head_fn.to(full).T) + base.to(full)) + eps
    return (gate.unsqueeze(-1) * wide.unflatten(-1, (n, -1))).sum(-2).to(hidden_states.dtype)


def _native_exp_sinkhorn(logits: Tensor, iterations: int, eps: float, rule: str) -> Tensor:
    """The rules of main (clamp: no divisor is below eps) and of dsv4 (add: eps is added to it)."""
    a = torch.exp(logits - logits.amax(-1, keepdim=True))
    for axis in (-1, -2) * iterations:
        divisor = a.sum(axis, keepdim=True)
        a = a / (divisor.clamp(min=eps) if rule == "clamp" else divisor + eps)
    return a


def _native_gates(h: Tensor, alpha: Tensor, bias: Tensor, n: int, pre_eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """h: normalised projections [..., N]; the logits stay flat."""
    factors = torch.cat([alpha[:1].expand(n), alpha[1:2].expand(n), alpha[2:].expand(n * n)])
    z = h * factors + bias
    pre, post, logits = z.split([n, n, n * n], -1)
    return torch.sigmoid(pre) + pre_eps, 2 * torch.sigmoid(post), logits


def _native_merge(
    mix: Tensor, x: Tensor, post: Tensor, f: Tensor, bias: Tensor | None, p: float, training: bool
) -> Tensor:
    """mix[..., o, i]: what output stream o takes of input stream i."""
    full = require.full(x)
    wide = f.to(full) if bias is None else f.to(full) + bias.to(full)
    branch = nn.functional.dropout(post.to(full).unsqueeze(-1) * wide.unsqueeze(-2), p, training)
    return (mix.to(full) @ x.to(full) + branch).to(x.dtype)


def _rms(mean_square: Tensor) -> Tensor:
    # The root has no derivative at 0; a token of zeros gets the gradient 0 instead of NaN.
    return mean_square.clamp(min=torch.finfo(mean_square.dtype).tiny).sqrt()


# ---- dev: free functions -----------------------------------------------------------------------------------


def fused_sinkhorn(input_logits: Tensor, num_iterations: int, eps: float = 1e-6) -> Tensor:
    """Logits [..., n, n] -> a matrix whose columns sum to one, in the logits' dtype."""
    return _sinkhorn("megatron_dev", input_logits, num_iterations, eps)


def fused_h_aggregate(x: Tensor, h_pre: Tensor) -> Tensor:
    """sum_j h_pre[j] x[j]: x [..., n, C], h_pre [..., n] -> [..., C]."""
    _streams_and("fused_h_aggregate", x, h_pre=(h_pre, 1))
    return native_h_aggregate(x, h_pre) if _native else weft.aggregate(x, h_pre)


def fused_h_aggregate_into(x: Tensor, h_pre: Tensor, out: Tensor) -> Tensor:
    """fused_h_aggregate, stored in out, whose address a captured graph may know. Returned is out's memory with
    the result's history; out itself stays outside of autograd and can be given again."""
    _check_into("fused_h_aggregate_into", x, out)
    return _store(out, fused_h_aggregate(x, h_pre))


def fused_h_post_bda(
    h_res: Tensor, original_residual: Tensor, h_post: Tensor, x: Tensor, bias: Tensor | None
) -> Tensor:
    """h_res^T residual + h_post (x + bias): original_residual [s, b, n, C], x [s, b, C], bias [C] -> [s, b, n, C]."""
    return _h_post_bda("megatron_dev", h_res, original_residual, h_post, x, bias)


def fused_proj_rms(x: Tensor, weight: Tensor, eps: float = 1e-6) -> tuple[Tensor, Tensor]:
    """x [M, K], weight [N, K] -> x weight^T [M, N] and 1/(rms + eps) [M, 1], in x's dtype."""
    if _native:
        return native_proj_rms(x, weight, eps)
    _check_projection("fused_proj_rms", x, weight)
    # The rows need no streams: one of K channels is the same sum.
    h, ms = weft.project(x.unsqueeze(-2), weight)
    return h.to(x.dtype), (1 / (_rms(ms) + eps)).unsqueeze(-1).to(x.dtype)


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
    if _native:
        return native_proj_rms_compute_h(x, weight, alpha_pre, alpha_post, alpha_res, bias, n, eps, compute_h_eps)
    alpha = _check_gates("fused_proj_rms_compute_h", x, weight, alpha_pre, alpha_post, alpha_res, bias, n)
    numerics = _PRESETS["megatron_dev"]._replace(rms_eps=eps, pre_eps=compute_h_eps)
    h, ms = weft.project(x.unflatten(-1, (n, -1)), weight)
    pre, post, logits = weft.scale(h, ms, alpha, bias, numerics)
    return pre, post, logits.flatten(-2), _rms(ms).unsqueeze(-1)


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
    if _native:
        return _native_learned_output_contract(hidden_states, head_fn, base, scale, n, eps)
    streams = hidden_states.unflatten(-1, (n, -1))
    return weft.head(streams, head_fn, scale.reshape(1), base, rms_eps=eps, pre_eps=eps)


def bind(module: nn.Module, preset: str = "megatron_dev") -> nn.Module:
    """Puts weft into the slots of a HyperConnectionModule of branch dev ("megatron_dev"), of dsv4 ("megatron_dsv4")
    or of the 26.04 alpha ("megatron_main"): _sinkhorn_op, _h_aggregate_op, ... The slots carry no dropout."""
    if preset not in _PRESETS:
        raise ValueError(f"bind: preset: expected one of {', '.join(_PRESETS)}, got {preset!r}")
    slots: dict[str, Callable] = {
        "_sinkhorn_op": functools.partial(_sinkhorn, preset),
        "_h_aggregate_op": fused_h_aggregate,
        "_h_aggregate_into_op": fused_h_aggregate_into,
        "_h_post_bda_op": functools.partial(_h_post_bda, preset),
        "_proj_rms_op": fused_proj_rms,
    }
    if _PRESETS[preset].pre_eps:  # the other branches gate by themselves, without an eps
        slots["_proj_rms_compute_h_op"] = fused_proj_rms_compute_h
    found = [name for name in slots if hasattr(module, name)]
    if not found:
        raise ValueError(
            f"bind: module: expected a module with slots such as _sinkhorn_op, got {type(module).__name__}"
        )
    for name in found:
        setattr(module, name, slots[name])
    return module


def _sinkhorn(preset: str, input_logits: Tensor, num_iterations: int, eps: float = 1e-6) -> Tensor:
    op = "fused_sinkhorn"
    require.tensor(op, "input_logits", input_logits, 2)
    require.shape(op, "input_logits", input_logits, (*input_logits.shape[:-1], input_logits.shape[-2]))
    _positive(op, num_iterations)
    numerics = _PRESETS[preset]._replace(sinkhorn_iters=num_iterations, sinkhorn_eps=eps)
    if _native and numerics.sinkhorn == "softmax_eps":
        return native_sinkhorn(input_logits, num_iterations, eps)
    if _native:
        wide = input_logits.to(require.full(input_logits))
        return _native_exp_sinkhorn(wide, num_iterations, eps, numerics.sinkhorn).to(input_logits.dtype)
    return weft.sinkhorn(input_logits, numerics).to(input_logits.dtype)


def _h_post_bda(
    preset: str, h_res: Tensor, original_residual: Tensor, h_post: Tensor, x: Tensor, bias: Tensor | None
) -> Tensor:
    _check_merge("fused_h_post_bda", h_res, original_residual, h_post, x, bias)
    numerics = _PRESETS[preset]
    if _native:
        mix = h_res.mT if numerics.apply == "in_out" else h_res
        return _native_merge(mix, original_residual, h_post, x, bias, 0.0, False)
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
        return _run(mhc_recompute_manager, compute, x, bias, residual, prob)

    return bias_dropout_add


def _run(manager, function: Callable, *args):
    """function(*args), as a discardable operation where there is a manager."""
    if manager is None:
        return function(*args)
    checkpoint = CheckpointWithoutOutput
    if type(manager).__module__.split(".")[0] == "megatron":  # a manager takes operations of its own kind only
        from megatron.core.tensor_parallel.random import CheckpointWithoutOutput as checkpoint
    return checkpoint(ckpt_manager=manager).checkpoint(function, *args)


# ---- main: the module --------------------------------------------------------------------------------------


class SinkhornKnopp:
    """main's Sinkhorn, called as its autograd function is."""

    eps = _EPS

    @staticmethod
    def apply(H_res_logits: Tensor, num_iterations: int) -> Tensor:
        return _sinkhorn("megatron_main", H_res_logits, num_iterations, SinkhornKnopp.eps)


class _LocalModule(nn.Module):
    """The parameters of Megatron's module, for where Megatron is not installed."""

    def __init__(self, config, layer_number: int):
        super().__init__()
        self.config, self.layer_number = config, layer_number
        n = _streams_of(config)
        rows = n * n + 2 * n
        dtype = getattr(config, "params_dtype", torch.float32)
        self.mapping_proj = nn.Linear(n * config.hidden_size, rows, bias=False, dtype=dtype)
        gate = config.mhc_init_gating_factor
        self.alpha_pre = nn.Parameter(torch.full((1,), gate, dtype=dtype))
        self.alpha_post = nn.Parameter(torch.full((1,), gate, dtype=dtype))
        self.alpha_res = nn.Parameter(torch.full((1,), gate, dtype=dtype))
        self.bias = nn.Parameter(torch.zeros(rows, dtype=dtype))
        if getattr(config, "perform_initialization", True):
            nn.init.xavier_uniform_(self.mapping_proj.weight)
        if getattr(config, "sequence_parallel", False):
            for parameter in self.parameters():  # replicas: their gradients are summed over the group
                parameter.sequence_parallel = True


class HyperConnectionModule(_MegatronModule or _LocalModule):
    """One per sub-layer. x: [s, b, n*C], stream after stream. Coefficients are fp32 ([s, b, n] and [s, b, n, n])."""

    def __init__(self, config, layer_number: int):
        n = _streams_of(config)
        if n < 1 or config.hidden_size < 1 or config.mhc_sinkhorn_iterations < 1:
            got = (n, config.hidden_size, config.mhc_sinkhorn_iterations)
            raise ValueError(
                "HyperConnectionModule: config: expected streams, hidden_size and mhc_sinkhorn_iterations of at "
                f"least 1, got {got}"
            )
        super().__init__(config, layer_number)
        self.n, self.hidden_size = n, config.hidden_size
        self.sinkhorn_iterations = config.mhc_sinkhorn_iterations
        if hasattr(self, "_sinkhorn_op"):
            raise NotImplementedError(
                "HyperConnectionModule: megatron: expected branch main, got one with slots (dev or dsv4): use its "
                "own HyperConnectionModule and weft.compat.megatron.bind(module)"
            )

    # Mapping

    def forward(self, hidden_states: Tensor, mhc_recompute_manager=None) -> tuple[Tensor, Tensor, Tensor]:
        """The sub-layer's input [s, b, C], h_res and h_post. Without a manager this is one pass over the streams;
        with one the coefficients are kept and the aggregate is what is discarded."""
        if mhc_recompute_manager is None and not _native:
            x, weight, alpha, bias = self._arguments("forward", hidden_states)
            out = weft.pre(x, weight, alpha, bias, numerics=self._numerics)
            return out.u, out.res, out.post
        h_pre, h_post, h_res = self.compute_mappings(hidden_states)
        return _run(mhc_recompute_manager, self.aggregate, hidden_states, h_pre), h_res, h_post

    def compute_mappings(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """h_pre, h_post, h_res."""
        streams, weight, alpha, bias = self._arguments("compute_mappings", x)
        if _native:
            wide = x.to(require.full(x))
            rms = _rms(wide.square().mean(-1, keepdim=True))
            h = wide @ weight.to(wide.dtype).T / (rms + _EPS)
            h_pre, h_post, logits = _native_gates(h, alpha.to(wide.dtype), bias.to(wide.dtype), self.n, 0.0)
            logits = logits.unflatten(-1, (self.n, self.n))
            return h_pre, h_post, _native_exp_sinkhorn(logits, self.sinkhorn_iterations, _EPS, "clamp")
        h, ms = weft.project(streams, weight)
        return weft.coef(h, ms, alpha, bias, self._numerics)

    def _projection_and_get_norm(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The projection [s, b, N] and 1/(rms + eps) [s, b, 1], in fp32."""
        streams, weight, _, _ = self._arguments("_projection_and_get_norm", x)
        if _native:
            wide = x.to(require.full(x))
            return wide @ weight.to(wide.dtype).T, 1 / (_rms(wide.square().mean(-1, keepdim=True)) + _EPS)
        h, ms = weft.project(streams, weight)
        return h, (1 / (_rms(ms) + _EPS)).unsqueeze(-1)

    def _compute_h(self, proj: Tensor, r: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """h_pre, h_post and the logits [s, b, n*n] of _projection_and_get_norm's results: a few values per token."""
        alpha = torch.cat([self.alpha_pre, self.alpha_post, self.alpha_res])
        return _native_gates(r * proj, alpha.to(proj.dtype), self.bias.to(proj.dtype), self.n, 0.0)

    def aggregate(self, x: Tensor, h_pre: Tensor) -> Tensor:
        """[s, b, n*C] -> [s, b, C]."""
        streams = self._streams("aggregate", x)
        return fused_h_aggregate(streams, h_pre)

    # Merge

    def fused_h_res_h_post_bda(
        self,
        h_res: Tensor,
        original_residual: Tensor,
        h_post: Tensor,
        layer_output_with_bias: tuple[Tensor, Tensor | None],
        dropout_prob: float,
        training: bool,
        fused: bool,
        manager=None,
    ) -> Tensor:
        """h_res residual + dropout(h_post (x + bias)): [s, b, n*C], dropout drawn for every stream by itself."""
        args = (h_res, original_residual, h_post, layer_output_with_bias, dropout_prob, training, fused)
        if manager is None:
            return self._fused_h_res_h_post_bda_native(*args)
        return self._fused_h_res_h_post_bda_with_checkpoint(*args, manager)

    def _fused_h_res_h_post_bda_native(
        self,
        h_res: Tensor,
        original_residual: Tensor,
        h_post: Tensor,
        layer_output_with_bias: tuple[Tensor, Tensor | None],
        dropout_prob: float,
        training: bool,
        fused: bool,
    ) -> Tensor:
        """The merge without a manager: one pass, dropout included. (`native` in the name is Megatron's.)"""
        f, f_bias = layer_output_with_bias
        streams = self._streams("fused_h_res_h_post_bda", original_residual)
        _check_merge("fused_h_res_h_post_bda", h_res, streams, h_post, f, f_bias)
        if not 0 <= dropout_prob < 1:
            raise ValueError(
                f"fused_h_res_h_post_bda: dropout_prob: expected 0 <= dropout_prob < 1, got {dropout_prob}"
            )
        if _native:
            y = _native_merge(h_res, streams, h_post, f, f_bias, dropout_prob, training)
        else:
            y = weft.post(
                streams,
                f.to(streams.dtype),
                h_post,
                h_res,
                f_bias,
                numerics=self._numerics,
                dropout=dropout_prob,
                training=training,
            )
        return y.flatten(-2)

    def _fused_h_res_h_post_bda_with_checkpoint(
        self,
        h_res: Tensor,
        original_residual: Tensor,
        h_post: Tensor,
        layer_output_with_bias: tuple[Tensor, Tensor | None],
        dropout_prob: float,
        training: bool,
        fused: bool,
        manager,
    ) -> Tensor:
        f, f_bias = layer_output_with_bias

        def merge(h_res, original_residual, h_post, f, f_bias):
            return self._fused_h_res_h_post_bda_native(
                h_res, original_residual, h_post, (f, f_bias), dropout_prob, training, fused
            )

        return _run(manager, merge, h_res, original_residual, h_post, f, f_bias)

    # The parts of the merge, for callers that want them one by one: plain PyTorch, the merge above uses neither.

    def apply_h_res(self, h_res: Tensor, residual: Tensor) -> Tensor:
        """h_res residual: [s, b, n*C]."""
        streams = self._streams("apply_h_res", residual)
        _streams_and("apply_h_res", streams, h_res=(h_res, 2))
        full = require.full(streams)
        return (h_res.to(full) @ streams.to(full)).to(residual.dtype).flatten(-2)

    def apply_h_post(
        self, x_with_bias: tuple[Tensor, Tensor | None], h_post: Tensor, manager=None
    ) -> tuple[Tensor, Tensor | None]:
        """h_post x [s, b, n*C] and, where there is a bias, h_post bias [s, b, n*C]: one discardable operation each."""
        x, bias = x_with_bias
        expanded = _run(manager, self._apply_h_post, x, h_post)
        return expanded, None if bias is None else _run(manager, self._apply_h_post, bias, h_post)

    def _apply_h_post(self, x: Tensor, h_post: Tensor) -> Tensor:
        """x [s, b, C], or [C] for all tokens alike."""
        want = (*h_post.shape[:-1], self.hidden_size) if x.ndim > 1 else (self.hidden_size,)
        require.shape("_apply_h_post", "x", x, want)
        full = require.full(x)
        return (h_post.to(full).unsqueeze(-1) * x.to(full).unsqueeze(-2)).to(x.dtype).flatten(-2)

    # Entry and exit

    @staticmethod
    def input_expand(x: Tensor, n: int) -> Tensor:
        """[s, b, C] -> [s, b, n*C]: x in every stream."""
        require.tensor("input_expand", "x", x, 1)
        expanded = x.unsqueeze(-2).expand(*x.shape[:-1], n, -1).contiguous() if _native else weft.expand(x, n)
        return expanded.flatten(-2)

    @staticmethod
    def output_contract(x: Tensor, n: int) -> Tensor:
        """[s, b, n*C] -> [s, b, C]: the mean of the streams."""
        require.tensor("output_contract", "x", x, 1)
        if n < 1 or x.shape[-1] % n:
            raise ValueError(f"output_contract: x: expected a multiple of n = {n} channels, got {x.shape[-1]}")
        streams = x.unflatten(-1, (n, -1))
        if _native:
            return streams.to(require.full(x)).mean(-2).to(x.dtype)
        return weft.contract(streams, "mean")

    @property
    def _numerics(self) -> Numerics:
        return _PRESETS["megatron_main"]._replace(sinkhorn_iters=self.sinkhorn_iterations)

    def _streams(self, op: str, x: Tensor) -> Tensor:
        require.tensor(op, "x", x, 1)
        require.shape(op, "x", x, (*x.shape[:-1], self.n * self.hidden_size))
        return x.unflatten(-1, (self.n, self.hidden_size))

    def _arguments(self, op: str, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        alpha = torch.cat([self.alpha_pre, self.alpha_post, self.alpha_res])
        return self._streams(op, x), self.mapping_proj.weight, alpha, self.bias


def _streams_of(config) -> int:
    for name in ("mhc_num_residual_streams", "num_residual_streams"):  # main, dev
        if hasattr(config, name):
            return getattr(config, name)
    raise AttributeError(
        "HyperConnectionModule: config: expected mhc_num_residual_streams or num_residual_streams, got neither"
    )


# ---- arguments ---------------------------------------------------------------------------------------------


def _positive(op: str, iterations: int) -> None:
    if iterations < 1:
        raise ValueError(f"{op}: num_iterations: expected at least 1, got {iterations}")


def _streams_and(op: str, x: Tensor, **coefficients: tuple[Tensor, int]) -> None:
    """x [..., n, C] and coefficients [..., n] or [..., n, n]."""
    require.tensor(op, "x", x, 2)
    for name, (value, axes) in coefficients.items():
        require.shape(op, name, value, (*x.shape[:-2], *x.shape[-2:-1] * axes))


def _check_merge(op: str, h_res: Tensor, x: Tensor, h_post: Tensor, f: Tensor, bias: Tensor | None) -> None:
    _streams_and(op, x, h_res=(h_res, 2), h_post=(h_post, 1))
    require.shape(op, "layer output", f, (*x.shape[:-2], x.shape[-1]))
    if bias is not None:
        require.shape(op, "bias", bias, x.shape[-1:])


def _check_into(op: str, x: Tensor, out: Tensor) -> None:
    require.tensor(op, "x", x, 2)
    require.shape(op, "out", out, (*x.shape[:-2], x.shape[-1]))
    if out.dtype != x.dtype or out.device != x.device or not out.is_contiguous() or out.requires_grad:
        want = f"contiguous {x.dtype} on {x.device} outside of autograd"
        got = f"{out.dtype} on {out.device}, strides {out.stride()}, requires_grad {out.requires_grad}"
        raise ValueError(f"{op}: out: expected {want}, got {got}")


def _store(out: Tensor, value: Tensor) -> Tensor:
    return out.detach().copy_(value)


def _check_projection(op: str, x: Tensor, weight: Tensor) -> None:
    require.tensor(op, "x", x, 2)
    require.tensor(op, "weight", weight, 2)
    require.shape(op, "weight", weight, (weight.shape[0], x.shape[-1]))


def _check_gates(
    op: str,
    x: Tensor,
    weight: Tensor,
    alpha_pre: Tensor,
    alpha_post: Tensor,
    alpha_res: Tensor,
    bias: Tensor,
    n: int,
) -> Tensor:
    _check_projection(op, x, weight)
    require.shape(op, "weight", weight, (n * n + 2 * n, x.shape[-1]))
    require.shape(op, "bias", bias, weight.shape[:1])
    if n < 1 or x.shape[-1] % n:
        raise ValueError(f"{op}: x: expected a multiple of n = {n} channels, got {x.shape[-1]}")
    for name, alpha in (("alpha_pre", alpha_pre), ("alpha_post", alpha_post), ("alpha_res", alpha_res)):
        require.numel(op, name, alpha, 1)
    return torch.cat([alpha_pre.reshape(1), alpha_post.reshape(1), alpha_res.reshape(1)])
