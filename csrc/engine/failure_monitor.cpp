// What a rank says when an operation cannot end: which rank is at fault, and why.
#include <poll.h>
#include <sched.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <utility>

#include "engine/communicator.h"

namespace dtcomm {

void Communicator::check_failures() const {
  for (const PeerView& peer : peers) {
    const Failure& failure = peer.head->failure;
    if (failure.state.load(std::memory_order_acquire) == 2) throw Error(failure.kind, failure.text);
  }
}

bool Communicator::dead(int peer, int wait_ms) {
  if (const Remote* const remote = remote_of(peer)) {
    return remote->stream().ended() && !remote->view().head->closed.load(std::memory_order_acquire);
  }
  pollfd watched{pidfds_[static_cast<std::size_t>(peer)], POLLIN, 0};
  return peer != rank && watched.fd >= 0 && poll(&watched, 1, wait_ms) > 0;
}

void Communicator::raise_gone(int peer) {
  throw Error(ErrorKind::peer_lost, who(peer) + " is gone: its process ended while " + who(rank) + " read its tensor");
}

// Decides whether a blocked operation can still end: the error that it raises otherwise names the rank at fault.
void Communicator::watch(const Machine& machine, std::uint64_t deadline) {
  const std::uint64_t number = machine.number();
  own_.head->waiting_for.store(machine.blocker(), std::memory_order_relaxed);
  own_.head->waiting_since.store(now_ns(), std::memory_order_release);
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    flights_.wait(number, machine.blocker());
  }
  tell(machine);
  check_failures();
  for (const PeerView& peer : peers) {
    const OpHeader& header = peer.head->ops[number % kOpRing];
    if (header.number.load(std::memory_order_acquire) == number &&
        header.fingerprint.load(std::memory_order_relaxed) != machine.operation()) {
      raise_mismatch(machine);
    }
  }
  const int blocker = machine.blocker();
  if (blocker >= 0 && dead(blocker)) {
    if (suspect_ == blocker) {
      culprit_ = blocker;
      const Remote* const remote = remote_of(blocker);
      const std::string how = remote ? "its connection ended (" + remote->stream().why() + ")" : "its process ended";
      throw Error(ErrorKind::peer_lost, who(blocker) + " is gone: " + how + " during operation " +
                                            std::to_string(number) + ", " + machine.call().plan->text());
    }
    suspect_ = blocker;  // it may have sent what we need with its last breath
    return;
  }
  if (blocker >= 0 && peers[static_cast<std::size_t>(blocker)].head->closed.load(std::memory_order_acquire)) {
    if (suspect_ == blocker) {
      culprit_ = blocker;
      throw Error(ErrorKind::peer_lost, who(blocker) + " has destroyed its communicator before operation " +
                                            std::to_string(number) + ", " + machine.call().plan->text());
    }
    suspect_ = blocker;
    return;
  }
  suspect_ = -1;
  if (now_ns() > deadline) raise_timeout(machine);
}

// What the ranks say about the operation with our number, those who say the same together.
void Communicator::raise_mismatch(const Machine& machine) {
  const std::uint64_t number = machine.number();
  const std::uint64_t patience = now_ns() + 200 * 1000 * 1000;
  std::vector<std::pair<std::string, std::vector<int>>> statements;
  std::vector<std::uint64_t> fingerprints;
  std::vector<int> silent;
  told_ = 0;
  tell(machine);
  for (;;) {
    pump();
    check_failures();
    statements.clear();
    fingerprints.clear();
    silent.clear();
    for (int peer = 0; peer < ranks; ++peer) {
      const OpHeader& header = peers[static_cast<std::size_t>(peer)].head->ops[number % kOpRing];
      if (header.number.load(std::memory_order_acquire) != number) {
        silent.push_back(peer);
        continue;
      }
      const std::uint64_t fingerprint = header.fingerprint.load(std::memory_order_relaxed);
      const std::string text(header.text, strnlen(header.text, kOpText));
      std::size_t at = 0;
      while (at < fingerprints.size() && fingerprints[at] != fingerprint) ++at;
      if (at == fingerprints.size()) {
        fingerprints.push_back(fingerprint);
        statements.push_back({text, {}});
      }
      statements[at].second.push_back(peer);
    }
    if (silent.empty() || now_ns() > patience) break;
    sched_yield();
  }
  std::string message = "ranks disagree on operation " + std::to_string(number);
  std::size_t fewest = 0;
  for (std::size_t i = 0; i < statements.size(); ++i) {
    message += i == 0 ? ": " : "; ";
    for (std::size_t j = 0; j < statements[i].second.size(); ++j) {
      message += (j == 0 ? "" : ", ") + who(statements[i].second[j]);
    }
    message += (statements[i].second.size() == 1 ? " calls " : " call ") + statements[i].first;
    // On a tie the later statement: rank 0's word counts as the rule.
    if (statements[i].second.size() <= statements[fewest].second.size()) fewest = i;
  }
  if (statements.size() < 2) {
    message += ": " + who(machine.blocker()) + " is ahead of, or at odds with, " + machine.call().plan->text();
    culprit_ = machine.blocker();
  } else {
    culprit_ = statements[fewest].second[0];
  }
  throw Error(ErrorKind::mismatch, message);
}

