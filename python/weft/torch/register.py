# SPDX-License-Identifier: Apache-2.0
"""How an operator of the library becomes torch.ops.weft.*: `operator`.

The library's table of the operator and of its gradient (weft/ops.h) has the names, dtypes and dimensions of tensors and
the types of scalars. From those come the schema, the results, the fake kernel, what is saved for backward and which
gradients there are. Arguments and results are bound to rows of the table by name; a row that nothing is bound to is an
error when the package is imported.

Gradients are operators of their own, so that compiled graphs see them. They have no gradient in turn and say so. Those
that nobody wants come back as tensors without elements, since a registered operator has a fixed number of results;
`want`, the last argument of such an operator, lists which ones are wanted."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from .. import _C
from . import framework, inductor, joins

LIB = torch.library.Library("weft", "DEF")


_C.set_framework(framework)

# ---- the library's tables ----------------------------------------------------------------------------------------


class Row(NamedTuple):
    """A tensor of an operator."""

    name: str
    kind: str  # "in", "out" or "grad"
    type: str  # "act", "wide", "coef", "param", "full" or "index"
    optional: int
    dims: tuple[str | int, ...]
    in_place: str | None  # the argument whose memory an output may use


class Table(NamedTuple):
    rows: dict[str, Row]
    scalars: dict[str, str]  # types by name


TABLES = {op: Table({r[0]: Row(*r) for r in rows}, dict(scalars)) for op, (rows, scalars) in _C.ops().items()}
STREAMS = ("tokens", "streams", "channels")
MIX = ("streams", "streams")
SCALAR_TYPES = {"real": "float", "int": "int", "numerics": "float[]", "gdn": "float[]"}
# Of the counter behind dropout's masks. `step` is an int64 tensor of one element, drawn from torch's generator: with it
# masks repeat under checkpointing and change with every replay of a captured graph, and no mask is stored.
DROPOUT = {"step": "Tensor?", "p": "float", "token_base": "int"}


def types_of(table: Table) -> dict[str, str]:
    """Types of the arguments of an operator in the order that they have unless told: tensors that are needed, those
    that are not, scalars."""
    types = {r.name: "Tensor?" if r.optional else "Tensor" for r in table.rows.values() if r.kind == "in"}
    for name, kind in table.scalars.items():
        types |= DROPOUT if kind == "dropout" else {name: SCALAR_TYPES[kind]}
    rank = {"Tensor": 0, "Tensor?": 1}
    return dict(sorted(types.items(), key=lambda item: rank.get(item[1], 2)))


def read_signature(name: str, signature: str, table: Table) -> dict[str, str]:
    """Types of arguments by name. A signature has names, separated by commas: those of the table as they are, Python's
    own with a type in front. An empty one is what the table has."""
    known = types_of(table)
    if not signature:
        return known
    arguments = {}
    for item in signature.split(","):
        *own, argument = item.split()
        if not own and argument not in known:
            raise TypeError(f"{name}: {argument}: expected a name of the library's table or a type, got neither")
        arguments[argument] = own[0] if own else known[argument]
    for argument in known:
        if argument not in arguments:
            raise TypeError(f"{name}: {argument}: expected in its signature, for the library has it")
    return arguments


def bind(name: str, table: Table, arguments: dict, results: tuple, binds: dict, where: dict) -> tuple[tuple, ...]:
    """For every row the argument or result that it is, and the scalar that decides whether it is there."""
    rows = []
    for row in table.rows.values():
        known = binds.get(row.name, row.name)
        given = arguments if row.kind == "in" else (*results, *binds.values())  # an argument may be written in place
        if known not in given:
            what = "an argument or a result of that name"
            raise TypeError(f"{name}: {row.name}: expected {what}, for the library has it")
        scalar, item = None, 0
        if row.kind == "grad" and "want" in arguments:
            scalar, item = "want", results.index(known)
        elif row.name in where:
            *negated, scalar = where[row.name].split()
            item = 0 if negated else 1
        rows.append((row.name, known, scalar, item))
    return tuple(rows)


# ---- results -----------------------------------------------------------------------------------------------------


def maybe(wanted: bool, like: Tensor) -> Tensor:
    """An empty tensor like `like`, in its memory order, or one without elements."""
    return torch.empty_like(like) if wanted else like.new_empty(0)


def wide(x: Tensor) -> torch.dtype:
    """The dtype of coefficients: fp32, or float64 on the reference backend."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def streams_of(gates: int, scales: int) -> int:
    """n from 2n + n*n, or from 2n where there are two scales."""
    streams = gates // 2 if scales == 2 else int((gates + 1) ** 0.5) - 1
    rows = 2 * streams if scales == 2 else streams * (streams + 2)
    if streams < 1 or rows != gates:
        expected = "2n numbers a token with two scales" if scales == 2 else "2n + n*n numbers a token"
        raise ValueError(f"coefficients: expected {expected}, got {gates}")
    return streams


