/* SPDX-License-Identifier: Apache-2.0
 *
 * Any bytes may be called the arguments of an operator. They are made through the tables of weft/ops.h: a zero byte, or no byte
 * at all, stands for what a careful caller passes, other bytes for what goes wrong. Each buffer, the structs included, ends at a
 * page that cannot be touched, or begins behind one.
 *
 * Whatever the call is, it returns a status. An error comes with a sentence that begins with the operator's name and leaves every
 * byte as it was; success leaves the sentence empty and writes to outputs only. A call that has been told its workspace never asks
 * for more, and one byte less is an error. What succeeds was right: ranks, strides and addresses, reserved fields, and outputs that
 * share memory with nothing but what their table says. */
#define _DEFAULT_SOURCE 1 /* MAP_ANONYMOUS */
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include <weft/gdn.h>
#include <weft/mhc.h>
#include <weft/ops.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void require(bool truth, const char *what)
{
    if (truth) return;
    fprintf(stderr, "fuzz_api: %s: \"%s\"\n", what, weft_last_error());
    abort();
}

/* ---- bytes ------------------------------------------------------------------------------------------------------------ */

static const uint8_t *at, *end;

static unsigned next(void)
{
    return at < end ? *at++ : 0;
}

static int64_t next_number(void)
{
    uint64_t v = 0;
    for (int i = 0; i < 8; i++) v |= (uint64_t)next() << 8 * i;
    return (int64_t)v;
}

/* Loops over elements: their branches say nothing about the library. */
#define UNTRACED __attribute__((no_sanitize("coverage")))

/* Something that no call takes, whatever else it is given. */
static bool hopeless;

#define PICK(table) ((table)[next() % (sizeof(table) / sizeof *(table))])

/* Of a table's sizes the first ones; the rest, whose calls take long, now and then. */
#define PICK_SMALL(table, small)                                                                                   \
    ((table)[at < end && *at >= 0xf0 ? next() % (sizeof(table) / sizeof *(table)) : next() % (small)])

/* ---- buffers between guard pages --------------------------------------------------------------------------------------- */

enum { PAGE = 4096, ROOM = 36 * PAGE, SLOTS = 128 };

/* What a call may touch, and where what it was is kept. */
typedef struct buffer {
    unsigned char *begin, *kept;
    size_t bytes;
} buffer;

static unsigned char *slots, *kept;
static buffer buffers[SLOTS];
static int used;

