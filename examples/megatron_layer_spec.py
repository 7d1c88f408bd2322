#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""weft in a Megatron-LM model: the layer spec with weft's hyper connections in it.

    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
    spec = with_weft(get_gpt_layer_with_transformer_engine_spec())
    model = GPTModel(config, transformer_layer_spec=spec, ...)

and in the configuration, on Megatron's main branch:

    enable_mhc_connections=True, mhc_num_residual_streams=4, mhc_sinkhorn_iterations=20, mhc_init_gating_factor=0.01

Nothing is patched and names of parameters stay, so checkpoints go both ways. Expanding, contracting, dropout and
recompute (recompute_granularity="selective", recompute_modules=["mhc"]) work as with Megatron's own module.

On the branches dev and dsv4 the spec stays as it is, and the modules of the finished model get weft's operators, those of
GatedDeltaNet too:

    bind_weft(model)                          # dsv4: bind_weft(model, "megatron_dsv4")
    bind_weft(model, rule=False)              # GatedDeltaNet keeps Megatron's own gated delta rule

Run as a program, it prints where the two modules went in the spec of the Megatron that is installed."""

import copy

from torch import nn
from weft.compat.megatron import HyperConnectionModule, bind

PLACES = ("self_attention_hyper_connection", "mlp_hyper_connection")


def with_weft(layer_spec, layer_class: type | None = None):
    """A copy of the spec of a transformer layer, with weft's module at both places. layer_class: Megatron's layer with
    hyper connections, found by itself where None."""
    if layer_class is None:
        from megatron.core.transformer.transformer_layer import HyperConnectionTransformerLayer as layer_class
    missing = [place for place in PLACES if not hasattr(layer_spec.submodules, place)]
    if missing:
        raise ValueError(f"with_weft: layer_spec: expected submodules with {', '.join(missing)}: an older Megatron?")
    spec = copy.copy(layer_spec)
    spec.module, spec.submodules = layer_class, copy.copy(layer_spec.submodules)
    for place in PLACES:
        setattr(spec.submodules, place, HyperConnectionModule)
    return spec


SLOTS = ("_h_post_bda_op", "_fused_streamed_pre_gated_delta_rule")  # of hyper connections and of GatedDeltaNet


def bind_weft(model: nn.Module, preset: str = "megatron_dev", rule: bool = True) -> int:
    """Gives weft's operators to all hyper connections and GatedDeltaNets of a model of branch dev or dsv4; returns how
    many there are."""
    modules = [m for m in model.modules() if any(hasattr(m, slot) for slot in SLOTS)]
    for module in modules:
        bind(module, preset, rule=rule)
    return len(modules)


def main() -> None:
    try:
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    except ImportError:
        raise SystemExit(
            "Megatron-LM is not installed; the text at the top of this file says what to do with it"
        ) from None
    spec = with_weft(get_gpt_layer_local_spec())
    print(spec.module.__name__)
    for place in PLACES:
        print(f"  {place} = {getattr(spec.submodules, place).__module__}.{HyperConnectionModule.__name__}")


if __name__ == "__main__":
    main()
