// Recurrent layers by rows and pages: gated delta nets, KDA, Mamba 2, lightning attention.
//
// A unit is one head of one choice. Its rows of a block read the block's state S0 and the rows before them; after the
// block's last row, the state folds (recurrence/backend.py has the formulas). With d_ij = a_(j+1) ... a_i:
//
//   u_i = beta_i (v_i - S0^T (d_i0 k_i) - sum over j < i of (k_i d_ij) . k_j u_j)
//   o_i = S0^T (d_i0 q_i) + sum over j <= i of (q_i d_ij) . k_j u_j
//
// Every number of S0^T x is one chain over the key's channels, rows are added in the order of their positions, and
// products of two keys have kLanes sums each. So neither the rows that are computed together nor the instruction set
// matter. Decays are multiplied from j = i downwards: no exponential of a difference, which could overflow.
#pragma once
#include <algorithm>
#include <cstring>

#include "rounding.h"
#include "rows.h"
#include "runtime.h"
#include "samewise.h"
#include "simd.h"

namespace SW_ISA {

constexpr int kRows = 32;            // positions in a block
constexpr float kNegligible = 0x1p-100f;   // smaller decays and states count as zero: subnormal numbers are slow
constexpr int kAtOnce = kWidth == 16 ? 8 : 4;   // vectors that read a state together
constexpr int kColumns = kWidth == 16 ? 8 : 4;  // vectors of a state's row that are in registers for one of them

inline Vec flushed(Vec x) {  // x is not negative, or NaN
  return x < broadcast(kNegligible) ? Vec{} : x;
}

inline float flushed(float x) { return x < kNegligible ? 0.0f : x; }

inline Vec without_negligible(Vec x) {  // of any sign
  const Vec magnitude = from_bits(bits(x) & (IntVec{} + 0x7fffffff));
  return magnitude < broadcast(kNegligible) ? Vec{} : x;
}

// ---------------------------------------------------------------------------------------------------------------------
// Sums in chains: out = init + a_0 b_0 + a_1 b_1 + ..., for R numbers a and C vectors b of each term.

template <int R, int C, typename Init, typename A, typename B, typename Done>
inline void chain(int64_t terms, const Init &init, const A &a, const B &b, const Done &done) {
  Vec sums[R][C];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) sums[r][c] = init(r, c * kWidth);
  for (int64_t t = 0; t < terms; ++t) {
    const float *from = b(t);
    Vec row[C];
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) row[c] = load(from + c * kWidth);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const Vec factor = broadcast(a(r, t));
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) sums[r][c] = fma(factor, row[c], sums[r][c]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) done(r, c * kWidth, sums[r][c]);
}

// Calls work.template operator()<C>(first column) until `columns` are done, with the largest C that fits.
template <int C, typename Work>
inline void by_columns(int64_t columns, const Work &work, int64_t first = 0) {
  for (; first + C * kWidth <= columns; first += C * kWidth) work.template operator()<C>(first);
  if constexpr (C > 1)
    if (first < columns) by_columns<C / 2>(columns, work, first);
}

// Calls work.template operator()<R>(first row) until `rows` are done, with the largest R that fits.
template <int R, typename Work>
inline void by_rows(int64_t rows, const Work &work, int64_t first = 0) {
  for (; first + R <= rows; first += R) work.template operator()<R>(first);
  if constexpr (R > 1)
    if (first < rows) by_rows<R / 2>(rows, work, first);
}

constexpr int kRowsAhead = 16;  // of a state, which are prefetched

