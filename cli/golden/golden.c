/* SPDX-License-Identifier: Apache-2.0
 *
 * The folder of golden files, the access to their tensors and the report. What a convention's tensors mean is in
 * golden_mhc.c and golden_gdn.c. */
#include "golden/golden.h"

#include <dirent.h>
#include <errno.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "check/element.h"
#include "commands.h"
#include "common/files.h"
#include "golden/golden_file.h"

static const struct convention {
    const char *prefix;
    void (*run)(golden_file *file);
    const char *op; /* stands for all that it calls: does the backend have it? */
} conventions[] = {
    {"mhc_te", golden_te, "mhc_pre_fwd"},
    {"mhc_megatron", golden_megatron, "mhc_pre_fwd"},
    {"mhc_deepseek", golden_deepseek, "mhc_pre_fwd"},
    {"gdn", golden_gdn, "gdn_pre_fwd"},
};

enum { UNKNOWN = 0, INPUT, COMPARED }; /* what a tensor was used for */

/* ---- tensors of a case --------------------------------------------------------------------------------------- */

int golden_fail(golden_file *file, const char *format, ...)
{
    va_list list;
    if (file->problem[0]) return 0;
    va_start(list, format);
    vsnprintf(file->problem, sizeof file->problem, format, list);
    va_end(list);
    return 0;
}

static const safetensors_tensor *find(const golden_file *file, const char *name)
{
    char full[200];
    snprintf(full, sizeof full, "%s.%s", file->prefix, name);
    return safetensors_find(&file->tensors, full);
}

static unsigned char *use_of(const golden_file *file, const safetensors_tensor *t)
{
    return &file->use[t - file->tensors.tensors];
}

int golden_has(const golden_file *file, const char *name)
{
    return find(file, name) != NULL;
}

static weft_dtype dtype_of(const safetensors_tensor *t)
{
    switch (t->dtype) {
    case SAFETENSORS_F32: return WEFT_F32;
    case SAFETENSORS_F64: return WEFT_F64;
    case SAFETENSORS_BF16: return WEFT_BF16;
    case SAFETENSORS_F16: return WEFT_F16;
    case SAFETENSORS_I32: return WEFT_I32;
    case SAFETENSORS_I64: return WEFT_I64;
    default: return WEFT_NONE;
    }
}

/* Memory that lives as long as the file's comparison. */
void *golden_memory(golden_file *file, int64_t count, weft_dtype dtype)
{
    size_t size = weft_dtype_size(dtype);
    void **memory = count >= 0 && (uint64_t)count < SIZE_MAX / 16 / (size ? size : 1)
                        ? malloc(sizeof(void *) * 2 + ((size_t)count + 1) * size)
                        : NULL;
    if (!memory) {
        fprintf(stderr, "weft: out of memory\n");
        exit(EXIT_UNUSABLE);
    }
    memory[0] = file->memory;
    file->memory = memory;
    /* All bits set is NaN in every dtype: what an operator does not write cannot pass. */
    memset(memory + 2, 0xff, ((size_t)count + 1) * size);
    return memory + 2;
}

/* A tensor of the case as an array of double, or NULL. count < 0: any number of elements. */
static double *values(golden_file *file, const char *name, int64_t count, weft_dtype *dtype)
{
    const safetensors_tensor *t = find(file, name);
    weft_dtype type = t ? dtype_of(t) : WEFT_NONE;
    if (!t)
        golden_fail(file, "tensor '%s.%s' is missing", file->prefix, name);
    else if (type == WEFT_NONE)
        golden_fail(file, "tensor '%s' has dtype %s, expected a floating-point type, i32 or i64", t->name,
                    safetensors_dtype_name(t->dtype));
    else if (count >= 0 && t->count != count)
        golden_fail(file, "tensor '%s' has %lld elements, expected %lld", t->name, (long long)t->count,
                    (long long)count);
    if (file->problem[0]) return NULL;
    double *array = golden_memory(file, t->count, WEFT_F64);
    /* The file does not promise alignment, so elements are copied out one by one. */
    for (int64_t i = 0; i < t->count; i++) {
        uint64_t element;
        memcpy(&element, (const char *)t->data + (size_t)i * weft_dtype_size(type), weft_dtype_size(type));
        array[i] = element_load(&element, type, 0);
    }
    if (dtype) *dtype = type;
    return array;
}

