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
#include <bit>
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

// The meaning of a nibble: level() decodes four bits of each number, from `shift` on; nibble() is the inverse.
struct PlainCode {
  static Shorts level(UnsignedShorts words, int shift) {
    const UnsignedShorts nibbles = words >> shift;
    return (Shorts)(shift < 12 ? nibbles & 15 : nibbles);
  }
  static uint8_t nibble(int8_t level) { return static_cast<uint8_t>(level); }
};

struct SignedCode {
  static Shorts level(UnsignedShorts words, int shift) { return PlainCode::level(words, shift) - 8; }
  static uint8_t nibble(int8_t level) { return static_cast<uint8_t>(level + 8); }
};

template <const int8_t (&Table)[16]>
struct TableCode {
  static Shorts level(UnsignedShorts words, int shift) {
    const UnsignedShorts nibbles = words >> shift;
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

  // The levels of a pair of inputs, of the outputs from `lane` on.
  Shorts pair(int lane, int index) const {
    return Code::level(load_as<UnsignedShorts>(words[index / kInWord][lane]), index % kInWord * 4);
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

  Shorts pair(int lane, int index) const { return load_shorts(bytes[index][lane]); }

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
    return from_bits(__builtin_convertvector(load_as<Halves>(scales + lane), IntVec) << 16);
  }

  void set(int lane, int, DecodedBlock *block) {
    scales[lane] = static_cast<uint16_t>(std::bit_cast<uint32_t>(block->d) >> 16);
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

// A panel of 16 outputs is a sequence of blocks. Up to RegisterRows rows are multiplied while weights are in registers.
template <typename Levels, typename Scales, int RegisterRows = kWidth == 16 ? 4 : kWidth == 8 ? 1 : 0>
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
    if constexpr (RegisterRows > 0)
      if (end_row - row <= RegisterRows)
        return multiply_few<RegisterRows>(end_row - row, rows, row, blocks, inputs, totals);
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
#pragma GCC unroll 8
        for (int pair = 0; pair < kSubgroupPairs; ++pair) {
          const Shorts stored = modified(block.levels[subgroup].pair(lane, pair));
          std::memcpy(levels[pair][lane], &stored, sizeof stored);
        }
      }
    }
  }

  // As `multiply` for `count` rows, at most `Rows`, with the same results. It takes long to compile, so that most kinds
  // have it for 1, 2 and 4 rows alone.
  template <int Rows>
  static void multiply_few(int64_t count, const QuantizedRows &rows, int64_t row, const Block *blocks, int64_t inputs,
                           float *totals) {
    constexpr int kFewer = RegisterRows > 4 ? Rows - 1 : Rows / 2;
    if constexpr (kFewer > 0)
      if (count <= kFewer) return multiply_few<kFewer>(count, rows, row, blocks, inputs, totals);
    constexpr int kParts = kPanel / kWidth;
    constexpr int kChains = kWidth < 16 ? 1 : Rows > 2 ? 2 : 4;  // as in multiply_tile; additions take one cycle
    Vec total[Rows][kParts] = {};
    const char *x[Rows];
    const GroupSums *sums_of_x[Rows];
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r) {
      const int64_t existing = row + std::min<int64_t>(r, count - 1);  // if there are fewer, the last one is there again
      x[r] = reinterpret_cast<const char *>(rows.row(existing));
      sums_of_x[r] = rows.sums(existing);
    }
    for (int64_t first = 0; first < inputs; first += kInputs) {
      const Block &block = blocks[first / kInputs];
      prefetch_behind(block);
      IntVec completed[Rows][kParts] = {};
      for (int group = 0; group < kInputs / Scales::kScaled; ++group) {
        IntVec sums[Rows][kParts][kChains] = {};
        const int64_t start = first + group * Scales::kScaled;
#pragma GCC unroll 2
        for (int half = 0; half < Scales::kScaled / kSubgroup; ++half) {
          const auto &levels = block.levels[group * Scales::kScaled / kSubgroup + half];
#pragma GCC unroll 8
          for (int pair = 0; pair < kSubgroupPairs; ++pair) {
            Shorts w[kParts];
#pragma GCC unroll 4
            for (int part = 0; part < kParts; ++part) w[part] = levels.pair(part * kWidth, pair);
#pragma GCC unroll 8
            for (int r = 0; r < Rows; ++r) {
              const int64_t at = start / kPair + half * kSubgroupPairs + pair;
              const int32_t both = load_as<int32_t>(x[r] + at * sizeof both);
#pragma GCC unroll 4
              for (int part = 0; part < kParts; ++part)
                sums[r][part][pair % kChains] = add_pairs(sums[r][part][pair % kChains], w[part], both);
            }
          }
        }
#pragma GCC unroll 8
        for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 4
          for (int part = 0; part < kParts; ++part) {
#pragma GCC unroll 4
            for (int c = 1; c < kChains; ++c) sums[r][part][0] += sums[r][part][c];
            completed[r][part] +=
                block.scales.completed(sums[r][part][0], part * kWidth, group, sums_of_x[r][start / kGroup]);
          }
      }
#pragma GCC unroll 8
      for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 4
        for (int part = 0; part < kParts; ++part) {
          const int lane = part * kWidth;
          Vec &to = total[r][part];
          to = fma(block.scales.scale(lane), __builtin_convertvector(completed[r][part], Vec), to);
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
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 4
      for (int part = 0; part < kParts; ++part)
        if (r < count) store(totals + r * kPanel + part * kWidth, total[r][part]);
  }
};

using Q4_0Panels = BlockPanels<Nibbles<SignedCode>, HalfScales>;
using Q4_1Panels = BlockPanels<Nibbles<PlainCode>, HalfScalesAndMinimums, kWidth == 16 ? 8 : kWidth == 8 ? 6 : 0>;
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
