// Mamba's selective scan by rows and pages: h[n] = e^(dt A[n]) h[n] + dt x B[n], y = sum over n of C[n] h[n] (arXiv:2312.00752).
//
// Channels do not meet. A unit is some channels of one choice. From the block's state on, the rows of a token's path are
// taken up one after another, in one order of operations, so neither the rows that are computed together nor the
// instruction set matter.
#pragma once
#include <algorithm>
#include <cstring>

#include "recurrence.h"
#include "runtime.h"
#include "samewise.h"
#include "simd.h"

namespace SW_ISA {

constexpr int kScanned = 64;  // channels of a unit, whose states fit in the first cache

// The inputs and outputs of a step.
struct ScanStep {
  const float *steps;   // [T, channels]
  const float *values;  // [T, channels] inputs times their steps
  const float *b;       // [T, num_states]
  const float *c;       // [T, num_states]
  float *output;        // [T, channels]
};

// Some channels of one choice.
class ScanUnit {
 public:
  ScanUnit(const SwScan &layer, const SwStatePlan &plan, const ScanStep &step, int64_t first)
      : layer_(layer), plan_(plan), step_(step), first_(first),
        count_(std::min<int64_t>(kScanned, layer.channels - first)), num_states_(layer.num_states) {
  }

  void run(int64_t choice) {
    thread_local samewise::Memory memory;
    float *state = reinterpret_cast<float *>(memory.reserve(3 * size() * sizeof(float)));
    float *branch = state + size(), *reached = branch + size();
    const int32_t anchor = plan_.anchors[choice];
    for (int64_t n = 0; n < num_states_; ++n)
      if (anchor < 0)
        std::memset(state + n * kScanned, 0, count_ * sizeof(float));
      else
        std::memcpy(state + n * kScanned, page(anchor, n), count_ * sizeof(float));
    for (int32_t s = plan_.first_segment[choice]; s < plan_.first_segment[choice + 1]; ++s) {
      const SwSegment &segment = plan_.segments[s];
      if (segment.paths < 0) {
        add_known(segment, state, reached);
        continue;
      }
      std::memcpy(branch, state, size() * sizeof(float));
      const int32_t *fold = plan_.paths + int64_t{segment.first_fold} * kRows;
      for (int64_t i = 0; i < int64_t{segment.num_folds} * kRows; ++i) take_up(fold[i], branch);
      add_drafts(segment, branch, reached);
    }
  }

 private:
  int64_t size() const { return num_states_ * kScanned; }

  float *page(int64_t index, int64_t n) const {
    return layer_.states + index * layer_.page_stride + n * layer_.channels + first_;
  }

  // Computes known tokens, whose block has `offset` rows before them, and folds it into the state if it is whole.
  void add_known(const SwSegment &segment, float *state, float *reached) {
    float *at = segment.is_folded ? state : reached;
    if (at != state) std::memcpy(at, state, size() * sizeof(float));
    const int64_t last = segment.is_folded ? kRows : segment.offset + segment.num_tokens;
    for (int64_t row = 0; row < last; ++row) {
      take_up(segment.block * int64_t{kRows} + row, at);
      const int64_t i = row - segment.offset;
      if (i >= 0 && i < segment.num_tokens) write_output(plan_.order[segment.first + i], at);
    }
    if (segment.page >= 0)
      for (int64_t n = 0; n < num_states_; ++n)
        std::memcpy(page(segment.page, n), state + n * kScanned, count_ * sizeof(float));
  }

  // Computes drafts. One whose path goes on from the draft before it begins where that one ended.
  void add_drafts(const SwSegment &segment, const float *state, float *reached) {
    int64_t taken = 0;  // rows of the last path
    for (int64_t i = 0; i < segment.num_tokens; ++i) {
      const int32_t token = plan_.order[segment.first + i], *path = plan_.paths + (segment.paths + i) * kRows;
      const int64_t rows = plan_.num_rows[token];
      if (!taken || taken >= rows || std::memcmp(path, path - kRows, taken * sizeof(int32_t))) {
        std::memcpy(reached, state, size() * sizeof(float));
        taken = 0;
      }
      for (; taken < rows; ++taken) take_up(path[taken], reached);
      write_output(token, reached);
    }
  }

  // h = the states after the row at a slot.
  void take_up(int64_t slot, float *h) const {
    const int64_t block = slot / kRows, row = slot % kRows;
    const float *steps = rows_of_block(layer_.steps, block) + row * layer_.channels + first_;
    const float *values = rows_of_block(layer_.values, block) + row * layer_.channels + first_;
    const float *b = rows_of_block(layer_.inputs, block) + row * num_states_, *decays = layer_.decays + first_;
    for (int64_t c = 0; c < count_; c += kWidth) {
      const Vec step = load(steps + c), value = load(values + c);
      for (int64_t n = 0; n < num_states_; ++n) {
        const Vec decay = exp_not_positive(step * load(decays + n * layer_.channels + c));
        const Vec next = fma(decay, load(h + n * kScanned + c), broadcast(b[n]) * value);
        store(h + n * kScanned + c, without_negligible(next));
      }
    }
  }

  void write_output(int64_t token, const float *h) const {
    const float *weights = step_.c + token * num_states_;
    for (int64_t c = 0; c < count_; c += kWidth) {
      Vec sum{};
      for (int64_t n = 0; n < num_states_; ++n) sum = fma(broadcast(weights[n]), load(h + n * kScanned + c), sum);
      store(step_.output + token * layer_.channels + first_ + c, sum);
    }
  }

  const SwScan &layer_;
  const SwStatePlan &plan_;
  const ScanStep &step_;
  const int64_t first_, count_, num_states_;
};

// Writes rows, computes outputs, and writes pages.
inline void scan(samewise::ThreadPool &pool, const SwScan &layer, const SwStatePlan &plan, const ScanStep &step) {
  const int64_t channels = layer.channels, num_states = layer.num_states;
  pool.for_each(plan.num_tokens, [&](int64_t token) {
    const int64_t block = plan.slots[token] / kRows, row = plan.slots[token] % kRows;
    const auto write = [&](const SwRows &rows, const float *from, int64_t width) {
      std::memcpy(rows_of_block(rows, block) + row * width, from + token * width, width * sizeof(float));
    };
    write(layer.steps, step.steps, channels);
    write(layer.values, step.values, channels);
    write(layer.inputs, step.b, num_states);
  });
  const int64_t slices = (channels + kScanned - 1) / kScanned;
  pool.for_each(plan.num_choices * slices, [&](int64_t unit) {
    ScanUnit(layer, plan, step, unit % slices * kScanned).run(unit / slices);
  });
}

}  // namespace SW_ISA
