/* SPDX-License-Identifier: Apache-2.0
 *
 * Loaded before a program (LD_PRELOAD), it moves the clock that the program sees by the seconds in a
 * file, at any moment, as if somebody had set the clock of the system.
 *
 * CLOCK_REALTIME jumps. CLOCK_MONOTONIC and CLOCK_BOOTTIME do not, as in Linux. Waits until a time of
 * CLOCK_REALTIME end by the clock that has jumped: a wait of a second that an hour's jump back
 * interrupts lasts an hour longer. They look at the clock every few milliseconds.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#define LOOK_NS 5000000L /* between two looks at the clock */

static const volatile int64_t none = 0;
static const volatile int64_t *moved_by = &none; /* seconds; the file */

__attribute__((constructor)) static void map_file(void) {
  const char *path = getenv("SET_CLOCK_FILE");
  const int file = path == NULL ? -1 : open(path, O_RDONLY | O_CLOEXEC);
  void *found = file < 0 ? MAP_FAILED : mmap(NULL, sizeof none, PROT_READ, MAP_SHARED, file, 0);
  if (found == MAP_FAILED) _exit(99); /* a test that would measure nothing */
  moved_by = found;
}

static long (*real_syscall(void))(long, ...) {
  static long (*found)(long, ...);
  if (found == NULL) found = (long (*)(long, ...))dlsym(RTLD_NEXT, "syscall");
  return found;
}

static struct timespec kernel_time(void) {
  struct timespec now;
  real_syscall()(SYS_clock_gettime, CLOCK_REALTIME, &now);
  return now;
}

static int is_before(struct timespec a, struct timespec b) {
  return a.tv_sec != b.tv_sec ? a.tv_sec < b.tv_sec : a.tv_nsec < b.tv_nsec;
}

/* Returns until when the kernel is to wait next, at the latest; *is_last: it is all that is left. */
static struct timespec next_look(const struct timespec *until, int *is_last) {
  struct timespec end = *until, look = kernel_time();
  end.tv_sec -= *moved_by;
  look.tv_nsec += LOOK_NS;
  if (look.tv_nsec >= 1000000000L) look.tv_nsec -= 1000000000L, look.tv_sec++;
  *is_last = is_before(end, look);
  return *is_last ? end : look;
}

int clock_gettime(clockid_t clock, struct timespec *time) {
  const int failed = (int)real_syscall()(SYS_clock_gettime, clock, time);
  if (!failed && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) {
    time->tv_sec += *moved_by;
  }
  return failed;
}

int gettimeofday(struct timeval *time, void *zone) {
  (void)zone;
  const struct timespec now = kernel_time();
  time->tv_sec = now.tv_sec + *moved_by;
  time->tv_usec = now.tv_nsec / 1000;
  return 0;
}

time_t time(time_t *result) {
  const time_t now = kernel_time().tv_sec + *moved_by;
  if (result != NULL) *result = now;
  return now;
}

/* Condition variables do not tell their clock; that of the system counts from 1970, others from the
 * start of the machine. Returning early is allowed, and the caller looks again. */
int pthread_cond_timedwait(pthread_cond_t *changed, pthread_mutex_t *mutex,
                           const struct timespec *until) {
  if (until->tv_sec < 1000000000) {
    return pthread_cond_clockwait(changed, mutex, CLOCK_MONOTONIC, until);
  }
  int is_last;
  const struct timespec look = next_look(until, &is_last);
  const int error = pthread_cond_clockwait(changed, mutex, CLOCK_REALTIME, &look);
  return error == ETIMEDOUT && !is_last ? 0 : error;
}

int sem_timedwait(sem_t *semaphore, const struct timespec *until) {
  for (;;) {
    int is_last;
    const struct timespec look = next_look(until, &is_last);
    const int failed = sem_clockwait(semaphore, CLOCK_REALTIME, &look);
    if (!failed || errno != ETIMEDOUT || is_last) return failed;
  }
}

/* Abseil, and with it gRPC, waits by a call of its own. */
long syscall(long number, ...) {
  long a[6];
  va_list list;
  va_start(list, number);
  for (int i = 0; i < 6; i++) a[i] = va_arg(list, long);
  va_end(list);
  const int by_clock = number == SYS_futex && (a[1] & FUTEX_CLOCK_REALTIME) && a[3];
  if (!by_clock) return real_syscall()(number, a[0], a[1], a[2], a[3], a[4], a[5]);
  for (;;) {
    int is_last;
    const struct timespec look = next_look((const struct timespec *)a[3], &is_last);
    const long failed = real_syscall()(number, a[0], a[1], a[2], &look, a[4], a[5]);
    if (!failed || errno != ETIMEDOUT || is_last) return failed;
  }
}
