# SPDX-License-Identifier: Apache-2.0
"""What the tests of recompute share."""

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from weft.torch import CheckpointWithoutOutput


def leaf(*shape, device="cpu", seed=0, dtype=torch.float32):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=g, dtype=dtype).to(device).requires_grad_()


def nbytes(t):
    return t.untyped_storage().nbytes()


def plain(fn, *args):
    return fn(*args)


def managed(manager):
    return lambda fn, *args: CheckpointWithoutOutput(ckpt_manager=manager).checkpoint(fn, *args)


def gradients(build, *leaves):
    """Gradients of build()'s loss."""
    for t in leaves:
        t.grad = None
    build().backward()
    return [t.grad.clone() for t in leaves]


def agree(got, want, atol=1e-6):
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, atol=atol, rtol=0)


class Meter(TorchDispatchMode):
    """Bytes of the storages that are watched, after every operator. With but=tensors, all results are watched that do
    not lie in the memory of one of these."""

    def __init__(self, but=None):
        super().__init__()
        self.storages, self.peak = set(), 0
        self.but = None if but is None else {StorageWeakRef(t.untyped_storage()) for t in but}

    def watch(self, t):
        self.storages.add(StorageWeakRef(t.untyped_storage()))
        self.sample()
        return t

    def now(self):
        self.storages = {ref for ref in self.storages if not ref.expired()}
        return sum(torch.UntypedStorage._new_with_weak_ptr(ref.cdata).nbytes() for ref in self.storages)

    def sample(self):
        self.peak = max(self.peak, self.now())

    def restart(self):
        """From here on the peak counts anew."""
        self.peak = self.now()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if self.but is not None:
            results = result if isinstance(result, list | tuple) else [result]
            made = {StorageWeakRef(t.untyped_storage()) for t in results if isinstance(t, torch.Tensor)}
            self.storages |= made - self.but
        self.sample()
        return result
