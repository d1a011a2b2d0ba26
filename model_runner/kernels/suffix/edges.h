// Edges between states, found by state and token, and kept for each state in the order in which they came.
#pragma once
#include <cstdint>
#include <vector>

namespace suffix {

constexpr int32_t kNone = -1;

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

}  // namespace suffix
