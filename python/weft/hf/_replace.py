# SPDX-License-Identifier: Apache-2.0
"""How a forward is exchanged, and the report of it.

On classes it is the attribute. On an instance it is the class: a module gets a subclass of its own class with the same
name, so that `isinstance`, names of classes, pickling, deep copies and hooks find what they expect, and a forward that
the instance has of its own is left alone and reported."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from ._families import FAMILIES, Family, Missing, Row


@dataclass(frozen=True)
class Entry:
    """A module (or with `apply_to` a class) that was replaced or not."""

    cls: str
    path: str  # in the model; empty for a class
    text: str  # what weft computes there, or why it does not


@dataclass
class Report:
    """What was replaced and what was not. `print(report)` has a line for each class and reason."""

    of: str
    transformers: str
    families: list[str] = field(default_factory=list)
    replaced: list[Entry] = field(default_factory=list)
    kept: list[Entry] = field(default_factory=list)

    def __str__(self) -> str:
        lines = [f"weft.hf on {self.of}: {', '.join(self.families)} (transformers {self.transformers})"]
        for title, entries in (("replaced", self.replaced), ("not replaced", self.kept)):
            groups: dict[tuple[str, str], list[str]] = {}
            for entry in entries:
                groups.setdefault((entry.cls, entry.text), []).append(entry.path)
            lines.append(f"{title}:" if groups else f"{title}: nothing")
            for (cls, text), paths in groups.items():
                count = f" x {len(paths)}" if len(paths) > 1 else ""
                where = f" ({paths[0]}{', ...' if len(paths) > 1 else ''})" if paths[0] else ""
                lines.append(f"  {cls}{count}{where}: {text}")
        return "\n".join(lines)


# ---- the table by class --------------------------------------------------------------------------------------------

_PLACES = {(family.modeling, entry.cls): (name, entry) for name, family in FAMILIES.items() for entry in family.entries}


def _place(kind: type) -> tuple[str, Row | Missing, type] | None:
    """Family, entry of the table, and the class of transformers itself, of a class that may derive from one."""
    for base in kind.__mro__:
        found = _PLACES.get((base.__module__, base.__name__))
        if found is not None and not hasattr(base, "weft_base"):
            return (*found, base)
    return None


def _version() -> str:
    try:
        import transformers
    except ImportError as error:
        raise ImportError(f"weft.hf: expected the package transformers, got none ({error})") from error
    return transformers.__version__


def _family(op: str, name: str) -> Family:
    if name not in FAMILIES:
        raise ValueError(f"weft.hf.{op}: family: expected one of {', '.join(FAMILIES)}, got {name!r}")
    return FAMILIES[name]


def _classes(family: Family) -> Iterator[tuple[Row | Missing, type | None]]:
    modeling = importlib.import_module(family.modeling)
    for entry in family.entries:
        yield entry, getattr(modeling, entry.cls, None)


# ---- forwards --------------------------------------------------------------------------------------------------------


def _row_of(kind: Any) -> Row | None:
    """The row whose forward a class has, or None for a forward that is not weft's."""
    return getattr(kind.forward, "weft_row", None)


def _not_known(kind: Any, row: Row) -> str | None:
    """Why a class's forward is not the one that weft's stands for, or None if it is."""
    found = " ".join(inspect.signature(kind.forward).parameters)
    if found != row.parameters:
        return f"forward: expected the parameters ({row.parameters}), got ({found}): not a version that weft knows"
    return None


def _made(original: Any, row: Row) -> Any:
    forward = functools.wraps(original)(row.make(original))
    forward.weft_row = row  # type: ignore[attr-defined]
    return forward


@functools.cache
def _served(kind: type, row: Row) -> type:
    """The subclass that stands for `kind` on instances."""

    own: Any = kind.__reduce_ex__

    def reduce(self: Any, protocol: Any) -> Any:
        _, _, *rest = own(self, protocol)
        return (_remake, (kind, row.cls), *rest)

    names = {
        "forward": _made(kind.forward, row),  # type: ignore[attr-defined]
        "weft_base": kind,
        "__reduce_ex__": reduce,
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__doc__": kind.__doc__,
    }
    served: type = type(kind.__name__, (kind,), names)
    return served


