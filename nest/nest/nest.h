// SPDX-License-Identifier: Apache-2.0
//
// Nested structures: a Nest<T> is a leaf of type T, or a vector of nests, or a map from strings to
// nests.
//
//   Nest<int> n(Nest<int>::Map{{"obs", Nest<int>::Vector{1, 2}}, {"reward", 3}});
//
//   {obs: (1, 2), reward: 3}   --flatten-->   [1, 2, 3]   --pack_as-->   {obs: (1, 2), reward: 3}
//
// Traversal is depth first, maps in sorted key order. Functions have the same names and order of
// arguments as in Python. The header needs only the standard library.
//
// Depth: at most kMaxDepth vectors and maps may enclose any place in a nest. Path enforces this, so
// every function below that walks a nest, and every reader of foreign data that keeps a Path,
// throws NestError instead of overflowing the stack.
//
// Thread safety: as for a standard container of T.

#pragma once

#include <algorithm>
#include <cstddef>
#include <iterator>
#include <map>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

namespace nest {

// The maximum number of vectors and maps that enclose a place in a nest.
inline constexpr std::size_t kMaxDepth = 256;

// A nest is too deep, is not of the requested kind, or does not match another.
class NestError : public std::invalid_argument {
 public:
  using std::invalid_argument::invalid_argument;
};

// A place in a nest, kept as a linked list on the stack of a recursive function and printed only in
// error messages:
//
//   Path root;  Path obs(root, "obs");  Path second(obs, 1);   second.str() == "['obs'][1]"
//
// A Path refers to its parent and to its key: both must outlive it.
class Path {
 public:
  Path() = default;
  Path(const Path& parent, std::size_t index) : Path(&parent, index, {}, false) {}
  Path(const Path& parent, std::string_view key) : Path(&parent, 0, key, true) {}
  Path(const Path&) = delete;
  Path& operator=(const Path&) = delete;

  std::size_t depth() const { return depth_; }

  // Formats the path: "['obs'][1]", or "the root". A long path is shortened.
  std::string str() const {
    if (depth_ == 0) return "the root";
    if (depth_ > kPrintedDepth + 1) return parent_->str();
    if (depth_ > kPrintedDepth) return parent_->str() + "...";
    return (depth_ == 1 ? "" : parent_->str()) + entry();
  }

 private:
  static constexpr std::size_t kPrintedDepth = 16;

  Path(const Path* parent, std::size_t index, std::string_view key, bool is_key)
      : parent_(parent), depth_(parent->depth_ + 1), index_(index), key_(key), is_key_(is_key) {
    if (depth_ > kMaxDepth) throw_too_deep();
  }

  std::string entry() const {
    return is_key_ ? "['" + std::string(key_) + "']" : "[" + std::to_string(index_) + "]";
  }

  [[noreturn]] void throw_too_deep() const {
    throw NestError("Expected a nest of at most " + std::to_string(kMaxDepth) +
                    " levels but got a deeper one, or one that contains itself, at " + str());
  }

  const Path* parent_ = nullptr;
  std::size_t depth_ = 0;
  std::size_t index_ = 0;
  std::string_view key_;
  bool is_key_ = false;
};

template <typename T>
class Nest {
 public:
  using Leaf = T;
  using Vector = std::vector<Nest>;
  using Map = std::map<std::string, Nest, std::less<>>;

  Nest() = default;  // The empty vector.
  Nest(T leaf) : value_(std::in_place_type<T>, std::move(leaf)) {}
  Nest(Vector vector) : value_(std::in_place_type<Vector>, std::move(vector)) {}
  Nest(Map map) : value_(std::in_place_type<Map>, std::move(map)) {}

  bool is_leaf() const { return std::holds_alternative<T>(value_); }
  bool is_vector() const { return std::holds_alternative<Vector>(value_); }
  bool is_map() const { return std::holds_alternative<Map>(value_); }

  // Throw NestError if the nest is of another kind.
  const T& as_leaf() const { return get<T>(*this, "leaf"); }
  const Vector& as_vector() const { return get<Vector>(*this, "vector"); }
  const Map& as_map() const { return get<Map>(*this, "map"); }
  T& as_leaf() { return get<T>(*this, "leaf"); }
  Vector& as_vector() { return get<Vector>(*this, "vector"); }
  Map& as_map() { return get<Map>(*this, "map"); }

  // Describes the outermost level for error messages: "leaf", "vector of length 2", "map with keys
  // 'a', 'b'".
  std::string describe() const {
    if (is_leaf()) return "leaf";
    if (is_vector()) return "vector of length " + std::to_string(as_vector().size());
    return as_map().empty() ? "map without keys" : "map with keys " + quoted_keys();
  }

