// Truncation of a row of logits, with the steps of sampling/truncations.py, which defines each of them.
//
// All deciding numbers are in double precision, and every sum has the same order on every instruction set. Most steps
// need only the most probable tokens of a row, its head. They are preselected with a threshold slightly too low, and
// only the head is read twice or sorted.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "double_math.h"
#include "runtime.h"
#include "samewise.h"

namespace SW_ISA {
namespace truncation {

constexpr int kBlock = 64;  // entries processed at a time; sums have this many parts

// Number of tail tokens that usually hold all of the tail's mass.
constexpr double kShortTail = 4096;

// A sum of many numbers, one block at a time.
struct BlockSum {
  double parts[kBlock] = {};

  double total() const {  // pairwise, the upper half added to the lower
    double left[kBlock];
    std::memcpy(left, parts, sizeof left);
    for (int half = kBlock / 2; half; half /= 2)
      for (int i = 0; i < half; ++i) left[i] += left[i + half];
    return left[0];
  }
};

// A token that may be in a row's head.
struct Entry {
  double key;  // sort key, the lowest first
  int32_t token;
  float logit;
};

inline bool comes_first(const Entry &a, const Entry &b) {
  return a.key < b.key || (a.key == b.key && a.token < b.token);
}

// A row during truncation: at first all of its entries, later only those that are left. Removed entries are -inf or no
// longer stored.
class TruncatedRow {
 public:
  static int64_t scratch(int64_t width) { return width * (sizeof(Entry) + sizeof(int32_t) + sizeof(float)); }

  TruncatedRow(const float *logits, int64_t width, float *output, char *scratch)
      : logits_(logits), count_(width), width_(width), output_(output), found_(reinterpret_cast<Entry *>(scratch)),
        tokens_(reinterpret_cast<int32_t *>(found_ + width)), left_(reinterpret_cast<float *>(tokens_ + width)) {
    find_highest();
  }

  void take(const SwTruncation &step) {
    switch (step.kind) {
      case SW_TEMPERATURE: return divide(step.value);
      case SW_TOP_N_SIGMA: return keep_deviating(step.value);
      case SW_TYPICAL_P: return keep_typical(step.value);
      case SW_EPSILON_CUTOFF: return cut(step.value, sums());
      case SW_ETA_CUTOFF: return cut_by_entropy(step.value);
      case SW_TOP_K: return keep_most(static_cast<int64_t>(step.value));
      case SW_TOP_P: return keep_nucleus(step.value);
      case SW_MIN_P: return keep_share(step.value);
      case SW_XTC: return exclude_top(step.value);
      default: return keep_expected(step.value);
    }
  }

  void write() const {
    if (is_whole()) {
      if (logits_ != output_) std::memcpy(output_, logits_, width_ * sizeof(float));
      return;
    }
    std::fill(output_, output_ + width_, -std::numeric_limits<float>::infinity());
    for (int64_t i = 0; i < count_; ++i) output_[tokens_[i]] = logits_[i];
  }

 private:
  struct Sums {
    double log_total, total;  // of e^x, where x is a logit minus the highest one
    double entropy;           // in nats
    double prob(double x) const { return exp_not_positive(x) / total; }
    double logit_of(double prob) const { return log(prob) + log_total; }
  };

  bool is_whole() const { return logits_ != left_; }
  int32_t token(int64_t i) const { return is_whole() ? static_cast<int32_t>(i) : tokens_[i]; }
  double relative(float logit) const { return static_cast<double>(logit) - highest_; }

  // Passes the entries minus the highest one, a block at a time. The last block is padded with -inf.
  template <typename Work>
  void for_blocks(const Work &work) const {
    double x[kBlock];
    int64_t start = 0;
    for (; start + kBlock <= count_; start += kBlock) {
      for (int i = 0; i < kBlock; ++i) x[i] = static_cast<double>(logits_[start + i]) - highest_;
      work(x);
    }
    if (start == count_) return;
    std::fill(x, x + kBlock, -kInfinity);
    for (int64_t i = start; i < count_; ++i) x[i - start] = relative(logits_[i]);
    work(x);
  }

