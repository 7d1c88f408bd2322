# SPDX-License-Identifier: Apache-2.0
"""The operators of Gated DeltaNet (weft/gdn.h), registered as those of ops.py.

The projection comes as six arguments q, k, v, z, b, a. One with four dimensions ([B, S, heads, dim]) is a section by
itself. One with three is rows: it holds the columns of its section and those of the sections after it that are None, so
one row of everything is q alone, and its gradient is one tensor, written once. `heads` is (key heads, value heads, key
dim, value dim). The extension cuts rows into the six sections that the library takes."""

from __future__ import annotations

from .register import operator

SECTIONS = ("q", "k", "v", "z", "b", "a")
Z = SECTIONS.index("z")


def _sizes(arguments: dict) -> dict[str, int]:
    key_heads, value_heads, key_dim, value_dim = arguments["heads"]
    return {
        "key_heads": key_heads,
        "value_heads": value_heads,
        "heads": value_heads if arguments["repeat"] else key_heads,
        "key_dim": key_dim,
        "value_dim": value_dim,
        "conv": 2 * key_heads * key_dim + value_heads * value_dim,
    }


_PROJECTION = (
    "Tensor q, Tensor? k, Tensor? v, Tensor? z, Tensor? b, Tensor? a, weight, bias, a_log, dt_bias"  # k to a: in rows
)
_SCALARS = "int[] heads, options, bool repeat, bool gate, bool wide_beta"
_PRE = {"sizes": _sizes, "sections": ("heads", SECTIONS), "wide_where": {"beta": "wide_beta"}}

operator(
    "gdn_pre",
    f"{_PROJECTION}, state, cu_seqlens, {_SCALARS}, int history",
    **_PRE,
    where={"z": "gate", "gate": "gate", "final_state": "history"},
    forward_only=("repeat", "gate", "wide_beta", "history"),
)
operator(
    "gdn_pre_step",
    f"{_PROJECTION}, state, state_index, cu_seqlens, {_SCALARS}",
    **_PRE,
    where={"z": "gate", "gate": "gate"},
    binds={"new_state": "state"},  # in place
    writes=("state",),
)
operator(
    "gdn_rule",
    "query, key, value, beta, g, state, cu_seqlens, scale, head_map, chunk, bool final_state",
    where={"final_state": "final_state"},
    forward_only=("final_state",),
)
operator(
    "gdn_rule_step",
    "query, key, value, beta, g, state, state_index, cu_seqlens, scale, head_map, bool update, bool keep, bool wide",
    sizes=lambda arguments: {"step_heads": arguments["value"].shape[1] * arguments["value"].shape[2]},
    where={"new_state": "update", "token_state": "keep"},
    wide_where={"token_state": "wide"},
    binds={"new_state": "state"},  # in place
    writes=("state",),
)
operator("gdn_norm")
