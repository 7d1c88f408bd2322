# SPDX-License-Identifier: Apache-2.0
"""What Inductor is told about weft's operators."""

import sys

import torch

# Tensors reach an operator with the strides that they have in the graph. That is Inductor's default for an operator that it
# meets unprepared; one that is registered has no default.
EXACT_STRIDES = torch.Tag.needs_exact_strides


def introduce(op: torch._ops.OpOverload) -> None:
    """Registers `op` as the call of an external kernel, which Inductor would do by itself when it meets the operator.

    Before PyTorch 2.13 that meeting formats every argument, with everything it is computed from, for a line of the log,
    whether the log is on or not. The text doubles with every layer of a stack: three layers take two minutes. An
    operator that is registered is not logged. Fake kernels call this, which AOTAutograd runs when Inductor is loaded and
    has not seen the graph; nothing is imported for it. Where PyTorch's private names differ, Inductor goes its own way."""
    lowering = sys.modules.get("torch._inductor.lowering")
    known, make_fallback = getattr(lowering, "lowerings", None), getattr(lowering, "make_fallback", None)
    if known is not None and make_fallback is not None and op not in known:
        make_fallback(op, warn=False)
