/* SPDX-License-Identifier: Apache-2.0
 *
 * Optimisers [T6]: arguments checked, then the backend's arithmetic. */
#include <math.h>

#include <weft/optim.h>

#include "core/arrays.h"
#include "core/nn.h"
#include "core/struct_size.h"

/* A call: its exec is the caller's or lies in `copy`. */
typedef struct entered {
    const weft_exec *exec;
    weft_exec copy;
    weft_nn nn;
} entered;

/* f64 on ref, f32 elsewhere: what a backend's optimisers work in. */
static weft_status enter(entered *e, const char *call, const weft_exec *exec, const weft_blas *blas)
{
    WEFT_TRY(weft_take_exec(call, exec, &e->copy, &e->exec));
    return weft_nn_open(&e->nn, e->exec, e->exec->backend == WEFT_BACKEND_REF ? WEFT_F64 : WEFT_F32, blas);
}

static weft_status take_args(const char *call, const weft_sizes *sizes, const void *args, void *copy,
                             const void **taken)
{
    *taken = args;
    if (!args) return weft_fail(WEFT_ERR_ARGUMENT, "%s: args: expected a pointer, got NULL", call);
    return weft_take_struct(call, "", sizes, args, copy, taken);
}

/* The workspace has so many bytes; as an array, for weft_check_arrays. */
static weft_status check_room(const char *call, const weft_exec *exec, size_t need, weft_array *room)
{
    *room = (weft_array){"exec.workspace", exec->workspace, (int64_t)need, 1, true, NULL};
    if (!need || (exec->workspace && exec->workspace_bytes >= need)) return WEFT_OK;
    return weft_fail(WEFT_ERR_WORKSPACE, "%s: exec.workspace: expected at least %zu bytes, got %zu", call, need,
                     exec->workspace ? exec->workspace_bytes : (size_t)0);
}

/* The arrays of an optimiser are full. */
static weft_array values_of(const entered *e, const char *name, const void *data, int64_t count, bool out)
{
    return (weft_array){name, data, count, weft_dtype_size(e->nn.table->dtype), out, NULL};
}

static weft_array doubles_of(const char *name, const double *data, int64_t count, bool out)
{
    return (weft_array){name, data, count, sizeof *data, out, NULL};
}

static bool counts(int64_t count)
{
    return count >= 0 && count <= WEFT_MOST_ELEMENTS;
}

weft_status weft_sum_squares_workspace(const weft_exec *exec, int64_t count, size_t *bytes)
{
    entered e;
    weft_clear_error();
    WEFT_TRY(enter(&e, "sum_squares", exec, NULL));
    if (!bytes || !counts(count))
        return weft_fail(WEFT_ERR_ARGUMENT,
                         "sum_squares: expected a count of 0 to 2^48 and bytes, got %lld or NULL",
                         (long long)count);
    e.nn.query = true;
    WEFT_TRY(e.nn.table->sum(&e.nn, NULL, count, 1, NULL));
    *bytes = e.nn.need;
    return WEFT_OK;
}

weft_status weft_sum_squares(const weft_exec *exec, const void *values, int64_t count, double *sum)
{
    entered e;
    size_t need = 0;
    WEFT_TRY(weft_sum_squares_workspace(exec, count, &need));
    WEFT_TRY(enter(&e, "sum_squares", exec, NULL));
    if (!sum || (count && !values))
        return weft_fail(WEFT_ERR_ARGUMENT, "sum_squares: expected values and sum, got NULL");
    weft_array arrays[] = {values_of(&e, "values", values, count, false), doubles_of("sum", sum, 1, true), {0}};
    WEFT_TRY(check_room("sum_squares", e.exec, need, &arrays[2]));
    WEFT_TRY(weft_check_arrays("sum_squares", arrays, 3));
    return e.nn.table->sum(&e.nn, values, count, 1, sum);
}

static bool on_host(const weft_exec *exec)
{
    return exec->backend != WEFT_BACKEND_CUDA;
}

