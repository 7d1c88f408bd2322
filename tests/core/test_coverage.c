/* SPDX-License-Identifier: Apache-2.0
 *
 * The tests cover the library: every operator that a public header declares is in the list, and every operator in
 * the list has its finite differences, its backend comparison and its bad input. A new operator without them fails
 * here. */
#include "support/suite.h"

#include "core/kernel.h"

/* The evidence for each operator. One line per operator, written by hand on purpose: adding an operator means
 * thinking about what shows that it is right. */
typedef enum gradient { DIFFERENCES, FORWARD_ONLY } gradient;
typedef enum comparison { BOUNDS, CHAIN, EXPECTED } comparison;

static const struct {
    const char *op;
    gradient gradient; /* reference against finite differences, in test_<stem>.c */
    comparison
        comparison; /* backends against the reference within bounds, bitwise against the chain of the parts, or with the
                     * reference against the expectation of `weft check` */
} registry[] = {
    {"mhc_project_fwd", DIFFERENCES, BOUNDS},   {"mhc_project_bwd", DIFFERENCES, BOUNDS},
    {"mhc_scale_fwd", DIFFERENCES, BOUNDS},     {"mhc_scale_bwd", DIFFERENCES, BOUNDS},
    {"mhc_sinkhorn_fwd", DIFFERENCES, BOUNDS},  {"mhc_sinkhorn_bwd", DIFFERENCES, BOUNDS},
    {"mhc_coef_fwd", DIFFERENCES, BOUNDS},      {"mhc_coef_bwd", DIFFERENCES, BOUNDS},
    {"mhc_aggregate_fwd", DIFFERENCES, BOUNDS}, {"mhc_aggregate_bwd", DIFFERENCES, BOUNDS},
    {"mhc_post_fwd", DIFFERENCES, BOUNDS},      {"mhc_post_bwd", DIFFERENCES, BOUNDS},
    {"mhc_expand_fwd", DIFFERENCES, BOUNDS},    {"mhc_expand_bwd", DIFFERENCES, BOUNDS},
    {"mhc_contract_fwd", DIFFERENCES, BOUNDS},  {"mhc_contract_bwd", DIFFERENCES, BOUNDS},
    {"mhc_head_fwd", DIFFERENCES, CHAIN},       {"mhc_head_bwd", DIFFERENCES, CHAIN},
    {"mhc_pre_fwd", DIFFERENCES, CHAIN},        {"mhc_pre_bwd", DIFFERENCES, CHAIN},
    {"mhc_boundary_fwd", DIFFERENCES, CHAIN},   {"mhc_boundary_bwd", DIFFERENCES, CHAIN},
    {"mhc_replay_fwd", FORWARD_ONLY, CHAIN},    {"rmsnorm_fwd", DIFFERENCES, BOUNDS},
    {"rmsnorm_bwd", DIFFERENCES, BOUNDS},       {"gdn_pre_fwd", DIFFERENCES, EXPECTED},
    {"gdn_pre_bwd", DIFFERENCES, EXPECTED},     {"gdn_pre_step", FORWARD_ONLY, EXPECTED},
    {"gdn_rule_fwd", DIFFERENCES, EXPECTED},    {"gdn_rule_bwd", DIFFERENCES, EXPECTED},
};
enum { REGISTERED = sizeof registry / sizeof *registry };

static const char *const listed[] = {
#define WEFT_OP(name) #name,
#include "core/ops.def"
#undef WEFT_OP
};

/* A file beside this one, or relative to it. NULL where the sources are not at hand. */
static char *source(const char *path)
{
    char full[1024];
    const char *slash = strrchr(__FILE__, '/');
    snprintf(full, sizeof full, "%.*s%s", slash ? (int)(slash - __FILE__ + 1) : 0, __FILE__, path);
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
    static const char *const headers[] = {"../include/weft/mhc.h", "../include/weft/norm.h",
                                          "../include/weft/gdn.h"};
    bool seen[WEFT_OP_COUNT] = {false};
    for (int h = 0; h < 3; h++) {
        char *text = source(headers[h]);
        if (!text) {
            fprintf(stderr, "  %s is not at hand: skipped\n", headers[h]);
            skip();
        }
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

static void every_operator_has_its_tests(void **state)
{
    (void)state;
    char *validate = source("support/refuse.h");
    for (int32_t i = 0; i < weft_op_count(); i++) {
        const char *op = weft_op_at(i)->name;
        char stem[64], path[96], call[128];
        int row = -1;
        for (int k = 0; k < REGISTERED; k++)
            if (strcmp(registry[k].op, op) == 0) row = k;
        if (row < 0) {
            test_failed("%s is not registered in test_coverage.c", op);
            continue;
        }
        snprintf(stem, sizeof stem, "%.*s", (int)(strrchr(op, '_') - op), op);
        /* the drivers must know the operator, or the suites would compare nothing */
        bool bounds = registry[row].comparison == BOUNDS, expected = registry[row].comparison == EXPECTED;
        if (expected) {
            if (!grid_expected(op)) test_failed("%s: support/grid.c does not know that it is expected", op);
        } else if (bounds ? !truth_knows(op) : !chain_knows(op))
            test_failed("%s: %s does not know it", op, bounds ? "support/truth.c" : "support/chain.c");
        snprintf(path, sizeof path, "test_%s.c", stem);
        char *text = source(path);
        if (!text) {
            if (validate) test_failed("%s: there is no tests/%s", op, path);
            continue;
        }
        snprintf(call, sizeof call, "grid_suite(\"%s\")", op);
        if (!strstr(text, call)) test_failed("%s: tests/%s does not compare the backends", op, path);
        snprintf(call, sizeof call, "grid_rounding(\"%s\")", op);
        if (!strstr(text, call)) test_failed("%s: tests/%s does not check its rounding", op, path);
        snprintf(call, sizeof call, "fd_suite(\"%s\")", stem);
        if (registry[row].gradient == DIFFERENCES && !strstr(text, call))
            test_failed("%s: tests/%s has no finite differences", op, path);
        free(text);
    }
    /* bad input is generated for the whole list */
    if (validate && !strstr(validate, "for (int32_t i = 0; i < weft_op_count(); i++)"))
        test_failed("support/refuse.h does not go through all operators");
    if (!validate) fprintf(stderr, "  the test sources are not at hand: only the registry was checked\n");
    free(validate);
    for (int k = 0; k < REGISTERED; k++)
        if (!weft_op_find(registry[k].op)) test_failed("%s is registered, but is no operator", registry[k].op);
    test_verdict();
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_list_is_complete),
        cmocka_unit_test(headers_and_list_agree),
        cmocka_unit_test(every_operator_has_its_tests),
    };
    return suite_run("coverage", tests);
}