  friend bool operator==(const Nest& a, const Nest& b) { return a.value_ == b.value_; }

 private:
  template <typename Kind, typename Self>
  static auto& get(Self& self, const char* expected) {
    if (auto* value = std::get_if<Kind>(&self.value_)) return *value;
    throw NestError(std::string("Expected a ") + expected + " but the nest is a " +
                    self.describe());
  }

  std::string quoted_keys() const {
    std::string keys;
    for (const auto& entry : as_map()) keys += (keys.empty() ? "'" : ", '") + entry.first + "'";
    return keys;
  }

  std::variant<Vector, Map, T> value_;
};

namespace internal {

[[noreturn]] inline void throw_difference(const std::string& text, const Path& path,
                                          const std::string& a, const std::string& b) {
  throw NestError(text + " at " + path.str() + ": " + a + " vs " + b);
}

inline std::string sizes(std::size_t a, std::size_t b) {
  return std::to_string(a) + " vs " + std::to_string(b);
}

// Describes the first difference between two maps' keys; returns "" if there is none.
template <typename MapA, typename MapB>
std::string key_difference(const MapA& a, const MapB& b) {
  if (a.size() != b.size())
    return "Expected maps of same length but got " + sizes(a.size(), b.size());
  const auto [in_a, in_b] =
      std::mismatch(a.begin(), a.end(), b.begin(),
                    [](const auto& x, const auto& y) { return x.first == y.first; });
  if (in_a == a.end()) return "";
  return "Expected maps to have same keys but found '" + in_a->first + "' vs '" + in_b->first + "'";
}

// Describes the difference between the outermost levels of two nests; returns "" if there is none.
template <typename A, typename B>
std::string node_difference(const Nest<A>& a, const Nest<B>& b) {
  if (a.is_leaf() && b.is_leaf()) return "";
  if (a.is_map() && b.is_map()) return key_difference(a.as_map(), b.as_map());
  if (!a.is_vector() || !b.is_vector()) return "nests don't match";
  const std::size_t size_a = a.as_vector().size(), size_b = b.as_vector().size();
  return size_a == size_b ? "" : "Expected vectors of same length but got " + sizes(size_a, size_b);
}

template <typename A, typename B>
void check_node(const Path& path, const Nest<A>& a, const Nest<B>& b) {
  const std::string difference = node_difference(a, b);
  if (!difference.empty()) throw_difference(difference, path, a.describe(), b.describe());
}

// Calls f(path, leaf, leaves...) for the corresponding leaves of nests of equal structure. Throws
// NestError if the structures differ. All functions that visit leaves use it.
template <typename F, typename N, typename... Ns>
void walk(F& f, const Path& path, N& nest, Ns&... others) {
  (check_node(path, nest, others), ...);
  if (nest.is_leaf()) {
    f(path, nest.as_leaf(), others.as_leaf()...);
  } else if (nest.is_vector()) {
    for (std::size_t i = 0; i < nest.as_vector().size(); ++i)
      walk(f, Path(path, i), nest.as_vector()[i], others.as_vector()[i]...);
  } else {
    for (auto& [key, child] : nest.as_map())
      walk(f, Path(path, key), child, others.as_map().find(key)->second...);
  }
}

// Returns a nest of the same structure, with f(path, leaf) for each leaf. All functions that make
// nests use it.
template <typename R, typename F, typename T>
Nest<R> build(F& f, const Path& path, const Nest<T>& nest) {
  if (nest.is_leaf()) return Nest<R>(R(f(path, nest.as_leaf())));
  if (nest.is_vector()) {
    typename Nest<R>::Vector vector;
    vector.reserve(nest.as_vector().size());
    for (const auto& child : nest.as_vector())
      vector.push_back(build<R>(f, Path(path, vector.size()), child));
    return vector;
  }
  typename Nest<R>::Map map;
  for (const auto& [key, child] : nest.as_map())
    map.emplace_hint(map.end(), key, build<R>(f, Path(path, key), child));
  return map;
}

}  // namespace internal

// Calls f(path, leaf) for each leaf. With a nest that is not const, f may change the leaves.
template <typename F, typename N>
void for_each_with_path(F&& f, N&& nest) {
  internal::walk(f, Path(), nest);
}

// Calls f(leaf) for each leaf. With a nest that is not const, f may change the leaves.
template <typename F, typename N>
void for_each(F&& f, N&& nest) {
  for_each_with_path([&f](const Path&, auto& leaf) { f(leaf); }, nest);
}

// Throws NestError, stating both sides and their path, if the structures (kinds, lengths, keys)
// differ. Leaves are not compared.
template <typename A, typename B>
void check_same_structure(const Nest<A>& a, const Nest<B>& b) {
  auto ignore = [](const Path&, const A&, const B&) {};
  internal::walk(ignore, Path(), a, b);
}

// Returns whether two nests have equal structure.
template <typename A, typename B>
bool same_structure(const Nest<A>& a, const Nest<B>& b) {
  try {
    check_same_structure(a, b);
  } catch (const NestError&) {
    return false;
  }
  return true;
}

// Calls f(path, leaf_a, leaf_b) for the corresponding leaves. Throws as check_same_structure does,
// before the first call of f.
template <typename F, typename A, typename B>
void for_each2_with_path(F&& f, A&& a, B&& b) {
  check_same_structure(a, b);
  internal::walk(f, Path(), a, b);
}

// Calls f(leaf_a, leaf_b) for the corresponding leaves. Throws as check_same_structure does, before
// the first call of f.
template <typename F, typename A, typename B>
void for_each2(F&& f, A&& a, B&& b) {
  for_each2_with_path([&f](const Path&, auto& leaf_a, auto& leaf_b) { f(leaf_a, leaf_b); }, a, b);
}

// Returns the leaves in traversal order.
template <typename T>
std::vector<T> flatten(const Nest<T>& nest) {
  std::vector<T> leaves;
  for_each([&leaves](const T& leaf) { leaves.push_back(leaf); }, nest);
  return leaves;
}

// Returns the first leaf in traversal order, or nullptr if there is none.
template <typename T>
const T* find_front(const Nest<T>& nest) {
  const T* front = nullptr;
  for_each([&front](const T& leaf) { front = front == nullptr ? &leaf : front; }, nest);
  return front;
}

// Returns whether the nest does not have any leaf.
template <typename T>
bool empty(const Nest<T>& nest) {
  return find_front(nest) == nullptr;
}

// Returns the first leaf in traversal order. Throws NestError if there is none.
template <typename T>
const T& front(const Nest<T>& nest) {
  if (const T* leaf = find_front(nest)) return *leaf;
  throw NestError("Expected a nest with at least one leaf but got an empty " + nest.describe());
}

// Returns a nest of the same structure, with f(path, leaf) for each leaf.
template <typename F, typename T>
auto map_with_path(F&& f, const Nest<T>& nest) {
  using R = std::remove_cvref_t<std::invoke_result_t<F&, const Path&, const T&>>;
  return internal::build<R>(f, Path(), nest);
}

// Returns a nest of the same structure, with f(leaf) for each leaf.
template <typename F, typename T>
auto map(F&& f, const Nest<T>& nest) {
  return map_with_path([&f](const Path&, const T& leaf) { return f(leaf); }, nest);
}

// Returns a nest of the same structure, with f(leaf_a, leaf_b) for each pair of corresponding
// leaves. Throws as check_same_structure does, before the first call of f.
template <typename F, typename A, typename B>
auto map2(F&& f, const Nest<A>& a, const Nest<B>& b) {
  check_same_structure(a, b);
  std::vector<const B*> leaves;
  for_each([&leaves](const B& leaf) { leaves.push_back(&leaf); }, b);
  auto next = leaves.begin();
  return map([&f, &next](const A& leaf) { return f(leaf, **next++); }, a);
}

// Returns a nest of the same structure, with f({leaf of nests[0], leaf of nests[1], ...}) for each
// place. Throws NestError if there is no nest, or if one differs from the first; before the first
// call of f.
template <typename F, typename T>
auto map_many(F&& f, const std::vector<Nest<T>>& nests) {
  if (nests.empty()) throw NestError("Expected at least one nest.");
  auto columns = map([](const T&) { return std::vector<T>(); }, nests.front());
  for (const auto& nest : nests)
    for_each2([](auto& column, const T& leaf) { column.push_back(leaf); }, columns, nest);
  return map([&f](const std::vector<T>& column) { return f(column); }, columns);
}

// Returns a nest of the same structure with the elements of a sequence as leaves, in traversal
// order. Throws NestError if their numbers differ.
template <typename T, typename Sequence>
auto pack_as(const Nest<T>& nest, const Sequence& sequence) {
  std::size_t wanted = 0;
  for_each([&wanted](const T&) { ++wanted; }, nest);
  const std::size_t given = std::size(sequence);
  const std::string both =
      ": expected " + std::to_string(wanted) + " but got " + std::to_string(given);
  if (given < wanted) throw NestError("Too few elements in sequence" + both);
  if (given > wanted) throw NestError("Nest didn't exhaust sequence" + both);
  auto next = std::begin(sequence);
  return map([&next](const T&) { return *next++; }, nest);
}

}  // namespace nest
