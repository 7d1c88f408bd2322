# SPDX-License-Identifier: Apache-2.0
"""flash-linear-attention's gated delta rule, short convolution, l2 norm and gate, computed by weft
(fla.ops.gated_delta_rule, fla.modules.causal_conv1d, fla.modules.norm.l2norm).

Conventions: tokens are [B, T, ...], or [1, T, ...] with cu_seqlens; query and key have H heads, value, g and beta HV, a
multiple of H; g is in natural logarithms; a state of the rule is [N, HV, K, V] in fp32. The weight of a convolution is
[D, W], its last tap meets the current token; a state of it is [N, D, W], of which the oldest column never meets a tap.
The eps of the norm is inside the root. Arithmetic is fp32, with one rounding where a result is stored.

Arguments without a meaning here: backend, chunk_indices, chunk_size, cu_seqlens_cpu; seq_idx beside cu_seqlens. With the
projection row of a whole layer, weft.torch.gdn_pre and weft.torch.gdn_rule do all of this in two calls.

The rule is weft.torch.gdn_rule: on a GPU in chunks of 64 tokens for bf16 with keys of 64 or 128 and values of 64, 128, 192 or
256 channels a head, else token after token. Up to eight tokens for each initial state are weft.torch.gdn_rule_step where there is
nothing to differentiate.
fused_recurrent_gated_delta_rule is the same function as chunk_gated_delta_rule and has gradients, too. Norm and gates that
are asked for "in the kernel" are operators before the rule, with a rounding of query and key in between, as in fla.

causal_conv1d_update, and ShortConvolution without gradients where there are as many tokens as sequences, work on the
state in place and read nothing from the device. Packed, ShortConvolution then updates the cache whatever the lengths
are; fla reads the offsets on the host, and updates it only where every sequence has one token.

Gradients of parameters go into main_grad where these have one (the PyTorch guide)."""

import torch
from torch import Tensor, nn

from weft.compat import _require as require
from weft.torch import (
    GdnHeads,
    GdnOptions,
    GdnSections,
    gdn_norm,
    gdn_pre,
    gdn_pre_step,
    gdn_rule,
    gdn_rule_step,
    rmsnorm,
)
from weft.torch.grads import any_takes_part, deposit, lend

__all__ = [
    "FusedRMSNormGated",
    "L2Norm",
    "ShortConvolution",
    "causal_conv1d",
    "causal_conv1d_update",
    "chunk_gated_delta_rule",
    "fused_gdn_gate",
    "fused_recurrent_gated_delta_rule",
    "l2_norm",
    "l2norm",
]

_ACTIVATIONS = {None: "linear", "silu": "silu", "swish": "silu"}
_NORM_GATES = {"swish": "silu", "silu": "silu", "sigmoid": "sigmoid"}
_MAX_DIM, _MAX_HEADS = 1024, 4096
# Where a few tokens without autograd take the operator for decoding. It works in place, so a state that is to be returned is
# copied first: on a GPU that is less than what the rule for whole sequences costs, on the CPU it is more.
_STEP_ON, _STEP_TOKENS = ("cuda",), 8
# What Hugging Face's layers hand on to the rule and to the convolution: it describes the batch or the outputs of the
# model, and says nothing about the function.
_OF_THE_BATCH = frozenset(
    "cu_seq_lens_q cu_seq_lens_k max_length_q max_length_k seq_idx position_ids num_items_in_batch use_cache is_causal"
    " output_attentions output_hidden_states output_router_logits".split()
)
_PADDING = 2  # channels of the query and the key that a call for values alone still has


# ---- the rule ----------------------------------------------------------------------------------------------


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    cp_context=None,
    **kwargs,
) -> tuple[Tensor, Tensor | None]:
    """q, k [B, T, H, K], v [B, T, HV, V], g and beta [B, T, HV] -> o [B, T, HV, V] and, with output_final_state, the state
    [N, HV, K, V] after the last token ([N, HV, V, K] with state_v_first). Keyword arguments that fla takes beside these:
    use_gate_in_kernel, A_log and dt_bias (g is then the raw input of fused_gdn_gate), chunk_size, and what Hugging
    Face's layers hand on (max_length_q, ...), which means nothing here."""
    op = "chunk_gated_delta_rule"
    if cp_context is not None:
        raise NotImplementedError(f"{op}: cp_context: expected None: give the other rank's state as initial_state")
    raw = {name: kwargs.pop(name, None) for name in ("use_gate_in_kernel", "A_log", "dt_bias")}
    state_v_first = _state_order(op, state_v_first, kwargs)
    kwargs.pop("chunk_size", None)
    _nothing_else(op, kwargs)
    g = _decay(op, g, **raw)
    beta = _strength(op, beta, use_beta_sigmoid_in_kernel, allow_neg_eigval)
    state = (initial_state, output_final_state, state_v_first)
    return _rule(q, k, v, g, beta, scale, use_qk_l2norm_in_kernel, cu_seqlens, *state)


