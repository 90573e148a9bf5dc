// SPDX-License-Identifier: Apache-2.0

#include "libtorchbeast/stream/readable.h"

#include <cstddef>

namespace torchbeast {
namespace {

// Returns the number of bytes of the character at the start of the text; 0 if there is none.
// The bounds are those of table 3-7 of the Unicode standard.
std::size_t length_of_character(std::string_view text) {
  const auto is_within = [&](std::size_t i, unsigned least, unsigned most) {
    const unsigned byte = i < text.size() ? static_cast<unsigned char>(text[i]) : 0;
    return least <= byte && byte <= most;
  };
  const auto continues = [&](std::size_t i) { return is_within(i, 0x80, 0xBF); };
  const auto continue_after = [&](unsigned first, unsigned least, unsigned most) {
    return is_within(0, first, first) && is_within(1, least, most);
  };
  if (is_within(0, 0x01, 0x7F)) return 1;
  if (is_within(0, 0xC2, 0xDF) && continues(1)) return 2;
  const bool is_three = continue_after(0xE0, 0xA0, 0xBF) || continue_after(0xED, 0x80, 0x9F) ||
                        (is_within(0, 0xE1, 0xEF) && !is_within(0, 0xED, 0xED) && continues(1));
  if (is_three && continues(2)) return 3;
  const bool is_four = continue_after(0xF0, 0x90, 0xBF) || continue_after(0xF4, 0x80, 0x8F) ||
                       (is_within(0, 0xF1, 0xF3) && continues(1));
  return is_four && continues(2) && continues(3) ? 4 : 0;
}

// Whether a character is a control code, C0 or C1, other than a line end or tab.
bool is_control(std::string_view character) {
  const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(character[i]); };
  if (character == "\n" || character == "\t") return false;
  if (character.size() == 1) return byte(0) < 0x20 || byte(0) == 0x7F;
  return character.size() == 2 && byte(0) == 0xC2 && byte(1) < 0xA0;
}

}  // namespace

std::string readable(std::string_view sent) {
  std::string text;
  text.reserve(sent.size());
  while (!sent.empty()) {
    const std::size_t length = length_of_character(sent);
    const std::string_view next = sent.substr(0, length == 0 ? 1 : length);
    text += length == 0 || is_control(next) ? std::string_view("?") : next;
    sent.remove_prefix(next.size());
  }
  return text;
}

}  // namespace torchbeast
