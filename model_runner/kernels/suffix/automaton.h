// All substrings of some token sequences, with how often each occurs, built as tokens come.
#pragma once
#include <atomic>
#include <cstdint>
#include <vector>

namespace suffix {

constexpr int32_t kNone = -1;

// Edges between states, found by state and token, and kept for each state in the order in which they came.
//
// A hash table of places in one list: nothing is ever taken out. The edges of a state are a ring of which the state
// knows the last one.
class Edges {
 public:
  struct Edge {
    int32_t state;
    int32_t token;
    int32_t target;
    int32_t next;  // of the same state; after the last one comes the first
  };

  const Edge &operator[](int32_t place) const { return edges_[place]; }

  // The edge's target; null if there is no such edge.
  const int32_t *find(int32_t state, int32_t token) const {
    if (edges_.empty()) return nullptr;
    const int32_t place = places_[slot_of(state, token)];
    return place == kNone ? nullptr : &edges_[place].target;
  }

  // Adds an edge that is not there yet after the last one of its state, if there is one; returns its place.
  int32_t add(int32_t state, int32_t token, int32_t target, int32_t last) {
    const int32_t place = static_cast<int32_t>(edges_.size());
    if (2 * (edges_.size() + 1) > places_.size()) grow();
    edges_.push_back({state, token, target, last == kNone ? place : edges_[last].next});
    if (last != kNone) edges_[last].next = place;
    places_[slot_of(state, token)] = place;
    return place;
  }

 private:
  // Where the edge is, or where it would go.
  uint64_t slot_of(int32_t state, int32_t token) const {
    const uint64_t mask = places_.size() - 1;
    uint64_t slot = mixed(uint64_t{static_cast<uint32_t>(state)} << 32 | static_cast<uint32_t>(token)) & mask;
    while (places_[slot] != kNone && !is_at(places_[slot], state, token)) slot = (slot + 1) & mask;
    return slot;
  }

  bool is_at(int32_t place, int32_t state, int32_t token) const {
    return edges_[place].state == state && edges_[place].token == token;
  }

  static uint64_t mixed(uint64_t key) {  // as in splitmix64
    key = (key ^ (key >> 30)) * 0xBF58476D1CE4E5B9u;
    key = (key ^ (key >> 27)) * 0x94D049BB133111EBu;
    return key ^ (key >> 31);
  }

  void grow() {
    places_.assign(places_.empty() ? 16 : 2 * places_.size(), kNone);
    for (int32_t place = 0; place < static_cast<int32_t>(edges_.size()); ++place)
      places_[slot_of(edges_[place].state, edges_[place].token)] = place;
  }

  std::vector<Edge> edges_;
  std::vector<int32_t> places_;  // a power of two of them, at most half taken
};

constexpr int32_t kEmpty = 0;  // the state of the empty string

// A string that occurs in an automaton. It stays right while the automaton grows.
struct Match {
  int32_t state = kEmpty;
  int32_t length = 0;
};

// The smallest automaton that accepts every substring (Blumer et al. 1985), over any number of sequences.
//
// A state stands for all strings that end at the same places; its link leads to the longest suffix of these that ends
// at more. A token costs O(1) amortised to add or to match, and the counting at most `depth` steps more, as occurrences
// are counted for strings of at most `depth` tokens. There are at most 2n states and 3n edges for n tokens; most states
// have one edge, so that one lies in the state: up to 75 bytes a token, measured.
class Automaton {
 public:
  explicit Automaton(int32_t depth) : depth_(depth) { add_state(0); }
  Automaton(const Automaton &) = delete;
  Automaton &operator=(const Automaton &) = delete;

  int64_t size() const { return static_cast<int64_t>(states_.size()); }

  // A number that no other automaton has or had.
  uint64_t serial() const { return serial_; }

  // -- reading --------------------------------------------------------------------------------------------------------

  // The longest string that occurs and ends the match and the token, of at most `depth` tokens.
  Match advance(Match match, int32_t token) const {
    int32_t state = state_of(match);
    const int32_t *target;
    while (!(target = find_edge(state, token))) {
      if (state == kEmpty) return {};
      state = states_[state].link;
      match.length = states_[state].length;
    }
    return cut({*target, match.length + 1}, depth_);
  }

  // The longest suffix of a match that occurs at more places; the empty string has none.
  Match shorter(Match match) const {
    const int32_t state = states_[state_of(match)].link;
    return {state, states_[state].length};
  }

  // How often the string occurs, if it is not longer than `depth`.
  int32_t count(Match match) const { return states_[state_of(match)].count; }

  // How many different tokens follow the string.
  int32_t num_following(Match match) const { return states_[state_of(match)].num_edges; }