  void find_highest() {
    float highest = -std::numeric_limits<float>::infinity();
    float highests[kBlock];
    std::fill(highests, highests + kBlock, highest);
    int64_t i = 0;
    for (; i + kBlock <= count_; i += kBlock)
      for (int64_t j = 0; j < kBlock; ++j) highests[j] = logits_[i + j] > highests[j] ? logits_[i + j] : highests[j];
    for (float one : highests) highest = std::max(highest, one);
    for (; i < count_; ++i) highest = std::max(highest, logits_[i]);
    highest_ = highest;
  }

  Sums sums() const {
    BlockSum powers, weighted;
    for_blocks([&](const double *x) {
      double power[kBlock];
      for (int i = 0; i < kBlock; ++i) power[i] = exp_not_positive(x[i]);
      for (int i = 0; i < kBlock; ++i) powers.parts[i] += power[i];
      for (int i = 0; i < kBlock; ++i) weighted.parts[i] += power[i] * (x[i] < kLeastExponent ? 0 : x[i]);
    });
    const double total = powers.total(), log_total = log(total);
    return {log_total, total, log_total - weighted.total() / total};
  }

  // Finds the entries that are at least `lowest` relative to the highest one, and maybe some slightly lower.
  int64_t find(double lowest) {
    const double exact = highest_ + std::min(lowest, 0.0);
    const double low = std::max(exact - 1e-9 - 1e-12 * std::abs(exact), std::numeric_limits<double>::lowest());
    int64_t count = 0;
    for (int64_t start = 0; start < count_; start += kBlock) {
      const int64_t end = std::min(start + kBlock, count_);
      int32_t reaches = 0;
      for (int64_t i = start; i < end; ++i) reaches |= static_cast<double>(logits_[i]) >= low;
      for (int64_t i = reaches ? start : end; i < end; ++i)
        if (static_cast<double>(logits_[i]) >= low) found_[count++] = {relative(logits_[i]), token(i), logits_[i]};
    }
    return count;
  }

  // Keeps the first `count` of the found entries, which are sorted by token.
  void keep(int64_t count) {
    for (int64_t i = 0; i < count; ++i) {
      tokens_[i] = found_[i].token;
      left_[i] = found_[i].logit;
    }
    logits_ = left_;
    count_ = count;
    find_highest();
  }

  template <typename Stays>
  void keep_if(int64_t count, const Stays &stays) {
    int64_t kept = 0;
    for (int64_t i = 0; i < count; ++i)
      if (stays(found_[i])) found_[kept++] = found_[i];
    keep(kept);
  }

  // Sets the keys of the found entries to their negative probabilities.
  void order_by_probability(int64_t count, const Sums &all) {
    double x[kBlock];
    for (int64_t start = 0; start < count; start += kBlock) {
      const int64_t end = std::min(start + kBlock, count);
      std::fill(x, x + kBlock, 0.0);
      for (int64_t i = start; i < end; ++i) x[i - start] = relative(found_[i].logit);
      for (int i = 0; i < kBlock; ++i) x[i] = exp_not_positive(x[i]);
      for (int64_t i = start; i < end; ++i) found_[i].key = -x[i - start] / all.total;
    }
  }

  double mass_of(int64_t start, int64_t end, const Sums &all) const {
    BlockSum sum;
    for (; start < end; start += kBlock) {
      double x[kBlock];
      std::fill(x, x + kBlock, -kInfinity);
      for (int64_t i = start; i < std::min(start + kBlock, end); ++i) x[i - start] = relative(found_[i].logit);
      for (int i = 0; i < kBlock; ++i) x[i] = exp_not_positive(x[i]);
      for (int i = 0; i < kBlock; ++i) sum.parts[i] += x[i];
    }
    return sum.total() / all.total;
  }

  struct Head {
    Entry last;
    double mass;  // less than requested if there is not that much
  };

