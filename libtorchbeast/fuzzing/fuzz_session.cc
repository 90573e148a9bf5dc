// SPDX-License-Identifier: Apache-2.0
// What a server may send in a stream, from its description to a finished rollout: every message is
// refused with std::invalid_argument, or leads to rollouts of the described shape. A host that
// dials in sends every eighth session, in other orders too, and leaves early: it is told what was
// wrong.
//
//   bytes -> Session: a description and steps -> StepTranslation -> RolloutWriter -> RolloutQueue
//                                             == rpc Join ==> Door -> EnvStream -> RolloutWriter
//
// Mutations know the grammar: most messages stay parsable, and most arrays have as many bytes as
// their shape needs. Bytes that are no session become one of sound messages, so no corpus is
// needed.

#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "libtorchbeast/acting/rollout_writer.h"
#include "libtorchbeast/fuzzing/expect.h"
#include "libtorchbeast/proto/array_codec.h"
#include "libtorchbeast/proto/service.h"
#include "libtorchbeast/server/door.h"
#include "libtorchbeast/stream/translation.h"
#include "libtorchbeast/stream/vector_wire.h"

extern "C" std::size_t LLVMFuzzerMutate(std::uint8_t* data, std::size_t size, std::size_t max_size);

namespace torchbeast::fuzzing {
namespace {

using Random = std::minstd_rand;

constexpr std::int64_t kUnrollLength = 3;
constexpr std::size_t kMostSteps = 24;
constexpr std::int64_t kMostEnvs = 64;                               // more are sound, but slow
constexpr const char* kKeywords[] = {"score", "laps", "", "score"};  // two sound ones come first

std::size_t below(Random& random, std::size_t limit) { return random() % limit; }

// ---- Messages, each as its length in four bytes and its bytes --------------------------------

using Session = std::vector<std::string>;  // Description, VectorStep, VectorStep ...

Session read_session(const std::uint8_t* data, std::size_t size) {
  Session session;
  std::uint32_t length = 0;
  while (size >= sizeof(length) && session.size() <= kMostSteps) {
    std::memcpy(&length, data, sizeof(length));
    data += sizeof(length);
    size -= sizeof(length);
    const std::size_t taken = std::min<std::size_t>(length, size);
    session.emplace_back(reinterpret_cast<const char*>(data), taken);
    data += taken;
    size -= taken;
  }
  return session;
}

std::string written(const Session& session) {
  std::string bytes;
  for (const std::string& message : session) {
    const auto length = static_cast<std::uint32_t>(message.size());
    bytes.append(reinterpret_cast<const char*>(&length), sizeof(length));
    bytes += message;
  }
  return bytes;
}

// ---- Sound messages --------------------------------------------------------------------------

rpcenv::Description sound_description(std::int64_t num_envs, std::int64_t stack,
                                      std::size_t keywords) {
  rpcenv::Description message;
  codec::encode(EnvDescription{.num_envs = num_envs,
                               .frame_stack = stack,
                               .observation = ArrayNest(Array::spec(DType::kUInt8, {2, 3})),
                               .info_keywords = {kKeywords, kKeywords + keywords}},
                &message);
  return message;
}

rpcenv::VectorStep sound_step(std::int64_t num_envs, std::size_t keywords, bool is_truncated) {
  rpcenv::VectorStep step;
  const Shape shape{num_envs};
  codec::encode(ArrayNest(Array::zeros(DType::kUInt8, {num_envs, 2, 3})),
                step.mutable_observation());
  codec::encode(Array::zeros(DType::kFloat32, shape), step.mutable_reward());
  codec::encode(Array::zeros(DType::kBool, shape), step.mutable_terminated());
  codec::encode(Array::filled<bool>(shape, is_truncated), step.mutable_truncated());
  codec::encode(Array::filled<bool>(shape, is_truncated), step.mutable_episode_end());
  codec::encode(Array::zeros(DType::kInt32, shape), step.mutable_episode_step());
  codec::encode(Array::zeros(DType::kFloat32, shape), step.mutable_episode_return());
  if (is_truncated) {
    codec::encode(ArrayNest(Array::zeros(DType::kUInt8, {num_envs, 2, 3})),
                  step.mutable_final_observation());
  }
  if (is_truncated && keywords > 0) {
    codec::encode(Array::zeros(DType::kFloat32, {num_envs, static_cast<std::int64_t>(keywords)}),
                  step.mutable_info());
  }
  return step;
}

Session sound_session(Random& random) {
  const auto num_envs = static_cast<std::int64_t>(1 + below(random, 4));
  const auto stack = static_cast<std::int64_t>(1 + below(random, 4));
  const std::size_t keywords = below(random, 3);
  Session session{sound_description(num_envs, stack, keywords).SerializeAsString()};
  for (std::size_t i = 0; i < 2 + below(random, 8); ++i) {
    const bool is_truncated = i > 0 && below(random, 3) == 0;
    session.push_back(sound_step(num_envs, keywords, is_truncated).SerializeAsString());
  }
  return session;
}

// ---- Mutations of the grammar ----------------------------------------------------------------

void mutate_array(rpcenv::NDArray* array, Random& random) {
  static constexpr int kTypes[] = {0, 1, 2, 5, 7, 11, 12, 23, 17, -1};
  static constexpr std::int64_t kSizes[] = {0, 1, 2, 3, 4, 7, 256, -1, 1LL << 31, 1LL << 62};
  switch (below(random, 5)) {
    case 0:
      array->set_dtype(kTypes[below(random, std::size(kTypes))]);
      break;
    case 1:
      array->add_shape(kSizes[below(random, std::size(kSizes))]);
      break;
    case 2:
      if (array->shape_size() > 0) array->mutable_shape()->RemoveLast();
      break;
    case 3:
      if (array->shape_size() > 0) {
        array->set_shape(static_cast<int>(below(random, array->shape_size())),
                         kSizes[below(random, std::size(kSizes))]);
      }
      break;
    default:
      for (char& byte : *array->mutable_data()) {
        if (below(random, 4) == 0) byte = static_cast<char>(random());
      }
  }
  if (below(random, 4) == 0) return;
  std::uint64_t bytes = array->dtype() == 0 || array->dtype() == 2 ? 1 : 4;
  for (const std::int64_t size : array->shape()) {
    bytes = std::min<std::uint64_t>(bytes * static_cast<std::uint64_t>(size), 1 << 12);
  }
  array->mutable_data()->resize(bytes);
}

void mutate_nest(rpcenv::ArrayNest* nest, Random& random, int depth = 0) {
  if (nest->has_array() && below(random, 4) != 0)
    return mutate_array(nest->mutable_array(), random);
  if (nest->vector_size() > 0 && below(random, 4) != 0) {
    const auto entry = static_cast<int>(below(random, nest->vector_size()));
    return mutate_nest(nest->mutable_vector(entry), random, depth + 1);
  }
  const rpcenv::ArrayNest before = *nest;
  switch (below(random, 4)) {
    case 0:
      nest->Clear();
      *nest->add_vector() = before;
      break;
    case 1:
      *nest->add_vector() = before;
      break;
    case 2:
      (*nest->mutable_map())[std::string(below(random, 3), 'k')] = before;
      break;
    default:
      nest->clear_array();
  }
  if (depth < 3 && below(random, 2) == 0) {
    for (auto& entry : *nest->mutable_vector()) mutate_nest(&entry, random, depth + 1);
  }
}

void mutate(rpcenv::Description* message, Random& random) {
  static constexpr int kCounts[] = {0, 1, 2, 3, 4, 255, 256, 65536, -1, 1 << 30};
  const int count = kCounts[below(random, std::size(kCounts))];
  switch (below(random, 6)) {
    case 0:
      return message->set_num_envs(count);
    case 1:
      return message->set_frame_stack(count);
    case 2:
      return message->set_num_servers(count);
    case 3:
      return message->add_info_keywords(kKeywords[below(random, std::size(kKeywords))]);
    case 4:
      return message->clear_info_keywords();
    default:
      mutate_nest(message->mutable_observation(), random);
  }
}

void mutate(rpcenv::VectorStep* step, Random& random) {
  switch (below(random, 11)) {
    case 0:
      return mutate_nest(step->mutable_observation(), random);
    case 1:
      return mutate_array(step->mutable_reward(), random);
    case 2:
      return mutate_array(step->mutable_terminated(), random);
    case 3:
      return mutate_array(step->mutable_truncated(), random);
    case 4:
      return mutate_array(step->mutable_episode_end(), random);
    case 5:
      return mutate_array(step->mutable_episode_step(), random);
    case 6:
      return mutate_array(step->mutable_episode_return(), random);
    case 7:
      return step->clear_final_observation();
    case 8:
      return mutate_array(step->mutable_info(), random);
    case 9:
      return step->clear_info();
    default:
      mutate_nest(step->mutable_final_observation(), random);
  }
}

template <typename Message>
void mutate_as(std::string* bytes, Random& random) {
  Message message;
  if (!message.ParseFromString(*bytes)) return;
  mutate(&message, random);
  *bytes = message.SerializeAsString();
}

void mutate_bytes(std::string* bytes) {
  const std::size_t size = bytes->size();
  bytes->resize(size + 64);
  bytes->resize(LLVMFuzzerMutate(reinterpret_cast<std::uint8_t*>(bytes->data()), size, size + 64));
}

void mutate(Session* session, Random& random) {
  const std::size_t at = below(random, session->size());
  const auto other = session->begin() + static_cast<std::ptrdiff_t>(below(random, session->size()));
  switch (below(random, 8)) {
    case 0:
      return mutate_bytes(&session->at(at));
    case 1:
      session->insert(session->begin() + static_cast<std::ptrdiff_t>(at), std::string(*other));
      return;
    case 2:
      session->erase(other);
      return;
    default:
      at == 0 ? mutate_as<rpcenv::Description>(&session->at(0), random)
              : mutate_as<rpcenv::VectorStep>(&session->at(at), random);
  }
}

// ---- Playing ---------------------------------------------------------------------------------

// Receives the steps of a stream as a learner does.
class Learner {
 public:
  explicit Learner(const EnvDescription& description)
      : num_envs_(description.num_envs),
        writer_({.unroll_length = kUnrollLength, .num_envs = num_envs_, .columns = 1}),
        num_keywords_(description.info_keywords.size()) {}