class Shapes:
    """Sizes of dimensions by name, from the arguments of a call: from a scalar of that name, from `own(arguments)`, or
    from the tensors that must be there."""

    def __init__(self, library: str, arguments: dict[str, str], own: Callable[[dict], dict] | None):
        self.library, self.own = library, own
        self.scalars = {name for name, kind in arguments.items() if kind == "int"}
        self.axes: dict[str, tuple[Row, int]] = {}
        for row in TABLES[library].rows.values():
            if row.kind != "in" or row.optional:
                continue
            flat = row.dims[0] != "tokens" and row.dims[-2:] == STREAMS[1:]  # a weight may be given as [.., n*C]
            for axis, dim in enumerate(row.dims[: -2 if flat else None]):
                self.axes.setdefault(dim, (row, axis))

    def of(self, dims: Iterable[str | int], named: dict) -> tuple[int, ...]:
        own = self.own(named) if self.own else {}
        shape: tuple[int, ...] = ()
        for dim in dims:
            if isinstance(dim, int):
                shape += (dim,)
            elif dim in own:
                shape += (own[dim],)
            elif dim in self.scalars:
                shape += (named[dim],)
            elif dim in self.axes:
                shape += self._axis(dim, named)
            elif dim == "streams":
                shape += (streams_of(*self._axis("gates", named), *self._axis("scales", named)),)
            elif named["cu_seqlens"] is None:  # sequences
                shape += self._axis("batch", named)
            else:
                shape += (named["cu_seqlens"].shape[0] - 1,)
        return shape

    def is_unmixed(self, row: Row, named: dict) -> bool:
        """Whether a row is n x n numbers of a token, and the call has no such thing: of two scales."""
        return row.dims[1:] == MIX and "scales" in self.axes and self._axis("scales", named) == (2,)

    def _axis(self, dim: str, named: dict) -> tuple[int, ...]:
        row, axis = self.axes[dim]
        t = named[row.name]
        folded = row.dims[0] == "tokens"  # any number of dimensions
        least = len(row.dims) - 1 if folded else axis + 1
        if t.dim() < least:
            raise ValueError(f"{self.library}: {row.name}: expected at least {least} dimensions, got {list(t.shape)}")
        if folded:
            return tuple(t.shape[: t.dim() - least]) if axis == 0 else (t.shape[axis - len(row.dims)],)
        return (t.shape[axis],)


