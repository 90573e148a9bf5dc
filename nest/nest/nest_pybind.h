// SPDX-License-Identifier: Apache-2.0
//
// Converts Python objects to and from Nest<T>.
//
//   Python                                   C++                        Python
//   tuple, list and their subclasses    ->   vector                ->   tuple
//   dict and its subclasses             ->   map (keys: strings)   ->   dict, keys sorted
//   anything else                       ->   leaf                  ->   the leaf
//
// Every function needs the GIL, and so does copying or destroying a Nest<py::object>.

#pragma once

#include <pybind11/pybind11.h>

#include <string>
#include <string_view>
#include <utility>

#include "nest/nest.h"

namespace nest {

namespace internal {

// `key` owns a reference, which keeps it alive while its __repr__ runs arbitrary code.
[[noreturn]] inline void throw_bad_key(const pybind11::object& key, const Path& path) {
  throw pybind11::type_error("Expected maps with keys of type str but found " +
                             pybind11::repr(key).cast<std::string>() + " of type " +
                             Py_TYPE(key.ptr())->tp_name + " at " + path.str());
}

// Returns a map key's UTF-8 text. The view lives as long as the key.
inline std::string_view key_from_python(pybind11::handle key, const Path& path) {
  if (!PyUnicode_Check(key.ptr()))
    throw_bad_key(pybind11::reinterpret_borrow<pybind11::object>(key), path);
  Py_ssize_t size = 0;
  const char* text = PyUnicode_AsUTF8AndSize(key.ptr(), &size);
  if (text == nullptr) throw pybind11::error_already_set();
  return {text, static_cast<std::size_t>(size)};
}

inline Nest<pybind11::object> from_python(pybind11::handle source, const Path& path);

inline Nest<pybind11::object> vector_from_python(pybind11::handle source, const Path& path) {
  Nest<pybind11::object>::Vector vector;
  const auto size = static_cast<std::size_t>(PySequence_Fast_GET_SIZE(source.ptr()));
  vector.reserve(size);
  for (std::size_t i = 0; i < size; ++i) {
    PyObject* item = PySequence_Fast_GET_ITEM(source.ptr(), static_cast<Py_ssize_t>(i));
    vector.push_back(from_python(item, Path(path, i)));
  }
  return vector;
}

inline Nest<pybind11::object> map_from_python(pybind11::handle source, const Path& path) {
  Nest<pybind11::object>::Map map;
  PyObject* key = nullptr;
  PyObject* value = nullptr;
  for (Py_ssize_t position = 0; PyDict_Next(source.ptr(), &position, &key, &value) != 0;) {
    const std::string_view name = key_from_python(key, path);
    map.emplace(name, from_python(value, Path(path, name)));
  }
  return map;
}

// Runs no Python code before it throws, so no list or dict can change while it is read.
inline Nest<pybind11::object> from_python(pybind11::handle source, const Path& path) {
  if (PyTuple_Check(source.ptr()) || PyList_Check(source.ptr()))
    return vector_from_python(source, path);
  if (PyDict_Check(source.ptr())) return map_from_python(source, path);
  return pybind11::reinterpret_borrow<pybind11::object>(source);
}

}  // namespace internal

// Converts a Python object to a nest. Throws NestError if it is deeper than kMaxDepth or contains
// itself, pybind11::type_error (TypeError in Python) for a key that is not a string.
inline Nest<pybind11::object> from_python(pybind11::handle source) {
  return internal::from_python(source, Path());
}

// As above, with leaf(object) -> T for each leaf.
template <typename T, typename F>
Nest<T> from_python(pybind11::handle source, F&& leaf) {
  return map([&leaf](const pybind11::object& object) -> T { return leaf(object); },
             from_python(source));
}

// Converts a nest to a Python object.
inline pybind11::object to_python(const Nest<pybind11::object>& nest) {
  if (nest.is_leaf()) return nest.as_leaf();
  if (nest.is_vector()) {
    pybind11::tuple result(nest.as_vector().size());
    for (std::size_t i = 0; i < result.size(); ++i) result[i] = to_python(nest.as_vector()[i]);
    return result;
  }
  pybind11::dict result;
  for (const auto& [key, child] : nest.as_map()) result[pybind11::str(key)] = to_python(child);
  return result;
}

// As above, with leaf(T) -> object for each leaf.
template <typename T, typename F>
pybind11::object to_python(const Nest<T>& nest, F&& leaf) {
  return to_python(map([&leaf](const T& value) -> pybind11::object { return leaf(value); }, nest));
}

}  // namespace nest
