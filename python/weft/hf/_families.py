# SPDX-License-Identifier: Apache-2.0
"""The families of transformers that weft knows: for each class of a family the forward that weft has for it, or why
there is none. The names of parameters are those of the forward that is replaced; a class that has others is left as it
is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from . import _gated_delta_net as gdn
from . import _hyper_connections as hc


def _nothing(module: Any) -> str | None:
    return None


class Row(NamedTuple):
    """A class with a forward of weft's."""

    cls: str
    what: str  # what weft computes there
    make: Callable[[hc.Forward], hc.Forward]  # the original forward -> weft's
    parameters: str
    refuses: Callable[[Any], str | None] = _nothing  # why a module of the class cannot be served


class Missing(NamedTuple):
    """A class that stays as it is."""

    cls: str
    why: str


class Family(NamedTuple):
    modeling: str
    rows: tuple[Row, ...]
    missing: tuple[Missing, ...] = ()

    @property
    def entries(self) -> tuple[Row | Missing, ...]:
        return self.rows + self.missing


def _modeling(name: str) -> str:
    return f"transformers.models.{name}.modeling_{name}"


INDEXED_ARGUMENTS = (
    "self hidden_states attention_mask position_ids past_key_values use_cache position_embeddings"
    " prev_topk_indices kwargs"
)
MODEL_ARGUMENTS = "self input_ids attention_mask position_ids past_key_values inputs_embeds use_cache kwargs"
LAYER = "mhc_pre with the norm, mhc_boundary for a merge and the site behind it, mhc_post for the last merge"
LOOP = "the model's own loop; mhc_boundary also from layer to layer"


def _hyper_connections(
    prefix: str, model: str, head: Row, layer: Callable[[hc.Forward], hc.Forward], arguments: str
) -> tuple[Row, ...]:
    return (
        Row(f"{prefix}HyperConnection", "mhc_pre", hc.site, "self hidden_streams", hc.refuses_site),
        head,
        Row(f"{prefix}DecoderLayer", LAYER, layer, arguments, hc.refuses_layer),
        Row(model, LOOP, hc.loop, MODEL_ARGUMENTS),
    )


def _gated_delta_net(name: str, prefix: str, sections: Callable[..., Any], norm: str, out: str) -> Family:
    return Family(
        _modeling(name),
        (
            Row(
                f"{prefix}GatedDeltaNet",
                "gdn_pre and gdn_rule",
                gdn.layer(sections, norm, out),
                "self hidden_states cache_params attention_mask kwargs",
                gdn.refuses_layer,
            ),
            Row(
                f"{prefix}RMSNormGated",
                "gdn_norm",
                gdn.gated_norm,
                "self hidden_states gate",
                gdn.refuses_norm,
            ),
        ),
    )


NO_GATED_RESIDUAL = "gated residual (matrix products between norm and gates): weft has no such operator"
NO_KDA = "Kimi delta attention (a decay for each channel of the key): weft has no such rule"

FAMILIES: dict[str, Family] = {
    "deepseek_v4": Family(
        _modeling("deepseek_v4"),
        _hyper_connections(
            "DeepseekV4",
            "DeepseekV4Model",
            Row("DeepseekV4HyperHead", "mhc_head", hc.learned_head, "self x", hc.refuses_site),
            hc.deepseek_v4_layer,
            "self hidden_states input_ids kwargs",
        ),
    ),
    "glm5_next": Family(
        _modeling("glm5_next"),
        _hyper_connections(
            "Glm5NextText",
            "Glm5NextTextModel",
            Row("Glm5NextTextHyperHead", "mhc_contract", hc.mean_head, "self hidden_streams"),
            hc.indexed_layer,
            INDEXED_ARGUMENTS,
        ),
        (Missing("Glm5NextTextLinearAttention", NO_KDA),),
    ),
    "hy_v4": Family(
        _modeling("hy_v4"),
        _hyper_connections(
            "HYV4",
            "HYV4Model",
            Row("HYV4HyperHead", "mhc_head", hc.learned_head, "self x", hc.refuses_site),
            hc.indexed_layer,
            INDEXED_ARGUMENTS,
        ),
    ),
    "qwen3_next": _gated_delta_net("qwen3_next", "Qwen3Next", gdn.fused_projection, "norm", "out_proj"),
    "qwen3_5": _gated_delta_net("qwen3_5", "Qwen3_5", gdn.split_projection, "norm", "out_proj"),
    "qwen3_5_moe": _gated_delta_net("qwen3_5_moe", "Qwen3_5Moe", gdn.split_projection, "norm", "out_proj"),
    "olmo_hybrid": _gated_delta_net("olmo_hybrid", "OlmoHybrid", gdn.single_projections, "o_norm", "o_proj"),
    "qwen4_exp": _gated_delta_net("qwen4_exp", "Qwen4ExpText", gdn.split_projection, "norm", "out_proj")._replace(
        missing=(Missing("Qwen4ExpTextGatedResidual", NO_GATED_RESIDUAL),)
    ),
}
