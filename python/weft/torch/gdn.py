# SPDX-License-Identifier: Apache-2.0
"""Gated DeltaNet: what stands between the input projection of a layer and the gated delta rule, the rule itself, and
the gated norm after it, as functions of tensors with gradients.

Shapes: B sequences of S tokens, or B = 1 and `cu_seqlens`, which cuts the S tokens into N sequences. Where there is
only one row of tokens, the leading [B, S] may be [T], and results are [T, ...] too. Memory of the order (S, B, ...) is
passed as the view `memory.transpose(0, 1)`; results are contiguous, and the gradient of the projection is laid out like
the projection. Dtypes are those of weft.torch.functional; offsets and indices are int32 or int64."""

from __future__ import annotations

from typing import Literal, NamedTuple, overload

import torch
from torch import Tensor

from . import ops_gdn, register
from .grads import Sink, operation, params_of
from .numerics import choice

ACTIVATIONS = ("silu", "linear")
HEAD_MAPS = ("interleaved", "tiled")
ROUNDINGS = ("through", "parity")
GATES = ("copy", "view", "none")
OUTPUT_GATES = ("silu", "sigmoid")


class GdnHeads(NamedTuple):
    """Heads of query and key, heads of value, and how wide either are."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int

    @property
    def channels(self) -> int:
        """Channels of the convolution: q, k, v."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def columns(self) -> int:
        """Columns of a projection row: q, k, v, z, b, a."""
        return self.channels + self.value_heads * (self.value_dim + 2)


class GdnSections(NamedTuple):
    """A projection in parts. A part [B, S, heads, dim] (b and a: [B, S, heads]) is one section. A part [B, S, columns]
    that is followed by None holds the columns of those sections too: GdnSections(qkv, None, None, z, b, a)."""

    q: Tensor
    k: Tensor | None = None
    v: Tensor | None = None
    z: Tensor | None = None
    b: Tensor | None = None
    a: Tensor | None = None


class GdnOptions(NamedTuple):
    """What changes the function computed."""

    activation: str = "silu"  # or "linear"
    l2norm: bool = True  # query and key to unit length
    l2_eps: float = 1e-6  # inside the root
    q_scale: float = 1.0
    beta_scale: float = 1.0
    head_map: str = "interleaved"  # value head h reads key head h // R, R value heads to a key head; "tiled": h % Hk
    rounding: str = "through"  # "parity": rounds intermediate results, to explain differences to others
    g_chunk: int = 0  # g is the running sum within chunks of so many tokens; 0: per token
    g_log2: bool = False  # g in base 2

    def packed(self) -> list[float]:
        """As the registered operators take it: nine numbers in the order of the fields."""
        return [
            float(choice("options: activation", self.activation, ACTIVATIONS)),
            float(self.l2norm),
            float(self.l2_eps),
            float(self.q_scale),
            float(self.beta_scale),
            float(choice("options: head_map", self.head_map, HEAD_MAPS)),
            float(choice("options: rounding", self.rounding, ROUNDINGS)),
            float(self.g_chunk),
            float(self.g_log2),
        ]


DEFAULTS = GdnOptions()


class GdnPre(NamedTuple):
    """What the gated delta rule takes, the output gate, and the state of the convolution after the last token."""

    query: Tensor  # [B, S, Hv or Hk, Dk]
    key: Tensor
    value: Tensor  # [B, S, Hv, Dv]
    gate: Tensor | None  # [B, S, Hv, Dv]
    beta: Tensor  # [B, S, Hv]
    g: Tensor  # [B, S, Hv], float32
    final_state: Tensor | None = None  # [N, C, L]


