# SPDX-License-Identifier: Apache-2.0
"""Parameters and defaults of functions, of ours by inspection and of others from their sources, as one line of text:
"x, phi, *, eps=1e-06, **kwargs". Annotations are left out. Sources are parsed and not imported: most of them need a GPU."""

import ast
import inspect
from collections.abc import Callable, Iterator


def ours(thing: Callable) -> str:
    """Of a class: what its instances are made with."""
    parts, starred = [], False
    for p in inspect.signature(thing).parameters.values():
        if p.kind is p.KEYWORD_ONLY and not starred:
            parts.append("*")
        starred = starred or p.kind in (p.KEYWORD_ONLY, p.VAR_POSITIONAL)
        star = {p.VAR_POSITIONAL: "*", p.VAR_KEYWORD: "**"}.get(p.kind, "")
        parts.append(f"{star}{p.name}" if p.default is p.empty else f"{p.name}={p.default!r}")
    return ", ".join(parts)


def _default(node: ast.expr) -> str:
    try:
        return repr(ast.literal_eval(node))
    except ValueError:
        return ast.unparse(node)


def _of(function: ast.FunctionDef) -> str:
    a = function.args
    positional = [*a.posonlyargs, *a.args]
    defaults = [None] * (len(positional) - len(a.defaults)) + a.defaults
    parts = [p.arg if d is None else f"{p.arg}={_default(d)}" for p, d in zip(positional, defaults, strict=True)]
    if a.vararg or a.kwonlyargs:
        parts.append(f"*{a.vararg.arg}" if a.vararg else "*")
    named = zip(a.kwonlyargs, a.kw_defaults, strict=True)
    parts += [p.arg if d is None else f"{p.arg}={_default(d)}" for p, d in named]
    return ", ".join([*parts, f"**{a.kwarg.arg}"] if a.kwarg else parts)


def _definitions(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Those of a module or a class, in branches too."""
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.Assign)):
            yield node
        elif isinstance(node, (ast.If, ast.Try)):
            yield from _definitions([*node.body, *node.orelse])


def theirs(source: str) -> dict[str, str | None]:
    """{name: parameters} of what a module defines, methods as Class.method and Class as its __init__; a name that is
    assigned has None."""
    found: dict[str, str | None] = {}
    for node in _definitions(ast.parse(source).body):
        if isinstance(node, ast.FunctionDef):
            found[node.name] = _of(node)
        elif isinstance(node, ast.Assign):
            found |= {t.id: None for t in node.targets if isinstance(t, ast.Name)}
            if isinstance(node.value, ast.Name):  # another name for a function
                found |= {t.id: found.get(node.value.id) for t in node.targets if isinstance(t, ast.Name)}
        else:
            for method in (m for m in node.body if isinstance(m, ast.FunctionDef)):
                found[f"{node.name}.{method.name}"] = _of(method)
                if method.name == "__init__":
                    found[node.name] = _of(method).removeprefix("self, ")
    return found
