# SPDX-License-Identifier: Apache-2.0
"""weft or plain PyTorch."""

import os

_native = os.environ.get("WEFT_COMPAT_NATIVE", "0") not in ("", "0")


def use_native(enabled: bool = True) -> None:
    """True: plain PyTorch from here on; False: weft."""
    global _native
    _native = bool(enabled)


def uses_native() -> bool:
    """Whether plain PyTorch is used."""
    return _native
