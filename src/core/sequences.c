/* SPDX-License-Identifier: Apache-2.0
 *
 * Sequences of weft/gdn.h: checks that batch, steps, offsets and indices agree. Values of offsets and indices are read
 * only where they are in host memory. */
#include "core/sequences.h"
#include "core/backend.h"
#include "core/check.h"

#include <string.h>

weft_status weft_check_sequences(const weft_call *call, const weft_tensor *cu_seqlens)
{
    const char *op = weft_op_name(call->op);
    if (weft_times(call->batch, call->steps) > (int64_t)1 << 40)
        return weft_fail(WEFT_ERR_ARGUMENT, "%s: batch * steps: expected at most 2^40 tokens, got %lld * %lld", op,
                         (long long)call->batch, (long long)call->steps);
    if (!weft_has(cu_seqlens)) {
        if (call->sequences < 0 || call->sequences == call->batch) return WEFT_OK;
        return weft_fail(WEFT_ERR_ARGUMENT, "%s: state: expected %lld sequences like the batch, got %lld", op,
                         (long long)call->batch, (long long)call->sequences);
    }
    if (call->batch != 1)
        return weft_fail(WEFT_ERR_ARGUMENT, "%s: cu_seqlens: expected a batch of 1 with it, got %lld", op,
                         (long long)call->batch);
    if (call->query || call->backend->check_pointer) return WEFT_OK;
    int64_t before = 0;
    for (int64_t n = 0; n <= call->sequences; n++) {
        int64_t at = weft_index_at(cu_seqlens, n), low = n == 0 ? 0 : before, high = n == 0 ? 0 : call->steps;
        if (at < low || at > high)
            return weft_fail(WEFT_ERR_ARGUMENT, "%s: cu_seqlens[%lld]: expected %lld to %lld, got %lld", op,
                             (long long)n, (long long)low, (long long)high, (long long)at);
        before = at;
    }
    return WEFT_OK;
}

static weft_status named_twice(const weft_call *call, const char *name, const weft_tensor *index, int64_t n,
                               int64_t row)
{
    int64_t first = 0;
    while (first < n && weft_index_at(index, first) != row) first++;
    return weft_fail(WEFT_ERR_ARGUMENT, "%s: %s[%lld]: expected a row of its own, got %lld like %s[%lld]",
                     weft_op_name(call->op), name, (long long)n, (long long)row, name, (long long)first);
}

/* No row is named twice; -1 names none. Rows are marked in a window of the cache, which moves on to the lowest row above it until
 * there is none: one pass over the indices for a cache of up to WINDOW rows, and never more passes than indices. */
static weft_status check_distinct(const weft_call *call, const char *name, const weft_tensor *index, int64_t rows)
{
    enum { WINDOW = 1 << 17 }; /* 16 KiB of the stack */
    uint64_t marked[WINDOW / 64];
    const int64_t none = INT64_MAX, count = index->shape[0];
    for (int64_t low = 0, next = none; count > 1 && low != none; low = next, next = none) {
        const int64_t size = rows - low < WINDOW ? rows - low : WINDOW;
        memset(marked, 0, (size_t)((size + 63) / 64) * sizeof *marked);
        for (int64_t n = 0; n < count; n++) {
            const int64_t row = weft_index_at(index, n);
            if (row < low) continue;
            if (row - low >= size) {
                next = row < next ? row : next;
                continue;
            }
            uint64_t *word = &marked[(row - low) / 64];
            const uint64_t bit = (uint64_t)1 << ((row - low) % 64);
            if (*word & bit) return named_twice(call, name, index, n, row);
            *word |= bit;
        }
    }
    return WEFT_OK;
}

weft_status weft_check_index(const weft_call *call, const char *name, const weft_tensor *index, int64_t rows)
{
    const char *op = weft_op_name(call->op);
    if (!weft_has(index)) {
        int64_t count = call->sequences >= 0 ? call->sequences : call->batch;
        if (count <= rows) return WEFT_OK;
        return weft_fail(WEFT_ERR_ARGUMENT, "%s: %s: expected indices for %lld sequences in %lld rows, got none",
                         op, name, (long long)count, (long long)rows);
    }
    if (call->query || call->backend->check_pointer) return WEFT_OK;
    for (int64_t n = 0; n < index->shape[0]; n++) {
        int64_t at = weft_index_at(index, n);
        if (at < -1 || at >= rows)
            return weft_fail(WEFT_ERR_ARGUMENT, "%s: %s[%lld]: expected -1 to %lld, got %lld", op, name,
                             (long long)n, (long long)rows - 1, (long long)at);
    }
    return check_distinct(call, name, index, rows);
}
