// Attention over the paged KV cache.
//
// The output of a query row depends, bit for bit, only on its query and on the keys and values at the positions it
// sees. Tiles are blocks of the cache, which start at multiples of the block size in absolute positions. A row
// processes the tiles it sees in the order of positions, with the same arithmetic (attention_tile.h) whatever rows are
// processed with it. Where a branch of a draft tree has positions at other places, the tile is gathered first.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "attention_tile.h"
#include "kv_cache.h"
#include "runtime.h"
#include "samewise.h"
#include "simd.h"

namespace SW_ISA {

// ---------------------------------------------------------------------------------------------------------------------
// Units of work of a step's attention, and which positions its rows see.

constexpr int kPairsOfUnit = 24;  // limits queries and outputs so that they stay in the L1 cache together with a tile

// The query heads of a key-value head, and the number of them in a unit: many heads are shared between units.
struct Group {
  int heads;
  int parts;    // units of a row
  int at_once;  // heads of a unit, fewer in the last one

  explicit Group(int heads)
      : heads(heads), parts((heads + kPairsOfUnit - 1) / kPairsOfUnit), at_once((heads + parts - 1) / parts) {}
};

// Some rows of one choice, with query heads of one key-value head.
struct Unit {
  int choice;
  int first_token;
  int num_rows;
  int kv_head;
  int first_head;  // of the key-value head's
  int num_heads;
};

// Deals out the units of a step from last to first: the last choices have the longest prompt chunks, and the units at
// the end should be small.
class Units {
 public:
  Units(const SwStep &step, int kv_heads, const Group &group, int rows_at_once)
      : step_(step), group_(group), parts_(kv_heads * group.parts), rows_at_once_(rows_at_once),
        first_(step.num_choices + 1) {
    for (int choice = 0; choice < step.num_choices; ++choice) {
      const int rows = step.first_token[choice + 1] - step.first_token[choice];
      first_[choice + 1] = first_[choice] + parts_ * ((rows + rows_at_once - 1) / rows_at_once);
    }
  }

  int count() const { return first_.back(); }

  // The unit at this place in the order.
  Unit at(int place) const {
    const int index = count() - 1 - place;
    const int choice = static_cast<int>(std::upper_bound(first_.begin(), first_.end(), index) - first_.begin()) - 1;
    const int of_choice = index - first_[choice];
    const int token = step_.first_token[choice] + of_choice / parts_ * rows_at_once_;
    const int end = step_.first_token[choice + 1], part = of_choice % parts_;
    const int first_head = part % group_.parts * group_.at_once;
    return {choice, token, std::min(rows_at_once_, end - token), part / group_.parts, first_head,
            std::min(group_.at_once, group_.heads - first_head)};
  }

 private:
  const SwStep &step_;
  const Group group_;
  const int parts_;  // units of a row
  const int rows_at_once_;
  std::vector<int> first_;  // index of each choice's first unit, then the number of units
};

// The positions a query row sees, first to last. Positions below own_end are stored at their own places.
struct Row {
  int token;
  int first, last;
  int own_end;

  // Whether all the row sees of the tile at this position is stored at its own place.
  bool owns_tile(int position, int block_size) const { return own_end > last || position + block_size <= own_end; }
};

inline Row row_of(const SwStep &step, const SwAttention &options, int token) {
  const int last = step.positions[token];
  int first = options.window ? std::max(0, last - options.window + 1) : 0;
  if (options.chunk) first = std::max(first, last - last % options.chunk);
  if (options.sees_spans && step.span_last && step.span_last[token] > last) {
    const int end = step.span_last[token];  // no draft is in a span, so all is stored at its own place
    return {token, first, end, end + 1};
  }
  Row row{token, first, last, last + 1};
  if (step.path_start) {
    const int32_t *places = step.path_places + step.path_first[token];
    row.own_end = step.path_start[token];
    while (row.own_end <= last && places[row.own_end - step.path_start[token]] == row.own_end) ++row.own_end;
  }
  return row;
}

// The positions that a head of a row selected, from the tile at this position on; null if it sees all.
inline const uint16_t *selected_from(const SwAttention &options, int64_t token, int head, int position) {
  if (!options.selected) return nullptr;
  const int64_t selection = token * options.selections + head * options.selections / options.heads;
  return options.selected + selection * options.selected_width + position / 16;
}

inline bool any_selected(const uint16_t *selected, int block_size) {
  return !selected || std::any_of(selected, selected + block_size / 16, [](uint16_t bits) { return bits != 0; });
}

// ---------------------------------------------------------------------------------------------------------------------

// Number type of a converted or gathered tile.
template <typename T>
using ScratchNumber = std::conditional_t<std::is_same_v<T, int8_t>, float, T>;

// Memory for a gathered tile.
template <typename T>
inline Tile<ScratchNumber<T>> take_tile(const SwKvCache &cache, int64_t value_dim, ScratchAllocator &take) {
  Tile<ScratchNumber<T>> tile{};
  take(tile.keys, stored_key_dim<T>(cache.key_dim) * cache.block_size);
  take(tile.values, value_dim * cache.block_size);
  if (!std::is_same_v<T, int8_t>) return tile;
  take(tile.key_scales, cache.block_size);
  take(tile.value_scales, cache.block_size);
  return tile;
}

// A thread's scratch memory for one unit. Queries and outputs have room for whole vectors.
template <typename T>
struct UnitMemory {
  Row *rows;         // [rows at once]
  Pair *pairs;       // [rows at once, group]
  Pair **seeing;     // pairs that see the current tile
  float *queries;    // [pairs, query_stride]
  float *totals;     // [pairs, kLanes]
  float *outputs;    // [pairs, output_stride]
  float *scores;     // [pairs at once, block_size]
  Tile<ScratchNumber<T>> tile;
  int64_t query_stride, output_stride;

