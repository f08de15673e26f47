/* A shim between a process and its files: counts the calls below a folder, and fails or kills at the n-th of a kind.

   cc -shared -fPIC -O1 -o faults.so faults.c; LD_PRELOAD=faults.so; used by faults.py, on Linux alone. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

enum { READ, OPEN, WRITE, SYNC, RENAME, REMOVE, MKDIR, KINDS };
enum { FAIL, KILL_BEFORE, KILL_AFTER };

static char folder[PATH_MAX];
static atomic_int seen[KINDS];
static int watched = -1, number, action, error, lasting;

/* Counts anew below a folder; from the number-th call of a kind (counted from 1; kind -1: none) on, acts. */
void faults_arm(const char *below, int kind, int at, int what, int code, int stays) {
    strncpy(folder, below, sizeof folder - 1);
    for (int i = 0; i < KINDS; i++) atomic_store(&seen[i], 0);
    watched = kind, number = at, action = what, error = code, lasting = stays;
}

int faults_seen(int kind) { return atomic_load(&seen[kind]); }

static int is_below(const char *path) { return *folder && path && !strncmp(path, folder, strlen(folder)); }

static int is_below_at(int at, const char *path) {
    char link[64], base[PATH_MAX];
    if (!path) return 0;
    if (*path == '/') return is_below(path);
    snprintf(link, sizeof link, at == AT_FDCWD ? "/proc/self/cwd" : "/proc/self/fd/%d", at);
    ssize_t length = readlink(link, base, sizeof base - 1);
    if (length < 0) return 0;
    base[length] = 0;
    return is_below(base);
}

static int is_file_below(int fd) {
    int before = errno, found = fd > 2 && is_below_at(fd, "");
    errno = before;
    return found;
}

/* 0: go on; 1: fail with errno set; 2: be killed afterwards. */
static int event(int kind) {
    int count = atomic_fetch_add(&seen[kind], 1) + 1;
    /* A disk that is full for one kind of call is full for all that need space. */
    int is_later = lasting && count != number && (kind == watched ? count > number : watched >= 0 &&
        faults_seen(watched) >= number && kind != READ && kind != RENAME && kind != REMOVE);
    if (!is_later && (kind != watched || count != number)) return 0;
    if (action == KILL_BEFORE) raise(SIGKILL);
    if (action == KILL_AFTER) return 2;
    errno = error;
    return 1;
}

#define REAL(type, name, ...) static type (*real)(__VA_ARGS__); if (!real) real = dlsym(RTLD_NEXT, #name)
#define DONE(call) { __typeof__(call) done = (call); if (fate == 2) raise(SIGKILL); return done; }

#define OPENS(name) \
    int name(const char *path, int flags, ...) { \
        REAL(int, name, const char *, int, ...); \
        va_list rest; va_start(rest, flags); mode_t mode = va_arg(rest, mode_t); va_end(rest); \
        int is_reading = (flags & O_ACCMODE) == O_RDONLY && !(flags & O_CREAT); \
        int fate = is_below_at(AT_FDCWD, path) && !(flags & O_DIRECTORY) ? event(is_reading ? READ : OPEN) : 0; \
        if (fate == 1) return -1; \
        DONE(real(path, flags, mode)) \
    }
#define OPENS_AT(name) \
    int name(int at, const char *path, int flags, ...) { \
        REAL(int, name, int, const char *, int, ...); \
        va_list rest; va_start(rest, flags); mode_t mode = va_arg(rest, mode_t); va_end(rest); \
        int is_reading = (flags & O_ACCMODE) == O_RDONLY && !(flags & O_CREAT); \
        int fate = is_below_at(at, path) && !(flags & O_DIRECTORY) ? event(is_reading ? READ : OPEN) : 0; \
        if (fate == 1) return -1; \
        DONE(real(at, path, flags, mode)) \
    }
OPENS(open) OPENS(open64) OPENS_AT(openat) OPENS_AT(openat64)

/* A call that fails or is followed by a kill has written the first half. */
ssize_t write(int fd, const void *bytes, size_t size) {
    REAL(ssize_t, write, int, const void *, size_t);
    int fate = is_file_below(fd) ? event(WRITE) : 0;
    if (fate) { int code = errno; real(fd, bytes, size / 2); if (fate == 2) raise(SIGKILL); errno = code; return -1; }
    return real(fd, bytes, size);
}

size_t fwrite(const void *bytes, size_t size, size_t count, FILE *file) {
    REAL(size_t, fwrite, const void *, size_t, size_t, FILE *);
    int fate = is_file_below(fileno(file)) ? event(WRITE) : 0;
    if (fate) {
        int code = errno; size_t half = real(bytes, size, count / 2, file);
        if (fate == 2) { fflush(file); raise(SIGKILL); }
        errno = code; return half;
    }
    return real(bytes, size, count, file);
}

ssize_t writev(int fd, const struct iovec *parts, int count) {
    REAL(ssize_t, writev, int, const struct iovec *, int);
    int fate = is_file_below(fd) ? event(WRITE) : 0;
    if (fate == 1) return -1;
    DONE(real(fd, parts, count))
}

#define ON_FD(kind, type, name, arguments, names, ...) \
    type name arguments { \
        REAL(type, name, __VA_ARGS__); \
        int fate = is_file_below(fd) ? event(kind) : 0; \
        if (fate == 1) return -1; \
        DONE(real names) \
    }
ON_FD(WRITE, ssize_t, pwrite64, (int fd, const void *b, size_t n, off64_t o), (fd, b, n, o), int, const void *, size_t, off64_t)
ON_FD(WRITE, ssize_t, sendfile64, (int fd, int from, off64_t *o, size_t n), (fd, from, o, n), int, int, off64_t *, size_t)
ON_FD(WRITE, int, ftruncate64, (int fd, off64_t size), (fd, size), int, off64_t)
ON_FD(SYNC, int, fsync, (int fd), (fd), int)
ON_FD(SYNC, int, fdatasync, (int fd), (fd), int)

#define ON_PATH(kind, name, arguments, names, is_watched, ...) \
    int name arguments { \
        REAL(int, name, __VA_ARGS__); \
        int fate = (is_watched) ? event(kind) : 0; \
        if (fate == 1) return -1; \
        DONE(real names) \
    }
ON_PATH(RENAME, rename, (const char *p, const char *q), (p, q), is_below_at(AT_FDCWD, q), const char *, const char *)
ON_PATH(RENAME, renameat, (int a, const char *p, int b, const char *q), (a, p, b, q), is_below_at(b, q), int, const char *, int, const char *)
ON_PATH(RENAME, renameat2, (int a, const char *p, int b, const char *q, unsigned f), (a, p, b, q, f), is_below_at(b, q), int, const char *, int, const char *, unsigned)
ON_PATH(REMOVE, unlink, (const char *p), (p), is_below_at(AT_FDCWD, p), const char *)
ON_PATH(REMOVE, unlinkat, (int a, const char *p, int f), (a, p, f), is_below_at(a, p), int, const char *, int)
ON_PATH(REMOVE, rmdir, (const char *p), (p), is_below_at(AT_FDCWD, p), const char *)
ON_PATH(MKDIR, mkdir, (const char *p, mode_t m), (p, m), is_below_at(AT_FDCWD, p), const char *, mode_t)
