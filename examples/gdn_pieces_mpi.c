/* SPDX-License-Identifier: Apache-2.0
 *
 * A Gated DeltaNet layer between its projections, forward and backward, with every sequence divided among MPI's processes in the
 * order of ranks (context parallel).
 *
 * Two things hop from a rank to the one behind it: the convolution's tail, the last W - 1 rows of q, k and v, before anything is
 * computed; and the rule's state, when the rank has computed its piece. Their gradients hop back, in the other order. The
 * library takes and gives them as `state` and `final_state`; how they travel is the caller's business, here MPI.
 *
 * Each rank then computes the whole by itself and compares. Results and gradients of tokens have the same bits wherever sequences
 * are cut. (On CUDA, where the rule works in chunks, pieces but the last have multiples of WEFT_GDN_RULE_CHUNK tokens for that.)
 * Where a sum is cut, its parts are rounded once more: gradients of the W - 1 rows in front of a cut, and of parameters.
 *
 *     mpicc gdn_pieces_mpi.c $(pkg-config --cflags --libs weft) -lm && mpirun -np 4 ./a.out
 *     mpirun -np 1 ./a.out 0 64 : -np 1 ./a.out 64 150         first and last token of each rank's piece
 *     mpirun -np 1 ./a.out 0 64 : -np 1 ./a.out 64 150 8       and its value heads: these pieces do not join, which is an error */
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <mpi.h>
#include <weft/gdn.h>

enum { B = 2, HK = 2, DK = 16, DV = 24, W = 4, TAIL = W - 1 };

static int rank, ranks, before, after; /* MPI_PROC_NULL where there is none: then nothing is sent or received */
static weft_exec exec;

static void must(weft_status status)
{
    if (status == WEFT_OK) return;
    fprintf(stderr, "rank %d: %s: %s\n", rank, weft_status_name(status), weft_last_error());
    MPI_Abort(MPI_COMM_WORLD, 1);
}

static void *zeros(int64_t count, size_t size)
{
    void *memory = calloc((size_t)count, size);
    if (!memory) MPI_Abort(MPI_COMM_WORLD, 1);
    return memory;
}

/* ---- pieces ---------------------------------------------------------------------------------------------------------- */

/* What a rank has. All numbers but the first two must be the same on all ranks. */
typedef struct piece {
    int64_t begin, end; /* tokens of each sequence, end not included */
    int64_t batch, key_heads, value_heads, key_dim, value_dim, width;
} piece;

enum { NUMBERS = sizeof(piece) / sizeof(int64_t) };
static const char *const names[NUMBERS] = {"begin",       "end",     "batch",     "key heads",
                                           "value heads", "key dim", "value dim", "width"};

/* Whether the pieces of all ranks are those of one computation; if not, says why. Every rank comes to the same answer. */
static int they_join(const piece *all)
{
    for (int r = 0; r < ranks; r++) {
        int64_t first[NUMBERS], own[NUMBERS];
        memcpy(first, &all[0], sizeof first), memcpy(own, &all[r], sizeof own);
        char why[160] = "";
        for (int i = 2; i < NUMBERS && !why[0]; i++)
            if (own[i] != first[i])
                snprintf(why, sizeof why, "%s: expected %lld as on rank 0, got %lld", names[i], (long long)first[i],
                         (long long)own[i]);
        if (!why[0] && (own[4] < 1 || own[4] % own[3]))
            snprintf(why, sizeof why, "value heads: expected a multiple of %lld, got %lld", (long long)own[3],
                     (long long)own[4]);
        if (!why[0] && own[1] - own[0] < TAIL)
            snprintf(why, sizeof why, "tokens: expected at least %d, which the convolution reads, got %lld", TAIL,
                     (long long)(own[1] - own[0]));
        if (!why[0] && r == 0 && own[0] != 0)
            snprintf(why, sizeof why, "begin: expected 0, got %lld", (long long)own[0]);
        if (!why[0] && r > 0 && own[0] != all[r - 1].end)
            snprintf(why, sizeof why, "begin: expected %lld, where rank %d ends, got %lld",
                     (long long)all[r - 1].end, r - 1, (long long)own[0]);
        if (!why[0]) continue;
        if (rank == 0) fprintf(stderr, "pieces do not join: rank %d: %s\n", r, why);
        return 0;
    }
    return 1;
}

