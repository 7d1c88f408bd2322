/* SPDX-License-Identifier: Apache-2.0
 *
 * Launch shapes of post [M6] and replay [M12]. */
#include "cuda/mhc/mhc_post_plan.h"

enum {
    WARP = 32,
    SMALLEST = 64,        /* threads of a block when tokens are few */
    SHARED_COEFS = 32768, /* bytes of coefficients in a block at most: four blocks or more fit a multiprocessor */
    MANY_STEPS = 4,       /* steps of a backward team, where 256 threads suffice for that */
    WARP_TEAMS = 4        /* teams of one warp in a block */
};

static int64_t ceil_div(int64_t a, int64_t b)
{
    return (a + b - 1) / b;
}

static int64_t min64(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

/* Threads that work on one token at once if each takes one batch of tiles. */
static int64_t threads_for(const post_shape *s)
{
    return ceil_div(s->channels, (int64_t)s->width * s->batch);
}

/* Some multiprocessors would get nothing. */
static int too_few(const post_shape *s, int64_t blocks_per_token)
{
    return s->tokens < s->sms &&
           s->tokens * blocks_per_token < s->sms; /* the first one saves the product's range */
}

/* Groups of tokens at once, each in `spans` blocks. */
static int64_t groups_in_grid(int64_t groups, int64_t spans)
{
    return min64(groups, spans < POST_MOST_GRID ? POST_MOST_GRID / spans : 1);
}

post_fwd_plan weft_post_plan_fwd(const post_shape *s)
{
    post_fwd_plan p = {0};
    const int64_t need = threads_for(s);
    if (need >= POST_BLOCK / 2) {
        /* Blocks of a token: as large as keeps all multiprocessors busy, and of the size that leaves least idle. */
        int32_t most = POST_BLOCK;
        int64_t fewest = INT64_MAX;
        while (most > SMALLEST && too_few(s, ceil_div(need, most))) most /= 2;
        for (int32_t team = most; team >= most / 2; team -= WARP) {
            int64_t slots = ceil_div(need, team) * team;
            if (slots >= fewest) continue;
            fewest = slots;
            p.team = team;
        }
        p.per_block = 1;
        p.block = p.team;
    } else {
        int64_t per = POST_BLOCK / need;
        if (s->room > 0) per = min64(per, SHARED_COEFS / s->room);
        if (per < 1) per = 1;
        while (per > 1 && ceil_div(s->tokens, per) < s->sms) per /= 2;
        p.per_block = (int32_t)per;
        p.team = (int32_t)need;
        p.block = (int32_t)(ceil_div(per * need, WARP) * WARP);
    }
    p.spans = (int32_t)ceil_div(need, p.team);
    p.groups = groups_in_grid(ceil_div(s->tokens, p.per_block), p.spans);
    p.shared = p.per_block * s->room;
    return p;
}

post_bwd_plan weft_post_plan_bwd(const post_shape *s)
{
    post_bwd_plan p = {0};
    const int64_t need = threads_for(s);
    int64_t least = INT64_MAX;
    if (need <= MANY_STEPS * WARP) {
        p.team = WARP;
    } else {
        /* A step costs what it moves, the reduction at the end about half a step of every thread; idle threads cost
         * as much as busy ones. Steps follow each other, so few tokens want few of them. */
        for (int32_t team = SMALLEST; team <= POST_BLOCK; team += WARP) {
            int64_t steps = ceil_div(need, team), cost = steps * team + team / 2;
            if ((steps > MANY_STEPS && team < POST_BLOCK) || cost >= least) continue;
            least = cost;
            p.team = team;
        }
    }
    p.steps = ceil_div(need, p.team);
    p.per_block = p.team == WARP && s->tokens >= (int64_t)WARP_TEAMS * s->sms ? WARP_TEAMS : 1;
    p.block = p.team * p.per_block;
    return p;
}

post_chunks weft_post_plan_chunks(int64_t tokens, int64_t channels)
{
    /* Two, four, eight or sixteen blocks on each of 132 multiprocessors: whole waves on the GPU this was tuned for. */
    static const int64_t waves[] = {2112, 1056, 528, 264};
    const int64_t most = POST_PARTIAL_BYTES / 4 / channels;
    post_chunks c = {most, 0};
    for (int i = channels <= 512 ? 0 : 1; i < 4; i++)
        if (waves[i] <= most) {
            c.count = waves[i];
            break;
        }
    if (c.count < 1) c.count = 1;
    if (tokens <= 0) return (post_chunks){0, 0};
    c.tokens = ceil_div(tokens, c.count);
    c.count = ceil_div(tokens, c.tokens);
    return c;
}

post_any_plan weft_post_plan_any(int64_t tokens, int64_t streams, int64_t channels)
{
    post_any_plan p = {0};
    p.count = streams <= 8 ? 256 : 64; /* three rows per stream and one more stay below 32 KB */
    p.spans = (int32_t)ceil_div(channels, p.count);
    p.groups = groups_in_grid(tokens, p.spans);
    return p;
}
