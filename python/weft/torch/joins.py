# SPDX-License-Identifier: Apache-2.0
"""One gradient of the streams for everything that a site reads them for.

The head of a site, `project` or `pre`, reads streams x; with the coefficients that come of it `aggregate`, `post` and `boundary`
read x again. Autograd would sum their gradients of x in passes of its own over memory. Instead a reader finds the head in
the graph, from its coefficients upwards, and in backward leaves its gradient there; the head, which the engine runs after
its readers, adds to it in its own pass and returns the sum.

The graph decides, and nothing else is remembered: the two must have x from the same output of the same node, with the same
memory and at the same version, so an x that was changed in place, detached or computed again is another one, and so is a
view, on which there may be hooks. Only the views that a drop-in makes for one call are looked through (`view_of`). Where no
head is found, or the engine does not run it in this backward pass, autograd adds as usual: compiled graphs, tensor
subclasses, batched gradients, dispatch modes, create_graph=True and several CUDA streams are such cases."""

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
STEPS = 12  # nodes to look at on the way up: views, Sinkhorn, gates


class Origin(NamedTuple):
    """What x is: an output of a node, or a leaf, and where its elements lie."""

    node: Any
    output: int
    place: tuple
    shape: torch.Size
    stride: tuple[int, ...]

    def is_that_of(self, other: Origin | None) -> bool:
        if other is None or self.node is not other.node or self[1:3] != other[1:3]:
            return False
        return self[3:] == other[3:] or layout_of(*self[3:]) == layout_of(*other[3:])


class Part:
    """What a node of weft knows of its site, as `ctx.part`."""

    __slots__ = ("head", "left", "operator", "origin")

    def __init__(self, operator: str):
        self.operator = operator
        self.origin: Origin | None = None
        self.head: Any = None
        self.left: dict[int, Tensor] = {}  # gradients of x by backward pass


def view_of(x: Tensor, view: Tensor) -> Tensor:
    """A view of x that is made for one operator and does not leave its call, so that there can be no hooks on it."""
    if x.requires_grad and not torch.compiler.is_compiling():
        view._weft_view_of = x
    return view


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


def is_hidden() -> bool:
    """Whether an operator is seen by others than autograd: dispatch modes, functorch."""
    return bool(torch._C._len_torch_dispatch_stack()) or torch._C._functorch.maybe_current_level() is not None


def origin_of(x: Tensor) -> Origin | None:
    if type(x) not in (Tensor, torch.nn.Parameter) or not x.requires_grad or is_hidden():
        return None
    whole = getattr(x, "_weft_view_of", x)
    node = whole.grad_fn
    stream = torch._C._cuda_getCurrentRawStream(x.get_device()) if x.is_cuda else 0
    place = (x.data_ptr(), x.dtype, x._version, stream)
    return Origin(whole if node is None else node, whole.output_nr, place, x.shape, x.stride())


def head_of(origin: Origin | None, coefficients: Tensor | None) -> Any:
    """The node that made the coefficients, if it read what `origin` says."""
    if origin is None or coefficients is None:
        return None
    node = coefficients.grad_fn
    for _ in range(STEPS):
        if node is None:
            return None
        part = getattr(node, "part", None)
        if isinstance(part, Part) and part.operator not in BETWEEN:
            return node if part.operator in HEADS and origin.is_that_of(part.origin) else None
        node = node.next_functions[0][0] if node.next_functions else None
    return None


def heir_of(part: Part) -> Part | None:
    """Who gets the gradient of x that a node computes now: the head of its site, or None, which is autograd."""
    head = part.head
    if head is None or torch.is_grad_enabled() or torch.compiler.is_compiling() or is_hidden():
        return None
    if torch._C._current_graph_task_id() < 0:  # the node is run by hand
        return None
    return head.part if torch._C._will_engine_execute_node(head) else None


def leave(heir: Part, grad: Tensor) -> Tensor | None:
    """Returns what autograd gets. A gradient is kept by pass: two of them may run in one graph. That of a pass which does not
    come to its end goes with the graph."""
    origin = heir.origin
    if grad.stride() != origin.stride and layout_of(grad.shape, grad.stride()) != layout_of(
        origin.shape, origin.stride
    ):
        return grad
    heir.left[torch._C._current_graph_task_id()] = grad
    return None


def take(heir: Part, origin: Origin | None) -> Tensor | None:
    """What was left with the head in this pass, in the shape that x has where `origin` is from."""
    if not heir.left:
        return None
    grad = heir.left.pop(torch._C._current_graph_task_id(), None)
    return grad if grad is None or grad.shape == origin.shape else grad.view(origin.shape)
