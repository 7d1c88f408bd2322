# SPDX-License-Identifier: Apache-2.0
"""Where gradients go when they do not go back to autograd: into `main_grad` of a parameter, or into one sum of the
gradients that several operators have for the same streams. Both are off by default, and both are for eager mode: a
compiled graph returns its gradients."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from . import register


class GradX:
    """One sum for the gradients that `project`, `aggregate` and `post` have for the same x.

    Without it they are summed in x's dtype, in place where that can be (joins.py). With it, in the order in which backward
    reaches them, `post` writes the sum, `aggregate` adds to it, `project` adds to it and hands it to autograd:

        grad_x = GradX()
        h, ms = project(x, phi, grad_x=grad_x)
        u = aggregate(x, pre, grad_x=grad_x)
        y = post(x, f, post, res, numerics=..., grad_x=grad_x)

    An object serves one x of one forward pass at a time; it can be used again after the backward pass. The sum is kept
    in fp32, with one rounding at the end (`dtype=None`: in x's dtype, which moves fewer bytes). `buffer` may give the
    memory: as many elements as x, contents undefined. Whatever would make the sum wrong is a RuntimeError: an operator
    that comes before the first writer, a second writer, another x, the next forward pass before this one's backward."""

    WRITER, ADDER, LAST = "post", "aggregate", "project"

    def __init__(self, dtype: torch.dtype | None = torch.float32, buffer: Tensor | None = None):
        self._dtype = dtype
        self._buffer = buffer
        self._users: dict[str, Tensor] = {}  # forward calls whose backward has not come
        self._sum: Tensor | None = None
        self._shape: torch.Size | None = None

    def attach(self, role: str, x: Tensor) -> None:
        """A forward call in which x needs a gradient says that it will take part."""
        if torch.compiler.is_compiling():
            raise RuntimeError("GradX: it is for eager mode; leave grad_x out under torch.compile")
        if role in self._users:
            raise RuntimeError(f"GradX: expected one {role} for each backward pass, got a second one before it")
        if self._sum is not None:
            raise RuntimeError(f"GradX: {role} came before the last backward pass had ended with {self.LAST}")
        for other, theirs in self._users.items():
            if theirs.data_ptr() != x.data_ptr() or theirs.shape != x.shape:
                raise RuntimeError(f"GradX: expected {role} to have the same x as {other}, got another tensor")
        self._users[role] = x.detach()

    def target(self, role: str, x: Tensor) -> tuple[Tensor, bool]:
        """In backward: the sum, and whether to add to it (or to overwrite it)."""
        if role == self.WRITER:
            if self._sum is not None:
                raise RuntimeError("GradX: post came twice in one backward pass: it would overwrite the sum")
            self._sum = self._make(x)
            return self._sum, False
        if self._sum is None:
            raise RuntimeError(
                f"GradX: {role} came in backward before post had written: give the same GradX to post, and let its"
                " result take part in the loss"
            )
        return self._sum, True

    def finish(self, role: str, x: Tensor) -> Tensor | None:
        """After a gradient was computed: what autograd gets for x."""
        if role != self.LAST:
            return None
        total, self._sum = self._sum, None
        self._users.clear()
        # The caller's memory stays the caller's: what autograd gets must not change when it is written again.
        return total.to(x.dtype, copy=self._buffer is not None)

    def _make(self, x: Tensor) -> Tensor:
        dtype = x.dtype if x.dtype == torch.float64 else self._dtype or x.dtype
        if self._buffer is None:
            return torch.empty_like(x, dtype=dtype)
        buffer = self._buffer
        if buffer.numel() != x.numel() or buffer.device != x.device or buffer.dtype not in (dtype, x.dtype):
            raise RuntimeError(
                f"GradX: buffer: expected {x.numel()} elements of {dtype} on {x.device}, got {buffer.numel()} of"
                f" {buffer.dtype} on {buffer.device}"
            )
        dense = torch.empty_like(x, device="meta")  # x's memory order, if it is a dense one
        return buffer.view(-1).as_strided(x.shape, dense.stride())


# ---- main_grad ---------------------------------------------------------------------------------------------------
# A parameter takes part in the protocol by attributes, all of them looked up when backward comes:
#     main_grad                where its gradient is added, in a dtype of its own
#     get_main_grad()          returns that memory, for engines that have it between backward passes only
#     overwrite_main_grad      true: the memory holds nothing, the gradient is written over it
#     grad_added_to_main_grad  is set to True, and autograd gets a stand-in, so that hooks run
#     zero_out_wgrad           true: the stand-in is zero, for engines that add it

PROTOCOL = ("main_grad", "get_main_grad", "grad_added_to_main_grad")


class Lent(NamedTuple):
    """Which parameter a tensor is a view of, and the same view of another tensor of its shape."""

    param: Tensor
    view: Callable[[Tensor], Tensor]


def lend(param: Tensor, view: Callable[[Tensor], Tensor]) -> Tensor:
    """view(param), whose gradient goes into the main_grad of param, if that has one, where an operator is called with
    main_grad=True. Elements that the view leaves out have no gradient."""
    shown = view(param)
    if not torch.compiler.is_compiling() and takes_part(param):
        shown._weft_lent = Lent(param, view)
    return shown


def takes_part(param: Tensor) -> bool:
    """Whether a parameter has anything of the protocol, now."""
    return any(hasattr(param, name) for name in PROTOCOL)


def any_takes_part(*params: Tensor | None) -> bool:
    """Whether one of the parameters, or of the parameters that they are views of, does."""
    if torch.compiler.is_compiling():
        return False
    return any(p is not None and (hasattr(p, "_weft_lent") or takes_part(p)) for p in params)


def main_grad_of(param: Tensor) -> Tensor | None:
    """Where the gradient of a parameter goes, or None where autograd gets it."""
    get = getattr(param, "get_main_grad", None)
    if get is not None:
        param.main_grad = get()
    return getattr(param, "main_grad", None)


def _stand_in(param: Tensor) -> Tensor | None:
    """What autograd gets for a parameter whose gradient is in main_grad. Frameworks that ask by
    `grad_added_to_main_grad` need a tensor, so that their hooks run; they look at its shape only."""
    if not hasattr(param, "grad_added_to_main_grad"):
        return None
    param.grad_added_to_main_grad = True
    one = param.new_zeros(()) if getattr(param, "zero_out_wgrad", False) else param.new_empty(())
    return one.expand(param.shape)


def _target(shown: Tensor) -> tuple[Tensor | None, bool, Tensor | None]:
    """Where the gradient of a parameter, or of a view of one, goes, whether to add to what is there, and what autograd
    gets; (None, ...) where it gets the gradient itself."""
    param, view = getattr(shown, "_weft_lent", None) or Lent(shown, _as_it_is)
    main = main_grad_of(param)
    if main is None:
        return None, False, None
    target, add = view(main), not getattr(param, "overwrite_main_grad", False)
    if not add and target.numel() < main.numel():
        main.zero_()
    stand_in = _stand_in(param)
    return target, add, stand_in if stand_in is None else view(stand_in)


def _as_it_is(param: Tensor) -> Tensor:
    return param


class _Deposit(torch.autograd.Function):
    @staticmethod
    def forward(ctx, param):
        ctx.param = param
        return param.view_as(param)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        target, add, stand_in = _target(ctx.param)
        if target is None:
            return grad
        if add:
            target.add_(grad)
        else:
            target.copy_(grad)
        return stand_in


def deposit(param: Tensor) -> Tensor:
    """param, whose gradient goes into its main_grad, if it has one, whatever is done with it: for parameters that reach
    an operator in another form than a view."""
    if torch.compiler.is_compiling() or not (torch.is_grad_enabled() and param.requires_grad and takes_part(param)):
        return param
    return _Deposit.apply(param)


class Sink:
    """Where the gradients of one operator call go: targets for x, for parameters, or autograd."""

    def __init__(self, params: dict[int, Tensor], grad_x: GradX | None = None, role: str = ""):
        self.params = params  # by the number of their gradient
        self.grad_x = grad_x
        self.role = role

    def differentiate(self, gradient: register.Operator, want: list[bool], args: tuple, left: Tensor | None) -> tuple:
        """Gradients, None for those that autograd does not get. left: what the site's readers of x have (joins.py)."""
        if torch.is_grad_enabled():
            raise NotImplementedError(
                "weft: gradients that go into main_grad or GradX cannot be differentiated again (create_graph=True)"
            )
        targets, add, returned = {}, 0, {}
        for k, param in self.params.items():
            target, adds, stand_in = _target(param) if want[k] else (None, False, None)
            if target is not None:
                targets[k] = target
                add |= adds << k
                returned[k] = stand_in
        x = args[0]
        if self.grad_x is not None and want[0]:
            targets[0], adds = self.grad_x.target(self.role, x)
            add |= adds
        elif left is not None and want[0]:
            targets[0] = left
            add |= 1
        out = gradient.fill_wanted(want, args, targets, add)
        if self.grad_x is not None and want[0]:
            returned[0] = self.grad_x.finish(self.role, x)
        return tuple(returned.get(k, t) if w else None for k, (w, t) in enumerate(zip(want, out, strict=True)))


def params_of(operator: register.Operator, args: tuple) -> dict[int, Tensor]:
    """The parameters of a call, by the number of their gradient."""
    return {k: args[place] for k, place in operator.parameters if args[place] is not None}


def operation(name: str, main_grad: bool = False) -> Callable:
    """What to call for torch.ops.weft.<name>. With main_grad gradients of parameters go into their `main_grad`, where the
    live parameter has one in backward. It is returned and not called here: a frame less in every call."""
    operator = register.OPERATORS[name]
    if main_grad and torch.is_grad_enabled() and not torch.compiler.is_compiling():
        return partial(_apply_node, operator)
    return operator.op


def _apply_node(operator: register.Operator, *args):
    return register.Node.apply(operator, Sink(params_of(operator, args)), *args)


def call_and_sum(name: str, args: tuple, grad_x: GradX | None, role: str, main_grad: bool = False):
    """The results of torch.ops.weft.<name>, with the gradient of the first argument summed in `grad_x`."""
    x = args[0]
    if grad_x is None or not (torch.is_grad_enabled() and x.requires_grad):
        return operation(name, main_grad)(*args)
    grad_x.attach(role, x)
    operator = register.OPERATORS[name]
    return register.Node.apply(operator, Sink(params_of(operator, args) if main_grad else {}, grad_x, role), *args)
