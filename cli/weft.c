/* SPDX-License-Identifier: Apache-2.0
 *
 * The program `weft`: tells what a build can do, checks an installation, measures it, trains a model with it. A client of
 * the public headers like any other. */
#include <stdio.h>
#include <string.h>

#include <weft/weft.h>

#include "commands.h"

static const struct command {
    const char *name;
    int (*run)(int argc, char **argv);
    const char *summary;
} commands[] = {
    {"info", command_info, "what this build is and what this machine gives it"},
    {"check", command_check, "self-test: every operator against the reference, or against golden files"},
    {"bench", command_bench, "speed of the operators beside the machine's copy bandwidth"},
    {"train", command_train, "train a small language model with the residual connection of your choice"},
    {"sample", command_sample, "text from a trained model"},
    {"report", command_report, "one page of plots from the logs of runs"},
};
enum { NUM_COMMANDS = sizeof commands / sizeof commands[0] };

static void usage(FILE *to)
{
    fprintf(to, "usage: weft <command> [options]\n\n");
    for (int i = 0; i < NUM_COMMANDS; i++) fprintf(to, "  %-8s %s\n", commands[i].name, commands[i].summary);
    fprintf(to, "  %-8s %s\n\n", "help", "this text; weft <command> --help lists the options of a command");
}

int main(int argc, char **argv)
{
    if (argc < 2) {
        usage(stderr);
        return EXIT_UNUSABLE;
    }
    const char *name = argv[1];
    if (!strcmp(name, "help") || !strcmp(name, "--help") || !strcmp(name, "-h")) {
        if (argc == 2) {
            usage(stdout);
            return EXIT_PASSED;
        }
        name = argv[2];
        for (int i = 0; i < NUM_COMMANDS; i++) {
            char *help[] = {argv[2], "--help", NULL};
            if (!strcmp(name, commands[i].name)) return commands[i].run(2, help);
        }
    }
    if (!strcmp(name, "--version")) {
        printf("weft %s\n", weft_version());
        return EXIT_PASSED;
    }
    for (int i = 0; i < NUM_COMMANDS; i++)
        if (!strcmp(name, commands[i].name)) return commands[i].run(argc - 1, argv + 1);
    fprintf(stderr, "weft: expected one of the commands below, got '%s'\n\n", name);
    usage(stderr);
    return EXIT_UNUSABLE;
}