weft_status weft_clip(const weft_exec *exec, const weft_clip_args *args)
{
    static const weft_sizes sizes = WEFT_SIZES(weft_clip_args);
    entered e;
    weft_clip_args copy;
    const void *taken;
    double sum = 0;
    weft_clear_error();
    WEFT_TRY(enter(&e, "clip", exec, NULL));
    WEFT_TRY(take_args("clip", &sizes, args, &copy, &taken));
    const weft_clip_args *a = taken;
    if (a->count < 0 || (a->count && !a->sums) || a->num_others < 0 || (a->num_others && !a->others) || !a->norm ||
        !a->factor || !(a->largest >= 0))
        return weft_fail(WEFT_ERR_ARGUMENT,
                         "clip: expected sums, others, norm and factor and a largest norm from 0 on, got NULL, "
                         "%d, %d or %g",
                         (int)a->count, (int)a->num_others, a->largest);
    const weft_array arrays[] = {doubles_of("sums", a->sums, a->count, false),
                                 doubles_of("others", a->others, a->num_others, false),
                                 doubles_of("norm", a->norm, 1, true), doubles_of("factor", a->factor, 1, true)};
    WEFT_TRY(weft_check_arrays("clip", arrays, 4));
    if (!on_host(e.exec))
        return e.nn.table->clip(
            &e.nn, &(weft_clip_task){a->sums, a->others, a->count, a->num_others, a->largest, a->norm, a->factor});
    for (int32_t i = 0; i < a->count; i++) sum += a->sums[i];
    bool finite = isfinite(sum);
    for (int32_t i = 0; i < a->num_others; i++) finite = finite && isfinite(a->others[i]);
    *a->norm = sqrt(sum);
    *a->factor = !finite ? (double)NAN : a->largest > 0 && *a->norm > a->largest ? a->largest / *a->norm : 1;
    return WEFT_OK;
}

/* The factor of a clip as part of scale, where the host can read it; false where nothing is to be updated. */
static bool resolve(const weft_exec *exec, const double **factor, double *scale)
{
    if (!*factor || !on_host(exec)) return true;
    *scale *= **factor;
    *factor = NULL;
    return isfinite(*scale);
}

static int in_unit(double x)
{
    return x >= 0 && x < 1;
}

weft_status weft_adamw(const weft_exec *exec, const weft_adamw_args *args)
{
    static const weft_sizes sizes = WEFT_SIZES(weft_adamw_args);
    entered e;
    weft_adamw_args copy;
    const void *taken;
    weft_clear_error();
    WEFT_TRY(enter(&e, "adamw", exec, NULL));
    WEFT_TRY(take_args("adamw", &sizes, args, &copy, &taken));
    const weft_adamw_args *a = taken;
    if (!counts(a->count) || (a->count && (!a->parameter || !a->first || !a->second || !a->gradient)))
        return weft_fail(WEFT_ERR_ARGUMENT,
                         "adamw: expected four arrays of count elements, 0 to 2^48, got NULL or %lld",
                         (long long)a->count);
    if (a->step < 1)
        return weft_fail(WEFT_ERR_ARGUMENT, "adamw: step: expected 1 or more, got %lld", (long long)a->step);
    if (!in_unit(a->beta1) || !in_unit(a->beta2) || !(a->eps > 0) || !isfinite(a->eps) || !isfinite(a->rate) ||
        !(a->decay >= 0) || !isfinite(a->decay) || !isfinite(a->scale))
        return weft_fail(WEFT_ERR_ARGUMENT,
                         "adamw: expected betas in [0, 1), eps above 0, decay from 0 on, rate and scale, all "
                         "finite, got %g, %g, %g, %g, %g, %g",
                         a->beta1, a->beta2, a->eps, a->decay, a->rate, a->scale);
    const weft_array arrays[] = {
        values_of(&e, "parameter", a->parameter, a->count, true), values_of(&e, "first", a->first, a->count, true),
        values_of(&e, "second", a->second, a->count, true), values_of(&e, "gradient", a->gradient, a->count, false),
        doubles_of("factor", a->factor, 1, false)};
    WEFT_TRY(weft_check_arrays("adamw", arrays, 5));
    const double *factor = a->factor;
    double scale = a->scale;
    if (!resolve(e.exec, &factor, &scale)) return WEFT_OK;
    return e.nn.table->adam(&e.nn, &(weft_adam){.parameter = a->parameter,
                                                .first = a->first,
                                                .second = a->second,
                                                .gradient = a->gradient,
                                                .count = a->count,
                                                .rate = a->rate,
                                                .beta1 = a->beta1,
                                                .beta2 = a->beta2,
                                                .eps = a->eps,
                                                .decay = a->decay,
                                                .scale = scale,
                                                .factor = factor,
                                                .correct1 = 1 / (1 - pow(a->beta1, (double)a->step)),
                                                .correct2 = 1 / (1 - pow(a->beta2, (double)a->step))});
}

