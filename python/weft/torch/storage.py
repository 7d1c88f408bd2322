# SPDX-License-Identifier: Apache-2.0
"""Storages that are emptied and filled again after the tensors that look at them.

Autograd keeps a tensor for backward as a reference to its storage, and so does every view. Work on the storage
itself therefore reaches all of them at once, and leaves their version counters alone, which a write through one
of the tensors would not.

Hooks on saved tensors (torch.autograd.graph.saved_tensors_hooks) keep something else instead of the reference, and give
back what they like: `hooked` and `in_checkpoint` tell where the above does not hold."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
import torch.utils.checkpoint
from torch import Tensor, UntypedStorage

# Exchanges the memory of two storages (PyTorch 2.12 and later). Without it the contents are copied.
CAN_MOVE = hasattr(UntypedStorage, "_swap_data_ptr_")


def hooked() -> bool:
    """Whether hooks take what autograd saves now. They may read a tensor at any time until they give it back, from
    another stream too, or run forward again, so emptying its storage is not safe, and it saves nothing where they keep
    a copy."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


def in_checkpoint() -> bool:
    """Whether these hooks are those of torch.utils.checkpoint with use_reentrant=False. In backward it runs forward
    again and takes the tensors that this run saves. No gradient ever reaches that run's own graph, so a storage that is
    emptied in it and waits for one stays empty."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return hooks is not None and hooks[0].__module__ == torch.utils.checkpoint.__name__


class Kept(NamedTuple):
    """A tensor that can lose its memory and get it back. `tensor` is a detached alias: it has the storage and the
    version counter of the tensor that was handed out, and no graph."""

    tensor: Tensor
    nbytes: int
    version: int

    @classmethod
    def of(cls, tensor: Tensor) -> "Kept":
        alias = tensor.detach()
        return cls(alias, alias.untyped_storage().nbytes(), alias._version)

    @property
    def storage(self) -> UntypedStorage:
        return self.tensor.untyped_storage()


def shares(storage: UntypedStorage, tensors: Iterable[Tensor]) -> bool:
    return any(t.untyped_storage() is storage for t in tensors)


def over(storage: UntypedStorage, like: Tensor) -> Tensor:
    """A new tensor on `storage` with the layout of `like`, and a version counter of its own."""
    fresh = torch.empty(0, dtype=like.dtype, device=like.device)
    return fresh.set_(storage, like.storage_offset(), like.size(), like.stride())


def empty(kept: Sequence[Kept]) -> None:
    for k in kept:
        if k.tensor._version != k.version:
            raise RuntimeError(
                "recompute: an output was modified in place after its operation, "
                "which running the operation again would undo"
            )
    for k in kept:
        k.storage.resize_(0)


def refill(kept: Sequence[Kept], fresh: Sequence[Tensor], borrowed: Sequence[Tensor]) -> list[tuple]:
    """Gives emptied storages the contents of `fresh`, tensor by tensor, and returns pairs (from, to) of storages
    whose memory has moved: those in `fresh` are empty afterwards. Memory of a tensor in `borrowed` is not taken.

    A storage moves as a whole, so all its tensors must lie in it as they did. Where they do not, or where PyTorch
    cannot move, contents are copied, which reads and writes every element once more."""
    if len(kept) != len(fresh):
        raise RuntimeError(f"recompute: expected {len(kept)} outputs of the operation again, got {len(fresh)}")
    for k, new in zip(kept, fresh, strict=True):
        if (k.tensor.shape, k.tensor.dtype, k.tensor.device) != (new.shape, new.dtype, new.device):
            raise RuntimeError(
                f"recompute: expected the operation to return {_words(k.tensor)} again, got {_words(new)}"
            )
    moved: list[tuple[UntypedStorage, UntypedStorage]] = []
    pairs = [(k, new) for k, new in zip(kept, fresh, strict=True) if k.nbytes and not k.storage.nbytes()]
    while pairs:
        target, source, nbytes = pairs[0][0].storage, pairs[0][1].untyped_storage(), pairs[0][0].nbytes
        here = [(k, new) for k, new in pairs if k.storage is target]
        pairs = [(k, new) for k, new in pairs if k.storage is not target]
        if not (source.nbytes() == nbytes and all(_lies_in(source, k.tensor, new) for k, new in here)):
            target.resize_(nbytes)
            for k, new in here:
                over(target, k.tensor).copy_(new.detach())
        elif CAN_MOVE and not shares(source, borrowed) and not shares(source, (new for _, new in pairs)):
            target._swap_data_ptr_(source)
            moved.append((source, target))
        else:
            target.resize_(nbytes)
            target.copy_(source)
    return moved


def _lies_in(source: UntypedStorage, old: Tensor, new: Tensor) -> bool:
    return (
        new.untyped_storage() is source
        and old.stride() == new.stride()
        and old.storage_offset() == new.storage_offset()
    )


def _words(t: Tensor) -> str:
    return f"{t.dtype} {list(t.shape)} on {t.device}"
