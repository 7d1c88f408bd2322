# SPDX-License-Identifier: Apache-2.0
"""Models of Hugging Face transformers, computed by weft: parameters, configuration, state dict and cache stay theirs.

    report = weft.hf.apply(model)           # an instance, at any time after it was built
    report = weft.hf.apply_to("qwen3_next") # the classes of a family, before a model is built
    weft.hf.remove(model)                   # or remove("qwen3_next")

docs/guides/hugging-face.md has the table of families: what is replaced, what is not, and why."""

from ._families import FAMILIES
from ._replace import Entry, Report, apply, apply_to, remove

__all__ = ["Entry", "Report", "apply", "apply_to", "families", "remove"]


def families() -> list[str]:
    """Names of the families that weft knows, as transformers spells them."""
    return list(FAMILIES)