  void receive(const StreamStep& step) {
    const AgentStep agent{.outputs = actions(), .policy_version = 1};
    if (!has_started_) {
      writer_.start(step, agent, ArrayNest(std::vector<ArrayNest>{}));
      has_started_ = true;
    } else if (writer_.append(step, agent)) {
      check(writer_.complete(ArrayNest(std::vector<ArrayNest>{})));
    }
  }

  ArrayNest actions() const {
    return ArrayNest(
        std::vector<ArrayNest>{ArrayNest(Array::zeros(DType::kInt64, {1, num_envs_}))});
  }

 private:
  void check(const std::vector<QueueItem>& items) const {
    expect(items.size() == static_cast<std::size_t>(num_envs_), "an item for each environment");
    for (const QueueItem& item : items) {
      nest::for_each(expect_rows, item.data.as_vector()[0]);
      const auto& beside = item.info.as_map();
      expect(beside.count("info") == (num_keywords_ > 0), "an info comes with keywords only");
      if (num_keywords_ == 0) continue;
      expect(beside.at("info").as_map().size() == num_keywords_, "a number for each keyword");
      nest::for_each(expect_rows, beside.at("info"));
    }
  }

  static void expect_rows(const Array& leaf) {
    expect(leaf.size(0) == kUnrollLength + 1 && leaf.size(1) == 1, "rollouts are [T + 1, c, ...]");
  }

