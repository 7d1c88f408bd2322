/* SPDX-License-Identifier: Apache-2.0
 *
 * The launch of the fused kernel of an mHC site (site/fwd.cuh). */
#include "cuda/site/fwd.h"

#include "core/status.h"
#include "cuda/common/kept.h"
#include "cuda/site/fwd_kernel.cuh"
#include "cuda/site/fwd_psi.cuh"

/* ---- does it fit? ------------------------------------------------------------------------------------------------------- */

/* Lines of coefficients, the last dimension, that can be copied in one go: two or four, as there are streams. */
static bool in_lines(const weft_tensor *t)
{
    const int last = t->ndim - 1;
    const int64_t line = t->shape[last];
    for (int i = 0; i < last; i++)
        if (t->stride[i] & (line - 1)) return false;
    return t->stride[last] == 1 && ((uintptr_t)t->data & (uintptr_t)(line * 4 - 1)) == 0;
}

static bool is_dtype(const weft_tensor *t, weft_dtype dtype)
{
    return !weft_has(t) || t->dtype == dtype;
}

/* Clusters of each size that the device runs at once, a byte each. All of these kernels take a multiprocessor alone: the
 * registers see to that. */
static uint64_t ask_device()
{
    const site_choice any = {4, SITE_BOUNDARY, PLAIN, true, SITE_FEW_PAIRS};
    const auto kernel = weft_cuda_site_bf16_nc(any).kernel;
    const bool good =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1) == cudaSuccess;
    uint64_t word = 1;
    for (int log = 1; good && log < SITE_CLUSTERS; log++) {
        cudaLaunchAttribute attribute = {};
        cudaLaunchConfig_t config = {};
        int count = 0;
        attribute.id = cudaLaunchAttributeClusterDimension;
        attribute.val.clusterDim = {1u << log, 1, 1};
        config.gridDim = dim3(1u << log), config.blockDim = dim3(site_roles<SITE_FEW_PAIRS>::warps * 32);
        config.attrs = &attribute, config.numAttrs = 1;
        if (cudaOccupancyMaxActiveClusters(&count, kernel, &config) != cudaSuccess) (void)cudaGetLastError();
        word |= (uint64_t)(count < 255 ? count : 255) << (8 * log);
    }
    if (!good) (void)cudaGetLastError();
    return word;
}

static void ask_clusters(const weft_call *call, weft_site_facts *f)
{
    static kept_answers known;
    f->capability = weft_cuda_code(call->exec->device);
    if (f->capability < SITE_OLDEST) return; /* there are no clusters to ask for */
    const uint64_t word = kept_answer(known, call->exec->device, ask_device);
    for (int log = 1; log < SITE_CLUSTERS; log++) f->resident[log] = (int32_t)(word >> (8 * log) & 0xff);
}

/* Rows of phi. */
static int64_t rows_of(const weft_call *call)
{
    return call->op == WEFT_OP_mhc_head_fwd ? call->streams : call->rows;
}

/* The kernel: a head of two streams has pre's, with zeros in the other rows of psi. */
static site_kind kind_of(const weft_call *call, bool post)
{
    if (post) return SITE_BOUNDARY;
    return call->op == WEFT_OP_mhc_head_fwd && call->streams != 2 ? SITE_HEAD : SITE_PRE;
}

/* The layout of streams that the kernel can load, and that of psi. */
static stream_layout layout_of(const weft_tensor *x)
{
    return x->stride[2] == 1 ? LAYOUT_NC : LAYOUT_CN;
}

/* Streams in `layout` that TMA can move; f, u and v are rows of channels. */
static bool streams_can_move(const weft_tensor *x, stream_layout layout, bool addressed)
{
    if (layout == LAYOUT_NC) return tma_fits(x, addressed);
    const weft_tensor row = {x->data, x->dtype, 2, {x->shape[0], x->shape[1] * x->shape[2]}, {x->stride[0], 1}};
    return x->stride[1] == 1 && x->stride[2] == x->shape[1] && tma_fits(&row, addressed);
}

/* phi itself, in rows that the copy engine can read; otherwise psi is laid out so first, in f16 as hi and lo. */
static bool psi_is_phi(const weft_call *call, const weft_mhc_pre_fwd_args *pre)
{
    const weft_tensor *phi = &pre->phi;
    const bool in_order = layout_of(&pre->x) == LAYOUT_NC
                              ? phi->stride[2] == 1 && phi->stride[1] > 0 && phi->stride[1] % 4 == 0
                              : phi->stride[1] == 1 && phi->stride[2] == call->streams;
    return call->dtype == WEFT_BF16 && phi->dtype == WEFT_F32 && !weft_has(&pre->norm_weight) && in_order &&
           phi->stride[0] > 0 && phi->stride[0] % 4 == 0 && (uintptr_t)phi->data % 16 == 0;
}

/* psi, and in f16 the reciprocals of its factors. */
struct psi_room {
    float *psi, *down;
};

