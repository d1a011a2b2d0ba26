// How the attention of a step is cut into units of work, and what its rows see.
#pragma once
#include <algorithm>
#include <cstdint>
#include <vector>

#include "samewise.h"

namespace SW_ISA {

// Some rows of one choice, with the query heads of one key-value head.
struct Unit {
  int choice;
  int first_token;
  int num_rows;
  int kv_head;
};

// Deals out the units of a step from the last to the first: the last choices have the longest prompt chunks, and what
// is left for the end should be small.
class Units {
 public:
  Units(const SwStep &step, int kv_heads, int rows_at_once)
      : step_(step), kv_heads_(kv_heads), rows_at_once_(rows_at_once), first_(step.num_choices + 1) {
    for (int choice = 0; choice < step.num_choices; ++choice) {
      const int rows = step.first_token[choice + 1] - step.first_token[choice];
      first_[choice + 1] = first_[choice] + kv_heads * ((rows + rows_at_once - 1) / rows_at_once);
    }
  }

  int count() const { return first_.back(); }

  // The unit at this place in the order.
  Unit at(int place) const {
    const int index = count() - 1 - place;
    const int choice = static_cast<int>(std::upper_bound(first_.begin(), first_.end(), index) - first_.begin()) - 1;
    const int of_choice = index - first_[choice];
    const int token = step_.first_token[choice] + of_choice / kv_heads_ * rows_at_once_;
    const int end = step_.first_token[choice + 1];
    return {choice, token, std::min(rows_at_once_, end - token), of_choice % kv_heads_};
  }

 private:
  const SwStep &step_;
  const int kv_heads_;
  const int rows_at_once_;
  std::vector<int> first_;  // index of the first unit of each choice, then their number
};

// What a query row sees: positions first to last. Those below own_end stand at their own places.
struct Row {
  int token;
  int first, last;
  int own_end;

  // Whether all that the row sees of the tile that begins at this position stands at its own place.
  bool owns_tile(int position, int block_size) const { return own_end > last || position + block_size <= own_end; }
};

inline Row row_of(const SwStep &step, const SwAttention &options, int token) {
  const int last = step.positions[token];
  Row row{token, options.window ? std::max(0, last - options.window + 1) : 0, last, last + 1};
  if (step.path_start) {
    const int32_t *places = step.path_places + step.path_first[token];
    row.own_end = step.path_start[token];
    while (row.own_end <= last && places[row.own_end - step.path_start[token]] == row.own_end) ++row.own_end;
  }
  return row;
}

}  // namespace SW_ISA
