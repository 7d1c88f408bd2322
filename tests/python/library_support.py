# SPDX-License-Identifier: Apache-2.0
"""Calls of every operator that weft registers, with the arguments that weft.torch makes for them."""

import cases
import torch
from compare import tuple_of
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class Recorder(TorchDispatchMode):
    """Keeps the calls of weft's operators with their arguments."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "weft":
            self.calls.append((func, args))
        return func(*args, **(kwargs or {}))


def fresh(args) -> tuple:
    """The same arguments in memory of their own, for a call that may write some of them."""
    return tuple(a.detach().clone() if isinstance(a, Tensor) else a for a in args)


def record(device, **kind) -> dict[str, list]:
    """Calls of every operator with the arguments that the functions of weft.torch and their backward passes make."""
    found: dict[str, list] = {}

    def keep(calls) -> None:
        for func, args in calls:
            found.setdefault(func.name().removeprefix("weft::"), []).append((func, fresh(args)))

    for name in cases.CASES:
        if not cases.on(name, device):
            continue
        case = cases.make(name, device=device, **kind)
        leaves = {k: None if t is None else t.detach().requires_grad_() for k, t in case.tensors.items()}
        with Recorder() as recorder:
            outputs = tuple_of(case.function(**leaves))
            torch.autograd.backward(outputs, [torch.randn_like(t) for t in outputs])
            if len(outputs) > 1:  # absent gradients, results that are not wanted
                last = tuple_of(case.function(**{**leaves, "phi": case.tensors["phi"]} if "phi" in leaves else leaves))
                torch.autograd.backward(last[-1], torch.randn_like(last[-1]))
        keep(recorder.calls)
    for name in cases.STEPS:
        if cases.on(name, device):
            with Recorder() as recorder:
                cases.make_step(name, device=device, **kind)()
            keep(recorder.calls)
    return found


KINDS = {
    "float32": {},
    "bfloat16, one token": {"dtype": torch.bfloat16, "lead": ()},
    "no tokens": {"lead": (2, 0)},
    "(C, n) memory": {"swapped": True, "c": 5},
    "no optionals": {"optional": False},
}
