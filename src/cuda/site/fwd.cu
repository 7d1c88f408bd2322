/* SPDX-License-Identifier: Apache-2.0
 *
 * The fused kernel of an mHC site (site/fwd.cuh) and its launch. */
#include "cuda/site/fwd.h"

#include "core/status.h"
#include "cuda/common/kept.h"
#include "cuda/site/fwd_mix.cuh"
#include "cuda/site/fwd_mma.cuh"
#include "cuda/site/fwd_owner.cuh"
#include "cuda/site/fwd_producer.cuh"
#include "cuda/site/fwd_reduce.cuh"

/* ---- the kernel --------------------------------------------------------------------------------------------------------- */

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1000

/* Arrivals that complete barrier i, in the order of site_barriers. Every lane of a warp arrives by itself, after its own accesses.
 * Barriers that count bytes have one arrival. */
template <int N, site_kind KIND, int PAIRS>
static __device__ __forceinline__ int arrivals(const site_args &p, int i)
{
    constexpr int mix_threads = MIX_WARPS * 32, mma_threads = site_roles<PAIRS>::mma_warps * 32;
    const int s = p.stages,
              remaining = p.boxes % 4 * (SITE_TILE / 4) * 32; /* a warp has four rows of a remaining box */
    const int rest = i - 6 * s - 2 * p.slots;
    if (i < s) return KIND == SITE_BOUNDARY || has(p.pre_in) ? 33 : 1; /* full: 32 lanes copy coefficients */
    if (i < 2 * s) return mix_threads;                                 /* mixed */
    if (i < 3 * s) return remaining > 0 ? remaining : 1;               /* mixed_remaining */
    if (i < 4 * s) return mix_threads;                                 /* empty */
    if (rest < 0) return 1;
    if (rest < SITE_LOGITS_EMPTY) return SITE_TILE * 32;
    if (rest < SITE_PSI_EMPTY) return 32;
    if (rest < SITE_PARTIAL_EMPTY) return mma_threads; /* and psi_empty */
    if (rest < SITE_F_FULL) return 32;
    return rest == SITE_F_EMPTY ? mix_threads : 1;
}

/* Initialises the barriers: one lane of each warp but the producer, one barrier at a time. Those for sums and squares are armed as
 * well. */
template <int N, site_kind KIND, int PAIRS>
static __device__ __forceinline__ void make_barriers(const site_args &p, const site_barriers &b, int warp)
{
    typedef site_roles<PAIRS> cast;
    const int sums = 6 * p.stages, squares = sums + p.slots, rest = squares + p.slots;
    const int count = rest + SITE_PSI_FULL + (site_once<N, KIND, PAIRS>() ? p.psi_boxes : 1);
#pragma unroll 1
    for (int i = warp < cast::producer ? warp : warp - 1; i < count; i += cast::warps - 1) {
        const uint32_t barrier = b.full + i * 8;
        barrier_init(barrier, arrivals<N, KIND, PAIRS>(p, i));
        if (i >= sums && i < rest)
            tma_expect(barrier,
                       (uint32_t)p.cluster * (i < squares ? site_shape<N, KIND>::fours * 16 : p.boxes * 4));
    }
    tma_barriers_ready();
}