def outputs_of(
    library: str, arguments: dict, results: tuple, where: dict, wide_where: dict, likes: dict, sizes: Callable | None
) -> Callable:
    """outputs(*args) makes the empty results of a call: fresh, contiguous or in the memory order of x, one storage
    each. It serves as the fake kernel."""
    table, names = TABLES[library], tuple(arguments)
    shapes = Shapes(library, arguments, sizes)

    def first_of(named: dict) -> Tensor:
        first = named[names[0]]
        return named[likes[names[0]]] if first is None else first

    def dtype_of(row: Row, named: dict, first: Tensor) -> torch.dtype:
        if row.name in wide_where:
            return wide(first) if named[wide_where[row.name]] else first.dtype
        like = named.get(row.name.removeprefix("d_") if row.kind == "grad" else row.in_place)
        if like is not None:
            return like.dtype
        return wide(first) if row.type in ("full", "coef", "param") else first.dtype

    def result(row: Row, named: dict, first: Tensor) -> Tensor:
        if row.name in where and not named[where[row.name]]:
            return maybe(False, first)
        if shapes.is_unmixed(row, named):
            return maybe(False, first)
        if row.dims == STREAMS and shapes.axes.get("tokens", (row,))[0].dims == STREAMS:
            return torch.empty_like(first)
        return first.new_empty(shapes.of(row.dims, named), dtype=dtype_of(row, named, first))

    def gradients(*args):
        named = dict(zip(names, args, strict=True))
        first = first_of(named)
        found = (named[name.removeprefix("d_")] for name in results)
        return tuple(maybe(w, first if t is None else t) for w, t in zip(named["want"], found, strict=True))

    def outputs(*args):
        named = dict(zip(names, args, strict=True))
        first = first_of(named)
        made = tuple(result(row, named, first) for row in rows)
        return made[0] if len(made) == 1 else made

    if "want" in arguments:
        return gradients
    rows = [table.rows[name] for name in results]
    where = {name: scalar for name, scalar in where.items() if name in results and scalar in arguments}
    return outputs


# ---- operators ---------------------------------------------------------------------------------------------------


class Operator:
    """A registered operator."""

    def __init__(self, name: str, arguments: dict[str, str], results: tuple[str, ...]):
        self.name, self.arguments, self.results = name, arguments, results
        self.tensors = tuple(a for a, kind in arguments.items() if kind.startswith("Tensor"))
        self.scalars = tuple(a for a in arguments if a not in self.tensors)
        self.place = {a: k for k, a in enumerate(arguments)}
        self.op: torch._ops.OpOverload  # torch.ops.weft.<name>.default
        self.kernel: _C.Kernel  # the same past the dispatcher
        self.outputs: Callable
        self.likes: tuple[int, ...] = ()  # of a gradient: the argument that each result is like
        self.complete: Callable | None = None
        self.gradient: Gradient | None = None
        self.parameters: list[tuple[int, int]] = []  # (result of the gradient, argument) each
        self.reads = tuple(self.place[a] for a in joins.READERS.get(name, ()))
        self.joined = name in joins.HEADS or bool(self.reads)  # its gradient of x is summed with others'

    def replaced(self, args: tuple, **named) -> tuple:
        """Arguments with others in the places of those names."""
        args = list(args)
        for name, value in named.items():
            args[self.place[name]] = value
        return tuple(args)

    def join(self, ctx, args: tuple) -> None:
        """Has the node of this call be found as the head of its site, or finds that (joins.py)."""
        part = ctx.part
        part.origin = joins.origin_of(args[0])
        for place in self.reads:
            part.head = part.head or joins.head_of(part.origin, args[place])

    def fill(self, results: Tensor | tuple, args: tuple, add: int = 0) -> None:
        """One call of the library into results that exist; bit k of `add`: it is added to result k."""
        if isinstance(results, Tensor):
            results = (results,)
        if self.complete is not None:
            args = self.complete(self, results, args, add)
        self.kernel.fill(add, *results, *args)

    def fill_wanted(self, want: list[bool], args: tuple, targets: dict[int, Tensor], add: int) -> tuple:
        """The results of a gradient, those in `targets` written where they say."""
        if not self.likes:
            fresh = self.outputs(*args[:-1], [w and k not in targets for k, w in enumerate(want)])
            results = tuple(targets.get(k, t) for k, t in enumerate(fresh))
        else:
            found = (targets.get(k) for k in range(len(want)))
            likes = zip(found, want, self.likes, strict=True)
            results = tuple(maybe(w, args[0] if args[k] is None else args[k]) if t is None else t for t, w, k in likes)
        self.fill(results, args, add)
        return results