  // The shortest prefix of the found entries, by key, that has the mass: at least one token. Sorts only part of the
  // entries, but changes their order.
  Head head(int64_t count, double mass, const Sums &all) {
    int64_t start = 0, end = count;
    double sum = 0;  // of the entries before `start`
    while (end - start > kBlock) {
      const int64_t middle = start + (end - start) / 2;
      std::nth_element(found_ + start, found_ + middle, found_ + end, comes_first);
      const double half = mass_of(start, middle, all);
      if (sum + half >= mass) {
        end = middle;
      } else {
        sum += half;
        start = middle;
      }
    }
    std::sort(found_ + start, found_ + end, comes_first);
    Entry last = found_[start];
    for (int64_t i = start; i < end && (i == start || sum < mass); ++i) {
      last = found_[i];
      sum += all.prob(relative(last.logit));
    }
    return {last, sum};
  }

  float *writable() { return is_whole() ? output_ : left_; }

  void divide(double temperature) {
    float *to = writable();
    for (int64_t i = 0; i < count_; ++i)
      to[i] = static_cast<float>((static_cast<double>(logits_[i]) - highest_) / temperature);
    logits_ = to;
    highest_ = 0;
  }

  void keep_deviating(double num_deviations) {
    BlockSum counts, sums, squares;
    for_blocks([&](const double *x) {
      for (int i = 0; i < kBlock; ++i) counts.parts[i] += x[i] > -kInfinity ? 1 : 0;
      for (int i = 0; i < kBlock; ++i) sums.parts[i] += x[i] > -kInfinity ? x[i] : 0;
    });
    const double count = counts.total(), mean = sums.total() / count;
    for_blocks([&](const double *x) {
      for (int i = 0; i < kBlock; ++i) squares.parts[i] += x[i] > -kInfinity ? (x[i] - mean) * (x[i] - mean) : 0;
    });
    const double lowest = -num_deviations * std::sqrt(squares.total() / count);
    keep_if(find(lowest), [&](const Entry &one) { return one.key >= lowest; });
  }

  void keep_typical(double mass) {
    const Sums all = sums();
    for (const double tail : {kShortTail, static_cast<double>(width_), kInfinity}) {
      const double least = (1 - mass) / (2 * tail);  // that many tokens below it have at most half of 1 - mass
      const int64_t count = find(all.logit_of(least));
      const auto distance = [&](const Entry &one) { return std::abs(all.log_total - relative(one.logit) - all.entropy); };
      for (int64_t i = 0; i < count; ++i) found_[i].key = distance(found_[i]);
      const Head nearest = head(count, mass, all);
      // Entries as near as the last one are at least this probable, and so were found.
      if (tail == kInfinity || (nearest.mass >= mass && all.entropy + nearest.last.key <= -log(least)))
        return keep_if(find(all.logit_of(least)), [&](const Entry &one) { return distance(one) <= nearest.last.key; });
    }
  }

  void cut(double least, const Sums &all) {
    keep_if(find(all.logit_of(least)), [&](const Entry &one) { return one.key == 0 || all.prob(one.key) >= least; });
  }

  void cut_by_entropy(double epsilon) {
    const Sums all = sums();
    cut(std::min(epsilon, std::sqrt(epsilon) * exp_not_positive(-all.entropy)), all);
  }

  void keep_most(int64_t k) {
    if (k >= count_) return;
    const float lowest = kth_highest(k);
    keep_if(find(relative(lowest)), [&](const Entry &one) { return one.logit >= lowest; });
  }

  // A lower bound for the k highest entries: the maxima of k stretches are k entries, so the lowest of the k highest
  // maxima is a lower bound.
  float kth_highest(int64_t k) {
    constexpr int64_t kStretch = 32;
    float *high = reinterpret_cast<float *>(found_);
    const auto kth = [&](int64_t count) {
      std::nth_element(high, high + (k - 1), high + count, std::greater<float>());
      return high[k - 1];
    };
    float bound = -std::numeric_limits<float>::infinity();
    int64_t count = 0;
    for (int64_t start = 0; start + kStretch <= count_; start += kStretch) {
      float highest = logits_[start];
      for (int64_t i = 1; i < kStretch; ++i) highest = logits_[start + i] > highest ? logits_[start + i] : highest;
      high[count++] = highest;
    }
    if (k <= count) bound = kth(count);
    count = 0;
    for (int64_t i = 0; i < count_; ++i) {
      high[count] = logits_[i];
      count += logits_[i] >= bound;
    }
    return kth(count);
  }

