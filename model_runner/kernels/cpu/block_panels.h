// Weights in small groups with scales of their own, as GGUF's blocks and 4-bit checkpoints have them. Each weight keeps
// its value.
//
// Rows have 12 bits, and products are summed in 32-bit integers up to the end of a step, which is as long as weights
// share a floating-point scale: 16, 32 or 256 inputs. Then
//
//     y += scale * sum of x level + minimum * sum of x
//
// is added in float32, in the order of steps. So a row's result depends neither on other rows, nor on the instruction
// set.
//
// In steps of 256, levels have integer scales for 16 or 32 inputs, and sums of x integer minimums. The largest sums
// occur in Q6_K, with levels to 32 and scales to 128: 256 * 32 * 128 * 2047 < 2^31.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "block_formats.h"
#include "half_precision.h"
#include "quantized_rows.h"
#include "simd.h"

namespace SW_ISA {

constexpr int kChunk = 256;  // inputs that are unpacked at once
constexpr int kSubgroupPairs = kSubgroup / kPair;

static_assert(int64_t{256} * 32 * 128 * kRowLevels <= INT32_MAX);  // Q6_K
static_assert(int64_t{256} * 127 * 32 * kRowLevels <= INT32_MAX);  // IQ4_XS
static_assert(int64_t{256} * 31 * 63 * kRowLevels <= INT32_MAX);   // Q5_K; Q4_K, Q2_K and IQ formats have less
static_assert(int64_t{256} * 63 * kRowLevels <= INT32_MAX);        // minimums
static_assert(kSubgroup * kRowLevels <= INT16_MAX);                // sums of x

// 16-bit integers of kWidth outputs, two of each, for a pair of inputs.
typedef int16_t Shorts __attribute__((vector_size(kWidth * kPair * sizeof(int16_t))));
typedef uint16_t UnsignedShorts __attribute__((vector_size(sizeof(Shorts))));

template <typename T>
inline T load_as(const void *from) {
  T value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

inline Shorts load_shorts(const int8_t *from) {
#if defined(__AVX512BW__)
  return (Shorts)_mm512_cvtepi8_epi16(load_as<__m256i>(from));
#elif defined(__AVX2__)
  return (Shorts)_mm256_cvtepi8_epi16(load_as<__m128i>(from));
#else
  typedef int8_t Bytes __attribute__((vector_size(kWidth * kPair)));
  return __builtin_convertvector(load_as<Bytes>(from), Shorts);
#endif
}

// Both 16-bit halves of each lane from the lower halves of two vectors.
inline Shorts paired(IntVec first, IntVec second) { return (Shorts)((first & 0xffff) | second << 16); }

// Unpacked weights, for products with many rows. Steps without minimums leave them as they are.
struct alignas(64) Chunk {
  int16_t levels[kChunk / kPair][kPanel][kPair];
  int16_t minimums[kChunk / kGroup][kPanel][kPair];  // integers, of both halves of a group
  float scales[kChunk / kSubgroup][kPanel];          // of each step
  float minimum_scales[kChunk / kGroup][kPanel];     // of each step; without integers the minimums themselves
};

// ---------------------------------------------------------------------------------------------------------------------
// Levels of 16 inputs and 16 outputs.

// The meaning of a nibble: level() decodes the lowest four bits of each number; nibble() is the inverse.
struct PlainCode {
  static Shorts level(UnsignedShorts nibbles) { return (Shorts)(nibbles & 15); }
  static uint8_t nibble(int8_t level) { return static_cast<uint8_t>(level); }
};

struct SignedCode {
  static Shorts level(UnsignedShorts nibbles) { return (Shorts)(nibbles & 15) - 8; }
  static uint8_t nibble(int8_t level) { return static_cast<uint8_t>(level + 8); }
};

template <const int8_t (&Table)[16]>
struct TableCode {
  static Shorts level(UnsignedShorts nibbles) {
#if defined(__AVX512BW__)
    const __m256i twice = _mm256_broadcastsi128_si256(load_as<__m128i>(Table));  // the index has five bits
    return (Shorts)_mm512_permutexvar_epi16((__m512i)nibbles, _mm512_cvtepi8_epi16(twice));
#elif defined(__AVX2__)
    const __m256i table = _mm256_broadcastsi128_si256(load_as<__m128i>(Table));
    const Shorts bytes = (Shorts)_mm256_shuffle_epi8(table, (__m256i)(nibbles & 15));
    return bytes << 8 >> 8;
#else
    Shorts levels;
    for (int i = 0; i < kWidth * kPair; ++i) levels[i] = Table[nibbles[i] & 15];
    return levels;
#endif
  }

  static uint8_t nibble(int8_t level) { return kNibbles[static_cast<uint8_t>(level)]; }

 private:
  struct Inverse {
    constexpr Inverse() {
      for (int i = 15; i >= 0; --i) of[static_cast<uint8_t>(Table[i])] = static_cast<uint8_t>(i);
    }
    constexpr uint8_t operator[](uint8_t level) const { return of[level]; }
    uint8_t of[256] = {};
  };
  static constexpr Inverse kNibbles{};
};

// 16-bit words of four nibbles, the lowest first, in the order of the input pairs. An output's two words hold the first
// and the second inputs of the pairs.
template <typename Code>
struct Nibbles {
  static constexpr int kInWord = 4;

  uint16_t words[kSubgroupPairs / kInWord][kPanel][kPair];

  // Calls use(pair, levels) for each pair of inputs, with the outputs from `lane` on.
  template <typename Use>
  void unpack(int lane, const Use &use) const {
#pragma GCC unroll 2
    for (int w = 0; w < kSubgroupPairs / kInWord; ++w) {
      const UnsignedShorts word = load_as<UnsignedShorts>(words[w][lane]);
#pragma GCC unroll 4
      for (int i = 0; i < kInWord; ++i) use(w * kInWord + i, Code::level(word >> i * 4));
    }
  }

  // Stores 16 levels of one output.
  void set(int lane, const int8_t *levels) {
    for (auto &of_outputs : words) {
      uint64_t nibbles = 0;
      for (int i = 0; i < kInWord * kPair; ++i) nibbles |= uint64_t{Code::nibble(*levels++)} << i * 8;
      for (int k = 0; k < kPair; ++k) of_outputs[lane][k] = every_fourth(nibbles >> k * 8);
    }
  }

 private:
  // The four nibbles at bits 0, 16, 32 and 48, joined. Multiplication adds them at all distances of 12.
  static uint16_t every_fourth(uint64_t nibbles) {
    constexpr uint64_t kLowest = 0x000f000f000f000f;
    return static_cast<uint16_t>((nibbles & kLowest) * 0x1001001001 >> 36);
  }
};

struct ByteLevels {
  int8_t bytes[kSubgroupPairs][kPanel][kPair];

  template <typename Use>
  void unpack(int lane, const Use &use) const {
#pragma GCC unroll 8
    for (int pair = 0; pair < kSubgroupPairs; ++pair) use(pair, load_shorts(bytes[pair][lane]));
  }

  void set(int lane, const int8_t *levels) {
    for (int pair = 0; pair < kSubgroupPairs; ++pair) std::memcpy(bytes[pair][lane], levels + pair * kPair, kPair);
  }
};

// ---------------------------------------------------------------------------------------------------------------------
// Scales and minimums of a block of kInputs inputs, a step. Integers apply to groups of kScaled inputs: to unpacked
// levels by `modified`, or to sums of their products by `completed`, which gives the same sums. `set` stores them for
// one output, and may change the block's levels.

enum class Minimums { kNone, kOfSteps, kOfGroups };

inline Vec load_factors(const uint16_t *from) { return load_halves(from); }
inline Vec load_factors(const float *from) { return load(from); }

// A half-precision number of at most 11 significant bits.
inline void set_factor(uint16_t *to, float value) { *to = static_cast<uint16_t>(to_halves(broadcast(value))[0]); }
inline void set_factor(float *to, float value) { *to = value; }

// Without integers.
template <int Step>
struct StepScales {
  static constexpr int kInputs = Step, kScaled = Step;
  static constexpr Minimums kMinimums = Minimums::kNone;

  uint16_t scales[kPanel];

  Vec scale(int lane) const { return load_halves(scales + lane); }

  auto modified(int, int) const {
    return [](Shorts levels) { return levels; };
  }

  IntVec completed(IntVec sums, int, int, const GroupSums &) const { return sums; }
};

struct HalfScales : StepScales<32> {
  void set(int lane, int, DecodedBlock *block) { set_factor(&scales[lane], block->d); }
};

struct HalfScalesAndMinimums : StepScales<32> {
  static constexpr Minimums kMinimums = Minimums::kOfSteps;

  uint16_t minimums[kPanel];

  Vec minimum(int lane) const { return load_halves(minimums + lane); }

  void set(int lane, int, DecodedBlock *block) {
    set_factor(&scales[lane], block->d);
    set_factor(&minimums[lane], block->dmin);
  }
};

// Integers are subtracted from the levels.
struct HalfScalesAndZeros : StepScales<32> {
  int8_t zeros[kPanel];

  auto modified(int lane, int) const {
    const IntVec zero = load_integers(zeros + lane);
    return [both = paired(zero, zero)](Shorts levels) { return levels - both; };
  }

  IntVec completed(IntVec sums, int lane, int, const GroupSums &x) const {
    return sums - load_integers(zeros + lane) * (x.halves[0] + x.halves[1]);
  }

  void set(int lane, int, DecodedBlock *block) {
    set_factor(&scales[lane], block->d);
    zeros[lane] = static_cast<int8_t>(block->minimums[0]);
  }
};

// Powers of two, in bfloat16 for their range.
struct PowerScales : StepScales<32> {
  Vec scale(int lane) const {
    float numbers[kWidth];
#pragma GCC unroll 16
    for (int i = 0; i < kWidth; ++i) {
      const uint32_t word = uint32_t{scales[lane + i]} << 16;
      std::memcpy(&numbers[i], &word, sizeof word);
    }
    return load(numbers);
  }

  void set(int lane, int, DecodedBlock *block) {
    uint32_t word;
    std::memcpy(&word, &block->d, sizeof word);
    scales[lane] = static_cast<uint16_t>(word >> 16);
  }
};

// For NVFP4, whose decoder may have moved a factor of up to 8 from a scale to its levels.
struct SubgroupScales : StepScales<16> {
  void set(int lane, int first, DecodedBlock *block) {
    int8_t *levels = block->levels + first;
    int factor = 1;
    for (int i = 0; i < kSubgroup; ++i)
      while (samewise::kFp4[TableCode<samewise::kFp4>::nibble(static_cast<int8_t>(levels[i] / factor))] * factor !=
             levels[i])
        factor *= 2;
    for (int i = 0; i < kSubgroup; ++i) levels[i] = static_cast<int8_t>(levels[i] / factor);
    set_factor(&scales[lane], block->d * static_cast<float>(block->scales[first / kSubgroup] * factor));
  }
};

// Steps of 256 with integer scales, and minimums if there are, for every `Group` inputs.
template <typename Factor, int Group>
struct IntegerScales {
  static constexpr int kInputs = 256, kScaled = Group;
  static constexpr Minimums kMinimums = Minimums::kNone;
  static constexpr int kGroups = kInputs / Group;

  Factor factors[kPanel];
  int8_t scales[kGroups][kPanel];

  Vec scale(int lane) const { return load_factors(factors + lane); }

  auto modified(int lane, int group) const {
    const IntVec scale = load_integers(scales[group] + lane);
    return [both = paired(scale, scale)](Shorts levels) { return levels * both; };
  }

  IntVec completed(IntVec sums, int lane, int group, const GroupSums &) const {
    return sums * load_integers(scales[group] + lane);
  }

  void set(int lane, int, DecodedBlock *block) {
    set_factor(&factors[lane], block->d);
    for (int group = 0; group < kGroups; ++group)
      scales[group][lane] = static_cast<int8_t>(block->scales[group * Group / kSubgroup]);
  }
};

template <typename Factor, int Group>
struct IntegerScalesAndMinimums : IntegerScales<Factor, Group> {
  using Scales = IntegerScales<Factor, Group>;
  static constexpr Minimums kMinimums = Minimums::kOfGroups;

  Factor minimum_factors[kPanel];
  int8_t minimums[Scales::kGroups][kPanel];

  Vec minimum(int lane) const { return load_factors(minimum_factors + lane); }

  // The minimums of both halves of 32 inputs.
  Shorts minimum_pair(int lane, int index) const {
    const auto half = [&](int first) { return load_integers(minimums[first / Group] + lane); };
    return paired(half(index * kGroup), half(index * kGroup + kSubgroup));
  }

  void set(int lane, int first, DecodedBlock *block) {
    Scales::set(lane, first, block);
    set_factor(&minimum_factors[lane], block->dmin);
    for (int group = 0; group < Scales::kGroups; ++group)
      minimums[group][lane] = static_cast<int8_t>(block->minimums[group * Group / kSubgroup]);
  }
};

// ---------------------------------------------------------------------------------------------------------------------
// Products.

inline IntVec add_pairs(IntVec sums, Shorts weights, int32_t x) {
#if defined(__AVX512VNNI__)
  return (IntVec)_mm512_dpwssd_epi32((__m512i)sums, (__m512i)weights, _mm512_set1_epi32(x));
#elif defined(__AVX2__)
  return sums + (IntVec)_mm256_madd_epi16((__m256i)weights, _mm256_set1_epi32(x));
#else
  const IntVec words = (IntVec)weights;
  return sums + (words << 16 >> 16) * static_cast<int16_t>(x) + (words >> 16) * (x >> 16);
#endif
}

// Adds the products of `Rows` rows with a chunk, from input `first` on, to totals[Rows][16].
template <int Rows, int Step, Minimums Kind>
inline void multiply_tile(const Chunk &chunk, int64_t steps, const QuantizedRows &rows, int64_t row, int64_t first,
                          float *totals) {
  constexpr int kParts = kPanel / kWidth, kPairs = Step / kPair;
  constexpr int kChains = std::clamp(kWidth / (Rows * kParts), 1, 8);  // per sum, because a product takes several cycles
  Vec total[Rows][kParts];
  const char *x[Rows];
#pragma GCC unroll 8
  for (int r = 0; r < Rows; ++r) {
    x[r] = reinterpret_cast<const char *>(rows.row(row + r) + first);
#pragma GCC unroll 4
    for (int part = 0; part < kParts; ++part) total[r][part] = load(totals + r * kPanel + part * kWidth);
  }
  if constexpr (Step == kChunk) steps = 1;
  for (int64_t step = 0; step < steps; ++step) {
    IntVec sums[Rows][kParts][kChains] = {};
    for (int pair = 0; pair < kPairs; pair += kChains)
#pragma GCC unroll 8
      for (int c = 0; c < kChains; ++c) {
        const int64_t index = step * kPairs + pair + c;
#pragma GCC unroll 4
        for (int part = 0; part < kParts; ++part) {
          const Shorts weights = load_as<Shorts>(chunk.levels[index][part * kWidth]);
#pragma GCC unroll 8
          for (int r = 0; r < Rows; ++r)
            sums[r][part][c] = add_pairs(sums[r][part][c], weights, load_as<int32_t>(x[r] + index * sizeof(int32_t)));
        }
      }
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 4
      for (int part = 0; part < kParts; ++part) {
#pragma GCC unroll 8
        for (int c = 1; c < kChains; ++c) sums[r][part][0] += sums[r][part][c];
        const Vec sum = __builtin_convertvector(sums[r][part][0], Vec);
        total[r][part] = fma(load(chunk.scales[step] + part * kWidth), sum, total[r][part]);
        const GroupSums *of_x = rows.sums(row + r) + first / kGroup;
        if constexpr (Kind == Minimums::kOfSteps) {
          const Vec minimum = load(chunk.minimum_scales[step] + part * kWidth);
          total[r][part] = fma(minimum, broadcast(of_x[step].sum), total[r][part]);
        } else if constexpr (Kind == Minimums::kOfGroups) {
          IntVec offset{};
#pragma GCC unroll 8
          for (int group = 0; group < kChunk / kGroup; ++group)
            offset = add_pairs(offset, load_as<Shorts>(chunk.minimums[group][part * kWidth]), of_x[group].pair());
          const Vec minimum = load(chunk.minimum_scales[step] + part * kWidth);
          total[r][part] = fma(minimum, __builtin_convertvector(offset, Vec), total[r][part]);
        }
      }
  }
#pragma GCC unroll 8
  for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 4
    for (int part = 0; part < kParts; ++part) store(totals + r * kPanel + part * kWidth, total[r][part]);
}

// As multiply_tile, for rows `row` to end_row.
template <int Step, Minimums Kind, int Rows = kWidth / 2>
inline void multiply_chunk(const Chunk &chunk, int64_t steps, const QuantizedRows &rows, int64_t row, int64_t end_row,
                           int64_t first, float *totals) {
  for (; row + Rows <= end_row; row += Rows, totals += Rows * kPanel)
    multiply_tile<Rows, Step, Kind>(chunk, steps, rows, row, first, totals);
  if constexpr (Rows > 1) multiply_chunk<Step, Kind, Rows / 2>(chunk, steps, rows, row, end_row, first, totals);
}

// ---------------------------------------------------------------------------------------------------------------------

// A panel of 16 outputs is a sequence of blocks.
template <typename Levels, typename Scales>
struct BlockPanels {
  static constexpr int kInputs = Scales::kInputs;
  static constexpr bool kHasTiles = false;

  struct alignas(kInputs == 256 ? 64 : 16) Block {
    Levels levels[kInputs / kSubgroup];
    Scales scales;
  };

  static int64_t panel_bytes(int64_t inputs) { return inputs / kInputs * sizeof(Block); }

  // Adds the products of rows `row` to end_row with a panel to totals[rows][16].
  static void multiply(const QuantizedRows &rows, int64_t row, int64_t end_row, const int8_t *panel, int64_t inputs,
                       float *totals) {
    const Block *blocks = reinterpret_cast<const Block *>(panel);
    const int64_t num_rows = end_row - row;
    if constexpr (kWidth >= 8)
      if (num_rows == 1) return multiply_few<1>(rows, row, end_row, blocks, inputs, totals);
    if constexpr (kWidth >= 16) {
      if (num_rows == 2) return multiply_few<2>(rows, row, end_row, blocks, inputs, totals);
      if (num_rows <= 4) return multiply_few<4>(rows, row, end_row, blocks, inputs, totals);
    }
    Chunk chunk;
    for (int64_t first = 0; first < inputs; first += kChunk) {
      const int64_t count = std::min<int64_t>(kChunk, inputs - first) / kInputs;
      for (int64_t block = 0; block < count; ++block) unpack(*blocks++, static_cast<int>(block), &chunk);
      multiply_chunk<kInputs, Scales::kMinimums>(chunk, count, rows, row, end_row, first, totals);
    }
  }

  // Packs the weights of one panel. Row `lane` begins at blocks[lane], or is missing if that is null. Returns whether
  // all scales are finite.
  static bool repack(const BlockFormat &format, const uint8_t *const *rows, int64_t inputs, int8_t *panel) {
    Block *blocks = reinterpret_cast<Block *>(panel);
    bool is_finite = true;
    for (int64_t first = 0, at = 0; first < inputs; first += format.weights, at += format.bytes)
      for (int lane = 0; lane < kPanel; ++lane) {
        DecodedBlock decoded;
        if (rows[lane])
          format.decode(rows[lane] + at, &decoded);
        else
          decoded = {};
        is_finite &= std::isfinite(decoded.d) && (!format.has_minimums || std::isfinite(decoded.dmin));
        for (int i = 0; i < format.weights; i += kInputs) {
          Block &to = blocks[(first + i) / kInputs];
          to.scales.set(lane, i, &decoded);
          for (int part = 0; part < kInputs; part += kSubgroup)
            to.levels[part / kSubgroup].set(lane, decoded.levels + i + part);
        }
      }
    return is_finite;
  }

 private:
  // Fetches what follows in the next chunk, for memory is idle during the products.
  static void prefetch_behind(const Block &block) {
    const char *ahead = reinterpret_cast<const char *>(&block + kChunk / kInputs);
    for (size_t byte = 0; byte < sizeof block; byte += 64) __builtin_prefetch(ahead + byte, 0, 2);
  }

  static void unpack(const Block &block, int step, Chunk *to) {
    prefetch_behind(block);
#pragma GCC unroll 4
    for (int lane = 0; lane < kPanel; lane += kWidth) {
      store(to->scales[step] + lane, block.scales.scale(lane));
      if constexpr (Scales::kMinimums != Minimums::kNone)
        store(to->minimum_scales[step] + lane, block.scales.minimum(lane));
      if constexpr (Scales::kMinimums == Minimums::kOfGroups)
        for (int group = 0; group < kInputs / kGroup; ++group) {
          const Shorts both = block.scales.minimum_pair(lane, group);
          std::memcpy(to->minimums[group][lane], &both, sizeof both);
        }
      for (int subgroup = 0; subgroup < kInputs / kSubgroup; ++subgroup) {
        const auto modified = block.scales.modified(lane, subgroup * kSubgroup / Scales::kScaled);
        auto *levels = to->levels + (step * kInputs + subgroup * kSubgroup) / kPair;
        block.levels[subgroup].unpack(lane, [&](int pair, Shorts unpacked) {
          const Shorts stored = modified(unpacked);
          std::memcpy(levels[pair][lane], &stored, sizeof stored);
        });
      }
    }
  }

  // As `multiply` for at most `Rows` rows, with the same results. Weights stay in registers, which is faster as long as
  // there are registers enough.
  template <int Rows>
  static void multiply_few(const QuantizedRows &rows, int64_t row, int64_t end_row, const Block *blocks, int64_t inputs,
                           float *totals) {
    constexpr int kParts = kPanel / kWidth;
    constexpr int kChains = kWidth == 16 ? std::max(4 / Rows, 2) : 1;  // as in multiply_tile; additions take one cycle
    Vec total[Rows][kParts] = {};
    const char *x[Rows];
    const GroupSums *sums_of_x[Rows];
#pragma GCC unroll 4
    for (int r = 0; r < Rows; ++r) {
      const int64_t existing = std::min(row + r, end_row - 1);  // if there are fewer, the last one is there again
      x[r] = reinterpret_cast<const char *>(rows.row(existing));
      sums_of_x[r] = rows.sums(existing);
    }
    for (int64_t first = 0; first < inputs; first += kInputs) {
      const Block &block = blocks[first / kInputs];
      prefetch_behind(block);
#pragma GCC unroll 4
      for (int part = 0; part < kParts; ++part) {
        const int lane = part * kWidth;
        IntVec completed[Rows] = {};
        for (int group = 0; group < kInputs / Scales::kScaled; ++group) {
          IntVec sums[Rows][kChains] = {};
          const int64_t start = first + group * Scales::kScaled;
#pragma GCC unroll 2
          for (int half = 0; half < Scales::kScaled / kSubgroup; ++half)
            block.levels[group * Scales::kScaled / kSubgroup + half].unpack(lane, [&](int pair, Shorts levels) {
              const int64_t at = start * sizeof(int16_t) + (half * kSubgroupPairs + pair) * sizeof(int32_t);
#pragma GCC unroll 4
              for (int r = 0; r < Rows; ++r)
                sums[r][pair % kChains] = add_pairs(sums[r][pair % kChains], levels, load_as<int32_t>(x[r] + at));
            });
#pragma GCC unroll 4
          for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 4
            for (int c = 1; c < kChains; ++c) sums[r][0] += sums[r][c];
            completed[r] += block.scales.completed(sums[r][0], lane, group, sums_of_x[r][start / kGroup]);
          }
        }
#pragma GCC unroll 4
        for (int r = 0; r < Rows; ++r) {
          Vec &to = total[r][part];
          to = fma(block.scales.scale(lane), __builtin_convertvector(completed[r], Vec), to);
          const GroupSums *of_x = sums_of_x[r] + first / kGroup;
          if constexpr (Scales::kMinimums == Minimums::kOfSteps)
            to = fma(block.scales.minimum(lane), broadcast(of_x->sum), to);
          if constexpr (Scales::kMinimums == Minimums::kOfGroups) {
            IntVec offset{};
            for (int group = 0; group < kInputs / kGroup; ++group)
              offset = add_pairs(offset, block.scales.minimum_pair(lane, group), of_x[group].pair());
            to = fma(block.scales.minimum(lane), __builtin_convertvector(offset, Vec), to);
          }
        }
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 4
      for (int part = 0; part < kParts; ++part)
        if (row + r < end_row) store(totals + r * kPanel + part * kWidth, total[r][part]);
  }
};

using Q4_0Panels = BlockPanels<Nibbles<SignedCode>, HalfScales>;
using Q4_1Panels = BlockPanels<Nibbles<PlainCode>, HalfScalesAndMinimums>;
using Q4ZeroPanels = BlockPanels<Nibbles<PlainCode>, HalfScalesAndZeros>;
using Q4KPanels = BlockPanels<Nibbles<PlainCode>, IntegerScalesAndMinimums<uint16_t, 32>>;
using Iq4NlPanels = BlockPanels<Nibbles<TableCode<samewise::kIq4>>, HalfScales>;
using Iq4XsPanels = BlockPanels<Nibbles<TableCode<samewise::kIq4>>, IntegerScales<uint16_t, 32>>;
using Mxfp4Panels = BlockPanels<Nibbles<TableCode<samewise::kFp4>>, PowerScales>;
using Nvfp4Panels = BlockPanels<Nibbles<TableCode<samewise::kFp4>>, SubgroupScales>;
using Q8_0Panels = BlockPanels<ByteLevels, HalfScales>;
using Q5_1Panels = BlockPanels<ByteLevels, HalfScalesAndMinimums>;
using Q6KPanels = BlockPanels<ByteLevels, IntegerScales<float, 16>>;
using Q5KPanels = BlockPanels<ByteLevels, IntegerScalesAndMinimums<float, 16>>;

}  // namespace SW_ISA
