// SPDX-License-Identifier: Apache-2.0
// Batches the computations of many callers; each gets its slice of the outputs.

#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "libtorchbeast/batching/batching_queue.h"
#include "libtorchbeast/batching/input_check.h"
#include "libtorchbeast/support/finally.h"

namespace torchbeast {

struct DynamicBatcherOptions {
  std::size_t batch_dim = 1;  // of inputs and outputs
  bool check_outputs = true;  // compare the outputs' batch size with the inputs'
  BatchingQueueOptions queue = {.timeout = std::chrono::milliseconds(100)};
  std::chrono::milliseconds compute_timeout = std::chrono::minutes(10);  // of one compute()
};

// The outputs for a batch, or for one caller.
struct Answer {
  ArrayNest outputs;
  std::int64_t version = 0;  // version of the weights that computed them
};

// The place where one caller waits for its slice of a batch's outputs.
//
// Thread safety: one thread calls wait(). Any thread may call fulfil() or abandon(); the first of
// these calls counts.
class PendingReply {
 public:
  // Returns the caller's slice. Throws AsyncError if the batch was dropped, ClosedBatchingQueue if
  // it was dropped because the batcher was closed, TimeoutError after `timeout`.
  Answer wait(std::chrono::milliseconds timeout, std::size_t batch_dim) EXCLUDES(mutex_) {
    wait_until_settled(Clock::now() + timeout);
    MutexLock lock(mutex_);
    if (answer_) return {narrow(answer_->outputs, batch_dim, start_, length_), answer_->version};
    if (closed_) throw ClosedBatchingQueue("Batching queue closed during compute");
    throw AsyncError(
        "The associated promise has been destructed prior to the associated state becoming "
        "ready.");
  }

  void fulfil(std::shared_ptr<const Answer> answer, std::int64_t start, std::int64_t length)
      EXCLUDES(mutex_) {
    {
      MutexLock lock(mutex_);
      if (settled_) return;  // cancelled
      answer_ = std::move(answer);
      start_ = start;
      length_ = length;
      settled_ = true;
    }
    became_settled_.notify_one();
  }

  void abandon(bool closed) EXCLUDES(mutex_) {
    MutexLock lock(mutex_);
    if (settled_) return;
    closed_ = closed;
    settled_ = true;
    became_settled_.notify_one();
  }

 private:
  void wait_until_settled(Clock::time_point deadline) EXCLUDES(mutex_) {
    MutexLock lock(mutex_);
    while (!settled_) {
      if (!became_settled_.wait_until(mutex_, deadline) && !settled_) {
        throw TimeoutError("Compute timeout reached.");
      }
    }
  }

  Mutex mutex_;
  CondVar became_settled_;
  bool settled_ GUARDED_BY(mutex_) = false;
  bool closed_ GUARDED_BY(mutex_) = false;
  std::shared_ptr<const Answer> answer_ GUARDED_BY(mutex_);
  std::int64_t start_ GUARDED_BY(mutex_) = 0;
  std::int64_t length_ GUARDED_BY(mutex_) = 0;
};

// One caller's inputs on their way into a batch. If it is dropped without an answer, its caller
// gets an exception.
class Computation {
 public:
  Computation(ArrayNest inputs, std::int64_t length, std::shared_ptr<PendingReply> reply,
              std::shared_ptr<const std::atomic<bool>> closed)
      : inputs_(std::move(inputs)),
        length_(length),
        reply_(std::move(reply)),
        closed_(std::move(closed)) {}
  ~Computation() {
    if (reply_) reply_->abandon(*closed_);
  }
  Computation(Computation&&) = default;
  Computation& operator=(Computation&&) = default;

  const ArrayNest& inputs() const { return inputs_; }
  std::int64_t length() const { return length_; }
  void fulfil(const std::shared_ptr<const Answer>& answer, std::int64_t start) {
    reply_->fulfil(answer, start, length_);
  }

 private:
  ArrayNest inputs_;
  std::int64_t length_;  // size in the batch dimension
  std::shared_ptr<PendingReply> reply_;
  std::shared_ptr<const std::atomic<bool>> closed_;
};

// The joined inputs of several callers, to be answered once with set_outputs().
//
// Thread safety: one thread at a time.
// Destruction: if the batch was not answered, every caller gets AsyncError, or ClosedBatchingQueue
// if the batcher is closed.
class Batch {
 public:
  Batch(std::vector<Computation> computations, std::size_t batch_dim, bool check_outputs)
      : computations_(std::move(computations)),
        batch_dim_(batch_dim),
        check_outputs_(check_outputs) {
    std::vector<const ArrayNest*> nests;
    for (const Computation& computation : computations_) {
      nests.push_back(&computation.inputs());
      size_ += computation.length();
    }
    inputs_ = join(std::span<const ArrayNest* const>(nests), batch_dim_);
    // The receiver of the batch may write to the inputs. Joining the inputs of several callers has
    // copied them, but the inputs of a single caller still belong to the caller.
    if (nests.size() == 1)
      inputs_ = nest::map([](const Array& leaf) { return leaf.clone(); }, inputs_);
  }

  const ArrayNest& get_inputs() const { return inputs_; }
  std::int64_t size() const { return size_; }

