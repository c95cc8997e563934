// Encodes, checks and decodes granules of deltas of weights.
//
// A granule's elements are split into classes by the exponent of the old value: the smaller a weight, the more units in
// the last place a step of the optimizer moves it. Each class is coded alone, as if its elements lay side by side, in
// order. All integers are written as Rice codes (cpu/source/rice_code.h).
#include "cpu/source/weight_delta.h"

#include <initializer_list>
#include <type_traits>

#include "cpu/source/rice_code.h"

namespace dtcomm::DTCOMM_ISA {

namespace {

constexpr unsigned kUsualClasses = 8;      // of a granule that the encoder splits
constexpr std::size_t kFewChanges = 1024;  // below, the encoder counts the bits without classes, too
constexpr unsigned kModeBits = 2;
constexpr unsigned kGapBits = 4, kStepBits = 5;  // of a Rice parameter, by what the integers are

// --- classes --------------------------------------------------------------------------------------------------

template <class T>
constexpr T kMagnitude = static_cast<T>(static_cast<T>(~T{0}) >> 1);

// How elements are split: class j has the elements whose exponent is top - j, the first also those above and the last
// those below.
struct Split {
  unsigned classes, top, mantissa_bits;

  // The number of classes, which the compiler knows if it is the usual one.
  template <bool Usual>
  unsigned count() const {
    return Usual ? kUsualClasses : classes;
  }
};

// The classes of 64 elements.
struct Classes {
  Bytes numbers;
  std::uint64_t exist;
  std::uint8_t of[kBlock];

  template <class T>
  Classes(const Split& split, const T* elements, std::uint64_t existing)
      : numbers(distances<T>(elements, kMagnitude<T>, split.mantissa_bits, split.top, split.classes - 1)),
        exist(existing) {
    numbers.store(of);
  }
  // The bits of the elements of a class.
  std::uint64_t bits(unsigned j) const { return numbers.equal(static_cast<std::uint8_t>(j)) & exist; }
};

// Calls function(first element, classes) for each 64 elements.
template <class T, class Function>
inline void for_blocks(const Split& split, const T* elements, std::size_t n, const Function& function) {
  std::size_t i = 0;
  for (; i + kBlock <= n; i += kBlock) function(i, Classes(split, elements + i, ~std::uint64_t{0}));
  if (i == n) return;
  T last[kBlock] = {};
  __builtin_memcpy(last, elements + i, (n - i) * sizeof(T));
  function(i, Classes(split, last, (std::uint64_t{1} << (n - i)) - 1));
}

// The changed elements of a class: their ranks in the class, in order, and new - old, with the sign in all bits above.
struct List {
  std::uint32_t *ranks, *steps;
  std::size_t count = 0, size = 0;  // changed elements, all elements

  List() = default;
  List(std::uint32_t* room, unsigned j) : ranks(room + 2 * j * kDeltaList), steps(ranks + kDeltaList) {}
  void add(std::uint32_t rank, std::uint32_t step) {
    ranks[count] = rank;
    steps[count++] = step;
  }
};

inline std::uint32_t zigzag(std::uint32_t step) {
  return step << 1 ^ static_cast<std::uint32_t>(static_cast<std::int32_t>(step) >> 31);
}
inline std::uint32_t unzigzag(std::uint32_t value) { return value >> 1 ^ (0u - (value & 1)); }

template <class T>
inline std::uint32_t step_between(T old, T fresh) {
  constexpr unsigned kRest = 32 - 8 * sizeof(T);
  const auto difference = static_cast<std::uint32_t>(fresh) - static_cast<std::uint32_t>(old);
  return static_cast<std::uint32_t>(static_cast<std::int32_t>(difference << kRest) >> kRest);
}

// --- encoding a class -----------------------------------------------------------------------------------------

// The code of a class: what it takes, and the integers in `room`, each list followed by zeros to a multiple of 64.
struct ClassCode {
  DeltaMode mode = DeltaMode::same;
  std::uint64_t bits = kModeBits;
  std::uint32_t *gaps, *codes, *exception_gaps, *magnitudes;
  std::size_t exceptions = 0;
  Rice gap{}, exception_gap{}, magnitude{}, dense{};

