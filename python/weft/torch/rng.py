# SPDX-License-Identifier: Apache-2.0
"""Random numbers of an operation that runs twice: the second run draws what the first one drew, and the numbers
after it are those that would have come without it.

While a CUDA graph is captured the state of a CUDA generator can be neither read nor set, so nothing can be drawn
again. An operation that draws there is refused; draw outside it and pass the numbers, or for weft's dropout the
step of its counter, as an argument."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Tracker(Protocol):
    """Named states beside the default generators: tensors, or generators that captured graphs have registered."""

    def get_states(self) -> dict[str, Any]: ...

    def set_states(self, states: dict[str, Any]) -> None: ...


_trackers: list[Tracker] = []


def register_rng_tracker(tracker: Tracker) -> None:
    """Makes every later snapshot include the states of `tracker`."""
    if not any(t is tracker for t in _trackers):
        _trackers.append(tracker)


def capturing() -> bool:
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def _copies(states: dict[str, Any]) -> dict[str, Any]:
    # A generator is a live handle that continues counting; only its copy is a snapshot.
    return {k: s.clone_state() if isinstance(s, torch.Generator) else s.clone() for k, s in states.items()}


def _same(a: Any, b: Any) -> bool:
    a, b = (s.get_state() if isinstance(s, torch.Generator) else s for s in (a, b))
    return torch.equal(a, b)


class RandomState:
    """The state of the CPU generator, of those of some CUDA devices and of the registered trackers."""

    def __init__(self, devices: set[torch.device]):
        self._cpu = torch.get_rng_state()
        self._cuda = {d: torch.cuda.get_rng_state(d) for d in devices}
        self._named = [(t, _copies(t.get_states())) for t in _trackers]

    def moved_on(self) -> bool:
        """Whether anything has been drawn since."""
        if not _same(self._cpu, torch.get_rng_state()):
            return True
        if any(not _same(s, torch.cuda.get_rng_state(d)) for d, s in self._cuda.items()):
            return True
        for tracker, then in self._named:
            now = tracker.get_states()
            if now.keys() != then.keys() or any(not _same(now[k], then[k]) for k in now):
                return True
        return False

    @contextmanager
    def again(self) -> Iterator[None]:
        """Inside, numbers are drawn from this state. On leaving, the generators are as they were on entering."""
        if capturing():
            raise RuntimeError(
                "recompute: an operation drew random numbers before a CUDA graph capture began and would have to "
                "draw them again inside it, where generators cannot be rewound"
            )
        cpu = torch.get_rng_state()
        cuda = {d: torch.cuda.get_rng_state(d) for d in self._cuda}
        named = [(tracker, tracker.get_states()) for tracker, _ in self._named]
        for (_, then), (_, now) in zip(self._named, named, strict=True):
            if then.keys() != now.keys():
                raise RuntimeError(
                    f"recompute: the names of an RNG tracker were {sorted(then)} in forward and are {sorted(now)} now"
                )
        try:
            torch.set_rng_state(self._cpu)
            for device, state in self._cuda.items():
                torch.cuda.set_rng_state(state, device)
            for tracker, states in self._named:
                tracker.set_states(_copies(states))
            yield
        finally:
            torch.set_rng_state(cpu)
            for device, state in cuda.items():
                torch.cuda.set_rng_state(state, device)
            for tracker, states in named:
                tracker.set_states(states)


class NoDraws(TorchDispatchMode):
    """Refuses operators that draw random numbers. This is how draws are noticed where states cannot be read."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags and not _switched_off(func, args, kwargs):
            raise RuntimeError(
                f"recompute: {func} draws random numbers in an operation that is to be run again, which a CUDA graph "
                "capture does not allow: draw outside the operation and pass the result as an argument"
            )
        return func(*args, **kwargs)


def _switched_off(func, args, kwargs) -> bool:
    # Attention and dropout kernels have the tag whatever their probability is.
    named = {a.name: v for a, v in zip(func._schema.arguments, args, strict=False)} | kwargs
    return named.get("train") is False or any(named.get(p) == 0 for p in ("dropout_p", "p"))