// y[row] = S^T x[row] for each row; S is [key_dim, value_dim].
inline void read_state(const float *state, int64_t key_dim, int64_t value_dim, const float *const *x, int64_t rows,
                       float *y) {
  by_rows<kAtOnce>(rows, [&]<int R>(int64_t row) {
    const float *const *from = x + row;
    float *to = y + row * value_dim;
    by_columns<(R >= 8 ? kColumns / 4 : R >= 4 ? kColumns / 2 : kColumns)>(value_dim, [&]<int C>(int64_t column) {
      chain<R, C>(
          key_dim, [](int, int) { return Vec{}; }, [&](int r, int64_t t) { return from[r][t]; },
          [&](int64_t t) {
            const float *row = state + t * value_dim + column;
            if (R <= 2)  // few rows wait for memory
              for (int i = 0; i < C * kWidth; i += 16) __builtin_prefetch(row + kRowsAhead * value_dim + i);
            return row;
          },
          [&](int r, int c, Vec sum) { store(to + r * value_dim + column + c, sum); });
    });
  });
}

// ---------------------------------------------------------------------------------------------------------------------
// Sums of lanes.

// sums[i] = sum(lanes[i]) for kLanes of them.
inline void sum_all(const Lanes *lanes, float *sums) {
#if defined(__AVX512F__)
  const auto add = [](__m512 low, __m512 high) { return _mm512_add_ps(low, high); };
  __m512 fours[4];
  for (int e = 0; e < 4; ++e) {  // fours[e] has the rows e, 4 + e, 8 + e, 12 + e
    __m512 twos[2];
    for (int half = 0; half < 2; ++half) {
      const __m512 a = (__m512)lanes[8 * half + e].parts[0], b = (__m512)lanes[8 * half + 4 + e].parts[0];
      twos[half] = add(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xEE));
    }
    fours[e] = add(_mm512_shuffle_f32x4(twos[0], twos[1], 0x88), _mm512_shuffle_f32x4(twos[0], twos[1], 0xDD));
  }
  const __m512 even = add(_mm512_shuffle_ps(fours[0], fours[1], 0x44), _mm512_shuffle_ps(fours[0], fours[1], 0xEE));
  const __m512 odd = add(_mm512_shuffle_ps(fours[2], fours[3], 0x44), _mm512_shuffle_ps(fours[2], fours[3], 0xEE));
  _mm512_storeu_ps(sums, add(_mm512_shuffle_ps(even, odd, 0x88), _mm512_shuffle_ps(even, odd, 0xDD)));
#else
  for (int i = 0; i < kLanes; ++i) sums[i] = sum(lanes[i]);
#endif
}

inline Lanes fma(const Lanes &a, const Lanes &b, const Lanes &c) {
  Lanes result;
#pragma GCC unroll 4
  for (int part = 0; part < kLanes / kWidth; ++part) result.parts[part] = fma(a.parts[part], b.parts[part], c.parts[part]);
  return result;
}

inline Lanes operator*(const Lanes &a, const Lanes &b) {
  Lanes result;
#pragma GCC unroll 4
  for (int part = 0; part < kLanes / kWidth; ++part) result.parts[part] = a.parts[part] * b.parts[part];
  return result;
}

inline Lanes flushed(const Lanes &x) {
  Lanes result;
#pragma GCC unroll 4
  for (int part = 0; part < kLanes / kWidth; ++part) result.parts[part] = flushed(x.parts[part]);
  return result;
}

inline void store_lanes(float *to, const Lanes &lanes) { std::memcpy(to, &lanes, sizeof lanes); }

// ---------------------------------------------------------------------------------------------------------------------

// Rows of one block, of one head, in the order of their positions.
struct BlockRows {
  const float *keys[kRows];    // each [key_dim]
  const float *decays[kRows];  // each one number, or [key_dim]
  float *updates[kRows];       // each [value_dim]
};

// A thread's memory for one unit.
struct RecurrenceScratch {
  float *state;    // [key_dim, value_dim] of the choice, while it is not in a page
  float *branch;   // [key_dim, value_dim] with the blocks of a draft's path
  float *weights;  // [2, kRows, kRows] of u_j in u_i, and in o_i
  float *to_start; // [kRows] d_i0
  float *decayed;  // [2 kRows, key_dim] d_i0 k_i and d_i0 q_i; or d_nj k_j
  float *read;     // [2 kRows, value_dim] what the rows read from the state
  Lanes *products; // [2, kRows]

