/* SPDX-License-Identifier: Apache-2.0
 *
 * Any tensors and any metadata may stand in a golden file; the bytes around them are fuzz_safetensors' part. What `weft check
 * --golden` makes of them must be a sentence, or problems that the library runs, in memory that is bounded by the file's size. The
 * target makes the tensors of a convention, edits them, and runs all cases with the real library; the source is included for the
 * step behind the reading of a file.
 *
 * Input: convention and backend, sizes (4 bytes), length of the metadata's "cases", its text, then edits: tensor, kind, 2 bytes. */
#include "golden/golden.c"

#include <malloc.h>
#include <sanitizer/asan_interface.h>

enum { MOST_TENSORS = 96, MOST_BYTES = 1 << 16, MOST_ITERATIONS = 16, HEAD = 6, EDIT = 4, ONE_IN = 32, APART = 32 };
enum { ON_CPU = 4, PORTABLE = 8, TWO_CASES = 16, WITH_OFFSETS = 32, RUN = 128 | 64 }; /* beside the convention */
enum { EDIT_DROP, EDIT_DTYPE, EDIT_SIZE, EDIT_DIMS, EDIT_NAME, EDIT_CASE, EDIT_VALUE, EDITS };

int LLVMFuzzerInitialize(int *argc, char ***argv);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* A letter is a size, see size_of; the tensors in the file's order of use. */
static const char *const tables[][MOST_TENSORS] = {
    {"x abCn",         "phi NCn",       "alpha 3",     "beta N",  "f TC",     "bias C",    "norm_weight Cn",
     "d_aggregate TC", "d_combine TCn", "H TN",        "ms T",    "h_pre Tn", "h_post Tn", "h_res_logits Tnn",
     "h_res Tnn",      "aggregate TC",  "combine TCn", "d_x TCn", "d_f TC",   "d_phi NCn", "d_norm_weight Cn",
     "d_beta N",       "d_bias C",      "d_alpha 3",   NULL},
    {"x abW",         "weight NW",
     "alpha_pre 1",   "alpha_post 1",
     "alpha_res 1",   "bias N",
     "f TC",          "f_bias C",
     "norm_weight W", "d_aggregate TC",
     "d_combine TW",  "h_pre abn",
     "h_post Tn",     "h_res Tnn",
     "aggregate TC",  "combine TW",
     "d_x TW",        "d_f TC",
     "d_weight NW",   "d_norm_weight W",
     "d_bias N",      "d_f_bias C",
     "d_alpha_pre 1", "d_alpha_post 1",
     "d_alpha_res 1", NULL},
    {"x abnC",       "fn NW",          "scale 3",         "base N",
     "f TC",         "bias C",         "norm_weight W",   "d_aggregate TC",
     "d_combine TW", "mix TN",         "pre Tn",          "post Tn",
     "comb Tnn",     "aggregate TC",   "combine TW",      "d_x TW",
     "d_f TC",       "d_fn NW",        "d_norm_weight W", "d_base N",
     "d_bias C",     "d_scale 3",      "head_fn nW",      "head_scale 1",
     "head_base n",  "d_head TC",      "head TC",         "d_x_head TW",
     "d_head_fn nW", "d_head_scale 1", "d_head_base n",   NULL},
    {"proj abP",
     "query abHk",
     "key abHk",
     "value abHv",
     "gate abHv",
     "beta abH",
     "g abH",
     "conv_weight cw",
     "A_log H",
     "dt_bias H",
     "cu_seqlens 2",
     "d_query abHk",
     "d_key abHk",
     "d_value abHv",
     "d_gate abHv",
     "d_beta abH",
     "d_g abH",
     "d_proj abP",
     "d_conv_weight cw",
     "d_A_log H",
     "d_dt_bias H",
     NULL},
};
enum { TABLES = sizeof tables / sizeof *tables, GDN = TABLES - 1 };

