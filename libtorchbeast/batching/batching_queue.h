// SPDX-License-Identifier: Apache-2.0
// A bounded FIFO queue that hands out batches.

#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <deque>
#include <limits>
#include <new>
#include <optional>
#include <stdexcept>
#include <utility>
#include <vector>

#include "libtorchbeast/support/errors.h"
#include "libtorchbeast/support/sync.h"

namespace torchbeast {

struct BatchingQueueOptions {
  std::int64_t minimum_batch_size = 1;                    // items that a consumer waits for
  std::int64_t maximum_batch_size = 1024;                 // maximum number of items in one batch
  std::optional<std::chrono::milliseconds> timeout = {};  // none: always wait for the minimum
  std::optional<std::int64_t> maximum_queue_size = {};    // items; none: unbounded
  // How long to hold a batch back for each item that Regular producers are likely to add soon.
  std::chrono::microseconds moment = std::chrono::microseconds(30);
};

// A bounded FIFO queue that hands out items in batches.
//
//   enqueue()  -> [ item item item ... ] ->  dequeue_many()
//   blocks at maximum_queue_size             blocks below minimum_batch_size, at most `timeout`
//                                            if there is an item
//
// Producers may register as Regular. If a batch has fewer items than half the number of registered
// producers, it is held back for a moment, which grows with the number of missing items and never
// exceeds `timeout`. With a single producer, batches are never held back.
//
// Thread safety: every method may be called from any number of threads.
// Closing: close() wakes every waiting thread. From then on enqueue() throws ClosedBatchingQueue.
// dequeue_many() returns nothing, except to consumers that were already waiting, which share the
// items enqueued before the close. Items without a waiting consumer are dropped.
template <typename T>
class BatchingQueue {
 public:
  explicit BatchingQueue(BatchingQueueOptions options) : options_(options) { check(options); }

  // Adds an item; blocks while the queue is full. Throws ClosedBatchingQueue if the queue is
  // closed, or is closed during the wait.
  void enqueue(T item) EXCLUDES(mutex_) {
    {
      MutexLock lock(mutex_);
      wait_for_room();
      if (closed_) throw ClosedBatchingQueue("Enqueue to closed queue");
      append(std::move(item));
      if (gathering_) {  // that consumer wakes the others for the items that it leaves
        if (missing() <= 0) gathered_.notify_one();
        return;
      }
    }
    notify_consumers();
  }

  // Registers, for a scope, a producer that repeatedly enqueues an item and waits for its result
  // before it enqueues the next.
  class Regular {
   public:
    explicit Regular(BatchingQueue* queue) : queue_(queue) { queue_->count_regular(1); }
    ~Regular() { queue_->count_regular(-1); }
    Regular(const Regular&) = delete;
    Regular& operator=(const Regular&) = delete;

   private:
    BatchingQueue* queue_;
  };

  // Removes the oldest items, at most maximum_batch_size; returns nullopt if the queue is closed.
  std::optional<std::vector<T>> dequeue_many() EXCLUDES(mutex_) {
    std::optional<std::vector<T>> batch;
    bool more = false, closed = false;
    std::int64_t welcome = 0;  // producers that may go on
    {
      MutexLock lock(mutex_);
      if (closed_) return std::nullopt;
      wait_for_batch();
      if (!items_.empty()) batch = take();
      more = !items_.empty();
      closed = closed_;
      welcome = std::min<std::int64_t>(room(), producers_waiting_);
    }
    for (; welcome > 0; --welcome) not_full_.notify_one();
    if (more) notify_consumers();
    if (closed) drop_leftovers();
    return batch;
  }

  std::int64_t size() const EXCLUDES(mutex_) {
    MutexLock lock(mutex_);
    return count();
  }

  bool is_closed() const EXCLUDES(mutex_) {
    MutexLock lock(mutex_);
    return closed_;
  }

  // The number of consumers blocked in dequeue_many().
  int waiting_consumers() const EXCLUDES(mutex_) {
    MutexLock lock(mutex_);
    return consumers_waiting_;
  }
  // Whether a consumer that already has enough items holds its batch back for more.
  bool is_gathering() const EXCLUDES(mutex_) {
    MutexLock lock(mutex_);
    return gathering_;
  }
  // The number of producers blocked in enqueue().
  int waiting_producers() const EXCLUDES(mutex_) {
    MutexLock lock(mutex_);
    return producers_waiting_;
  }

  // Closes the queue. Throws std::runtime_error if it was closed already.
  void close() {
    if (!try_close()) throw std::runtime_error("Queue was closed already");
  }

  // Closes the queue. Returns false if it was closed already. Does not allocate memory, because it
  // is also called when a thread has run out of memory.
  bool try_close() EXCLUDES(mutex_) {
    {
      MutexLock lock(mutex_);
      if (closed_) return false;
      closed_ = true;
    }
    not_full_.notify_all();
    not_empty_.notify_all();
    gathered_.notify_all();
    drop_leftovers();
    return true;
  }

  const BatchingQueueOptions& options() const { return options_; }

