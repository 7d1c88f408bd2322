# SPDX-License-Identifier: Apache-2.0
"""How an operator of the library becomes torch.ops.weft.*: `define`.

An operator is written as two functions. `outputs` makes the empty results, and serves as the fake kernel; `plan` says
which call of the library fills them. Gradients are registered the same way, as operators of their own, so that compiled
graphs see them; they have no gradient in turn and say so."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from .. import _C
from . import framework

LIB = torch.library.Library("weft", "DEF")


_C.set_framework(framework)


@lru_cache(maxsize=512)
def prepared(name: str, scalars: tuple) -> _C.Call:
    """An operator with its scalars filled in; scalars are pairs of names and values."""
    return _C.Call(name, dict(scalars))


class Plan(NamedTuple):
    """A call of the library for an operator with its scalars: for every tensor of the library's table the argument of
    the operator that it is, ~j for result j, or None; `step` is the argument that is the dropout's step, or -1."""

    call: _C.Call
    precision: int
    step: int
    order: tuple[int | None, ...]


def planned(name: str, order: tuple, *scalars: tuple, precision: int = 0, step: int = -1) -> Plan:
    return Plan(prepared(name, scalars), precision, step, order)


def wanted(want: list[bool]) -> list[int | None]:
    """The places of wanted gradients in an order, the first one's first."""
    return [~k if w else None for k, w in enumerate(want)]


class Definition(NamedTuple):
    """An operator in parts."""

    op: Callable
    outputs: Callable
    plan: Callable | None
    launch: Callable
    save: Callable | None
    backward: Callable | None


DEFINITIONS: dict[str, Definition] = {}


PLAIN = (Tensor, torch.nn.Parameter)


def is_plain(args: tuple) -> bool:
    """Nobody below autograd wants to see the call: no tensor subclass, no meta tensor, no dispatch mode."""
    if torch._C._len_torch_dispatch_stack():
        return False
    return all(type(a) in PLAIN and not a.is_meta for a in args if isinstance(a, Tensor))


class Node(torch.autograd.Function):
    """The autograd node of every operator. Arguments: the operator's own, its name, and a sink (grads.py) that says
    where gradients go, or None."""

    @staticmethod
    def forward(ctx, *everything):
        *args, name, sink = everything
        definition = DEFINITIONS[name]
        with torch._C._AutoDispatchBelowAutograd():
            output = definition.op(*args)
        ctx.set_materialize_grads(False)
        if definition.save is not None:
            definition.save(ctx, tuple(args), output)
        ctx.name, ctx.sink = name, sink
        return output

    @staticmethod
    def backward(ctx, *grads):
        backward, sink = DEFINITIONS[ctx.name].backward, ctx.sink
        if all(g is None for g in grads) and (sink is None or sink.grad_x is None):
            return (None,) * len(ctx.needs_input_grad)
        if backward is None:
            raise NotImplementedError(f"{ctx.name}: it has no gradient: weft's operators can be differentiated once")
        return *backward(ctx, *grads), None, None


def launch_of(plan: Callable, tensors: int, needs: int, without: Callable | None, views: Callable | None) -> Callable:
    """What a plan comes to: launch(results, *args) fills the results by a call of the library. Those in `add` are added
    to, other gradients are overwritten."""

    def launch(results, *args, add=()):
        if isinstance(results, Tensor):
            results = (results,)
        if needs >= 0 and args[needs] is None:
            args = without(results, args, add)
        call, precision, step, order = plan(*args[tensors:])
        if views is not None:
            results, args, add = views(results, args, add)
        found = [None if k is None else args[k] if k >= 0 else results[~k] for k in order]
        mask = sum(1 << k for k, t in enumerate(found) if any(t is a for a in add)) if add else 0
        _C.run(call, mask, precision, framework.threads(), None if step < 0 else args[step], *found)

    return launch


def define(
    schema: str,
    outputs: Callable,
    plan: Callable | None,
    save: Callable | None = None,
    backward: Callable | None = None,
    needs: int = -1,
    without: Callable | None = None,
    views: Callable | None = None,
    mutates: tuple[int, ...] = (),
    launch: Callable | None = None,
) -> None:
    """Registers an operator: `plan(*scalars)` says what it does, `save(ctx, inputs, output)` keeps what
    `backward(ctx, *grads)` needs. Where argument `needs` is None the plan does not apply, and
    `without(results, args, add)` returns the arguments of a call that comes to the same. Where the library takes views
    of arguments and results, `views(results, args, add)` returns all three with the views in their places. `mutates`
    are the positions of arguments that are written. An operator that is more than one call of the library has no plan:
    `launch(results, *args, add=())` makes the calls.

    The autograd kernel is written here and not left to torch.library.register_autograd, because the ways through the
    dispatcher are most of what a small call costs. For the same reason an operator is a kernel of the extension
    (python/kernel.c), and what is here serves the calls that it passes on. That kernel knows neither views nor versions
    of tensors, and makes one call, so an operator that has either or makes more is a kernel in Python."""
    name, _, arguments = schema.partition("(")
    tensors = arguments.partition("->")[0].count("Tensor")
    launch = launch or launch_of(plan, tensors, needs, without, views)

    def fake(*args):
        # A call with one tensor on meta is dispatched here, and would return memory that nobody fills.
        devices = {t.device for t in args if isinstance(t, Tensor)}
        if len(devices) > 1:
            raise ValueError(f"{name}: expected all tensors on one device, got {', '.join(sorted(map(str, devices)))}")
        return outputs(*args)

    def kernel(*args):
        results = outputs(*args)
        launch(results, *args)
        for k in mutates:
            if not args[k].is_inference():
                torch.autograd.graph.increment_version(args[k])
        return results

    def autograd(*args):
        if torch.is_grad_enabled() and any(isinstance(a, Tensor) and a.requires_grad for a in args):
            return Node.apply(*args, name, None)
        if is_plain(args):
            return kernel(*args)
        with torch._C._AutoDispatchBelowAutograd():
            return op(*args)

    LIB.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    direct = plan is not None and views is None and not mutates
    for otherwise, key in ((kernel, "CompositeExplicitAutograd"), (autograd, "Autograd")):
        LIB.impl(name, _C.Kernel(tensors, needs, plan, outputs, otherwise) if direct else otherwise, key)
    torch.library.register_fake(f"weft::{name}", fake, lib=LIB)
    op = getattr(torch.ops.weft, name).default
    DEFINITIONS[name] = Definition(op, outputs, plan, launch, save, backward)


def differentiate(ctx, name: str, want: list[bool], *args) -> tuple:
    """Runs the registered gradient `name` and returns what autograd takes: None where a gradient is not wanted. A node
    with a sink (grads.py) has it say where gradients go."""
    sink = ctx.sink
    if sink is not None:
        return sink.differentiate(DEFINITIONS[name], want, args)
    grads = DEFINITIONS[name].op(*args)
    if isinstance(grads, Tensor):
        grads = (grads,)
    return tuple(g if w else None for w, g in zip(want, grads, strict=True))