int64_t golden_size(golden_file *file, const char *name, int ndim, int dim)
{
    const safetensors_tensor *t = find(file, name);
    if (!t) return golden_fail(file, "tensor '%s.%s' is missing", file->prefix, name);
    if (t->ndim != ndim)
        return golden_fail(file, "tensor '%s' has %d dimensions, expected %d", t->name, t->ndim, ndim);
    for (int d = 0; d < ndim; d++)
        if (t->shape[d] < 1) return golden_fail(file, "tensor '%s' has no elements", t->name);
    return t->shape[dim];
}

void *golden_input(golden_file *file, const char *name, int64_t count, weft_dtype dtype)
{
    double *array = values(file, name, count, NULL);
    if (!array) return NULL;
    for (int64_t i = 0; dtype == WEFT_I32 && i < count; i++)
        if (!(array[i] >= INT32_MIN && array[i] <= INT32_MAX && floor(array[i]) == array[i])) {
            golden_fail(file, "tensor '%s.%s' holds %g, expected whole numbers of 32 bits", file->prefix, name,
                        array[i]);
            return NULL;
        }
    void *data = golden_memory(file, count, dtype);
    for (int64_t i = 0; i < count; i++) element_store(data, dtype, i, array[i]);
    const safetensors_tensor *t = find(file, name);
    *use_of(file, t) = INPUT;
    return data;
}

void golden_compare(golden_file *file, const char *name, const weft_tensor *got, golden_tolerance tolerance)
{
    weft_dtype stored;
    int64_t count = tensor_count(got);
    if (file->problem[0] || !find(file, name)) return;
    const double *want = values(file, name, count, &stored);
    if (!want) return;
    double largest = 0, *bound = golden_memory(file, count, WEFT_F64);
    for (int64_t i = 0; i < count; i++) largest = fmax(largest, fabs(want[i]));
    for (int64_t i = 0; i < count; i++)
        bound[i] = tolerance.of_largest * largest + tolerance.ulps * element_ulp(stored, want[i]);
    weft_tensor in_memory = weft_dense1(got->data, got->dtype, count);
    comparison c = compare(&in_memory, want, bound);
    const safetensors_tensor *t = find(file, name);
    comparison *all = &file->result[t - file->tensors.tensors];
    if (*use_of(file, t) != COMPARED) all->index = -1;
    *use_of(file, t) = COMPARED;
    compare_merge(all, &c);
}

void golden_call(golden_file *file, const char *op, const void *args)
{
    if (file->problem[0]) return;
    const char *wrong = run_call(file->exec, weft_op_find(op), args);
    if (wrong) golden_fail(file, "%s: %s", file->prefix, wrong);
}

/* ---- cases --------------------------------------------------------------------------------------------------- */

/* "n,iters = 4,20 2,5 3,20": the second number of the pair that belongs to this case, or 0. */
static int32_t iterations(const golden_file *file, int64_t number)
{
    const char *text = safetensors_metadata(&file->tensors, "cases");
    const char *at = text ? strchr(text, '=') : NULL;
    char *end;
    if (!at) return 0;
    at++;
    for (int64_t i = 0;; i++, at = end) {
        (void)strtoll(at, &end, 10);
        if (end == at || *end != ',') return 0;
        at = end + 1;
        long long iters = strtoll(at, &end, 10);
        if (end == at) return 0;
        if (i == number) return iters > 0 && iters <= 100000 ? (int32_t)iters : 0;
    }
}

/* Tensor names are "<case>.<name>". Runs the convention once for each case, in the order of the names. */
static void run_cases(golden_file *file, const struct convention *convention)
{
    const safetensors *s = &file->tensors;
    for (size_t i = 0; i < s->num_tensors && !file->problem[0]; i++) {
        const char *name = s->tensors[i].name, *dot = strchr(name, '.');
        size_t length = dot ? (size_t)(dot - name) : 0;
        if (!length || length >= sizeof file->prefix) continue;
        if (!strncmp(name, file->prefix, length) && !file->prefix[length]) continue;
        memcpy(file->prefix, name, length);
        file->prefix[length] = 0;
        size_t digits = strcspn(file->prefix, "0123456789");
        file->iters = iterations(file, strtoll(file->prefix + digits, NULL, 10));
        convention->run(file);
    }
    if (!file->prefix[0]) golden_fail(file, "no tensor is called <case>.<name>");
}

