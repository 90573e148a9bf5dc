// SPDX-License-Identifier: Apache-2.0
// A bounded FIFO that hands out batches.

#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <deque>
#include <optional>
#include <stdexcept>
#include <utility>
#include <vector>

#include "libtorchbeast/support/errors.h"
#include "libtorchbeast/support/sync.h"

namespace torchbeast {

struct BatchingQueueOptions {
  std::int64_t minimum_batch_size = 1;                    // items that dequeue_many() waits for
  std::int64_t maximum_batch_size = 1024;                 // items in one batch at the most
  std::optional<std::chrono::milliseconds> timeout = {};  // none: wait for the minimum for ever
  std::optional<std::int64_t> maximum_queue_size = {};    // items; none: unbounded
  // How long a batch is held back for each item that Regular producers are likely to bring soon.
  std::chrono::microseconds moment = std::chrono::microseconds(30);
};

// A bounded FIFO that hands out items in batches.
//
//   enqueue()  -> [ item item item ... ] ->  dequeue_many()
//   blocks at maximum_queue_size             blocks below minimum_batch_size, at most `timeout`
//                                            once there is an item
//
// Producers that announce themselves (Regular) are worth a little more: a batch that is not yet of
// half as many items as there are such producers is held back for a moment, which grows with the
// number of items that are missing and never passes `timeout`. One producer is never waited for.
//
// Thread safety: every method may be called from any number of threads.
// Closing: close() wakes every waiter. enqueue() throws ClosedBatchingQueue from then on;
// dequeue_many() gives nothing, save to consumers that were already waiting: they share out what
// was handed over before the close. Other items are dropped.
template <typename T>
class BatchingQueue {
 public:
  explicit BatchingQueue(BatchingQueueOptions options) : options_(options) { check(options); }

  // Throws ClosedBatchingQueue when closed, also while it waits for room.
  void enqueue(T item) EXCLUDES(mutex_) {
    {
      MutexLock lock(mutex_);
      wait_for_room();
      if (closed_) throw ClosedBatchingQueue(kEnqueueToClosedQueue);
      items_.push_back(std::move(item));
      if (gathering_) {  // that consumer passes on what it leaves
        if (missing() <= 0) gathered_.notify_one();
        return;
      }
    }
    notify_consumers();
  }

  // Announces, for a scope, one who enqueues an item, waits for what comes of it, and enqueues the
  // next.
  class Regular {
   public:
    explicit Regular(BatchingQueue* queue) : queue_(queue) { queue_->count_regular(1); }
    ~Regular() { queue_->count_regular(-1); }
    Regular(const Regular&) = delete;
    Regular& operator=(const Regular&) = delete;

   private:
    BatchingQueue* queue_;
  };

  // The oldest items, at most maximum_batch_size; nullopt when closed.
  std::optional<std::vector<T>> dequeue_many() EXCLUDES(mutex_) {
    std::optional<std::vector<T>> batch;
    std::deque<T> dropped;
    bool more = false;
    {
      MutexLock lock(mutex_);
      if (closed_) return std::nullopt;
      wait_for_batch();
      if (!items_.empty()) batch = take();
      if (closed_ && consumers_waiting_ == 0) dropped.swap(items_);
      more = !items_.empty();
    }
    not_full_.notify_all();
    if (more) notify_consumers();
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

  // How many dequeue_many() and how many enqueue() are blocked: which side holds the other up.
  int waiting_consumers() const EXCLUDES(mutex_) {
    MutexLock lock(mutex_);
    return consumers_waiting_;
  }
  // Whether a dequeue_many() with enough items waits a moment for more.
  bool is_gathering() const EXCLUDES(mutex_) {
    MutexLock lock(mutex_);
    return gathering_;
  }
  int waiting_producers() const EXCLUDES(mutex_) {
    MutexLock lock(mutex_);
    return producers_waiting_;
  }

  // Throws std::runtime_error at the second call.
  void close() {
    if (!try_close()) throw std::runtime_error("Queue was closed already");
  }

  // False when it was closed already.
  bool try_close() EXCLUDES(mutex_) {
    std::deque<T> dropped;  // destroyed after unlocking: a destructor may be anything
    {
      MutexLock lock(mutex_);
      if (closed_) return false;
      closed_ = true;
      if (consumers_waiting_ == 0) dropped.swap(items_);
    }
    not_full_.notify_all();
    not_empty_.notify_all();
    gathered_.notify_all();
    return true;
  }

  const BatchingQueueOptions& options() const { return options_; }

 private:
  // What is there may not be enough for everybody, but for a consumer whose timeout has passed.
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

  bool full() const REQUIRES(mutex_) {
    return options_.maximum_queue_size && count() >= *options_.maximum_queue_size;
  }

  bool enough(bool timed_out) const REQUIRES(mutex_) {
    if (gathering_) return false;
    return count() >= options_.minimum_batch_size || (timed_out && !items_.empty());
  }

  void wait_for_room() REQUIRES(mutex_) {
    ++producers_waiting_;
    while (!closed_ && full()) not_full_.wait(mutex_);
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
        timed_out = !not_empty_.wait_until(mutex_, deadline) && Clock::now() >= deadline;
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

  // Half of those who come again and again: while one half's batch is computed, the other half is
  // about its next items. With all of them in one batch both would wait in turn.
  std::int64_t worth_waiting_for() const REQUIRES(mutex_) {
    return std::min((regulars_ + 1) / 2, options_.maximum_batch_size);
  }

  // Called with enough items: waits a moment for more, but not beyond the deadline.
  void gather(Clock::time_point deadline) REQUIRES(mutex_) {
    if (closed_ || missing() <= 0) return;
    auto until = Clock::now() + missing() * options_.moment;
    if (options_.timeout) until = std::min(until, deadline);
    gathering_ = true;
    while (!closed_ && missing() > 0 && gathered_.wait_until(mutex_, until)) continue;
    gathering_ = false;
  }

  std::vector<T> take() REQUIRES(mutex_) {
    const auto size = std::min(count(), options_.maximum_batch_size);
    const auto end = items_.begin() + static_cast<std::ptrdiff_t>(size);
    std::vector<T> batch(std::make_move_iterator(items_.begin()), std::make_move_iterator(end));
    items_.erase(items_.begin(), end);
    return batch;
  }

  const BatchingQueueOptions options_;
  mutable Mutex mutex_;
  CondVar not_full_;   // room came, or closed
  CondVar not_empty_;  // an item came, or closed
  CondVar gathered_;   // nothing is missing any more, or closed
  std::deque<T> items_ GUARDED_BY(mutex_);
  std::int64_t regulars_ GUARDED_BY(mutex_) = 0;
  bool gathering_ GUARDED_BY(mutex_) = false;  // one consumer at a time
  int consumers_waiting_ GUARDED_BY(mutex_) = 0;
  int producers_waiting_ GUARDED_BY(mutex_) = 0;
  bool closed_ GUARDED_BY(mutex_) = false;
};

}  // namespace torchbeast
