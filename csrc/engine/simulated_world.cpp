#include "engine/simulated_world.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <stdexcept>

#include "engine/platform.h"

namespace dtcomm {
namespace {

// Something that a rank published: a number of finished pieces, or a flag.
struct Event {
  bool is_pieces_done;
  std::size_t index;
  std::uint64_t value;
  std::uint64_t operation;
  std::uint32_t checksum;
};

struct HeapRegion {
  explicit HeapRegion(std::size_t bytes) : data(::operator new(bytes, std::align_val_t{kPage})) {
    std::memset(data, 0, bytes);
  }
  ~HeapRegion() { ::operator delete(data, std::align_val_t{kPage}); }
  HeapRegion(const HeapRegion&) = delete;
  void* data;
};

}  // namespace

// Everything that a rank publishes goes into its log. Every reader sees a prefix of the log, as the memory order of
// shared memory guarantees.
class SimulatedWorld::Rank final : public Transport {
 public:
  Rank(SimulatedWorld& world, const RegionLayout& layout) : world_(world), layout_(layout), region_(layout.bytes()) {
    rank = static_cast<int>(layout.rank);
    ranks = static_cast<int>(layout.ranks);
    own_view = construct_region(region_.data, layout);
    tuner = &own_tuner_;
  }

  // Adds `source` to this rank's peers, as this rank sees it.
  void observe(Rank& source) {
    PeerView view = source.own_view;
    auto& seen = seen_.emplace_back(std::make_unique<Seen>(layout_.flags()));
    if (&source != this) {
      view.flags = seen->flags.get();
      view.pieces_done = &seen->pieces_done;
    }
    peers.push_back(view);
  }

  void publish_flag(std::size_t index, std::uint64_t seq, std::uint64_t operation, std::uint32_t checksum) override {
    BoxFlag& flag = own_view.flags[index];
    const bool sent_before = flag.seq == seq;  // a box that is sent in several steps counts once
    flag.operation.store(operation);
    flag.checksum.store(checksum);
    flag.seq.store(seq);
    log.push_back({false, index, seq, operation, checksum});
    if (!sent_before && world_.published_boxes_++ == world_.options_.flip_box) {
      const std::size_t stride = interpreter->call().plan->box_stride();
      std::uint8_t* const slot = own_view.data + (index % kSlots) * own_view.slot_stride;
      const std::uint64_t bit = world_.random() % (stride * 8);
      slot[index / kSlots * stride + bit / 8] ^= static_cast<std::uint8_t>(1u << (bit % 8));
    }
  }
  void publish_pieces_done(std::uint64_t pieces) override {
    own_view.header->pieces_done.store(pieces);
    log.push_back({true, 0, pieces, 0, 0});
  }
  std::uint8_t* map_tensor(int, const SharedTensorLocation& location, std::size_t) override {
    return reinterpret_cast<std::uint8_t*>(location.offset);  // all ranks have one address space
  }
  void read_memory(int, std::uint64_t address, std::uint8_t* out, std::size_t bytes) override {
    std::memcpy(out, reinterpret_cast<const std::uint8_t*>(address), bytes);
  }

  // Shows this rank one more event of `source`; false if it has seen all.
  bool see_next(const Rank& source) {
    Seen& seen = *seen_[static_cast<std::size_t>(source.rank)];
    if (&source == this || seen.events == source.log.size()) return false;
    const Event& event = source.log[seen.events++];
    if (event.is_pieces_done) {
      seen.pieces_done.store(event.value);
    } else {
      seen.flags[event.index].operation.store(event.operation);
      seen.flags[event.index].checksum.store(event.checksum);
      seen.flags[event.index].seq.store(event.value);
    }
    return true;
  }

  std::uint64_t now() const override { return world_.steps_; }

  bool running() const {
    return alive && outcome.kind == OutcomeKind::done && (interpreter || next_call < calls.size());
  }

  PeerView own_view;
  std::vector<Event> log;
  std::unique_ptr<Interpreter> interpreter;
  std::vector<Call> calls;
  std::size_t next_call = 0;
  std::uint64_t number = 0;  // of the current operation
  std::uint64_t steps = 0;
  bool alive = true;
  bool blocked = false;
  SimulationOutcome outcome;

 private:
  // What this rank has seen of another one.
  struct Seen {
    explicit Seen(std::size_t flag_count) : flags(new BoxFlag[flag_count]) {}
    std::unique_ptr<BoxFlag[]> flags;
    std::atomic<std::uint64_t> pieces_done{0};
    std::size_t events = 0;
  };