  static RecurrenceScratch lay_out(int64_t key_dim, int64_t value_dim, ScratchAllocator &take) {
    RecurrenceScratch s;
    take(s.state, key_dim * value_dim);
    take(s.branch, key_dim * value_dim);
    take(s.weights, 2 * kRows * kRows);
    take(s.to_start, kRows);
    take(s.decayed, 2 * kRows * key_dim);
    take(s.read, 2 * kRows * value_dim);
    take(s.products, 2 * kRows);
    return s;
  }
};

// The inputs and outputs of a step. Strides are from token to token.
struct RecurrenceStep {
  const float *query;  // [T, key_heads, key_dim]
  const float *key;    // [T, key_heads, key_dim]
  const float *value;  // [T, heads, value_dim]
  int64_t key_stride;  // of queries, too
  int64_t value_stride;
  const float *beta;   // [T, heads]; null without delta
  float *output;       // [T, heads, value_dim]
  int64_t output_stride;
};

// One head of one choice.
template <bool kDelta, bool kPerChannel>
class RecurrenceUnit {
 public:
  RecurrenceUnit(const SwRecurrence &layer, const SwStatePlan &plan, const RecurrenceStep &step, int64_t head)
      : layer_(layer), plan_(plan), step_(step), head_(head), key_head_(head / (layer.heads / layer.key_heads)),
        key_dim_(layer.key_dim), value_dim_(layer.value_dim) {
    thread_local samewise::Memory memory;
    scratch_ = laid_out_in(memory, [&](ScratchAllocator &take) {
      return RecurrenceScratch::lay_out(key_dim_, value_dim_, take);
    });
  }

  void run(int64_t choice) {
    const float *state = plan_.anchors[choice] < 0 ? nullptr : page(plan_.anchors[choice]);
    for (int32_t s = plan_.first_segment[choice]; s < plan_.first_segment[choice + 1]; ++s) {
      const SwSegment &segment = plan_.segments[s];
      const float *read = state;
      for (int32_t i = 0; i < segment.num_folds; ++i) {
        fold(rows_at(plan_.paths + (segment.first_fold + int64_t{i}) * kRows, kRows), read, scratch_.branch);
        read = scratch_.branch;
      }
      compute(segment, read);
      if (!segment.is_folded) continue;
      float *folded = segment.page < 0 ? scratch_.state : page(segment.page);
      fold(rows_of(segment.block), state, folded);
      state = folded;
    }
  }

 private:
  float *page(int64_t index) const {
    return layer_.states + index * layer_.page_stride + head_ * key_dim_ * value_dim_;
  }

  struct Block {
    const float *keys;
    const float *decays;
    float *updates;
  };

  Block block_at(int64_t index) const {
    return {rows_of_block(layer_.keys, index), rows_of_block(layer_.decays, index),
            rows_of_block(layer_.updates, index)};
  }

  void set_row(BlockRows &rows, int64_t i, const Block &block, int64_t offset) const {
    const int64_t row = head_ * kRows + offset;
    rows.keys[i] = block.keys + (key_head_ * kRows + offset) * key_dim_;
    rows.decays[i] = block.decays + row * (kPerChannel ? key_dim_ : 1);
    rows.updates[i] = block.updates + row * value_dim_;
  }

  BlockRows rows_of(int64_t index) const {
    const Block block = block_at(index);
    BlockRows rows;
    for (int64_t i = 0; i < kRows; ++i) set_row(rows, i, block, i);
    return rows;
  }

  BlockRows rows_at(const int32_t *slots, int64_t count) const {
    BlockRows rows;
    for (int64_t i = 0; i < count; ++i) set_row(rows, i, block_at(slots[i] / kRows), slots[i] % kRows);
    return rows;
  }

