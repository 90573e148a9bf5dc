// SPDX-License-Identifier: Apache-2.0
// Memory for arrays, recycled.
//
// Fresh pages from the operating system cost more than the copy that fills them, and batches have
// the same few sizes for a whole run. So a large buffer goes back to a free list when its last
// owner lets go, and the next array of that size takes it.

#pragma once

#include <cstddef>
#include <cstdlib>
#include <memory>
#include <new>
#include <unordered_map>
#include <vector>

#include "libtorchbeast/sync.h"

namespace torchbeast {

// Free lists by exact size.
//
// Thread safety: every method may be called from any thread.
// Ownership: a buffer belongs to whoever holds its shared_ptr; the pool holds idle ones only, at
// most kMaxIdleBytes of them. The pool is never destroyed: Python may drop arrays at exit.
class BufferPool {
 public:
  static constexpr std::size_t kAlignment = 64;
  static constexpr std::size_t kMinPooledBytes = 4096;
  static constexpr std::size_t kMaxIdleBytes = std::size_t{256} << 20;

  static BufferPool& instance() {
    static BufferPool& pool = *new BufferPool;
    return pool;
  }

  // num_bytes of uninitialised memory, aligned to a cache line. Throws std::bad_alloc.
  std::shared_ptr<std::byte> allocate(std::size_t num_bytes) {
    if (num_bytes < kMinPooledBytes) return small(num_bytes);
    std::byte* data = take_idle(num_bytes);
    if (data == nullptr) data = fresh(num_bytes);
    return {data, [this, num_bytes](std::byte* released) { give_back(released, num_bytes); }};
  }

  std::size_t idle_bytes() {
    MutexLock lock(mutex_);
    return idle_bytes_;
  }

 private:
  static std::shared_ptr<std::byte> small(std::size_t num_bytes) {
    std::size_t space = num_bytes + kAlignment;
    const std::shared_ptr<std::byte[]> bytes = uninitialised(space);
    void* aligned = bytes.get();
    std::align(kAlignment, num_bytes, aligned, space);
    return {bytes, static_cast<std::byte*>(aligned)};
  }

  // Bytes and the count of their owners in one piece, where the standard library can (g++ 12).
  static std::shared_ptr<std::byte[]> uninitialised(std::size_t num_bytes) {
#ifdef __cpp_lib_smart_ptr_for_overwrite
    return std::make_shared_for_overwrite<std::byte[]>(num_bytes);
#else
    return std::shared_ptr<std::byte[]>(new std::byte[num_bytes]);
#endif
  }

  static std::byte* fresh(std::size_t num_bytes) {
    const std::size_t rounded = (num_bytes / kAlignment + 1) * kAlignment;
    void* data = std::aligned_alloc(kAlignment, rounded);
    if (data == nullptr) throw std::bad_alloc();
    return static_cast<std::byte*>(data);
  }

  std::byte* take_idle(std::size_t num_bytes) EXCLUDES(mutex_) {
    MutexLock lock(mutex_);
    const auto found = idle_.find(num_bytes);
    if (found == idle_.end() || found->second.empty()) return nullptr;
    std::byte* data = found->second.back();
    found->second.pop_back();
    idle_bytes_ -= num_bytes;
    return data;
  }

  void give_back(std::byte* data, std::size_t num_bytes) EXCLUDES(mutex_) {
    if (!keep_idle(data, num_bytes)) std::free(data);
  }

  bool keep_idle(std::byte* data, std::size_t num_bytes) EXCLUDES(mutex_) {
    MutexLock lock(mutex_);
    if (idle_bytes_ + num_bytes > kMaxIdleBytes) return false;
    idle_[num_bytes].push_back(data);
    idle_bytes_ += num_bytes;
    return true;
  }

  Mutex mutex_;
  std::unordered_map<std::size_t, std::vector<std::byte*>> idle_ GUARDED_BY(mutex_);
  std::size_t idle_bytes_ GUARDED_BY(mutex_) = 0;
};

}  // namespace torchbeast
