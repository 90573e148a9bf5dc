// SPDX-License-Identifier: Apache-2.0
//
// The Python module `nest`. Its docstrings are doctests.

#include "nest/nest_pybind.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>
#include <vector>

#include "nest/nest.h"

namespace py = pybind11;

namespace {

using PyNest = nest::Nest<py::object>;

constexpr const char* kModuleDoc = R"(Nested structures.

A *nest* is a tuple or list (a vector), or a dict with string keys (a map), or
anything else (a leaf). Subclasses count: a namedtuple is a vector. Vectors come
back as plain tuples, maps as plain dicts with sorted keys, leaves as themselves.

Leaves are visited depth first, maps in sorted key order:

>>> import nest
>>> nest.flatten({"reward": 3, "obs": [1, (2,)]})
[1, 2, 3]

A nest deeper than MAX_DEPTH, or one that contains itself, is a ValueError. A key
that is not a string is a TypeError. An exception from a callback passes through
unchanged.
)";

constexpr const char* kFlattenDoc = R"(Returns the list of leaves.

>>> import nest
>>> nest.flatten(((1, 2), {"b": 4, "a": 3}))
[1, 2, 3, 4]
>>> nest.flatten(None)
[None]
>>> nest.flatten(())
[]
)";

constexpr const char* kFrontDoc = R"(Returns the first leaf. A nest without leaves is a ValueError.

>>> import nest
>>> nest.front({"b": 2, "a": ((), 1)})
1
)";

constexpr const char* kMapDoc = R"(Returns the same structure with f(leaf) for each leaf.

>>> import nest
>>> nest.map(str, {"b": [1, 2], "a": 3})
{'a': '3', 'b': ('1', '2')}
)";

constexpr const char* kMapManyDoc =
    R"(Returns the same structure with f([leaf of each nest]) for each place.

The nests must have equal structure, else ValueError before any call of f.

>>> import nest
>>> nest.map_many(sum, (1, {"a": 2}), (10, {"a": 20}), (100, {"a": 200}))
(111, {'a': 222})
)";

constexpr const char* kMapMany2Doc =
    R"(Returns the same structure with f(leaf_a, leaf_b) for each pair of leaves.

The nests must have equal structure, else ValueError before any call of f.

>>> import nest
>>> nest.map_many2(lambda x, y: x + y, (1, {"a": 2}), (10, {"a": 20}))
(11, {'a': 22})
>>> nest.map_many2(max, {"a": 1}, {"a": ()})
Traceback (most recent call last):
...
ValueError: nests don't match at ['a']: leaf vs vector of length 0
)";

constexpr const char* kPackAsDoc =
    R"(Returns the structure of a nest with the elements of a sequence as leaves.

>>> import nest
>>> nest.pack_as({"b": 0, "a": (0, 0)}, [1, 2, 3])
{'a': (1, 2), 'b': 3}
)";

// Refuses generators: one would be exhausted even if the nest turned out not to fit.
std::vector<py::object> elements_of(const py::object& sequence) {
  if (!py::isinstance<py::sequence>(sequence)) {
    throw py::type_error(std::string("Expected a sequence such as a list or tuple but got ") +
                         Py_TYPE(sequence.ptr())->tp_name + "; list() makes one");
  }
  std::vector<py::object> elements;
  for (py::handle element : sequence)
    elements.push_back(py::reinterpret_borrow<py::object>(element));
  return elements;
}

std::vector<py::object> flatten(const py::object& n) { return nest::flatten(nest::from_python(n)); }

py::object front(const py::object& n) { return nest::front(nest::from_python(n)); }

py::object map(const py::function& f, const py::object& n) {
  return nest::to_python(nest::from_python(n), f);
}

py::object map_many(const py::function& f, const py::args& nests) {
  std::vector<PyNest> converted;
  for (py::handle n : nests) converted.push_back(nest::from_python(n));
  return nest::to_python(nest::map_many(f, converted));
}

py::object map_many2(const py::function& f, const py::object& a, const py::object& b) {
  return nest::to_python(nest::map2(f, nest::from_python(a), nest::from_python(b)));
}

py::object pack_as(const py::object& n, const py::object& sequence) {
  const std::vector<py::object> elements = elements_of(sequence);
  return nest::to_python(nest::pack_as(nest::from_python(n), elements));
}

}  // namespace

PYBIND11_MODULE(nest, m) {
  m.doc() = kModuleDoc;
  m.attr("MAX_DEPTH") = nest::kMaxDepth;
  m.def("flatten", &flatten, py::arg("nest"), py::pos_only(), kFlattenDoc);
  m.def("front", &front, py::arg("nest"), py::pos_only(), kFrontDoc);
  m.def("map", &map, py::arg("f"), py::arg("nest"), py::pos_only(), kMapDoc);
  m.def("map_many", &map_many, py::arg("f"), py::pos_only(), kMapManyDoc);
  m.def("map_many2", &map_many2, py::arg("f"), py::arg("a"), py::arg("b"), py::pos_only(),
        kMapMany2Doc);
  m.def("pack_as", &pack_as, py::arg("nest"), py::arg("sequence"), py::pos_only(), kPackAsDoc);
}
