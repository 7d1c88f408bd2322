# SPDX-License-Identifier: Apache-2.0
"""The operators of Gated DeltaNet (weft/gdn.h), registered as those of ops.py.

The projection comes as six arguments q, k, v, z, b, a. One with four dimensions ([B, S, heads, dim]) is a section by
itself. One with three is rows: it holds the columns of its section and those of the sections after it that are None, so
one row of everything is q alone, and its gradient is one tensor, written once. `heads` is (key heads, value heads, key
dim, value dim).

The library takes the six sections, which are views of these arguments, and of which argument depends on what is None: a
plan, made of scalars alone, cannot say that. So gdn_pre and its kin put views in place of their arguments first
(register.define); the rule is a plan like any other."""

from __future__ import annotations

from torch import Tensor

from .ops import maybe, wide
from .register import define, differentiate, planned, wanted

SECTIONS = ("q", "k", "v", "z", "b", "a")
NUM_SECTIONS = len(SECTIONS)
Z = SECTIONS.index("z")


# ---- sections ----------------------------------------------------------------------------------------------------


def section_shapes(heads) -> tuple[tuple[int, int], ...]:
    """(heads, dim) of the six sections."""
    key_heads, value_heads, key_dim, value_dim = heads
    return ((key_heads, key_dim),) * 2 + ((value_heads, value_dim),) * 2 + ((value_heads, 1),) * 2


def conv_channels(heads) -> int:
    key_heads, value_heads, key_dim, value_dim = heads
    return 2 * key_heads * key_dim + value_heads * value_dim


def cut(parts, heads, tensors=None) -> list[Tensor | None]:
    """Six views of the parts of a projection, or of tensors that lie like them; None where there is nothing."""
    tensors = parts if tensors is None else tensors
    views, base, column = [], 0, 0
    for i, (count, dim) in enumerate(section_shapes(heads)):
        if parts[i] is not None:
            base, column = i, 0
        elif parts[base].dim() != 3:
            views.append(None)
            continue
        t = tensors[base]
        if t is not None and t.dim() == 3:
            batch, step, unit = t.stride()
            shape, stride = (*t.shape[:2], count), (batch, step, dim * unit)
            if i <= Z:
                shape, stride = (*shape, dim), (*stride, unit)
            t = t.as_strided(shape, stride, t.storage_offset() + column * unit)
        views.append(t)
        column += count * dim
    return views


def check_columns(op: str, parts, heads) -> None:
    """Rows must have the columns that are looked for in them; everything else is the library's to check."""
    if any(p is not None and p.dim() not in (3, 4) for p in parts):
        got = [list(p.shape) for p in parts if p is not None]
        raise ValueError(f"{op}: expected rows [B, S, columns] or sections [B, S, heads, dim], got {got}")
    need, base = [0] * NUM_SECTIONS, 0
    for i, (count, dim) in enumerate(section_shapes(heads)):
        if parts[i] is not None:
            base = i
        need[base] += count * dim
    for name, part, columns in zip(SECTIONS, parts, need, strict=True):
        if part is not None and part.dim() == 3 and part.shape[2] != columns:
            raise ValueError(f"{op}: {name}: expected {columns} columns, got {part.shape[2]}")


def taps(weight: Tensor | None) -> Tensor | None:
    """[C, W] of a depthwise convolution's [C, 1, W]."""
    return weight.squeeze(1) if weight is not None and weight.dim() == 3 else weight


def forward_views(heads: int):
    """The arguments of a pass in the form that the library takes; argument number `heads` is that."""

    def views(results, args, add):
        sections, (weight, *rest) = cut(args[:NUM_SECTIONS], args[heads]), args[NUM_SECTIONS:]
        return results, (*sections, taps(weight), *rest), add

    return views


def backward_views(heads: int):
    """The same for a pass whose results are gradients of these arguments: None where one is not wanted."""
    arguments = forward_views(heads)

    def views(results, args, add):
        grads = [t if w else None for t, w in zip(results, args[-1], strict=True)]
        weight = grads[NUM_SECTIONS]
        grads[:NUM_SECTIONS] = cut(args[:NUM_SECTIONS], args[heads], grads[:NUM_SECTIONS])
        grads[NUM_SECTIONS] = taps(weight)
        if any(weight is t for t in add):
            add = (*add, grads[NUM_SECTIONS])  # its [C, W], where that is another view
        return arguments(grads, args, add)

    return views