/* ---- the layer --------------------------------------------------------------------------------------------------------- */

/* Sizes of the whole; a rank's piece is a range of tokens of the same tensors. */
typedef struct layer {
    int64_t tokens, value_heads, channels, columns; /* channels of the convolution, columns of the projection */
    weft_tensor proj, weight, a_log, dt_bias, d_o;  /* given */
    weft_tensor query, key, value, gate, beta, g, o;
    weft_tensor d_query, d_key, d_value, d_beta, d_g, d_proj;
    float *d_parameters; /* of weight, a_log, dt_bias, one behind the other */
    int64_t parameters;
    /* [B, channels, TAIL] and [B, value_heads, DK, DV]: in front of the first token and behind the last, and their gradients */
    weft_tensor tail, d_tail, d_next_tail, state, final_state, d_state, d_final_state;
} layer;

static weft_tensor tensor(int ndim, int64_t a, int64_t b, int64_t c, int64_t d)
{
    const int64_t shape[] = {a, b, c, d};
    int64_t count = 1;
    for (int i = 0; i < ndim; i++) count *= shape[i];
    return weft_dense(zeros(count, sizeof(float)), WEFT_F32, ndim, shape);
}

static int64_t count_of(const weft_tensor *t)
{
    int64_t count = 1;
    for (int i = 0; i < t->ndim; i++) count *= t->shape[i];
    return count;
}

/* The same numbers on every rank, -size to size. */
static weft_tensor random_tensor(uint64_t seed, float size, weft_tensor t)
{
    for (int64_t i = 0; i < count_of(&t); i++) {
        seed = seed * 6364136223846793005u + 1442695040888963407u;
        ((float *)t.data)[i] = size * ((float)(seed >> 40) / 8388608.0f - 1.0f);
    }
    return t;
}

static layer layer_make(int64_t tokens, int64_t hv)
{
    layer l = {.tokens = tokens, .value_heads = hv, .channels = 2 * HK * DK + hv * DV};
    l.columns = l.channels + hv * DV + 2 * hv;
    l.parameters = l.channels * W + 2 * hv;
    l.proj = random_tensor(1, 1, tensor(3, B, tokens, l.columns, 1));
    l.weight = random_tensor(2, 0.7f, tensor(2, l.channels, W, 1, 1));
    l.a_log = random_tensor(3, 1, tensor(1, hv, 1, 1, 1)), l.dt_bias = random_tensor(4, 1, tensor(1, hv, 1, 1, 1));
    l.d_o = random_tensor(5, 1, tensor(4, B, tokens, hv, DV));
    weft_tensor *const of_keys[] = {&l.query, &l.key, &l.d_query, &l.d_key};
    weft_tensor *const of_values[] = {&l.value, &l.gate, &l.o, &l.d_value};
    weft_tensor *const of_gates[] = {&l.beta, &l.g, &l.d_beta, &l.d_g};
    weft_tensor *const tails[] = {&l.tail, &l.d_tail, &l.d_next_tail};
    weft_tensor *const states[] = {&l.state, &l.final_state, &l.d_state, &l.d_final_state};
    for (int i = 0; i < 4; i++) {
        *of_keys[i] = tensor(4, B, tokens, HK, DK), *of_values[i] = tensor(4, B, tokens, hv, DV);
        *of_gates[i] = tensor(3, B, tokens, hv, 1), *states[i] = tensor(4, B, hv, DK, DV);
        if (i < 3) *tails[i] = tensor(3, B, l.channels, TAIL, 1);
    }
    l.d_proj = tensor(3, B, tokens, l.columns, 1);
    l.d_parameters = zeros(l.parameters, sizeof(float));
    return l;
}

static void layer_free(layer *l)
{
    weft_tensor *const all[] = {&l->proj,    &l->weight,      &l->a_log,   &l->dt_bias,     &l->d_o,
                                &l->query,   &l->key,         &l->value,   &l->gate,        &l->beta,
                                &l->g,       &l->o,           &l->d_query, &l->d_key,       &l->d_value,
                                &l->d_beta,  &l->d_g,         &l->d_proj,  &l->tail,        &l->d_tail,
                                &l->d_state, &l->d_next_tail, &l->state,   &l->final_state, &l->d_final_state};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]->data);
    free(l->d_parameters);
}

