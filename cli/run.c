/* SPDX-License-Identifier: Apache-2.0 */
#include "run.h"

#include <stdio.h>
#include <string.h>

#include "guard.h"

const char *run_call(const weft_exec *exec, const weft_op_info *op, const void *args)
{
    static char text[600];
    weft_exec with = *exec;
    guard workspace;
    weft_status status = weft_op_workspace(op, exec, args, &with.workspace_bytes);
    if (status == WEFT_OK) {
        /* Any alignment will do: an odd one shows whether that is so. */
        if (!guard_alloc(&workspace, with.workspace_bytes, 1)) return "not enough memory for the workspace";
        with.workspace = workspace.data;
        status = weft_op_call(op, &with, args);
        const char *wrong = guard_input(&workspace);
        guard_free(&workspace);
        if (wrong) return "the workspace was overrun";
    }
    if (status == WEFT_OK) return NULL;
    snprintf(text, sizeof text, "%s: %s", weft_status_name(status), weft_last_error());
    return text;
}

const char *run_prepare(const weft_exec *exec, const problem *p)
{
    if (strcmp(p->op->name, "mhc_boundary_bwd")) return NULL;
    const weft_mhc_boundary_bwd_args *a = p->args;
    if (a->y.dtype == WEFT_NONE) return NULL;
    weft_mhc_post_fwd_args post = {.struct_size = sizeof post,
                                   .numerics = a->numerics,
                                   .dropout = a->dropout,
                                   .x = a->x,
                                   .f = a->f,
                                   .bias = a->bias,
                                   .post = a->post,
                                   .res = a->res,
                                   .y = a->y};
    return run_call(exec, weft_op_find("mhc_post_fwd"), &post);
}

int run_selected(const char *filter, const weft_op_info *op)
{
    if (!filter || !strcmp(filter, op->name)) return 1;
    size_t length = strlen(filter);
    return !strncmp(filter, op->name, length) &&
           (!strcmp(op->name + length, "_fwd") || !strcmp(op->name + length, "_bwd"));
}
