// SPDX-License-Identifier: Apache-2.0

#include "libtorchbeast/stream/env_stream.h"

#include <algorithm>
#include <new>
#include <utility>

#include "libtorchbeast/stream/describe.h"
#include "libtorchbeast/stream/original_wire.h"
#include "libtorchbeast/stream/translation.h"
#include "libtorchbeast/stream/vector_wire.h"

namespace torchbeast {
namespace {

// How long the status of an ended call may take to arrive. If it does not, the call has not ended:
// gRPC's blocking interface reports bytes that are no message like the end of the call.
constexpr std::chrono::milliseconds kReasonTimeout(5000);

}  // namespace

EnvStream::EnvStream(Endpoint endpoint, std::chrono::milliseconds step_timeout,
                     std::optional<EnvDescription> described)
    : endpoint_(std::move(endpoint)),
      step_timeout_(step_timeout),
      described_(std::move(described)),
      has_joined_(false) {}

EnvStream::EnvStream(const std::string& host, std::chrono::milliseconds step_timeout,
                     EnvDescription description, std::unique_ptr<Wire> wire)
    : endpoint_(host),
      step_timeout_(step_timeout),
      has_joined_(true),
      description_(std::move(description)),
      translation_(std::make_unique<StepTranslation>(description_)),
      wire_(std::move(wire)) {
  description_.marks_failures = true;  // the protocol does
}

EnvStream::~EnvStream() {
  if (wire_ == nullptr) return;
  wire_->cancel();
  try {
    wire_->finish();
  } catch (const std::exception&) {  // no memory for the messages that are left
  }
}

void EnvStream::check_cancelled() const {
  if (cancelled_) throw StreamCancelled("the stream from " + endpoint_.address + " was cancelled");
}

StreamStep EnvStream::connect(std::uint64_t seed, std::chrono::milliseconds timeout) {
  const auto channel = connected_channel(endpoint_, timeout, [&] { return !cancelled_; });
  check_cancelled();
  if (channel == nullptr) throw NobodyAnswers(nobody_answers(endpoint_.address, timeout));
  description_ = describe(channel);
  check_same_as_before();
  translation_ = std::make_unique<StepTranslation>(description_);
  {
    MutexLock lock(mutex_);
    check_cancelled();
    wire_ = description_.protocol_version == 0 ? make_original_wire(channel, endpoint_.credentials)
                                               : make_vector_wire(channel, endpoint_.credentials);
  }
  wire_->give_options(options_);
  return begin(seed);
}

void EnvStream::give_options(const std::string& json) {
  if (wire_ == nullptr) {
    options_ = json;
  } else {
    wire_->give_options(json);
  }
}

StreamStep EnvStream::begin(std::uint64_t seed) {
  return waiting([&] { return wire_->start(seed) ? wire_->read() : std::nullopt; });
}

EnvDescription EnvStream::describe(const std::shared_ptr<grpc::Channel>& channel) {
  const auto context = [this] {
    MutexLock lock(mutex_);
    check_cancelled();
    describing_ = new_context(endpoint_);
    return describing_;
  };
  const bool marks_failures = described_ && described_->marks_failures;
  try {
    return describe_server(channel, endpoint_.address, step_timeout_, context, marks_failures);
  } catch (const LostStream&) {
    check_cancelled();  // the reason, if so
    throw;
  }
}

void EnvStream::check_same_as_before() const {
  if (!described_) return;
  try {
    check_same(*described_, description_);
  } catch (const std::invalid_argument& error) {
    throw std::invalid_argument(with_origin(endpoint_.address, error.what()));
  }
}

StreamStep EnvStream::step(const ArrayNest& action) {
  return waiting([&] { return wire_->write(action) ? wire_->read() : std::nullopt; });
}

// Runs a call that waits for the server's next step, then translates the step.
template <typename Call>
StreamStep EnvStream::waiting(const Call& call) {
  check_cancelled();
  wait_at_most(step_timeout_);
  try {
    const std::optional<RawStep> raw = call();
    if (!raw) fail();
    overdue_at_ = 0;
    return (*translation_)(*raw);
  } catch (const std::invalid_argument& error) {
    overdue_at_ = 0;
    throw_invalid(error.what());
  } catch (const std::bad_alloc&) {  // the step takes more memory than there is
    overdue_at_ = 0;
    if (!has_joined_) throw;
    throw LostStream(with_origin(endpoint_.address, "out of memory"));
  }
}

// One host of many, which anyone may start again, ends no run.
void EnvStream::throw_invalid(const char* what) const {
  const std::string message = with_origin(endpoint_.address, what);
  if (has_joined_) throw LostStream(message);
  throw std::invalid_argument(message);
}

void EnvStream::wait_at_most(std::chrono::milliseconds limit) {
  overdue_at_ = (Clock::now() + limit).time_since_epoch().count();
}

// Throws the reason why there is no next step.
void EnvStream::fail() {
  wait_at_most(std::min(step_timeout_, kReasonTimeout));
  const bool ended = !overdue_;  // before the limit of the status may pass, not of the step
  const grpc::Status status = wire_->finish();
  const Cause cause = !description_.marks_failures  ? Cause::kUnknown
                      : wire_->environment_failed() ? Cause::kEnvironment
                                                    : Cause::kTransport;
  overdue_at_ = 0;
  {
    MutexLock lock(mutex_);
    wire_.reset();
  }
  check_cancelled();
  // A limit may pass although the status has arrived: then the status counts.
  if (overdue_ && status.error_code() == grpc::StatusCode::CANCELLED) throw_overdue(ended);
  std::rethrow_exception(as_exception(status, endpoint_.address, cause));
}

void EnvStream::throw_overdue(bool ended) const {
  if (ended) throw std::invalid_argument(kNotAMessage);
  throw Unresponsive("environment server at " + endpoint_.address + " sent no step within " +
                     to_string(step_timeout_));
}

void EnvStream::close() {
  if (wire_ == nullptr) return;
  wire_->half_close();
  wire_->finish();
  MutexLock lock(mutex_);
  wire_.reset();
}

void EnvStream::cancel() {
  cancelled_ = true;
  MutexLock lock(mutex_);
  if (describing_ != nullptr) describing_->TryCancel();
  if (wire_ != nullptr) wire_->cancel();
}

void EnvStream::cancel_if_overdue() {
  const Clock::rep at = overdue_at_;
  if (at == 0 || Clock::now().time_since_epoch().count() < at) return;
  overdue_ = true;
  MutexLock lock(mutex_);
  if (wire_ != nullptr) wire_->cancel();
}

}  // namespace torchbeast
