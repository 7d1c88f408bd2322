# SPDX-License-Identifier: Apache-2.0
"""The module of branch main, computed by weft."""

import torch
from torch import Tensor, nn

from weft.compat import _require as require
from weft.torch import Numerics
from weft.torch import functional as weft
from weft.torch.grads import any_takes_part, deposit
from weft.torch.joins import view_of

from . import _arguments as check
from . import _native as plain
from ._fused import PRESETS, fused_h_aggregate, run, sinkhorn
from ._switch import uses_native

try:
    from megatron.core.transformer.hyper_connection import HyperConnectionModule as _MegatronModule
except ImportError:
    _MegatronModule = None

_EPS = 1e-6  # of the RMS norm, of Sinkhorn and of dev's H_pre: constants in Megatron too


class SinkhornKnopp:
    """main's Sinkhorn, called as its autograd function is."""

    eps = _EPS

    @staticmethod
    def apply(H_res_logits: Tensor, num_iterations: int) -> Tensor:
        return sinkhorn("megatron_main", H_res_logits, num_iterations, SinkhornKnopp.eps)


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
        """The sub-layer's input [s, b, C], h_res and h_post. Without a manager this is weft.torch.pre, a fused kernel
        over the streams where its conditions hold; with one the coefficients are kept and the aggregate is what is discarded."""
        if mhc_recompute_manager is None and not uses_native():
            x, weight, alpha, bias = self._arguments("forward", hidden_states)
            main_grad = any_takes_part(weight, bias)
            out = weft.pre(x, weight, alpha, bias, numerics=self._numerics, main_grad=main_grad)
            return out.u, out.res, out.post
        h_pre, h_post, h_res = self.compute_mappings(hidden_states)
        return run(mhc_recompute_manager, self.aggregate, hidden_states, h_pre), h_res, h_post

    def compute_mappings(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """h_pre, h_post, h_res."""
        streams, weight, alpha, bias = self._arguments("compute_mappings", x)
        if uses_native():
            wide = x.to(require.full(x))
            rms = plain.root(wide.square().mean(-1, keepdim=True))
            h = wide @ weight.to(wide.dtype).T / (rms + _EPS)
            h_pre, h_post, logits = plain.gates(h, alpha.to(wide.dtype), bias.to(wide.dtype), self.n, 0.0)
            logits = logits.unflatten(-1, (self.n, self.n))
            return h_pre, h_post, plain.exp_sinkhorn(logits, self.sinkhorn_iterations, _EPS, "clamp")
        h, ms = weft.project(streams, weight, main_grad=any_takes_part(weight))
        return weft.coef(h, ms, alpha, bias, self._numerics, main_grad=any_takes_part(bias))

    def _projection_and_get_norm(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The projection [s, b, N] and 1/(rms + eps) [s, b, 1], in fp32."""
        streams, weight, _, _ = self._arguments("_projection_and_get_norm", x)
        if uses_native():
            wide = x.to(require.full(x))
            return wide @ weight.to(wide.dtype).T, 1 / (plain.root(wide.square().mean(-1, keepdim=True)) + _EPS)
        h, ms = weft.project(streams, weight, main_grad=any_takes_part(weight))
        return h, (1 / (plain.root(ms) + _EPS)).unsqueeze(-1)

    def _compute_h(self, proj: Tensor, r: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """h_pre, h_post and the logits [s, b, n*n] of _projection_and_get_norm's results: a few values per token."""
        return plain.gates(r * proj, self._alpha().to(proj.dtype), deposit(self.bias).to(proj.dtype), self.n, 0.0)

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
        check.merge("fused_h_res_h_post_bda", h_res, streams, h_post, f, f_bias)
        if not 0 <= dropout_prob < 1:
            raise ValueError(
                f"fused_h_res_h_post_bda: dropout_prob: expected 0 <= dropout_prob < 1, got {dropout_prob}"
            )
        if uses_native():
            y = plain.merge(h_res, streams, h_post, f, f_bias, dropout_prob, training)
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

        return run(manager, merge, h_res, original_residual, h_post, f, f_bias)

    # The parts of the merge, for callers that want them one by one: plain PyTorch, the merge above uses neither.

    def apply_h_res(self, h_res: Tensor, residual: Tensor) -> Tensor:
        """h_res residual: [s, b, n*C]."""
        streams = self._streams("apply_h_res", residual)
        check.streams_and("apply_h_res", streams, h_res=(h_res, 2))
        full = require.full(streams)
        return (h_res.to(full) @ streams.to(full)).to(residual.dtype).flatten(-2)

    def apply_h_post(
        self, x_with_bias: tuple[Tensor, Tensor | None], h_post: Tensor, manager=None
    ) -> tuple[Tensor, Tensor | None]:
        """h_post x [s, b, n*C] and, where there is a bias, h_post bias [s, b, n*C]: one discardable operation each."""
        x, bias = x_with_bias
        expanded = run(manager, self._apply_h_post, x, h_post)
        return expanded, None if bias is None else run(manager, self._apply_h_post, bias, h_post)

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
        expanded = x.unsqueeze(-2).expand(*x.shape[:-1], n, -1).contiguous() if uses_native() else weft.expand(x, n)
        return expanded.flatten(-2)

    @staticmethod
    def output_contract(x: Tensor, n: int) -> Tensor:
        """[s, b, n*C] -> [s, b, C]: the mean of the streams."""
        require.tensor("output_contract", "x", x, 1)
        if n < 1 or x.shape[-1] % n:
            raise ValueError(f"output_contract: x: expected a multiple of n = {n} channels, got {x.shape[-1]}")
        streams = x.unflatten(-1, (n, -1))
        if uses_native():
            return streams.to(require.full(x)).mean(-2).to(x.dtype)
        return weft.contract(streams, "mean")

    @property
    def _numerics(self) -> Numerics:
        return PRESETS["megatron_main"]._replace(sinkhorn_iters=self.sinkhorn_iterations)

    def _streams(self, op: str, x: Tensor) -> Tensor:
        require.tensor(op, "x", x, 1)
        require.shape(op, "x", x, (*x.shape[:-1], self.n * self.hidden_size))
        return view_of(x, x.unflatten(-1, (self.n, self.hidden_size)))

    def _arguments(self, op: str, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        weight, bias = self.mapping_proj.weight, self.bias
        if uses_native():
            weight, bias = deposit(weight), deposit(bias)
        return self._streams(op, x), weight, self._alpha(), bias

    def _alpha(self) -> Tensor:
        return torch.cat([deposit(alpha) for alpha in (self.alpha_pre, self.alpha_post, self.alpha_res)])


def _streams_of(config) -> int:
    for name in ("mhc_num_residual_streams", "num_residual_streams"):  # main, dev
        if hasattr(config, name):
            return getattr(config, name)
    raise AttributeError(
        "HyperConnectionModule: config: expected mhc_num_residual_streams or num_residual_streams, got neither"
    )
