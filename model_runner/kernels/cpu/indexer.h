// Indexers (DeepSeek-V3.2, arXiv:2512.02556): which positions attention sees, by scores of small index keys.
//
// A score depends, bit for bit, only on its query and its key: it is one chain over dimensions for each head, and one
// over heads. So a row selects the same positions however it is computed. Of equal scores the earlier position wins.
#pragma once
#include <algorithm>
#include <bit>
#include <cstring>
#include <vector>

#include "attention.h"

namespace SW_ISA {

constexpr int kTilesOfUnit = 32;             // a long row is shared between threads
constexpr int64_t kScoreBytes = 16 << 20;  // limits the rows that are scored before they select

struct Scoring {
  const SwKvCache &cache;
  const SwStep &step;
  const SwIndexer &indexer;
  const int selections;  // of a row

  int64_t positions() const { return int64_t{step.table_width} * cache.block_size; }

  // Rows that are scored at once.
  int64_t rows_at_once() const {
    const int64_t row_bytes = std::max<int64_t>(1, selections * positions() * sizeof(float));
    return std::clamp<int64_t>(kScoreBytes / row_bytes, 1, step.num_tokens);
  }

  int64_t scratch_bytes() const { return rows_at_once() * selections * positions() * sizeof(float); }

  // Blocks of which a row selects some. It sees all others up to its own position.
  int64_t blocks_of(int64_t position) const {
    return (position + (indexer.pools == SW_LAST ? 1 : indexer.block)) / indexer.block;
  }
};

// Scores the keys of some tiles for one row. T is the number type of the cache.
template <typename T>
class TileScorer {
 public:
  explicit TileScorer(const Scoring &scoring)
      : scoring_(scoring), reader_(scoring.cache, scoring.step),
        shape_{scoring.cache.block_size, scoring.cache.key_dim, 0, 0} {
    thread_local samewise::Memory memory;
    const bool is_zero = true;  // as in attention.h
    laid_out_in(memory, [&](ScratchAllocator &take) { return lay_out(take); }, is_zero);
  }

  // Without weights, scores are [heads, positions]; with them [positions].
  void run(int choice, int token, const float *query, const float *weights, int first_tile, float *scores) {
    const SwStep &step = scoring_.step;
    const Row row = row_of(step, {}, token);
    const int heads = scoring_.indexer.heads, size = shape_.block_size;
    for (int head = 0; head < heads; ++head) {
      pairs_[head] = {queries_ + head * query_stride_, nullptr, nullptr, 0, 0, 0, nullptr};
      take_query(query + int64_t{head} * shape_.key_dim, pairs_[head].query);
      seeing_[head] = pairs_ + head;
    }
    const int64_t stride = scoring_.positions();
    const int end = std::min(row.last + 1, (first_tile + kTilesOfUnit) * size);
    for (int start = first_tile * size; start < end; start += size) {
      const Tile<T> own = reader_.at(choice, 0, start);
      if (row.owns_tile(start, size)) {
        score_heads(own);
      } else {
        reader_.gather(row, choice, 0, start, gathered_);
        score_heads(gathered_);
      }
      if (weights)
        add_heads(weights, scores + start);
      else
        for (int head = 0; head < heads; ++head)
          std::memcpy(scores + head * stride + start, of_heads_ + head * size, size * sizeof(float));
    }
  }

 private:
  int64_t lay_out(ScratchAllocator &take) {
    const int64_t heads = scoring_.indexer.heads;
    query_stride_ = round_up(shape_.key_dim, kWidth);
    take(pairs_, heads);
    take(seeing_, heads);
    take(queries_, heads * query_stride_);
    take(of_heads_, heads * shape_.block_size);
    gathered_ = take_tile<T>(scoring_.cache, scoring_.cache.value_dim, take);
    return take.used;
  }

  static void take_query(const float *from, float *to, int64_t dim) {
    if constexpr (std::is_same_v<T, Bfloat16>)
      store_query(from, 1, dim, to);
    else
      std::memcpy(to, from, dim * sizeof(float));
  }

  void take_query(const float *from, float *to) { take_query(from, to, shape_.key_dim); }

  template <int R>
  void score_some(const Tile<Bfloat16> &tile, int head) {
    score_bf16<R>(tile, shape_, seeing_ + head, of_heads_ + head * shape_.block_size);
  }

  template <int R, typename S>
  void score_some(const Tile<S> &tile, int head) {
    score<R>(tile, shape_, seeing_ + head, of_heads_ + head * shape_.block_size);
  }

  // The products of all heads with the keys of a tile.
  template <typename S>
  void score_heads(const Tile<S> &tile) {
    const int heads = scoring_.indexer.heads;
    int head = 0;
    for (; head + 4 <= heads; head += 4) score_some<4>(tile, head);
    for (; head < heads; ++head) score_some<1>(tile, head);
    if (!tile.key_scales) return;
    for (head = 0; head < heads; ++head)
      for (int place = 0; place < shape_.block_size; place += kWidth) {
        float *scores = of_heads_ + head * shape_.block_size + place;
        store(scores, load(scores) * load(tile.key_scales + place));
      }
  }

  // The weighted sum of the products that are not negative.
  void add_heads(const float *weights, float *scores) {
    for (int place = 0; place < shape_.block_size; place += kWidth) {
      Vec total{};
      for (int head = 0; head < scoring_.indexer.heads; ++head) {
        const Vec product = load(of_heads_ + head * shape_.block_size + place);
        total = fma(broadcast(weights[head]), product < Vec{} ? Vec{} : product, total);
      }
      store(scores + place, total);
    }
  }

