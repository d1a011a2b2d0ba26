// Drafts from suffix automata, and the C interface.
#include "suffix.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <new>
#include <utility>
#include <vector>

#include "automaton.h"

namespace suffix {
namespace {

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

constexpr int64_t kNodesPerToken = 2;  // a draft has at most so many nodes for each token of its match, ...
constexpr int64_t kMoreNodes = 1;      // ... and so many more
constexpr int kTries = 2;              // matches from which drafts are grown in each automaton, the longest first
constexpr int32_t kMany = 32;          // what more different tokens follow than this says little about the next one
constexpr int kMostPast = 2;           // automata of past outputs that a choice can be drafted for from

// One choice's tokens, and where the last of them stand in the automata.
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

}  // namespace
}  // namespace suffix

struct SwAutomaton : suffix::Automaton {
  using Automaton::Automaton;
};

struct SwChoice : suffix::Choice {
  using Choice::Choice;
};

namespace {

// Runs what may take memory; 1 if there is none.
template <typename Work>
int32_t guarded(const Work &work) {
  try {
    work();
    return 0;
  } catch (const std::bad_alloc &) {
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
