/* SPDX-License-Identifier: Apache-2.0 */
#include "check/image.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "check/device.h"
#include "check/element.h"
#include "check/scalars.h"

static weft_dropout *dropout_of(const weft_op_info *op, void *args)
{
    return scalar_find(op, args, WEFT_SCALAR_DROPOUT, NULL);
}

static weft_tensor *tensor_of(const weft_arg_info *info, void *args)
{
    void *field = (char *)args + info->offset;
    return info->kind == WEFT_ARG_GRAD ? &((weft_grad *)field)->to : field;
}

/* The tensors and the step of an operator's args, or of one layer of replay. */
static int add_group(image *im, const weft_op_info *op, void *args)
{
    const weft_dropout *d = dropout_of(op, args);
    for (int i = 0; i < op->num_args; i++) {
        const weft_tensor *t = tensor_of(&op->args[i], args);
        size_t bytes = t->dtype == WEFT_NONE ? 0 : (size_t)tensor_span(t) * weft_dtype_size(t->dtype);
        if (!mirror_add(&im->mirror, op->args[i].name, t->data, t->data ? bytes : 0)) return 0;
    }
    return !d || !d->step || mirror_add(&im->mirror, "dropout.step", (void *)(uintptr_t)d->step, sizeof *d->step);
}

static int point_group(image *im, const weft_op_info *op, void *args)
{
    weft_dropout *d = dropout_of(op, args);
    for (int i = 0; i < op->num_args; i++) {
        weft_tensor *t = tensor_of(&op->args[i], args);
        if (t->data) t->data = mirror_at(&im->mirror, t->data);
    }
    if (d && d->step) d->step = mirror_at(&im->mirror, d->step);
    return 1;
}

static int for_groups(image *im, int (*group)(image *, const weft_op_info *, void *))
{
    if (!group(im, im->op, im->args)) return 0;
    for (int32_t l = 0; im->layers && l < ((weft_mhc_replay_fwd_args *)im->args)->num_layers; l++)
        if (!group(im, weft_mhc_replay_layer_info(), &im->layers[l])) return 0;
    return 1;
}

static int copy_args(image *im, const void *args)
{
    im->args = malloc(im->op->args_size);
    if (!im->args) return 0;
    memcpy(im->args, args, im->op->args_size);
    if (strcmp(im->op->name, "mhc_replay_fwd")) return 1;
    weft_mhc_replay_fwd_args *a = im->args;
    size_t bytes = (size_t)a->num_layers * sizeof *im->layers;
    im->layers = malloc(bytes + 1);
    if (!im->layers) return 0;
    memcpy(im->layers, a->layers, bytes);
    a->layers = im->layers;
    return 1;
}

static int answer(image *im, const char *wrong)
{
    if (wrong) snprintf(im->wrong, sizeof im->wrong, "%s", wrong);
    return wrong == NULL;
}

weft_status image_open(image *im, const weft_op_info *op, const weft_exec *exec, const void *args,
                       const image_range *around, int num_around)
{
    memset(im, 0, sizeof *im);
    im->op = op;
    im->exec = *exec;
    mirror_open(&im->mirror);
    int room = copy_args(im, args);
    for (int i = 0; i < num_around && room; i++)
        room = mirror_add(&im->mirror, around[i].name, around[i].host, around[i].bytes);
    room = room && for_groups(im, add_group);
    weft_status status = weft_op_workspace(op, exec, args, &im->exec.workspace_bytes);
    if (status != WEFT_OK) return status;
    room = room && mirror_add(&im->mirror, "the workspace", NULL, im->exec.workspace_bytes);
    if (!answer(im, room ? mirror_make(&im->mirror) : "too many tensors for one call")) return WEFT_OK;
    (void)for_groups(im, point_group);
    im->exec.workspace = mirror_at(&im->mirror, NULL);
    (void)image_put(im);
    return WEFT_OK;
}

void image_close(image *im)
{
    mirror_close(&im->mirror);
    free(im->layers);
    free(im->args);
    im->layers = im->args = NULL;
}

int image_put(image *im)
{
    return answer(im, mirror_up(&im->mirror));
}

int image_get(image *im)
{
    const char *wrong = device_wait();
    return answer(im, wrong ? wrong : mirror_down(&im->mirror));
}

weft_status image_call(const weft_op_info *op, const weft_exec *exec, const void *args, const image_range *around,
                       int num_around, char *wrong, size_t size)
{
    image *im = calloc(1, sizeof *im);
    wrong[0] = 0;
    if (!im) {
        snprintf(wrong, size, "not enough memory");
        return WEFT_OK;
    }
    weft_status status = image_open(im, op, exec, args, around, num_around);
    if (status == WEFT_OK && !im->wrong[0]) {
        status = weft_op_call(op, &im->exec, im->args);
        (void)image_get(im);
    }
    snprintf(wrong, size, "%s", im->wrong);
    image_close(im);
    free(im);
    return status;
}
