// SPDX-License-Identifier: Apache-2.0
//
// Tests nest.h without Python.

#include "nest/nest.h"

#include <gtest/gtest.h>
#include <pthread.h>

#include <memory>
#include <string>
#include <type_traits>
#include <vector>

namespace nest {
namespace {

using IntNest = Nest<int>;
using Vector = IntNest::Vector;
using Map = IntNest::Map;

static_assert(std::is_nothrow_move_constructible_v<IntNest>,
              "a growing vector of nests moves them");
static_assert(std::is_nothrow_move_assignable_v<IntNest>);

IntNest Observation() {
  return Map{{"obs", Vector{1, Vector{2, 3}}}, {"empty", Vector{}}, {"a", 0}};
}

// One nest of each awkward kind. Tests that loop over it assert that it is not empty.
std::vector<IntNest> AwkwardNests() {
  return {IntNest(7),
          IntNest(),
          Map{},
          Vector{Vector{}, Map{}},
          Vector{Vector{}, 1},
          Map{{"", 1}, {"\n", Vector{2}}},
          Vector{1, 2, 3},
          Map{{"b", 1}, {"a", Map{{"d", 2}, {"c", Vector{3, 4}}}}},
          Observation()};
}

IntNest Deep(std::size_t levels) {
  IntNest nest(1);
  for (std::size_t i = 0; i < levels; ++i) nest = Vector{std::move(nest)};
  return nest;
}

template <typename F>
std::string ErrorOf(F&& f) {
  try {
    f();
  } catch (const NestError& error) {
    return error.what();
  }
  return "no error";
}

std::string DifferenceOf(const IntNest& a, const IntNest& b) {
  return ErrorOf([&] { check_same_structure(a, b); });
}

TEST(NestTest, ADefaultNestIsTheEmptyVector) {
  EXPECT_TRUE(IntNest().is_vector());
  EXPECT_TRUE(IntNest().as_vector().empty());
}

TEST(NestTest, ANestIsOfExactlyOneKind) {
  for (const auto& nest : AwkwardNests())
    EXPECT_EQ(nest.is_leaf() + nest.is_vector() + nest.is_map(), 1);
  EXPECT_TRUE(IntNest(7).is_leaf());
  EXPECT_TRUE(IntNest(Map{}).is_map());
}

TEST(NestTest, AnAccessorOfAnotherKindNamesBothKinds) {
  EXPECT_EQ(ErrorOf([] { IntNest(7).as_vector(); }), "Expected a vector but the nest is a leaf");
  EXPECT_EQ(ErrorOf([] { Observation().as_leaf(); }),
            "Expected a leaf but the nest is a map with keys 'a', 'empty', 'obs'");
  EXPECT_EQ(ErrorOf([] { IntNest().as_map(); }),
            "Expected a map but the nest is a vector of length 0");
}

TEST(NestTest, NestErrorIsAnInvalidArgument) {
  EXPECT_THROW(IntNest().as_leaf(), std::invalid_argument);
}

TEST(NestTest, LeavesThatCanOnlyMoveAreNotCopied) {
  Nest<std::unique_ptr<int>> nest(std::make_unique<int>(5));
  const auto moved = std::move(nest);
  EXPECT_EQ(*front(moved), 5);
}

TEST(NestTest, TraversalIsDepthFirstInSortedKeyOrder) {
  EXPECT_EQ(flatten(Observation()), (std::vector<int>{0, 1, 2, 3}));
}

TEST(NestTest, TheFlattenedNestHasThePathsOfItsLeaves) {
  std::vector<std::string> paths;
  const IntNest nest = Observation();
  for_each_with_path([&](const Path& path, int) { paths.push_back(path.str()); }, nest);
  EXPECT_EQ(paths,
            (std::vector<std::string>{"['a']", "['obs'][0]", "['obs'][1][0]", "['obs'][1][1]"}));
}

TEST(NestTest, ForEachCanChangeTheLeavesInPlace) {
  IntNest nest = Vector{1, Map{{"k", 2}}};
  for_each([](int& leaf) { leaf *= 10; }, nest);
  EXPECT_EQ(nest, IntNest(Vector{10, Map{{"k", 20}}}));
}

TEST(NestTest, MapKeepsTheStructureAndMayChangeTheType) {
  const Nest<std::string> words = map([](int i) { return std::to_string(i); }, Observation());
  EXPECT_TRUE(same_structure(words, Observation()));
  EXPECT_EQ(flatten(words), (std::vector<std::string>{"0", "1", "2", "3"}));
}

TEST(NestTest, MapOfTheIdentityIsTheSameNest) {
  const auto nests = AwkwardNests();
  ASSERT_FALSE(nests.empty());
  for (const auto& nest : nests) EXPECT_EQ(map([](int i) { return i; }, nest), nest);
}

TEST(NestTest, PackAsUndoesFlatten) {
  const auto nests = AwkwardNests();
  ASSERT_FALSE(nests.empty());
  for (const auto& nest : nests) EXPECT_EQ(pack_as(nest, flatten(nest)), nest);
}

TEST(NestTest, PackAsCountsTheLeavesOfBothSides) {
  const std::vector<int> one{1};
  EXPECT_EQ(ErrorOf([&] { pack_as(IntNest(Vector{1, 2}), one); }),
            "Too few elements in sequence: expected 2 but got 1");
  EXPECT_EQ(ErrorOf([&] { pack_as(IntNest(), one); }),
            "Nest didn't exhaust sequence: expected 0 but got 1");
}

TEST(NestTest, FrontIsTheFirstLeafOfFlatten) {
  int compared = 0;
  for (const auto& nest : AwkwardNests()) {
    if (empty(nest)) continue;
    EXPECT_EQ(front(nest), flatten(nest).front());
    ++compared;
  }
  EXPECT_GT(compared, 3);
}

TEST(NestTest, FrontOfANestWithoutLeavesThrows) {
  EXPECT_EQ(ErrorOf([] { front(IntNest(Vector{Map{}})); }),
            "Expected a nest with at least one leaf but got an empty vector of length 1");
}

TEST(NestTest, EmptyMeansWithoutLeaves) {
  for (const auto& nest : AwkwardNests()) EXPECT_EQ(empty(nest), flatten(nest).empty());
}

TEST(NestTest, Map2PairsCorrespondingLeaves) {
  const IntNest a = Map{{"x", Vector{1, 2}}, {"y", 3}};
  const Nest<double> b = map([](int i) { return i * 0.5; }, a);
  const Nest<double> sum = map2([](int i, double d) { return i + d; }, a, b);
  EXPECT_EQ(flatten(sum), (std::vector<double>{1.5, 3.0, 4.5}));
  EXPECT_TRUE(same_structure(sum, a));
}

TEST(NestTest, ForEach2CanChangeBothSidesInPlace) {
  IntNest a = Vector{1, 2}, b = Vector{3, 4};
  for_each2([](int& x, int& y) { std::swap(x, y); }, a, b);
  EXPECT_EQ(flatten(a), (std::vector<int>{3, 4}));
  EXPECT_EQ(flatten(b), (std::vector<int>{1, 2}));
}

TEST(NestTest, NothingIsCalledForNestsThatDifferAtTheirEnd) {
  IntNest a = Vector{1, 2}, b = Vector{1, Vector{}};
  int calls = 0;
  EXPECT_THROW(for_each2([&](int, int) { ++calls; }, a, b), NestError);
  EXPECT_THROW(map2([&](int, int) { return ++calls; }, a, b), NestError);
  EXPECT_THROW(map_many([&](const std::vector<int>&) { return ++calls; }, std::vector{a, b}),
               NestError);
  EXPECT_EQ(calls, 0);
}

TEST(NestTest, NestsOfOneTableHaveTheSameStructureOnlyAsThemselves) {
  const auto nests = AwkwardNests();
  for (std::size_t i = 0; i < nests.size(); ++i) {
    for (std::size_t j = 0; j < nests.size(); ++j)
      EXPECT_EQ(same_structure(nests[i], nests[j]), i == j) << i << j;
  }
}

TEST(NestTest, ADifferenceNamesBothSidesAndItsPath) {
  const auto inside = [](IntNest nest) -> IntNest {
    return Map{{"obs", Vector{0, std::move(nest)}}};
  };
  EXPECT_EQ(DifferenceOf(inside(Vector{1, 2}), inside(Vector{1})),
            "Expected vectors of same length but got 2 vs 1 at ['obs'][1]: vector of length 2 vs "
            "vector of length 1");
  EXPECT_EQ(DifferenceOf(inside(Map{{"a", 1}}), inside(Map{})),
            "Expected maps of same length but got 1 vs 0 at ['obs'][1]: map with keys 'a' vs map "
            "without keys");
  EXPECT_EQ(DifferenceOf(inside(Map{{"a", 1}}), inside(Map{{"b", 1}})),
            "Expected maps to have same keys but found 'a' vs 'b' at ['obs'][1]: map with keys 'a' "
            "vs map with keys 'b'");
  EXPECT_EQ(DifferenceOf(inside(1), inside(Vector{1})),
            "nests don't match at ['obs'][1]: leaf vs vector of length 1");
  EXPECT_EQ(DifferenceOf(Vector{}, Map{}),
            "nests don't match at the root: vector of length 0 vs map without keys");
}

TEST(NestTest, MapManyGivesTheLeavesOfOnePlaceInTheOrderOfTheNests) {
  const std::vector<IntNest> nests{Vector{1, Map{{"k", 2}}}, Vector{3, Map{{"k", 4}}},
                                   Vector{5, Map{{"k", 6}}}};
  const auto columns = map_many([](const std::vector<int>& column) { return column; }, nests);
  EXPECT_TRUE(same_structure(columns, nests.front()));
  EXPECT_EQ(flatten(columns), (std::vector<std::vector<int>>{{1, 3, 5}, {2, 4, 6}}));
}

TEST(NestTest, MapManyNeedsANest) {
  const auto first = [](const std::vector<int>& column) { return column.front(); };
  EXPECT_EQ(ErrorOf([&] { map_many(first, std::vector<IntNest>()); }),
            "Expected at least one nest.");
  EXPECT_THROW(map_many(first, std::vector<IntNest>{1, Vector{1}}), NestError);
}

TEST(NestTest, AnExceptionOfTheCallbackPassesThrough) {
  EXPECT_THROW(map([](int) -> int { throw std::length_error("mine"); }, IntNest(1)),
               std::length_error);
}

// Runs f() in a thread with a stack of 512 KiB, the smallest default of all supported systems
// (macOS).
int OnASmallStack(int (*f)()) {
  pthread_attr_t attributes;
  pthread_attr_init(&attributes);
  EXPECT_EQ(pthread_attr_setstacksize(&attributes, std::size_t{512} * 1024), 0);
  pthread_t thread;
  const auto run = [](void* g) -> void* { return new int(reinterpret_cast<int (*)()>(g)()); };
  EXPECT_EQ(pthread_create(&thread, &attributes, run, reinterpret_cast<void*>(f)), 0);
  void* result = nullptr;
  pthread_join(thread, &result);
  pthread_attr_destroy(&attributes);
  return *std::unique_ptr<int>(static_cast<int*>(result));
}

TEST(NestTest, TheDeepestNestFitsASmallStack) {
  const auto sum_of_two = [] {
    const IntNest nest = Deep(kMaxDepth);
    return front(map2([](int a, int b) { return a + b; }, nest, nest));
  };
  EXPECT_EQ(OnASmallStack(sum_of_two), 2);
}

TEST(NestTest, ADeeperNestThrowsWithTheLimit) {
  const IntNest nest = Deep(kMaxDepth + 1);
  const std::string error = ErrorOf([&] { flatten(nest); });
  EXPECT_NE(error.find("at most 256 levels"), std::string::npos) << error;
  EXPECT_TRUE(error.ends_with("[0][0]...")) << error;
  EXPECT_THROW(map([](int i) { return i; }, nest), NestError);
  EXPECT_THROW(check_same_structure(nest, nest), NestError);
}

TEST(PathTest, APathPrintsItsEntriesFromTheRoot) {
  const Path root, obs(root, "obs"), second(obs, 1);
  EXPECT_EQ(root.str(), "the root");
  EXPECT_EQ(second.str(), "['obs'][1]");
  EXPECT_EQ(second.depth(), 2U);
}

}  // namespace
}  // namespace nest
