# SPDX-License-Identifier: Apache-2.0
"""One gradient of the streams for everything that a site reads them for.

The head of a site, `project` or `pre`, reads streams x; with the coefficients that come of it `aggregate` and `post` read
x again. Autograd would sum their gradients of x in passes of its own over memory. Instead a reader finds the head in the
graph, from its coefficients upwards, and in backward leaves its gradient there; the head, which the engine runs after its
readers, adds to it in its own pass and returns the sum.

The graph decides, and nothing else is remembered: the two must have x from the same output of the same node, as the same
view and at the same version, so an x that was changed in place, detached or computed again is another one. Where no head is
found, or the engine does not run it in this backward pass, autograd adds as usual: compiled graphs, tensor subclasses,
dispatch modes and create_graph=True are such cases."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

HEADS = frozenset(("mhc_project", "mhc_pre"))
# Who else reads x, and the coefficients by which it finds the head.
READERS = {"mhc_aggregate": ("pre",)} | dict.fromkeys(
    ("mhc_post", "mhc_post_rebuild", "mhc_boundary", "mhc_boundary_rebuild"), ("post", "res")
)
# Operators between the head and the coefficients.
BETWEEN = frozenset(("mhc_scale", "mhc_coef", "mhc_sinkhorn"))
# Nodes that pass a gradient on as another view of it.
VIEWS = frozenset(
    f"{kind}Backward0" for kind in "Alias Permute ReshapeAlias Squeeze T Transpose Unsqueeze UnsafeView View".split()
)
LEAF = "torch::autograd::AccumulateGrad"
STEPS = 12  # nodes to look at on the way up: views, Sinkhorn, gates


class Origin(NamedTuple):
    """What x is: an output of a node, or a leaf, behind views, and where its elements lie."""

    node: Any
    output: int
    place: tuple
    shape: torch.Size
    stride: tuple[int, ...]

    def is_that_of(self, other: Origin | None) -> bool:
        if other is None or self.node is not other.node or self[1:3] != other[1:3]:
            return False
        return self[3:] == other[3:] or layout_of(*self[3:]) == layout_of(*other[3:])


def layout_of(shape: torch.Size, strides: tuple[int, ...]) -> tuple:
    """Sizes and strides, with dimensions that are one in memory as one: of views that name the same elements in the same
    order it is the same."""
    dims: list[tuple[int, int]] = []
    for size, stride in zip(shape, strides, strict=True):
        if dims and dims[-1][1] == size * stride:
            dims[-1] = (dims[-1][0] * size, stride)
        elif size != 1:
            dims.append((size, stride))
    return tuple(dims)


def origin_of(x: Tensor) -> Origin | None:
    if type(x) not in (Tensor, torch.nn.Parameter) or not x.requires_grad or torch._C._len_torch_dispatch_stack():
        return None
    node, output = x.grad_fn, x.output_nr
    while node is not None and node.name() in VIEWS:
        node, output = node.next_functions[0]
    if node is None:
        node = x
    elif node.name() == LEAF:
        node = node.variable
    return Origin(node, output, (x.data_ptr(), x.dtype, x._version), x.shape, x.stride())


def head_of(origin: Origin | None, coefficients: Tensor | None) -> Any:
    """The node that made the coefficients, if it read what `origin` says."""
    if origin is None or coefficients is None:
        return None
    node = coefficients.grad_fn
    for _ in range(STEPS):
        if node is None:
            return None
        operator = getattr(node, "operator", None)
        if operator is not None and operator.name not in BETWEEN:
            return node if operator.name in HEADS and origin.is_that_of(node.origin) else None
        node = node.next_functions[0][0] if node.next_functions else None
    return None


def heir_of(ctx: Any) -> Any:
    """Who gets the gradient of x that a node computes now: the head of its site, or None, which is autograd."""
    head = ctx.head
    if head is None or torch.is_grad_enabled() or torch._C._len_torch_dispatch_stack():
        return None
    return head if torch._C._will_engine_execute_node(head) else None


def leave(head: Any, grad: Tensor) -> Tensor | None:
    """Returns what autograd gets. A gradient is kept by pass: two of them may run in one graph. That of a pass which does not
    come to its end goes with the graph."""
    origin = head.origin
    if grad.stride() != origin.stride and layout_of(grad.shape, grad.stride()) != layout_of(
        origin.shape, origin.stride
    ):
        return grad
    head.left[torch._C._current_graph_task_id()] = grad
    return None


def take(head: Any, origin: Origin | None) -> Tensor | None:
    """What was left with the head in this pass, in the shape that x has where `origin` is from."""
    grad = head.left.pop(torch._C._current_graph_task_id(), None)
    return grad if grad is None or grad.shape == origin.shape else grad.view(origin.shape)