static psi_room psi_room_of(weft_arena *arena, const weft_call *call)
{
    const size_t rows = (size_t)rows_of(call), columns = (size_t)(call->streams * call->channels);
    psi_room room = {};
    room.psi = (float *)weft_arena_take(arena, rows * columns * sizeof(float));
    if (call->dtype == WEFT_F16) room.down = (float *)weft_arena_take(arena, SITE_CLUSTER * rows * sizeof(float));
    return room;
}

weft_site_plan weft_cuda_site_fwd_plan(const weft_call *call, const weft_mhc_post_fwd_args *post,
                                       const weft_mhc_pre_fwd_args *pre)
{
    const bool addressed = !call->any_address;
    const weft_dtype act = call->dtype;
    const bool of_16_bits = act == WEFT_BF16 || act == WEFT_F16;
    const stream_layout layout = layout_of(&pre->x);
    const auto can_move = [addressed](const weft_tensor *t) { return tma_fits(t, addressed); };
    weft_site_facts f = {.tokens = call->tokens,
                         .streams = call->streams,
                         .channels = call->channels,
                         .rows = site_psi_rows(call->streams, kind_of(call, post)),
                         .half = of_16_bits && is_dtype(&pre->u, act) && is_dtype(&pre->v, act) &&
                                 is_dtype(&pre->h, WEFT_F32) && is_dtype(&pre->ms, WEFT_F32) &&
                                 is_dtype(&pre->pre_in, WEFT_F32),
                         .layout = of_16_bits && /* otherwise rejected by `half` */
                                   streams_can_move(&pre->x, layout, addressed) && can_move(&pre->u) &&
                                   can_move(&pre->v) && can_move(&pre->sub_weight),
                         .post = post != NULL,
                         .shared = call->device_shared,
                         .sms = call->sms < call->device_sms ? call->sms : call->device_sms};
    ask_clusters(call, &f);
    if (post) {
        f.half =
            f.half && is_dtype(&post->f, act) && is_dtype(&post->post, WEFT_F32) && is_dtype(&post->res, WEFT_F32);
        f.layout = f.layout && streams_can_move(&post->x, layout, addressed) && can_move(&post->f) &&
                   can_move(&post->bias);
    }
    return weft_cuda_site_plan(&f);
}

size_t weft_cuda_site_fwd_bytes(const weft_call *call, const weft_mhc_pre_fwd_args *pre)
{
    weft_arena arena = weft_arena_open(NULL);
    if (call->any_address || !psi_is_phi(call, pre)) psi_room_of(&arena, call);
    return weft_arena_bytes(&arena);
}

/* ---- launch ------------------------------------------------------------------------------------------------------------- */

static site_instance choose(const weft_call *call, const weft_mhc_post_fwd_args *post, stream_layout layout,
                            int pairs)
{
    site_choice c = {(int)call->streams, kind_of(call, post), PLAIN, false, pairs};
    if (post)
        c.mode = post_mode_of(&post->bias, &post->dropout), c.in_out = post->numerics.apply == WEFT_APPLY_IN_OUT;
    if (call->dtype == WEFT_BF16)
        return layout == LAYOUT_NC ? weft_cuda_site_bf16_nc(c) : weft_cuda_site_bf16_cn(c);
    return layout == LAYOUT_NC ? weft_cuda_site_f16_nc(c) : weft_cuda_site_f16_cn(c);
}

/* Streams as boxes: in (C, n) a token is one row. */
static tma_tensor boxes_of(const weft_tensor *x, stream_layout layout)
{
    const int64_t n = x->shape[1], channels = x->shape[2];
    if (layout == LAYOUT_NC) return {x->data, x->shape[0], n, channels, x->stride[0], x->stride[1]};
    return {x->data, x->shape[0], 1, n * channels, x->stride[0], x->stride[0]};
}

/* Streams that stay in the L2 (site/fwd_producer.cuh): more of them than it holds, in whole lines. */
static void keep_streams(const weft_call *call, const weft_site_plan *plan, const weft_tensor *x,
                         stream_layout layout, site_args *p)
{
    const int64_t cache = 64 << 20; /* no less than there is */
    const int64_t tile = SITE_TILE * call->streams * call->channels * (int64_t)sizeof(bf16);
    if (plan->tiles * tile < 4 * cache || (uintptr_t)x->data % 128 || x->stride[0] % 64 ||
        (layout == LAYOUT_NC && x->stride[1] % 64))
        return;
    p->old = (const char *)x->data;
    p->old_token = x->stride[0] * (int64_t)sizeof(bf16);
    p->old_stream = layout == LAYOUT_NC ? x->stride[1] * (int64_t)sizeof(bf16) : plan->boxes * (int64_t)TMA_ROW;
    p->in_cache = (int32_t)(cache / (tile * plan->clusters)) + 1;
}