typedef struct world {
    char names[MOST_TENSORS][64];
    safetensors_tensor tensors[MOST_TENSORS];
    uint8_t values[MOST_TENSORS][2];
    size_t count, bytes;
} world;

/* Loops over elements and names: their branches say nothing about the program. */
#define UNTRACED __attribute__((no_sanitize("coverage")))

static int runs; /* whether calls run, or only ask for their workspace, which checks all arguments */

static void require(int truth)
{
    if (!truth) abort();
}

/* In the place of run.c's: most inputs end before an operator computes, and memory of exactly its size is guarded already. */
const char *run_call(const weft_exec *exec, const weft_op_info *op, const void *args)
{
    weft_exec with = *exec;
    require(op != NULL);
    weft_status status = weft_op_workspace(op, exec, args, &with.workspace_bytes);
    if (status == WEFT_OK && runs) {
        with.workspace = malloc(with.workspace_bytes ? with.workspace_bytes : 1);
        require(with.workspace != NULL);
        status = weft_op_call(op, &with, args);
        free(with.workspace);
    }
    if (status == WEFT_OK) return NULL;
    require(weft_last_error()[0] != 0);
    return weft_last_error();
}

/* ---- a file --------------------------------------------------------------------------------------------------------------- */

UNTRACED static int64_t size_of(char letter, const uint8_t sizes[4])
{
    int64_t a = sizes[0] % 2 + 1, b = sizes[0] / 2 % 2 + 1, n = sizes[1] % 3 + 1, C = sizes[2] % 3 + 1;
    int64_t key_heads = sizes[1] % 2 + 1, H = key_heads * (sizes[1] / 2 % 2 + 1), k = C, v = sizes[3] % 2 + 1;
    int64_t keys = 2 * key_heads * k;
    switch (letter) {
    case 'a': return a;
    case 'b': return b;
    case 'n': return n;
    case 'C': return C;
    case 'T': return a * b;
    case 'N': return 2 * n + n * n;
    case 'W': return n * C;
    case 'H': return H;
    case 'k': return k;
    case 'v': return v;
    case 'P': return keys + 2 * H * (v + 1);
    case 'c': return keys + H * v;
    case 'w': return sizes[3] / 4 % 4 + 1;
    default: return letter - '0';
    }
}

UNTRACED static void add_tensor(world *w, const char *row, int number, const uint8_t sizes[4])
{
    const size_t length = strcspn(row, " ");
    char *name = w->names[w->count];
    safetensors_tensor *t = &w->tensors[w->count++];
    *t = (safetensors_tensor){.dtype = SAFETENSORS_F32};
    memcpy(name, "case0.", 6);
    name[4] = (char)('0' + number);
    memcpy(name + 6, row, length);
    name[6 + length] = 0;
    t->name = name;
    for (const char *c = row + length + 1; *c; c++) t->shape[t->ndim++] = size_of(*c, sizes);
}

/* Which tensor, what, and two bytes that say how. A value that is not a number of the others is kept for later. */
static void edit(world *w, const uint8_t e[EDIT])
{
    size_t i = e[0] % w->count;
    safetensors_tensor *t = &w->tensors[i];
    char *name = w->names[i];
    switch (e[1] % EDITS) {
    case EDIT_DROP: name[0] = 0; break;
    case EDIT_DTYPE: t->dtype = (safetensors_dtype)(e[2] % SAFETENSORS_DTYPE_COUNT); break;
    case EDIT_SIZE: t->shape[e[2] % SAFETENSORS_MAX_DIMS] = e[3]; break;
    case EDIT_DIMS: t->ndim = e[2] % (SAFETENSORS_MAX_DIMS + 1); break;
    case EDIT_NAME: memmove(name, w->names[e[2] % w->count], sizeof *w->names); break;
    case EDIT_CASE: name[e[2] % 6] = (char)(e[3] ? e[3] : 1); break;
    case EDIT_VALUE: w->values[i][0] = e[2], w->values[i][1] = e[3]; break;
    }
}

