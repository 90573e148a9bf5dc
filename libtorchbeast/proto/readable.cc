// SPDX-License-Identifier: Apache-2.0

#include "libtorchbeast/proto/readable.h"

#include <array>
#include <cstddef>

namespace torchbeast {
namespace {

// The first two bytes of characters that have several; 80 to BF are the others.
struct Form {
  unsigned first_least, first_most, second_least, second_most;
  std::size_t length;
};

// Table 3-7 of the Unicode standard.
constexpr std::array<Form, 8> kForms = {{{0xC2, 0xDF, 0x80, 0xBF, 2},
                                         {0xE0, 0xE0, 0xA0, 0xBF, 3},
                                         {0xE1, 0xEC, 0x80, 0xBF, 3},
                                         {0xED, 0xED, 0x80, 0x9F, 3},
                                         {0xEE, 0xEF, 0x80, 0xBF, 3},
                                         {0xF0, 0xF0, 0x90, 0xBF, 4},
                                         {0xF1, 0xF3, 0x80, 0xBF, 4},
                                         {0xF4, 0xF4, 0x80, 0x8F, 4}}};

unsigned byte_of(std::string_view text, std::size_t i) {
  return i < text.size() ? static_cast<unsigned char>(text[i]) : 0;  // 0 continues nothing
}

bool begins_with(std::string_view text, const Form& form) {
  const unsigned first = byte_of(text, 0), second = byte_of(text, 1);
  if (first < form.first_least || first > form.first_most) return false;
  if (second < form.second_least || second > form.second_most) return false;
  for (std::size_t i = 2; i < form.length; ++i) {
    if ((byte_of(text, i) & 0xC0) != 0x80) return false;
  }
  return true;
}

// Returns the number of bytes of the character at the start of the text; 0 if there is none.
std::size_t length_of_character(std::string_view text) {
  if (byte_of(text, 0) < 0x80) return 1;
  for (const Form& form : kForms) {
    if (begins_with(text, form)) return form.length;
  }
  return 0;
}

// Whether a character is a control code, C0 or C1, other than a line end or tab.
bool is_control(std::string_view character) {
  if (character == "\n" || character == "\t") return false;
  const unsigned first = byte_of(character, 0), second = byte_of(character, 1);
  return first < 0x20 || first == 0x7F || (first == 0xC2 && second < 0xA0);
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
