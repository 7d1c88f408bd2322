/* SPDX-License-Identifier: Apache-2.0
 *
 * Operators whose unfused path is a chain of others call them here: the validated call with other arguments and the rest of
 * the workspace. A link goes through the same prepare as a call of its own. */
#ifndef WEFT_CUDA_CHAIN_H
#define WEFT_CUDA_CHAIN_H

#include <new>

#include "core/status.h"
#include "cuda/backend.h"

/* The row's own part of `prepared`: prepare makes a Plan there, run reads it. */
template <class Plan> static inline void *plan_room(weft_prepared *prepared)
{
    static_assert(sizeof(Plan) <= sizeof prepared->plan && alignof(Plan) <= alignof(weft_prepared),
                  "no room for it");
    return prepared->plan.bytes;
}

template <class Plan> static inline const Plan *plan_of(const weft_prepared *prepared)
{
    return (const Plan *)prepared->plan.bytes;
}

/* Workspace that a link of the chain needs. */
static inline size_t chain_bytes(const weft_call *call, const weft_kernel *table, const void *args)
{
    const weft_kernel *k = weft_kernel_for(call, table);
    weft_call query = *call;
    weft_prepared prepared;
    query.query = true;
    if (!k) return 0;
    weft_prepare(k, &query, args, &prepared);
    return prepared.workspace;
}

/* Runs a link with workspace at `room`. Errors speak of the operator that was called, not of the link. */
static inline weft_status chain_run(const weft_call *call, const weft_kernel *table, const void *args, void *room)
{
    const weft_kernel *k = weft_kernel_for(call, table);
    weft_exec exec = *call->exec;
    weft_call link = *call;
    weft_prepared prepared;
    exec.workspace = room;
    link.exec = &exec;
    if (!k) return WEFT_ERR_UNSUPPORTED;
    if (k->prepare) k->prepare(&link, args, &prepared);
    return weft_run(k, &link, args, &prepared);
}

#endif
