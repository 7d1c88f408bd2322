/* SPDX-License-Identifier: Apache-2.0
 *
 * Any bytes may be called a checkpoint. What `weft train --resume` and `weft sample` do with its two files is done here with bytes
 * in memory. A part is refused with a sentence, or: its tensors lie inside the bytes, its checksum is right where its format has
 * one, its options print and read back as the same model, and its tensors fill their places in the arrays and nothing else. The
 * source is included for the steps of loading that take bytes.
 *
 * Input: a byte of switches, then a script of edits of a checkpoint that the program has written: kind, number of the token in
 * its header (2 bytes), count, so many bytes. The checksum is made right afterwards, so what lies behind it is reached. */
#include "train/checkpoint.c"

#include "common/checksum.h"

enum { EDIT_OPTIMIZER = 1, KEEP_CHECKSUM = 2, KEEP_LENGTH = 4, RAW = 8, WITHOUT_TEXT = 16, ALL_GIVEN = 32 };
enum { REPLACE, INSERT, COPY, DATA, CUT, APPEND, EDITS };
enum { TOKENS = 1024, ROOM = 1 << 17, STEP = 7 };

int LLVMFuzzerInitialize(int *argc, char ***argv);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

typedef struct piece {
    const uint8_t *bytes;
    size_t size;
} piece;

/* A file as it was written, and its header as tokens: the text of a string, or a number. */
typedef struct original {
    uint8_t *bytes;
    size_t size, header; /* header: where the data begins */
    size_t begin[TOKENS], end[TOKENS], tokens;
} original;

static original originals[CHECKPOINT_PARTS];
static train_options run; /* that they are of */
static corpus text = {.fingerprint = 0x0123456789abcdefu};
static trainer whole = {.text = &text, .step = STEP}; /* that wrote them */
static checkpoint_file written;                       /* the model's part, as it was read */

static void open_trainer(trainer *t);

static void require(int truth)
{
    if (!truth) abort();
}

/* ---- the checkpoint that is edited --------------------------------------------------------------------------------------- */

static void find_tokens(original *o)
{
    o->header = 8;
    for (int i = 0; i < 8; i++) o->header += (size_t)o->bytes[i] << 8 * i;
    for (size_t at = 8; at < o->header && o->tokens < TOKENS; at++) {
        const char *rest = (const char *)o->bytes + at;
        int is_string = *rest == '"';
        size_t length = is_string ? strcspn(rest + 1, "\"") : strspn(rest, "0123456789");
        if (!is_string && !length) continue;
        at += (size_t)is_string;
        o->begin[o->tokens] = at;
        o->end[o->tokens++] = at += length;
    }
    require(o->tokens < TOKENS);
}

/* The model with the fewest tensors: what is tested is the same for all. */
static void write_checkpoint(const char *folder)
{
    char error[512], path[FILES_PATH];
    option table[MAX_TRAIN_OPTIONS];
    train_options_open(&run, table);
    run.residual = WEFT_RESIDUAL_PLAIN;
    run.layers = run.heads = run.hidden = run.context = 1;
    run.channels = 2;
    run.data = "50% of \xff.txt";
    require(train_options_model(&run, &whole.config, error, sizeof error));
    open_trainer(&whole);
    float *values = calloc((size_t)whole.elements, sizeof *values);
    require(values != NULL);
    require(write_files(&whole, &(arrays){values, values, values}, table, folder, (reason){error, sizeof error}));
    for (int part = 0; part < CHECKPOINT_PARTS; part++) {
        original *o = &originals[part];
        require(files_join(path, folder, checkpoint_file_name((checkpoint_part)part)));
        o->bytes = (uint8_t *)files_read(path, ROOM / 2, &o->size, error, sizeof error);
        require(o->bytes != NULL);
        find_tokens(o);
    }
    free(values);
}

/* ---- edits ------------------------------------------------------------------------------------------------------------------ */

static size_t put(uint8_t *to, size_t used, const void *from, size_t bytes)
{
    if (bytes > ROOM - used) bytes = ROOM - used;
    memcpy(to + used, from, bytes);
    return used + bytes;
}