  ClassCode(const List& list, unsigned element_bits, std::uint32_t* scratch)
      : gaps(scratch),
        codes(gaps + kDeltaList),
        exception_gaps(codes + kDeltaList),
        magnitudes(exception_gaps + kDeltaList) {
    const std::size_t count = list.count;
    if (count == 0) return;
    std::uint32_t next = 0, next_exception = 0;
    for (std::size_t i = 0; i < count; ++i) {
      gaps[i] = list.ranks[i] - next;
      next = list.ranks[i] + 1;
      const std::uint32_t code = zigzag(list.steps[i]) - 1;
      codes[i] = code;
      exception_gaps[exceptions] = static_cast<std::uint32_t>(i) - next_exception;
      magnitudes[exceptions] = (code >> 1) - 1;
      const bool is_exception = code > 1;
      exceptions += is_exception;
      next_exception = is_exception ? static_cast<std::uint32_t>(i) + 1 : next_exception;
    }
    for (std::uint32_t* values : {gaps, codes}) __builtin_memset(values + count, 0, kBlock * sizeof *values);
    for (std::uint32_t* values : {exception_gaps, magnitudes}) {
      __builtin_memset(values + exceptions, 0, kBlock * sizeof *values);
    }
    gap = best_rice(gaps, count, 0, (1 << kGapBits) - 1);
    const std::uint64_t places = kModeBits + number_bits(count) + kGapBits + gap.bits;
    std::uint64_t steps = places + count + number_bits(exceptions);
    if (exceptions > 0) {
      exception_gap = best_rice(exception_gaps, exceptions, 0, (1 << kGapBits) - 1);
      magnitude = best_rice(magnitudes, exceptions, 0, (1 << kStepBits) - 1);
      steps += kGapBits + exception_gap.bits + kStepBits + magnitude.bits;
    }
    mode = DeltaMode::steps;
    bits = steps;
    const std::uint64_t values = places + count * element_bits;
    if (values < bits) {
      mode = DeltaMode::values;
      bits = values;
    }
    if (count < list.size / 8) return;  // a bit for each element is more than the places of so few take
    // The codes are one less than the integers, which is undone when they are written.
    for (std::size_t i = 0; i < count; ++i) ++codes[i];
    dense = best_rice(codes, count, list.size - count, (1 << kStepBits) - 1);
    for (std::size_t i = 0; i < count; ++i) --codes[i];
    const std::uint64_t all = kModeBits + number_bits(list.size) + kStepBits + dense.bits;
    if (all < bits) {
      mode = DeltaMode::dense;
      bits = all;
    }
  }