weft_status weft_cuda_site_fwd(const weft_call *call, const weft_site_plan *plan,
                               const weft_mhc_post_fwd_args *post, const weft_mhc_pre_fwd_args *pre)
{
    const weft_tensor *x = post ? &post->x : &pre->x;
    const stream_layout layout = layout_of(x);
    const int units = layout == LAYOUT_NC ? 1 : (int)call->streams; /* TMA boxes of a stream for 64 channels */
    const int64_t step = (int64_t)plan->clusters * SITE_TILE * (int64_t)sizeof(bf16);
    site_args p = {.alpha = view_of(&pre->alpha),
                   .beta = view_of(&pre->beta),
                   .numbers = numbers_of(&pre->numerics),
                   .pre_in = view_of(&pre->pre_in),
                   .h = view_of(&pre->h),
                   .ms = view_of(&pre->ms),
                   .pre = view_of(&pre->pre),
                   .post_out = view_of(&pre->post),
                   .res_out = view_of(&pre->res),
                   .u = weft_has(&pre->u) ? pre->u.data : NULL,
                   .v = weft_has(&pre->v) ? pre->v.data : NULL,
                   .u_token = pre->u.stride[0],
                   .v_token = pre->v.stride[0],
                   .u_step = step * pre->u.stride[0],
                   .sub_weight = view_of(&pre->sub_weight),
                   .sub_eps = (float)pre->sub_eps,
                   .mean = 1.0f / (float)(call->streams * call->channels),
                   .tokens = call->tokens,
                   .channels = (int32_t)call->channels,
                   .cluster = plan->cluster,
                   .cluster_log = plan->cluster_log,
                   .boxes = plan->boxes,
                   .pairs = plan->pairs,
                   .stages = plan->stages,
                   .psi_boxes = plan->psi_boxes,
                   .early = plan->early,
                   .slots = plan->slots,
                   .tiles = plan->tiles,
                   .clusters = plan->clusters,
                   .norm = weft_has(&pre->v) != 0,
                   .per_stage = UINT32_MAX / (uint32_t)plan->stages + 1,
                   .offset = plan->room,
                   .phi_rows = (int32_t)rows_of(call)};
    tma_tensor psi = {pre->phi.data,  rows_of(call),      call->streams,
                      call->channels, pre->phi.stride[0], pre->phi.stride[1]};
    if (!psi_is_phi(call, pre)) {
        weft_call inner = *call;
        weft_arena arena = cuda_arena(call);
        const psi_room room = psi_room_of(&arena, call);
        const columns order = columns_of(call, layout);
        inner.rows = rows_of(call);
        psi.data = room.psi, p.down = room.down;
        psi.stream_stride = call->channels, psi.token_stride = call->streams * call->channels;
        WEFT_TRY(room.down ? launch_psi_f16(&inner, plan, &pre->phi, &pre->norm_weight, order, room.psi, room.down)
                           : weft_cuda_project_spread(&inner, &pre->phi, &pre->norm_weight, order, room.psi));
    }
    if (layout == LAYOUT_CN)
        psi.streams = 1, psi.channels = call->streams * call->channels, psi.stream_stride = psi.token_stride;
    tma_encode *encode = NULL;
    const tma_tensor streams = boxes_of(x, layout);
    p.rows = tma_in_rows(&streams), p.psi_rows = tma_in_rows(&psi, TMA_ROW / 4);
    WEFT_TRY(tma_open(call, &encode));
    WEFT_TRY(tma_map_rows(call, encode, &p.x, &streams, SITE_TILE, plan->boxes * units));
    WEFT_TRY(tma_map_fp32(call, encode, &p.psi, &psi, (int)site_psi_rows(call->streams, kind_of(call, post)),
                          2 * units));
    p.res_lines = weft_has(&pre->res) && pre->res.dtype == WEFT_F32 && in_lines(&pre->res);
    if (post) {
        const tma_tensor f = {post->f.data, call->tokens, 1, call->channels, post->f.stride[0], 0};
        WEFT_TRY(tma_map_rows(call, encode, &p.f, &f, SITE_TILE, plan->boxes));
        p.f_rows = tma_in_rows(&f), p.in_out = post->numerics.apply == WEFT_APPLY_IN_OUT;
        keep_streams(call, plan, x, layout, &p);
        p.bias = view_of(&post->bias), p.post = view_of(&post->post), p.res = view_of(&post->res);
        p.dropout = post->dropout;
        p.unmixed = !weft_has(&post->res);
        p.coef_lines = in_lines(&post->post) && (p.unmixed || in_lines(&post->res));
        p.y = post->y.data, p.y_token = post->y.stride[0], p.y_step = step * p.y_token;
        for (int i = 0; i < call->streams; i++) p.y_at[i] = i * post->y.stride[1] * (int64_t)sizeof(bf16);
    }
    const site_instance of = choose(call, post, layout, plan->pairs);
    const launch_shape shape = {.grid = dim3((unsigned)(plan->clusters * plan->cluster)),
                                .block = of.block,
                                .shared = (size_t)plan->room.bytes,
                                .order = OVERLAP,
                                .cluster = (unsigned)plan->cluster};
    return launch(call, "site", of.kernel, shape, p);
}
