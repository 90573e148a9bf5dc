// SPDX-License-Identifier: Apache-2.0
// The element types of arrays, in memory and on the wire. This is the only list of them.

#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>

namespace torchbeast {

// The values are numpy's type numbers, which are also used on the wire.
enum class DType : std::int32_t {
  kBool = 0,
  kInt8 = 1,
  kUInt8 = 2,
  kInt16 = 3,
  kUInt16 = 4,
  kInt32 = 5,
  kUInt32 = 6,
  kInt64 = 7,
  kUInt64 = 8,
  kFloat32 = 11,
  kFloat64 = 12,
  kFloat16 = 23,
};

struct DTypeInfo {
  DType dtype;
  std::string_view name;  // numpy's and torch's name
  std::size_t item_size;  // bytes
};

inline constexpr std::array<DTypeInfo, 12> kDTypes{{
    {DType::kBool, "bool", 1},
    {DType::kInt8, "int8", 1},
    {DType::kUInt8, "uint8", 1},
    {DType::kInt16, "int16", 2},
    {DType::kUInt16, "uint16", 2},
    {DType::kInt32, "int32", 4},
    {DType::kUInt32, "uint32", 4},
    {DType::kInt64, "int64", 8},
    {DType::kUInt64, "uint64", 8},
    {DType::kFloat32, "float32", 4},
    {DType::kFloat64, "float64", 8},
    {DType::kFloat16, "float16", 2},
}};

inline constexpr const DTypeInfo& info(DType dtype) {
  for (const DTypeInfo& entry : kDTypes) {
    if (entry.dtype == dtype) return entry;
  }
  return kDTypes[0];  // unreachable: every DType comes from the table
}

inline constexpr std::optional<DType> dtype_from_number(std::int64_t number) {
  for (const DTypeInfo& entry : kDTypes) {
    if (static_cast<std::int64_t>(entry.dtype) == number) return entry.dtype;
  }
  return std::nullopt;
}

template <typename T>
inline constexpr DType kDTypeOf = [] {
  static_assert(sizeof(T) == 0, "no dtype for this C++ type");
  return DType::kBool;
}();
template <>
inline constexpr DType kDTypeOf<bool> = DType::kBool;
template <>
inline constexpr DType kDTypeOf<std::uint8_t> = DType::kUInt8;
template <>
inline constexpr DType kDTypeOf<std::int32_t> = DType::kInt32;
template <>
inline constexpr DType kDTypeOf<std::int64_t> = DType::kInt64;
template <>
inline constexpr DType kDTypeOf<float> = DType::kFloat32;

}  // namespace torchbeast