/* ---- Muon ----------------------------------------------------------------------------------------------------------------- */

enum { MOST_ITERATIONS = 1000 };

/* The matrix and its powers, the shorter side first: x [r, c], a and b [r, r], r <= c. */
typedef struct square {
    void *x, *next, *a, *b;
    int64_t r, c;
} square;

static size_t arrays(const weft_muon_args *m, size_t element, void *workspace, square *q)
{
    weft_arena arena = weft_arena_open(workspace);
    q->r = m->rows < m->columns ? m->rows : m->columns;
    q->c = m->rows < m->columns ? m->columns : m->rows;
    q->x = weft_arena_take(&arena, (size_t)(q->r * q->c) * element);
    q->next = weft_arena_take(&arena, (size_t)(q->r * q->c) * element);
    q->a = weft_arena_take(&arena, (size_t)(q->r * q->r) * element);
    q->b = weft_arena_take(&arena, (size_t)(q->r * q->r) * element);
    return weft_arena_bytes(&arena);
}

/* x is stored as the parameter is, [rows, columns]; products see it with the shorter side first. */
static weft_status newton_schulz(weft_nn *nn, const weft_muon_args *m, square *q)
{
    const double a = 3.4445, b = -4.775, c = 2.0315;
    int flat = m->rows <= m->columns;
    int64_t ld = m->columns, r = q->r;
    for (int32_t i = 0; i < (m->iterations ? m->iterations : 5); i++) {
        weft_matmul gram = {.a = q->x,
                            .lda = ld,
                            .a_transposed = !flat,
                            .b = q->x,
                            .ldb = ld,
                            .b_transposed = flat,
                            .c = q->a,
                            .ldc = r,
                            .m = r,
                            .n = r,
                            .k = q->c,
                            .scale = 1};
        weft_matmul square_of = {
            .a = q->a, .lda = r, .b = q->a, .ldb = r, .c = q->b, .ldc = r, .m = r, .n = r, .k = r, .scale = c};
        WEFT_TRY(nn->table->matmul(nn, &gram));
        WEFT_TRY(nn->table->matmul(nn, &square_of));
        WEFT_TRY(nn->table->blend(nn, &(weft_blend){.to = q->b, .a = 1, .from = q->a, .b = b, .count = r * r}));
        /* next = b-matrix x; b is symmetric, so a tall x takes it from the right. */
        weft_matmul step = {.a = flat ? q->b : q->x,
                            .lda = flat ? r : ld,
                            .b = flat ? q->x : q->b,
                            .ldb = flat ? ld : r,
                            .c = q->next,
                            .ldc = ld,
                            .m = m->rows,
                            .n = m->columns,
                            .k = r,
                            .scale = 1};
        WEFT_TRY(nn->table->matmul(nn, &step));
        WEFT_TRY(nn->table->blend(
            nn, &(weft_blend){.to = q->next, .a = 1, .from = q->x, .b = a, .count = m->rows * m->columns}));
        void *swap = q->x;
        q->x = q->next, q->next = swap;
    }
    return WEFT_OK;
}

static weft_status enter_muon(entered *e, const weft_exec *exec, const weft_muon_args *args, weft_muon_args *copy,
                              const weft_muon_args **taken_args)
{
    static const weft_sizes sizes = WEFT_SIZES(weft_muon_args);
    const void *taken;
    weft_clear_error();
    WEFT_TRY(take_args("muon", &sizes, args, copy, &taken));
    const weft_muon_args *a = *taken_args = taken;
    if (a->rows < 1 || a->columns < 1 || a->rows > INT32_MAX || a->columns > INT32_MAX ||
        weft_times(a->rows, a->columns) > WEFT_MOST_ELEMENTS)
        return weft_fail(WEFT_ERR_ARGUMENT,
                         "muon: rows, columns: expected 1 to 2^31 - 1 of each and at most 2^48 elements, got "
                         "%lld x %lld",
                         (long long)a->rows, (long long)a->columns);
    if (a->iterations < 0 || a->iterations > MOST_ITERATIONS)
        return weft_fail(WEFT_ERR_ARGUMENT, "muon: iterations: expected 0 to %d, got %d", MOST_ITERATIONS,
                         (int)a->iterations);
    if (!in_unit(a->momentum) || !(a->decay >= 0) || !isfinite(a->decay) || !isfinite(a->rate) ||
        !isfinite(a->scale))
        return weft_fail(WEFT_ERR_ARGUMENT,
                         "muon: expected momentum in [0, 1), decay from 0 on, rate and scale, all finite, got %g, "
                         "%g, %g, %g",
                         a->momentum, a->decay, a->rate, a->scale);
    return enter(e, "muon", exec, a->blas);
}