  // Computes u and o of a segment's tokens.
  void compute(const SwSegment &segment, const float *state) {
    if (!segment.num_tokens) return;
    const BlockRows known = segment.paths < 0 ? rows_of(segment.block) : BlockRows{};
    const auto rows_of_token = [&](int64_t i, int64_t count) {
      return segment.paths < 0 ? known : rows_at(plan_.paths + (segment.paths + i) * kRows, count);
    };
    const int64_t n = segment.num_tokens;
    const float *vectors[2 * kRows];  // keys, if they are needed, then queries
    for (int64_t i = 0; i < n; ++i) {
      const int64_t token = plan_.order[segment.first + i], count = plan_.num_rows[token];
      const float *key = step_.key + token * step_.key_stride + key_head_ * key_dim_;
      const float *query = step_.query + token * step_.key_stride + key_head_ * key_dim_;
      weigh(rows_of_token(i, count), count, i, key, query);
      if (kDelta) vectors[i] = kPerChannel ? scratch_.decayed + i * key_dim_ : key;
      vectors[(kDelta ? n : 0) + i] = kPerChannel ? scratch_.decayed + (kRows + i) * key_dim_ : query;
    }
    if (state) read_state(state, key_dim_, value_dim_, vectors, kDelta ? 2 * n : n, scratch_.read);
    for (int64_t i = 0; i < n; ++i) {
      const int64_t token = plan_.order[segment.first + i], count = plan_.num_rows[token];
      add_rows(rows_of_token(i, count), count, i, token, state ? scratch_.read + i * value_dim_ : nullptr,
               state ? scratch_.read + ((kDelta ? n : 0) + i) * value_dim_ : nullptr);
    }
  }

  float *weights(int64_t which, int64_t i) { return scratch_.weights + (which * kRows + i) * kRows; }

  // Finds the weights of the rows' u in u and o of token i of the segment, whose row is the last.
  void weigh(const BlockRows &rows, int64_t count, int64_t i, const float *key, const float *query) {
    if (kPerChannel)
      multiply_decayed(rows, count, i, key, query);
    else
      multiply_keys(rows, count, key, query);
    for (int64_t j = 0; j < count; j += kLanes) {
      if (kDelta) sum_all(scratch_.products + j, weights(0, i) + j);
      sum_all(scratch_.products + kRows + j, weights(1, i) + j);
    }
    if (kPerChannel) return;
    float decay = 1.0f;
    for (int64_t j = count - 1; j >= 0; --j) {
      if (kDelta) weights(0, i)[j] *= decay;
      weights(1, i)[j] *= decay;
      decay = flushed(decay * *rows.decays[j]);
    }
    scratch_.to_start[i] = decay;
  }