  // Top-p: keeps the most probable tokens that together have this mass.
  void keep_nucleus(double mass) {
    const Sums all = sums();
    for (const double lowest : {all.logit_of((1 - mass) / (2 * kShortTail)), -kInfinity}) {
      const int64_t count = find(lowest);
      order_by_probability(count, all);
      const Head best = head(count, mass, all);
      if (best.mass < mass && lowest > -kInfinity) continue;
      order_by_probability(find(lowest), all);  // in order of the tokens again
      return keep_if(count, [&](const Entry &one) { return one.key < 0 && !comes_first(best.last, one); });
    }
  }

  void keep_share(double share) {
    const double lowest = highest_ + log(share);
    keep_if(find(log(share)), [&](const Entry &one) { return static_cast<double>(one.logit) >= lowest; });
  }

  void exclude_top(double threshold) {
    const Sums all = sums();
    const int64_t count = find(all.logit_of(threshold));
    const Entry *end = std::partition(found_, found_ + count,
                                      [&](const Entry &one) { return all.prob(one.key) >= threshold; });
    const Entry *last = std::min_element(const_cast<const Entry *>(found_), end, [](const Entry &a, const Entry &b) {
      return a.logit < b.logit || (a.logit == b.logit && a.token > b.token);
    });
    if (end - found_ < 2) return;
    if (is_whole() && logits_ != output_) {
      std::memcpy(output_, logits_, width_ * sizeof(float));
      logits_ = output_;
    }
    float *logits = writable();
    for (const Entry *one = found_; one < end; ++one) {
      const int64_t place = is_whole() ? one->token : std::lower_bound(tokens_, tokens_ + count_, one->token) - tokens_;
      if (one != last) logits[place] = -std::numeric_limits<float>::infinity();
    }
    find_highest();
  }

  void keep_expected(double most_bits) {
    const Sums all = sums();
    const int64_t count = find(all.log_total - most_bits * kLn2);
    const Entry *best = std::min_element(found_, found_ + count, [](const Entry &a, const Entry &b) {
      return a.logit > b.logit || (a.logit == b.logit && a.token < b.token);
    });
    const int32_t first = best->token;
    keep_if(count, [&](const Entry &one) {
      return one.token == first || (one.key - all.log_total) / -kLn2 <= most_bits;
    });
  }

  const float *logits_;  // the entries left, in order of tokens: the row itself, `output_` or `left_`
  int64_t count_, width_;
  double highest_ = 0;
  float *output_;
  Entry *found_;     // [width]
  int32_t *tokens_;  // [count] tokens of the entries in `left_`
  float *left_;      // [width]
};

}  // namespace truncation

inline int64_t truncate_scratch(int32_t threads, int64_t width) {
  return threads * ((truncation::TruncatedRow::scratch(width) + 63) / 64 * 64);
}

inline void truncate(samewise::ThreadPool &pool, const float *logits, int32_t rows, int64_t width,
                     const SwTruncation *steps, const int32_t *first_step, float *output, char *scratch) {
  const int64_t stride = truncate_scratch(1, width);
  pool.for_each(std::min(pool.size(), rows), [&](int64_t part) {
    for (int64_t row = part; row < rows; row += pool.size()) {
      const float *from = logits + row * width;
      float *to = output + row * width;
      if (first_step[row] == first_step[row + 1]) {
        std::memcpy(to, from, width * sizeof(float));
        continue;
      }
      truncation::TruncatedRow truncated(from, width, to, scratch + part * stride);
      for (int32_t step = first_step[row]; step < first_step[row + 1]; ++step) truncated.take(steps[step]);
      truncated.write();
    }
  });
}

}  // namespace SW_ISA