  const Scoring &scoring_;
  const TileReader<T> reader_;
  const TileShape shape_;
  int64_t query_stride_ = 0;
  Pair *pairs_ = nullptr;
  Pair **seeing_ = nullptr;
  float *queries_ = nullptr;
  float *of_heads_ = nullptr;  // [heads, block_size]
  Tile<ScratchNumber<T>> gathered_{};
};

// An integer of the same order as the score. NaN is the highest, and -0 equals 0.
inline uint32_t ordered(float score) {
  if (score != score) return 0xffffffff;
  const uint32_t bits = std::bit_cast<uint32_t>(score + 0.0f);
  return bits & 0x80000000 ? ~bits : bits | 0x80000000;
}

// Selects blocks for a row from the scores of its positions.
class Selector {
 public:
  Selector(const Scoring &scoring, uint16_t *selected, int width)
      : indexer_(scoring.indexer), num_blocks_(0), scoring_(scoring), selected_(selected), width_(width) {}

  // The row sees everything: it has no more blocks than it may select.
  void select_all(int position) {
    std::fill_n(selected_, width_, static_cast<uint16_t>(indexer_.entries ? 0 : 0xffff));
    for (int64_t block = 0; indexer_.entries && block < scoring_.blocks_of(position); ++block) take(block);
  }

  void select(int position, const float *scores) {
    num_blocks_ = scoring_.blocks_of(position);
    std::fill_n(selected_, width_, uint16_t{0});
    take_keys(position, scores);
    // By resize, because g++ 12 takes a function of a newer C++ library to copy vectors; `make wheel` says which are old.
    sorted_.resize(num_blocks_);
    std::copy(keys_.begin(), keys_.end(), sorted_.begin());
    std::nth_element(sorted_.begin(), sorted_.begin() + indexer_.top - 1, sorted_.end(), std::greater<>());
    const uint32_t lowest = sorted_[indexer_.top - 1];
    int64_t equal = indexer_.top - std::count_if(keys_.begin(), keys_.end(), [&](uint32_t key) { return key > lowest; });
    for (int64_t block = 0; block < num_blocks_; ++block)
      if (keys_[block] > lowest || (keys_[block] == lowest && equal-- > 0)) take(block);
    if (indexer_.pools == SW_LAST && !indexer_.entries) take(num_blocks_);
  }

 private:
  void take_keys(int position, const float *scores) {
    keys_.resize(num_blocks_);
    const int size = indexer_.block;
    for (int64_t block = 0; block < num_blocks_; ++block) {
      const int64_t first = block * size, last = std::min<int64_t>(first + size - 1, position);
      keys_[block] = ordered(scores[last]);
      for (int64_t at = first; indexer_.pools == SW_HIGHEST && at < last; ++at)
        keys_[block] = std::max(keys_[block], ordered(scores[at]));
      if (block >= num_blocks_ - indexer_.local) keys_[block] = 0xffffffff;
    }
  }

  void take(int64_t block) {
    const int64_t end = std::min<int64_t>((block + 1) * indexer_.block, int64_t{width_} * 16);
    for (int64_t at = indexer_.entries ? end - 1 : block * indexer_.block; at < end; ++at)
      selected_[at / 16] |= static_cast<uint16_t>(1u << at % 16);
  }

  const SwIndexer &indexer_;
  int64_t num_blocks_;
  const Scoring &scoring_;
  uint16_t *selected_;
  const int width_;
  std::vector<uint32_t> keys_, sorted_;
};

// Scores the rows from `first` on, as many as `at_once`. scores [at_once, selections, positions].
template <typename T>
void score_rows(samewise::ThreadPool &pool, const Scoring &scoring, const float *query, const float *weights,
                int64_t first, int64_t end, float *scores) {
  const SwStep &step = scoring.step;
  const SwIndexer &indexer = scoring.indexer;
  const int units = (step.table_width + kTilesOfUnit - 1) / kTilesOfUnit;
  const int64_t stride = scoring.selections * scoring.positions();
  pool.for_each((end - first) * units, [&](int64_t place) {
    const int token = static_cast<int>(first + place / units), tile = static_cast<int>(place % units) * kTilesOfUnit;
    const int position = step.positions[token];
    if (scoring.blocks_of(position) <= indexer.top || tile * scoring.cache.block_size > position) return;
    const int32_t *starts = step.first_token;
    const int choice = static_cast<int>(std::upper_bound(starts, starts + step.num_choices, token) - starts) - 1;
    const int64_t row = int64_t{token} * indexer.heads;
    TileScorer<T>(scoring).run(choice, token, query + row * scoring.cache.key_dim, weights ? weights + row : nullptr, tile,
                               scores + place / units * stride);
  });
}

// Selects for all rows of a step, some at a time. `scores` has the scoring's scratch_bytes.
inline void select_rows(samewise::ThreadPool &pool, const Scoring &scoring, const float *query, const float *weights,
                        uint16_t *selected, int width, float *scores) {
  const int selections = scoring.selections;
  const int64_t at_once = scoring.rows_at_once(), numbers = scoring.positions();
  for (int64_t first = 0; first < scoring.step.num_tokens; first += at_once) {
    const int64_t end = std::min<int64_t>(first + at_once, scoring.step.num_tokens);
    with_number_type(scoring.cache,
                     [&]<typename T>() { score_rows<T>(pool, scoring, query, weights, first, end, scores); });
    pool.for_each((end - first) * selections, [&](int64_t place) {
      const int position = scoring.step.positions[first + place / selections];
      Selector selector(scoring, selected + (first * selections + place) * width, width);
      if (scoring.blocks_of(position) <= scoring.indexer.top)
        selector.select_all(position);
      else
        selector.select(position, scores + place * numbers);
    });
  }
}

}  // namespace SW_ISA