  // products = lanes of k_i . k_j and q_i . k_j, where every head has one decay.
  void multiply_keys(const BlockRows &rows, int64_t count, const float *key, const float *query) {
    by_rows<kWidth == 16 ? 4 : kWidth == 8 ? 2 : 1>(count, [&]<int R>(int64_t j) {
      Lanes of_key[R] = {}, of_query[R] = {};
      for (int64_t d = 0; d < key_dim_; d += kLanes) {
        const Lanes k = load_lanes(key + d), q = load_lanes(query + d);
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
          const Lanes other = load_lanes(rows.keys[j + r] + d);
          if (kDelta) of_key[r] = fma(k, other, of_key[r]);
          of_query[r] = fma(q, other, of_query[r]);
        }
      }
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        if (kDelta) scratch_.products[j + r] = of_key[r];
        scratch_.products[kRows + j + r] = of_query[r];
      }
    });
  }

  // products = lanes of (k_i d_ij) . k_j and (q_i d_ij) . k_j, and decayed = d_i0 k_i and d_i0 q_i.
  void multiply_decayed(const BlockRows &rows, int64_t count, int64_t i, const float *key, const float *query) {
    for (int64_t j = 0; j < 2 * kRows; ++j) scratch_.products[j] = Lanes{};
    by_rows<kWidth == 16 ? 4 : 1>(key_dim_ / kLanes, [&]<int R>(int64_t first) {
      Lanes decay[R], k[R], q[R];
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        decay[r] = load_lanes(kOnes);
        k[r] = load_lanes(key + (first + r) * kLanes);
        q[r] = load_lanes(query + (first + r) * kLanes);
      }
      for (int64_t j = count - 1; j >= 0; --j) {
        Lanes of_key = scratch_.products[j], of_query = scratch_.products[kRows + j];
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
          const Lanes other = decay[r] * load_lanes(rows.keys[j] + (first + r) * kLanes);
          if (kDelta) of_key = fma(k[r], other, of_key);
          of_query = fma(q[r], other, of_query);
          decay[r] = flushed(decay[r] * load_lanes(rows.decays[j] + (first + r) * kLanes));
        }
        if (kDelta) scratch_.products[j] = of_key;
        scratch_.products[kRows + j] = of_query;
      }
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        if (kDelta) store_lanes(scratch_.decayed + i * key_dim_ + (first + r) * kLanes, decay[r] * k[r]);
        store_lanes(scratch_.decayed + (kRows + i) * key_dim_ + (first + r) * kLanes, decay[r] * q[r]);
      }
    });
  }

  // Writes u of token i of the segment, and its output. seen_by_* is what the token read from the state; null if that
  // is zero.
  void add_rows(const BlockRows &rows, int64_t count, int64_t i, int64_t token, const float *seen_by_key,
                const float *seen_by_query) {
    const float *of_key = weights(0, i), *of_query = weights(1, i);
    const Vec decay = broadcast(kPerChannel ? 1.0f : scratch_.to_start[i]);
    const int64_t at = token * layer_.heads + head_;
    const float *value = step_.value + token * step_.value_stride + head_ * value_dim_;
    float *output = step_.output + token * step_.output_stride + head_ * value_dim_, *update = rows.updates[count - 1];
    by_columns<kColumns>(value_dim_, [&]<int C>(int64_t column) {
      Vec u[C], o[C];
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) {
        const int64_t d = column + c * kWidth;
        u[c] = load(value + d);
        if (kDelta && seen_by_key) u[c] = fma(-decay, load(seen_by_key + d), u[c]);
        o[c] = seen_by_query ? decay * load(seen_by_query + d) : Vec{};
      }
      for (int64_t j = 0; j < count - 1; ++j) {
        const float *earlier = rows.updates[j] + column;
        const Vec to_u = broadcast(kDelta ? -of_key[j] : 0.0f), to_o = broadcast(of_query[j]);
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) {
          const Vec row = load(earlier + c * kWidth);
          if (kDelta) u[c] = fma(to_u, row, u[c]);
          o[c] = fma(to_o, row, o[c]);
        }
      }
      const Vec gain = broadcast(kDelta ? step_.beta[at] : 1.0f), own = broadcast(of_query[count - 1]);
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) {
        if (kDelta) u[c] = gain * u[c];
        store(update + column + c * kWidth, u[c]);
        store(output + column + c * kWidth, fma(own, u[c], o[c]));
      }
    });
  }

  // to = the state after a whole block, from the state before it (null for zero), which may be the same memory.
  void fold(const BlockRows &rows, const float *state, float *to) {
    float *keys = scratch_.decayed, *from_start = keys + kRows * key_dim_;  // d_nj k_j, and d_n0 of each channel
    for (int64_t d = 0; d < key_dim_; d += kLanes) {
      Lanes decay = load_lanes(kOnes);
      for (int64_t j = kRows - 1; j >= 0; --j) {
        store_lanes(keys + j * key_dim_ + d, decay * load_lanes(rows.keys[j] + d));
        if (kPerChannel) {
          decay = flushed(decay * load_lanes(rows.decays[j] + d));
        } else {
          for (Vec &part : decay.parts) part = flushed(part * broadcast(*rows.decays[j]));
        }
      }
      store_lanes(from_start + d, decay);
    }
    by_rows<kAtOnce>(key_dim_, [&]<int R>(int64_t first) {
      by_columns<kColumns / (kAtOnce / 2)>(value_dim_, [&]<int C>(int64_t column) {
        const auto place = [&](int r, int c) { return (first + r) * value_dim_ + column + c; };
        chain<R, C>(
            kRows,
            [&](int r, int c) {
              return state ? broadcast(from_start[first + r]) * load(state + place(r, c)) : Vec{};
            },
            [&](int r, int64_t j) { return keys[j * key_dim_ + first + r]; },
            [&](int64_t j) { return rows.updates[j] + column; },
            [&](int r, int c, Vec sum) { store(to + place(r, c), without_negligible(sum)); });
      });
    });
  }

  static constexpr float kOnes[kLanes] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};

  const SwRecurrence &layer_;
  const SwStatePlan &plan_;
  const RecurrenceStep &step_;
  const int64_t head_, key_head_, key_dim_, value_dim_;
  RecurrenceScratch scratch_;
};