  void write(const List& list, unsigned element_bits, Writer& to) {
    const std::size_t count = list.count;
    to.put(static_cast<unsigned>(mode), kModeBits);
    if (mode == DeltaMode::same) return;
    if (mode == DeltaMode::dense) {
      __builtin_memset(gaps, 0, (list.size + kBlock) * sizeof *gaps);
      for (std::size_t i = 0; i < count; ++i) gaps[list.ranks[i]] = codes[i] + 1;
      to.put_number(list.size);
      to.put(dense.parameter, kStepBits);
      put_rice(to, gaps, list.size, dense.parameter);
      return;
    }
    to.put_number(count);
    to.put(gap.parameter, kGapBits);
    put_rice(to, gaps, count, gap.parameter);
    if (mode == DeltaMode::values) {
      for (std::size_t i = 0; i < count; ++i) to.put(list.steps[i], element_bits);
      return;
    }
    for (std::size_t i = 0; i < count; i += kBlock) {
      to.put(plane_of(codes + i, 0), static_cast<unsigned>(smaller(kBlock, count - i)));
    }
    to.put_number(exceptions);
    if (exceptions == 0) return;
    to.put(exception_gap.parameter, kGapBits);
    put_rice(to, exception_gaps, exceptions, exception_gap.parameter);
    to.put(magnitude.parameter, kStepBits);
    put_rice(to, magnitudes, exceptions, magnitude.parameter);
  }
};

// --- encoding a granule ---------------------------------------------------------------------------------------

// The exponent of the first class: the largest that one element in 64 reaches, of every 16th.
template <class T>
inline unsigned top_exponent(const T* old, std::size_t n, unsigned mantissa_bits) {
  std::uint16_t counts[256] = {};
  std::size_t looked = 0;
  for (std::size_t i = 0; i < n; i += 16, ++looked) {
    ++counts[((unaligned<T>(old)[i].value & kMagnitude<T>) >> mantissa_bits) & 0xff];
  }
  std::size_t reached = 0;
  for (unsigned e = 256; e-- > 0;) {
    reached += counts[e];
    if (64 * reached >= looked) return e;
  }
  return 0;
}

template <class T>
inline std::size_t encode_granule(unsigned mantissa_bits, const T* old, const T* fresh, std::size_t n,
                                  std::uint32_t* room, std::uint8_t* to, std::size_t* changed) {
  constexpr unsigned kBits = 8 * sizeof(T);
  List changes(room, kDeltaClasses);
  changes.size = n;
  for (std::size_t i = 0; i < n; i += kBlock) {
    std::uint64_t differ;
    if (i + kBlock <= n) {
      differ = differing(old + i, fresh + i);
    } else {
      T last[2][kBlock] = {};
      __builtin_memcpy(last[0], old + i, (n - i) * sizeof(T));
      __builtin_memcpy(last[1], fresh + i, (n - i) * sizeof(T));
      differ = differing(last[0], last[1]);
    }
    for (; differ != 0; differ &= differ - 1) {
      const std::size_t at = i + lowest_bit(differ);
      changes.add(static_cast<std::uint32_t>(at),
                  step_between(unaligned<T>(old)[at].value, unaligned<T>(fresh)[at].value));
    }
  }
  *changed = changes.count;
  if (changes.count == 0) return 0;

  Split split{1, 0, mantissa_bits};
  List lists[kUsualClasses];
  if (mantissa_bits != 0) {
    split = {kUsualClasses, top_exponent(old, n, mantissa_bits), mantissa_bits};
    for (unsigned j = 0; j < kUsualClasses; ++j) lists[j] = List(room, j);
    changes.ranks[changes.count] = UINT32_MAX;
    std::size_t next = 0;
    for_blocks(split, old, n, [&](std::size_t i, const Classes& classes) {
      for (; changes.ranks[next] < i + kBlock; ++next) {
        const std::uint32_t place = changes.ranks[next] - static_cast<std::uint32_t>(i);
        const unsigned j = classes.of[place];
        const std::uint64_t before = (std::uint64_t{1} << place) - 1;
        lists[j].add(static_cast<std::uint32_t>(lists[j].size + count_bits(classes.bits(j) & before)),
                     changes.steps[next]);
      }
      for (unsigned j = 0; j < kUsualClasses; ++j) lists[j].size += count_bits(classes.bits(j));
    });
  }

  std::uint32_t* const scratch = room + 2 * (kDeltaClasses + 1) * kDeltaList;
  if (split.classes > 1 && changes.count < kFewChanges) {
    std::uint64_t bits = 8;
    for (const List& list : lists) bits += ClassCode(list, kBits, scratch).bits;
    if (ClassCode(changes, kBits, scratch).bits <= bits) split.classes = 1;
  }
  if (split.classes == 1) lists[0] = changes;
  const std::size_t most = n * sizeof(T);
  to[0] = static_cast<std::uint8_t>(split.classes);
  to[1] = static_cast<std::uint8_t>(split.top);
  Writer writer{to};
  writer.at = split.classes > 1 ? 16 : 8;
  std::size_t cleared = writer.at / 8;
  for (unsigned j = 0; j < split.classes; ++j) {
    ClassCode code(lists[j], kBits, scratch);
    const std::size_t bytes = (writer.at + code.bits + 7) / 8;
    if (bytes > most) {
      to[0] = 0;
      __builtin_memcpy(to + 1, fresh, most);
      return 1 + most;
    }
    __builtin_memset(to + cleared, 0, bytes + kDeltaSlack - cleared);
    cleared = bytes + kDeltaSlack;
    code.write(lists[j], kBits, writer);
  }
  return (writer.at + 7) / 8;
}

// --- decoding -------------------------------------------------------------------------------------------------

// Where the parts of a class are in a payload.
struct ClassAt {
  DeltaMode mode;
  std::uint32_t count = 0, exceptions = 0;
  std::uint64_t values = 0;  // or signs
  RiceAt integers, exception_gaps, magnitudes;
  std::size_t reach = 0;  // elements that the class has at least; exactly, if dense