def upstream(grad: Tensor | None) -> Tensor | None:
    """A gradient as kernels can read it quickly: heads dense, tokens wherever they are."""
    if grad is None or (grad.stride(-1) == 1 and (grad.dim() < 4 or grad.stride(-2) == grad.shape[-1])):
        return grad
    return grad.contiguous()


# ---- in front of the rule ----------------------------------------------------------------------------------------


def _results(q, heads, repeat, gate, wide_beta) -> tuple[Tensor, ...]:
    key_heads, value_heads, key_dim, value_dim = heads
    lead, full = tuple(q.shape[:2]), wide(q)
    unit = (*lead, value_heads if repeat else key_heads, key_dim)
    value = (*lead, value_heads, value_dim)
    return (
        q.new_empty(unit),
        q.new_empty(unit),
        q.new_empty(value),
        q.new_empty(value) if gate else maybe(False, q),
        q.new_empty((*lead, value_heads), dtype=full if wide_beta else q.dtype),
        q.new_empty((*lead, value_heads), dtype=full),
    )


def pre_scalars(options) -> tuple[str, tuple]:
    return ("options", tuple(options))


def _pre_outputs(
    q, k, v, z, b, a, weight, bias, a_log, dt_bias, state, cu_seqlens, heads, options, repeat, gate, wide_beta, history
):
    check_columns("gdn_pre_fwd", (q, k, v, z, b, a), heads)
    sequences = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    final = maybe(False, q)
    if history:
        dtype = q.dtype if state is None else state.dtype
        final = q.new_empty((sequences, conv_channels(heads), history), dtype=dtype)
    return *_results(q, heads, repeat, gate, wide_beta), final


def _pre_plan(heads, options, repeat, gate, wide_beta, history):
    order = (0, 1, 2, 3 if gate else None, 4, 5, 6, 7, 8, 9, 11, 10)
    order = (*order, ~0, ~1, ~2, ~3 if gate else None, ~4, ~5, ~6 if history else None)
    return planned("gdn_pre_fwd", order, pre_scalars(options))


def _pre_save(ctx, inputs, output):
    *tensors, heads, options, _, gate, _, history = inputs
    ctx.rest = heads, options
    ctx.mark_non_differentiable(*(t for t, wanted in ((output[3], gate), (output[6], history)) if not wanted))
    ctx.save_for_backward(*tensors)


def _pre_backward(ctx, *grads):
    want = list(ctx.needs_input_grad[:11])
    args = (*ctx.saved_tensors, *map(upstream, grads), *ctx.rest, want)
    return *differentiate(ctx, "gdn_pre_bwd", want, *args), *(None,) * 7


def _pre_bwd_outputs(
    q, k, v, z, b, a, weight, bias, a_log, dt_bias, state, cu_seqlens, d_query, d_key, d_value, d_gate, d_beta, d_g,
    d_final_state, heads, options, want,
):  # fmt: skip
    tensors = (q, k, v, z, b, a, weight, bias, a_log, dt_bias, state)
    return tuple(maybe(w, q if t is None else t) for w, t in zip(want, tensors, strict=True))


def _pre_bwd_plan(heads, options, want):
    order = (0, 1, 2, 4, 5, 6, 7, 8, 9, 11, 10, *range(12, 19))
    return planned("gdn_pre_bwd", (*order, *(~k for k in range(len(want)))), pre_scalars(options))


_PROJECTION = (
    "Tensor q, Tensor? k, Tensor? v, Tensor? z, Tensor? b, Tensor? a, Tensor weight, Tensor? bias, Tensor a_log,"
    " Tensor? dt_bias"
)
_SCALARS = "int[] heads, float[] options, bool repeat, bool gate, bool wide_beta"
_SIX = ", ".join(["Tensor"] * 6)

