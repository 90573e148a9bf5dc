// SPDX-License-Identifier: Apache-2.0
// Generated hosts as a program. benchmarks/scale.py measures with it.
//
//   load_generator serve ADDRESS [--hosts N] ...     hosts that a learner finds: server i listens
//   at
//                                                    ADDRESS with .i in place of .0, or at PORT + i
//   load_generator dial ADDRESS [--hosts N] ...      hosts that dial in to a learner
//
// Prints `ready`, then for each line of stdin a JSON object: LoadCounts, and its CPU time. It ends
// when stdin closes.

#include <sys/resource.h>

#include <cmath>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <map>
#include <sstream>
#include <thread>

#include "benchmarks/load_generator.h"

namespace torchbeast::load {
namespace {

using Flags = std::map<std::string, std::string>;  // with their defaults

Flags flags_of(const std::vector<std::string>& args) {
  Flags flags{{"--hosts", "1"},       {"--envs", "1"},        {"--step_ms", "0"},  {"--slow", "0"},
              {"--shape", "1,84,84"}, {"--frame_stack", "1"}, {"--name", "host"},  {"--tls_ca", ""},
              {"--tls_cert", ""},     {"--tls_key", ""},      {"--token_file", ""}};
  for (std::size_t i = 2; i < args.size(); i += 2) {
    if (!flags.contains(args[i]) || i + 1 == args.size()) {
      throw std::invalid_argument("expected a flag and its value, got " + args[i]);
    }
    flags[args[i]] = args[i + 1];
  }
  return flags;
}

std::string content(const std::string& file) {
  if (file.empty()) return "";
  std::ifstream stream(file);
  if (!stream) throw std::invalid_argument("cannot read " + file);
  std::ostringstream text;
  text << stream.rdbuf();
  return text.str();
}

Credentials credentials_of(const Flags& flags) {
  Credentials credentials{.ca = content(flags.at("--tls_ca")),
                          .certificate = content(flags.at("--tls_cert")),
                          .key = content(flags.at("--tls_key")),
                          .token = content(flags.at("--token_file"))};
  while (credentials.token.ends_with('\n')) credentials.token.pop_back();
  return credentials;
}

Shape shape_of(const std::string& text) {
  Shape shape;
  std::istringstream sizes(text);
  for (std::string size; std::getline(sizes, size, ',');) shape.push_back(std::stoll(size));
  return shape;
}

LoadOptions options_of(const Flags& flags) {
  const auto number = [&](const char* name) { return std::stoll(flags.at(name)); };
  return {
      .num_hosts = number("--hosts"),
      .envs_per_stream = number("--envs"),
      .step_time = std::chrono::microseconds(std::llround(std::stod(flags.at("--step_ms")) * 1000)),
      .num_slow = number("--slow"),
      .frame = shape_of(flags.at("--shape")),
      .frame_stack = number("--frame_stack"),
      .name = flags.at("--name")};
}

// The address of host i.
std::string address_of(const std::string& first, std::int64_t i) {
  const bool is_socket = first.starts_with("unix:");
  const std::size_t last = first.rfind(is_socket ? '.' : ':') + 1;
  return first.substr(0, last) + std::to_string(std::stoll(first.substr(last)) + i);
}

double cpu_seconds() {
  rusage usage{};
  ::getrusage(RUSAGE_SELF, &usage);
  const auto seconds = [](const timeval& time) {
    return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_usec) / 1e6;
  };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

void print(const LoadCounts& counts) {
  std::cout << "{\"playing\": " << counts.playing << ", \"steps\": " << counts.steps
            << ", \"attempts\": " << counts.attempts << ", \"lost\": " << counts.lost
            << ", \"refused\": " << counts.refused << ", \"finished\": " << counts.finished
            << ", \"cpu_seconds\": " << cpu_seconds() << ", \"by_host\": [";
  for (std::size_t i = 0; i < counts.by_host.size(); ++i) {
    std::cout << (i == 0 ? "" : ", ") << counts.by_host[i];
  }
  std::cout << "]}" << std::endl;
}

int run(const std::vector<std::string>& args) {
  const Flags flags = flags_of(args);
  const Credentials credentials = credentials_of(flags);
  const LoadOptions options = options_of(flags);
  LoadGenerator generator(options);
  if (args.at(0) == "dial") {
    generator.dial({args.at(1), credentials});
  } else {
    std::vector<Endpoint> endpoints;
    for (std::int64_t i = 0; i < options.num_hosts; ++i) {
      endpoints.emplace_back(address_of(args.at(1), i), credentials);
    }
    generator.serve(endpoints);
  }
  std::thread thread([&] { generator.run(); });
  std::cout << "ready" << std::endl;
  for (std::string line; std::getline(std::cin, line);) print(generator.counts());
  generator.stop();
  thread.join();
  return 0;
}

}  // namespace
}  // namespace torchbeast::load

int main(int argc, char** argv) {
  // With poll(), which suits a thread per connection, one thread looks at every connection for
  // each message.
  ::setenv("GRPC_POLL_STRATEGY", "epoll1", 0);
  const std::vector<std::string> args(argv + 1, argv + argc);
  if (args.size() < 2 || (args[0] != "serve" && args[0] != "dial")) {
    std::cerr << "usage: load_generator serve|dial ADDRESS [--hosts N] [--envs E] [--step_ms T] "
                 "[--slow N] [--shape 1,84,84] [--frame_stack K] [--name NAME] [--tls_ca FILE] "
                 "[--tls_cert FILE] [--tls_key FILE] [--token_file FILE]\n";
    return 2;
  }
  try {
    return torchbeast::load::run(args);
  } catch (const std::exception& error) {
    std::cerr << error.what() << "\n";
    return 2;
  }
}
