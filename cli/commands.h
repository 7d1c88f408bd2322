/* SPDX-License-Identifier: Apache-2.0
 *
 * The commands of the program and the exit codes they share. */
#ifndef WEFT_CLI_COMMANDS_H
#define WEFT_CLI_COMMANDS_H

enum { EXIT_PASSED = 0, EXIT_FAILED = 1, EXIT_UNUSABLE = 2 }; /* 2: bad options, unreadable input, no memory */

/* argv[0] is the command's own name. */
int command_info(int argc, char **argv);
int command_check(int argc, char **argv);
int command_bench(int argc, char **argv);
int command_train(int argc, char **argv);
int command_sample(int argc, char **argv);
int command_report(int argc, char **argv);

#endif