static void open_slots(void)
{
    const size_t apart = ROOM + PAGE;
    if (slots) return;
    slots = mmap(NULL, SLOTS * apart + PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    kept = malloc((size_t)SLOTS * ROOM);
    require(slots != MAP_FAILED && kept, "no memory for the buffers");
    for (int i = 0; i < SLOTS; i++)
        require(mprotect(slots + PAGE + (size_t)i * apart, ROOM, PROT_READ | PROT_WRITE) == 0, "mprotect");
}

/* Memory against the guard page behind it, or in front of it; NULL where it does not fit. */
static unsigned char *take(size_t bytes, bool in_front, size_t align)
{
    if (bytes > ROOM || used == SLOTS) return NULL;
    unsigned char *slot = slots + PAGE + (size_t)used * (ROOM + PAGE);
    unsigned char *p = in_front ? slot : slot + (ROOM - bytes) / align * align;
    buffers[used] = (buffer){p, kept + (size_t)used * ROOM, bytes};
    used++;
    return p;
}

static void remember(const buffer *b)
{
    memcpy(b->kept, b->begin, b->bytes);
}

static void remember_all(void)
{
    for (int i = 0; i < used; i++) remember(&buffers[i]);
}

/* Where in its slot a byte lies. */
static size_t place_of(const void *byte)
{
    return (size_t)((const unsigned char *)byte - slots - PAGE) % (ROOM + PAGE);
}

static const buffer *buffer_of(const void *byte)
{
    return &buffers[(size_t)((const unsigned char *)byte - slots - PAGE) / (ROOM + PAGE)];
}

/* What to do with the bytes of each element: keep them as they are now, as a call that succeeded leaves its outputs; set or clear
 * their marks; look whether one is marked. */
typedef enum visit { KEEP, MARK, UNMARK, MEET } visit;

/* The tensor is one that a call has taken, and has elements. */
UNTRACED static bool walk(const weft_tensor *t, visit what)
{
    static unsigned char marks[ROOM];
    int64_t shape[WEFT_MAX_DIMS] = {1, 1, 1, 1}, stride[WEFT_MAX_DIMS] = {0};
    const size_t element = weft_dtype_size(t->dtype);
    for (int i = 0, k = WEFT_MAX_DIMS - t->ndim; i < t->ndim; i++, k++) {
        shape[k] = t->shape[i];
        stride[k] = t->stride[i];
    }
    unsigned char *of_marks = marks + place_of(t->data), *of_kept = buffer_of(t->data)->kept;
    of_kept += (unsigned char *)t->data - buffer_of(t->data)->begin;
    bool met = false;
    for (int64_t i = 0; i < shape[0]; i++)
        for (int64_t j = 0; j < shape[1]; j++)
            for (int64_t k = 0; k < shape[2]; k++)
                for (int64_t l = 0; l < shape[3]; l++) {
                    const size_t index = (size_t)(i * stride[0] + j * stride[1] + k * stride[2] + l * stride[3]);
                    const size_t byte = index * element;
                    if (what == KEEP)
                        memcpy(of_kept + byte, (unsigned char *)t->data + byte, element);
                    else if (what != MEET)
                        memset(of_marks + byte, what == MARK, element);
                    else
                        for (size_t m = 0; m < element; m++) met |= of_marks[byte + m];
                }
    return met;
}

static void compare(const char *what)
{
    for (int i = 0; i < used; i++) require(memcmp(buffers[i].kept, buffers[i].begin, buffers[i].bytes) == 0, what);
}

/* ---- values ------------------------------------------------------------------------------------------------------------ */

static uint64_t seed;

UNTRACED static unsigned draw(void)
{
    seed = seed * 6364136223846793005u + 1442695040888963407u;
    return (unsigned)(seed >> 33);
}

UNTRACED static void put_real(unsigned char *to, weft_dtype dtype, double v)
{
    const float f = (float)v;
    uint32_t bits;
    memcpy(&bits, &f, sizeof bits);
    uint16_t half = (uint16_t)(bits >> 16); /* bf16 cut short; as f16, some other number */
    if (dtype == WEFT_F64)
        memcpy(to, &v, sizeof v);
    else if (dtype == WEFT_F32)
        memcpy(to, &f, sizeof f);
    else
        memcpy(to, &half, sizeof half);
}

/* Kind 0: numbers between -1 and 1; others are harder. */
UNTRACED static double real_of(unsigned kind)
{
    static const double odd[] = {0,
                                 -0.0,
                                 1e30,
                                 -1e30,
                                 1e-40,
                                 (double)__builtin_inff(),
                                 -(double)__builtin_inff(),
                                 (double)__builtin_nanf("")};
    const double v = (double)draw() / (double)(1u << 30) - 1;
    if (kind % 4 == 0) return v;
    if (kind % 4 == 1) return 200 * v;
    return kind % 4 == 2 && draw() % 8 ? v : odd[draw() % 8];
}

UNTRACED static void fill(unsigned char *to, size_t bytes, weft_dtype dtype, unsigned kind)
{
    const size_t element = weft_dtype_size(dtype);
    for (size_t k = 0; k + element <= bytes; k += element) put_real(to + k, dtype, real_of(kind));
}

/* Offsets and rows: 0, 1, 2, ... and the last one `most`, or bytes of the input. */
static void fill_index(const weft_tensor *t, int64_t most)
{
    const bool given = next() & 1;
    for (int64_t k = 0; k < t->shape[0] && k < ROOM; k++) {
        int64_t v = given ? (int64_t)(int8_t)next() : k < most ? k : most;
        const int32_t narrow = (int32_t)v;
        unsigned char *to = (unsigned char *)t->data + (size_t)(k * t->stride[0]) * weft_dtype_size(t->dtype);
        if (t->dtype == WEFT_I64)
            memcpy(to, &v, sizeof v);
        else
            memcpy(to, &narrow, sizeof narrow);
    }
}

/* ---- tensors ----------------------------------------------------------------------------------------------------------- */

static int64_t sizes[WEFT_DIM_SCALES + 1];
static weft_dtype act, param, index_type;

/* One number that no careful caller passes, or one that is merely rare. */
static int64_t odd_number(void)
{
    static const int64_t odd[] = {0,
                                  1,
                                  2,
                                  -1,
                                  INT32_MAX,
                                  (int64_t)1 << 31,
                                  (int64_t)1 << 38,
                                  (int64_t)1 << 40,
                                  (int64_t)1 << 47,
                                  (int64_t)1 << 48,
                                  ((int64_t)1 << 48) + 1,
                                  (int64_t)1 << 62,
                                  INT64_MAX,
                                  INT64_MIN};
    const unsigned which = next();
    return which < 0xf0 ? odd[which % (sizeof odd / sizeof *odd)] : next_number();
}

static void take_sizes(void)
{
    static const int64_t tokens[] = {3, 0, 1, 2, 5, 17, 33, 70}, streams[] = {4, 1, 2, 3, 8, 5, 32},
                         channels[] = {8, 1, 2, 7, 17, 16, 40, 64, 100}, rows[] = {24, 1, 5, 64},
                         batch[] = {2, 1, 0, 3}, steps[] = {5, 0, 1, 2, 17, 64, 66}, heads[] = {1, 2, 3},
                         group[] = {1, 2, 3}, dims[] = {8, 1, 3, 16, 33, 64}, width[] = {4, 1, 2, 8, 3},
                         more[] = {0, 1, 5}, sequences[] = {2, 0, 1, 4};
    static const weft_dtype acts[] = {WEFT_F32, WEFT_BF16, WEFT_F16, WEFT_F64};
    const int64_t n = PICK_SMALL(streams, 4), key_heads = PICK(heads), w = PICK(width), key = PICK_SMALL(dims, 3),
                  value = PICK_SMALL(dims, 3);
    const unsigned form = next();
    memset(sizes, 0, sizeof sizes);
    sizes[WEFT_DIM_TOKENS] = PICK_SMALL(tokens, 5);
    sizes[WEFT_DIM_STREAMS] = n;
    sizes[WEFT_DIM_CHANNELS] = PICK_SMALL(channels, 5);
    sizes[WEFT_DIM_SCALES] = (form & 12) == 12 ? 2 : 3;
    sizes[WEFT_DIM_GATES] = sizes[WEFT_DIM_SCALES] == 2 ? 2 * n : 2 * n + n * n;
    sizes[WEFT_DIM_ROWS] = PICK_SMALL(rows, 3);
    sizes[WEFT_DIM_BATCH] = form & 1 ? 1 : PICK(batch);
    sizes[WEFT_DIM_STEPS] = PICK_SMALL(steps, 4);
    sizes[WEFT_DIM_KEY_HEADS] = key_heads;
    sizes[WEFT_DIM_VALUE_HEADS] = key_heads * PICK(group);
    sizes[WEFT_DIM_HEADS] = sizes[form & 2 ? WEFT_DIM_VALUE_HEADS : WEFT_DIM_KEY_HEADS];
    sizes[WEFT_DIM_KEY_DIM] = key;
    sizes[WEFT_DIM_VALUE_DIM] = value;
    sizes[WEFT_DIM_CONV] = 2 * key_heads * key + sizes[WEFT_DIM_VALUE_HEADS] * value;
    sizes[WEFT_DIM_WIDTH] = w;
    sizes[WEFT_DIM_HISTORY] = w - 1 + PICK(more);
    sizes[WEFT_DIM_SEQUENCES] = form & 1 ? PICK(sequences) : sizes[WEFT_DIM_BATCH];
    if (form >= 0xf0) { /* sizes that only a query gets to */
        static const int dim[] = {WEFT_DIM_TOKENS, WEFT_DIM_CHANNELS, WEFT_DIM_ROWS,
                                  WEFT_DIM_BATCH,  WEFT_DIM_STEPS,    WEFT_DIM_SEQUENCES};
        sizes[PICK(dim)] = odd_number();
    }
    if (sizes[WEFT_DIM_SEQUENCES] != (int64_t)(int32_t)sizes[WEFT_DIM_SEQUENCES])
        sizes[WEFT_DIM_SEQUENCES] = INT32_MAX;
    sizes[WEFT_DIM_OFFSETS] = sizes[WEFT_DIM_SEQUENCES] + 1;
    sizes[WEFT_DIM_CACHE] = sizes[WEFT_DIM_SEQUENCES] + PICK(more);
    sizes[WEFT_DIM_STEP_HEADS] = (int64_t)((uint64_t)sizes[WEFT_DIM_STEPS] * (uint64_t)sizes[WEFT_DIM_VALUE_HEADS]);
    act = PICK(acts);
    param = act == WEFT_F64 ? WEFT_F64 : PICK(acts);
    if (param == WEFT_F64) param = act;
    index_type = next() & 1 ? WEFT_I64 : WEFT_I32;
}

static weft_dtype dtype_of(weft_arg_type type)
{
    switch (type) {
    case WEFT_TYPE_ACT: return act;
    case WEFT_TYPE_INDEX: return index_type;
    case WEFT_TYPE_FULL: return act == WEFT_F64 ? WEFT_F64 : WEFT_F32;
    case WEFT_TYPE_WIDE: return act != WEFT_F64 && (next() & 1) ? WEFT_F32 : act;
    default: return param;
    }
}

static void lay_out(weft_tensor *t, unsigned how)
{
    int order[WEFT_MAX_DIMS] = {0, 1, 2, 3};
    const int64_t most = (int64_t)1 << 61;
    int64_t step = 1;
    if ((how & 7) == 1 && t->ndim > 1) order[t->ndim - 1] = t->ndim - 2, order[t->ndim - 2] = t->ndim - 1;
    if ((how & 7) == 2 && t->ndim > 1) order[0] = 1, order[1] = 0;
    for (int k = t->ndim - 1; k >= 0; k--) {
        t->stride[order[k]] = step;
        if (__builtin_mul_overflow(step, t->shape[order[k]] > 0 ? t->shape[order[k]] : 1, &step) || step > most)
            step = most;
        if ((how & 7) == 3) step += 3; /* padded */
        if ((how & 7) == 4 && k == t->ndim - 1) step *= 2;
    }
    if ((how & 7) == 5 && t->ndim) t->stride[0] = 0;
    if ((how & 7) == 6) t->stride[next() % WEFT_MAX_DIMS] = odd_number();
    if ((how & 7) == 7) t->shape[next() % WEFT_MAX_DIMS] = odd_number();
}

/* Bytes from the first to the last element, more than fit where there are too many. */
static size_t bytes_of(const weft_tensor *t)
{
    __int128 last = 0;
    for (int i = 0; i < t->ndim && i < WEFT_MAX_DIMS; i++)
        if (t->shape[i] == 0) return 0;
    for (int i = 0; i < t->ndim && i < WEFT_MAX_DIMS; i++) {
        if (t->shape[i] < 0 || t->stride[i] < 0) return ROOM + 1;
        last += (__int128)(t->shape[i] - 1) * t->stride[i];
        if (last > ROOM) return ROOM + 1;
    }
    return (size_t)(last + 1) * weft_dtype_size(t->dtype);
}

/* Puts a tensor over another, a few elements further on, or so that it begins with the other's last elements, or behind them. */
static bool lay_over(weft_tensor *t, const weft_tensor *o, unsigned shift)
{
    const size_t element = weft_dtype_size(t->dtype), mine = bytes_of(t), its = bytes_of(o);
    if (its == 0 || its > ROOM) return false;
    const size_t from =
        shift < 0x80 ? shift * element : its - (shift % 4 * element < its ? shift % 4 * element : its);
    buffer *b = &buffers[buffer_of(o->data) - buffers];
    if (mine + from > its && (shift < 0x80 || place_of(o->data) + from + mine > ROOM)) return false;
    t->data = (char *)o->data + from;
    if ((unsigned char *)t->data + mine > b->begin + b->bytes) {
        const size_t bytes = (size_t)((unsigned char *)t->data + mine - b->begin);
        memset(b->begin + b->bytes, 0, bytes - b->bytes);
        b->bytes = bytes;
    }
    return true;
}

/* Bits of how: 0-2 layout, 3 in front of its guard page, 4-7 something wrong with data, dtype or rank. */
static void make_tensor(const weft_arg_info *info, void *args, weft_tensor *const *others, int count)
{
    weft_tensor *t = (weft_tensor *)(void *)((char *)args + info->offset);
    const unsigned there = next(), how = next(), wrong = how >> 4;
    memset(t, 0, sizeof *t);
    if ((info->optional && (there & 1)) || (there & 0xf0) == 0xf0) return;
    t->dtype = dtype_of(info->type);
    t->ndim = info->ndim;
    for (int i = 0; i < info->ndim; i++)
        t->shape[i] = info->dim[i] < WEFT_DIM_TOKENS ? info->dim[i] : sizes[info->dim[i]];
    lay_out(t, how);
    if (wrong == 9) t->dtype = (weft_dtype)((int)(next() % 12) - 2);
    if (wrong == 10) t->ndim = (int32_t)odd_number();
    if (info->kind == WEFT_ARG_GRAD)
        ((weft_grad *)(void *)t)->add = wrong == 11 ? (int32_t)next() - 1 : there >> 1 & 1;
    const size_t element = t->dtype >= WEFT_F32 && t->dtype <= WEFT_I64 ? weft_dtype_size(t->dtype) : 0;
    const bool sound = element && t->ndim >= 0 && t->ndim <= WEFT_MAX_DIMS;
    if (wrong == 12) return; /* at NULL */
    if (wrong == 13 && count) {
        const weft_tensor *o = others[next() % (unsigned)count];
        const unsigned shift = next();
        if (o->data && sound && o->dtype == t->dtype && lay_over(t, o, shift)) return;
    }
    if (!sound) {
        t->data = slots + PAGE;
        return;
    }
    const size_t bytes = bytes_of(t);
    t->data = take(bytes, how & 8, element);
    if (!t->data) return;
    if (t->dtype != WEFT_I32 && t->dtype != WEFT_I64)
        fill(t->data, bytes, t->dtype, there >> 2 & 3);
    else if (bytes && t->ndim == 1)
        fill_index(t, info->dim[0] == WEFT_DIM_OFFSETS ? sizes[WEFT_DIM_STEPS] : sizes[WEFT_DIM_CACHE] - 1);
    if (wrong == 14 && element > 1) t->data = (char *)t->data - (how & 8 ? 0 : 1) + (how & 8 ? 1 : 0);
}

/* ---- scalars ----------------------------------------------------------------------------------------------------------- */

static double odd_real(double usual)
{
    static const double odd[] = {0, 1e-6, 1, -1, 1e30, 1e300, (double)__builtin_nanf(""), (double)__builtin_inff()};
    const unsigned which = next();
    return which < 0xc0 ? usual : odd[which % 8];
}

static int32_t odd_int(int32_t usual)
{
    static const int32_t odd[] = {0, 1, 2, 3, 4, -1, INT32_MAX, INT32_MIN};
    const unsigned which = next();
    return which < 0xc0 ? usual : odd[which % 8];
}

static void make_reserved(uint64_t *reserved, unsigned count)
{
    memset(reserved, 0, count * sizeof *reserved);
    if (next() != 0xff) return;
    reserved[next() % count] = 1;
    hopeless = true;
}

static void make_numerics(weft_mhc_numerics *n)
{
    static const int32_t iters[] = {3, 1, 20, 0, -1, 10001, INT32_MAX};
    require(weft_mhc_preset_numerics((weft_mhc_preset)(next() % WEFT_PRESET_COUNT), n) == WEFT_OK, "preset");
    n->rms_eps = odd_real(n->rms_eps);
    n->rms_eps_kind = (weft_eps_kind)odd_int((int32_t)n->rms_eps_kind);
    n->pre_eps = odd_real(n->pre_eps);
    n->post_mult = odd_real(n->post_mult);
    n->sinkhorn = (weft_sinkhorn)odd_int((int32_t)n->sinkhorn);
    n->sinkhorn_eps = odd_real(n->sinkhorn_eps);
    n->sinkhorn_iters = PICK(iters);
    n->apply = (weft_apply)odd_int((int32_t)n->apply);
    make_reserved(n->reserved, 5);
}

static void make_dropout(weft_dropout *d)
{
    const unsigned how = next();
    memset(d, 0, sizeof *d);
    if (how & 1) d->p = odd_real(0.3);
    d->seed = next();
    d->site = next();
    if (how & 2) d->token_base = odd_number();
    d->shared = odd_int(how >> 2 & 1);
    if (how & 8) {
        unsigned char *step = take(sizeof(uint64_t), how & 16, sizeof(uint64_t));
        if (step) memset(step, 0, sizeof(uint64_t));
        d->step = (const uint64_t *)(void *)(step ? step + (how >> 5 == 7) : NULL);
    }
    make_reserved(d->reserved, 6);
}

static void make_gdn(weft_gdn_options *o)
{
    static const int32_t chunks[] = {0, 1, 16, 64, 4096, 4097, -1};
    *o = weft_gdn_defaults();
    o->activation = (weft_gdn_activation)odd_int((int32_t)o->activation);
    o->l2norm = odd_int(o->l2norm);
    o->l2_eps = odd_real(o->l2_eps);
    o->q_scale = odd_real(o->q_scale);
    o->beta_scale = odd_real(o->beta_scale);
    o->head_map = (weft_gdn_head_map)odd_int((int32_t)o->head_map);
    o->rounding = (weft_gdn_rounding)odd_int((int32_t)o->rounding);
    o->g_chunk = PICK(chunks);
    o->g_log2 = odd_int(o->g_log2);
    make_reserved(o->reserved, 6);
}

static void make_scalars(const weft_op_info *op, void *args)
{
    for (const weft_scalar_info *s = op->scalars; s && s->name; s++) {
        char *field = (char *)args + s->offset;
        const double real = s->type == WEFT_SCALAR_REAL ? odd_real(1e-3) : 0;
        const int32_t number = s->type == WEFT_SCALAR_INT ? odd_int(0) : 0;
        switch (s->type) {
        case WEFT_SCALAR_REAL: memcpy(field, &real, sizeof real); break;
        case WEFT_SCALAR_INT: memcpy(field, &number, sizeof number); break;
        case WEFT_SCALAR_NUMERICS: make_numerics((weft_mhc_numerics *)(void *)field); break;
        case WEFT_SCALAR_DROPOUT: make_dropout((weft_dropout *)(void *)field); break;
        case WEFT_SCALAR_GDN: make_gdn((weft_gdn_options *)(void *)field); break;
        }
    }
}

/* ---- structs ----------------------------------------------------------------------------------------------------------- */

/* A struct as it is made, and the bytes of it that a call sees, which end at a guard page: fewer than there are fields, as an older
 * caller has, or more. */
typedef struct block {
    uint64_t fields[512];
    unsigned char *given;
    size_t bytes;
} block;

/* The bytes, with their struct_size: a right one or not. What is behind the fields of a longer one is zero, or not. */
static bool take_block(block *s, size_t size)
{
    const unsigned how = next();
    s->bytes = size;
    if (how >= 0xf8) s->bytes += 8 * (1 + next() % 8);
    if (how >= 0xe8 && how < 0xf0) s->bytes -= 8 * (1 + next() % 4);
    size_t told = s->bytes;
    s->given = take(s->bytes, false, 8);
    require(size <= sizeof s->fields, "a struct of more than 4096 bytes");
    if (!s->given) return false;
    memset(s->fields, 0, size);
    memset(s->given, 0, s->bytes);
    if (s->bytes > size && how == 0xff) s->given[size + next() % (s->bytes - size)] = 1, hopeless = true;
    if (how >= 0xf0 && how < 0xf8) told = (size_t)odd_number();
    /* a size that is believed must be there */
    if (told > s->bytes && told < (size_t)1 << 40) told = 0;
    memcpy(s->fields, &told, sizeof told);
    return true;
}

static void give(const block *s, size_t size)
{
    memcpy(s->given, s->fields, s->bytes < size ? s->bytes : size);
}

static weft_tensor *made[SLOTS];
static const weft_arg_info *info_of[SLOTS];
static const void *struct_of[SLOTS]; /* that they are in */
static int num_made;

static void make_args(const weft_op_info *op, void *args)
{
    make_scalars(op, args);
    for (int32_t i = 0; i < op->num_args && num_made < SLOTS; i++) {
        make_tensor(&op->args[i], args, made, num_made);
        info_of[num_made] = &op->args[i];
        struct_of[num_made] = args;
        made[num_made++] = (weft_tensor *)(void *)((char *)args + op->args[i].offset);
    }
}

/* Layers lie side by side in one buffer; all have the size of the first, or one of them has another. */
static void make_layers(weft_mhc_replay_fwd_args *args)
{
    const weft_op_info *layer = weft_mhc_replay_layer_info();
    const unsigned how = next();
    const int32_t count = 1 + (int32_t)(how & 3);
    const size_t size = layer->args_size;
    unsigned char *layers = take(size * (size_t)count, false, 8);
    args->num_layers = how >= 0xf8 ? odd_int(INT32_MAX) : count;
    if (args->num_layers > count && args->num_layers <= 4096) args->num_layers = count;
    if (!layers || how == 0xf7) return;
    memset(layers, 0, size * (size_t)count);
    args->layers = (const weft_mhc_replay_layer *)(void *)layers;
    for (int32_t l = 0; l < count && l < args->num_layers; l++) {
        const size_t given = next() == 0xff ? next() : size;
        memcpy(layers + (size_t)l * size, &given, sizeof given);
        make_args(layer, layers + (size_t)l * size);
    }
}

static void make_exec(weft_exec *e)
{
    static const weft_isa isas[] = {WEFT_ISA_BEST, WEFT_ISA_BASE, WEFT_ISA_AVX2, WEFT_ISA_AVX512, WEFT_ISA_AMX};
    const unsigned how = next();
    e->backend = how & 1 ? WEFT_BACKEND_REF : WEFT_BACKEND_CPU;
    if (how >= 0xf0) e->backend = (weft_backend)odd_int(WEFT_BACKEND_CUDA);
    e->isa = (weft_isa)odd_int((int32_t)PICK(isas));
    e->device = odd_int(0);
    e->threads = odd_int(1);
    e->precision = (weft_precision)odd_int(0);
    e->trust_pointers = odd_int(0);
}

/* ---- the calls ----------------------------------------------------------------------------------------------------------- */

/* The sentence of an error begins with the name; there is none after success. */
static void said(const weft_op_info *op, weft_status status)
{
    const char *sentence = weft_last_error();
    if (status == WEFT_OK)
        require(sentence[0] == 0, "success with a sentence");
    else
        require(strncmp(sentence, op->name, strlen(op->name)) == 0, "an error whose sentence names no operator");
}

static bool same_place(const weft_tensor *a, const weft_tensor *b)
{
    bool same = a->data == b->data && a->dtype == b->dtype && a->ndim == b->ndim;
    for (int i = 0; same && i < a->ndim; i++)
        same = a->shape[i] == b->shape[i] && (a->shape[i] == 1 || a->stride[i] == b->stride[i]);
    return same;
}

/* No output shares a byte with another tensor, unless it takes its very place and may. */
static void require_apart(int output)
{
    const weft_tensor *t = made[output];
    const char *over = info_of[output]->in_place;
    bool marked = false;
    for (int i = 0; i < num_made; i++) {
        const weft_tensor *o = made[i];
        if (i == output || !o->dtype || !bytes_of(o) || buffer_of(o->data) != buffer_of(t->data)) continue;
        if (!marked) walk(t, MARK);
        marked = true;
        if (walk(o, MEET))
            require(over && struct_of[i] == struct_of[output] && !strcmp(over, info_of[i]->name) &&
                        same_place(t, o),
                    "an output over another argument");
    }
    if (marked) walk(t, UNMARK);
}

/* What a query or a call that succeeded was given: tensors of the table's rank whose elements lie within 2^48 of the first. */
static void require_right(void)
{
    require(!hopeless, "a field that is set and not known");
    for (int i = 0; i < num_made; i++) {
        const weft_tensor *t = made[i];
        const weft_arg_info *info = info_of[i];
        __int128 last = 0;
        bool empty = false;
        require(t->dtype || info->optional, "a tensor that is not there");
        if (!t->dtype) continue;
        require(t->ndim == info->ndim, "a rank that is not the argument's");
        for (int k = 0; k < t->ndim; k++) {
            require(t->shape[k] >= 0 && t->stride[k] >= 0, "a size or a stride below zero");
            empty |= t->shape[k] == 0;
            last += (__int128)(t->shape[k] - 1) * t->stride[k];
        }
        require(empty || last < (__int128)1 << 48, "a tensor of more than 2^48 elements");
    }
}

/* What a call that succeeded was given besides: memory. The outputs are kept as they are now. */
static void require_memory(void)
{
    for (int i = 0; i < num_made; i++) {
        const weft_tensor *t = made[i];
        const size_t bytes = t->dtype ? bytes_of(t) : 0;
        if (bytes == 0) continue;
        require(bytes <= ROOM && t->data, "a tensor without memory");
        require((uintptr_t)t->data % weft_dtype_size(t->dtype) == 0, "an address that is not aligned");
        if (info_of[i]->kind == WEFT_ARG_IN) continue;
        require_apart(i);
        walk(t, KEEP);
    }
}

/* Sizes that would take long to go through: elements that a stride of zero puts into one place, sequences without a step. */
static bool is_large(void)
{
    for (int i = 0; i < num_made; i++) {
        double elements = 1;
        for (int k = 0; made[i]->dtype && k < made[i]->ndim && k < WEFT_MAX_DIMS; k++)
            elements *= made[i]->shape[k] > 1 ? (double)made[i]->shape[k] : 1;
        if (elements > ROOM) return true;
    }
    return false;
}

/* What has run: an operator's kernels by instruction set (or the reference) and dtype, and by streams. The fuzzer keeps an input for
 * each. */
enum { OPS = 64, ISAS = 5, DTYPES = 4, STREAMS = 8 };
__attribute__((section("__libfuzzer_extra_counters"))) static struct {
    uint8_t kernel[OPS][ISAS + 1][DTYPES], streams[OPS][STREAMS];
} ran;

UNTRACED static void count_run(const weft_op_info *op, const weft_exec *exec)
{
    const unsigned way = exec->backend == WEFT_BACKEND_REF ? ISAS : (unsigned)exec->isa % ISAS;
    int32_t number = 0;
    while (weft_op_at(number) != op) number++;
    require(number < OPS, "more operators than OPS");
    ran.kernel[number][way][(unsigned)act % DTYPES] = 1;
    ran.streams[number][(unsigned)sizes[WEFT_DIM_STREAMS] % STREAMS] = 1;
}

/* An error, whose sentence the next call must not leave there. */
static void fail(const weft_op_info *op, const weft_exec *exec, const void *args)
{
    const weft_status status = weft_op_workspace(op, exec, args, NULL);
    require(status != WEFT_OK, "a query without a place for its result");
    said(op, status);
}

static void call(const weft_op_info *op, block *exec_block, const void *args)
{
    weft_exec *fields = (weft_exec *)(void *)exec_block->fields;
    const weft_exec *exec = (const weft_exec *)(const void *)exec_block->given;
    const char *path = NULL;
    size_t need = 0;
    const unsigned room = next();
    remember_all();
    fail(op, exec, args);
    const weft_status asked = weft_op_workspace(op, exec, args, &need);
    said(op, asked);
    fail(op, exec, args);
    said(op, weft_op_path(op, exec, args, &path));
    fail(op, exec, args);
    compare("a query that writes");
    if (asked == WEFT_OK) require_right();
    if (asked == WEFT_OK && is_large()) return;
    if (asked != WEFT_OK) need = 256;
    unsigned char *workspace = take(need, room & 1, 1);
    const bool lacks = need && (!workspace || (room & 6) == 6);
    fields->workspace = workspace;
    fields->workspace_bytes = workspace ? need - ((room & 6) == 6 && need) : 0;
    if (workspace) buffers[used - 1].bytes = 0; /* its contents are undefined behind the call */
    const weft_tensor *under = room >= 0xf0 && num_made ? made[next() % (unsigned)num_made] : NULL;
    if (under && under->dtype && bytes_of(under)) fields->workspace = under->data;
    give(exec_block, sizeof *fields);
    remember(&buffers[0]); /* exec */
    const weft_status status = weft_op_call(op, exec, args);
    said(op, status);
    if (status == WEFT_OK) require_right();
    if (status == WEFT_OK) require_memory();
    if (status == WEFT_OK) count_run(op, fields);
    compare(status == WEFT_OK ? "a write beside the outputs" : "an error that writes");
    if (status == WEFT_OK) require(asked == WEFT_OK, "a call that runs where its query fails");
    if (status == WEFT_OK && need)
        require(fields->workspace == workspace && !lacks,
                "a workspace that is too small, or an argument's, and is taken");
    if (status == WEFT_ERR_WORKSPACE && room < 0xf0)
        require(lacks, "a workspace of the size asked for and rejected");
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static block exec, args;
    open_slots();
    at = data, end = data + size;
    used = num_made = 0;
    hopeless = false;
    const weft_op_info *op = weft_op_at((int32_t)(next() % (unsigned)weft_op_count()));
    seed = next();
    take_sizes();
    if (!take_block(&exec, sizeof(weft_exec)) || !take_block(&args, op->args_size)) return 0;
    make_exec((weft_exec *)(void *)exec.fields);
    make_args(op, args.fields);
    if (!strcmp(op->name, "mhc_replay_fwd")) make_layers((weft_mhc_replay_fwd_args *)(void *)args.fields);
    give(&exec, sizeof(weft_exec));
    give(&args, op->args_size);
    call(op, &exec, args.given);
    return 0;
}
