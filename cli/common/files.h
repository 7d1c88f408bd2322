/* SPDX-License-Identifier: Apache-2.0
 *
 * Files under names that a user or an accident chose. A reader takes regular files alone and waits for no FIFO and no device;
 * what is created is a new file, never the target of a link. */
#ifndef WEFT_CLI_FILES_H
#define WEFT_CLI_FILES_H

#include <stddef.h>
#include <stdio.h>
#include <sys/stat.h>

enum { FILES_PATH = 4096 }; /* bytes of a path with its zero: what the system takes */

/* Folder and name as one path; 0 where it is too long. */
int files_join(char path[FILES_PATH], const char *folder, const char *name);

/* A regular file, open for reading; -1 with the reason, without the path, in error. */
int files_open(const char *path, struct stat *status, char *error, size_t error_size);
/* All of a regular file of at most `most` bytes, closed with a zero that is not counted; the caller frees it. NULL with the
 * reason, without the path, in error. */
char *files_read(const char *path, size_t most, size_t *size, char *error, size_t error_size);
/* Reads exactly so many bytes of an open file; 0 where it fails, with errno 0 where the file ends before. */
int files_read_at(int file, size_t begin, void *to, size_t bytes);

/* A new file for writing in the place of the file or link that has the name; NULL with errno. */
FILE *files_create(const char *path);
/* mkdir -p; 1, or 0 with path and reason in error. */
int files_make_folder(const char *path, char *error, size_t error_size);
/* What a folder holds is on disk only once the folder itself is; 0 with errno. */
int files_sync_folder(const char *path);

#endif
