/* SPDX-License-Identifier: Apache-2.0
 *
 * Launch shapes of post [M6] and replay [M12]: which threads work on which channels and tokens. Plain arithmetic, so that
 * it is tested without a GPU. */
#ifndef WEFT_CUDA_MHC_POST_PLAN_H
#define WEFT_CUDA_MHC_POST_PLAN_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum {
    POST_BLOCK = 256,              /* threads of a block at most */
    POST_SHARED_ROW = 64 * 1024,   /* d_bias of a chunk is summed in shared memory up to this size */
    POST_PARTIAL_BYTES = 16 << 20, /* partial sums of d_bias at most */
    POST_MOST_GRID = 1 << 30       /* blocks of a grid at most; kernels step through the rest */
};

/* A thread works on `width` neighbouring channels of all streams at a time, and on `batch` such tiles before it waits
 * for memory. `room`: bytes of shared memory for what a token's threads share. */
typedef struct post_shape {
    int64_t tokens, channels;
    int32_t width, batch, room, sms;
} post_shape;

/* Forward. `team` threads cover a span of a token; a block has per_block teams, or is one of `spans` blocks that share
 * a token. Tile number k of thread t in span s is (s * batch + k) * team + t. Group g holds the tokens
 * g * per_block ..., and `groups` of them run at once. Nothing here can change a result. */
typedef struct post_fwd_plan {
    int32_t block, team, per_block, spans;
    int64_t groups;
    int32_t shared; /* bytes */
} post_fwd_plan;

/* Backward. A team owns a whole token, because it sums over the channels: tile k of thread t in step s is
 * (s * batch + k) * team + t. `team` and `steps` decide the order of these sums and depend on channels, width and batch
 * only. Teams are a warp each (several to a block) or a block each. */
typedef struct post_bwd_plan {
    int32_t block, team, per_block;
    int64_t steps;
} post_bwd_plan;

/* Tokens in chunks, each summed in order into a row of partial sums of d_bias; the rows are then added in a fixed
 * order. From tokens and channels only, so that the sum is the same for every kernel, layout and GPU. */
typedef struct post_chunks {
    int64_t count, tokens; /* chunks, and tokens of each but the last */
} post_chunks;

/* The kernels for any layout: blocks of POST_BLOCK threads take `count` channels of a token at a time through shared
 * memory. Forward runs spans * groups blocks, as above. Backward's order of sums depends on count, so that comes from
 * streams only. */
typedef struct post_any_plan {
    int32_t count, spans;
    int64_t groups;
} post_any_plan;

post_fwd_plan weft_post_plan_fwd(const post_shape *s);
post_bwd_plan weft_post_plan_bwd(const post_shape *s);
post_chunks weft_post_plan_chunks(int64_t tokens, int64_t channels);
post_any_plan weft_post_plan_any(int64_t tokens, int64_t streams, int64_t channels);

#ifdef __cplusplus
}
#endif
#endif