OPERATORS: dict[str, Operator] = {}
PLAIN = (Tensor, torch.nn.Parameter)


def is_plain(args: tuple) -> bool:
    """Nobody below autograd wants to see the call: no tensor subclass, no meta tensor, no dispatch mode."""
    if torch._C._len_torch_dispatch_stack():
        return False
    return all(type(a) in PLAIN and not a.is_meta for a in args if isinstance(a, Tensor))


def is_batched(grad: Tensor | None) -> bool:
    """Of torch.autograd.grad(is_grads_batched=True)."""
    return grad is not None and torch._C._functorch.is_legacy_batchedtensor(grad)


def add_to_torch(
    operator: Operator, library: str, rows: tuple, needs: tuple, writes: tuple, sections: tuple | None
) -> None:
    """The autograd kernel is written here and not left to torch.library.register_autograd, because the ways through the
    dispatcher are most of what a small call costs. For the same reason an operator is a kernel of the extension
    (python/kernel.c), and what is here serves the calls that it passes on."""
    name, outputs = operator.name, operator.outputs
    kinds = {a: kind.replace("Tensor", "Tensor(a!)") if a in writes else kind for a, kind in operator.arguments.items()}
    results = ", ".join("Tensor" for _ in operator.results)
    results = results if len(operator.results) == 1 else f"({results})"
    schema = f"{name}({', '.join(f'{kind} {a}' for a, kind in kinds.items())}) -> {results}"

    def fake(*args):
        # A call with one tensor on meta is dispatched here, and would return memory that nobody fills.
        devices = {t.device for t in args if isinstance(t, Tensor)}
        if len(devices) > 1:
            raise ValueError(f"{name}: expected all tensors on one device, got {', '.join(sorted(map(str, devices)))}")
        inductor.introduce(operator.op)
        return outputs(*args)

    def below_autograd(*args):
        results = outputs(*args)
        operator.fill(results, args)
        return results

    record = partial(Node.apply, operator, None)

    def autograd(*args):
        if torch.is_grad_enabled() and any(isinstance(a, Tensor) and a.requires_grad for a in args):
            return record(*args)
        if is_plain(args):
            return below_autograd(*args)
        with torch._C._AutoDispatchBelowAutograd():
            return operator.op(*args)

    LIB.define(schema, tags=(torch.Tag.pt2_compliant_tag, inductor.EXACT_STRIDES))
    names = (operator.tensors, operator.scalars, operator.results)
    passed_on = {"CompositeExplicitAutograd": (below_autograd, below_autograd), "Autograd": (record, autograd)}
    for key, to in passed_on.items():
        operator.kernel = _C.Kernel(library, *names, rows, needs, writes, sections, outputs, *to)
        LIB.impl(name, operator.kernel, key)
    torch.library.register_fake(f"weft::{name}", fake, lib=LIB)
    operator.op = getattr(torch.ops.weft, name).default
    OPERATORS[name] = operator


# ---- gradients ---------------------------------------------------------------------------------------------------


class Node(torch.autograd.Function):
    """The autograd node of every operator. Arguments: the operator, a sink (grads.py) that says where gradients go or
    None, and the operator's own."""

    OWN = 2  # arguments before the operator's

    @staticmethod
    def forward(ctx, operator, sink, *args):
        if sink is None:  # the call has come through the dispatcher
            output = operator.kernel(*args)
        else:
            with torch._C._AutoDispatchBelowAutograd():
                output = operator.op(*args)
        Node.keep(ctx, operator, sink, args, output)
        return output

    @staticmethod
    def keep(ctx, operator, sink, args, output):
        """All that backward looks at."""
        ctx.set_materialize_grads(False)
        if operator.gradient is not None:
            operator.gradient.save(ctx, args, output)
        ctx.operator, ctx.sink = operator, sink
        ctx.part = joins.Part(operator.name)
        if operator.joined and (sink is None or sink.grad_x is None):
            operator.join(ctx, args)

    @staticmethod
    def backward(ctx, *grads):
        operator, sink = ctx.operator, ctx.sink
        if all(g is None for g in grads) and (sink is None or sink.grad_x is None):
            nothing = [None] * len(ctx.needs_input_grad)
            nothing[Node.OWN] = joins.take(ctx.part, ctx.part.origin)
            return tuple(nothing)
        if operator.gradient is None:
            raise NotImplementedError(
                f"{operator.name}: it has no gradient: weft's operators can be differentiated once"
            )
        return operator.gradient.backward(ctx, grads)


