#include "engine/failure_monitor.h"

#include <sched.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <utility>
#include <vector>

namespace dtcomm {
namespace {

constexpr std::uint64_t kMismatchNs = 200 * 1000 * 1000;   // how long to wait for the other ranks' op headers
constexpr std::uint64_t kStaleWaitNs = 500 * 1000 * 1000;  // a rank that sleeps in the engine looks more often

std::string seconds_text(std::uint64_t ns) {
  char text[32];
  std::snprintf(text, sizeof text, "%g", static_cast<double>(ns) * 1e-9);
  return text;
}

std::string rounded_seconds(std::uint64_t ns) {
  char text[32];
  std::snprintf(text, sizeof text, ns < 10'000'000'000 ? "%.1f" : "%.0f", static_cast<double>(ns) * 1e-9);
  return text;
}

std::string describe(const Interpreter& interpreter) {
  return "operation " + std::to_string(interpreter.number()) + ", " + interpreter.call().plan->text();
}

}  // namespace

void FailureMonitor::check_peers() const {
  for (const PeerView& peer : peers_.peers) {
    const FailureRecord& failure = peer.header->failure;
    if (failure.state.load(std::memory_order_acquire) != 2) continue;
    // A kind or a rank that does not exist counts as unknown.
    const bool is_known = is_failure(static_cast<std::uint64_t>(failure.kind));
    const bool is_rank = failure.failed_rank >= 0 && failure.failed_rank < peers_.ranks;
    throw Error(is_known ? failure.kind : ErrorKind::internal,
                std::string(failure.text, strnlen(failure.text, sizeof failure.text)),
                is_rank ? failure.failed_rank : -1);
  }
}

// True at the second call in a row for the same suspect.
bool FailureMonitor::confirm_suspect(int suspect) {
  if (suspect_ == suspect) return true;
  suspect_ = suspect;
  return false;
}

void FailureMonitor::check_blocked(const Interpreter& interpreter, std::uint64_t deadline, std::uint64_t timeout_ns) {
  const std::uint64_t number = interpreter.number();
  const int awaited = interpreter.waiting_for();
  RegionHeader& own = peers_.own_header();
  own.waiting_for.store(awaited, std::memory_order_relaxed);
  own.waiting_since.store(now_ns(), std::memory_order_release);
  peers_.send_waiting_for(awaited);
  check_peers();
  for (const PeerView& peer : peers_.peers) {
    const OpHeader& header = peer.header->ops[number % kOpRing];
    if (header.number.load(std::memory_order_acquire) == number &&
        header.fingerprint.load(std::memory_order_relaxed) != interpreter.fingerprint()) {
      throw_mismatch(interpreter);
    }
  }
  if (interrupted_.load(std::memory_order_relaxed)) {
    const std::string whom = awaited < 0 ? "" : " for " + peers_.name(awaited);
    throw Error(ErrorKind::internal,
                peers_.name(peers_.rank) + " was interrupted while it waited" + whom + ": " + describe(interpreter),
                peers_.rank);
  }
  if (awaited >= 0 && peers_.has_ended(awaited)) {
    if (!confirm_suspect(awaited)) return;
    const RemotePeer* const remote = peers_.remote_peer(awaited);
    const std::string how = remote ? "its connection ended (" + remote->end_reason() + ")" : "its process ended";
    throw Error(ErrorKind::peer_lost, peers_.name(awaited) + " is gone: " + how + " during " + describe(interpreter),
                awaited);
  }
  if (awaited >= 0 && peers_.peer(awaited).header->closed.load(std::memory_order_acquire)) {
    if (!confirm_suspect(awaited)) return;
    throw Error(ErrorKind::peer_lost,
                peers_.name(awaited) + " has destroyed its communicator before " + describe(interpreter), awaited);
  }
  if (now_ns() <= deadline) {
    suspect_ = kNone;
  } else if (confirm_suspect(kDeadline)) {
    throw_timeout(interpreter, timeout_ns);
  }
}

// Lists what the ranks call as the operation with this number, grouped by what they call.
void FailureMonitor::throw_mismatch(const Interpreter& interpreter) {
  struct Statement {
    std::uint64_t fingerprint;
    std::string text;
    std::vector<int> ranks;
  };
  const std::uint64_t number = interpreter.number();
  const std::uint64_t give_up = now_ns() + kMismatchNs;
  std::vector<Statement> statements;
  peers_.send_waiting_for(interpreter.waiting_for(), true);
  for (;;) {
    peers_.remote().receive();
    check_peers();
    statements.clear();
    bool all_announced = true;
    for (int peer = 0; peer < peers_.ranks; ++peer) {
      const OpHeader& header = peers_.peer(peer).header->ops[number % kOpRing];
      if (header.number.load(std::memory_order_acquire) != number) {
        all_announced = false;
        continue;
      }
      const std::uint64_t fingerprint = header.fingerprint.load(std::memory_order_relaxed);
      auto statement = std::find_if(statements.begin(), statements.end(),
                                    [&](const Statement& other) { return other.fingerprint == fingerprint; });
      if (statement == statements.end()) {
        statements.push_back({fingerprint, std::string(header.text, strnlen(header.text, kOpText)), {}});
        statement = statements.end() - 1;
      }
      statement->ranks.push_back(peer);
    }
    if (all_announced || now_ns() > give_up) break;
    sched_yield();
  }
  std::string message = "ranks disagree on operation " + std::to_string(number);
  std::size_t fewest = 0;
  for (std::size_t i = 0; i < statements.size(); ++i) {
    const std::vector<int>& ranks = statements[i].ranks;
    message += i == 0 ? ": " : "; ";
    for (std::size_t j = 0; j < ranks.size(); ++j) message += (j == 0 ? "" : ", ") + peers_.name(ranks[j]);
    message += (ranks.size() == 1 ? " calls " : " call ") + statements[i].text;
    // The minority is at fault. On a tie it is the later statement: what rank 0 calls counts as right.
    if (ranks.size() <= statements[fewest].ranks.size()) fewest = i;
  }
  if (statements.size() < 2) {
    const int peer = interpreter.waiting_for();
    message += ": " + peers_.name(peer) + " is ahead of, or at odds with, " + interpreter.call().plan->text();
    throw Error(ErrorKind::mismatch, message, peer);
  }
  throw Error(ErrorKind::mismatch, message, statements[fewest].ranks[0]);
}

// Names the rank at the end of the chain of waits. A rank that sleeps in the engine publishes whom it waits for and
// when it last looked; one that is stopped, or busy elsewhere, has not looked lately and ends the chain.
void FailureMonitor::throw_timeout(const Interpreter& interpreter, std::uint64_t timeout_ns) const {
  int failed = interpreter.waiting_for();
  std::vector<bool> visited(static_cast<std::size_t>(peers_.ranks), false);
  while (failed >= 0 && failed != peers_.rank && !visited[static_cast<std::size_t>(failed)]) {
    visited[static_cast<std::size_t>(failed)] = true;
    const RegionHeader& header = *peers_.peer(failed).header;
    const std::uint64_t since = header.waiting_since.load(std::memory_order_acquire);
    const int next = peers_.awaited_by(failed);
    if (next < 0 || next == peers_.rank || since + kStaleWaitNs < now_ns()) break;
    failed = next;
  }
  std::string message = describe(interpreter) + ", did not end within " + seconds_text(timeout_ns) + " s";
  if (failed >= 0) {
    std::uint64_t last = 0;
    for (const OpHeader& header : peers_.peer(failed).header->ops) {
      last = std::max(last, header.number.load(std::memory_order_relaxed));
    }
    const RemotePeer* const remote = peers_.remote_peer(failed);
    const std::uint64_t now = now_ns();
    message += ": waiting for " + peers_.name(failed);
    if (remote && remote->is_cut_off()) {
      message += ", to which all connections have ended and none could be made anew";
    } else if (remote &&
               peers_.peer(failed).header->waiting_since.load(std::memory_order_acquire) + kStaleWaitNs < now) {
      // What it has called and where it is may be on the way.
      message += "; nothing has come from it for " + rounded_seconds(now - remote->heard_ns()) +
                 " s: it may have stopped or be busy elsewhere, or the link may be down";
    } else {
      message += std::string(remote ? ", which answers and " : ", which is alive and ") +
                 (last < interpreter.number() ? "has not called it (its last operation is " + std::to_string(last) + ")"
                                              : std::string("does not move on"));
    }
  }
  throw Error(ErrorKind::timeout, message, failed);
}

void FailureMonitor::throw_corrupt(const Interpreter& interpreter) const {
  const CorruptPayload& payload = *interpreter.corrupt();
  throw Error(ErrorKind::corrupt,
              "what " + peers_.name(payload.sender) + " sent to " + peers_.name(peers_.rank) +
                  " arrived damaged: chunk " + std::to_string(payload.chunk) + " of piece " +
                  std::to_string(payload.piece) + " of " + describe(interpreter) + " (" + payload.difference + ")",
              payload.sender);
}

void FailureMonitor::publish(const Error& error) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!failed_.load(std::memory_order_relaxed)) {
      kind_ = error.kind();
      message_ = error.what();
      failed_.store(true, std::memory_order_release);
    }
  }
  FailureRecord& failure = peers_.own_header().failure;
  std::uint32_t none = 0;
  if (failure.state.compare_exchange_strong(none, 1)) {
    failure.kind = error.kind();
    failure.failed_rank = error.failed_rank();
    const std::string text(error.what());
    const std::size_t length = std::min(text.size(), sizeof failure.text - 1);
    text.copy(failure.text, length);
    failure.text[length] = 0;
    failure.state.store(2, std::memory_order_release);
  }
  peers_.wake_peers();
  peers_.send_failure();
}

void FailureMonitor::throw_if_failed() const {
  if (!failed()) return;
  const std::lock_guard<std::mutex> lock(mutex_);
  throw Error(kind_, "this communicator failed earlier: " + message_);
}

std::string FailureMonitor::message() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return message_;
}

}  // namespace dtcomm
