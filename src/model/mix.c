/* SPDX-License-Identifier: Apache-2.0
 *
 * The residual mix of a site, as the last forward left it. */
#include "model/model.h"

weft_tensor weft_model_mix(const weft_model *model, int32_t site)
{
    if (!model || !model->memory || model->config.residual == WEFT_RESIDUAL_PLAIN ||
        is_independent(&model->config) || site < 0 || site >= SITES * model->config.layers)
        return (weft_tensor){0};
    const weft_model_config *c = &model->config;
    const run r = {.model = (weft_model *)model, .config = c, .tokens = model->sequences * model->length};
    return weft_dense3(site_at(&r, site).res, weft_nn_full(c->dtype), r.tokens, c->streams, c->streams);
}