  // Gives every caller its slice. Throws std::invalid_argument if an output has the wrong shape;
  // the batch can still be answered then. Throws std::runtime_error if the batch was answered
  // already.
  void set_outputs(ArrayNest outputs, std::int64_t version) {
    if (answered_) throw std::runtime_error("set_outputs called twice");
    if (check_outputs_) check(outputs);
    answered_ = true;
    const auto answer = std::make_shared<const Answer>(Answer{std::move(outputs), version});
    std::int64_t start = 0;
    for (Computation& computation : computations_) {
      computation.fulfil(answer, start);
      start += computation.length();
    }
  }

 private:
  void check(const ArrayNest& outputs) const {
    nest::for_each(
        [&](const Array& output) {
          if (output.ndim() <= batch_dim_) {
            throw std::invalid_argument("With batch dimension " + std::to_string(batch_dim_) +
                                        ", output shape must have at least " +
                                        std::to_string(batch_dim_ + 1) + " dimensions, but got " +
                                        to_string(output.shape()));
          }
          if (output.size(batch_dim_) != size_) {
            throw std::invalid_argument(
                "Output shape must have the same batch dimension as the input batch size. "
                "Expected: " +
                std::to_string(size_) + ". Observed: " + std::to_string(output.size(batch_dim_)));
          }
        },
        outputs);
  }

  std::vector<Computation> computations_;
  const std::size_t batch_dim_;
  const bool check_outputs_;
  ArrayNest inputs_;
  std::int64_t size_ = 0;
  bool answered_ = false;
};

// Joins the inputs of many callers into batches and gives each its slice of the outputs.
//
//   compute() \                                       / next() -> Batch: get_inputs()
//   compute() -> [ inputs inputs ... ] -> join  ->   |
//   compute() /   <- slice of the outputs  <-         \              set_outputs()
//
// Thread safety: every method may be called from any number of threads. Joining runs in the thread
// that calls next(), slicing in the caller's thread.
// Closing: close() ends next() and every compute() whose inputs are not in a batch yet. A batch
// that was handed out earlier can still be answered; if it is dropped, its callers get
// ClosedBatchingQueue. cancel() ends their compute() immediately.
class DynamicBatcher {
 public:
  explicit DynamicBatcher(DynamicBatcherOptions options)
      : options_(options), queue_(options.queue), same_as_first_(options.batch_dim) {}

  // Blocks until the batch that contains the inputs is answered. Throws std::invalid_argument if
  // the inputs cannot be joined with the first ones, ClosedBatchingQueue if the batcher is closed,
  // AsyncError if the batch was dropped, and TimeoutError after compute_timeout. Nobody may write
  // to the inputs meanwhile.
  Answer compute(ArrayNest inputs) {
    const std::int64_t length = check_inputs(inputs);
    auto reply = std::make_shared<PendingReply>();
    {
      MutexLock lock(waiting_mutex_);
      waiting_.insert(reply.get());
    }
    const Finally forget([&] {
      MutexLock lock(waiting_mutex_);
      waiting_.erase(reply.get());
    });
    queue_.enqueue(Computation(std::move(inputs), length, reply, closed_));
    return reply->wait(options_.compute_timeout, options_.batch_dim);
  }

  // Registers, for the scope of the result, a thread that calls compute() repeatedly, so that
  // batches are held back for it for a moment.
  [[nodiscard]] BatchingQueue<Computation>::Regular caller() {
    return BatchingQueue<Computation>::Regular(&queue_);
  }

  // Blocks until there is a batch; returns null if the batcher is closed.
  std::unique_ptr<Batch> next() {
    auto computations = queue_.dequeue_many();
    if (!computations) return nullptr;
    return std::make_unique<Batch>(std::move(*computations), options_.batch_dim,
                                   options_.check_outputs);
  }

  std::int64_t size() const { return queue_.size(); }
  bool is_closed() const { return queue_.is_closed(); }
  // Closes the batcher. Throws std::runtime_error if it was closed already.
  void close() {
    if (!try_close()) throw std::runtime_error("Queue was closed already");
  }
  // Closes the batcher. Returns false if it was closed already.
  bool try_close() {
    closed_->store(true);  // before items are dropped, so that their callers learn why
    return queue_.try_close();
  }
  // Closes the batcher and ends every compute(), even for batches that were handed out.
  void cancel() EXCLUDES(waiting_mutex_) {
    try_close();
    MutexLock lock(waiting_mutex_);
    for (PendingReply* reply : waiting_) reply->abandon(true);
  }
  const DynamicBatcherOptions& options() const { return options_; }

 private:
  // Returns the inputs' common size in the batch dimension.
  std::int64_t check_inputs(const ArrayNest& inputs) {
    check_batchable(inputs, options_.batch_dim);
    const std::int64_t length = nest::front(inputs).size(options_.batch_dim);
    nest::for_each(
        [&](const Array& input) {
          if (input.size(options_.batch_dim) != length) {
            throw std::invalid_argument(
                "all inputs of one compute() need the same size in dimension " +
                std::to_string(options_.batch_dim) + ": expected " + std::to_string(length) +
                ", got " + std::to_string(input.size(options_.batch_dim)));
          }
        },
        inputs);
    same_as_first_.check(inputs);
    return length;
  }

  const DynamicBatcherOptions options_;
  std::shared_ptr<std::atomic<bool>> closed_ = std::make_shared<std::atomic<bool>>(false);
  BatchingQueue<Computation> queue_;
  SameAsFirst same_as_first_;
  Mutex waiting_mutex_;
  std::set<PendingReply*> waiting_ GUARDED_BY(waiting_mutex_);  // that cancel() ends
};

}  // namespace torchbeast
