// SPDX-License-Identifier: Apache-2.0

#include "libtorchbeast/proto/description.h"

#include <algorithm>
#include <stdexcept>

#include "libtorchbeast/batching/input_check.h"
#include "libtorchbeast/memory/array_ops.h"
#include "libtorchbeast/proto/array_codec.h"
#include "libtorchbeast/proto/readable.h"
#include "rpcenv.pb.h"

namespace torchbeast {
namespace {

constexpr std::int64_t kMaxFrameStack = 256;
constexpr std::int64_t kMaxServers = 1 << 16;
constexpr std::int64_t kMaxStreamsOfServer = 1 << 10;  // each has two threads of the learner
constexpr std::size_t kShownBytes = 200;               // of a text in an error, at most
// The maximum size of a step of all environments of a stream, with its stacks of frames.
constexpr double kMaxStepBytes = 1 << 30;

void check_range(const char* what, std::int64_t value, std::int64_t maximum,
                 std::int64_t minimum = 1) {
  if (value >= minimum && value <= maximum) return;
  throw std::invalid_argument(std::string(what) + " must lie between " + std::to_string(minimum) +
                              " and " + std::to_string(maximum) + ", got " + std::to_string(value));
}

// Stacks are rebuilt by the learner, so a small message could make it allocate much.
void check_step_size(const EnvDescription& description) {
  double bytes = num_bytes(description.observation) * static_cast<double>(description.frame_stack);
  bytes += static_cast<double>(description.info_keywords.size() * sizeof(float));
  bytes *= static_cast<double>(description.num_envs);
  if (bytes <= kMaxStepBytes) return;
  throw std::invalid_argument(
      "one step of its " + std::to_string(description.num_envs) + " environments, with stacks of " +
      std::to_string(description.frame_stack) + " frames, would take " +
      std::to_string(static_cast<std::int64_t>(bytes / (1 << 20))) +
      " MiB, expected at most 1024: serve fewer environments in a stream (more --num_servers)");
}

// Returns a text from a little before the place where it differs from another.
std::string shown(const std::string& text, std::size_t differs_at) {
  if (text.size() <= kShownBytes) return text;
  const std::size_t start = differs_at > kShownBytes / 4 ? differs_at - kShownBytes / 4 : 0;
  return readable("..." + text.substr(start, kShownBytes) + "...");
}

void check_equal(const char* what, const std::string& before, const std::string& now) {
  if (before == now) return;
  const auto differs_at = static_cast<std::size_t>(
      std::mismatch(before.begin(), before.end(), now.begin(), now.end()).first - before.begin());
  throw std::invalid_argument(std::string("after the connection was lost, ") + what + " is " +
                              shown(now, differs_at) + ", before it was " +
                              shown(before, differs_at) +
                              ": start the servers there as they were, or the learner again");
}

// One environment's observation as text: structure, dtypes and shapes.
std::string described(const ArrayNest& observation) {
  std::string text;
  nest::for_each_with_path(
      [&](const nest::Path& path, const Array& leaf) {
        text += (text.empty() ? "" : ", ") + summary(leaf) + " at " + path.str();
      },
      observation);
  return text;
}

void check_number_of_keywords(std::int64_t number) {
  check_range("the number of info keywords", number, kMaxInfoKeywords, 0);
}

// Returns whether a text has no character that separates the names of columns, or their lines.
bool is_column_name(const std::string& text) {
  return text.find_first_of(",\n\t") == std::string::npos && readable(text) == text;
}

std::string listed(const std::vector<std::string>& keywords) {
  std::string text;
  for (const std::string& keyword : keywords) text += (text.empty() ? "" : ", ") + keyword;
  return "[" + text + "]";
}

}  // namespace

void check_num_streams(std::int64_t number) {
  check_range("the number of streams", number, kMaxStreamsOfServer);
}

void check_info_keywords(const std::vector<std::string>& keywords) {
  check_number_of_keywords(static_cast<std::int64_t>(keywords.size()));
  for (auto keyword = keywords.begin(); keyword != keywords.end(); ++keyword) {
    if (keyword->empty() || keyword->size() > kMaxInfoKeywordBytes) {
      throw std::invalid_argument("an info keyword has " + std::to_string(keyword->size()) +
                                  " bytes, expected 1 to " + std::to_string(kMaxInfoKeywordBytes));
    }
    if (!is_column_name(*keyword)) {
      throw std::invalid_argument(
          "an info keyword has a comma or a control character, expected the name of a column");
    }
    if (std::find(keywords.begin(), keyword, *keyword) != keyword) {
      throw std::invalid_argument("the info keyword " + *keyword + " comes twice, expected once");
    }
  }
}

void check_same(const EnvDescription& before, const EnvDescription& now) {
  check_equal("the environment", before.env_id, now.env_id);
  check_equal("the number of environments of a stream", std::to_string(before.num_envs),
              std::to_string(now.num_envs));
  check_equal("the number of stacked frames", std::to_string(before.frame_stack),
              std::to_string(now.frame_stack));
  check_equal("the observation", described(before.observation), described(now.observation));
  check_equal("the action space", before.action_space, now.action_space);
  check_equal("the observation space", before.observation_space, now.observation_space);
  check_equal("the dict of options", before.options, now.options);
  check_equal("the list of info keywords", listed(before.info_keywords), listed(now.info_keywords));
}

void codec::encode(const EnvDescription& description, rpcenv::Description* message) {
  message->set_protocol_version(static_cast<std::int32_t>(description.protocol_version));
  message->set_env_id(description.env_id);
  message->set_num_envs(static_cast<std::int32_t>(description.num_envs));
  message->set_num_streams(static_cast<std::int32_t>(description.num_streams));
  message->set_frame_stack(static_cast<std::int32_t>(description.frame_stack));
  encode_spec(description.observation, message->mutable_observation());
  message->set_action_space(description.action_space);
  message->set_observation_space(description.observation_space);
  message->set_options(description.options);
  message->set_num_servers(static_cast<std::int32_t>(description.num_servers));
  message->set_marks_failures(description.marks_failures);
  for (const std::string& keyword : description.info_keywords) message->add_info_keywords(keyword);
}

EnvDescription codec::decode(const rpcenv::Description& message, std::size_t max_text_bytes) {
  if (message.protocol_version() != kProtocolVersion) {
    throw std::invalid_argument("it speaks protocol version " +
                                std::to_string(message.protocol_version()) + ", expected " +
                                std::to_string(kProtocolVersion));
  }
  check_range("the number of environments of a stream", message.num_envs(), kMaxEnvsPerStream);
  check_num_streams(message.num_streams());
  check_range("the number of servers", message.num_servers(), kMaxServers, 0);
  check_range("the number of frames in a stack", message.frame_stack(), kMaxFrameStack);
  check_number_of_keywords(message.info_keywords_size());  // before they are copied
  const auto readable_text = [&](const char* what, const std::string& text) {
    if (text.size() <= max_text_bytes) return readable(text);
    throw std::invalid_argument(std::string(what) + ": got " + std::to_string(text.size()) +
                                " bytes of text, expected at most " +
                                std::to_string(max_text_bytes));
  };
  EnvDescription description{
      .env_id = readable_text("the environment's name", message.env_id()),
      .num_envs = message.num_envs(),
      .num_streams = message.num_streams(),
      .num_servers = message.num_servers(),
      .frame_stack = message.frame_stack(),
      .observation = decode_spec(message.observation()),
      .action_space = readable_text("the action space", message.action_space()),
      .observation_space = readable_text("the observation space", message.observation_space()),
      .options = readable_text("the options", message.options()),
      .marks_failures = message.marks_failures(),
      .info_keywords = {message.info_keywords().begin(), message.info_keywords().end()}};
  check_info_keywords(description.info_keywords);
  check_step_size(description);
  return description;
}

}  // namespace torchbeast