  // nullptr, or what is wrong with the class, of a granule of n elements.
  const char* parse(Reader& from, unsigned element_bits, std::size_t n) {
    std::uint32_t number;
    if (!from.take(kModeBits, number)) return "ends within a granule";
    mode = static_cast<DeltaMode>(number);
    if (mode == DeltaMode::same) return nullptr;
    if (!from.take_number(count)) return "has a count that is not a number";
    if (count == 0 || count > n) return "has a class with an impossible number of elements";
    if (!take_rice(from, count, mode == DeltaMode::dense ? kStepBits : kGapBits, integers)) {
      return "ends within the integers of a class";
    }
    reach = count;
    if (mode == DeltaMode::dense) return nullptr;
    const std::uint64_t places = integers.sum(from.base) + count;
    if (places > n) return "has a place behind the end of its granule";
    reach = places;
    values = from.at;
    if (mode == DeltaMode::values) {
      return from.skip(std::uint64_t{count} * element_bits) ? nullptr : "ends within the values of a class";
    }
    if (!from.skip(count)) return "ends within the signs of a class";
    if (!from.take_number(exceptions) || exceptions > count) return "has an impossible number of longer steps";
    if (exceptions == 0) return nullptr;
    if (!take_rice(from, exceptions, kGapBits, exception_gaps)) return "ends within the places of longer steps";
    if (exception_gaps.sum(from.base) + exceptions > count) return "has a longer step behind the last step";
    return take_rice(from, exceptions, kStepBits, magnitudes) ? nullptr : "ends within the lengths of steps";
  }

  // Reads a class of a granule of n elements: which of its elements change, in order, as bits, with zeros behind them
  // that peek() can read, and by how much.
  void read(const std::uint8_t* base, unsigned element_bits, std::size_t n, std::uint32_t* scratch,
            std::uint64_t* changed, std::uint32_t* steps) const {
    __builtin_memset(changed, mode == DeltaMode::dense ? 0xff : 0, (n + 63) / 64 * 8);
    __builtin_memset(changed + (n + 63) / 64, 0, 16);
    if (mode == DeltaMode::same) return;
    if (mode == DeltaMode::dense) {
      unpack(base, integers, steps);
      for (std::uint32_t i = 0; i < count; ++i) steps[i] = unzigzag(steps[i]);
      return;
    }
    std::uint32_t *const gaps = scratch, *const lengths = scratch + kDeltaList;
    unpack(base, integers, gaps);
    std::uint32_t next = 0;
    for (std::uint32_t i = 0; i < count; ++i) {
      next += gaps[i];
      changed[next / 64] |= std::uint64_t{1} << next % 64;
      ++next;
    }
    if (mode == DeltaMode::values) {
      for (std::uint32_t i = 0; i < count; ++i) {
        steps[i] = static_cast<std::uint32_t>(peek(base, values + std::uint64_t{i} * element_bits));
      }
      return;
    }
    for (std::uint32_t i = 0; i < count; i += kBlock) {
      const std::uint64_t signs = peek(base, values + i);
      for (unsigned k = 0; k < kBlock; ++k) steps[i + k] = static_cast<std::uint32_t>(signs >> k & 1) * 2 - 1;
    }
    if (exceptions == 0) return;
    unpack(base, exception_gaps, gaps);
    unpack(base, magnitudes, lengths);
    next = 0;
    for (std::uint32_t i = 0; i < exceptions; ++i) {
      next += gaps[i];
      const std::uint32_t sign = steps[next] == 1;
      steps[next] = unzigzag(((lengths[i] + 1) << 1 | sign) + 1);
      ++next;
    }
  }
};

// The classes of a coded granule, and what changes in them.
template <class T>
struct Coded {
  Split split{};
  ClassAt classes[kDeltaClasses];
  std::size_t sizes[kDeltaClasses] = {};  // elements of each class

