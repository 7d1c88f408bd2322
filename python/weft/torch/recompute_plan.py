# SPDX-License-Identifier: Apache-2.0
"""Which layers are recomputed together, and what that saves.

Between forward and backward a group keeps one stream tensor, its input, so long groups keep little. But a group's
tensors are all there at a time, at the end of its forward and in its backward, so short groups need little then.
`best_group` finds the balance."""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, overload

from torch import Tensor

from .recompute import CheckpointWithoutOutputManager


@overload
def build_mhc_recompute_layer_plan(
    num_layers: int, mhc_recompute_layer_num: int | None, use_mhc_recompute: Literal[True]
) -> tuple[list[CheckpointWithoutOutputManager], list[bool]]: ...


@overload
def build_mhc_recompute_layer_plan(
    num_layers: int, mhc_recompute_layer_num: int | None, use_mhc_recompute: bool
) -> tuple[Sequence[CheckpointWithoutOutputManager | None], list[bool]]: ...


def build_mhc_recompute_layer_plan(
    num_layers: int, mhc_recompute_layer_num: int | None, use_mhc_recompute: bool
) -> tuple[Sequence[CheckpointWithoutOutputManager | None], list[bool]]:
    """For every layer of a block, or of a pipeline stage, its manager and whether it ends a group. Groups have
    `mhc_recompute_layer_num` layers, the last one perhaps fewer; None makes the block one group. Managers hold the
    state of one pass: every forward needs a plan of its own."""
    _require_count("num_layers", num_layers, 0)
    if mhc_recompute_layer_num is not None:
        _require_count("mhc_recompute_layer_num", mhc_recompute_layer_num, 1)
    if not use_mhc_recompute:
        return [None] * num_layers, [False] * num_layers
    group = mhc_recompute_layer_num or max(num_layers, 1)
    shared = [CheckpointWithoutOutputManager() for _ in range(_groups(num_layers, group))]
    ends = [(i + 1) % group == 0 or i + 1 == num_layers for i in range(num_layers)]
    return [shared[i // group] for i in range(num_layers)], ends


def finalize_mhc_recompute_layer(
    mhc_manager: CheckpointWithoutOutputManager | None,
    hidden_states: Tensor,
    is_last_in_recompute_block: bool,
) -> None:
    """To be called with every layer's output."""
    if mhc_manager is not None and is_last_in_recompute_block:
        mhc_manager.discard_all_outputs_and_register_unified_recompute(hidden_states)


class StreamBytes(NamedTuple):
    """Bytes of stream tensors, aggregates and norm outputs: the most there are at a time without recompute and with
    it, and those that stay between forward and backward."""

    none: int
    grouped: int
    resident: int


def stream_bytes(
    tokens: int,
    channels: int,
    streams: int,
    layers: int,
    group: int | None = None,
    *,
    element_size: int = 2,
    norm_out: bool = True,
    learned_contract: bool = False,
    microbatches: int = 1,
) -> StreamBytes:
    """What a stack of `layers` layers (two sublayers each) needs for the `microbatches` that are between forward and
    backward. `group` is the layers of a recompute group, None for one group; `norm_out`: the norm before a sublayer is
    an operation of its own, with an output; `learned_contract`: backward of the contraction needs the last streams.
    `grouped` is exact where `group` divides `layers`, else it is an upper bound."""
    unit = tokens * channels * element_size
    group = group or layers
    sublayer = streams + 1 + norm_out
    resident = microbatches * _groups(layers, group) * streams
    return StreamBytes(
        none=unit * microbatches * (streams + 2 * layers * sublayer),
        grouped=unit * (resident + 2 * group * sublayer),
        resident=unit * (resident + microbatches * streams * learned_contract),
    )


def best_group(layers: int, streams: int, norm_out: bool = True) -> int:
    """The layers of a recompute group at which stream_bytes().grouped is smallest. Of equals the smallest: it runs
    the fewest operations twice."""
    _require_count("layers", layers, 1)
    return min(range(1, layers + 1), key=lambda k: stream_bytes(1, 1, streams, layers, k, norm_out=norm_out).grouped)


def _groups(layers: int, group: int) -> int:
    return -(-layers // group)


def _require_count(name: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"recompute: {name}: expected an integer of at least {least}, got {value!r}")