def gdn_pre(
    proj: Tensor | GdnSections,
    weight: Tensor,
    a_log: Tensor,
    dt_bias: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    heads: GdnHeads | tuple[int, int, int, int] | None = None,
    cu_seqlens: Tensor | None = None,
    state: Tensor | None = None,
    final_state: bool = False,
    history: int | None = None,
    options: GdnOptions = DEFAULTS,
    repeat: bool = True,
    gate: str = "copy",
    beta_dtype: torch.dtype | None = None,
    main_grad: bool = False,
) -> GdnPre:
    """Everything before the gated delta rule in one call: causal convolution of q, k, v (weight [C, W] or
    [C, 1, W], bias [C]), silu, unit length of query and key, beta = sigmoid(b), g = -exp(a_log) softplus(a + dt_bias).

    proj is rows [B, S, columns] of q | k | v | z | b | a, or GdnSections. heads may be left out where q and v are
    sections with four dimensions. state [N, C, L] holds what came before the first token, its last slot next to it; L
    is at least W - 1. final_state=True returns the same after the last token, with `history` slots where there is no
    state to go by (W - 1 unless told). repeat=False leaves query and key with their own heads. gate: "copy", "view"
    (memory of proj; backward writes its gradient beside the others') or "none". beta_dtype: torch.float32, or that of
    proj. main_grad as everywhere."""
    parts, lead = _parts("gdn_pre", proj, heads)
    heads = _heads("gdn_pre", parts, heads)
    kind = choice("gdn_pre: gate", gate, GATES)
    slots = 0
    if final_state:
        slots = state.shape[-1] if state is not None else weight.shape[-1] - 1 if history is None else history
    alone = gate == "view" and _z_is_alone(parts)
    own = parts[ops_gdn.Z]
    if alone:  # then it is a tensor of its own, and has no part in this
        parts = (*parts[: ops_gdn.Z], own.detach(), *parts[ops_gdn.Z + 1 :])
    args = (
        *(*parts, weight, bias, a_log, dt_bias, state, cu_seqlens),
        *(list(heads), options.packed(), repeat, not kind, _wide_beta(parts[0], beta_dtype), slots),
    )
    if gate == "view" and not alone and torch.is_grad_enabled() and not torch.compiler.is_compiling():
        operator = register.OPERATORS["gdn_pre"]
        sink = Sink(params_of(operator, args)) if main_grad else None
        *results, final = _ViewNode.apply(operator, sink, *args)
    else:
        *results, final = operation("gdn_pre", main_grad)(*args)
        if kind:
            view = None if gate == "none" else own if alone else _view_of_z(parts, heads)
            results = (*results[:3], view, *results[4:])  # Dynamo of older versions takes them for a tuple
    if final_state and not slots:  # a convolution of one tap has no history
        sequences = parts[0].shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        final = final.new_empty((sequences, heads.channels, 0))
    return GdnPre(*_unbatched(results, lead), final if final_state else None)


class _ViewNode(register.Node):
    """gdn_pre with the gate as a view of the projection: its gradient is given to the operator, which writes it where
    it belongs, instead of being summed with the others by autograd, in a pass of its own."""

    @staticmethod
    def forward(ctx, operator, sink, *args):
        output = list(register.Node.forward(ctx, operator, sink, *args))
        parts = [args[operator.place[name]] for name in ops_gdn.SECTIONS]
        heads = GdnHeads(*args[operator.place["heads"]])
        output[operator.results.index("gate")] = _view_of_z(parts, heads)
        return tuple(output)


def gdn_pre_step(
    proj: Tensor | GdnSections,
    weight: Tensor,
    a_log: Tensor,
    dt_bias: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    state: Tensor,
    state_index: Tensor | None = None,
    heads: GdnHeads | tuple[int, int, int, int] | None = None,
    cu_seqlens: Tensor | None = None,
    options: GdnOptions = DEFAULTS,
    repeat: bool = True,
    gate: str = "copy",
    beta_dtype: torch.dtype | None = None,
) -> GdnPre:
    """`gdn_pre` of the next tokens of B requests (or N, with cu_seqlens) whose states are rows of a cache, state
    [rows, C, L], updated in place. state_index [B or N] names the rows; -1 is padding, with results of zero and no
    state touched. The bits are those of `gdn_pre` on the whole sequence. Forward only."""
    parts, lead = _parts("gdn_pre_step", proj, heads)
    heads = _heads("gdn_pre_step", parts, heads)
    kind = choice("gdn_pre_step: gate", gate, GATES)
    tensors = (*parts, weight, bias, a_log, dt_bias, state)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        raise NotImplementedError("gdn_pre_step: it has no gradient: call it under torch.no_grad()")
    scalars = (list(heads), options.packed(), repeat, not kind, _wide_beta(parts[0], beta_dtype))
    results = list(torch.ops.weft.gdn_pre_step.default(*tensors, state_index, cu_seqlens, *scalars))
    if kind:
        results[3] = _view_of_z(parts, heads) if gate == "view" else None
    return GdnPre(*_unbatched(results, lead))


