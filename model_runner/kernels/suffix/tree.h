// Growing a draft tree, node by node, from what followed a match.
#pragma once
#include <algorithm>
#include <cstdint>
#include <vector>

#include "automaton.h"

namespace suffix {

constexpr int32_t kRoot = -1;   // the parent of what follows the newest token
constexpr double kLeast = 0.1;  // nodes that are less probable than this are left out
// The weight of all that was never seen to follow, times the length of the match. This and the formula it is in fit how
// text and source code repeat themselves.
constexpr double kNovelty = 2.6;

struct Node {
  int32_t token;
  int32_t parent;     // a node before it, or kRoot
  double confidence;  // that it follows its parent
};

// The tree of the most probable nodes, most probable first; speculative/best_first.py says why it is the best.
class Tree {
 public:
  const std::vector<Node> &nodes() const { return nodes_; }

  // Tokens that are expected of it.
  double score() const { return score_; }

  void clear() {
    nodes_.clear();
    score_ = 0;
  }

  void grow(const Automaton &automaton, Match match, int64_t max_nodes) {
    clear();
    open_.clear();
    num_offered_ = 0;
    if (max_nodes > 0) offer(automaton, kRoot, 1.0, match);
    while (!open_.empty() && static_cast<int64_t>(nodes_.size()) < max_nodes) {
      std::pop_heap(open_.begin(), open_.end(), comes_later);
      const Open best = open_.back();
      open_.pop_back();
      nodes_.push_back(best.node);
      score_ += best.survival;
      if (static_cast<int64_t>(nodes_.size()) < max_nodes)
        offer(automaton, static_cast<int32_t>(nodes_.size()) - 1, best.survival, best.match);
    }
  }

 private:
  struct Open {
    double survival;  // the product of the confidences on its path
    int64_t order;
    Node node;
    Match match;
  };

  static bool comes_later(const Open &a, const Open &b) {
    return a.survival < b.survival || (a.survival == b.survival && a.order > b.order);
  }

  // Opens what followed the match, each with its share of the counts, less where there are rivals.
  void offer(const Automaton &automaton, int32_t parent, double survival, Match match) {
    int64_t total = 0, num_tokens = 0;
    automaton.each_following(match, [&](int32_t, int32_t count, Match) {
      total += count;
      ++num_tokens;
    });
    const double weight = static_cast<double>(total) + kNovelty / match.length;
    const int64_t rivals = num_tokens > 1;
    automaton.each_following(match, [&](int32_t token, int32_t count, Match child) {
      const double probability = count / weight * count / static_cast<double>(count + rivals);
      if (survival * probability < kLeast) return;
      open_.push_back({survival * probability, num_offered_++, {token, parent, probability}, child});
      std::push_heap(open_.begin(), open_.end(), comes_later);
    });
  }

  std::vector<Node> nodes_;
  std::vector<Open> open_;
  int64_t num_offered_ = 0;
  double score_ = 0;
};

}  // namespace suffix
