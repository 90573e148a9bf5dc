/* SPDX-License-Identifier: Apache-2.0
 *
 * Loaded before a program (LD_PRELOAD), it refuses threads after the first FEW_THREADS, like
 * ulimit -u or pids.max of a container.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>

typedef int create(pthread_t *, const pthread_attr_t *, void *(*)(void *), void *);

int pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*body)(void *),
                   void *argument) {
  static atomic_int started;
  if (atomic_fetch_add(&started, 1) >= atoi(getenv("FEW_THREADS"))) return EAGAIN;
  return ((create *)dlsym(RTLD_NEXT, "pthread_create"))(thread, attributes, body, argument);
}
