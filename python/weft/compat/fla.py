# SPDX-License-Identifier: Apache-2.0
"""flash-linear-attention's short convolution, l2 norm and gate of Gated DeltaNet over weft (fla.modules.conv,
fla.modules.l2norm, fla.ops.gated_delta_rule.gate).

Conventions: x is [B, T, D], or [1, T, D] with cu_seqlens; weight is [D, W], its last tap meets the current token; a
state is [N, D, W], of which the oldest column never meets a tap; the eps of the norm is inside the root; g is in
natural logarithms. Arithmetic is fp32, with one rounding where a result is stored.

Arguments without a meaning here: backend, chunk_indices, cu_seqlens_cpu. With the projection row of a whole layer at
hand, weft.torch.gdn_pre does all of this in one pass.

Slower than it could be: causal_conv1d_update, and ShortConvolution with one token a sequence, copy the weight and the
whole state on every call (weft.torch.gdn_pre_step works in place), and ShortConvolution without gradients reads
cu_seqlens on the host, which waits for the device."""

import torch
from torch import Tensor, nn

from weft.compat import _require as require
from weft.torch import GdnOptions, GdnSections, gdn_pre, rmsnorm
from weft.torch.grads import any_takes_part, deposit, lend

__all__ = [
    "L2Norm",
    "ShortConvolution",
    "causal_conv1d",
    "causal_conv1d_update",
    "fused_gdn_gate",
    "l2_norm",
    "l2norm",
]

_ACTIVATIONS = {None: "linear", "silu": "silu", "swish": "silu"}
_MAX_DIM, _MAX_HEADS = 1024, 4096
_PADDING = 2  # channels of the query and the key that a call for values alone still has


# ---- short convolution -------------------------------------------------------------------------------------


def causal_conv1d(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool | None = False,
    activation: str | None = None,
    backend: str | None = "triton",
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    cp_context=None,
    **kwargs,
) -> tuple[Tensor, Tensor | None]:
    """activation(causal depthwise convolution of x + bias) + residual, and the state [N, D, W] after the last token,
    or None. Trailing dimensions of x count as one."""
    op = "causal_conv1d"
    if cp_context is not None:
        raise NotImplementedError(f"{op}: cp_context: expected None: give the other rank's rows as initial_state")
    channels, width = _taps(op, weight, bias, activation)
    weight, bias = deposit(weight), None if bias is None else deposit(bias)
    require.tensor(op, "x", x, 3)
    rows = x.flatten(2)
    require.shape(op, "x", rows, (*rows.shape[:2], channels))
    sequences = rows.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    if initial_state is not None:
        require.shape(op, "initial_state", initial_state, (sequences, channels, width))
    y, state = _convolve(rows, weight, bias, initial_state, activation, cu_seqlens, bool(output_final_state))
    y = y.view(x.shape)
    if residual is not None:
        require.shape(op, "residual", residual, x.shape)
        y = y + residual
    return y, state


def causal_conv1d_update(
    x: Tensor,
    cache: Tensor,
    residual: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    activation: str | None = None,
) -> tuple[Tensor, Tensor]:
    """One token for each of N sequences, x [N, D], [N, 1, D] or [1, N, D]; cache [N, D, W] is updated in place and
    returned. Forward only. The bits are those of causal_conv1d on the whole sequence."""
    op = "causal_conv1d_update"
    channels, width = _taps(op, weight, bias, activation)
    require.tensor(op, "cache", cache)
    require.shape(op, "cache", cache, (cache.shape[0], channels, width))
    require.numel(op, "x", x, cache.shape[0] * channels)
    with torch.no_grad():
        y, state = _convolve(x.reshape(-1, 1, channels), weight, bias, cache, activation, None, True)
        cache.copy_(state)
        y = y.view(x.shape)
        if residual is not None:
            require.shape(op, "residual", residual, x.shape)
            y = y + residual
    return y, cache