@overload
def gdn_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    beta: Tensor,
    g: Tensor,
    *,
    scale: float | None = ...,
    cu_seqlens: Tensor | None = ...,
    state: Tensor | None = ...,
    final_state: Literal[False] = ...,
    head_map: str = ...,
    chunk: int = ...,
) -> tuple[Tensor, None]: ...


@overload
def gdn_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    beta: Tensor,
    g: Tensor,
    *,
    scale: float | None = ...,
    cu_seqlens: Tensor | None = ...,
    state: Tensor | None = ...,
    final_state: Literal[True],
    head_map: str = ...,
    chunk: int = ...,
) -> tuple[Tensor, Tensor]: ...


@overload
def gdn_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    beta: Tensor,
    g: Tensor,
    *,
    scale: float | None = ...,
    cu_seqlens: Tensor | None = ...,
    state: Tensor | None = ...,
    final_state: bool,
    head_map: str = ...,
    chunk: int = ...,
) -> tuple[Tensor, Tensor | None]: ...


def gdn_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    beta: Tensor,
    g: Tensor,
    *,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    state: Tensor | None = None,
    final_state: bool = False,
    head_map: str = "interleaved",
    chunk: int = 0,
) -> tuple[Tensor, Tensor | None]:
    """The gated delta rule: o [B, S, Hv, Dv] and, with final_state=True, the state [N, Hv, Dk, Dv] after the last
    token. With M the state: M <- exp(g) M; d = beta (v - M^T k); M <- M + k d^T; o = scale M^T q. scale is 1/sqrt(Dk)
    unless told; query and key have Hv heads or a number that divides it; g is per token, in natural logarithms. chunk
    has the reference backend compute in chunks, which is the same function."""
    lead = query.dim() == 3
    if lead:
        query, key, value, beta, g = map(_batched, (query, key, value, beta, g))
    scale = query.shape[-1] ** -0.5 if scale is None else float(scale)
    tensors = (query, key, value, beta, g, state, cu_seqlens)
    map_of = choice("gdn_rule: head_map", head_map, HEAD_MAPS)
    o, final = operation("gdn_rule")(*tensors, scale, map_of, chunk, final_state)
    return o.squeeze(0) if lead else o, final if final_state else None