static void make_checksum(uint8_t *bytes, size_t size)
{
    const size_t at = SAFETENSORS_CHECKSUM_AT, digits = SAFETENSORS_CHECKSUM_DIGITS;
    char sum[16];
    if (size < at + digits || memcmp(bytes + 8, SAFETENSORS_CHECKSUM, at - 8) != 0) return;
    memset(bytes + at, '0', digits);
    snprintf(sum, sizeof sum, "%08x", (unsigned)checksum_crc32c(0, bytes, size));
    memcpy(bytes + at, sum, digits);
}

/* Edits of the data, by the number of a float. */
static void edit_data(const uint8_t *script, size_t left, uint8_t *data, size_t bytes)
{
    for (const uint8_t *s = script; left >= 4;) {
        size_t count = s[3] < left - 4 ? s[3] : left - 4, begin = (s[1] | (size_t)s[2] << 8) * sizeof(float);
        if (s[0] % EDITS == DATA && begin < bytes)
            memcpy(data + begin, s + 4, count < bytes - begin ? count : bytes - begin);
        s += 4 + count, left -= 4 + count;
    }
}

/* The original with the script's edits, in `to`; returns its size. */
static size_t edit(const original *o, const uint8_t *script, size_t script_bytes, unsigned switches, uint8_t *to)
{
    static piece instead[TOKENS], before[TOKENS];
    piece behind = {0};
    size_t used = 0, at = 0, cut = 0, left = script_bytes;
    memset(instead, 0, o->tokens * sizeof *instead);
    memset(before, 0, o->tokens * sizeof *before);
    for (const uint8_t *s = script; left >= 4;) {
        size_t number = s[1] | (size_t)s[2] << 8, token = number % o->tokens, count = s[3];
        if (count > left - 4) count = left - 4;
        piece p = {s + 4, count};
        switch (s[0] % EDITS) {
        case REPLACE: instead[token] = p; break;
        case INSERT: before[token] = p; break;
        case COPY:
            if (count) {
                size_t from = (p.bytes[0] | (size_t)(count > 1 ? p.bytes[1] : 0) << 8) % o->tokens;
                instead[token] = (piece){o->bytes + o->begin[from], o->end[from] - o->begin[from]};
            }
            break;
        case DATA: break; /* when the data is in its place */
        case CUT: cut = number; break;
        case APPEND: behind = p; break;
        }
        s += 4 + count, left -= 4 + count;
    }
    for (size_t i = 0; i < o->tokens; i++) {
        used = put(to, used, o->bytes + at, o->begin[i] - at);
        used = put(to, used, before[i].bytes ? before[i].bytes : o->bytes, before[i].size);
        used = instead[i].bytes ? put(to, used, instead[i].bytes, instead[i].size)
                                : put(to, used, o->bytes + o->begin[i], o->end[i] - o->begin[i]);
        at = o->end[i];
    }
    used = put(to, used, o->bytes + at, o->header - at);
    for (int i = 0; i < 8 && !(switches & KEEP_LENGTH); i++) to[i] = (uint8_t)((used - 8) >> 8 * i);
    size_t data = used;
    used = put(to, used, o->bytes + o->header, o->size - o->header);
    edit_data(script, script_bytes, to + data, used - data);
    used = put(to, used, behind.bytes ? behind.bytes : o->bytes, behind.size);
    return cut < used ? used - cut : 0;
}

/* ---- what loading must keep to ------------------------------------------------------------------------------------------------ */

static int parse(checkpoint_file *c, checkpoint_part part, piece from, unsigned switches)
{
    char error[256] = "";
    if (!checkpoint_file_parse(c, part, from.bytes, from.size, error, sizeof error)) {
        require(error[0] != 0);
        return 0;
    }
    require(error[0] == 0 && c->step >= 0 && c->format >= 1 && c->format <= CHECKPOINT_FORMAT);
    for (size_t i = 0; i < c->file.num_tensors; i++) {
        const safetensors_tensor *t = &c->file.tensors[i];
        size_t begin = (size_t)((const uint8_t *)t->data - from.bytes);
        require(begin <= from.size && t->bytes <= from.size - begin);
    }
    if (c->format > 1 && switches & KEEP_CHECKSUM) { /* damage is noticed: the sum by another way */
        const size_t at = SAFETENSORS_CHECKSUM_AT, digits = SAFETENSORS_CHECKSUM_DIGITS;
        uint32_t sum = checksum_crc32c_portable(0, from.bytes, at);
        sum = checksum_crc32c_portable(sum, "00000000", digits);
        sum = checksum_crc32c_portable(sum, from.bytes + at + digits, from.size - at - digits);
        char right[16];
        snprintf(right, sizeof right, "%08x", (unsigned)sum);
        require(!memcmp(right, from.bytes + at, digits));
    }
    return 1;
}

