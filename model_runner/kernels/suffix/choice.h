// One choice's tokens, and where the last of them stand in the automata.
#pragma once
#include <algorithm>
#include <array>
#include <cstdint>
#include <utility>
#include <vector>

#include "automaton.h"
#include "tree.h"

namespace suffix {

constexpr int64_t kNodesPerToken = 2;  // a draft has at most so many nodes for each token of its match, ...
constexpr int64_t kMoreNodes = 1;      // ... and so many more
constexpr int kTries = 2;              // matches from which drafts are grown in each automaton, the longest first
constexpr int32_t kMany = 32;          // what more different tokens follow than this says little about the next one
constexpr int kMostPast = 2;           // automata of past outputs that a choice can be drafted for from

class Choice {
 public:
  using Past = std::array<const Automaton *, kMostPast>;  // null where there are fewer

  // Begins after some tokens, of which `depth` are looked at.
  Choice(int32_t depth, const int32_t *tokens, int64_t count) : depth_(depth), own_(depth) { remember(tokens, count); }

  // Adds tokens to its own automaton.
  void take_in(const int32_t *tokens, int64_t count) { writer_.extend(own_, tokens, count, true); }

  // Goes on in past outputs with the tokens that are new, or begins with the last ones in those that are new to it.
  void follow(const Past &past, const int32_t *tokens, int64_t count) {
    remember(tokens, count);
    std::array<Followed, kMostPast> now;
    for (int i = 0; i < kMostPast; ++i) {
      if (!past[i]) continue;
      const auto known = std::find_if(followed_.begin(), followed_.end(),
                                      [&](const Followed &one) { return one.serial == past[i]->serial(); });
      const bool is_new = known == followed_.end();
      now[i] = {past[i], past[i]->serial(), is_new ? Match{} : known->match};
      const int32_t *first = is_new ? recent_.data() : tokens;
      const int32_t *end = is_new ? first + recent_.size() : tokens + count;
      for (; first != end; ++first) now[i].match = past[i]->advance(now[i].match, *first);
    }
    followed_ = now;
  }

  // Grows the best tree from all matches. What is not whole misses tokens, so nothing is drafted from it.
  void draft(bool is_whole, int64_t max_nodes, Tree &best, Tree &spare) const {
    best.clear();
    if (is_whole) improve(own_, writer_.end, max_nodes, best, spare);
    for (const Followed &one : followed_)
      if (one.automaton) improve(*one.automaton, one.match, max_nodes, best, spare);
  }

 private:
  struct Followed {
    const Automaton *automaton = nullptr;  // lives as long as the call that named it
    uint64_t serial = 0;
    Match match;
  };

  // Drafts may start at all ends of the known tokens, as long as can be, that something follows.
  static void improve(const Automaton &automaton, Match match, int64_t max_nodes, Tree &best, Tree &spare) {
    for (int tries = 0; match.length && tries < kTries; match = automaton.shorter(match)) {
      const int32_t num_following = automaton.num_following(match);
      if (num_following < 1 || num_following > kMany) continue;
      ++tries;
      const int64_t most = std::min(max_nodes, kNodesPerToken * match.length + kMoreNodes);
      if (static_cast<double>(most) <= best.score()) continue;  // even certain drafts would not be better
      spare.grow(automaton, match, most);
      if (spare.score() > best.score()) std::swap(best, spare);
    }
  }

  void remember(const int32_t *tokens, int64_t count) {
    recent_.insert(recent_.end(), tokens + std::max<int64_t>(count - depth_, 0), tokens + count);
    if (static_cast<int64_t>(recent_.size()) > depth_) recent_.erase(recent_.begin(), recent_.end() - depth_);
  }

  const int32_t depth_;
  Automaton own_;
  Writer writer_;
  std::vector<int32_t> recent_;  // the last `depth` tokens
  std::array<Followed, kMostPast> followed_;
};

}  // namespace suffix