  // Calls visit(token, count, child) for the tokens that follow a string somewhere: how often each does, and the
  // string with the token at its end. A string of `depth` tokens is taken without its first one: what is longer is not
  // counted.
  template <typename Visit>
  void each_following(Match match, const Visit &visit) const {
    match = cut(match, depth_ - 1);
    each_edge(state_of(match), [&](int32_t token, int32_t target) {
      if (const int32_t count = states_[target].count) visit(token, count, Match{target, match.length + 1});
    });
  }

  // -- writing --------------------------------------------------------------------------------------------------------

  // Adds a sequence plus one token; `last` is the sequence's own state, and the result that of the longer one.
  int32_t append(int32_t last, int32_t token) {
    if (const int32_t *target = find_edge(last, token)) return exact(last, token, *target);
    const int32_t fresh = add_state(states_[last].length + 1);
    int32_t state = last;
    for (; state != kNone && !find_edge(state, token); state = states_[state].link) add_edge(state, token, fresh);
    const int32_t link = state == kNone ? kEmpty : exact(state, token, *find_edge(state, token));
    states_[fresh].link = link;
    return fresh;
  }

  // A string and all its suffixes occur once more.
  void count_up(Match match) {
    for (int32_t state = state_of(match); state != kEmpty; state = states_[state].link) ++states_[state].count;
  }

 private:
  struct State {
    int32_t length;  // of its longest string
    int32_t link = kNone;
    int32_t count = 0;
    int32_t num_edges = 0;
    int32_t token = 0;       // of the first edge, and ...
    int32_t target = kNone;  // ... where it leads
    int32_t last = kNone;    // of the other edges
  };

  // The state that has the string now: since the match was made, its state may have been split.
  int32_t state_of(Match match) const {
    int32_t state = match.state;
    while (state != kEmpty && match.length <= states_[states_[state].link].length) state = states_[state].link;
    return state;
  }

  // The match, or its suffix if it is longer.
  Match cut(Match match, int32_t length) const {
    if (match.length <= length) return match;
    return {state_of({match.state, length}), length};
  }

  // The state whose longest string is that of `state` plus the token: `target`, or what is split from it.
  int32_t exact(int32_t state, int32_t token, int32_t target) {
    const int32_t length = states_[state].length + 1;
    if (states_[target].length == length) return target;
    const int32_t split = add_state(length);
    states_[split].link = states_[target].link;
    states_[split].count = states_[target].count;
    states_[target].link = split;
    each_edge(target, [&](int32_t edge, int32_t leads_to) { add_edge(split, edge, leads_to); });
    for (; state != kNone; state = states_[state].link) {
      int32_t *edge = const_cast<int32_t *>(find_edge(state, token));
      if (!edge || *edge != target) break;
      *edge = split;
    }
    return split;
  }

  int32_t add_state(int32_t length) {
    states_.push_back({length});
    return static_cast<int32_t>(states_.size() - 1);
  }

  // -- edges ----------------------------------------------------------------------------------------------------------

  const int32_t *find_edge(int32_t state, int32_t token) const {
    const State &from = states_[state];
    if (from.num_edges > 0 && from.token == token) return &from.target;
    return from.num_edges > 1 ? edges_.find(state, token) : nullptr;
  }

  void add_edge(int32_t state, int32_t token, int32_t target) {
    State &from = states_[state];
    if (from.num_edges++ == 0) {
      from.token = token;
      from.target = target;
    } else {
      from.last = edges_.add(state, token, target, from.last);
    }
  }

  // In the order in which they came. The visit may add edges to other states.
  template <typename Visit>
  void each_edge(int32_t state, const Visit &visit) const {
    if (states_[state].num_edges == 0) return;
    visit(states_[state].token, states_[state].target);
    const int32_t last = states_[state].last;
    if (last == kNone) return;
    int32_t place = last;
    do {
      place = edges_[place].next;
      const Edges::Edge edge = edges_[place];
      visit(edge.token, edge.target);
    } while (place != last);
  }

  static uint64_t next_serial() {
    static std::atomic<uint64_t> last{0};
    return ++last;
  }

  const int32_t depth_;
  const uint64_t serial_ = next_serial();
  std::vector<State> states_;
  Edges edges_;
};

// Adds one sequence to an automaton, token by token; several can take turns.
struct Writer {
  int32_t last = kEmpty;
  Match end;  // the last tokens of the sequence, `depth` of them at most

  // If the tokens are only context, strings that end in them are not counted as occurrences.
  void extend(Automaton &automaton, const int32_t *tokens, int64_t count, bool counted) {
    for (int64_t i = 0; i < count; ++i) {
      last = automaton.append(last, tokens[i]);
      end = automaton.advance(end, tokens[i]);
      if (counted) automaton.count_up(end);
    }
  }
};

}  // namespace suffix