/* The options as they would be saved again describe the same model. */
static void check_options(const train_options *o, const option *table, const weft_model_config *config)
{
    static char *texts[MAX_TRAIN_OPTIONS];
    train_options again;
    option other[MAX_TRAIN_OPTIONS];
    weft_model_config same = {0};
    char error[256] = "";
    train_options_open(&again, other);
    for (int i = 0; table[i].name; i++) {
        texts[i] = options_print(&table[i]);
        char *copy = texts[i] ? strdup(texts[i]) : NULL;
        require(copy && options_restore(&other[i], texts[i]));
        char *twice = options_print(&other[i]);
        require(twice && !strcmp(copy, twice));
        free(copy);
        free(twice);
    }
    require(again.steps == o->steps && again.seed == o->seed);
    require(train_options_model(&again, &same, error, sizeof error));
    require(!memcmp(&same, config, sizeof same));
    for (int i = 0; table[i].name; i++) free(texts[i]);
}

enum { UNTOUCHED = 0x5a }; /* four of them are a finite number */

static float *array_of(int64_t elements)
{
    float *array = malloc((size_t)elements * sizeof *array);
    require(array != NULL);
    memset(array, UNTOUCHED, (size_t)elements * sizeof *array);
    return array;
}

/* All of the parameters and nothing between them. */
static void check_array(const trainer *t, const float *array)
{
    int64_t end = 0;
    for (int32_t i = 0; i <= t->tensors; i++) {
        int64_t begin = i < t->tensors ? t->params[i].offset : t->elements;
        for (const uint8_t *b = (const uint8_t *)(array + end); b < (const uint8_t *)(array + begin); b++)
            require(*b == UNTOUCHED);
        if (i == t->tensors) break;
        end = begin + t->params[i].count;
        for (int64_t k = begin; k < end; k++) require(isfinite(array[k]));
    }
}

/* Which tensors a model has, and where: what trainer_open asks for. */
static void open_trainer(trainer *t)
{
    require(weft_model_param_count(&t->config, &t->tensors, &t->elements) == WEFT_OK);
    t->params = calloc((size_t)t->tensors, sizeof *t->params);
    require(t->params != NULL);
    for (int32_t i = 0; i < t->tensors; i++) require(weft_model_param_at(&t->config, i, &t->params[i]) == WEFT_OK);
}

/* The file's tensors are the model's, in all that says what their numbers mean. */
static void check_shapes(const trainer *t, const checkpoint_file *c, const char *prefix)
{
    char name[128];
    for (int32_t i = 0; i < t->tensors; i++) {
        const weft_model_param *p = &t->params[i];
        snprintf(name, sizeof name, "%s%s", prefix, p->name);
        const safetensors_tensor *found = safetensors_find(&c->file, name);
        require(found && found->dtype == SAFETENSORS_F32 && found->ndim == p->ndim && found->count == p->count);
        for (int32_t d = 0; d < p->ndim; d++) require(found->shape[d] == p->shape[d]);
    }
}

static int load_parameters(trainer *t, const checkpoint_file *model, size_t bytes)
{
    enum { BETWEEN = 256 }; /* at most so many bytes lie between tensors */
    char error[256] = "";
    open_trainer(t);
    require((size_t)t->elements * sizeof(float) <= bytes + (size_t)t->tensors * BETWEEN);
    float *parameters = array_of(t->elements);
    int ok = load_part(t, model, (float *const[]){parameters, NULL}, (reason){error, sizeof error});
    require(ok ? error[0] == 0 : error[0] != 0);
    if (ok) check_array(t, parameters);
    if (ok) check_shapes(t, model, "");
    free(parameters);
    free(t->params);
    return ok;
}