  // nullptr, or what is wrong with a granule of n elements.
  const char* parse(unsigned mantissa_bits, const std::uint8_t* granule, std::size_t bytes, std::size_t n) {
    split = {granule[0], 0, mantissa_bits};
    if (split.classes > kDeltaClasses) return "has a granule with too many classes";
    if (split.classes > 1) {
      if (mantissa_bits == 0) return "has classes of elements without exponents";
      if (bytes < 2) return "ends within the head of a granule";
      split.top = granule[1];
      if (split.top << mantissa_bits > kMagnitude<T>) return "has an impossible exponent";
    }
    Reader from{granule, split.classes > 1 ? 16u : 8u, std::uint64_t{bytes} * 8};
    for (unsigned j = 0; j < split.classes; ++j) {
      if (const char* error = classes[j].parse(from, 8 * sizeof(T), n)) return error;
    }
    if ((from.at + 7) / 8 != bytes) return "has bytes behind the last class of a granule";
    if ((from.at & 7) != 0 && granule[bytes - 1] >> (from.at & 7) != 0) return "has bits behind the last class";
    return nullptr;
  }

  template <bool Usual>
  void count(const T* old, std::size_t n) {
    if (split.classes == 1) {
      sizes[0] = n;
      return;
    }
    for_blocks(split, old, n, [&](std::size_t, const Classes& block) {
      for (unsigned j = 0; j < split.template count<Usual>(); ++j) sizes[j] += count_bits(block.bits(j));
    });
  }

  // nullptr, or what is wrong with the sizes of the classes.
  const char* fit() const {
    for (unsigned j = 0; j < split.classes; ++j) {
      const bool exact = classes[j].mode == DeltaMode::dense;
      if (exact ? classes[j].reach != sizes[j] : classes[j].reach > sizes[j]) {
        return "was made from other weights than `old`, or is damaged";
      }
    }
    return nullptr;
  }

