# SPDX-License-Identifier: Apache-2.0
"""weft: fused operators for multi-stream residual connections.

`weft.torch` has the operators and modules for PyTorch, `weft.compat` drop-ins for the interfaces of other libraries.
This module itself needs no framework."""

from typing import Any

from . import _C

__version__: str = _C.info()["version"]
__all__ = ["__version__", "info", "presets"]


def info() -> dict[str, Any]:
    """Version of the library, the instruction set the CPU backend uses, and whether a GPU can be used."""
    return _C.info()


def presets() -> list[str]:
    """Names of the presets: whose numerics weft can follow."""
    return _C.presets()
