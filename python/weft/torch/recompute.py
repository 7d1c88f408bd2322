# SPDX-License-Identifier: Apache-2.0
"""Operations whose outputs are dropped in forward and computed again for backward.

A multi-stream residual network keeps n-fold activations for backward, although most of them come from cheap operations
on what is kept anyway. Here such an operation runs without autograd, its outputs are emptied once forward has passed
them, and it runs again, with autograd, right before backward needs them:

    managers, ends = build_mhc_recompute_layer_plan(layers, group, use_mhc_recompute=True)    # for every pass
    for i in range(layers):
        managers[i].is_last_layer_in_recompute_block = ends[i]
        ... y = CheckpointWithoutOutput(ckpt_manager=managers[i]).checkpoint(aggregate, x, pre) ...
        finalize_mhc_recompute_layer(managers[i], x, ends[i])

All layers of a group share a manager. At the end of the group all outputs that were registered with it are emptied. The
last stream tensor is not among them: the next group needs its contents before the group's own backward begins. When the
gradient of that tensor is complete, the group's operations run again in forward order.

What an operation may do. It takes tensors as arguments of their own (captured ones get gradients only if they are
leaves, such as parameters), returns freshly allocated tensors, and computes the same when it runs again; an autograd
function in it that needs its own output keeps it by save_for_backward. Its outputs are not written to afterwards, and
between the emptying and the second run nothing reads them: neither the caller, not even to print them, nor the backward
of a consumer that is reached on another way than through the hook's tensor, such as a loss on an activation in the
middle of a group. That would be a read of memory that is not there.

Backward is `.backward()` without `inputs`: gradients of captured parameters are accumulated by a backward of the
operation's own, which torch.autograd.grad would not see. It cannot be differentiated again.

On PyTorch 2.12 and later an output gets its memory back by moving that of the second run into its storage. On 2.11 it
is copied, which costs about as much again as a memory-bound operation, and one output's memory for that time."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from enum import Enum, IntEnum
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks

from . import storage
from .rng import NoDraws, RandomState, capturing

_bypassed: ContextVar[bool] = ContextVar("weft_recompute_bypassed", default=False)


@contextmanager
def bypass_recompute() -> Iterator[None]:
    """Inside, operations run plainly and nothing is recorded or emptied: for the warm-up of a CUDA graph."""
    token = _bypassed.set(True)
    try:
        yield
    finally:
        _bypassed.reset(token)


# ---- one operation -----------------------------------------------------------------------------------------


class _Autocast(NamedTuple):
    device: str
    enabled: bool
    dtype: torch.dtype

    @classmethod
    def now(cls, device: str) -> "_Autocast":
        return cls(device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))


class _Local(NamedTuple):
    """The graph of a second run."""

    inputs: list[Tensor | None]  # leaves, where an argument is a tensor
    edges: list[GradientEdge | None]  # where it ends; the outputs themselves would keep their memory


class _Operation:
    """What is needed to run a function again. It refers to the autograd node of the first run nowhere, because the
    node refers to it: without a cycle a graph that is dropped without backward is freed at once."""

    def __init__(self, fn: Callable, args: tuple, retain_input_tensors: bool):
        self.fn, self.retain = fn, retain_input_tensors
        tensors = [a for a in args if isinstance(a, Tensor)]
        if any(_holds_tensor(a) for a in args if not isinstance(a, Tensor)):
            raise TypeError("checkpoint: args: expected tensors as arguments of their own, got one in a container")
        self.fixed = [_TENSOR if isinstance(a, Tensor) else a for a in args]
        self.devices = {t.device for t in tensors if t.is_cuda}
        self.autocast = [_Autocast.now(d) for d in ["cpu"] + ["cuda"] * bool(self.devices)]
        self.random: RandomState | None = None
        self.kept: list[storage.Kept] = []
        self.local: _Local | None = None
        self.is_empty = False

    def run_first(self, args: tuple) -> Any:
        if capturing():
            with NoDraws():
                result = self.fn(*args)
        else:
            before = RandomState(self.devices)
            result = self.fn(*args)
            self.random = before if before.moved_on() else None
        inputs = [a for a in args if isinstance(a, Tensor)]
        for output in _positions(result):
            if output is None:
                continue
            if not storage.shares(output.untyped_storage(), inputs):
                self.kept.append(storage.Kept.of(output))
            elif not self.retain:
                raise ValueError(
                    "checkpoint: fn: expected outputs with memory of their own, got one that shares the memory of "
                    "an argument; retain_input_tensors=True leaves such outputs as they are"
                )
        return tuple(result) if isinstance(result, list) else result

    def empty(self) -> None:
        storage.empty(self.kept)
        self.is_empty = True

    def run_again(self, node: Any) -> _Local:
        """Runs the function with autograd and fills the outputs of the first run where they are empty."""
        saved, needs = iter(node.saved_tensors), node.needs_input_grad[2:]
        inputs = [
            next(saved).detach().requires_grad_(need) if fixed is _TENSOR else None
            for fixed, need in zip(self.fixed, needs, strict=True)
        ]
        args = [f if t is None else t for f, t in zip(self.fixed, inputs, strict=True)]
        moved: list[tuple] = []

        def unpack(t: Tensor) -> Tensor:
            # An operator may have saved its own output, whose memory has been moved to the first run's output.
            for source, target in moved:
                if t.untyped_storage() is source:
                    return storage.over(target, t)
            return t

        with ExitStack() as stack:
            stack.enter_context(torch.enable_grad())
            for then in self.autocast:
                if then != _Autocast.now(then.device):
                    stack.enter_context(torch.autocast(then.device, then.dtype, then.enabled))
            if self.random is not None:
                stack.enter_context(self.random.again())
            stack.enter_context(saved_tensors_hooks(lambda t: t, unpack))
            outputs = _positions(self.fn(*args))
        if self.is_empty:
            leaves = [t for t in inputs if t is not None]
            own = [t for t in outputs if t is not None and not storage.shares(t.untyped_storage(), leaves)]
            moved += storage.refill(self.kept, own, leaves)
            self.is_empty, self.kept = False, []  # from here on only those who use the outputs keep them
        edges = [get_gradient_edge(t) if t is not None and t.requires_grad else None for t in outputs]
        return _Local(inputs, edges)

    def backward(self, node: Any, grads: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        _require_plain_backward()
        if torch.is_grad_enabled():
            raise RuntimeError("recompute: create_graph=True: an operation that runs twice has no second derivative")
        if self.is_empty:
            raise RuntimeError(
                "recompute: backward has reached an operation whose outputs are still empty: the tensor with the "
                "hook must be what all uses of the outputs lead to"
            )
        # There is no graph yet where nothing was emptied, and none any more in a second backward of a retained graph.
        local, self.local = self.local or self.run_again(node), None
        ends = [(edge, g) for edge, g in zip(local.edges, grads, strict=True) if edge is not None and g is not None]
        if ends:
            torch.autograd.backward([edge for edge, _ in ends], [g for _, g in ends])
        return tuple(None if t is None else t.grad for t in local.inputs)


class _TwiceRun(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, checkpoint: "CheckpointWithoutOutput", anchor: Tensor | None, *args: Any) -> Any:
        ctx.operation = checkpoint._operation
        checkpoint._node = ctx
        ctx.set_materialize_grads(False)
        # The arguments themselves, so that hooks on saved tensors, such as save_on_cpu, apply to them.
        ctx.save_for_backward(*(a for a in args if isinstance(a, Tensor)))
        return ctx.operation.run_first(args)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple:
        return (None, None, *ctx.operation.backward(ctx, grads))


_TENSOR = object()


def _holds_tensor(value: Any) -> bool:
    if isinstance(value, dict):
        value = list(value.values())
    return isinstance(value, Tensor) or (isinstance(value, list | tuple) and any(map(_holds_tensor, value)))


def _positions(result: Any) -> list[Tensor | None]:
    """The results of a function, None where one is no tensor."""
    results = result if isinstance(result, list | tuple) else [result]
    return [r if isinstance(r, Tensor) else None for r in results]


def _require_plain_backward() -> None:
    # The question torch.utils.checkpoint asks too. A capture runs backward once, and in its own way.
    if not torch.autograd._is_checkpoint_valid() and not capturing():
        raise RuntimeError("recompute: expected .backward() without inputs, got another traversal of the graph")


def _at_gradient(tensor: Tensor, action: Callable[[], None]) -> None:
    def hook(grad: Tensor) -> None:
        _require_plain_backward()
        action()

    if tensor.requires_grad:
        tensor.register_hook(hook)


class _State(Enum):
    NEW = "has not run"
    PLAIN = "ran without being recorded"
    RAN = "has its outputs"
    EMPTY = "has been emptied"
    RESTORED = "has been run again"


class CheckpointWithoutOutput:
    """One operation that runs twice; an object serves one run. With a manager it registers itself there, and the
    manager decides when outputs are emptied and computed again."""

    def __init__(
        self,
        fp8: bool = False,
        ckpt_manager: "CheckpointWithoutOutputManager | None" = None,
        retain_input_tensors: bool = False,
    ):
        if fp8:
            raise NotImplementedError("checkpoint: fp8: expected False; scaling state of fp8 modules is not replayed")
        self._manager, self._is_managed = ckpt_manager, ckpt_manager is not None
        self._retain = retain_input_tensors
        self._state = _State.NEW
        self._operation: _Operation | None = None
        self._node: Any = None
        self._result: Any = None

    def checkpoint(self, fn: Callable, *args: Any) -> Any:
        """fn(*args), a tensor or a tuple, to be run again. Without autograd, under bypass_recompute, in a compiled
        graph, which plans its own memory, and in a torch.utils.checkpoint that is not reentrant, which runs all of it
        again, the function is called and nothing else happens."""
        if self._state is not _State.NEW:
            raise RuntimeError(f"checkpoint: expected an object that has not run, got one that {self._state.value}")
        if torch.compiler.is_compiling() or _bypassed.get() or not torch.is_grad_enabled() or storage.in_checkpoint():
            self._state = _State.PLAIN
            return fn(*args)
        self._operation = _Operation(fn, args, self._retain)
        needed = any(isinstance(a, Tensor) and a.requires_grad for a in args)
        # Parameters inside fn must get gradients even if no argument needs one.
        result = _TwiceRun.apply(self, None if needed else torch.empty(0, requires_grad=True), *args)
        self._result = result  # keeps the node, and so the arguments, where only detached outputs are in use
        self._state = _State.RAN
        manager, self._manager = self._manager, None  # which from now on refers to this
        if manager is not None:
            manager.add_checkpoint(self)
        return result

    def discard_output_and_register_recompute(self, hook_tensor: Tensor) -> None:
        """Empties the outputs now and computes them again when the gradient of `hook_tensor` is complete. With a
        manager this does nothing."""
        if self._is_managed:
            return
        self.discard_output()
        if self._state is _State.EMPTY:
            _at_gradient(hook_tensor, self.recompute)

    def discard_output(self) -> None:
        if self._state is _State.NEW:
            raise RuntimeError(f"discard: expected an operation that has run, got one that {self._state.value}")
        if self._state is _State.RAN:
            self._operation.empty()
            self._state = _State.EMPTY

    def recompute(self) -> None:
        if self._state in (_State.NEW, _State.RAN):
            raise RuntimeError(f"recompute: expected outputs that were discarded, got one that {self._state.value}")
        if self._state is _State.EMPTY:
            self._operation.local = self._operation.run_again(self._node)
            self._operation = self._node = self._result = None
            self._state = _State.RESTORED


# ---- a group of operations ---------------------------------------------------------------------------------


class RecomputePhase(IntEnum):
    """Points of a layer's backward at which a scheduler can ask for outputs."""

    BEFORE_COMBINE_BWD = 0
    BEFORE_ATTN_BWD = 1


