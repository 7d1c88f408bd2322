/* SPDX-License-Identifier: Apache-2.0 */
#include "train/lock.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "common/files.h"

/* fcntl and not flock: it reaches over NFS, and it reports the process that has the lock. */
static int try_lock(int file, pid_t *holder)
{
    enum { TRIES = 100 };
    for (int i = 0; i < TRIES; i++) {
        struct flock ask = {.l_type = F_WRLCK, .l_whence = SEEK_SET};
        if (!fcntl(file, F_SETLK, &ask)) return 1;
        if (errno != EACCES && errno != EAGAIN) return 0;
        ask = (struct flock){.l_type = F_WRLCK, .l_whence = SEEK_SET};
        if (fcntl(file, F_GETLK, &ask)) return 0;
        *holder = ask.l_pid;
        errno = EAGAIN;
        if (ask.l_type != F_UNLCK) return 0;
        /* It has been released between the two questions. */
    }
    return 0;
}

int lock_take(lock *l, const char *folder, char *error, size_t size)
{
    char path[FILES_PATH];
    struct stat status;
    pid_t holder = 0;
    if (l->held) return 1;
    if (!files_join(path, folder, ".lock")) {
        snprintf(error, size, "%s: too long a path", folder);
        return 0;
    }
    int file = open(path, O_RDWR | O_CREAT | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC, 0666);
    if (file >= 0 && !fstat(file, &status) && S_ISREG(status.st_mode)) {
        if (try_lock(file, &holder)) {
            *l = (lock){.held = 1, .file = file};
            return 1;
        }
        if (errno == EAGAIN && holder > 0)
            snprintf(error, size, "%s: process %ld is training there", folder, (long)holder);
        else if (errno == EAGAIN) /* of another machine or container, which has no number here */
            snprintf(error, size, "%s: a process of another machine or container is training there", folder);
        else
            snprintf(error, size, "%s: cannot be locked: %s", path, strerror(errno));
    } else
        snprintf(error, size, "%s: %s", path, file < 0 ? strerror(errno) : "not a regular file");
    if (file >= 0) close(file);
    return 0;
}

void lock_release(lock *l)
{
    if (l->held) close(l->file);
    *l = (lock){0};
}