  static UnitMemory lay_out(const SwKvCache &cache, int64_t rows_at_once, int64_t num_pairs, ScratchAllocator &take) {
    UnitMemory m{};
    take(m.rows, rows_at_once);
    take(m.pairs, num_pairs);
    take(m.seeing, num_pairs);
    m.query_stride = round_up(cache.key_dim, kWidth);
    m.output_stride = round_up(cache.value_dim, kWidth);
    take(m.queries, num_pairs * m.query_stride);
    take(m.totals, num_pairs * kLanes);
    take(m.outputs, num_pairs * m.output_stride);
    take(m.scores, int64_t{std::max(kPairsAtOnce, kBf16PairsAtOnce)} * cache.block_size);
    m.tile = take_tile<T>(cache, cache.value_dim, take);
    return m;
  }
};

// y = x * factor.
inline void scale(const float *x, float factor, int64_t n, float *y) {
  transform(y, n, [=](Vec v) { return v * factor; }, x);
}

template <typename T, typename S>
inline void convert(const T *x, int64_t n, S *y) {  // n is a multiple of kWidth
  if (n == 0) return;
  if constexpr (std::is_same_v<T, S>)
    std::memcpy(y, x, n * sizeof *y);
  else
    for (int64_t i = 0; i < n; i += kWidth) store(y + i, load(x + i));
}

// Reads the tiles of a step's choices. T is the number type of the cache.
template <typename T>
class TileReader {
 public:
  using Scratch = Tile<ScratchNumber<T>>;

  TileReader(const SwKvCache &cache, const SwStep &step) : cache_(cache), step_(step) {}

  // The tile of a choice that holds this place.
  Tile<T> at(int choice, int kv_head, int place) const {
    return tile_of<T>(cache_, step_.block_table[int64_t{choice} * step_.table_width + place / cache_.block_size], kv_head);
  }

  // Gathers the part of the tile at this position that a row of the choice sees.
  void gather(const Row &row, int choice, int kv_head, int start, const Scratch &to) const {
    if (row.own_end > start) expand(at(choice, kv_head, start), to);
    const int32_t *places = step_.path_places + step_.path_first[row.token];
    const int end = std::min(row.last + 1, start + cache_.block_size);
    for (int position = std::max({row.own_end, row.first, start}); position < end; ++position) {
      const int place = places[position - step_.path_start[row.token]];
      copy_place(cache_, at(choice, kv_head, place), place % cache_.block_size, to, position - start);
    }
  }

  // Converts a whole tile.
  void expand(const Tile<T> &from, const Scratch &to) const {
    convert(from.keys, stored_key_dim<T>(cache_.key_dim) * cache_.block_size, to.keys);
    convert(from.values, int64_t{cache_.value_dim} * cache_.block_size, to.values);
    if (!from.key_scales) return;
    convert(from.key_scales, cache_.block_size, to.key_scales);
    convert(from.value_scales, cache_.block_size, to.value_scales);
  }

 private:
  const SwKvCache &cache_;
  const SwStep &step_;
};

// Runs attention for a unit. T is the number type of the cache.
template <typename T>
class Attender {
 public:
  Attender(const SwKvCache &cache, const SwStep &step, const SwAttention &options, int rows_at_once)
      : reader_(cache, step), step_(step), options_(options), group_(options.heads / cache.kv_heads),
        shape_{cache.block_size, cache.key_dim, cache.value_dim, options.softcap} {
    thread_local samewise::Memory memory;
    const bool is_zero = true;  // places that no row sees are read too
    memory_ = laid_out_in(memory, [&](ScratchAllocator &take) {
      return UnitMemory<T>::lay_out(cache, rows_at_once, int64_t{rows_at_once} * group_.at_once, take);
    }, is_zero);
  }