def fused_recurrent_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    gk: Tensor | None = None,
    gv: Tensor | None = None,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    **kwargs,
) -> tuple[Tensor, Tensor | None]:
    """chunk_gated_delta_rule; without g nothing decays, without beta it is 1. Decays by channel (gk, gv) are not served."""
    op = "fused_recurrent_gated_delta_rule"
    for name, value in (("gk", gk), ("gv", gv)):
        if value is not None:
            raise NotImplementedError(f"{op}: {name}: expected None: the rule decays by head, g")
    state_v_first = _state_order(op, state_v_first, kwargs)
    _nothing_else(op, kwargs)
    require.tensor(op, "v", v, 3)
    if g is None and not use_gate_in_kernel:
        g = v.new_zeros(v.shape[:-1], dtype=require.full(v))
    else:
        g = _decay(op, g, use_gate_in_kernel, A_log, dt_bias)
    if beta is None:
        beta = v.new_ones(v.shape[:-1])
    beta = _strength(op, beta, use_beta_sigmoid_in_kernel, allow_neg_eigval)
    state = (initial_state, output_final_state, state_v_first)
    return _rule(q, k, v, g, beta, scale, use_qk_l2norm_in_kernel, cu_seqlens, *state)


def _rule(
    q, k, v, g, beta, scale, normalize, cu_seqlens, state, final: bool, v_first: bool
) -> tuple[Tensor, Tensor | None]:
    if normalize:
        q, k = l2norm(q), l2norm(k)
    full = require.full(v)
    if beta.dtype not in (v.dtype, full):
        beta = beta.to(full)
    if _is_step(q, k, v, g, beta, cu_seqlens, state):
        state = state.to(full, copy=bool(final))
        rows = state.mT if v_first else state
        o, _ = gdn_rule_step(q, k, v, beta, g.to(full), state=rows, scale=scale, update=bool(final))
        return o, state if final else None
    if state is not None:
        state = (state.mT if v_first else state).to(full).contiguous()
    o, after = gdn_rule(
        q, k, v, beta, g.to(full), scale=scale, cu_seqlens=cu_seqlens, state=state, final_state=bool(final)
    )
    return o, after.mT.contiguous() if final and v_first else after


def _is_step(q, k, v, g, beta, cu_seqlens, state) -> bool:
    """A few new tokens for each state, and nothing to differentiate."""
    if state is None or cu_seqlens is not None or v.dim() != 4 or v.shape[1] > _STEP_TOKENS:
        return False
    recorded = torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v, g, beta, state))
    return v.device.type in _STEP_ON and state.dim() == 4 and state.shape[0] == v.shape[0] and not recorded


def _decay(op: str, g: Tensor, use_gate_in_kernel: bool, A_log: Tensor | None, dt_bias: Tensor | None) -> Tensor:
    require.tensor(op, "g", g, 1)
    if not use_gate_in_kernel:
        return g
    if A_log is None:
        raise ValueError(f"{op}: A_log: expected a tensor beside use_gate_in_kernel, got None")
    return fused_gdn_gate(g, A_log, dt_bias, require.full(g))


def _strength(op: str, beta: Tensor, sigmoid: bool, twice: bool) -> Tensor:
    require.tensor(op, "beta", beta)
    if twice and not sigmoid:
        raise ValueError(f"{op}: allow_neg_eigval: expected False without use_beta_sigmoid_in_kernel, got True")
    if not sigmoid:
        return beta
    heads = beta.shape[-1]
    beta, _ = _gates(beta, None, beta.new_zeros(heads, dtype=require.full(beta)), None, 2.0 if twice else 1.0)
    return beta


def _state_order(op: str, v_first: bool, kwargs: dict) -> bool:
    """transpose_state_layout is an older name of state_v_first."""
    older = kwargs.pop("transpose_state_layout", None)
    if older is not None and v_first:
        raise ValueError(f"{op}: transpose_state_layout: expected None beside state_v_first, got both")
    return bool(v_first if older is None else older)


def _nothing_else(op: str, kwargs: dict) -> None:
    for name in kwargs:
        if name not in _OF_THE_BATCH:
            raise TypeError(f"{op}: {name}: expected an argument that weft knows, got another name")


# ---- gated norm --------------------------------------------------------------------------------------------


