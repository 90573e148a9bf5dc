// SPDX-License-Identifier: Apache-2.0
// The queue of rollouts for the learner: nests of arrays in, one joined nest out.

#pragma once

#include <cstdint>
#include <limits>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "libtorchbeast/batching/batching_queue.h"
#include "libtorchbeast/batching/input_check.h"

namespace torchbeast {

// A rollout in the original TorchBeast's structure, and info, which this structure has no place
// for.
struct QueueItem {
  ArrayNest data;
  ArrayNest info;  // an empty vector if there is none
};

struct RolloutQueueOptions {
  std::size_t batch_dim = 1;       // the dimension along which items are joined
  std::int64_t spare_columns = 0;  // uninitialised entries of batch_dim after the items
  bool check_inputs = true;        // reject items without a leaf or a batch dimension
  BatchingQueueOptions queue = {};
};

// A BatchingQueue of nests of arrays that joins each batch along batch_dim.
//
//   enqueue(item) -> check -> [ item item ... ] -> join -> dequeue() -> [ item item ... | spare ]
//
// Spare columns let a consumer add its own data to a batch without copying the batch. Every leaf
// has them, including the leaves of `info`. They are uninitialised, and only the consumer reads or
// writes them.
//
// Thread safety: every method may be called from any number of threads. Joining runs in the
// consumer's thread, without a lock.
// Closing: as for BatchingQueue.
class RolloutQueue {
 public:
  // Throws std::invalid_argument if sizes contradict each other.
  explicit RolloutQueue(RolloutQueueOptions options)
      : options_(checked(options)),
        queue_(options.queue),
        data_check_(options.batch_dim),
        info_check_(options.batch_dim) {}

  // Adds an item; blocks while the queue is full. Throws std::invalid_argument if the item cannot
  // be joined with the others; otherwise ClosedBatchingQueue if the queue is closed. The queue
  // shares the arrays, so the caller must not write to them afterwards.
  void enqueue(QueueItem item) {
    if (options_.check_inputs) {
      check_batchable(item.data, options_.batch_dim);
      check_batch_dimension(item.info, options_.batch_dim);
    }
    data_check_.check(item.data);
    info_check_.check(item.info);
    queue_.enqueue(std::move(item));
  }

  // Removes the next batch; returns nullopt if the queue is closed.
  std::optional<QueueItem> dequeue() {
    auto items = queue_.dequeue_many();
    if (!items) return std::nullopt;
    return QueueItem{joined(*items, &QueueItem::data), joined(*items, &QueueItem::info)};
  }

  std::int64_t size() const { return queue_.size(); }
  bool is_closed() const { return queue_.is_closed(); }
  void close() { queue_.close(); }
  bool try_close() { return queue_.try_close(); }
  const RolloutQueueOptions& options() const { return options_; }

 private:
  // With this limit, sizes in bytes stay within 64 bits; a batch that does not fit into memory
  // throws std::bad_alloc.
  static constexpr std::int64_t kMaxSpareColumns = std::numeric_limits<std::int32_t>::max();

  static const RolloutQueueOptions& checked(const RolloutQueueOptions& options) {
    if (options.spare_columns >= 0 && options.spare_columns <= kMaxSpareColumns) return options;
    throw std::invalid_argument("spare_columns must be between 0 and " +
                                std::to_string(kMaxSpareColumns) + ", got " +
                                std::to_string(options.spare_columns));
  }

  ArrayNest joined(const std::vector<QueueItem>& items, ArrayNest QueueItem::* part) const {
    std::vector<const ArrayNest*> nests;
    nests.reserve(items.size());
    for (const QueueItem& item : items) nests.push_back(&(item.*part));
    return join(std::span<const ArrayNest* const>(nests), options_.batch_dim,
                options_.spare_columns);
  }

  const RolloutQueueOptions options_;
  BatchingQueue<QueueItem> queue_;
  SameAsFirst data_check_;
  SameAsFirst info_check_;
};

}  // namespace torchbeast