  // Announces the unit this thread will probably run after the next one, to prefetch its first tile.
  void expect(const Unit &unit) {
    tile_after_ = reader_.at(unit.choice, unit.kv_head, row_of(step_, options_, unit.first_token).first);
  }

  // query and output point to the unit's first row, at its first head.
  void run(const Unit &unit, const float *query, int64_t query_stride, float *output, int64_t output_stride) {
    unit_ = unit;
    for (int row = 0; row < unit.num_rows; ++row)
      prefetch(query + row * query_stride, int64_t{unit.num_heads} * shape_.key_dim * sizeof(float));
    for (int row = 0; row < unit.num_rows; ++row) begin_row(row, query + row * query_stride);
    attend_own_tiles();
    for (int row = 0; row < unit.num_rows; ++row) {
      attend_branch(row);
      finish_row(row, output + row * output_stride);
    }
  }

 private:
  Pair *pairs_of(int row) { return memory_.pairs + row * group_.at_once; }
  Tile<T> tile_at(int position) const { return reader_.at(unit_.choice, unit_.kv_head, position); }

  void begin_row(int row, const float *query) {
    memory_.rows[row] = row_of(step_, options_, unit_.first_token + row);
    const int64_t first_head = int64_t{unit_.kv_head} * group_.heads + unit_.first_head;
    for (int64_t head = 0, pair = row * group_.at_once; head < unit_.num_heads; ++head, ++pair) {
      Pair &p = memory_.pairs[pair];
      p = {memory_.queries + pair * memory_.query_stride, memory_.totals + pair * kLanes,
           memory_.outputs + pair * memory_.output_stride, kLowest, 0, 0, nullptr};
      take_query(query + head * shape_.key_dim, p.query);
      std::fill_n(p.totals, kLanes, 0.0f);
      std::fill_n(p.output, memory_.output_stride, 0.0f);
      if (options_.sinks) begin_with_sink(options_.sinks[first_head + head], p);
    }
  }

  // The softmax begins with one score that has no value, and with weight 1 for it.
  void begin_with_sink(float sink, Pair &pair) {
    pair.highest = std::max(kLowest, std::is_same_v<T, Bfloat16> ? sink * kLog2E : sink);
    pair.totals[0] = 1;
  }

  void take_query(const float *from, float *to) {
    if constexpr (std::is_same_v<T, Bfloat16>)
      store_query(from, shape_.softcap != 0 ? options_.scale : options_.scale * kLog2E, shape_.key_dim, to);
    else
      scale(from, options_.scale, shape_.key_dim, to);
  }

  // Adds a row's pairs to those that see the tile at this position, if it selected any of it; returns their new number.
  int add_seeing(int row, int start, int count) {
    const Row &r = memory_.rows[row];
    const uint16_t *selected = selected_from(options_, r.token, unit_.kv_head * group_.heads, start);
    if (!any_selected(selected, shape_.block_size)) return count;
    for (int head = 0; head < unit_.num_heads; ++head) {
      Pair &pair = pairs_of(row)[head];
      pair.low = std::max(0, r.first - start);
      pair.high = std::min(shape_.block_size, r.last + 1 - start);
      pair.selected = selected;
      memory_.seeing[count++] = &pair;
    }
    return count;
  }

  void attend_own_tiles() {
    int first = memory_.rows[0].first, last = memory_.rows[0].last;
    for (int row = 1; row < unit_.num_rows; ++row) {
      first = std::min(first, memory_.rows[row].first);
      last = std::max(last, memory_.rows[row].last);
    }
    for (int start = first - first % shape_.block_size; start <= last; start += shape_.block_size) {
      int count = 0;
      for (int row = 0; row < unit_.num_rows; ++row) {
        const Row &r = memory_.rows[row];
        if (start <= r.last && start + shape_.block_size > r.first && r.owns_tile(start, shape_.block_size))
          count = add_seeing(row, start, count);
      }
      if (!count) continue;
      Tile<T> tile = tile_at(start);
      const int next = start + shape_.block_size;
      const Tile<T> after = next <= last ? tile_at(next) : tile_after_;
      tile.next_keys = after.keys;
      tile.next_values = after.values;
      attend_tile(tile, count);
    }
  }

  // Processes the row's last tiles, which hold positions of a branch.
  void attend_branch(int row) {
    const Row &r = memory_.rows[row];
    if (r.own_end > r.last) return;
    const int from = std::max(r.first, r.own_end);
    for (int start = from - from % shape_.block_size; start <= r.last; start += shape_.block_size) {
      const int count = add_seeing(row, start, 0);
      if (!count) continue;
      reader_.gather(r, unit_.choice, unit_.kv_head, start, memory_.tile);
      attend_with(memory_.tile, count);
    }
  }