/* The model's part, in the order of `weft train --resume` and `weft sample`; 1 where it could be loaded. */
static int load_model(piece from, unsigned switches)
{
    char error[256] = "", *texts = NULL;
    unsigned char given[MAX_TRAIN_OPTIONS];
    checkpoint_file model;
    option table[MAX_TRAIN_OPTIONS];
    train_options o;
    trainer t = {.text = switches & WITHOUT_TEXT ? NULL : &text};
    int ok = parse(&model, CHECKPOINT_MODEL, from, switches);
    train_options_open(&o, table);
    memset(given, switches & ALL_GIVEN ? 1 : 0, sizeof given);
    if (switches & ALL_GIVEN) o = run;
    if (ok) {
        ok = checkpoint_file_options(&model, table, given, &texts, error, sizeof error) &&
             train_options_model(&o, &t.config, error, sizeof error);
        if (ok) check_options(&o, table, &t.config);
        ok = ok && checkpoint_file_fits(&model, &t.config, error, sizeof error);
        require(ok ? error[0] == 0 : error[0] != 0);
    }
    ok = ok && load_parameters(&t, &model, from.size);
    free(texts);
    checkpoint_file_close(&model);
    checkpoint_file_close(&model);
    return ok;
}

/* The optimiser's part, beside the model as it was written. */
static int load_moments(piece from, unsigned switches)
{
    char error[256] = "";
    checkpoint_file optimizer;
    int ok = parse(&optimizer, CHECKPOINT_OPTIMIZER, from, switches);
    if (ok) {
        arrays a = {NULL, array_of(whole.elements), array_of(whole.elements)};
        ok = take_optimizer(&whole, &a, &written, &optimizer, (reason){error, sizeof error});
        require(ok ? error[0] == 0 : error[0] != 0);
        if (ok) {
            require(optimizer.step == STEP && optimizer.format == CHECKPOINT_FORMAT);
            check_array(&whole, a.first);
            check_array(&whole, a.second);
            check_shapes(&whole, &optimizer, "first.");
            check_shapes(&whole, &optimizer, "second.");
        }
        free(a.first);
        free(a.second);
    }
    checkpoint_file_close(&optimizer);
    checkpoint_file_close(&optimizer);
    return ok;
}

int LLVMFuzzerInitialize(int *argc, char ***argv)
{
    char folder[] = "/tmp/fuzz_checkpoint.XXXXXX", error[256];
    const original *model = &originals[CHECKPOINT_MODEL], *optimizer = &originals[CHECKPOINT_OPTIMIZER];
    (void)argc, (void)argv;
    require(mkdtemp(folder) != NULL);
    write_checkpoint(folder);
    discard(folder);
    require(checkpoint_file_parse(&written, CHECKPOINT_MODEL, model->bytes, model->size, error, sizeof error));
    /* As it was written it can be loaded: edits begin behind all checks. */
    const piece first = {model->bytes, model->size}, second = {optimizer->bytes, optimizer->size};
    require(load_model(first, KEEP_CHECKSUM) && load_model(first, WITHOUT_TEXT) && load_model(first, ALL_GIVEN));
    require(load_moments(second, KEEP_CHECKSUM));
    return 0;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static uint8_t room[ROOM];
    if (!size) return 0;
    unsigned switches = data[0];
    const original *o = &originals[switches & EDIT_OPTIMIZER ? CHECKPOINT_OPTIMIZER : CHECKPOINT_MODEL];
    size_t used = switches & RAW ? put(room, 0, data + 1, size - 1) : edit(o, data + 1, size - 1, switches, room);
    if (!(switches & KEEP_CHECKSUM)) make_checksum(room, used);
    /* In memory of exactly its size, so that a read behind it is seen. */
    uint8_t *exact = malloc(used ? used : 1);
    if (!exact) return 0;
    memcpy(exact, room, used);
    if (switches & EDIT_OPTIMIZER)
        (void)load_moments((piece){exact, used}, switches);
    else
        (void)load_model((piece){exact, used}, switches);
    free(exact);
    return 0;
}
