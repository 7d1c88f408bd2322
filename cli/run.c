/* SPDX-License-Identifier: Apache-2.0 */
#include "run.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "device.h"
#include "element.h"
#include "guard.h"
#include "mirror.h"

static const char *sentence(weft_status status)
{
    static char text[600];
    if (status == WEFT_OK) return NULL;
    snprintf(text, sizeof text, "%s: %s", weft_status_name(status), weft_last_error());
    return text;
}

static const char *call_on_host(const weft_exec *exec, const weft_op_info *op, const void *args)
{
    weft_exec with = *exec;
    guard workspace;
    weft_status status = weft_op_workspace(op, exec, args, &with.workspace_bytes);
    if (status != WEFT_OK) return sentence(status);
    /* Any alignment will do: an odd one shows whether that is so. */
    if (!guard_alloc(&workspace, with.workspace_bytes, 1)) return "not enough memory for the workspace";
    with.workspace = workspace.data;
    status = weft_op_call(op, &with, args);
    const char *wrong = guard_input(&workspace);
    guard_free(&workspace);
    return wrong ? "the workspace was overrun" : sentence(status);
}

/* ---- the CUDA backend -------------------------------------------------------------------------------------------- */

/* A copy of the args whose tensors point to the device. */
typedef struct image {
    mirror mirror;
    char *args;
    weft_mhc_replay_layer *layers;
    struct {
        void **pointer; /* a field of the copy */
        int block;
    } bound[MIRROR_MAX_BLOCKS];
    int num_bound;
} image;

static int bind(image *m, const char *name, void **pointer, size_t bytes)
{
    int block = mirror_add(&m->mirror, name, *pointer, bytes);
    if (block < 0) return 0;
    m->bound[m->num_bound].pointer = pointer;
    m->bound[m->num_bound++].block = block;
    return 1;
}

static int bind_group(image *m, const weft_op_info *op, char *args, weft_dropout *dropout)
{
    for (int i = 0; i < op->num_args; i++) {
        weft_tensor *t = problem_tensor(&op->args[i], args);
        if (t->dtype == WEFT_NONE) continue;
        if (!bind(m, op->args[i].name, &t->data, (size_t)tensor_span(t) * weft_dtype_size(t->dtype))) return 0;
    }
    if (dropout && dropout->step) return bind(m, "dropout.step", (void **)(void *)&dropout->step, sizeof(uint64_t));
    return 1;
}

static int image_make(image *m, const weft_op_info *op, const void *args)
{
    mirror_open(&m->mirror);
    m->args = malloc(op->args_size);
    if (!m->args) return 0;
    memcpy(m->args, args, op->args_size);
    if (!bind_group(m, op, m->args, problem_dropout(op, m->args))) return 0;
    if (strcmp(op->name, "mhc_replay_fwd")) return 1;
    weft_mhc_replay_fwd_args *a = (void *)m->args;
    size_t bytes = (size_t)a->num_layers * sizeof *m->layers;
    m->layers = malloc(bytes);
    if (!m->layers) return 0;
    memcpy(m->layers, a->layers, bytes);
    a->layers = m->layers;
    for (int32_t l = 0; l < a->num_layers; l++)
        if (!bind_group(m, weft_mhc_replay_layer_info(), (char *)&m->layers[l], &m->layers[l].dropout)) return 0;
    return 1;
}

static const char *call_image(image *m, const weft_exec *exec, const weft_op_info *op)
{
    weft_exec with = *exec;
    int workspace = -1;
    weft_status status = weft_op_workspace(op, exec, m->args, &with.workspace_bytes);
    if (status != WEFT_OK) return sentence(status);
    workspace = mirror_add(&m->mirror, "the workspace", NULL, with.workspace_bytes);
    const char *wrong = workspace < 0 ? "too many tensors for one call" : mirror_up(&m->mirror);
    if (wrong) return wrong;
    for (int i = 0; i < m->num_bound; i++) *m->bound[i].pointer = m->mirror.block[m->bound[i].block].device;
    with.workspace = m->mirror.block[workspace].device;
    status = weft_op_call(op, &with, m->args);
    if (status != WEFT_OK) return sentence(status);
    wrong = device_wait();
    return wrong ? wrong : mirror_down(&m->mirror);
}

static const char *call_on_device(const weft_exec *exec, const weft_op_info *op, const void *args)
{
    static char text[600];
    image *m = calloc(1, sizeof *m);
    const char *wrong = m && image_make(m, op, args) ? call_image(m, exec, op) : "not enough memory";
    if (wrong) snprintf(text, sizeof text, "%s", wrong); /* it may be part of what is freed now */
    if (m) {
        mirror_close(&m->mirror);
        free(m->layers);
        free(m->args);
    }
    free(m);
    return wrong ? text : NULL;
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

const char *run_prepare(const weft_exec *exec, const problem *p,
                        const char *(*call)(const weft_exec *, const weft_op_info *, const void *))
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
    return call(exec, weft_op_find("mhc_post_fwd"), &post);
}

int run_selected(const char *filter, const weft_op_info *op)
{
    if (!filter || !strcmp(filter, op->name)) return 1;
    size_t length = strlen(filter);
    return !strncmp(filter, op->name, length) &&
           (!strcmp(op->name + length, "_fwd") || !strcmp(op->name + length, "_bwd"));
}