def _remake(kind: type, cls: str) -> Any:
    """An empty module for pickle and copy, which fill in its state."""
    place = _place(kind)
    module: Any = kind.__new__(kind)  # type: ignore[call-overload]
    if place is not None and isinstance(place[1], Row):
        module.__class__ = _served(kind, place[1])
    return module


# ---- what users call -------------------------------------------------------------------------------------------------


def apply(model: nn.Module) -> Report:
    """Has weft compute the hyper-connections and Gated DeltaNet layers of a model, or of any module with some in it.
    What cannot be served stays as it is and is in the report. A model of no family is a ValueError."""
    report = Report(type(model).__name__, _version())
    for path, module in model.named_modules():
        place = _place(type(module))
        if place is None:
            continue
        name, entry, base = place
        if name not in report.families:
            report.families.append(name)
        text = entry.why if isinstance(entry, Missing) else _replace(module, entry, base)
        done = isinstance(entry, Row) and text is None
        (report.replaced if done else report.kept).append(
            Entry(entry.cls, path, entry.what if isinstance(entry, Row) and done else str(text))
        )
    if not report.families:
        raise ValueError(
            f"weft.hf.apply: model: expected modules of one of {', '.join(FAMILIES)}, got {type(model).__name__}"
        )
    return report


def _replace(module: nn.Module, row: Row, base: Any) -> str | None:
    """Exchanges the forward of a module; or why not. A module that has weft's already is left as it is."""
    kind: Any = type(module)
    if "forward" in module.__dict__:
        return "has a forward of its own on the instance, as accelerate gives one; apply_to before loading comes first"
    if _row_of(kind) is not None:
        return None
    if kind.forward is not base.forward:
        return f"{kind.__name__} has a forward of its own"
    reason = _not_known(base, row) or row.refuses(module)
    if reason:
        return reason
    module.__class__ = _served(kind, row)
    return None


def apply_to(family: str) -> Report:
    """The same for the classes of a family: every model of it in this process, built or not."""
    known = _family("apply_to", family)
    report = Report("its classes", _version(), [family])
    for entry, kind in _classes(known):
        if isinstance(entry, Missing):
            report.kept.append(Entry(entry.cls, "", entry.why))
            continue
        reason = "transformers has no such class" if kind is None else _replace_in_class(kind, entry)
        into = report.replaced if reason is None else report.kept
        into.append(Entry(entry.cls, "", entry.what if reason is None else reason))
    return report


def _replace_in_class(kind: Any, row: Row) -> str | None:
    if _row_of(kind) is not None:
        return None
    reason = _not_known(kind, row)
    if reason is None:
        kind.forward = _made(kind.forward, row)
    return reason


def remove(target: nn.Module | str) -> int:
    """Takes back what `apply` did to a model or `apply_to` to a family, and returns how many forwards that were. A model
    whose classes were replaced continues with weft until the family is removed."""
    if isinstance(target, str):
        return sum(_restore_class(kind) for _, kind in _classes(_family("remove", target)) if kind is not None)
    served = [(path, module) for path, module in target.named_modules() if hasattr(type(module), "weft_base")]
    for path, module in served:
        if "weft_base" not in vars(type(module)):  # it was given a class that derives from weft's, as FSDP does
            raise RuntimeError(
                f"weft.hf.remove: {path}: expected the class that apply gave it, got {type(module).__name__}, which was"
                " made of it: take that back first"
            )
    for _, module in served:
        kind: Any = type(module)
        module.__class__ = kind.weft_base
    return len(served)


def _restore_class(kind: Any) -> bool:
    forward = kind.__dict__.get("forward")
    if not hasattr(forward, "weft_row"):
        return False
    kind.forward = forward.__wrapped__
    return True