// to[i * stride] = e^x[i].
inline void store_exp(const float *x, int64_t n, float *to, int64_t stride) {
  for (int64_t i = 0; i < n; i += kWidth) {
    const int64_t count = std::min<int64_t>(kWidth, n - i);
    const Vec powers = exp(load_some(x + i, count));
    for (int64_t lane = 0; lane < count; ++lane) to[(i + lane) * stride] = powers[lane];
  }
}

// Writes a token's key and decays to its row.
inline void write_row(const SwRecurrence &layer, const SwStatePlan &plan, int64_t token, const float *key,
                      const float *log_decay) {
  const int64_t block = plan.slots[token] / kRows, offset = plan.slots[token] % kRows;
  float *keys = rows_of_block(layer.keys, block), *decays = rows_of_block(layer.decays, block);
  for (int64_t head = 0; head < layer.key_heads; ++head)
    std::memcpy(keys + (head * kRows + offset) * layer.key_dim, key + head * layer.key_dim,
                layer.key_dim * sizeof(float));
  if (!layer.per_channel) return store_exp(log_decay, layer.heads, decays + offset, kRows);
  for (int64_t head = 0; head < layer.heads; ++head)
    store_exp(log_decay + head * layer.key_dim, layer.key_dim,
              decays + (head * kRows + offset) * layer.key_dim, 1);
}

template <bool kDelta, bool kPerChannel>
void recur_as(samewise::ThreadPool &pool, const SwRecurrence &layer, const SwStatePlan &plan,
              const RecurrenceStep &step) {
  pool.for_each(int64_t{plan.num_choices} * layer.heads, [&](int64_t unit) {
    RecurrenceUnit<kDelta, kPerChannel>(layer, plan, step, unit % layer.heads).run(unit / layer.heads);
  });
}

// Writes rows, computes outputs, and writes pages. log_decay is [T, heads], or [T, heads, key_dim] per channel.
inline void recur(samewise::ThreadPool &pool, const SwRecurrence &layer, const SwStatePlan &plan,
                  const RecurrenceStep &step, const float *log_decay) {
  const int64_t decay_size = int64_t{layer.heads} * (layer.per_channel ? layer.key_dim : 1);
  pool.for_each(plan.num_tokens, [&](int64_t token) {
    write_row(layer, plan, token, step.key + token * step.key_stride, log_decay + token * decay_size);
  });
  const auto run = step.beta ? (layer.per_channel ? recur_as<true, true> : recur_as<true, false>)
                             : (layer.per_channel ? recur_as<false, true> : recur_as<false, false>);
  run(pool, layer, plan, step);
}

}  // namespace SW_ISA