  const std::int64_t num_envs_;
  RolloutWriter writer_;
  const std::size_t num_keywords_;
  bool has_started_ = false;
};

void play(const Session& session) {
  rpcenv::Description description;
  if (session.empty() || !description.ParseFromString(session[0])) return;
  const EnvDescription described = codec::decode(description);
  if (described.num_envs > kMostEnvs) return;
  StepTranslation translation(described);
  Learner learner(described);
  for (std::size_t i = 1; i < session.size(); ++i) {
    rpcenv::VectorStep step;
    if (!step.ParseFromString(session[i])) return;
    learner.receive(translation(raw_step(step)));
  }
}

// ---- Dialling in -----------------------------------------------------------------------------

// A learner that plays the hosts which dial in, but refuses every fourth. Lives as long as the
// process.
class LiveDoor {
 public:
  LiveDoor()
      : endpoint_("unix:/tmp/fuzz_session." + std::to_string(getpid())),
        door_(endpoint_, {}),
        stub_(rpcenv::RPCLearner::NewStub(open_channel(endpoint_))) {
    std::thread([this] {
      for (;;) admit();
    }).detach();
  }

  rpcenv::RPCLearner::Stub& stub() { return *stub_; }

 private:
  void admit() {
    door_.ended();  // they would pile up
    const std::optional<WaitingStream> found = door_.next(std::chrono::seconds(1));
    if (!found) return;
    if (found->id % 4 == 0 || found->description.num_envs > kMostEnvs) {
      return door_.refuse(found->id, "it is not wanted");
    }
    door_.take(found->id, [](EnvStream* stream) {
      try {
        Learner learner(stream->description());
        for (StreamStep step = stream->begin(1);; step = stream->step(learner.actions())) {
          learner.receive(step);
        }
      } catch (const std::exception& error) {
        expect(dynamic_cast<const LostStream*>(&error) != nullptr, "a host ends only its stream");
        return std::string(error.what());
      }
    });
  }