 private:
  // If the minimum is above one, wakes every consumer: there may be too few items for the first
  // consumer to wake, but enough for one whose timeout has passed.
  void notify_consumers() {
    options_.minimum_batch_size > 1 ? not_empty_.notify_all() : not_empty_.notify_one();
  }

  static void check(const BatchingQueueOptions& options) {
    if (options.minimum_batch_size < 1) throw std::invalid_argument("Min batch size must be >= 1");
    if (options.maximum_batch_size < options.minimum_batch_size) {
      throw std::invalid_argument("Max batch size must be >= min batch size");
    }
    if (options.maximum_queue_size && *options.maximum_queue_size < options.maximum_batch_size) {
      throw std::invalid_argument("Max queue size must be >= max batch size");
    }
  }

  std::int64_t count() const REQUIRES(mutex_) { return static_cast<std::int64_t>(items_.size()); }

  // Without a limit no producer waits for room.
  std::int64_t room() const REQUIRES(mutex_) {
    return options_.maximum_queue_size.value_or(std::numeric_limits<std::int64_t>::max()) - count();
  }

  bool enough(bool timed_out) const REQUIRES(mutex_) {
    if (gathering_) return false;
    return count() >= options_.minimum_batch_size || (timed_out && !items_.empty());
  }

  // A producer that fails leaves its room to the next one, which may have been woken for nothing
  // else.
  void append(T item) REQUIRES(mutex_) {
    try {
      items_.push_back(std::move(item));
    } catch (...) {
      not_full_.notify_one();
      throw;
    }
  }

  void wait_for_room() REQUIRES(mutex_) {
    ++producers_waiting_;
    while (!closed_ && room() <= 0) not_full_.wait(mutex_);
    --producers_waiting_;
  }

  void wait_for_batch() REQUIRES(mutex_) {
    const auto deadline = Clock::now() + options_.timeout.value_or(std::chrono::milliseconds(0));
    bool timed_out = false;
    ++consumers_waiting_;
    while (!closed_ && !enough(timed_out)) {
      if (!options_.timeout || timed_out) {
        not_empty_.wait(mutex_);
      } else {
        timed_out = !not_empty_.wait_until(mutex_, deadline);
      }
    }
    if (!timed_out) gather(deadline);
    --consumers_waiting_;
  }

  void count_regular(int change) EXCLUDES(mutex_) {
    MutexLock lock(mutex_);
    regulars_ += change;
    if (missing() <= 0) gathered_.notify_one();
  }

  std::int64_t missing() const REQUIRES(mutex_) { return worth_waiting_for() - count(); }

  // Half of the registered producers: while the consumer computes one half's batch, the other half
  // prepares its next items. If one batch contained all producers, producers and consumer would
  // take turns.
  std::int64_t worth_waiting_for() const REQUIRES(mutex_) {
    return std::min((regulars_ + 1) / 2, options_.maximum_batch_size);
  }

  // Waits a moment for items beyond the minimum, at most until the deadline.
  void gather(Clock::time_point deadline) REQUIRES(mutex_) {
    if (closed_ || missing() <= 0) return;
    auto until = Clock::now() + missing() * options_.moment;
    if (options_.timeout) until = std::min(until, deadline);
    gathering_ = true;
    while (!closed_ && missing() > 0 && gathered_.wait_until(mutex_, until)) continue;
    gathering_ = false;
  }

  // Drops the items of a closed queue that no waiting consumer will take. Each item is destroyed
  // after unlocking, because destructors may use the queue. One by one, because a second deque
  // would need memory.
  void drop_leftovers() EXCLUDES(mutex_) {
    while (const std::optional<T> leftover = take_leftover()) continue;
  }

  std::optional<T> take_leftover() EXCLUDES(mutex_) {
    MutexLock lock(mutex_);
    if (!closed_ || consumers_waiting_ > 0 || items_.empty()) return std::nullopt;
    std::optional<T> leftover(std::move(items_.front()));
    items_.pop_front();
    return leftover;
  }

  std::vector<T> take() REQUIRES(mutex_) {
    const auto size = std::min(count(), options_.maximum_batch_size);
    const auto end = items_.begin() + static_cast<std::ptrdiff_t>(size);
    std::vector<T> batch;
    try {
      batch.reserve(static_cast<std::size_t>(size));
    } catch (const std::bad_alloc&) {  // another consumer, which may have slept on, takes the items
      notify_consumers();
      throw;
    }
    batch.assign(std::make_move_iterator(items_.begin()), std::make_move_iterator(end));
    items_.erase(items_.begin(), end);
    return batch;
  }

  const BatchingQueueOptions options_;
  mutable Mutex mutex_;
  CondVar not_full_;   // there is room, or closed
  CondVar not_empty_;  // there is an item, or closed
  CondVar gathered_;   // no item is missing, or closed
  std::deque<T> items_ GUARDED_BY(mutex_);
  std::int64_t regulars_ GUARDED_BY(mutex_) = 0;
  bool gathering_ GUARDED_BY(mutex_) = false;  // one consumer at a time
  int consumers_waiting_ GUARDED_BY(mutex_) = 0;
  int producers_waiting_ GUARDED_BY(mutex_) = 0;
  bool closed_ GUARDED_BY(mutex_) = false;
};

}  // namespace torchbeast