// The rank at the end of the chain of waits: one that sleeps in our engine says whom it waits for and when it last
// looked; one that is stopped, or busy elsewhere, has not looked lately.
void Communicator::raise_timeout(const Machine& machine) {
  int culprit = machine.blocker();
  std::vector<bool> passed(static_cast<std::size_t>(ranks), false);
  for (;;) {
    if (culprit < 0 || culprit == rank || passed[static_cast<std::size_t>(culprit)]) break;
    passed[static_cast<std::size_t>(culprit)] = true;
    const AreaHead& head = *peers[static_cast<std::size_t>(culprit)].head;
    const std::uint64_t since = head.waiting_since.load(std::memory_order_acquire);
    const int next = head.waiting_for.load(std::memory_order_relaxed);
    if (next < 0 || next == rank || since + 25 * kSleepNs < now_ns()) break;
    culprit = next;
  }
  culprit_ = culprit;
  std::string message =
      "operation " + std::to_string(machine.number()) + ", " + machine.call().plan->text() + ", did not end within " +
      std::to_string(static_cast<double>(timeout_ns_.load(std::memory_order_relaxed)) * 1e-9).substr(0, 6) + " s";
  if (culprit >= 0) {
    std::uint64_t latest = 0;
    for (const OpHeader& header : peers[static_cast<std::size_t>(culprit)].head->ops) {
      latest = std::max(latest, header.number.load(std::memory_order_relaxed));
    }
    message += ": waiting for " + who(culprit) + ", which is alive and " +
               (latest < machine.number() ? "has not called it (its last operation is " + std::to_string(latest) + ")"
                                          : std::string("does not move on"));
  }
  throw Error(ErrorKind::timeout, message);
}

void Communicator::raise_damage(const Machine& machine) {
  const Damage& damage = *machine.damage();
  char checksums[64];
  std::snprintf(checksums, sizeof checksums, "checksum %08x when sent, %08x on arrival", damage.sent, damage.arrived);
  culprit_ = damage.sender;
  throw Error(ErrorKind::corrupt, "what " + who(damage.sender) + " sent to " + who(rank) + " arrived damaged: chunk " +
                                      std::to_string(damage.chunk) + " of piece " + std::to_string(damage.piece) +
                                      " of operation " + std::to_string(machine.number()) + ", " +
                                      machine.call().plan->text() + " (" + checksums + ")");
}

// From here on every call raises; the peers read why in our area.
void Communicator::fail(const Error& error, int culprit) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!failed_) {
      failed_ = true;
      failure_kind_ = error.kind();
      failure_text_ = error.what();
    }
  }
  Failure& failure = own_.head->failure;
  std::uint32_t none = 0;
  if (failure.state.compare_exchange_strong(none, 1)) {
    failure.kind = error.kind();
    failure.culprit = culprit;
    const std::string text(error.what());
    const std::size_t length = std::min(text.size(), sizeof failure.text - 1);
    text.copy(failure.text, length);
    failure.text[length] = 0;
    failure.state.store(2, std::memory_order_release);
  }
  ring_peers();
  tell_failure();
}

std::vector<Flight> Communicator::flights() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return flights_.list();
}

std::vector<Sighting> Communicator::sightings() {
  std::vector<Sighting> seen;
  for (int peer = 0; peer < static_cast<int>(peers.size()); ++peer) {
    const AreaHead& head = *peers[static_cast<std::size_t>(peer)].head;
    Sighting sighting;
    for (const OpHeader& header : head.ops) {
      const std::uint64_t number = header.number.load(std::memory_order_acquire);
      if (number <= sighting.last) continue;
      sighting.last = number;
      sighting.text.assign(header.text, strnlen(header.text, kOpText));
    }
    sighting.pieces = head.done.load(std::memory_order_relaxed);
    sighting.waiting_for = head.waiting_for.load(std::memory_order_relaxed);
    sighting.alive = !dead(peer);
    sighting.closed = head.closed.load(std::memory_order_relaxed) != 0;
    seen.push_back(std::move(sighting));
  }
  return seen;
}

std::string Communicator::failure() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return failure_text_;
}

}  // namespace dtcomm