/* The tokens of a piece. */
static weft_tensor cut(const weft_tensor *t, const piece *p)
{
    weft_tensor part = *t;
    part.data = (float *)t->data + p->begin * t->stride[1];
    part.shape[1] = p->end - p->begin;
    return part;
}

/* Calls a function of the library with the workspace that it asks for. */
#define CALL(op, args)                                                                                             \
    do {                                                                                                           \
        const weft_##op##_args *const args_ = (args);                                                              \
        must(weft_##op##_workspace(&exec, args_, &exec.workspace_bytes));                                          \
        exec.workspace = exec.workspace_bytes ? zeros((int64_t)exec.workspace_bytes, 1) : NULL;                    \
        must(weft_##op(&exec, args_));                                                                             \
        free(exec.workspace);                                                                                      \
    } while (0)

static weft_gdn_sections sections(const layer *l, const weft_tensor *rows, const piece *p)
{
    const weft_tensor part = cut(rows, p);
    return weft_gdn_split(&part, HK, DK, l->value_heads, DV);
}

static void front(layer *l, const piece *p)
{
    const weft_gdn_sections s = sections(l, &l->proj, p);
    CALL(gdn_pre_fwd,
         WEFT_ARGS(weft_gdn_pre_fwd_args, .options = weft_gdn_defaults(), .q = s.q, .k = s.k, .v = s.v, .z = s.z,
                   .b = s.b, .a = s.a, .weight = l->weight, .a_log = l->a_log, .dt_bias = l->dt_bias,
                   .state = l->tail, .query = cut(&l->query, p), .key = cut(&l->key, p), .value = cut(&l->value, p),
                   .gate = cut(&l->gate, p), .beta = cut(&l->beta, p), .g = cut(&l->g, p)));
}

static void rule(layer *l, const piece *p)
{
    CALL(gdn_rule_fwd,
         WEFT_ARGS(weft_gdn_rule_fwd_args, .scale = 1 / sqrt(DK), .query = cut(&l->query, p),
                   .key = cut(&l->key, p), .value = cut(&l->value, p), .beta = cut(&l->beta, p), .g = cut(&l->g, p),
                   .state = l->state, .o = cut(&l->o, p), .final_state = l->final_state));
}

static void rule_backward(layer *l, const piece *p)
{
    CALL(gdn_rule_bwd,
         WEFT_ARGS(weft_gdn_rule_bwd_args, .scale = 1 / sqrt(DK), .query = cut(&l->query, p),
                   .key = cut(&l->key, p), .value = cut(&l->value, p), .beta = cut(&l->beta, p), .g = cut(&l->g, p),
                   .state = l->state, .d_o = cut(&l->d_o, p), .d_final_state = l->d_final_state,
                   .d_query = {cut(&l->d_query, p), 0}, .d_key = {cut(&l->d_key, p), 0},
                   .d_value = {cut(&l->d_value, p), 0}, .d_beta = {cut(&l->d_beta, p), 0},
                   .d_g = {cut(&l->d_g, p), 0}, .d_state = {l->d_state, 0}));
}

static void front_backward(layer *l, const piece *p)
{
    const weft_gdn_sections s = sections(l, &l->proj, p), d = sections(l, &l->d_proj, p);
    float *const d_weight = l->d_parameters, *const d_a_log = d_weight + l->channels * W;
    CALL(gdn_pre_bwd,
         WEFT_ARGS(weft_gdn_pre_bwd_args, .options = weft_gdn_defaults(), .q = s.q, .k = s.k, .v = s.v, .b = s.b,
                   .a = s.a, .weight = l->weight, .a_log = l->a_log, .dt_bias = l->dt_bias, .state = l->tail,
                   .d_query = cut(&l->d_query, p), .d_key = cut(&l->d_key, p), .d_value = cut(&l->d_value, p),
                   .d_beta = cut(&l->d_beta, p), .d_g = cut(&l->d_g, p), .d_final_state = l->d_next_tail,
                   .d_q = {d.q, 0}, .d_k = {d.k, 0}, .d_v = {d.v, 0}, .d_b = {d.b, 0}, .d_a = {d.a, 0},
                   .d_weight = {weft_dense2(d_weight, WEFT_F32, l->channels, W), 0},
                   .d_a_log = {weft_dense1(d_a_log, WEFT_F32, l->value_heads), 0},
                   .d_dt_bias = {weft_dense1(d_a_log + l->value_heads, WEFT_F32, l->value_heads), 0},
                   .d_state = {l->d_tail, 0}));
}

/* ---- hops -------------------------------------------------------------------------------------------------------------- */

static void send_to(int to, const weft_tensor *t)
{
    MPI_Send(t->data, (int)count_of(t), MPI_FLOAT, to, 0, MPI_COMM_WORLD);
}

/* From MPI_PROC_NULL nothing is received: the tensor keeps its zeros. */
static void receive_from(int from, const weft_tensor *t)
{
    MPI_Recv(t->data, (int)count_of(t), MPI_FLOAT, from, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
}

/* All ranks at once: the last rows of q, k and v go to the rank behind, as a state of the convolution, the newest row last. */
static void exchange_tails(layer *l, const piece *p)
{
    weft_tensor mine = tensor(3, B, l->channels, TAIL, 1);
    for (int64_t b = 0; b < B; b++)
        for (int64_t c = 0; c < l->channels; c++) /* q, k, v are the first columns */
            for (int64_t i = 0; i < TAIL; i++)
                ((float *)mine.data)[(b * l->channels + c) * TAIL + i] =
                    ((float *)l->proj.data)[(b * l->tokens + p->end - TAIL + i) * l->columns + c];
    const int count = (int)count_of(&mine);
    MPI_Sendrecv(mine.data, count, MPI_FLOAT, after, 0, l->tail.data, count, MPI_FLOAT, before, 0, MPI_COMM_WORLD,
                 MPI_STATUS_IGNORE);
    free(mine.data);
}

static void forward_of_piece(layer *l, const piece *p)
{
    exchange_tails(l, p);
    front(l, p); /* on all ranks at once */
    receive_from(before, &l->state);
    rule(l, p);
    send_to(after, &l->final_state);
}

static void backward_of_piece(layer *l, const piece *p)
{
    receive_from(after, &l->d_final_state);
    rule_backward(l, p);
    send_to(before, &l->d_state);
    receive_from(after, &l->d_next_tail);
    front_backward(l, p);
    send_to(before, &l->d_tail);
    /* Parameters: the sums of the ranks, added in their order, so that all ranks get the same. */
    float *all = zeros(ranks * l->parameters, sizeof *all);
    MPI_Allgather(l->d_parameters, (int)l->parameters, MPI_FLOAT, all, (int)l->parameters, MPI_FLOAT,
                  MPI_COMM_WORLD);
    for (int64_t i = 0; i < l->parameters; i++) {
        l->d_parameters[i] = all[i];
        for (int r = 1; r < ranks; r++) l->d_parameters[i] += all[r * l->parameters + i];
    }
    free(all);
}

/* ---- against the whole --------------------------------------------------------------------------------------------------- */

static int wrong(const char *what, double off, double bound)
{
    if (off <= bound) return 0; /* NaN is wrong */
    fprintf(stderr, "rank %d: %s is off by %g, more than %g\n", rank, what, off, bound);
    return 1;
}

/* The larger of two, and NaN where one of them is. */
static double worse(double x, double y)
{
    return isnan(x) || x > y ? x : y;
}

/* The largest difference in the tokens from `begin` to `end` */
static double difference(const weft_tensor *x, const weft_tensor *y, int64_t begin, int64_t end)
{
    double worst = 0;
    for (int64_t b = 0; b < B; b++)
        for (int64_t i = b * x->stride[0] + begin * x->stride[1]; i < b * x->stride[0] + end * x->stride[1]; i++)
            worst = worse(worst, fabs((double)((float *)x->data)[i] - (double)((float *)y->data)[i]));
    return worst;
}

static double largest(const float *x, int64_t count)
{
    double most = 0;
    for (int64_t i = 0; i < count; i++) most = fmax(most, fabs((double)x[i]));
    return most;
}

static int compare(const layer *got, const layer *want, const piece *p)
{
    const struct {
        const char *name;
        const weft_tensor *got, *want;
    } rows[] = {
        {"query", &got->query, &want->query},
        {"key", &got->key, &want->key},
        {"value", &got->value, &want->value},
        {"gate", &got->gate, &want->gate},
        {"beta", &got->beta, &want->beta},
        {"g", &got->g, &want->g},
        {"o", &got->o, &want->o},
        {"d_query", &got->d_query, &want->d_query},
        {"d_key", &got->d_key, &want->d_key},
        {"d_value", &got->d_value, &want->d_value},
        {"d_beta", &got->d_beta, &want->d_beta},
        {"d_g", &got->d_g, &want->d_g},
    };
    int failures = 0;
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        failures += wrong(rows[i].name, difference(rows[i].got, rows[i].want, p->begin, p->end), 0);
    if (after == MPI_PROC_NULL)
        failures +=
            wrong("the final state", difference(&got->final_state, &want->final_state, 0, got->value_heads), 0);

    /* In front of a cut a row's gradient is W products, added in two parts instead of one after the other: at most W + 1
     * roundings in either order, of sums that are no larger than the largest gradient. */
    const double u = ldexp(1, -24), of_rows = largest(want->d_proj.data, count_of(&want->d_proj));
    const int64_t sure = after == MPI_PROC_NULL ? p->end : p->end - TAIL;
    failures += wrong("d_proj", difference(&got->d_proj, &want->d_proj, p->begin, sure), 0);
    failures += wrong("d_proj in front of the cut", difference(&got->d_proj, &want->d_proj, sure, p->end),
                      2 * (W + 1) * u * of_rows);
    /* Sums over all tokens, in the order of tokens or first on every rank: a rounding for each token and rank. */
    const int64_t parts[] = {0, got->channels * W, got->channels * W + got->value_heads, got->parameters};
    static const char *const names_of_parts[] = {"d_weight", "d_a_log", "d_dt_bias"};
    for (int k = 0; k < 3; k++) {
        double worst = 0;
        for (int64_t i = parts[k]; i < parts[k + 1]; i++)
            worst = worse(worst, fabs((double)got->d_parameters[i] - (double)want->d_parameters[i]));
        const double most = largest(want->d_parameters + parts[k], parts[k + 1] - parts[k]);
        failures += wrong(names_of_parts[k], worst, 2 * (double)(B * got->tokens + ranks) * u * most);
    }
    return failures;
}

int main(int argc, char **argv)
{
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    before = rank > 0 ? rank - 1 : MPI_PROC_NULL;
    after = rank < ranks - 1 ? rank + 1 : MPI_PROC_NULL;
    exec = WEFT_STRUCT(weft_exec, .backend = WEFT_BACKEND_CPU);

    piece mine = {.begin = rank * WEFT_GDN_RULE_CHUNK, .end = (rank + 1) * WEFT_GDN_RULE_CHUNK};
    mine.batch = B, mine.key_heads = HK, mine.value_heads = 2 * HK;
    mine.key_dim = DK, mine.value_dim = DV, mine.width = W;
    if (argc > 2) mine.begin = atoll(argv[1]), mine.end = atoll(argv[2]);
    if (argc > 3) mine.value_heads = atoll(argv[3]);
    piece *all = zeros(ranks, sizeof *all);
    MPI_Allgather(&mine, NUMBERS, MPI_INT64_T, all, NUMBERS, MPI_INT64_T, MPI_COMM_WORLD);
    int failures = !they_join(all);
    if (!failures) {
        const piece whole = {.begin = 0, .end = all[ranks - 1].end};
        layer divided = layer_make(whole.end, mine.value_heads), alone = layer_make(whole.end, mine.value_heads);
        forward_of_piece(&divided, &mine);
        backward_of_piece(&divided, &mine);
        front(&alone, &whole), rule(&alone, &whole);
        rule_backward(&alone, &whole), front_backward(&alone, &whole);
        failures = compare(&divided, &alone, &mine);
        if (!failures)
            printf("rank %d: tokens %lld to %lld of %lld are those of the whole\n", rank, (long long)mine.begin,
                   (long long)mine.end, (long long)whole.end);
        layer_free(&divided), layer_free(&alone);
    }
    free(all);
    MPI_Finalize();
    return failures != 0;
}