template <int N, site_kind KIND, post_mode MODE, bool IN_OUT, int PAIRS>
static __device__ __forceinline__ void site(const site_args &p)
{
    typedef site_roles<PAIRS> cast;
    extern __shared__ __align__(1024) char shared[];
    /* The shuffle makes the compiler keep the warp index in a register; the lane index is cheaper to read again than to spill. */
    const int warp = __shfl_sync(0xffffffffu, (int)threadIdx.x >> 5, 0), lane = (int)threadIdx.x & 31;
    const uint32_t at = shared_address(shared + p.offset.barriers), s = p.stages * 8, sums = at + 6 * s,
                   rest = sums + 16 * p.slots;
    site_block b = {shared,
                    {at, at + s, at + 2 * s, at + 3 * s, at + 4 * s, at + 5 * s, sums, sums + 8 * p.slots,
                     rest + SITE_LOGITS_FULL * 8, rest + SITE_LOGITS_EMPTY * 8, rest + SITE_PSI_EMPTY * 8,
                     rest + SITE_PARTIAL_FULL * 8, rest + SITE_PARTIAL_EMPTY * 8, rest + SITE_F_FULL * 8,
                     rest + SITE_F_EMPTY * 8, rest + SITE_PSI_FULL * 8}};
    b.rank = cluster_rank(), b.cluster = cluster_index(), b.lane = lane;
    b.count = (p.tiles - (int)b.cluster + p.clusters - 1) / p.clusters;
    b.first_channel = (int)b.rank * p.boxes * SITE_BOX;
    if (warp == cast::producer) {
        if (lane < (KIND == SITE_BOUNDARY ? 3 : 2)) tma_prefetch(lane == 0 ? &p.x : lane == 1 ? &p.psi : &p.f);
    } else if (lane == 0) {
        make_barriers<N, KIND, PAIRS>(p, b.barrier, warp);
    }
    __syncthreads();
    cluster_arrive(); /* barriers exist; a warp waits for this before it sends to another block */
    let_next_begin(); /* producer, Sinkhorn warp and owner wait for the previous launch before they touch memory */

    if (warp < cast::first_mix) { /* MMA */
        set_registers<cast::mma_registers, true>();
        mma_warp<N, KIND, PAIRS>(p, b, warp);
    } else if (warp < cast::producer) { /* post, and the epilogue: aggregate and norm */
        set_registers<cast::mix_registers, false>();
        mix_warp<N, KIND, MODE, IN_OUT, PAIRS>(p, b, warp - cast::first_mix);
    } else {
        set_registers<cast::other_registers, false>();
        if (warp == cast::producer) { /* Producer */
            producer_warp<N, KIND, PAIRS>(p, b);
        } else {
            /* psi is on the critical path, and the Sinkhorn warp is idle at the start: it issues the loads before the producer could. */
            if (warp == cast::sinkhorn) {
                wait_for_previous();
                if (lane == 0) load_psi<N, KIND, site_once<N, KIND, PAIRS>()>(p, b, 0);
                __syncwarp();
            }
            cluster_wait_for_all();
            if (warp == cast::owner) owner_warp<N, KIND, cast::batches>(p, b);
            if (warp == cast::reduction) reduction_warp<N, KIND, PAIRS>(p, b);
            if constexpr (KIND != SITE_HEAD)
                if (warp == cast::sinkhorn && has(p.res_out)) sinkhorn_warp<N, cast::batches>(p, b);
        }
    }
}

#endif

template <int N, site_kind KIND, post_mode MODE, bool IN_OUT, int PAIRS>
static __global__ void __launch_bounds__(site_roles<PAIRS>::warps * 32, 1)
    site_kernel(const __grid_constant__ site_args p)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1000
    site<N, KIND, MODE, IN_OUT, PAIRS>(p);
#endif
}

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
    const auto kernel = site_kernel<4, SITE_BOUNDARY, PLAIN, true, SITE_FEW_PAIRS>;
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

static int64_t rows_of(const weft_call *call)
{
    return call->op == WEFT_OP_mhc_head_fwd ? call->streams : call->rows;
}

/* phi itself, in rows that the copy engine can read; otherwise psi is laid out so first. */
static bool psi_is_phi(const weft_mhc_pre_fwd_args *pre)
{
    const weft_tensor *phi = &pre->phi;
    return phi->dtype == WEFT_F32 && !weft_has(&pre->norm_weight) && phi->stride[2] == 1 && phi->stride[0] > 0 &&
           phi->stride[0] % 4 == 0 && phi->stride[1] > 0 && phi->stride[1] % 4 == 0 &&
           (uintptr_t)phi->data % 16 == 0;
}

static float *psi_room(weft_arena *arena, const weft_call *call)
{
    return (float *)weft_arena_take(arena,
                                    (size_t)(rows_of(call) * call->streams * call->channels) * sizeof(float));
}

