/* SPDX-License-Identifier: Apache-2.0
 *
 * Operators that are chains of others call them here: the validated call with other arguments and the rest of the
 * workspace. */
#ifndef WEFT_CUDA_CHAIN_H
#define WEFT_CUDA_CHAIN_H

#include "core/kernel.h"
#include "core/status.h"

static inline const weft_kernel *chain_row(const weft_call *call, const weft_kernel *table)
{
    for (const weft_kernel *k = table; k->run; k++)
        if ((k->dtype == WEFT_NONE || k->dtype == call->dtype) && (k->streams == 0 || k->streams == call->streams))
            return k;
    return NULL;
}

/* Workspace that a link of the chain needs. */
static inline size_t chain_bytes(const weft_call *call, const weft_kernel *table, const void *args)
{
    const weft_kernel *k = chain_row(call, table);
    weft_call query = *call;
    query.exact = call->exact || !call->query;
    query.query = true;
    return k && k->workspace ? k->workspace(&query, args) : 0;
}

/* Runs a link with workspace at `room`. Errors speak of the operator that was called, not of the link. */
static inline weft_status chain_run(const weft_call *call, const weft_kernel *table, const void *args, void *room)
{
    const weft_kernel *k = chain_row(call, table);
    weft_exec exec = *call->exec;
    weft_call link = *call;
    exec.workspace = room;
    link.exec = &exec;
    if (!k) return WEFT_ERR_UNSUPPORTED;
    return k->run(&link, args);
}

#endif
