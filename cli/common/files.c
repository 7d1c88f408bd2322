/* SPDX-License-Identifier: Apache-2.0 */
#include "common/files.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

int files_join(char path[FILES_PATH], const char *folder, const char *name)
{
    int length = snprintf(path, FILES_PATH, "%s/%s", folder, name);
    return length > 0 && length < FILES_PATH;
}

int files_open(const char *path, struct stat *status, char *error, size_t error_size)
{
    /* Without O_NONBLOCK a FIFO is not open before it has a writer. On regular files the flag has no effect. */
    int file = open(path, O_RDONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC);
    if (file >= 0 && !fstat(file, status) && S_ISREG(status->st_mode)) return file;
    snprintf(error, error_size, "%s", file < 0 ? strerror(errno) : "not a regular file");
    if (file >= 0) close(file);
    return -1;
}

int files_read_at(int file, size_t begin, void *to, size_t bytes)
{
    for (size_t done = 0; done < bytes;) {
        ssize_t got = pread(file, (char *)to + done, bytes - done, (off_t)(begin + done));
        if (got < 0 && errno == EINTR) continue;
        if (got == 0) errno = 0;
        if (got <= 0) return 0;
        done += (size_t)got;
    }
    return 1;
}

char *files_read(const char *path, size_t most, size_t *size, char *error, size_t error_size)
{
    struct stat status;
    int file = files_open(path, &status, error, error_size);
    if (file < 0) return NULL;
    *size = (size_t)status.st_size;
    char *bytes = *size <= most ? malloc(*size + 1) : NULL;
    int ok = bytes && files_read_at(file, 0, bytes, *size);
    if (*size > most)
        snprintf(error, error_size, "%zu bytes, at most %zu are taken", *size, most);
    else if (!bytes)
        snprintf(error, error_size, "out of memory: %zu bytes", *size);
    else if (!ok)
        snprintf(error, error_size, "%s", errno ? strerror(errno) : "became shorter while it was read");
    close(file);
    if (ok) {
        bytes[*size] = 0;
        return bytes;
    }
    free(bytes);
    return NULL;
}

FILE *files_create(const char *path)
{
    /* What a run that was killed left there, or a link: the name is given up, its target is not touched. */
    if (unlink(path) && errno != ENOENT) return NULL;
    int file = open(path, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0666);
    FILE *stream = file >= 0 ? fdopen(file, "w") : NULL;
    if (file >= 0 && !stream) close(file);
    return stream;
}

int files_make_folder(const char *path, char *error, size_t error_size)
{
    char part[FILES_PATH];
    struct stat status;
    if (snprintf(part, sizeof part, "%s", path) >= (int)sizeof part) {
        snprintf(error, error_size, "%s: too long a path", path);
        return 0;
    }
    for (char *p = part + 1; part[0] && *p; p++)
        if (*p == '/') {
            *p = 0;
            (void)mkdir(part, 0777);
            *p = '/';
        }
    if ((mkdir(part, 0777) && errno != EEXIST) || stat(part, &status) || !S_ISDIR(status.st_mode)) {
        snprintf(error, error_size, "%s: %s", path, errno && errno != EEXIST ? strerror(errno) : "not a folder");
        return 0;
    }
    return 1;
}

int files_sync_folder(const char *path)
{
    int file = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    int ok = file >= 0 && fsync(file) == 0, why = errno;
    if (file >= 0) close(file);
    errno = why;
    return ok;
}