  // Changes the weights, and counts the elements of each class. Whatever they are, no other memory is written.
  template <bool Usual>
  void apply(const std::uint8_t* granule, std::size_t n, std::uint32_t* room, T* weights) {
    std::uint64_t* bits[kDeltaClasses];
    const std::uint32_t* steps[kDeltaClasses];
    for (unsigned j = 0; j < split.template count<Usual>(); ++j) {
      bits[j] = reinterpret_cast<std::uint64_t*>(room + 2 * j * kDeltaList);
      std::uint32_t* const own = room + (2 * j + 1) * kDeltaList;
      classes[j].read(granule, 8 * sizeof(T), n, room + 2 * (kDeltaClasses + 1) * kDeltaList, bits[j], own);
      steps[j] = own;
    }
    auto* const elements = unaligned<T>(weights);
    if (split.classes == 1) {
      sizes[0] = n;
      for (std::size_t i = 0; i < n; i += kBlock) {
        std::uint64_t places = bits[0][i / 64];
        if (n - i < kBlock) places &= (std::uint64_t{1} << (n - i)) - 1;
        for (; places != 0; places &= places - 1) {
          auto& element = elements[i + lowest_bit(places)];
          element.value = static_cast<T>(element.value + *steps[0]++);
        }
      }
      return;
    }
    for_blocks(split, weights, n, [&](std::size_t i, const Classes& block) {
      std::uint64_t places = 0;
      for (unsigned j = 0; j < split.template count<Usual>(); ++j) {
        const std::uint64_t own = block.bits(j);
        const unsigned count = count_bits(own);
        const auto* const from = reinterpret_cast<const std::uint8_t*>(bits[j]);
        // Eight bytes have 57 bits from any bit of the first byte on; few blocks have more elements of one class.
        std::uint64_t changed = unaligned<std::uint64_t>(from + (sizes[j] >> 3))->value >> (sizes[j] & 7);
        if (count > 57) changed = peek(from, sizes[j]);
        places |= deposit_bits(changed, own);
        sizes[j] += count;
      }
      for (; places != 0; places &= places - 1) {
        const unsigned at = lowest_bit(places);
        auto& element = elements[i + at];
        element.value = static_cast<T>(element.value + *steps[block.of[at]]++);
      }
    });
  }
};

// Checks a granule, and changes the weights unless `room` is null.
template <class T>
inline const char* decode_granule(unsigned mantissa_bits, const std::uint8_t* granule, std::size_t bytes, std::size_t n,
                                  std::uint32_t* room, const T* old, T* weights) {
  if (bytes == 0) return nullptr;
  if (granule[0] == 0) {
    if (bytes != 1 + n * sizeof(T)) return "has a granule of another length than its elements";
    if (room) __builtin_memcpy(weights, granule + 1, n * sizeof(T));
    return nullptr;
  }
  Coded<T> coded;
  if (const char* error = coded.parse(mantissa_bits, granule, bytes, n)) return error;
  const bool usual = coded.split.classes == kUsualClasses;
  if (room) {
    usual ? coded.template apply<true>(granule, n, room, weights)
          : coded.template apply<false>(granule, n, room, weights);
  } else {
    usual ? coded.template count<true>(old, n) : coded.template count<false>(old, n);
  }
  return coded.fit();
}

// Calls function(a null pointer to the type of integers that elements are read as, bits of the mantissa).
template <class Function>
inline auto with_type(WeightKind kind, const Function& function) {
  const WeightLayout layout = layout_of(kind);
  if (layout.size == 1) return function(static_cast<std::uint8_t*>(nullptr), layout.mantissa_bits);
  if (layout.size == 2) return function(static_cast<std::uint16_t*>(nullptr), layout.mantissa_bits);
  return function(static_cast<std::uint32_t*>(nullptr), layout.mantissa_bits);
}

}  // namespace

std::size_t encode_delta(WeightKind kind, const void* old, const void* fresh, std::size_t n, std::uint32_t* room,
                         std::uint8_t* to, std::size_t* changed) {
  return with_type(kind, [&](auto* type, unsigned mantissa_bits) {
    using T = const std::remove_pointer_t<decltype(type)>;
    return encode_granule(mantissa_bits, static_cast<T*>(old), static_cast<T*>(fresh), n, room, to, changed);
  });
}

const char* check_delta(WeightKind kind, const std::uint8_t* granule, std::size_t bytes, std::size_t n,
                        const void* old) {
  return with_type(kind, [&](auto* type, unsigned mantissa_bits) {
    using T = std::remove_pointer_t<decltype(type)>;
    return decode_granule<T>(mantissa_bits, granule, bytes, n, nullptr, static_cast<const T*>(old), nullptr);
  });
}

const char* decode_delta(WeightKind kind, const std::uint8_t* granule, std::size_t bytes, std::size_t n,
                         std::uint32_t* room, void* weights) {
  return with_type(kind, [&](auto* type, unsigned mantissa_bits) {
    using T = std::remove_pointer_t<decltype(type)>;
    return decode_granule<T>(mantissa_bits, granule, bytes, n, room, nullptr, static_cast<T*>(weights));
  });
}

}  // namespace dtcomm::DTCOMM_ISA
