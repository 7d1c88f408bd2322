/* SPDX-License-Identifier: Apache-2.0
 *
 * One refused call: a small problem of any operator, broken in one place, and what must be said and left alone. For the
 * suites that try bad input on all operators. */
#ifndef WEFT_TESTS_REFUSE_H
#define WEFT_TESTS_REFUSE_H

#include "support/suite.h"

typedef struct bench {
    problem *p;
    weft_exec exec;
    char *work, *args, layers[MAX_LAYERS * sizeof(weft_mhc_replay_layer)];
    size_t bytes;
} bench;

static inline spec small(const char *op)
{
    /* packed, so that every argument is there */
    return (spec){.op = op, .tokens = 3, .streams = 2, .channels = 4, .rows = 5, .packed = true};
}

static inline bench bench_open(const spec *s, weft_exec exec)
{
    bench b = {.p = problem_make(s), .exec = exec};
    weft_status status = b.p->workspace(&exec, b.p->args, &b.bytes);
    if (status != WEFT_OK) fail_msg("%s: %s", s->op, weft_last_error());
    b.work = malloc(b.bytes + 1);
    memset(b.work, 0x5a, b.bytes + 1);
    b.exec.workspace = b.work;
    b.exec.workspace_bytes = b.bytes;
    b.args = malloc(b.p->op->args_size);
    memcpy(b.args, b.p->args, b.p->op->args_size);
    memcpy(b.layers, b.p->layers, sizeof b.layers);
    return b;
}

/* Undoes what a mutation did to the args struct and to the exec. */
static inline void restore(bench *b, weft_exec exec)
{
    memcpy(b->p->args, b->args, b->p->op->args_size);
    memcpy(b->p->layers, b->layers, sizeof b->layers);
    b->exec = exec;
    b->exec.workspace = b->work;
    b->exec.workspace_bytes = b->bytes;
}

static inline void bench_close(bench *b)
{
    restore(b, b->exec);
    free(b->work);
    free(b->args);
    problem_free(b->p);
}

/* `name` must stand in the message as a word of its own: not the x inside "expected". */
static inline bool mentions(const char *text, const char *name)
{
    size_t length = strlen(name);
    for (const char *at = strstr(text, name); at; at = strstr(at + 1, name)) {
        bool before = at == text || !strchr("abcdefghijklmnopqrstuvwxyz_", at[-1]);
        bool after = !at[length] || !strchr("abcdefghijklmnopqrstuvwxyz_0123456789", at[length]);
        if (before && after) return true;
    }
    return false;
}

/* name NULL: any argument may be the one that is named (a size that disagrees has two sides). */
static inline void refuses(bench *b, weft_status want, const char *name, const char *what)
{
    weft_status got = b->p->call(&b->exec, b->p->args);
    const char *text = weft_last_error();
    const char *op = b->p->op->name;
    if (got != want)
        test_failed("%s: %s: %s: got \"%s\" (%s), want \"%s\"", op, name ? name : "", what, weft_status_name(got),
                    text, weft_status_name(want));
    if (got == WEFT_OK) {
        problem_reset(b->p);
        memset(b->work, 0x5a, b->bytes + 1);
        return;
    }
    if (!mentions(text, op) || !strstr(text, "expected") || !strstr(text, "got") || (name && !mentions(text, name)))
        test_failed("%s: %s: the message should name the operator, \"%s\", what was expected and got: \"%s\"", op,
                    what, name ? name : "an argument", text);
    if (!problem_untouched(b->p)) test_failed("%s: %s: refused, but something was written", op, what);
    for (size_t i = 0; i < b->bytes + 1; i++)
        if (b->work[i] != 0x5a) {
            test_failed("%s: %s: refused, but the workspace was written", op, what);
            break;
        }
}

/* The workspace query must not accept what the call refuses, unless it is about data or overlap. */
static inline void query_refuses(bench *b, weft_status want, const char *what)
{
    size_t bytes = 12345;
    weft_status got = b->p->workspace(&b->exec, b->p->args, &bytes);
    if (got != want)
        test_failed("%s: %s: the workspace query says \"%s\", want \"%s\"", b->p->op->name, what,
                    weft_status_name(got), weft_status_name(want));
    if (got != WEFT_OK && bytes != 12345)
        test_failed("%s: %s: a failed query wrote its result", b->p->op->name, what);
}

static inline void for_each_op(void (*test)(bench *b, weft_exec exec))
{
    const weft_exec execs[] = {on_ref(), on_cpu(WEFT_ISA_BEST, 1)};
    for (int e = 0; e < 2; e++)
        for (int32_t i = 0; i < weft_op_count(); i++) {
            spec s = small(weft_op_at(i)->name);
            bench b = bench_open(&s, execs[e]);
            test(&b, execs[e]);
            restore(&b, execs[e]);
            bench_close(&b);
        }
    test_verdict();
}

#define EACH_ARG(b, a) for (arg *a = (b)->p->arg; a < (b)->p->arg + (b)->p->num_args; a++)

#define TEST(name, one)                                                                                            \
    static void name(void **state)                                                                                 \
    {                                                                                                              \
        (void)state;                                                                                               \
        for_each_op(one);                                                                                          \
    }

#endif
