// An automaton of all substrings of some token sequences, with their numbers of occurrences, built token by token.
#pragma once
#include <atomic>
#include <cstdint>
#include <vector>

namespace suffix {

constexpr int32_t kNone = -1;

// Edges between states, found by state and token, and kept for each state in the order of insertion.
//
// A hash table of indices into one list; edges are never removed. A state's edges form a ring, of which the state knows
// the last one.
class Edges {
 public:
  struct Edge {
    int32_t state;
    int32_t token;
    int32_t target;
    int32_t next;  // next edge of the same state; the last one points to the first
  };

  const Edge &operator[](int32_t place) const { return edges_[place]; }

  // The edge's target, or null if there is no such edge.
  const int32_t *find(int32_t state, int32_t token) const {
    if (edges_.empty()) return nullptr;
    const int32_t place = places_[slot_of(state, token)];
    return place == kNone ? nullptr : &edges_[place].target;
  }

  // Adds a new edge after the state's last one, if there is one; returns its index.
  int32_t add(int32_t state, int32_t token, int32_t target, int32_t last) {
    const int32_t place = static_cast<int32_t>(edges_.size());
    if (2 * (edges_.size() + 1) > places_.size()) grow();
    edges_.push_back({state, token, target, last == kNone ? place : edges_[last].next});
    if (last != kNone) edges_[last].next = place;
    places_[slot_of(state, token)] = place;
    return place;
  }

 private:
  // The edge's slot, or the slot where it would be inserted.
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
  std::vector<int32_t> places_;  // power-of-two size, at most half full
};

constexpr int32_t kEmpty = 0;  // the state of the empty string

// A string that occurs in an automaton. It stays valid while the automaton grows.
struct Match {
  int32_t state = kEmpty;
  int32_t length = 0;
};

// The smallest automaton that accepts every substring (Blumer et al. 1985), over any number of sequences.
//
// A state represents all strings that end at the same places; its link leads to the longest suffix of these that ends
// at more places. Adding or matching a token costs O(1) amortised. Counting occurrences, of strings of at most `depth`
// tokens, adds at most `depth` steps. There are at most 2n states and 3n edges for n tokens. Most states have one edge,
// which is stored in the state: up to 75 bytes per token, measured.
class Automaton {
 public:
  explicit Automaton(int32_t depth) : depth_(depth) { add_state(0); }
  Automaton(const Automaton &) = delete;
  Automaton &operator=(const Automaton &) = delete;

  int64_t size() const { return static_cast<int64_t>(states_.size()); }

  // A unique number that no other automaton has or had.
  uint64_t serial() const { return serial_; }

  // -- reading --------------------------------------------------------------------------------------------------------

  // The longest string of at most `depth` tokens that occurs and is a suffix of the match plus the token.
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

  // The longest suffix of a match that occurs at more places. The empty string has none.
  Match shorter(Match match) const {
    const int32_t state = states_[state_of(match)].link;
    return {state, states_[state].length};
  }

  // How often the string occurs, if it is not longer than `depth`.
  int32_t count(Match match) const { return states_[state_of(match)].count; }

  // The number of distinct tokens that follow the string.
  int32_t num_following(Match match) const { return states_[state_of(match)].num_edges; }

  // Calls visit(token, count, child) for the tokens that follow a string: how often each does, and the string extended
  // by it. For a string of `depth` tokens the first is dropped, because longer strings are not counted.
  template <typename Visit>
  void each_following(Match match, const Visit &visit) const {
    match = cut(match, depth_ - 1);
    each_edge(state_of(match), [&](int32_t token, int32_t target) {
      if (const int32_t count = states_[target].count) visit(token, count, Match{target, match.length + 1});
    });
  }

  // -- writing --------------------------------------------------------------------------------------------------------

  // Extends a sequence by one token. `last` is the sequence's state; returns the state of the longer sequence.
  int32_t append(int32_t last, int32_t token) {
    if (const int32_t *target = find_edge(last, token)) return exact(last, token, *target);
    const int32_t fresh = add_state(states_[last].length + 1);
    int32_t state = last;
    for (; state != kNone && !find_edge(state, token); state = states_[state].link) add_edge(state, token, fresh);
    const int32_t link = state == kNone ? kEmpty : exact(state, token, *find_edge(state, token));
    states_[fresh].link = link;
    return fresh;
  }

  // Counts one more occurrence of a string and all its suffixes.
  void count_up(Match match) {
    for (int32_t state = state_of(match); state != kEmpty; state = states_[state].link) ++states_[state].count;
  }

 private:
  struct State {
    int32_t length;  // of its longest string
    int32_t link = kNone;
    int32_t count = 0;
    int32_t num_edges = 0;
    int32_t token = 0;       // of the first edge
    int32_t target = kNone;  // target of the first edge
    int32_t last = kNone;    // last of the other edges
  };

  // The state that now contains the string: it may have been split since the match was made.
  int32_t state_of(Match match) const {
    int32_t state = match.state;
    while (state != kEmpty && match.length <= states_[states_[state].link].length) state = states_[state].link;
    return state;
  }

  // The match, or its suffix of this length if it is longer.
  Match cut(Match match, int32_t length) const {
    if (match.length <= length) return match;
    return {state_of({match.state, length}), length};
  }

  // The state whose longest string is the longest of `state` plus the token: `target`, or a state split from it.
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

  // Visits in order of insertion. The visitor may add edges to other states.
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

// Adds one sequence to an automaton, token by token. Several writers can take turns.
struct Writer {
  int32_t last = kEmpty;
  Match end;  // the last tokens of the sequence, at most `depth`

  // If the tokens are only context, strings that end in them do not count as occurrences.
  void extend(Automaton &automaton, const int32_t *tokens, int64_t count, bool counted) {
    for (int64_t i = 0; i < count; ++i) {
      last = automaton.append(last, tokens[i]);
      end = automaton.advance(end, tokens[i]);
      if (counted) automaton.count_up(end);
    }
  }
};

}  // namespace suffix