static const double special[] = {0, NAN, INFINITY, -INFINITY, -1, 1e300, 0x1p31, -0x1p31 - 1, 0.5, 2, 1e-300, 3};

enum { PATTERN = 17 };

/* Element `i` of every tensor of a dtype without a special value; computed once, because the program's rounding is not what is
 * tested. */
static uint64_t usual[SAFETENSORS_DTYPE_COUNT][PATTERN];
static const weft_dtype known[SAFETENSORS_DTYPE_COUNT] = {[SAFETENSORS_F16] = WEFT_F16,
                                                          [SAFETENSORS_BF16] = WEFT_BF16,
                                                          [SAFETENSORS_F32] = WEFT_F32,
                                                          [SAFETENSORS_F64] = WEFT_F64,
                                                          [SAFETENSORS_I64] = WEFT_I64};

static uint64_t stored(weft_dtype dtype, double element)
{
    uint64_t bits = 0;
    if (dtype == WEFT_I64) element = fabs(element) < 0x1p32 ? floor(element) : 0;
    element_store(&bits, dtype, 0, element_round(dtype, element));
    return bits;
}

static void open_pattern(void)
{
    for (int d = 0; d < SAFETENSORS_DTYPE_COUNT; d++)
        for (int i = 0; i < PATTERN && known[d]; i++)
            usual[d][i] = stored(known[d], (double)(i * 37 % PATTERN - 8) / 16);
}

/* The tensor's elements, in memory of exactly their size and not aligned to them: what lies around it is poisoned. */
UNTRACED static char *fill(char *room, safetensors_tensor *t, const uint8_t value[2])
{
    const size_t size = safetensors_dtype_size(t->dtype);
    const weft_dtype dtype = known[t->dtype];
    char *bytes = room + 1;
    ASAN_UNPOISON_MEMORY_REGION(bytes, t->bytes);
    memset(bytes, 0, t->bytes);
    t->data = bytes;
    for (int64_t i = 0; dtype && i < t->count; i++)
        memcpy(bytes + (size_t)i * size, &usual[t->dtype][i % PATTERN], size);
    for (int64_t i = 0; dtype && i < t->count && strstr(t->name, "cu_seqlens"); i++) {
        const uint64_t offset = stored(dtype, (double)i);
        memcpy(bytes + (size_t)i * size, &offset, size);
    }
    if (dtype && value[0] && t->count) {
        const uint64_t odd = stored(dtype, special[value[0] % (sizeof special / sizeof *special)]);
        memcpy(bytes + (size_t)(value[1] % t->count) * size, &odd, size);
    }
    return room + (t->bytes + APART) / APART * APART + APART;
}

/* strcmp, which the fuzzer would look at too. */
UNTRACED static int name_order(const char *a, const char *b)
{
    while (*a && *a == *b) a++, b++;
    return *(const unsigned char *)a - *(const unsigned char *)b;
}

/* What safetensors.h promises: shape, count and bytes agree, names are sorted and none stands there twice. */
UNTRACED static void finish(world *w)
{
    static char memory[MOST_BYTES + (MOST_TENSORS + 1) * 2 * APART];
    size_t all = w->count;
    char *room = memory;
    ASAN_POISON_MEMORY_REGION(memory, sizeof memory);
    w->count = w->bytes = 0;
    for (size_t i = 0; i < all; i++) {
        safetensors_tensor t = w->tensors[i];
        size_t place = w->count;
        while (place && name_order(w->tensors[place - 1].name, t.name) > 0) place--;
        if (!t.name[0] || (place && !name_order(w->tensors[place - 1].name, t.name))) continue;
        t.count = 1;
        for (int d = 0; d < t.ndim; d++) t.count = t.count <= MOST_BYTES ? t.count * t.shape[d] : t.count;
        if (t.count > MOST_BYTES) continue;
        t.bytes = (size_t)t.count * safetensors_dtype_size(t.dtype);
        if (w->bytes + t.bytes > MOST_BYTES) continue;
        room = fill(room, &t, w->values[i]);
        w->bytes += t.bytes;
        memmove(&w->tensors[place + 1], &w->tensors[place], (w->count - place) * sizeof t);
        w->tensors[place] = t;
        w->count++;
    }
}