/* to = from by its norm. */
static weft_status unit(weft_nn *nn, void *to, const void *from, int64_t count)
{
    double norm;
    if (nn->query || !on_host(nn->exec)) return nn->table->unit ? nn->table->unit(nn, to, from, count) : WEFT_OK;
    WEFT_TRY(nn->table->sum(nn, from, count, 1, &norm));
    return nn->table->blend(nn,
                            &(weft_blend){.to = to, .from = from, .b = 1 / (sqrt(norm) + 1e-7), .count = count});
}

/* The arrays above, then room for one product. */
static weft_status muon_rooms(weft_nn *nn, const weft_muon_args *a, size_t *own, size_t *all)
{
    square q;
    *own = arrays(a, weft_dtype_size(nn->table->dtype), NULL, &q);
    weft_nn query = *nn;
    query.query = true;
    query.blas = NULL; /* the loop needs more than a BLAS does */
    WEFT_TRY(unit(&query, q.next, q.x, a->rows * a->columns));
    WEFT_TRY(newton_schulz(&query, a, &q));
    *all = *own + query.need;
    return WEFT_OK;
}

weft_status weft_muon_workspace(const weft_exec *exec, const weft_muon_args *args, size_t *bytes)
{
    entered e;
    weft_muon_args copy;
    const weft_muon_args *a;
    size_t own;
    WEFT_TRY(enter_muon(&e, exec, args, &copy, &a));
    if (!bytes) return weft_fail(WEFT_ERR_ARGUMENT, "muon: bytes: expected a pointer, got NULL");
    return muon_rooms(&e.nn, a, &own, bytes);
}

weft_status weft_muon(const weft_exec *exec, const weft_muon_args *args)
{
    entered e;
    weft_muon_args copy;
    const weft_muon_args *a;
    square q;
    size_t own, all;
    WEFT_TRY(enter_muon(&e, exec, args, &copy, &a));
    WEFT_TRY(muon_rooms(&e.nn, a, &own, &all));
    if (!a->parameter || !a->moment || !a->gradient)
        return weft_fail(WEFT_ERR_ARGUMENT, "muon: expected parameter, moment and gradient, got NULL");
    const int64_t count = a->rows * a->columns;
    weft_array given[] = {values_of(&e, "parameter", a->parameter, count, true),
                          values_of(&e, "moment", a->moment, count, true),
                          values_of(&e, "gradient", a->gradient, count, false),
                          doubles_of("factor", a->factor, 1, false),
                          {0}};
    WEFT_TRY(check_room("muon", e.exec, all, &given[4]));
    WEFT_TRY(weft_check_arrays("muon", given, 5));
    arrays(a, weft_dtype_size(e.nn.table->dtype), e.exec->workspace, &q);
    weft_exec inner = *e.exec;
    inner.workspace = (char *)e.exec->workspace + own;
    e.nn.exec = &inner;
    const double *factor = a->factor;
    double scale = a->scale, tall = (double)a->rows / (double)a->columns;
    if (!resolve(e.exec, &factor, &scale)) return WEFT_OK;
    const weft_blend moment = {
        .to = a->moment, .a = a->momentum, .from = a->gradient, .b = scale, .count = count, .factor = factor};
    const weft_blend gradient = {.to = q.x, .from = a->gradient, .b = scale, .count = count, .factor = factor};
    const weft_blend ahead = {.to = q.x, .a = 1, .from = a->moment, .b = a->momentum, .count = count};
    WEFT_TRY(e.nn.table->blend(&e.nn, &moment));
    WEFT_TRY(e.nn.table->blend(&e.nn, &gradient));
    WEFT_TRY(e.nn.table->blend(&e.nn, &ahead));
    WEFT_TRY(unit(&e.nn, q.next, q.x, count));
    void *swap = q.x;
    q.x = q.next, q.next = swap;
    WEFT_TRY(newton_schulz(&e.nn, a, &q));
    const weft_blend update = {.to = a->parameter,
                               .a = 1 - a->rate * a->decay,
                               .from = q.x,
                               .b = -a->rate * sqrt(tall > 1 ? tall : 1),
                               .count = count,
                               .guard = factor};
    return e.nn.table->blend(&e.nn, &update);
}