static void report(const golden_file *file, const char *base, golden_counts *counts)
{
    for (size_t i = 0; i < file->tensors.num_tensors; i++) {
        const char *name = file->tensors.tensors[i].name;
        const comparison *c = &file->result[i];
        const char *backend = weft_backend_name(file->exec->backend);
        if (file->use[i] == COMPARED) {
            printf("%-4s %s %-22s error %9.3e  bound %9.3e  %s\n", backend, base, name, c->error, c->bound,
                   c->failed ? "FAIL" : "ok");
            *(c->failed ? &counts->failed : &counts->passed) += 1;
        } else if (file->use[i] == UNKNOWN) {
            printf("%-4s %s %-22s neither an input nor compared: this convention does not know it\n", backend, base,
                   name);
            counts->not_compared++;
        }
    }
}

/* All cases of a file that has been parsed. */
static void run_file(golden_file *file, const struct convention *convention)
{
    size_t count = file->tensors.num_tensors;
    file->use = calloc(count + 1, 1);
    file->result = calloc(count + 1, sizeof *file->result);
    if (!file->use || !file->result)
        golden_fail(file, "out of memory");
    else
        run_cases(file, convention);
}

static void close_file(golden_file *file)
{
    while (file->memory) {
        void **next = *(void **)file->memory;
        free(file->memory);
        file->memory = next;
    }
    free(file->use);
    free(file->result);
    safetensors_close(&file->tensors);
}

static int check_file(const char *folder, const char *base, const weft_exec *exec, golden_counts *counts)
{
    char path[FILES_PATH];
    const struct convention *convention = NULL;
    int code = EXIT_PASSED;
    golden_file *file = calloc(1, sizeof *file);
    if (!file) return EXIT_UNUSABLE;
    file->exec = exec;
    for (size_t i = 0; i < sizeof conventions / sizeof conventions[0]; i++)
        if (!strncmp(base, conventions[i].prefix, strlen(conventions[i].prefix))) convention = &conventions[i];

    if (!files_join(path, folder, base)) {
        golden_fail(file, "too long a path");
    } else if (!safetensors_open(&file->tensors, path)) {
        golden_fail(file, "%s", file->tensors.error);
    } else if (!convention) {
        printf("%s: skipped, no convention begins with that name\n", base);
    } else if (!weft_op_has(weft_op_find(convention->op), exec->backend)) {
        printf("%-4s %s: skipped, the backend has no kernels for these operators yet\n",
               weft_backend_name(exec->backend), base);
    } else {
        run_file(file, convention);
        if (!file->problem[0]) report(file, base, counts);
    }
    if (file->problem[0]) {
        fflush(stdout);
        fprintf(stderr, "weft check: %s: %s\n", path, file->problem);
        code = EXIT_UNUSABLE;
    }
    close_file(file);
    free(file);
    return code;
}

static int is_golden(const char *name)
{
    static const char suffix[] = ".safetensors";
    size_t length = strlen(name), tail = sizeof suffix - 1;
    return length > tail && !strcmp(name + length - tail, suffix);
}

static int by_name(const void *a, const void *b)
{
    return strcmp(*(char *const *)a, *(char *const *)b);
}

int golden_check(const char *folder, const weft_exec *exec, golden_counts *counts)
{
    char **names = NULL;
    size_t count = 0;
    int code = EXIT_PASSED;
    DIR *dir = opendir(folder);
    if (!dir) {
        fprintf(stderr, "weft check: %s: %s\n", folder, strerror(errno));
        return EXIT_UNUSABLE;
    }
    for (struct dirent *entry; (entry = readdir(dir));) {
        if (!is_golden(entry->d_name)) continue;
        char **more = realloc(names, (count + 1) * sizeof *names), *copy = strdup(entry->d_name);
        if (more) names = more;
        if (!more || !copy) {
            fprintf(stderr, "weft: out of memory\n");
            exit(EXIT_UNUSABLE);
        }
        names[count++] = copy;
    }
    closedir(dir);
    if (!count) {
        fprintf(stderr, "weft check: %s: no file named *.safetensors\n", folder);
        return EXIT_UNUSABLE;
    }
    qsort(names, count, sizeof *names, by_name);
    for (size_t i = 0; i < count; i++) {
        int one = check_file(folder, names[i], exec, counts);
        if (one > code) code = one;
        free(names[i]);
    }
    free(names);
    return code;
}
