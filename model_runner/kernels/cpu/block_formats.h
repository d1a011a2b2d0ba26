// Decoding of GGUF's quantised blocks to integers: each weight of a block is
//
//     d * scale * level + dmin * minimum
//
// with a scale and a minimum for every 16 weights. That is exact: products have at most 24 significant bits, so only
// the sum is rounded. Blocks may have any alignment.
#pragma once
#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>

#include "codebooks.h"
#include "samewise.h"
#include "simd.h"

namespace SW_ISA {

constexpr int kMostWeights = 256;  // in a block
constexpr int kSubgroup = 16;      // weights that share a scale and a minimum, at least

struct DecodedBlock {
  alignas(64) int8_t levels[kMostWeights];
  int16_t scales[kMostWeights / kSubgroup];
  int16_t minimums[kMostWeights / kSubgroup];  // not set in formats without minimums
  float d;
  float dmin;  // as minimums
};

struct BlockFormat {
  int32_t type;     // SwBlockFormat
  int32_t weights;  // of a block, a multiple of 32
  int32_t bytes;    // of a block
  int32_t packed_kind;  // SwWeightKind that keeps every weight's value
  bool has_minimums;
  void (*decode)(const uint8_t *block, DecodedBlock *to);
};

// The format with a type number; null for unquantised and unknown ones.
inline const BlockFormat *find_block_format(int32_t type);

// ---------------------------------------------------------------------------------------------------------------------
// Parts of blocks.

namespace blocks {

typedef uint64_t Words __attribute__((vector_size(16)));  // 16 bytes: shifts by few bits are masked afterwards
typedef int8_t Bytes __attribute__((vector_size(16)));
typedef int8_t Bytes8 __attribute__((vector_size(8)));

constexpr uint64_t kEach = 0x0101010101010101;

// Byte by byte (from >> shift) & mask.
inline Bytes field(const uint8_t *from, int shift, uint64_t mask) {
  return (Bytes)(load_as<Words>(from) >> static_cast<uint64_t>(shift) & mask * kEach);
}

// Byte by byte from << shift, where no bit leaves its byte.
inline Bytes raised(Bytes from, int shift) { return (Bytes)((Words)from << static_cast<uint64_t>(shift)); }

inline void store_levels(int8_t *to, Bytes levels) { std::memcpy(to, &levels, sizeof levels); }

inline float half(const uint8_t *from) {
  const uint32_t stored = load_as<uint16_t>(from);
  const float magnitude = std::bit_cast<float>((stored & 0x7fff) << 13) * 0x1p112f;  // the exponent biases' difference
  const uint32_t infinite = (stored & 0x7c00) == 0x7c00 ? 0x7f800000 : 0;            // or NaN
  return std::bit_cast<float>(std::bit_cast<uint32_t>(magnitude) | infinite | (stored & 0x8000) << 16);
}

// Looks up 16 nibbles.
inline Bytes look_up(const int8_t (&table)[16], Bytes nibbles) {
#if defined(__AVX2__)
  return (Bytes)_mm_shuffle_epi8(_mm_loadu_si128(reinterpret_cast<const __m128i *>(table)), (__m128i)nibbles);
#else
  Bytes levels;
  for (int i = 0; i < 16; ++i) levels[i] = table[nibbles[i]];
  return levels;
#endif
}

// 16 bytes, each `value` where the bit of its index is set, and else 0.
inline Bytes where_set(const uint8_t *bits, int8_t value) {
  constexpr uint64_t kBitOfByte = 0x8040201008040201;
  const Words spread = Words{bits[0] * kEach, bits[1] * kEach} & kBitOfByte;
  return (Bytes)((Bytes)spread != 0) & value;
}

// A format of 32 weights has one scale.
inline void set_single(DecodedBlock *to, float d) {
  to->d = d;
  to->scales[0] = to->scales[1] = 1;
}

inline void set_single(DecodedBlock *to, float d, float dmin) {
  set_single(to, d);
  to->dmin = dmin;
  to->minimums[0] = to->minimums[1] = 1;
}

inline void set_all(DecodedBlock *to, float d) {
  to->d = d;
  std::fill_n(to->scales, kMostWeights / kSubgroup, int16_t{1});
}

// ---------------------------------------------------------------------------------------------------------------------
// Blocks of 32 weights. Byte j of the nibbles has weight j below and weight j + 16 above.

inline void decode_q4_0(const uint8_t *block, DecodedBlock *to) {
  set_single(to, half(block));
  for (int above = 0; above < 2; ++above)
    store_levels(to->levels + above * 16, field(block + 2, above * 4, 15) - 8);
}

// Here the minimum is the zero, times -d.
inline void decode_q4_zero(const uint8_t *block, DecodedBlock *to) {
  set_single(to, half(block), -half(block));
  to->minimums[0] = to->minimums[1] = block[2];
  for (int above = 0; above < 2; ++above) store_levels(to->levels + above * 16, field(block + 3, above * 4, 15));
}

inline void decode_q4_1(const uint8_t *block, DecodedBlock *to) {
  set_single(to, half(block), half(block + 2));
  for (int above = 0; above < 2; ++above) store_levels(to->levels + above * 16, field(block + 4, above * 4, 15));
}

// Bit j of `bits` is the highest bit of weight j.
inline void decode_five_bits(const uint8_t *bits, const uint8_t *nibbles, int8_t zero, DecodedBlock *to) {
  for (int above = 0; above < 2; ++above)
    store_levels(to->levels + above * 16, (field(nibbles, above * 4, 15) | where_set(bits + above * 2, 16)) - zero);
}

inline void decode_q5_0(const uint8_t *block, DecodedBlock *to) {
  set_single(to, half(block));
  decode_five_bits(block + 2, block + 6, 16, to);
}

inline void decode_q5_1(const uint8_t *block, DecodedBlock *to) {
  set_single(to, half(block), half(block + 2));
  decode_five_bits(block + 4, block + 8, 0, to);
}

inline void decode_q8_0(const uint8_t *block, DecodedBlock *to) {
  set_single(to, half(block));
  std::memcpy(to->levels, block + 2, 32);
}

inline void decode_iq4_nl(const uint8_t *block, DecodedBlock *to) {
  set_single(to, half(block));
  for (int above = 0; above < 2; ++above)
    store_levels(to->levels + above * 16, look_up(samewise::kIq4, field(block + 2, above * 4, 15)));
}

// The scale is half the power of two that E8M0 means, since levels are doubled.
inline void decode_mxfp4(const uint8_t *block, DecodedBlock *to) {
  const uint32_t exponent = block[0];
  set_single(to, std::bit_cast<float>(exponent < 2 ? 0x00200000u << exponent : (exponent - 1) << 23));
  for (int above = 0; above < 2; ++above)
    store_levels(to->levels + above * 16, look_up(samewise::kFp4, field(block + 1, above * 4, 15)));
}

// ---------------------------------------------------------------------------------------------------------------------
// 64 weights in groups of 16, each with a scale in UE4M3: (8 + m) * 2^(e - 10), or m * 2^-9 if e is 0. Integer scales
// count by 2^-9. What a scale's exponent has beyond 16 bits goes into the levels of its group, which leave room for it.
inline void decode_nvfp4(const uint8_t *block, DecodedBlock *to) {
  constexpr int kMostShift = 11;  // (8 + 7) << 11 is below 2^15
  constexpr uint8_t kNan = 0x7f;  // counts as 0
  to->d = 0x1p-10f;               // half a unit, since levels are doubled
  for (int group = 0; group < 4; ++group) {
    const int mantissa = block[group] & 7, exponent = block[group] >> 3 & 15;
    const int shift = std::max(exponent - 1, 0), scale_shift = std::min(shift, kMostShift);
    const int scale = block[group] == kNan ? 0 : (exponent ? mantissa + 8 : mantissa) << scale_shift;
    to->scales[group] = static_cast<int16_t>(scale);
    const int8_t factor = static_cast<int8_t>(1 << (shift - scale_shift));
    const uint64_t stored = load_as<uint64_t>(block + 4 + group * 8);
    const Bytes nibbles = (Bytes)Words{stored & 15 * kEach, stored >> 4 & 15 * kEach};
    store_levels(to->levels + group * 16, look_up(samewise::kFp4, nibbles) * factor);
  }
}

// ---------------------------------------------------------------------------------------------------------------------
// Blocks of 256 weights with scales in integers.

// Weights of 2 bits: byte l of half h of 32 bytes has the weights h * 128 + s * 32 + l for s = 0, 1, 2, 3.
template <typename Store>
inline void each_two_bits(const uint8_t *from, const Store &store) {
  for (int half = 0; half < 2; ++half)
    for (int s = 0; s < 4; ++s)
      for (int part = 0; part < 32; part += 16)
        store(half * 128 + s * 32 + part, field(from + half * 32 + part, s * 2, 3));
}

inline void decode_q2_k(const uint8_t *block, DecodedBlock *to) {
  to->d = half(block + 80);
  to->dmin = -half(block + 82);
  for (int group = 0; group < 16; ++group) {
    to->scales[group] = block[group] & 15;
    to->minimums[group] = block[group] >> 4;
  }
  each_two_bits(block + 16, [&](int first, Bytes bits) { store_levels(to->levels + first, bits); });
}

// A third bit is in another plane, inverted: bit i of byte l belongs to weight i * 32 + l.
inline void decode_q3_k(const uint8_t *block, DecodedBlock *to) {
  const uint8_t *high = block, *scales = block + 96;
  to->d = half(block + 108);
  for (int group = 0; group < 16; ++group) {  // 4 bits and 2 bits
    const int low = scales[group % 8] >> group / 8 * 4 & 15, top = scales[8 + group % 4] >> group / 4 * 2 & 3;
    to->scales[group] = static_cast<int16_t>((low | top << 4) - 32);
  }
  each_two_bits(block + 32, [&](int first, Bytes bits) {
    const Bytes third = field(high + first % 32, first / 32, 1);
    store_levels(to->levels + first, bits + raised(third, 2) - 4);
  });
}

// Scales and minimums of 6 bits for each 32 weights. The first four of each are the lower bits of bytes 0 to 7; the
// last four have 4 bits in bytes 8 to 11 and their upper bits in the first bytes.
inline void decode_scales_and_minimums(const uint8_t *from, DecodedBlock *to) {
  for (int i = 0; i < 4; ++i) {
    const int16_t scales[] = {static_cast<int16_t>(from[i] & 63),
                              static_cast<int16_t>((from[i + 8] & 15) | from[i] >> 6 << 4)};
    const int16_t minimums[] = {static_cast<int16_t>(from[i + 4] & 63),
                                static_cast<int16_t>(from[i + 8] >> 4 | from[i + 4] >> 6 << 4)};
    for (int upper = 0; upper < 2; ++upper) {
      const int group = (upper * 4 + i) * 2;
      to->scales[group] = to->scales[group + 1] = scales[upper];
      to->minimums[group] = to->minimums[group + 1] = minimums[upper];
    }
  }
}

// Nibbles of 64 weights at a time, the first 32 below.
inline void decode_q4_k(const uint8_t *block, DecodedBlock *to) {
  to->d = half(block);
  to->dmin = -half(block + 2);
  decode_scales_and_minimums(block + 4, to);
  for (int first = 0; first < kMostWeights; first += 16)
    store_levels(to->levels + first, field(block + 16 + first / 64 * 32 + first % 32, first / 32 % 2 * 4, 15));
}

// As Q4_K, with a fifth bit in another plane: bit i of byte l belongs to weight i * 32 + l.
inline void decode_q5_k(const uint8_t *block, DecodedBlock *to) {
  to->d = half(block);
  to->dmin = -half(block + 2);
  decode_scales_and_minimums(block + 4, to);
  for (int first = 0; first < kMostWeights; first += 16) {
    const Bytes nibbles = field(block + 48 + first / 64 * 32 + first % 32, first / 32 % 2 * 4, 15);
    store_levels(to->levels + first, nibbles | raised(field(block + 16 + first % 32, first / 32, 1), 4));
  }
}

// Nibbles of 128 weights at a time, the first 64 below; their upper 2 bits are in another plane.
inline void decode_q6_k(const uint8_t *block, DecodedBlock *to) {
  to->d = half(block + 208);
  for (int group = 0; group < 16; ++group) to->scales[group] = static_cast<int8_t>(block[192 + group]);
  each_two_bits(block + 128, [&](int first, Bytes bits) {
    const Bytes nibbles = field(block + first / 128 * 64 + first % 64, first / 64 % 2 * 4, 15);
    store_levels(to->levels + first, (nibbles | raised(bits, 4)) - 32);
  });
}

inline void decode_iq4_xs(const uint8_t *block, DecodedBlock *to) {
  const uint32_t top = load_as<uint16_t>(block + 2);
  to->d = half(block);
  for (int group = 0; group < 8; ++group) {
    const int low = block[4 + group / 2] >> group % 2 * 4 & 15;
    const int16_t scale = static_cast<int16_t>((low | (top >> group * 2 & 3) << 4) - 32);
    to->scales[group * 2] = to->scales[group * 2 + 1] = scale;
    for (int above = 0; above < 2; ++above)
      store_levels(to->levels + group * 32 + above * 16,
                   look_up(samewise::kIq4, field(block + 8 + group * 16, above * 4, 15)));
  }
}

// Digits of base 3, five in a byte as a fraction of 256: multiplied by 3^n, the byte's upper bits are digit n.
inline void decode_tq1_0(const uint8_t *block, DecodedBlock *to) {
  set_all(to, half(block + 52));
  const auto digits = [&](const uint8_t *from, int bytes, int count, int8_t *levels) {
    uint8_t power = 1;
    for (int n = 0; n < count; ++n, power *= 3)
      for (int i = 0; i < bytes; ++i)
        *levels++ = static_cast<int8_t>((static_cast<uint8_t>(from[i] * power) * 3 >> 8) - 1);
  };
  digits(block, 32, 5, to->levels);
  digits(block + 32, 16, 5, to->levels + 160);
  digits(block + 48, 4, 4, to->levels + 240);
}

inline void decode_tq2_0(const uint8_t *block, DecodedBlock *to) {
  set_all(to, half(block + 64));
  each_two_bits(block, [&](int first, Bytes bits) { store_levels(to->levels + first, bits - 1); });
}

// ---------------------------------------------------------------------------------------------------------------------
// Blocks of 256 weights with codebooks.

// Stores 8 levels, negated where a bit is set.
inline void store_signed(int8_t *to, Bytes8 levels, uint32_t signs) {
  constexpr uint64_t kBitOfByte = 0x8040201008040201;
  const Bytes8 negative = (Bytes8)((Bytes8)(signs * kEach & kBitOfByte) != 0);
  levels = (levels ^ negative) - negative;
  std::memcpy(to, &levels, sizeof levels);
}

// Adds the eighth sign to seven: their number is even.
inline uint32_t eight_signs(uint32_t seven) { return seven | static_cast<uint32_t>(__builtin_parity(seven)) << 7; }

template <int Size>
inline Bytes8 entry(const samewise::Codebook<Size, 8> &book, uint32_t index) {
  return load_as<Bytes8>(book.levels[index]);
}

template <int Size>
inline Bytes8 entries(const samewise::Codebook<Size, 4> &book, uint32_t first, uint32_t second) {
  const auto four = [&](uint32_t index) {
    return uint64_t{load_as<uint32_t>(book.levels[index])};
  };
  return (Bytes8)(four(first) | four(second) << 32);
}

inline int16_t odd(uint32_t scale) { return static_cast<int16_t>(scale * 2 + 1); }

inline void decode_iq2_xxs(const uint8_t *block, DecodedBlock *to) {
  to->d = half(block) * 0.125f;
  for (int group = 0; group < 8; ++group) {
    const uint8_t *indices = block + 2 + group * 8;
    const uint32_t word = load_as<uint32_t>(indices + 4);  // 4 x 7 signs, 4 bits of scale
    to->scales[group * 2] = to->scales[group * 2 + 1] = odd(word >> 28);
    for (int i = 0; i < 4; ++i)
      store_signed(to->levels + group * 32 + i * 8, entry(samewise::kIq2xxs, indices[i]),
                   eight_signs(word >> i * 7 & 127));
  }
}

inline void decode_iq2_xs(const uint8_t *block, DecodedBlock *to) {
  to->d = half(block) * 0.125f;
  for (int group = 0; group < 16; ++group) to->scales[group] = odd(block[66 + group / 2] >> group % 2 * 4 & 15);
  for (int i = 0; i < 32; ++i) {
    const uint32_t word = load_as<uint16_t>(block + 2 + i * 2);  // 9 bits of index, 7 signs
    store_signed(to->levels + i * 8, entry(samewise::kIq2xs, word & 511), eight_signs(word >> 9));
  }
}

inline void decode_iq2_s(const uint8_t *block, DecodedBlock *to) {
  const uint8_t *indices = block + 2, *signs = block + 34, *high = block + 66;
  to->d = half(block) * 0.125f;
  for (int group = 0; group < 16; ++group) to->scales[group] = odd(block[74 + group / 2] >> group % 2 * 4 & 15);
  for (int i = 0; i < 32; ++i) {
    const uint32_t index = indices[i] | (high[i / 4] >> i % 4 * 2 & 3) << 8;
    store_signed(to->levels + i * 8, entry(samewise::kIq2s, index), signs[i]);
  }
}

inline void decode_iq3_xxs(const uint8_t *block, DecodedBlock *to) {
  to->d = half(block) * 0.25f;
  for (int group = 0; group < 8; ++group) {
    const uint8_t *indices = block + 2 + group * 8;
    const uint32_t word = load_as<uint32_t>(block + 66 + group * 4);  // as in IQ2_XXS
    to->scales[group * 2] = to->scales[group * 2 + 1] = odd(word >> 28);
    for (int i = 0; i < 4; ++i)
      store_signed(to->levels + group * 32 + i * 8, entries(samewise::kIq3xxs, indices[i * 2], indices[i * 2 + 1]),
                   eight_signs(word >> i * 7 & 127));
  }
}

inline void decode_iq3_s(const uint8_t *block, DecodedBlock *to) {
  const uint8_t *indices = block + 2, *high = block + 66, *signs = block + 74;
  to->d = half(block);
  const auto index = [&](int i) { return indices[i] | (high[i / 8] >> i % 8 & 1) << 8; };
  for (int group = 0; group < 8; ++group) {
    const int16_t scale = odd(block[106 + group / 2] >> group % 2 * 4 & 15);
    to->scales[group * 2] = to->scales[group * 2 + 1] = scale;
  }
  for (int i = 0; i < 32; ++i)
    store_signed(to->levels + i * 8, entries(samewise::kIq3s, index(i * 2), index(i * 2 + 1)), signs[i]);
}

// An entry of IQ1's codebook plus or minus 1/8, in eighths.
inline void store_iq1(int8_t *to, uint32_t index, bool minus) {
  const int8_t eighth = minus ? -1 : 1;
  const Bytes8 levels = entry(samewise::kIq1, index) + eighth;
  std::memcpy(to, &levels, sizeof levels);
}

inline void decode_iq1_s(const uint8_t *block, DecodedBlock *to) {
  to->d = half(block) * 0.125f;
  for (int group = 0; group < 8; ++group) {
    const uint8_t *indices = block + 2 + group * 4;
    const uint32_t word = load_as<uint16_t>(block + 34 + group * 2);  // 4 x 3 bits of indices, 3 of the scale, the sign
    to->scales[group * 2] = to->scales[group * 2 + 1] = odd(word >> 12 & 7);
    for (int i = 0; i < 4; ++i)
      store_iq1(to->levels + group * 32 + i * 8, indices[i] | (word >> i * 3 & 7) << 8, word >> 15);
  }
}

// The half-precision scale is spread over the upper nibbles of four words of scales.
inline void decode_iq1_m(const uint8_t *block, DecodedBlock *to) {
  const uint8_t *high = block + 32;
  uint16_t words[4], d = 0;
  std::memcpy(words, block + 48, sizeof words);
  for (int i = 0; i < 4; ++i) d = static_cast<uint16_t>(d | words[i] >> 12 << i * 4);
  to->d = half(reinterpret_cast<const uint8_t *>(&d)) * 0.125f;
  for (int group = 0; group < 16; ++group) to->scales[group] = odd(words[group / 4] >> group % 4 * 3 & 7);
  for (int i = 0; i < 32; ++i) {
    const uint32_t nibble = high[i / 2] >> i % 2 * 4 & 15;  // 3 bits of the index, the sign
    store_iq1(to->levels + i * 8, block[i] | (nibble & 7) << 8, nibble >> 3);
  }
}

}  // namespace blocks

inline const BlockFormat *find_block_format(int32_t type) {
  using namespace blocks;
  static constexpr BlockFormat formats[] = {
      {SW_Q4_0, 32, 18, SW_AS_Q4_0, false, decode_q4_0},
      {SW_Q4_1, 32, 20, SW_INT4, true, decode_q4_1},
      {SW_Q5_0, 32, 22, SW_AS_Q8_0, false, decode_q5_0},
      {SW_Q5_1, 32, 24, SW_AS_Q5_1, true, decode_q5_1},
      {SW_Q8_0, 32, 34, SW_AS_Q8_0, false, decode_q8_0},
      {SW_Q2_K, 256, 84, SW_AS_Q5_K, true, decode_q2_k},
      {SW_Q3_K, 256, 110, SW_AS_Q6_K, false, decode_q3_k},
      {SW_Q4_K, 256, 144, SW_AS_Q4_K, true, decode_q4_k},
      {SW_Q5_K, 256, 176, SW_AS_Q5_K, true, decode_q5_k},
      {SW_Q6_K, 256, 210, SW_AS_Q6_K, false, decode_q6_k},
      {SW_IQ2_XXS, 256, 66, SW_AS_Q6_K, false, decode_iq2_xxs},
      {SW_IQ2_XS, 256, 74, SW_AS_Q6_K, false, decode_iq2_xs},
      {SW_IQ3_XXS, 256, 98, SW_AS_Q6_K, false, decode_iq3_xxs},
      {SW_IQ1_S, 256, 50, SW_AS_Q6_K, false, decode_iq1_s},
      {SW_IQ4_NL, 32, 18, SW_AS_IQ4_NL, false, decode_iq4_nl},
      {SW_IQ3_S, 256, 110, SW_AS_Q6_K, false, decode_iq3_s},
      {SW_IQ2_S, 256, 82, SW_AS_Q6_K, false, decode_iq2_s},
      {SW_IQ4_XS, 256, 136, SW_AS_IQ4_XS, false, decode_iq4_xs},
      {SW_IQ1_M, 256, 56, SW_AS_Q6_K, false, decode_iq1_m},
      {SW_TQ1_0, 256, 54, SW_AS_Q4_0, false, decode_tq1_0},
      {SW_TQ2_0, 256, 66, SW_AS_Q4_0, false, decode_tq2_0},
      {SW_MXFP4, 32, 17, SW_AS_MXFP4, false, decode_mxfp4},
      {SW_NVFP4, 64, 36, SW_AS_NVFP4, false, decode_nvfp4},
      {SW_Q4_ZERO, 32, 19, SW_AS_Q4_ZERO, true, decode_q4_zero}};
  for (const BlockFormat &format : formats)
    if (format.type == type) return &format;
  return nullptr;
}

// ---------------------------------------------------------------------------------------------------------------------
// Blocks as floats.

// Writes the weights of a decoded block.
inline void write_weights(const BlockFormat &format, const DecodedBlock &block, float *to) {
  for (int first = 0; first < format.weights; first += kSubgroup) {
    const int group = first / kSubgroup;
    const Vec scale = broadcast(block.d * static_cast<float>(block.scales[group]));
    const Vec minimum =
        format.has_minimums ? broadcast(block.dmin * static_cast<float>(block.minimums[group])) : Vec{};
    for (int i = first; i < first + kSubgroup; i += kWidth) {
      const Vec product = scale * __builtin_convertvector(load_integers(block.levels + i), Vec);
      store(to + i, format.has_minimums ? product + minimum : product);  // adding 0 would change -0
    }
  }
}

// Writes a row of weights, in any SwBlockFormat.
inline void unpack_row(int32_t type, const uint8_t *row, int64_t inputs, float *to) {
  if (type == SW_F32) {
    std::memcpy(to, row, inputs * sizeof(float));
  } else if (type == SW_F16) {
    for (int64_t i = 0; i < inputs; ++i) to[i] = blocks::half(row + i * 2);
  } else if (type == SW_BF16) {
    for (int64_t i = 0; i < inputs; ++i) to[i] = std::bit_cast<float>(uint32_t{load_as<uint16_t>(row + i * 2)} << 16);
  } else {
    const BlockFormat &format = *find_block_format(type);
    DecodedBlock block;
    for (int64_t first = 0; first < inputs; first += format.weights, row += format.bytes) {
      format.decode(row, &block);
      write_weights(format, block, to + first);
    }
  }
}

}  // namespace SW_ISA
