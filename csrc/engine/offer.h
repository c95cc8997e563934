// How a sender and a receiver agree whether the receiver copies the message out of the sender's memory, if the sender
// does not want to wait for a receiver that comes late.
//
// The sender's announcement is the offer. A receiver that comes in time takes it, and the sender waits until it has
// copied. A sender that has waited long enough withdraws the offer and copies the message into its slots, from which a
// receiver gets it at any time. If both happen at once, the receiver decides: each stores its own word before it loads
// the other one's, so at least one of them sees the other's, and a sender that sees that the receiver is about to take
// the offer waits for its answer.
#pragma once

#include <atomic>
#include <cstdint>
#include <optional>

namespace dtcomm {

// A rank's part in its region; numbers of operations, which grow.
struct OfferWords {
  std::atomic<std::uint64_t> withdrawn{0};  // as a sender
  std::atomic<std::uint64_t> taking{0};     // as a receiver: it is about to take the offer
  std::atomic<std::uint64_t> answer{0};     // as a receiver: 2 * number, + 1 if it copies
};

// The receiver's side, once it has seen the announcement: whether it copies.
inline bool take_offer(OfferWords& own, const OfferWords& sender, std::uint64_t number) {
  own.taking.store(number, std::memory_order_seq_cst);
  const bool copies = sender.withdrawn.load(std::memory_order_seq_cst) < number;
  own.answer.store(2 * number + (copies ? 1 : 0), std::memory_order_release);
  return copies;
}

// The sender's side: whether the receiver copies; nothing if that is open.
inline std::optional<bool> answer_to_offer(const OfferWords& receiver, std::uint64_t number) {
  const std::uint64_t answer = receiver.answer.load(std::memory_order_acquire);
  if (answer / 2 != number) return std::nullopt;
  return answer % 2 == 1;
}

// The same, and withdraws the offer. Nothing: the receiver answers in a moment.
inline std::optional<bool> withdraw_offer(OfferWords& own, const OfferWords& receiver, std::uint64_t number) {
  own.withdrawn.store(number, std::memory_order_seq_cst);
  if (receiver.taking.load(std::memory_order_seq_cst) < number) return false;
  return answer_to_offer(receiver, number);
}

}  // namespace dtcomm
