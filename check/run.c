/* SPDX-License-Identifier: Apache-2.0 */
#include "check/run.h"

#include <stdio.h>
#include <string.h>

#include "check/device.h"
#include "check/guard.h"
#include "check/image.h"

static const char *sentence(weft_status status)
{
    static char text[600];
    if (status == WEFT_OK) return NULL;
    snprintf(text, sizeof text, "%s: %s", weft_status_name(status), weft_last_error());
    return text;
}

weft_status run_guarded(const weft_exec *exec, const run_functions *f, const void *args, const char **wrong)
{
    weft_exec with = *exec;
    guard workspace;
    *wrong = NULL;
    weft_status status = f->workspace ? f->workspace(exec, args, &with.workspace_bytes)
                                      : weft_op_workspace(f->op, exec, args, &with.workspace_bytes);
    if (status != WEFT_OK) return status;
    /* Any alignment will do: an odd one shows whether that is so. */
    if (!guard_alloc(&workspace, with.workspace_bytes, 1)) {
        *wrong = "not enough memory for the workspace";
        return WEFT_OK;
    }
    with.workspace = with.workspace_bytes ? guard_data(&workspace) : NULL;
    status = f->call ? f->call(&with, args) : weft_op_call(f->op, &with, args);
    if (guard_check(&workspace, NULL)) *wrong = "the workspace was overrun";
    guard_free(&workspace);
    return status;
}

static const char *call_on_host(const weft_exec *exec, const weft_op_info *op, const void *args)
{
    const char *wrong;
    weft_status status = run_guarded(exec, &(run_functions){.op = op}, args, &wrong);
    return wrong ? wrong : sentence(status);
}

static const char *call_on_device(const weft_exec *exec, const weft_op_info *op, const void *args)
{
    static char wrong[200];
    weft_status status = image_call(op, exec, args, NULL, 0, wrong, sizeof wrong);
    return status == WEFT_OK && wrong[0] ? wrong : sentence(status);
}

const char *run_call(const weft_exec *exec, const weft_op_info *op, const void *args)
{
    return exec->backend == WEFT_BACKEND_CUDA ? call_on_device(exec, op, args) : call_on_host(exec, op, args);
}

const char *run_resident(const weft_exec *exec, const weft_op_info *op, const void *args)
{
    if (exec->backend != WEFT_BACKEND_CUDA) return call_on_host(exec, op, args);
    weft_exec with = *exec;
    weft_status status = weft_op_workspace(op, exec, args, &with.workspace_bytes);
    if (status != WEFT_OK) return sentence(status);
    with.workspace = device_alloc(with.workspace_bytes);
    if (!with.workspace) return "not enough memory for the workspace on the device";
    status = weft_op_call(op, &with, args);
    const char *wrong = device_wait();
    device_free(with.workspace);
    return status == WEFT_OK ? wrong : sentence(status);
}

const char *run_prepare(const weft_exec *exec, const weft_op_info *op, const void *args,
                        const char *(*call)(const weft_exec *, const weft_op_info *, const void *))
{
    if (strcmp(op->name, "mhc_boundary_bwd")) return NULL;
    const weft_mhc_boundary_bwd_args *a = args;
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
    return call(exec, weft_op_find("mhc_post_fwd"), &post);
}

int run_selected(const char *filter, const weft_op_info *op)
{
    if (!filter || !strcmp(filter, op->name)) return 1;
    size_t length = strlen(filter);
    return !strncmp(filter, op->name, length) &&
           (!strcmp(op->name + length, "_fwd") || !strcmp(op->name + length, "_bwd") ||
            !strcmp(op->name + length, "_step"));
}