define(
    f"gdn_pre({_PROJECTION}, Tensor? state, Tensor? cu_seqlens, {_SCALARS}, int history) -> ({_SIX}, Tensor)",
    _pre_outputs,
    _pre_plan,
    _pre_save,
    _pre_backward,
    views=forward_views(12),
)
define(
    f"gdn_pre_bwd({_PROJECTION}, Tensor? state, Tensor? cu_seqlens, Tensor? d_query, Tensor? d_key, Tensor? d_value,"
    " Tensor? d_gate, Tensor? d_beta, Tensor? d_g, Tensor? d_final_state, int[] heads, float[] options, bool[] want)"
    f" -> ({_SIX}, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _pre_bwd_outputs,
    _pre_bwd_plan,
    views=backward_views(19),
)


def _step_outputs(
    q, k, v, z, b, a, weight, bias, a_log, dt_bias, state, state_index, cu_seqlens, heads, options, repeat, gate,
    wide_beta,
):  # fmt: skip
    check_columns("gdn_pre_step", (q, k, v, z, b, a), heads)
    return _results(q, heads, repeat, gate, wide_beta)


def _step_plan(heads, options, repeat, gate, wide_beta):
    order = (0, 1, 2, 3 if gate else None, 4, 5, 6, 7, 8, 9, 12, 11, 10)
    order = (*order, ~0, ~1, ~2, ~3 if gate else None, ~4, ~5, 10)
    return planned("gdn_pre_step", order, pre_scalars(options))


define(
    f"gdn_pre_step({_PROJECTION}, Tensor(a!) state, Tensor? state_index, Tensor? cu_seqlens, {_SCALARS}) -> ({_SIX})",
    _step_outputs,
    _step_plan,
    views=forward_views(13),
    mutates=(10,),
)

# ---- the gated delta rule ----------------------------------------------------------------------------------------


def rule_scalars(scale, head_map, chunk) -> tuple:
    return (("scale", scale), ("head_map", head_map), ("chunk", chunk))


def _rule_outputs(query, key, value, beta, g, state, cu_seqlens, scale, head_map, chunk, final_state):
    o = value.new_empty(value.shape)
    if not final_state:
        return o, maybe(False, value)
    sequences = value.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    shape = (sequences, value.shape[2], query.shape[3], value.shape[3])
    return o, value.new_empty(shape, dtype=wide(value))


def _rule_plan(scale, head_map, chunk, final_state):
    order = (0, 1, 2, 3, 4, 6, 5, ~0, ~1 if final_state else None)
    return planned("gdn_rule_fwd", order, *rule_scalars(scale, head_map, chunk))


def _rule_save(ctx, inputs, output):
    *tensors, scale, head_map, chunk, final_state = inputs
    ctx.rest = scale, head_map, chunk
    if not final_state:
        ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*tensors)


def _rule_backward(ctx, d_o, d_final_state):
    want = list(ctx.needs_input_grad[:6])
    value = ctx.saved_tensors[2]
    d_o = value.new_zeros(1).expand(value.shape) if d_o is None else upstream(d_o)
    args = (*ctx.saved_tensors, d_o, upstream(d_final_state), *ctx.rest, want)
    return *differentiate(ctx, "gdn_rule_bwd", want, *args), *(None,) * 5


def _rule_bwd_outputs(query, key, value, beta, g, state, cu_seqlens, d_o, d_final_state, scale, head_map, chunk, want):
    tensors = (query, key, value, beta, g, query if state is None else state)
    return tuple(maybe(w, t) for w, t in zip(want, tensors, strict=True))


def _rule_bwd_plan(scale, head_map, chunk, want):
    order = (0, 1, 2, 3, 4, 6, 5, 7, 8, *wanted(want))
    return planned("gdn_rule_bwd", order, *rule_scalars(scale, head_map, chunk))


_RULE = "Tensor query, Tensor key, Tensor value, Tensor beta, Tensor g, Tensor? state, Tensor? cu_seqlens"

define(
    f"gdn_rule({_RULE}, float scale, int head_map, int chunk, bool final_state) -> (Tensor, Tensor)",
    _rule_outputs,
    _rule_plan,
    _rule_save,
    _rule_backward,
)
define(
    f"gdn_rule_bwd({_RULE}, Tensor d_o, Tensor? d_final_state, float scale, int head_map, int chunk, bool[] want)"
    f" -> ({_SIX})",
    _rule_bwd_outputs,
    _rule_bwd_plan,
)