def rows_of(grad: Tensor, like: Tensor) -> Tensor:
    """A gradient of streams as the library can read it: a copy where its leading dimensions are not one run of
    tokens."""
    return grad if grad.is_contiguous() or grad.stride() == like.stride() else grad.contiguous()


def dense(grad: Tensor, like: Tensor | None) -> Tensor:
    return grad.contiguous()


def with_dense_heads(grad: Tensor, like: Tensor | None) -> Tensor:
    """A gradient as kernels can read it quickly: heads dense, tokens wherever they are."""
    if grad.stride(-1) == 1 and (grad.dim() < 4 or grad.stride(-2) == grad.shape[-1]):
        return grad
    return grad.contiguous()


def above_of(forward: Operator, table: Table) -> list[tuple[int, str]]:
    """The results of an operator that its gradient, with that table, has an upstream gradient of: places and names."""
    return [(k, r) for k, r in enumerate(forward.results) if f"d_{r}" in table.rows]


class Upstream(NamedTuple):
    """The gradient of a result, as an argument of the gradient's operator."""

    result: int
    like: int  # the saved tensor of the same dimensions, or -1
    needed: bool
    read: Callable[[Tensor, Tensor | None], Tensor]


class Gradient:
    """What an operator keeps for its gradient, and how that is called. All of it follows from the gradient's arguments:
    those that are arguments or results of the operator are kept, d_<result> comes from above. `spare` are tensors that
    are not kept where a function of the arguments says so, `keeps(*args)` gives the scalars where they are not those of
    the operator."""

    def __init__(
        self, forward: Operator, operator: Operator, table: Table, where: dict, spare: dict, likes: dict, keeps
    ):
        self.operator, self.keeps = operator, keeps
        self.tensors = [forward.place[t] for t in operator.tensors if t in forward.place]
        self.results = [forward.results.index(t) for t in operator.tensors if t in forward.results]
        self.scalars = [forward.place[s] for s in operator.scalars if s in forward.place]
        saved = [t for t in operator.tensors if t in forward.place or t in forward.results]
        self.spared = {saved.index(t): test for t, test in spare.items()}
        self.names = tuple(forward.arguments)
        self.upstream = [self._upstream(table.rows[f"d_{r}"], k, table, saved) for k, r in above_of(forward, table)]
        self.likes = {saved.index(t): saved.index(other) for t, other in likes.items()}
        # Results that have no gradient, and those that are not there where a scalar says so.
        above = [u.result for u in self.upstream]
        self.apart = [k for k in range(len(forward.results)) if k not in above]
        self.absent = [(k, forward.place.get(where.get(r))) for k, r in enumerate(forward.results)]
        self.absent = [(k, scalar) for k, scalar in self.absent if scalar is not None]
        self.place = [Node.OWN + forward.place[r.removeprefix("d_")] for r in operator.results]
        self.count = Node.OWN + len(forward.arguments)
        self.wants = "want" in operator.arguments

    @staticmethod
    def _upstream(row: Row, result: int, table: Table, saved: list[str]) -> Upstream:
        same = [k for k, t in enumerate(saved) if t in table.rows and table.rows[t].dims == row.dims]
        if row.dims[0] != "tokens":
            read = with_dense_heads
        else:
            read = rows_of if row.dims == STREAMS and same else dense
        return Upstream(result, same[0] if same else -1, not row.optional, read)

    def save(self, ctx, args: tuple, output) -> None:
        results = (output,) if isinstance(output, Tensor) else output
        kept = [*(args[k] for k in self.tensors), *(results[k] for k in self.results)]
        for k, test in self.spared.items():
            if test(dict(zip(self.names, args, strict=True))):
                kept[k] = None
        ctx.save_for_backward(*kept)
        ctx.scalars = self.keeps(*args) if self.keeps else [args[k] for k in self.scalars]
        apart = [results[k] for k in self.apart] + [results[k] for k, s in self.absent if not args[s]]
        if apart:
            ctx.mark_non_differentiable(*apart)

    def backward(self, ctx, grads: tuple) -> tuple:
        saved, needs = ctx.saved_tensors, ctx.needs_input_grad
        want = [needs[k] for k in self.place]
        above = []
        for result, like, needed, read in self.upstream:
            grad = grads[result]
            same = saved[self.likes.get(like, like) if saved[like] is None else like] if like >= 0 else None
            if grad is not None:
                grad = read(grad, same)
            elif needed:
                grad = same.new_zeros(1).expand(same.shape)
            above.append(grad)
        args = (*saved, *above, *ctx.scalars, want) if self.wants else (*saved, *above, *ctx.scalars)
        part = ctx.part
        plain = (part.head is not None or part.left) and is_plain(args) and not any(map(is_batched, above))
        heir = joins.heir_of(part) if plain and want[0] else None
        left = joins.take(part if heir is None else heir, part.origin)
        if ctx.sink is not None:
            found = ctx.sink.differentiate(self.operator, want, args, left)
        elif left is not None and plain:
            found = self.operator.fill_wanted(want, args, {0: left}, 1)
        else:
            found = self.operator.op(*args)
            found = (found,) if isinstance(found, Tensor) else found
            if left is not None:
                found = (found[0] + left, *found[1:])
        if heir is not None:
            found = (joins.leave(heir, found[0]), *found[1:])
        all_of = [None] * self.count
        for k, wanted, grad in zip(self.place, want, found, strict=True):
            if wanted:
                all_of[k] = grad
        return tuple(all_of)