weft_site_plan weft_cuda_site_fwd_plan(const weft_call *call, const weft_mhc_post_fwd_args *post,
                                       const weft_mhc_pre_fwd_args *pre)
{
    const auto can_move = [call](const weft_tensor *t) { return tma_fits(t, !call->any_address); };
    weft_site_facts f = {
        .tokens = call->tokens,
        .streams = call->streams,
        .channels = call->channels,
        .rows = rows_of(call),
        .bf16 = call->dtype == WEFT_BF16 && is_dtype(&pre->u, WEFT_BF16) && is_dtype(&pre->v, WEFT_BF16) &&
                is_dtype(&pre->h, WEFT_F32) && is_dtype(&pre->ms, WEFT_F32) && is_dtype(&pre->pre_in, WEFT_F32),
        .layout = call->dtype == WEFT_BF16 && /* of others nobody asks */
                  can_move(&pre->x) && can_move(&pre->u) && can_move(&pre->v) && can_move(&pre->sub_weight),
        .unmixed = call->scales == 2 || (post && !weft_has(&post->res)),
        .post = post != NULL,
        .shared = call->device_shared,
        .sms = call->sms < call->device_sms ? call->sms : call->device_sms};
    ask_clusters(call, &f);
    if (post) {
        f.bf16 = f.bf16 && is_dtype(&post->f, WEFT_BF16) && is_dtype(&post->post, WEFT_F32) &&
                 is_dtype(&post->res, WEFT_F32);
        f.layout = f.layout && can_move(&post->x) && can_move(&post->f) && can_move(&post->bias);
    }
    return weft_cuda_site_plan(&f);
}

size_t weft_cuda_site_fwd_bytes(const weft_call *call, const weft_mhc_pre_fwd_args *pre)
{
    weft_arena arena = weft_arena_open(NULL);
    if (call->any_address || !psi_is_phi(pre)) psi_room(&arena, call);
    return weft_arena_bytes(&arena);
}

/* ---- launch ------------------------------------------------------------------------------------------------------------- */

struct site_instance {
    kernel_of<site_args> kernel;
    unsigned block;
};

template <int N, site_kind KIND, post_mode MODE, bool IN_OUT, int PAIRS> static site_instance instance()
{
    return {site_kernel<N, KIND, MODE, IN_OUT, PAIRS>, site_roles<PAIRS>::warps * 32};
}

template <int N, site_kind KIND, post_mode MODE, bool IN_OUT> static site_instance by_pairs(int pairs)
{
    if (pairs == SITE_FEW_PAIRS) return instance<N, KIND, MODE, IN_OUT, SITE_FEW_PAIRS>();
    if constexpr (N == 4) { /* 320 and 448 channels a block: C = 2560, 5120 and 7168 */
        if (pairs == 5) return instance<N, KIND, MODE, IN_OUT, 5>();
        if (pairs == SITE_WIDE_PAIRS) return instance<N, KIND, MODE, IN_OUT, SITE_WIDE_PAIRS>();
    }
    return instance<N, KIND, MODE, IN_OUT, 0>();
}

template <int N> static site_instance by_kind(const weft_call *call, const weft_mhc_post_fwd_args *post, int pairs)
{
    if (call->op == WEFT_OP_mhc_head_fwd) return by_pairs<N, SITE_HEAD, PLAIN, false>(pairs);
    if (!post) return by_pairs<N, SITE_PRE, PLAIN, false>(pairs);
    const bool in_out = post->numerics.apply == WEFT_APPLY_IN_OUT;
    if (post_mode_of(&post->bias, &post->dropout) == PLAIN)
        return in_out ? by_pairs<N, SITE_BOUNDARY, PLAIN, true>(pairs)
                      : by_pairs<N, SITE_BOUNDARY, PLAIN, false>(pairs);
    return in_out ? by_pairs<N, SITE_BOUNDARY, FULL, true>(pairs) : by_pairs<N, SITE_BOUNDARY, FULL, false>(pairs);
}

