// SPDX-License-Identifier: Apache-2.0
// Recycled memory for arrays.
//
// New pages from the operating system cost more than the copy that fills them, and at any time
// batches have few different sizes. So when its last owner releases a large buffer, the buffer
// returns to a free list, and the next array of about that size reuses it.

#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>
#include <unordered_map>
#include <vector>

#include "libtorchbeast/support/sync.h"

namespace torchbeast {

// Free lists by size class. Sizes are rounded up by at most 12.5%, so there are few classes, and
// batches of nearly equal size share one; those above kHugeBytes by at most 25%, because batches
// for inference differ in size.
//
// Thread safety: every method may be called from any thread.
// Ownership: a buffer belongs to the holders of its shared_ptr; the pool owns only idle buffers. It
// keeps a returning buffer as long as the idle buffers have at most max_idle_bytes more than the
// buffers in use: if two batches are used in turn, one of them is idle, however large they are.
// Before it allocates new memory, it frees the idle buffers whose size was not requested within
// `stale_after`: memory does not grow while it holds what nobody asks for. instance() is never
// destroyed, because Python may release arrays at exit.
class BufferPool {
 public:
  static constexpr std::size_t kAlignment = 64;
  static constexpr std::size_t kMinPooledBytes = 4096;
  static constexpr std::size_t kHugeBytes = std::size_t{1} << 20;
  static constexpr std::size_t kMaxIdleBytes = std::size_t{256} << 20;
  static constexpr Clock::duration kStaleAfter = std::chrono::seconds(30);

  explicit BufferPool(std::size_t max_idle_bytes = kMaxIdleBytes,
                      Clock::duration stale_after = kStaleAfter)
      : max_idle_bytes_(max_idle_bytes), stale_after_(stale_after) {}

  // Nobody may still hold a buffer of this pool. instance() is never destroyed.
  ~BufferPool() {
    for (auto& [size, idle] : idle_) {
      for (std::byte* buffer : idle.buffers) std::free(buffer);
    }
  }
  BufferPool(const BufferPool&) = delete;
  BufferPool& operator=(const BufferPool&) = delete;

  static BufferPool& instance() {
    static BufferPool& pool = *new BufferPool;
    return pool;
  }

  // Returns num_bytes of uninitialised memory, aligned to a cache line. Throws std::bad_alloc.
  std::shared_ptr<std::byte> allocate(std::size_t num_bytes) {
    if (num_bytes > PTRDIFF_MAX) throw std::bad_alloc();
    if (num_bytes < kMinPooledBytes || retired_) return small(num_bytes);
    const std::size_t size = rounded(num_bytes);
    std::byte* data = take_idle(size);
    if (data == nullptr) {
      while (std::byte* stale = take_stale()) std::free(stale);
      data = fresh(size);
    }
    in_use_bytes_ += size;
    return {data, [this, size](std::byte* released) { give_back(released, size); }};
  }

  std::size_t idle_bytes() {
    MutexLock lock(mutex_);
    return idle_bytes_;
  }

  // Stops recycling and locking. For the child of a fork(), in which the lock may be held by a
  // thread that no longer exists.
  void retire() { retired_ = true; }

 private:
  static std::shared_ptr<std::byte> small(std::size_t num_bytes) {
    std::size_t space = num_bytes + kAlignment;
    const std::shared_ptr<std::byte[]> bytes = uninitialised(space);
    void* aligned = bytes.get();
    std::align(kAlignment, num_bytes, aligned, space);
    return {bytes, static_cast<std::byte*>(aligned)};
  }

  // Allocates bytes and reference count together, if the standard library can (g++ 12).
  static std::shared_ptr<std::byte[]> uninitialised(std::size_t num_bytes) {
#ifdef __cpp_lib_smart_ptr_for_overwrite
    return std::make_shared_for_overwrite<std::byte[]>(num_bytes);
#else
    return std::shared_ptr<std::byte[]>(new std::byte[num_bytes]);
#endif
  }

  // Returns the size of the class: the four highest bits are kept, three of a huge size, and the
  // rest is rounded up.
  static std::size_t rounded(std::size_t num_bytes) {
    const std::size_t steps = num_bytes < kHugeBytes ? 16 : 8;
    std::size_t step = kMinPooledBytes / 8;
    while (num_bytes / step >= steps) step *= 2;
    return (num_bytes + step - 1) / step * step;
  }

  // Allocates new memory. `size` must be a multiple of kAlignment.
  static std::byte* fresh(std::size_t size) {
    void* data = std::aligned_alloc(kAlignment, size);
    if (data == nullptr) throw std::bad_alloc();
    return static_cast<std::byte*>(data);
  }

  std::byte* take_idle(std::size_t size) EXCLUDES(mutex_) {
    MutexLock lock(mutex_);
    SizeClass& found = idle_[size];
    found.asked_for = Clock::now();
    return found.buffers.empty() ? nullptr : take(found, size);
  }

  // The deleter of a shared_ptr, which must not throw.
  void give_back(std::byte* data, std::size_t size) noexcept EXCLUDES(mutex_) {
    in_use_bytes_ -= size;
    bool kept = false;
    try {
      kept = !retired_ && keep_idle(data, size);
    } catch (const std::bad_alloc&) {  // the list could not grow
    }
    if (!kept) std::free(data);
  }

  // Returns false if there is no room for the buffer.
  bool keep_idle(std::byte* data, std::size_t size) EXCLUDES(mutex_) {
    MutexLock lock(mutex_);
    if (idle_bytes_ + size > max_idle_bytes_ + in_use_bytes_) return false;
    idle_[size].buffers.push_back(data);
    idle_bytes_ += size;
    return true;
  }

  // Returns an idle buffer of a size that was not requested lately, or nullptr.
  std::byte* take_stale() EXCLUDES(mutex_) {
    MutexLock lock(mutex_);
    const Clock::time_point now = Clock::now();
    for (auto& [size, idle] : idle_) {
      if (!idle.buffers.empty() && now - idle.asked_for >= stale_after_) return take(idle, size);
    }
    return nullptr;
  }

  struct SizeClass {
    std::vector<std::byte*> buffers = {};
    Clock::time_point asked_for = {};
  };

  std::byte* take(SizeClass& from, std::size_t size) REQUIRES(mutex_) {
    std::byte* data = from.buffers.back();
    from.buffers.pop_back();
    idle_bytes_ -= size;
    return data;
  }

  const std::size_t max_idle_bytes_;
  const Clock::duration stale_after_;
  std::atomic<bool> retired_ = false;
  std::atomic<std::size_t> in_use_bytes_ = 0;
  Mutex mutex_;
  std::unordered_map<std::size_t, SizeClass> idle_ GUARDED_BY(mutex_);  // by rounded size
  std::size_t idle_bytes_ GUARDED_BY(mutex_) = 0;
};

}  // namespace torchbeast
