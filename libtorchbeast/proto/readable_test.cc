// SPDX-License-Identifier: Apache-2.0

#include "libtorchbeast/proto/readable.h"

#include <gtest/gtest.h>

#include <array>

namespace torchbeast {
namespace {

std::string text_of(std::initializer_list<int> bytes) {
  std::string text;
  for (const int byte : bytes) text += static_cast<char>(byte);
  return text;
}

bool is_kept(std::initializer_list<int> bytes) {
  return readable(text_of(bytes)) == text_of(bytes);
}

constexpr std::array kEdges = {0x7F, 0x80, 0xBF, 0xC0};  // of continuing bytes, and beside them

TEST(ReadableTest, TextOfAllLanguagesIsKept) {
  for (const char* text : {"", "plain\n\ttext", "caf\xC3\xA9", "\xE5\xBC\xB7\xE5\x8C\x96",
                           "\xF0\x9F\x90\x99", "\xF4\x8F\xBF\xBF"}) {
    EXPECT_EQ(readable(text), text);
  }
}

TEST(ReadableTest, WhatATerminalWouldObeyIsReplaced) {
  EXPECT_EQ(readable("a\x1B[2J\r\x07\x7F"), "a?[2J???");
  EXPECT_EQ(readable("\xC2\x9B"
                     "2J \xC2\x9F\xC2\xA0"),
            "?2J ?\xC2\xA0");
  EXPECT_EQ(readable(std::string_view("a\0b", 3)), "a?b");
}

TEST(ReadableTest, BytesThatAreNoCharacterAreReplacedAndTheNextOneIsKept) {
  EXPECT_EQ(readable("\xFF"
                     "a\x80z"),
            "?a?z");
  EXPECT_EQ(readable("\xE5\xBC"
                     "a"),
            "??a")
      << "it lacks its third byte";
  EXPECT_EQ(readable("\xE5\xBC"), "??") << "it ends early";
  EXPECT_EQ(readable("\xC0\x80"), "??") << "a longer form of another character";
  EXPECT_EQ(readable("\xED\xA0\x80"), "???") << "half of a pair of UTF-16";
  EXPECT_EQ(readable("\xF4\x90\x80\x80"), "????") << "above the last character, U+10FFFF";
}

// Unicode has 1,920 characters of two bytes, 63,488 less 2,048 surrogates of three, and 1,048,576
// of four, each last byte being one of 64. The 32 control codes of two bytes are not kept.
TEST(ReadableTest, AsManyCharactersAreKeptAsThereAre) {
  int two = 0, three = 0, four = 0;
  for (int first = 0x80; first <= 0xFF; ++first) {
    for (int second = 0; second <= 0xFF; ++second) {
      if (first < 0xE0) two += is_kept({first, second});
      for (const int third : kEdges) {
        if (first >= 0xE0 && first < 0xF0) three += is_kept({first, second, third});
        if (first < 0xF0) continue;
        for (const int last : kEdges) four += is_kept({first, second, third, last});
      }
    }
  }
  EXPECT_EQ(two, 1'920 - 32);
  EXPECT_EQ(three, 61'440 / 64 * 2);
  EXPECT_EQ(four, 1'048'576 / 64 / 64 * 2 * 2);
}

}  // namespace
}  // namespace torchbeast