  const Endpoint endpoint_;
  Door door_;
  const std::unique_ptr<rpcenv::RPCLearner::Stub> stub_;
};

// The message that a host sends; bytes that are none become an empty one.
rpcenv::HostMessage host_message(const std::string& bytes, bool is_joining) {
  rpcenv::HostMessage message;
  if (is_joining) {
    message.mutable_joining()->set_host("fuzz");
    message.mutable_joining()->mutable_description()->ParseFromString(bytes);
  } else if (!message.mutable_step()->ParseFromString(bytes)) {
    message.set_failure("of a host");
  }
  return message;
}

void dial_in(const Session& session, Random random) {
  static auto& door = *new LiveDoor;
  grpc::ClientContext context;
  const auto call = door.stub().Join(&context);
  const std::size_t joining_at = below(random, 4) == 0 ? below(random, session.size()) : 0;
  const std::size_t sent = below(random, 4) == 0 ? below(random, session.size()) : session.size();
  rpcenv::VectorAction action;
  for (std::size_t i = 0; i < sent; ++i) {
    if (!call->Write(host_message(session[i], i == joining_at)) || !call->Read(&action)) break;
  }
  below(random, 2) == 0 ? context.TryCancel() : static_cast<void>(call->WritesDone());
  while (call->Read(&action)) continue;
  switch (call->Finish().error_code()) {
    case grpc::StatusCode::CANCELLED:
    case grpc::StatusCode::INVALID_ARGUMENT:
    case grpc::StatusCode::FAILED_PRECONDITION:
    case grpc::StatusCode::ABORTED:
      return;
    default:
      expect(false, "a host is told what was wrong");
  }
}

}  // namespace

int test_one_input(const std::uint8_t* data, std::size_t size) {
  const Session session = read_session(data, size);
  accepts([&] { play(session); });
  Random random(static_cast<unsigned>(size));
  if (!session.empty() && below(random, 8) == 0) dial_in(session, random);
  return 0;
}

std::size_t mutated(std::uint8_t* data, std::size_t size, std::size_t max_size, unsigned seed) {
  Random random(seed);
  Session session = read_session(data, size);
  if (session.size() < 2) session = sound_session(random);
  for (std::size_t i = 0; i <= below(random, 3) && !session.empty(); ++i) mutate(&session, random);
  const std::string bytes = written(session);
  const std::size_t taken = std::min(bytes.size(), max_size);
  std::memcpy(data, bytes.data(), taken);
  return taken;
}

}  // namespace torchbeast::fuzzing

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  return torchbeast::fuzzing::test_one_input(data, size);
}

extern "C" std::size_t LLVMFuzzerCustomMutator(std::uint8_t* data, std::size_t size,
                                               std::size_t max_size, unsigned seed) {
  return torchbeast::fuzzing::mutated(data, size, max_size, seed);
}
