# SPDX-License-Identifier: Apache-2.0
"""What the extension needs of PyTorch, by the names it asks for (python/ext.h): types, questions, and memory.

To make an empty tensor, torch.empty parses its arguments and looks up a kernel, which takes longer than to get the
memory. The code that TorchInductor generates goes past that with two functions which PyTorch keeps for it. The
extension does the same for results whose shape it has met before; a PyTorch without them is asked as usual."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import Parameter

try:
    from torch._C._dynamo.guards import _empty_strided_cpu as empty_cpu
    from torch._C._dynamo.guards import _empty_strided_cuda as empty_cuda
except ImportError:
    empty_cpu = empty_cuda = None

__all__ = [
    "Parameter",
    "Tensor",
    "current_gpu",
    "describe",
    "empty_cpu",
    "empty_cuda",
    "grad_enabled",
    "modes",
    "threads",
    "workspace",
    "wrote",
]

modes = torch._C._len_torch_dispatch_stack
grad_enabled = torch.is_grad_enabled
threads = torch.get_num_threads
current_gpu = getattr(torch._C, "_cuda_getDevice", None)


def describe(tensor: Tensor) -> tuple[tuple[int, ...], tuple[int, ...], torch.dtype]:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype


def workspace(size: int, device: int) -> Tensor:
    """Bytes on a GPU."""
    if empty_cuda is not None and device == current_gpu():
        return empty_cuda((size,), (1,), torch.uint8)
    return torch.empty(size, dtype=torch.uint8, device=torch.device("cuda", device))


def wrote(tensor: Tensor) -> None:
    """Autograd compares versions; tensors of inference mode have none."""
    if not tensor.is_inference():
        torch.autograd.graph.increment_version(tensor)