/* ---- what must hold ----------------------------------------------------------------------------------------------------------- */

static void check_result(const golden_file *file, size_t bytes)
{
    /* 32 streams have 34 times as many gates; an element of 2 bytes becomes several of 8 on each of the three ways. */
    enum { TIMES = 34 * 4 * 3 * 40 };
    size_t used = 0;
    for (void *block = file->memory; block; block = *(void **)block) used += malloc_usable_size(block);
    require(used <= TIMES * (bytes + 64));
    for (size_t i = 0; i < file->tensors.num_tensors; i++) {
        const comparison *c = &file->result[i];
        require(file->use[i] <= COMPARED);
        if (file->use[i] != COMPARED || file->problem[0]) continue;
        int64_t count = file->tensors.tensors[i].count;
        require(count == 0 || (c->count > 0 && c->count % count == 0));
        require(c->failed >= 0 && c->failed <= c->count && c->index < (count ? count : 1));
    }
    require(memchr(file->problem, 0, sizeof file->problem) != NULL);
}

/* 1 where nothing in the file was wrong. */
static int run(const uint8_t *data, size_t size)
{
    static world w;
    uint8_t head[HEAD] = {0};
    char cases[64] = "";
    unsigned sum = 0; /* of the edits */
    memcpy(head, data, size < HEAD ? size : HEAD);
    data += size < HEAD ? size : HEAD, size -= size < HEAD ? size : HEAD;
    size_t length = head[5] % sizeof cases < size ? head[5] % sizeof cases : size;
    memcpy(cases, data, length);
    data += length, size -= length;
    int table = head[0] % TABLES;
    weft_exec exec = WEFT_STRUCT(weft_exec, .backend = head[0] & ON_CPU ? WEFT_BACKEND_CPU : WEFT_BACKEND_REF,
                                 .isa = head[0] & PORTABLE ? WEFT_ISA_BASE : WEFT_ISA_BEST, .threads = 1);
    w.count = 0;
    memset(w.values, 0, sizeof w.values);
    for (int number = 0; number < (head[0] & TWO_CASES ? 2 : 1); number++)
        for (int i = 0; tables[table][i]; i++)
            if (strcmp(tables[table][i], "cu_seqlens 2") || head[0] & WITH_OFFSETS)
                add_tensor(&w, tables[table][i], number, head + 1);
    for (; size >= EDIT; data += EDIT, size -= EDIT) {
        edit(&w, data);
        sum += data[0] + data[1] + data[2] + data[3];
    }
    finish(&w);

    golden_file file = {.exec = &exec};
    safetensors_pair pair = {"cases", cases};
    file.tensors =
        (safetensors){.num_tensors = w.count, .tensors = w.tensors, .num_metadata = 1, .metadata = &pair};
    /* Operators are slow beside the rest and have a target of their own: one edited file in 32 runs them. Many iterations
     * show nothing new. */
    runs = (head[0] & RUN) == RUN && sum % ONE_IN == 0 &&
           (iterations(&file, 0) | iterations(&file, 1)) < MOST_ITERATIONS;
    run_file(&file, &conventions[table]);
    check_result(&file, w.bytes);
    int ok = !file.problem[0];
    file.tensors = (safetensors){0}; /* not the file's to free */
    close_file(&file);
    return ok;
}

int LLVMFuzzerInitialize(int *argc, char ***argv)
{
    (void)argc, (void)argv;
    open_pattern();
    /* Without an edit the files are good ones: edits begin where everything runs. */
    for (int i = 0; i < 32; i++) require(run((const uint8_t[HEAD]){(uint8_t)(i | RUN), 3, 1, 1, 5, 0}, HEAD));
    return 0;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    (void)run(data, size);
    return 0;
}