  SimulatedWorld& world_;
  Tuner own_tuner_{*this};
  RegionLayout layout_;
  HeapRegion region_;
  std::vector<std::unique_ptr<Seen>> seen_;
};

SimulatedWorld::SimulatedWorld(const SimulationOptions& options)
    : options_(options), random_state_(mix64(options.seed + 1)) {
  for (int rank = 0; rank < options.ranks; ++rank) {
    const RegionLayout layout{static_cast<std::uint32_t>(rank), static_cast<std::uint32_t>(options.ranks),
                              options.max_boxes, options.slot_bytes};
    ranks_.push_back(std::make_unique<Rank>(*this, layout));
  }
  for (auto& reader : ranks_) {
    for (auto& source : ranks_) reader->observe(*source);
  }
}

SimulatedWorld::~SimulatedWorld() = default;

std::uint64_t SimulatedWorld::random() { return random_state_ = mix64(random_state_); }

// Lets the ranks see some of what was published, or everything.
void SimulatedWorld::deliver(bool everything) {
  const auto threshold = static_cast<std::uint64_t>(options_.delay * 65536.0);
  for (auto& reader : ranks_) {
    for (auto& source : ranks_) {
      while ((everything || random() % 65536 >= threshold) && reader->see_next(*source)) {
      }
    }
  }
}

// Advances one rank by a few instructions.
void SimulatedWorld::step(Rank& rank) {
  ++steps_;
  if (rank.rank == options_.crash_rank && rank.steps++ >= options_.crash_after) {
    rank.alive = false;
    rank.outcome.kind = OutcomeKind::died;
    return;
  }
  if (!rank.interpreter) {
    ++rank.number;
    const Call& call = rank.calls[rank.next_call++];
    const std::uint64_t fingerprint = announce(*rank.own_view.header, call, rank.number);
    rank.interpreter = std::make_unique<Interpreter>(rank, call, fingerprint, rank.number);
  }
  const Progress progress = rank.interpreter->advance(1 + static_cast<int>(random() % 6));
  rank.blocked = progress == Progress::blocked;
  if (!rank.blocked) {
    for (auto& other : ranks_) other->blocked = false;
  }
  if (const auto& corrupt = rank.interpreter->corrupt()) {
    rank.outcome.kind = OutcomeKind::corrupt;
    rank.outcome.failed_rank = corrupt->sender;
  } else if (rank.interpreter->mismatch()) {
    rank.outcome.kind = OutcomeKind::mismatch;
    rank.outcome.failed_rank = rank.interpreter->waiting_for();
  } else if (progress == Progress::done) {
    rank.outcome.wire_bytes += rank.interpreter->wire_bytes();
    ++rank.outcome.finished;
    rank.interpreter.reset();
  }
  deliver(false);
}

// Decides how ranks end that are blocked although they have seen everything.
void SimulatedWorld::resolve_deadlock(const std::vector<Rank*>& blocked) {
  const bool any_dead = std::any_of(ranks_.begin(), ranks_.end(), [](const auto& rank) { return !rank->alive; });
  for (Rank* rank : blocked) {
    bool disagree = false;
    for (auto& other : ranks_) {
      const OpHeader& header = other->own_view.header->ops[rank->number % kOpRing];
      disagree |= header.number == rank->number && header.fingerprint != rank->interpreter->fingerprint();
    }
    rank->outcome.kind = any_dead ? OutcomeKind::peer_lost : disagree ? OutcomeKind::mismatch : OutcomeKind::deadlock;
    rank->outcome.failed_rank = rank->interpreter->waiting_for();
    for (auto& other : ranks_) {  // in the engine, this rank would read that one's failure
      if (other->outcome.kind != OutcomeKind::corrupt) continue;
      rank->outcome.kind = OutcomeKind::corrupt;
      rank->outcome.failed_rank = other->outcome.failed_rank;
    }
  }
}

std::vector<SimulationOutcome> SimulatedWorld::run(std::vector<std::vector<Call>> calls) {
  if (calls.size() != ranks_.size()) throw std::invalid_argument("calls: one list per rank");
  for (std::size_t i = 0; i < ranks_.size(); ++i) {
    Rank& rank = *ranks_[i];
    rank.calls = std::move(calls[i]);
    rank.next_call = 0;
    rank.outcome = SimulationOutcome{};
    if (!rank.alive) rank.outcome.kind = OutcomeKind::died;
  }
  bool everything_delivered = false;  // since a rank moved last
  for (;;) {
    std::vector<Rank*> candidates;
    for (auto& rank : ranks_) {
      if (rank->running()) candidates.push_back(rank.get());
    }
    if (candidates.empty()) break;
    if (std::all_of(candidates.begin(), candidates.end(), [](const Rank* rank) { return rank->blocked; })) {
      if (everything_delivered) {
        resolve_deadlock(candidates);
        break;
      }
      deliver(true);
      everything_delivered = true;
      for (Rank* rank : candidates) {
        rank->blocked = false;
        rank->interpreter->end_offer();
      }
      continue;
    }
    Rank& rank = *candidates[random() % candidates.size()];
    step(rank);
    if (rank.alive && !rank.blocked) everything_delivered = false;
  }
  std::vector<SimulationOutcome> outcomes;
  for (auto& rank : ranks_) {
    rank->outcome.choices = rank->tuner->reports();
    outcomes.push_back(rank->outcome);
  }
  return outcomes;
}

}  // namespace dtcomm
