# SPDX-License-Identifier: Apache-2.0
"""The front of a Gated DeltaNet layer, its gated norm, and the layer itself, as modules."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from .gdn import (
    DEFAULTS,
    OUTPUT_GATES,
    GdnHeads,
    GdnOptions,
    GdnPre,
    GdnSections,
    gdn_norm,
    gdn_pre,
    gdn_pre_step,
    gdn_rule,
    gdn_rule_step,
)
from .numerics import choice


class GatedDeltaFront(nn.Module):
    """What stands between the input projection of a Gated DeltaNet layer and the gated delta rule.

    Parameters: conv_weight [C, W], conv_bias [C] with bias=True, a_log [Hv] and dt_bias [Hv], which are fp32 unless
    gate_dtype says otherwise. C = heads.channels; the projection has heads.columns columns."""

    def __init__(
        self,
        heads: GdnHeads | tuple[int, int, int, int],
        width: int = 4,
        *,
        bias: bool = False,
        options: GdnOptions = DEFAULTS,
        repeat: bool = True,
        gate: str = "copy",
        beta_dtype: torch.dtype | None = None,
        main_grad: bool = False,
        device=None,
        dtype: torch.dtype = torch.float32,
        gate_dtype: torch.dtype = torch.float32,
    ):
        super().__init__()
        self.heads = GdnHeads(*heads)
        if min(self.heads) < 1 or self.heads.value_heads % self.heads.key_heads:
            raise ValueError(
                "GatedDeltaFront: heads: expected sizes of at least 1 and value heads that are a multiple of the key"
                f" heads, got {tuple(self.heads)}"
            )
        options.packed()  # a wrong name is an error here, not in the first step
        self.width, self.options, self.main_grad = width, options, main_grad
        self.results = {"options": options, "repeat": repeat, "gate": gate, "beta_dtype": beta_dtype}
        channels = self.heads.channels
        self.conv_weight = nn.Parameter(torch.empty(channels, width, device=device, dtype=dtype))
        self.conv_bias = nn.Parameter(torch.empty(channels, device=device, dtype=dtype)) if bias else None
        self.a_log = nn.Parameter(torch.empty(self.heads.value_heads, device=device, dtype=gate_dtype))
        self.dt_bias = nn.Parameter(torch.empty(self.heads.value_heads, device=device, dtype=gate_dtype))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """A depthwise convolution's usual start; exp(a_log) between 1 and 16; a step softplus(dt_bias) between 0.001
        and 0.1, evenly on a logarithmic scale."""
        bound = self.width**-0.5
        self.conv_weight.uniform_(-bound, bound)
        if self.conv_bias is not None:
            self.conv_bias.uniform_(-bound, bound)
        self.a_log.copy_(torch.empty_like(self.a_log, dtype=torch.float32).uniform_(1, 16).log())
        step = torch.empty_like(self.dt_bias, dtype=torch.float32).uniform_(math.log(1e-3), math.log(0.1)).exp()
        self.dt_bias.copy_(step + torch.log(-torch.expm1(-step)))

    def extra_repr(self) -> str:
        return f"{', '.join(f'{k}={v}' for k, v in self.heads._asdict().items())}, width={self.width}"

    def forward(
        self,
        proj: Tensor | GdnSections,
        cu_seqlens: Tensor | None = None,
        state: Tensor | None = None,
        final_state: bool = False,
    ) -> GdnPre:
        """`gdn_pre` with this module's parameters."""
        return gdn_pre(
            proj,
            *self._parameters_of_the_call(),
            heads=self.heads,
            cu_seqlens=cu_seqlens,
            state=state,
            final_state=final_state,
            main_grad=self.main_grad,
            **self.results,
        )

    def step(
        self,
        proj: Tensor | GdnSections,
        state: Tensor,
        state_index: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> GdnPre:
        """`gdn_pre_step` with this module's parameters: state is updated in place. Without gradients."""
        with torch.no_grad():
            return gdn_pre_step(
                proj,
                *self._parameters_of_the_call(),
                state=state,
                state_index=state_index,
                heads=self.heads,
                cu_seqlens=cu_seqlens,
                **self.results,
            )

    def new_state(self, rows: int, dtype: torch.dtype | None = None) -> Tensor:
        """A cache of states [rows, C, W - 1] for `step`, of zeros."""
        dtype = self.conv_weight.dtype if dtype is None else dtype
        return self.conv_weight.new_zeros((rows, self.heads.channels, max(1, self.width - 1)), dtype=dtype)

    def _parameters_of_the_call(self) -> tuple:
        return self.conv_weight, self.a_log, self.dt_bias, self.conv_bias


class GatedRMSNorm(nn.Module):
    """The norm after the gated delta rule, with the output gate: `gdn_norm`. Parameter: weight [C], ones at first; none
    with affine=False."""

    def __init__(
        self,
        channels: int,
        eps: float = 1e-6,
        *,
        gate: str = "silu",
        affine: bool = True,
        main_grad: bool = False,
        device=None,
        dtype: torch.dtype = torch.float32,
    ):
        super().__init__()
        if channels < 1:
            raise ValueError(f"GatedRMSNorm: channels: expected at least 1, got {channels}")
        choice("GatedRMSNorm: gate", gate, OUTPUT_GATES)
        self.channels, self.eps, self.gate, self.main_grad = channels, eps, gate, main_grad
        self.weight = nn.Parameter(torch.ones(channels, device=device, dtype=dtype)) if affine else None

    def reset_parameters(self) -> None:
        if self.weight is not None:
            nn.init.ones_(self.weight)

    def extra_repr(self) -> str:
        return f"{self.channels}, eps={self.eps}, gate={self.gate!r}, affine={self.weight is not None}"

    def forward(self, o: Tensor, z: Tensor) -> Tensor:
        """o and z are rows [..., C]."""
        return gdn_norm(o, z, self.weight, self.eps, gate=self.gate, main_grad=self.main_grad)


class GdnCache(NamedTuple):
    """States of one layer for decoding: a row for each request, of constant size. Rows of zeros are those of requests that
    have not begun."""

    conv: Tensor  # [rows, C, W - 1]: the last rows of q, k, v that the convolution has seen
    rule: Tensor  # [rows, Hv, Dk, Dv]

    def clear(self, rows: Tensor) -> None:
        """Makes rows those of new requests."""
        self.conv[rows] = 0
        self.rule[rows] = 0


class GatedDeltaNet(nn.Module):
    """A Gated DeltaNet layer: input projection, `gdn_pre`, `gdn_rule`, `gdn_norm`, output projection.

    Parameters: in_proj [heads.columns, channels], whose rows are q | k | v | z | b | a, front (a `GatedDeltaFront`), norm (a
    `GatedRMSNorm` of a head) and out_proj [channels, Hv Dv]."""

    def __init__(
        self,
        channels: int,
        heads: GdnHeads | tuple[int, int, int, int],
        width: int = 4,
        *,
        eps: float = 1e-6,
        gate: str = "silu",
        bias: bool = False,
        conv_bias: bool = False,
        options: GdnOptions = DEFAULTS,
        device=None,
        dtype: torch.dtype = torch.float32,
        gate_dtype: torch.dtype = torch.float32,
    ):
        super().__init__()
        if channels < 1:
            raise ValueError(f"GatedDeltaNet: channels: expected at least 1, got {channels}")
        if options.g_chunk or options.g_log2:
            raise ValueError(f"GatedDeltaNet: options: expected g per token in natural logarithms, got {options}")
        made = {"device": device, "dtype": dtype}
        self.front = GatedDeltaFront(
            heads, width, bias=conv_bias, options=options, repeat=False, gate="view", gate_dtype=gate_dtype, **made
        )
        self.channels, self.heads = channels, self.front.heads
        self.in_proj = nn.Linear(channels, self.heads.columns, bias=bias, **made)
        self.norm = GatedRMSNorm(self.heads.value_dim, eps, gate=gate, **made)
        self.out_proj = nn.Linear(self.heads.value_heads * self.heads.value_dim, channels, bias=bias, **made)

    def new_cache(self, rows: int, dtype: torch.dtype | None = None) -> GdnCache:
        """A cache of so many rows, of zeros. dtype is that of the rule's states, torch.float32 (float64 in a layer of
        float64) unless told, or that in which the layer runs: its own, or autocast's."""
        runs, device = self.in_proj.weight.dtype, self.in_proj.weight.device.type
        dtype = _full(runs) if dtype is None else dtype
        if runs != torch.float64 and torch.is_autocast_enabled(device):
            runs = torch.get_autocast_dtype(device)
        self._check_dtype("new_cache: dtype", dtype, runs)
        shape = (rows, self.heads.value_heads, self.heads.key_dim, self.heads.value_dim)
        return GdnCache(self.front.new_state(rows), self.in_proj.weight.new_zeros(shape, dtype=dtype))

    def forward(
        self,
        x: Tensor,
        cu_seqlens: Tensor | None = None,
        cache: GdnCache | None = None,
        rows: Tensor | None = None,
    ) -> Tensor:
        """x [B, S, channels] -> [B, S, channels]; packed sequences are B = 1 and cu_seqlens. With a cache the sequences continue
        from its rows (0, 1, .. unless told) and leave their states there; gradients do not pass through it. Rows are
        distinct and in range; padding is for `step`. On the CPU other rows are a ValueError, on a GPU their values are not
        looked at and the caches of other requests may be lost. With gradients a call with a cache does not go inside an
        activation checkpoint, whose second forward would continue from where the first has ended: a RuntimeError there."""
        if cache is None:
            front = self.front(self.in_proj(x), cu_seqlens)
            o, _ = gdn_rule(*_of_the_rule(front), cu_seqlens=cu_seqlens, head_map=self.front.options.head_map)
            return self._finish(o, front.gate)
        if torch.is_grad_enabled() and not torch.compiler.is_compiling() and torch._C._current_graph_task_id() >= 0:
            raise RuntimeError(
                "GatedDeltaNet: cache: expected no activation checkpoint round a call with a cache, got its second forward"
            )
        rows = self._check_rows(cache, rows, len(x) if cu_seqlens is None else len(cu_seqlens) - 1)
        conv, rule = cache.conv[rows], cache.rule[rows].to(_full(x.dtype))
        front = self.front(self.in_proj(x), cu_seqlens, state=conv, final_state=True)
        o, final = gdn_rule(
            *_of_the_rule(front),
            cu_seqlens=cu_seqlens,
            state=rule,
            final_state=True,
            head_map=self.front.options.head_map,
        )
        with torch.no_grad():
            cache.conv[rows] = front.final_state.detach()
            cache.rule[rows] = final.detach().to(cache.rule.dtype)
        return self._finish(o, front.gate)

    def step(self, x: Tensor, cache: GdnCache, rows: Tensor | None = None, cu_seqlens: Tensor | None = None) -> Tensor:
        """The next few tokens of each request, x [B, S, channels], or packed: the cache is updated in place, row -1 is padding
        and gives what the output projection makes of zeros. Without gradients."""
        with torch.no_grad():
            proj = self.in_proj(x)
            # The cache of the convolution moves on first: what the rule would refuse is refused before it.
            self._check_cache(cache)
            self._check_dtype("cache.rule", cache.rule.dtype, proj.dtype)
            front = self.front.step(proj, cache.conv, rows, cu_seqlens)
            o, _ = gdn_rule_step(
                *_of_the_rule(front),
                state=cache.rule,
                state_index=rows,
                cu_seqlens=cu_seqlens,
                head_map=self.front.options.head_map,
            )
            return self._finish(o, front.gate)

    def _check_cache(self, cache: GdnCache) -> None:
        want = (len(cache.conv), self.heads.value_heads, self.heads.key_dim, self.heads.value_dim)
        if tuple(cache.rule.shape) != want or cache.rule.device != cache.conv.device:
            raise ValueError(
                f"GatedDeltaNet: cache.rule: expected {list(want)} on {cache.conv.device}, as cache.conv has rows, got"
                f" {list(cache.rule.shape)} on {cache.rule.device}"
            )

    @staticmethod
    def _check_dtype(what: str, dtype: torch.dtype, runs: torch.dtype) -> None:
        if dtype not in (_full(runs), runs):
            names = " or ".join(dict.fromkeys((str(_full(runs)), str(runs))))
            raise ValueError(f"GatedDeltaNet: {what}: expected {names}, got {dtype}")

    def _check_rows(self, cache: GdnCache, rows: Tensor | None, sequences: int) -> Tensor:
        """The rows of a call with a cache, one for each sequence; values are looked at where that waits for no device."""
        self._check_cache(cache)
        count = len(cache.conv)
        if rows is None:
            if sequences > count:
                raise ValueError(f"GatedDeltaNet: cache: expected a row for each of {sequences} sequences, got {count}")
            return torch.arange(sequences, device=cache.conv.device)
        if rows.dtype not in (torch.int32, torch.int64) or tuple(rows.shape) != (sequences,):
            raise ValueError(
                f"GatedDeltaNet: rows: expected int32 or int64 [{sequences}], got {rows.dtype} {list(rows.shape)}"
            )
        if rows.device.type == "cpu" and not torch.compiler.is_compiling():
            taken: set[int] = set()
            for k, row in enumerate(rows.tolist()):
                if not 0 <= row < count:
                    raise ValueError(f"GatedDeltaNet: rows[{k}]: expected 0 to {count - 1}, got {row}")
                if row in taken:
                    raise ValueError(f"GatedDeltaNet: rows[{k}]: expected a row of its own, got {row} again")
                taken.add(row)
        return rows

    def _finish(self, o: Tensor, z: Tensor | None) -> Tensor:
        return self.out_proj(self.norm(o, z).flatten(-2))


def _of_the_rule(front: GdnPre) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return front.query, front.key, front.value, front.beta, front.g


def _full(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32