  // Converting the tile first pays off if it is read more than once. The numbers are the same.
  void attend_tile(const Tile<T> &tile, int count) {
    if constexpr (!std::is_same_v<T, ScratchNumber<T>>) {
      if (count > kPairsAtOnce) {
        reader_.expand(tile, memory_.tile);
        return attend_with(memory_.tile, count);
      }
    }
    attend_with(tile, count);
  }

  template <typename S>
  void attend_with(const Tile<S> &tile, int count) {
    static constexpr void (*kAttend[])(const Tile<S> &, const TileShape &, Pair *const *, float *) = {
        attend_pairs<1, S>, attend_pairs<2, S>, attend_pairs<3, S>,
        attend_pairs<4, S>, attend_pairs<5, S>, attend_pairs<6, S>};
    static_assert(sizeof kAttend / sizeof *kAttend == kPairsAtOnce);
    attend_in_rounds(kAttend, kPairsAtOnce, tile, count);
  }

  void attend_with(const Tile<Bfloat16> &tile, int count) {
    static constexpr void (*kAttend[])(const Tile<Bfloat16> &, const TileShape &, Pair *const *, float *) = {
        attend_bf16<1>, attend_bf16<2>, attend_bf16<3>, attend_bf16<4>,
#if defined(__AVX512F__)
        attend_bf16<5>, attend_bf16<6>, attend_bf16<7>, attend_bf16<8>
#endif
    };
    static_assert(sizeof kAttend / sizeof *kAttend == kBf16PairsAtOnce);
    attend_in_rounds(kAttend, kBf16PairsAtOnce, tile, count);
  }

  template <typename Attend, typename S>
  void attend_in_rounds(const Attend *attend, int at_once, Tile<S> tile, int count) {
    Pair **pairs = memory_.seeing;
    for (int rounds = (count + at_once - 1) / at_once; rounds; --rounds) {
      const int taken = (count + rounds - 1) / rounds;  // even shares: a single leftover pair would be slow
      attend[taken - 1](tile, shape_, pairs, memory_.scores);
      tile.next_keys = tile.next_values = nullptr;  // already prefetched
      pairs += taken;
      count -= taken;
    }
  }

  void finish_row(int row, float *output) {
    for (int64_t head = 0; head < unit_.num_heads; ++head) {
      const Pair &pair = pairs_of(row)[head];
      const float total = sum(load_lanes(pair.totals));
      scale(pair.output, 1.0f / total, shape_.value_dim, output + head * shape_.value_dim);
      if (options_.sums) store_sums(memory_.rows[row].token, head, pair.highest, total);
    }
  }

  void store_sums(int64_t token, int64_t head, float highest, float total) {
    const int64_t of_token = int64_t{unit_.kv_head} * group_.heads + unit_.first_head + head;
    float *sums = options_.sums + (token * options_.heads + of_token) * 2;
    sums[0] = std::is_same_v<T, Bfloat16> ? highest / kLog2E : highest;
    sums[1] = total;
  }

  const TileReader<T> reader_;
  const SwStep &step_;
  const SwAttention &options_;
  const Group group_;
  const TileShape shape_;
  UnitMemory<T> memory_;
  Unit unit_{};
  Tile<T> tile_after_{};  // first tile of the unit this thread will probably run next
};

// Attends with a step's query rows, [heads, key_dim] each, to the cached keys and values of their choices, including
// their own. Outputs are [heads, value_dim].
inline void attend(samewise::ThreadPool &pool, const SwKvCache &cache, const SwStep &step, const SwAttention &options,
                   const float *query, int64_t query_stride, float *output, int64_t output_stride) {
  const Group group(options.heads / cache.kv_heads);
  const int rows_at_once = std::max(1, kPairsOfUnit / group.heads);
  const Units units(step, cache.kv_heads, group, rows_at_once);
  with_number_type(cache, [&]<typename T>() {
    pool.for_each(units.count(), [&](int64_t place) {
      Attender<T> attender(cache, step, options, rows_at_once);
      const Unit unit = units.at(static_cast<int>(place));
      if (place + pool.size() < units.count()) attender.expect(units.at(static_cast<int>(place) + pool.size()));
      const int64_t token = unit.first_token, head = int64_t{unit.kv_head} * group.heads + unit.first_head;
      attender.run(unit, query + token * query_stride + head * cache.key_dim, query_stride,
                   output + token * output_stride + head * cache.value_dim, output_stride);
    });
  });
}

}  // namespace SW_ISA