class FusedRMSNormGated(nn.Module):
    """RMSNorm over the last dimension times weight times silu(g) (swish) or sigmoid(g): weft.torch.gdn_norm. Parameter:
    weight [hidden_size], which elementwise_affine=False leaves out."""

    def __init__(
        self,
        hidden_size: int,
        elementwise_affine: bool = True,
        eps: float = 1e-5,
        activation: str = "swish",
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        if activation not in _NORM_GATES:
            raise ValueError(
                f"FusedRMSNormGated: activation: expected one of {', '.join(_NORM_GATES)}, got {activation!r}"
            )
        self.hidden_size, self.elementwise_affine = hidden_size, elementwise_affine
        self.eps, self.activation = eps, activation
        weight = nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype)) if elementwise_affine else None
        self.register_parameter("weight", weight)
        self.register_parameter("bias", None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.weight is not None:
            nn.init.ones_(self.weight)

    def extra_repr(self) -> str:
        affine = "" if self.elementwise_affine else ", elementwise_affine=False"
        return f"{self.hidden_size}{affine}, eps={self.eps}, activation={self.activation}"

    def forward(
        self,
        x: Tensor,
        g: Tensor,
        residual: Tensor | None = None,
        prenorm: bool = False,
        residual_in_fp32: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """x and g [..., hidden_size]. The norm is that of x + residual, summed in fp32; prenorm=True returns this sum
        too, in the dtype of residual, or in fp32 where there is none and residual_in_fp32 says so. Where x and g differ in
        dtype, or there is a residual, the call is one of fp32 tensors, rounded to the dtype of x."""
        op = "FusedRMSNormGated"
        require.tensor(op, "x", x, 1)
        require.shape(op, "x", x, (*x.shape[:-1], self.hidden_size))
        require.shape(op, "g", g, x.shape)
        total = x
        if residual is not None:
            require.shape(op, "residual", residual, x.shape)
            total = x.to(require.full(x)) + residual
        same = g.dtype == total.dtype and total.dtype == x.dtype
        rows = [t if same else t.to(require.full(t)) for t in (total, g)]
        weight = None if self.weight is None else deposit(self.weight)
        y = gdn_norm(*rows, weight, self.eps, gate=_NORM_GATES[self.activation]).view(x.shape).to(x.dtype)
        if not prenorm:
            return y
        keeps = residual.dtype if residual is not None else require.full(x) if residual_in_fp32 else x.dtype
        return y, total.to(keeps)


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
    if kwargs.pop("seq_idx", None) is not None and cu_seqlens is None:
        raise NotImplementedError(f"{op}: seq_idx: expected cu_seqlens beside it, got None")
    _nothing_else(op, kwargs)
    channels, width = _taps(op, weight, bias, activation)
    weight, bias = deposit(weight), None if bias is None else deposit(bias)
    require.tensor(op, "x", x, 3)
    rows = x.flatten(2)
    require.shape(op, "x", rows, (*rows.shape[:2], channels))
    sequences = rows.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    if initial_state is not None:
        require.shape(op, "initial_state", initial_state, (sequences, channels, width))
    y, state = _convolve(rows, weight, bias, initial_state, activation, cu_seqlens, bool(output_final_state))
    return _plus(op, y.view(x.shape), residual), state


@torch.no_grad()
def causal_conv1d_update(
    x: Tensor,
    cache: Tensor,
    residual: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    activation: str | None = None,
) -> tuple[Tensor, Tensor]:
    """One token for each of N sequences, x [N, D], [N, 1, D] or [1, N, D]; cache [N, D, W] is updated in place and
    returned. Forward only, weft.torch.gdn_pre_step. D is at least 3. The bits are those of causal_conv1d on the whole sequence."""
    op = "causal_conv1d_update"
    channels, width = _taps(op, weight, bias, activation)
    require.tensor(op, "cache", cache)
    require.shape(op, "cache", cache, (cache.shape[0], channels, width))
    require.numel(op, "x", x, cache.shape[0] * channels)
    y = _advance(op, x.reshape(-1, 1, channels), cache, weight, bias, activation, None).view(x.shape)
    return _plus(op, y, residual), cache


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
        kwargs.pop("use_fast_conv1d", None)  # deprecated, and ignored there too
        _nothing_else("ShortConvolution", kwargs)
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
        """x [B, T, D] -> [B, T, D] and the state [N, D, W] or None. A call without autograd that has as many tokens as
        sequences updates cache in place; others leave it alone. mask [B, T] is multiplied with x."""
        require.tensor("ShortConvolution", "x", x, 3)
        if mask is not None:
            if cu_seqlens is not None:
                raise ValueError("ShortConvolution: mask: expected None beside cu_seqlens, got both")
            x = x * mask.unsqueeze(-1).to(x.dtype)
        sequences = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        if not torch.is_grad_enabled() and x.shape[0] * x.shape[1] == sequences:
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
        """One token for each sequence, or the new tokens that cu_seqlens says; cache is updated in place."""
        op = "ShortConvolution"
        channels, width = self.hidden_size, self.kernel_size[0]
        require.tensor(op, "x", x, 3)
        require.shape(op, "x", x, (*x.shape[:2], channels))
        sequences = x.shape[0] * x.shape[1] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        if cache is None:
            cache = x.new_zeros(sequences, channels, width)
        require.shape(op, "cache", cache, (sequences, channels, width))
        rows = x if cu_seqlens is not None else x.reshape(-1, 1, channels)
        with torch.no_grad():
            y = _advance(op, rows, cache, self.weight.squeeze(1), self.bias, self.activation, cu_seqlens)
            return _plus(op, y.view(x.shape), residual), cache if output_final_state else None

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


def _advance(op: str, rows, cache, weight, bias, activation, cu_seqlens) -> Tensor:
    """rows [N, 1, D] as query, key and value of gdn_pre_step, side by side as they are; weight and cache as they are, too.
    With cu_seqlens rows are [1, T, D]. Updates cache."""
    channels = rows.shape[2]
    heads = _sections(op, channels)
    nothing = rows.new_zeros(1)
    lead = rows.shape[:2]
    gates = nothing.expand(*lead, heads.value_heads)
    z = nothing.expand(*lead, heads.value_heads, heads.value_dim)
    out = gdn_pre_step(
        GdnSections(rows, None, None, z, gates, gates),
        weight,
        nothing.to(require.full(rows)).expand(heads.value_heads),
        bias=bias,
        state=cache,
        heads=heads,
        cu_seqlens=cu_seqlens,
        options=GdnOptions(activation=_ACTIVATIONS[activation], l2norm=False),
        repeat=False,
        gate="none",
    )
    return torch.cat([t.flatten(2) for t in (out.query, out.key, out.value)], 2)


def _sections(op: str, channels: int) -> GdnHeads:
    """Heads of a query, a key and a value that have so many channels together, wide ones where that is possible."""
    for dim in (128, 256, 64):
        heads = channels // dim
        if channels % dim == 0 and 3 <= heads <= _MAX_HEADS:
            keys = heads // 4 if heads % 4 == 0 else heads // 3 if heads % 3 == 0 else 1
            return GdnHeads(keys, heads - 2 * keys, dim, dim)
    for key_dim in range(1, min((channels - 1) // 2, _MAX_DIM) + 1):
        rest = channels - 2 * key_dim
        dim = next(d for d in range(min(rest, _MAX_DIM), 0, -1) if rest % d == 0)
        if rest // dim <= _MAX_HEADS:
            return GdnHeads(1, rest // dim, key_dim, dim)
    raise NotImplementedError(
        f"{op}: x: expected at least 3 channels that make up to {_MAX_HEADS} heads, got {channels}"
    )


def _plus(op: str, y: Tensor, residual: Tensor | None) -> Tensor:
    if residual is None:
        return y
    require.shape(op, "residual", residual, y.shape)
    return y + residual


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
    _, decay = _gates(None, g, A_log, dt_bias, 1.0)
    return decay.to(output_dtype)


def _gates(
    b: Tensor | None, a: Tensor | None, A_log: Tensor, dt_bias: Tensor | None, beta_scale: float
) -> tuple[Tensor, Tensor]:
    """beta_scale sigmoid(b) and -exp(A_log) softplus(a + dt_bias), [..., HV] in fp32, by gdn_pre beside a query, a key and
    a value of nothing."""
    like = b if a is None else a
    heads = like.shape[-1]
    nothing = like.new_zeros(1)
    rows = [nothing.expand(1, like.numel() // heads, heads) if t is None else t.reshape(1, -1, heads) for t in (b, a)]
    unit, value = (nothing.expand(1, rows[0].shape[1], n, 1) for n in (1, heads))
    decay, steps = lend(A_log, _flat), None if dt_bias is None else lend(dt_bias, _flat)
    out = gdn_pre(
        GdnSections(unit, unit, value, None, *rows),
        nothing.expand(_PADDING + heads, 1),
        decay,
        steps,
        options=GdnOptions(activation="linear", l2norm=False, beta_scale=beta_scale),
        repeat=False,
        gate="none",
        beta_dtype=require.full(like),
        main_grad=any_takes_part(decay, steps),
    )
    return out.beta.view(like.shape), out.g.view(like.shape)


def _flat(t: Tensor) -> Tensor:
    return t.reshape(-1)