class ShortConvolution(nn.Conv1d):
    """A depthwise causal convolution with activation. Parameters: weight [D, 1, W], bias [D], as nn.Conv1d has them."""

    def __init__(
        self,
        hidden_size: int,
        kernel_size: int,
        bias: bool = False,
        activation: str | None = "silu",
        backend: str | None = "triton",
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
        **kwargs,
    ):
        super().__init__(
            hidden_size,
            hidden_size,
            kernel_size,
            groups=hidden_size,
            bias=bias,
            padding=kernel_size - 1,
            device=device,
            dtype=dtype,
        )
        _activation("ShortConvolution", activation)
        self.hidden_size, self.activation, self.backend = hidden_size, activation, backend

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, activation={self.activation}"

    def forward(
        self,
        x: Tensor,
        residual: Tensor | None = None,
        mask: Tensor | None = None,
        cache: Tensor | None = None,
        output_final_state: bool = False,
        cu_seqlens: Tensor | None = None,
        chunk_indices: Tensor | None = None,
        **kwargs,
    ) -> tuple[Tensor, Tensor | None]:
        """x [B, T, D] -> [B, T, D] and the state [N, D, W] or None. A call without autograd that has one token for each
        sequence updates cache in place; others leave it alone. mask [B, T] is multiplied with x."""
        require.tensor("ShortConvolution", "x", x, 3)
        if mask is not None:
            if cu_seqlens is not None:
                raise ValueError("ShortConvolution: mask: expected None beside cu_seqlens, got both")
            x = x * mask.unsqueeze(-1).to(x.dtype)
        sequences = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        single = not torch.is_grad_enabled() and x.shape[0] * x.shape[1] == sequences
        if single and (cu_seqlens is None or bool((cu_seqlens.diff() == 1).all())):
            return self.step(x, residual, cache, output_final_state, cu_seqlens)
        return causal_conv1d(
            x,
            deposit(self.weight).squeeze(1),
            self.bias,
            residual,
            initial_state=cache,
            output_final_state=output_final_state,
            activation=self.activation,
            cu_seqlens=cu_seqlens,
            **kwargs,
        )

    def step(
        self,
        x: Tensor,
        residual: Tensor | None,
        cache: Tensor | None,
        output_final_state: bool = False,
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """One token for each sequence; cache is updated in place."""
        if cache is None:
            cache = x.new_zeros(x.shape[0] * x.shape[1], self.hidden_size, self.kernel_size[0])
        y, cache = causal_conv1d_update(x, cache, residual, self.weight.squeeze(1), self.bias, self.activation)
        return y, cache if output_final_state else None

    @property
    def state_size(self) -> int:
        """Numbers in the state of one sequence."""
        return self.hidden_size * self.kernel_size[0]


def _activation(op: str, activation: str | None) -> str:
    if activation not in _ACTIVATIONS:
        raise ValueError(f"{op}: activation: expected None, silu or swish, got {activation!r}")
    return _ACTIVATIONS[activation]


def _taps(op: str, weight: Tensor | None, bias: Tensor | None, activation: str | None) -> tuple[int, int]:
    _activation(op, activation)
    if weight is None:
        raise NotImplementedError(f"{op}: weight: expected a tensor, got None")
    require.tensor(op, "weight", weight)
    if weight.ndim != 2:
        raise ValueError(f"{op}: weight: expected (D, W), got {tuple(weight.shape)}")
    if bias is not None:
        require.shape(op, "bias", bias, weight.shape[:1])
    return tuple(weight.shape)


def _convolve(x, weight, bias, state, activation, cu_seqlens, final: bool) -> tuple[Tensor, Tensor | None]:
    """x [B, T, D] as the values of gdn_pre, beside a query, a key and gates of nothing."""
    batch, steps, channels = x.shape
    dim = _head_dim(channels)
    heads = channels // dim
    nothing = x.new_zeros(1)
    unit, gates = nothing.expand(batch, steps, 1, 1), nothing.expand(batch, steps, heads)
    out = gdn_pre(
        GdnSections(unit, unit, x.unflatten(2, (heads, dim)), None, gates, gates),
        _padded(weight),
        nothing.to(require.full(x)).expand(heads),
        bias=None if bias is None else _padded(bias),
        state=None if state is None else torch.cat([state.new_zeros(len(state), _PADDING, state.shape[2]), state], 1),
        cu_seqlens=cu_seqlens,
        final_state=final,
        history=weight.shape[1],
        options=GdnOptions(activation=_ACTIVATIONS[activation], l2norm=False),
        repeat=False,
        gate="none",
    )
    return out.value.flatten(2), out.final_state[:, _PADDING:] if final else None


def _padded(parameter: Tensor) -> Tensor:
    return torch.cat([parameter.new_zeros(_PADDING, *parameter.shape[1:]), parameter])


def _head_dim(channels: int) -> int:
    """How many channels to call a head: wide ones, of a size that kernels like where that is possible."""
    for dim in (128, 256, 64):
        if channels % dim == 0 and channels // dim <= _MAX_HEADS:
            return dim
    dim = next(d for d in range(min(channels, _MAX_DIM), 0, -1) if channels % d == 0)
    if channels // dim > _MAX_HEADS:
        raise NotImplementedError(
            f"causal_conv1d: x: expected up to {_MAX_HEADS} groups of up to {_MAX_DIM} channels, got {channels}"
        )
    return dim


# ---- l2 norm -----------------------------------------------------------------------------------------------


def l2norm(x: Tensor, eps: float = 1e-6, output_dtype: torch.dtype | None = None) -> Tensor:
    """x / sqrt(sum(x^2) + eps) over the last dimension."""
    require.tensor("l2norm", "x", x, 1)
    output_dtype = x.dtype if output_dtype is None else output_dtype
    x = x.to(torch.promote_types(x.dtype, output_dtype))
    # An RMS norm is of mean squares: the same function with the eps and the result divided by what the mean is.
    channels = x.shape[-1]
    gain = torch.full((channels,), channels**-0.5, dtype=require.full(x), device=x.device)
    return rmsnorm(x.contiguous(), gain, eps / channels).to(output_dtype)


l2_norm = l2norm


class L2Norm(nn.Module):
    """l2norm as a module."""

    def __init__(self, eps: float = 1e-6, output_dtype: torch.dtype | None = None):
        super().__init__()
        self.eps, self.output_dtype = eps, output_dtype

    def forward(self, x: Tensor) -> Tensor:
        return l2norm(x, self.eps, self.output_dtype)


# ---- gate --------------------------------------------------------------------------------------------------


def fused_gdn_gate(
    g: Tensor, A_log: Tensor, dt_bias: Tensor | None = None, output_dtype: torch.dtype = torch.float32
) -> Tensor:
    """-exp(A_log) softplus(g + dt_bias): g [..., HV], A_log and dt_bias of HV elements."""
    op = "fused_gdn_gate"
    require.tensor(op, "g", g, 1)
    heads = g.shape[-1]
    require.numel(op, "A_log", A_log, heads)
    if dt_bias is not None:
        require.numel(op, "dt_bias", dt_bias, heads)
        dt_bias = lend(dt_bias, _flat)
    decay = lend(A_log, _flat)
    raw = g.reshape(1, -1, heads)
    nothing = g.new_zeros(1)
    unit, value = (nothing.expand(1, raw.shape[1], n, 1) for n in (1, heads))
    out = gdn_pre(
        GdnSections(unit, unit, value, None, nothing.expand(raw.shape), raw),
        nothing.expand(_PADDING + heads, 1),
        decay,
        dt_bias,
        options=GdnOptions(activation="linear", l2norm=False),
        repeat=False,
        gate="none",
        main_grad=any_takes_part(decay, dt_bias),
    )
    return out.g.view(g.shape).to(output_dtype)


def _flat(t: Tensor) -> Tensor:
    return t.reshape(-1)
