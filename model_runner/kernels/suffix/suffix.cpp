// Drafting from suffix automata, and the C interface.
#include "suffix.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>
#include <vector>

#include "automaton.h"

namespace suffix {
namespace {

constexpr int32_t kRoot = -1;   // the parent of nodes that follow the newest token
constexpr double kLeast = 0.1;  // less probable nodes are omitted
// Pseudo-count of continuations that were never seen, times the match length. The value and the formula are fitted to
// how text and source code repeat.
constexpr double kNovelty = 2.6;

struct Node {
  int32_t token;
  int32_t parent;     // an earlier node, or kRoot
  double confidence;  // probability that it follows its parent
};

// The tree of the most probable nodes, most probable first. speculative/best_first.py explains why it is optimal.
class Tree {
 public:
  const std::vector<Node> &nodes() const { return nodes_; }

  // Expected number of accepted tokens.
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
    double survival;  // product of the confidences on its path
    int64_t order;
    Node node;
    Match match;
  };

  static bool comes_later(const Open &a, const Open &b) {
    return a.survival < b.survival || (a.survival == b.survival && a.order > b.order);
  }

  // Adds the tokens that followed the match to the queue, each with its share of the counts, reduced by rivals.
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

constexpr int64_t kNodesPerToken = 2;  // a draft has at most this many nodes per token of its match,
constexpr int64_t kMoreNodes = 1;      // and this many more
constexpr int kTries = 2;              // matches tried in each automaton, longest first
constexpr int32_t kMany = 32;          // with more distinct continuations, a match says little
constexpr int kMostPast = 2;           // automata of past outputs that one choice can draft from

// One choice's tokens, and the matches of its last tokens in the automata.
class ChoiceDrafter {
 public:
  using Past = std::array<const Automaton *, kMostPast>;  // null where there are fewer

  // Continues after these tokens, of which the last `depth` are used.
  ChoiceDrafter(int32_t depth, const int32_t *tokens, int64_t count) : depth_(depth), own_(depth) {
    remember(tokens, count);
  }

  // Adds tokens to its own automaton.
  void take_in(const int32_t *tokens, int64_t count) { writer_.extend(own_, tokens, count, true); }

  // Advances the matches in past outputs by the new tokens; automata new to the choice start from its last tokens.
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

  // Grows the best tree from all matches. Without `is_whole` its own automaton lacks tokens, so it is not used.
  void draft(bool is_whole, int64_t max_nodes, Tree &best, Tree &spare) const {
    best.clear();
    if (is_whole) improve(own_, writer_.end, max_nodes, best, spare);
    for (const Followed &one : followed_)
      if (one.automaton) improve(*one.automaton, one.match, max_nodes, best, spare);
  }

 private:
  struct Followed {
    const Automaton *automaton = nullptr;  // valid only during the call that passed it
    uint64_t serial = 0;
    Match match;
  };

  // Tries drafts from the longest matches of the known tokens that have a continuation.
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

}  // namespace
}  // namespace suffix

struct SwAutomaton : suffix::Automaton {
  using Automaton::Automaton;
};

struct SwChoice : suffix::ChoiceDrafter {
  using ChoiceDrafter::ChoiceDrafter;
};

namespace {

// Runs work that may allocate memory; returns 1 if memory ran out, as nothing may be thrown at C.
template <typename Work>
int32_t guarded(const Work &work) noexcept {
  try {
    work();
    return 0;
  } catch (...) {
    return 1;
  }
}

}  // namespace

SwAutomaton *sw_create_automaton(int32_t depth) {
  SwAutomaton *made = nullptr;
  guarded([&] { made = new SwAutomaton(depth); });
  return made;
}

void sw_destroy_automaton(SwAutomaton *automaton) { delete automaton; }

int32_t sw_extend(SwAutomaton *automaton, SwWriter *writer, const int32_t *tokens, int64_t count, int32_t counted) {
  return guarded([&] {
    suffix::Writer now{writer->last, {writer->end_state, writer->end_length}};
    now.extend(*automaton, tokens, count, counted);
    *writer = {now.last, now.end.state, now.end.length};
  });
}

SwChoice *sw_create_choice(int32_t depth, const int32_t *tokens, int64_t count) {
  SwChoice *made = nullptr;
  guarded([&] { made = new SwChoice(depth, tokens, count); });
  return made;
}

void sw_destroy_choice(SwChoice *choice) { delete choice; }

int32_t sw_propose(const SwChoiceStep *choices, int64_t count, const int32_t *tokens, int32_t *num_nodes,
                   int32_t *node_tokens, int32_t *node_parents, double *node_confidence) {
  return guarded([&] {
    suffix::Tree best, spare;
    for (const SwChoiceStep *step = choices; step != choices + count; ++step) {
      step->choice->take_in(tokens, step->num_taken_in);
      tokens += step->num_taken_in;
      best.clear();
      if (step->is_running) {
        step->choice->follow({step->past[0], step->past[1]}, tokens, step->num_new);
        step->choice->draft(step->is_whole, step->max_nodes, best, spare);
      }
      tokens += step->num_new;
      *num_nodes++ = static_cast<int32_t>(best.nodes().size());
      for (const suffix::Node &node : best.nodes()) {
        *node_tokens++ = node.token;
        *node_parents++ = node.parent;
        *node_confidence++ = node.confidence;
      }
    }
  });
}

int64_t sw_size_of(const char *name) {
  if (!std::strcmp(name, "SwWriter")) return sizeof(SwWriter);
  if (!std::strcmp(name, "SwChoiceStep")) return sizeof(SwChoiceStep);
  return -1;
}
