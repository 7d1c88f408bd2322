/* SPDX-License-Identifier: Apache-2.0
 *
 * The tests cover the library: every operator that a public header declares is in the list, and every operator in
 * the list has its expectation, its finite differences, its backend comparison and its bad input. A new operator
 * without them fails here, by name. */
#include "check/expect.h"
#include "support/suite.h"

#include "core/kernel.h"

static const char *const listed[] = {
#define WEFT_OP(name) #name,
#include "core/ops.def"
#undef WEFT_OP
};

/* A file of the source tree. NULL where there is none. */
static char *source(const char *path)
{
    char full[1024];
    snprintf(full, sizeof full, "%s/%s", WEFT_SOURCE_DIR, path);
    FILE *file = fopen(full, "rb");
    if (!file) return NULL;
    char *text = calloc(1, 1 << 20);
    size_t length = text ? fread(text, 1, (1 << 20) - 1, file) : 0;
    fclose(file);
    if (length == 0) {
        free(text);
        return NULL;
    }
    return text;
}

/* A machine that only runs the tests has no sources. */
static void need_sources(void)
{
    char *text = source("src/core/ops.def");
    if (!text) {
        fprintf(stderr, "  skipped: there are no sources in %s\n", WEFT_SOURCE_DIR);
        skip();
    }
    free(text);
}

static void the_list_is_complete(void **state)
{
    (void)state;
    assert_int_equal(weft_op_count(), WEFT_OP_COUNT);
    for (int32_t i = 0; i < weft_op_count(); i++) assert_string_equal(weft_op_at(i)->name, listed[i]);
}

/* Every weft_<op>(exec, args) of the public headers is an operator of the list, and the other way round. */
static void headers_and_list_agree(void **state)
{
    (void)state;
    static const char *const headers[] = {"include/weft/mhc.h", "include/weft/norm.h", "include/weft/gdn.h"};
    bool seen[WEFT_OP_COUNT] = {false};
    need_sources();
    for (int h = 0; h < 3; h++) {
        char *text = source(headers[h]);
        if (!text) fail_msg("there is no %s", headers[h]);
        static const char start[] = "WEFT_API weft_status weft_";
        for (const char *at = strstr(text, start); at; at = strstr(at + 1, start)) {
            const char *name = at + sizeof start - 1, *end = strchr(name, '(');
            if (strncmp(end, "(const weft_exec *exec, const", 29) != 0) continue; /* no operator */
            char op[64];
            snprintf(op, sizeof op, "%.*s", (int)(end - name), name);
            char *suffix = strstr(op, "_workspace");
            if (suffix) *suffix = '\0';
            int found = -1;
            for (int i = 0; i < WEFT_OP_COUNT; i++)
                if (strcmp(listed[i], op) == 0) found = i;
            if (found < 0)
                test_failed("%s declares weft_%s, which is not in core/ops.def", headers[h], op);
            else
                seen[found] = true;
        }
        free(text);
    }
    for (int i = 0; i < WEFT_OP_COUNT; i++)
        if (!seen[i]) test_failed("no public header declares weft_%s", listed[i]);
    test_verdict();
}

/* Without one, neither `weft check` nor a test would compare anything. */
static void every_operator_has_its_expectation(void **state)
{
    (void)state;
    for (int32_t i = 0; i < weft_op_count(); i++) {
        const char *op = weft_op_at(i)->name;
        if (!expect_is_known(op)) test_failed("%s: check/expect.c has no bounds for it", op);
        if (expect_is_known(op) && expect_is_single(op) == chain_knows(op))
            test_failed("%s: check/expect.c and support/chain.c disagree whether it is made of others", op);
    }
    test_verdict();
}

/* tests/<family>/test_<stem>.c; NULL where the operator has the tests of tests/operator.c and no others. */
static char *test_of(const char *stem)
{
    static const char *const families[] = {"mhc", "gdn", "core"};
    char path[96];
    for (int f = 0; f < 3; f++) {
        snprintf(path, sizeof path, "tests/%s/test_%s.c", families[f], stem);
        char *text = source(path);
        if (text) return text;
    }
    return NULL;
}

static void every_operator_has_its_tests(void **state)
{
    (void)state;
    need_sources();
    for (int32_t i = 0; i < weft_op_count(); i++) {
        const char *op = weft_op_at(i)->name;
        char stem[64], call[128];
        snprintf(stem, sizeof stem, "%.*s", (int)(strrchr(op, '_') - op), op);
        char *text = test_of(stem);
        if (!text) {
            snprintf(call, sizeof call, "%s_bwd", stem);
            if (!weft_op_find(call))
                test_failed("%s: without a backward pass it needs a tests/<family>/test_%s.c", op, stem);
            continue;
        }
        snprintf(call, sizeof call, "grid_suite(\"%s\")", op);
        if (!strstr(text, call)) test_failed("%s: test_%s.c does not compare the backends", op, stem);
        snprintf(call, sizeof call, "grid_rounding(\"%s\")", op);
        if (!strstr(text, call)) test_failed("%s: test_%s.c does not check its rounding", op, stem);
        snprintf(call, sizeof call, "fd_suite(\"%s\")", stem);
        if (strcmp(op + strlen(op) - 4, "_bwd") == 0 && !strstr(text, call))
            test_failed("%s: test_%s.c has no finite differences", op, stem);
        free(text);
    }
    /* bad input is generated for the whole list */
    char *refuse = source("tests/support/refuse.h");
    if (!refuse || !strstr(refuse, "for (int32_t i = 0; i < weft_op_count(); i++)"))
        test_failed("support/refuse.h does not go through all operators");
    free(refuse);
    test_verdict();
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_list_is_complete),
        cmocka_unit_test(headers_and_list_agree),
        cmocka_unit_test(every_operator_has_its_expectation),
        cmocka_unit_test(every_operator_has_its_tests),
    };
    return suite_run("coverage", tests);
}
