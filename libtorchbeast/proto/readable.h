// SPDX-License-Identifier: Apache-2.0

#pragma once

#include <string>
#include <string_view>

namespace torchbeast {

// Returns what a peer sent as text that is safe to show: valid UTF-8, which Python needs, and
// without control characters, which a terminal would obey, except for line ends and tabs. Question
// marks replace the rest.
std::string readable(std::string_view sent);

}  // namespace torchbeast