class CheckpointWithoutOutputManager:
    """The operations of a recompute group, in forward order. A manager serves one forward and backward."""

    def __init__(self) -> None:
        self.checkpoints: list[CheckpointWithoutOutput] = []
        self.is_last_layer_in_recompute_block = False
        self._discarded = self._recomputed = False

    def add_checkpoint(
        self, checkpoint: CheckpointWithoutOutput, phase: int = RecomputePhase.BEFORE_COMBINE_BWD
    ) -> None:
        if not isinstance(checkpoint, CheckpointWithoutOutput):
            raise TypeError(f"add_checkpoint: expected CheckpointWithoutOutput, got {type(checkpoint).__name__}")
        if checkpoint._state is not _State.RAN:
            raise ValueError(f"add_checkpoint: expected one that has run, got one that {checkpoint._state.value}")
        if phase != RecomputePhase.BEFORE_COMBINE_BWD:
            raise NotImplementedError(
                "add_checkpoint: phase: expected BEFORE_COMBINE_BWD; a group is run again at once"
            )
        if self._discarded:
            raise RuntimeError("add_checkpoint: expected a group that is open, got one that has been discarded")
        self.checkpoints.append(checkpoint)

    def discard_all_outputs_and_register_unified_recompute(self, hook_tensor: Tensor) -> None:
        """Empties all outputs of the group, and runs the group again when the gradient of `hook_tensor` is complete.
        The hook's tensor is no output of the group: whoever comes after the group reads it."""
        self.discard_all_outputs()
        if self.checkpoints:
            _at_gradient(hook_tensor, self.recompute_now)

    def discard_all_outputs(self) -> None:
        """Empties all outputs of the group. The caller sees to recompute_now() in time."""
        self._discarded = True
        for checkpoint in self.checkpoints:
            checkpoint.discard_output()

    def recompute_now(self) -> None:
        """Runs all operations of the group again, in forward order, because each feeds the next."""
        if not self._discarded:
            raise RuntimeError("recompute: expected a group that has been discarded, got one that is open")
        if not self._recomputed:
            self._recomputed = True
            for checkpoint in self.checkpoints:
                checkpoint.recompute()

    def recompute_until(self, phase: int) -> None:
        """Runs the operations again that backward needs from `phase` on: all, see add_checkpoint."""
        RecomputePhase(phase)
        self.recompute_now()