/* Streams that stay in the L2 (site/fwd_producer.cuh): more of them than it holds, in whole lines. */
static void keep_streams(const weft_call *call, const weft_site_plan *plan, const weft_tensor *x, site_args *p)
{
    const int64_t cache = 64 << 20; /* no less than there is */
    const int64_t tile = SITE_TILE * call->streams * call->channels * (int64_t)sizeof(bf16);
    if (plan->tiles * tile < 4 * cache || (uintptr_t)x->data % 128 || x->stride[0] % 64 || x->stride[1] % 64)
        return;
    p->old = (const char *)x->data;
    p->old_token = x->stride[0] * (int64_t)sizeof(bf16), p->old_stream = x->stride[1] * (int64_t)sizeof(bf16);
    p->in_cache = (int32_t)(cache / (tile * plan->clusters)) + 1;
}

weft_status weft_cuda_site_fwd(const weft_call *call, const weft_site_plan *plan,
                               const weft_mhc_post_fwd_args *post, const weft_mhc_pre_fwd_args *pre)
{
    const weft_tensor *x = post ? &post->x : &pre->x;
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
                   .u = weft_has(&pre->u) ? (bf16 *)pre->u.data : NULL,
                   .v = weft_has(&pre->v) ? (bf16 *)pre->v.data : NULL,
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
                   .offset = plan->room};
    tma_tensor psi = {pre->phi.data,  rows_of(call),      call->streams,
                      call->channels, pre->phi.stride[0], pre->phi.stride[1]};
    if (!psi_is_phi(pre)) {
        weft_call inner = *call;
        weft_arena arena = cuda_arena(call);
        inner.rows = rows_of(call);
        psi.data = psi_room(&arena, call);
        psi.stream_stride = call->channels, psi.token_stride = call->streams * call->channels;
        WEFT_TRY(weft_cuda_project_spread(&inner, &pre->phi, &pre->norm_weight, columns_of(call, LAYOUT_NC),
                                          (float *)psi.data));
    }
    tma_encode *encode = NULL;
    const tma_tensor streams = {x->data, call->tokens, call->streams, call->channels, x->stride[0], x->stride[1]};
    p.rows = tma_in_rows(&streams), p.psi_rows = tma_in_rows(&psi, TMA_ROW / 4);
    WEFT_TRY(tma_open(call, &encode));
    WEFT_TRY(tma_map_rows(call, encode, &p.x, &streams, SITE_TILE, plan->boxes));
    WEFT_TRY(tma_map_fp32(call, encode, &p.psi, &psi, 2));
    p.res_lines = weft_has(&pre->res) && pre->res.dtype == WEFT_F32 && in_lines(&pre->res);
    if (post) {
        const tma_tensor f = {post->f.data, call->tokens, 1, call->channels, post->f.stride[0], 0};
        WEFT_TRY(tma_map_rows(call, encode, &p.f, &f, SITE_TILE, plan->boxes));
        keep_streams(call, plan, x, &p);
        p.bias = view_of(&post->bias), p.post = view_of(&post->post), p.res = view_of(&post->res);
        p.dropout = post->dropout;
        p.coef_lines = in_lines(&post->post) && in_lines(&post->res);
        p.y = (bf16 *)post->y.data, p.y_token = post->y.stride[0], p.y_step = step * p.y_token;
        for (int i = 0; i < call->streams; i++) p.y_at[i] = i * post->y.stride[1] * (int64_t)sizeof(bf16);
    }
    const site_instance of =
        call->streams == 2 ? by_kind<2>(call, post, plan->pairs) : by_kind<4>(call, post, plan->pairs);
    const launch_shape shape = {.grid = dim3((unsigned)(plan->clusters * plan->cluster)),
                                .block = of.block,
                                .shared = (size_t)plan->room.bytes,
                                .order = OVERLAP,
                                .cluster = (unsigned)plan->cluster};
    return launch(call, "site", of.kernel, shape, p);
}
