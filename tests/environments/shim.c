/* Preloaded into a process of a row: its wall clock is off by what the file that ENVIRONMENT_CLOCK names says, eight
 * bytes, nanoseconds, read again at each call; and where ENVIRONMENT_NO_IPV6 is set, no socket is of that family. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static int64_t off_ns(void) {
    static _Atomic(volatile int64_t *) mapped;
    if (!mapped) {
        static const int64_t zero;
        const char *name = getenv("ENVIRONMENT_CLOCK");
        int file = name ? open(name, O_RDONLY | O_CLOEXEC) : -1;
        void *found = file < 0 ? MAP_FAILED : mmap(0, sizeof(int64_t), PROT_READ, MAP_SHARED, file, 0);
        if (file >= 0) close(file);
        mapped = found == MAP_FAILED ? (volatile int64_t *)&zero : found;
    }
    return *mapped;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int failed = real(clock, now);
    if (!failed && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE || clock == CLOCK_TAI)) {
        int64_t ns = (int64_t)now->tv_sec * 1000000000 + now->tv_nsec + off_ns();
        now->tv_sec = ns / 1000000000;
        now->tv_nsec = ns % 1000000000;
    }
    return failed;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    struct timespec at;
    (void)zone;
    if (clock_gettime(CLOCK_REALTIME, &at)) return -1;
    now->tv_sec = at.tv_sec;
    now->tv_usec = at.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *where) {
    struct timespec at;
    clock_gettime(CLOCK_REALTIME, &at);
    if (where) *where = at.tv_sec;
    return at.tv_sec;
}

int socket(int family, int type, int protocol) {
    static int (*real)(int, int, int);
    if (!real) real = dlsym(RTLD_NEXT, "socket");
    if (family == AF_INET6 && getenv("ENVIRONMENT_NO_IPV6")) {
        errno = EAFNOSUPPORT;
        return -1;
    }
    return real(family, type, protocol);
}