# ---- forward and backward of an operator -------------------------------------------------------------------------


def operator(
    name: str,
    signature: str = "",
    *,
    library: str = "",
    results: str = "",
    binds: dict[str, str] | None = None,
    where: dict[str, str] | None = None,
    wide_where: dict[str, str] | None = None,
    sizes: Callable[[dict], dict] | None = None,
    sections: tuple[str, tuple[str, ...]] | None = None,
    writes: tuple[str, ...] = (),
    forward_only: tuple[str, ...] = (),
    not_parameters: tuple[str, ...] = (),
    spare: dict[str, Callable[[dict], bool]] | None = None,
    likes: dict[str, str] | None = None,
    needs: tuple[str, ...] = (),
    complete: Callable | None = None,
    gradient: str = "",
    keeps: Callable | None = None,
    gradient_outputs: Callable | None = None,
) -> None:
    """Registers torch.ops.weft.<name>, and <name>_bwd where the library has a gradient. What is not said comes from the
    library's tables.

    library: its name there, without the pass. signature: the arguments, where their order is not that of `types_of` or
    some are Python's own. results: rows of the table, where not all or in another order. binds: rows that go by another
    name here. where: rows that are there where a scalar is true ("sub_norm") or false ("not sub_norm"). wide_where:
    results in fp32 where a scalar is true, and in the dtype of activations elsewhere. sizes(arguments): sizes of
    dimensions that no tensor tells. sections: the scalar with (key heads, value heads, key dim, value dim), and the
    arguments that may be views of one row of columns. writes: arguments that are written.

    Of the gradient: forward_only are scalars that it has not. not_parameters are those whose gradient never goes into
    main_grad. spare: tensors that are not kept for it where the function of the arguments says so; likes: the argument
    that lies in memory as such a one did. A gradient without one of the tensors in `needs` is not one call of the
    library: complete(operator, results, args, add) returns the arguments of one that comes to the same. gradient: its
    signature; keeps(*args): the scalars that are kept for it; gradient_outputs: its results."""
    binds, where, wide_where, spare, likes = binds or {}, where or {}, wide_where or {}, spare or {}, likes or {}
    library = library or name
    passes = [library] if library in TABLES else [f"{library}_fwd", f"{library}_bwd"]
    table = TABLES[passes[0]]
    arguments = read_signature(name, signature, table)
    names = tuple(results.split(", ")) if results else outs_of(table, arguments, binds)
    forward = Operator(name, arguments, names)
    forward.outputs = outputs_of(passes[0], arguments, names, where, wide_where, {}, sizes)
    cut = (sections[0], tuple((t, t) for t in sections[1])) if sections else None
    add_to_torch(forward, passes[0], bind(name, table, arguments, names, binds, where), (), writes, cut)
    if len(passes) == 1:
        return

    table_bwd = TABLES[passes[1]]
    name_bwd = f"{name}_bwd"
    if gradient:
        arguments = read_signature(name_bwd, gradient, table_bwd)
    else:
        arguments = gradient_arguments(forward, table, table_bwd, binds, sections[1] if sections else (), forward_only)
    arguments |= dict.fromkeys((t for t in spare if t in arguments), "Tensor?")
    grads = tuple(f"d_{t}" for t in forward.tensors if f"d_{t}" in table_bwd.rows)
    where_bwd = {f"d_{r}": s for r, s in where.items() if s.split()[-1] in arguments}
    backward = Operator(name_bwd, arguments, grads)
    backward.outputs = gradient_outputs or outputs_of(passes[1], arguments, grads, {}, {}, likes, None)
    if "want" in arguments and not gradient_outputs and not likes:
        backward.likes = tuple(backward.place[g.removeprefix("d_")] for g in grads)
    backward.complete = complete
    cut = (sections[0], tuple((t, f"d_{t}") for t in sections[1])) if sections else None
    rows = bind(name_bwd, table_bwd, arguments, grads, binds, where_bwd)
    add_to_torch(backward, passes[1], rows, needs, (), cut)
    forward.gradient = Gradient(forward, backward, table_bwd, where, spare, likes, keeps)
    forward.parameters = [
        (grads.index(f"d_{t}"), forward.place[t])
        for t in forward.tensors
        if f"d_{t}" in grads and table.rows[t].type == "param" and t not in not_parameters
    ]


def outs_of(table: Table, arguments: dict, binds: dict) -> tuple[str, ...]:
    return tuple(r.name for r in table.rows.values() if r.kind == "out" and binds.get(r.name) not in arguments)


def gradient_arguments(
    forward: Operator, table: Table, table_bwd: Table, binds: dict, sections: tuple, forward_only: tuple
) -> dict[str, str]:
    """Arguments of a gradient by name: what it reads of the operator's arguments and results, upstream gradients of the
    results, scalars, and `want` where gradients are optional."""
    known, known_bwd = types_of(table), types_of(table_bwd)
    arguments = {t: forward.arguments[t] for t in forward.tensors if t in known_bwd or t not in known or t in sections}
    arguments |= {r: known_bwd[r] for r in forward.results if r in known_bwd}
    arguments |= {binds.get(f"d_{r}", f"d_{r}"): known_bwd[f"d_{r}"] for _, r in above_of(forward, table_bwd)}
    arguments |= {
        s: forward.arguments[s] for s in forward.scalars if s not in forward_only and (s in known_bwd or s not in known)
    }
    if any(r.kind == "grad" and r.optional for r in table_bwd.rows.values()):
        arguments["want"] = "bool[]"
    return arguments