def gdn_rule_step(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    beta: Tensor,
    g: Tensor,
    *,
    state: Tensor,
    state_index: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    scale: float | None = None,
    head_map: str = "interleaved",
    update: bool = True,
    token_states: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """`gdn_rule` of the next tokens, usually one to eight, of B requests (or N, with cu_seqlens) whose states are rows of a
    cache, state [rows, Hv, Dk, Dv] in float32 or the dtype of query, updated in place. A cache [rows, Hv, Dv, Dk] is passed
    as its view `cache.mT`. state_index [B or N] names the rows; -1 is padding, with results of zero and no state touched.
    update=False leaves the cache as it is; token_states=True returns the state after every token, [B, S, Hv, Dk, Dv] in the
    dtype of the cache. Both together are for speculative decoding, where the caller copies the state of the last accepted
    token into its row. Forward only."""
    lead = query.dim() == 3
    if lead:
        query, key, value, beta, g = map(_batched, (query, key, value, beta, g))
    tensors = (query, key, value, beta, g, state)
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        raise NotImplementedError("gdn_rule_step: it has no gradient: call it under torch.no_grad()")
    scale = query.shape[-1] ** -0.5 if scale is None else float(scale)
    map_of = choice("gdn_rule_step: head_map", head_map, HEAD_MAPS)
    wide = state.dtype != query.dtype
    if not update and not torch.compiler.is_compiling():
        tensors = (*tensors[:-1], state.data)  # nothing is written: no new version for a graph that has saved it
    results = torch.ops.weft.gdn_rule_step.default(
        *tensors, state_index, cu_seqlens, scale, map_of, update, token_states, wide
    )
    o, kept = results
    kept = kept.unflatten(1, tuple(value.shape[1:3])) if token_states else None
    return (o.squeeze(0), kept if kept is None else kept.squeeze(0)) if lead else (o, kept)


def gdn_norm(
    o: Tensor,
    z: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    gate: str = "silu",
    main_grad: bool = False,
) -> Tensor:
    """The gated norm after the rule: o / sqrt(mean(o^2) + eps) * weight * f(z) over the last dimension, with f(z) =
    silu(z) or, with gate="sigmoid", sigmoid(z), in fp32 and rounded once. o and z are rows [..., C], of a head or of anything
    else; z may be a view of the projection. weight is [C]. main_grad as everywhere."""
    if o.dim() < 1 or z.shape != o.shape:
        raise ValueError(
            f"gdn_norm: o and z: expected [..., C], the same of both, got {list(o.shape)} and {list(z.shape)}"
        )
    kind = choice("gdn_norm: gate", gate, OUTPUT_GATES)
    y = operation("gdn_norm", main_grad)(_rows_of(o), _rows_of(z), weight, float(eps), kind)
    return y.view(o.shape)


# ---- arguments ---------------------------------------------------------------------------------------------------


def _parts(op: str, proj: Tensor | GdnSections, heads) -> tuple[tuple[Tensor | None, ...], bool]:
    """The six arguments of the operators, with [B, S] in front; and whether that is [1, T] for rows [T, ...]."""
    if isinstance(proj, Tensor):
        if proj.dim() not in (2, 3):
            raise ValueError(f"{op}: proj: expected rows [B, S, columns] or [T, columns], got {list(proj.shape)}")
        if heads is None:
            raise ValueError(
                f"{op}: heads: expected (key heads, value heads, key dim, value dim) beside rows, got None"
            )
        proj = GdnSections(proj)
        lead = proj.q.dim() == 2
    else:
        lead = proj.a is not None and proj.a.dim() == 2
    return tuple(t if t is None or not lead else _batched(t) for t in proj), lead


def _heads(op: str, parts, heads) -> GdnHeads:
    if heads is not None:
        return GdnHeads(*heads)
    q, v = parts[0], parts[2]
    if q.dim() != 4 or v is None or v.dim() != 4:
        raise ValueError(f"{op}: heads: expected them beside parts that hold several sections, got None")
    return GdnHeads(q.shape[2], v.shape[2], q.shape[3], v.shape[3])


def _wide_beta(like: Tensor, dtype: torch.dtype | None) -> bool:
    if dtype not in (None, like.dtype, register.wide(like)):
        raise ValueError(f"gdn_pre: beta_dtype: expected {like.dtype} or {register.wide(like)}, got {dtype}")
    return dtype is not None and dtype != like.dtype


def _z_base(parts) -> int:
    """Which part holds the section z."""
    base = max(i for i in range(ops_gdn.Z + 1) if parts[i] is not None)
    if base != ops_gdn.Z and parts[base].dim() == 4:
        raise ValueError("gdn_pre: gate: expected a section z to look at, got none")
    return base


def _z_is_alone(parts) -> bool:
    return parts[_z_base(parts)].dim() == 4


def _view_of_z(parts, heads: GdnHeads) -> Tensor:
    """The section z of the projection, by operations that autograd and compilers can follow."""
    base = _z_base(parts)
    if parts[base].dim() == 4:
        return parts[base]
    key, value = heads.key_heads * heads.key_dim, heads.value_heads * heads.value_dim
    sizes = (key, key, value, value)
    columns = parts[base].narrow(2, sum(sizes[base : ops_gdn.Z]), sizes[ops_gdn.Z])
    return columns.unflatten(2, (heads.value_heads, heads.value_dim))


def _batched(t: Tensor) -> Tensor:
    """[T, ...] as [1, T, ...]; not by unsqueeze, whose strides for no tokens at all fake tensors do not share."""
    return t.view(1, *t.shape)


def _rows_of(t: Tensor) -> Tensor:
    """[..., C] as [B, S, H, C]. Three dimensions are [B, S, 1, C]: the middle one may be tokens, of which there may be more
    than heads, or none."""
    if t.dim() > 4:
        t = t.reshape(-1, t.shape[-1])
    while t.dim() < 3:
        t = _batched(t)
    return t if t.dim() == 4 else t.unsqueeze(2)


def _unbatched(results, lead: bool) -> list[Tensor | None]:
    return [t if t is None or not lead else t.squeeze(0) for t in results]
