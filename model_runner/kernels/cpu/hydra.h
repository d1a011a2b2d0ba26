// Draft trees by Hydra heads for all choices of a step. SwHydra and SwDraft describe inputs and outputs;
// speculative/growing.py describes how trees grow, and grows the same trees where there are no native kernels.
//
// All choices' nodes of one depth from which trees grow are rows of the same products. A tree does not depend on what
// else is drafted: a row's results do not depend on other rows, and logarithms and powers that decide between nodes
// come from the C library, so that all instruction sets agree.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstring>

#include "decoder.h"
#include "gumbel_max.h"
#include "linear.h"
#include "runtime.h"
#include "samewise.h"
#include "simd.h"

namespace SW_ISA {

constexpr int32_t kRoot = -1;
constexpr int64_t kLogitsRows = 64;  // nodes whose logits are in memory at once, to bound memory

struct DraftNode {
  int32_t token;
  int32_t parent;
  double confidence;
  double probability;  // probability of becoming output: product of the confidences on its path
};

// A node from which a tree may grow further.
struct FrontierNode {
  int32_t choice;
  int32_t node;  // or kRoot
};

// A token that may follow a frontier node.
struct Candidate {
  float logit;
  int32_t column;
  double score;
};

struct Child {
  int32_t token;
  double confidence;
};

inline bool has_higher_logit(const Candidate &a, const Candidate &b) {
  return a.logit > b.logit || (a.logit == b.logit && a.column < b.column);
}

inline bool has_higher_score(const Candidate &a, const Candidate &b) {
  return a.score > b.score || (a.score == b.score && has_higher_logit(a, b));
}

// Scratch memory of a draft, for up to `rows` frontier nodes of one depth and `nodes` nodes of one tree.
struct DraftScratch {
  int64_t rows, nodes;
  int64_t joined_width, state_width, logits_width, num_blocks;
  float *joined;            // [rows, joined_width] inputs of the heads
  QuantizedRows quantized;  // [rows] inputs of the next product
  float *states;            // [rows, state_width]
  float *logits;            // [kLogitsRows, logits_width]
  float *highest;           // [kLogitsRows, num_blocks] highest logit of each block
  Candidate *candidates;    // [rows, draft.candidates]
  Child *children;          // [rows, draft.branches]
  int32_t *num_children;    // [rows]
  FrontierNode *frontier, *next_frontier;    // [rows]
  DraftNode *tree;          // [choices, nodes]
  int32_t *tree_size;       // [choices]
  int32_t *order, *place;   // [choices, nodes]

  static DraftScratch lay_out(const SwHydra &hydra, const SwDraft &draft, ScratchAllocator &take) {
    DraftScratch s{};
    const int64_t choices = draft.num_choices, depth = std::min(hydra.depth, draft.max_depth);
    s.rows = choices * (depth > 1 ? std::max(draft.front, 1) : 1);
    s.nodes = draft.branches * (1 + (depth - 1) * draft.front);
    s.joined_width = (hydra.num_features + depth) * hydra.hidden;
    s.state_width = round_up(hydra.hidden, kPanel);
    for (int64_t i = 0; i < depth; ++i)
      s.logits_width = std::max(s.logits_width, outputs_of_all(hydra.heads[i].logits));
    s.num_blocks = (s.logits_width + kBlock - 1) / kBlock;
    const int64_t at_once = std::min(s.rows, kLogitsRows);
    take(s.joined, s.rows * s.joined_width);
    s.quantized = take_rows(take, s.joined_width, s.rows);
    take(s.states, s.rows * s.state_width);
    take(s.logits, at_once * s.logits_width);
    take(s.highest, at_once * s.num_blocks);
    take(s.candidates, s.rows * draft.candidates);
    take(s.children, s.rows * draft.branches);
    take(s.num_children, s.rows);
    take(s.frontier, s.rows);
    take(s.next_frontier, s.rows);
    take(s.tree, choices * s.nodes);
    take(s.tree_size, choices);
    take(s.order, choices * s.nodes);
    take(s.place, choices * s.nodes);
    return s;
  }
};

// Runs one SwDraft.
class DraftRun {
 public:
  DraftRun(samewise::ThreadPool &pool, const SwHydra &hydra, const SwDraft &draft, const DraftScratch &scratch)
      : pool_(pool), hydra_(hydra), draft_(draft), s_(scratch), depth_(std::min(hydra.depth, draft.max_depth)) {}

  void run() {
    int64_t count = 0;
    for (int32_t choice = 0; choice < draft_.num_choices; ++choice) {
      s_.tree_size[choice] = 0;
      if (draft_.choices[choice].max_nodes > 0) s_.frontier[count++] = {choice, kRoot};
    }
    for (int32_t depth = 1; count > 0; ++depth) {
      find_states(depth, count);
      find_children(depth, count);
      count = add_children(count, depth < depth_);
      std::swap(s_.frontier, s_.next_frontier);
    }
    for (int32_t choice = 0; choice < draft_.num_choices; ++choice) write(choice);
  }

 private:
  DraftNode *tree(int32_t choice) const { return s_.tree + choice * s_.nodes; }

  const DraftNode *node_of(const FrontierNode &leaf) const {
    return leaf.node == kRoot ? nullptr : tree(leaf.choice) + leaf.node;
  }

  float *state(int64_t row) const { return s_.states + row * s_.state_width; }

  void quantize_states(int64_t count, const SwWeight &weight) const {
    for_rows(pool_, count, [&](int64_t row) { quantize_row(state(row), weight, s_.quantized, row); });
  }

  // Computes the state of head `depth` for each frontier node.
  void find_states(int32_t depth, int64_t count) const {
    const SwHydraHead &head = hydra_.heads[depth - 1];
    for_rows(pool_, count, [&](int64_t row) {
      float *joined = s_.joined + row * s_.joined_width;
      join(s_.frontier[row], depth, joined);
      quantize_row(joined, head.linear, s_.quantized, row);
    });
    multiply_first_layer(head, count);
    for (int32_t layer = 0; layer + 1 < hydra_.num_layers; ++layer) {
      const SwWeight &weight = head.layers[layer];
      quantize_states(count, weight);
      const auto add = [&](int64_t row, int64_t first, int64_t count, const float *results) {
        float *to = state(row) + first;
        transform(to, count, [](Vec x, Vec result) { return x + silu(result); }, to, results);
      };
      multiply_rows(pool_, weight, s_.quantized, count, add);
    }
    quantize_states(count, head.logits);
  }

  // Joins the choice's features, the embedding of its newest token, and the embeddings on the path to the frontier
  // node.
  void join(const FrontierNode &leaf, int32_t depth, float *joined) const {
    const SwDraftChoice &choice = draft_.choices[leaf.choice];
    const int64_t hidden = hydra_.hidden;
    for (int32_t feature = 0; feature < hydra_.num_features; ++feature, joined += hidden) {
      const float *from = draft_.features[feature] + choice.row * hidden;
      const float *scale = hydra_.feature_scale + feature * hidden;
      transform(joined, hidden, [](Vec x, Vec factor) { return x * factor; }, from, scale);
    }
    int32_t node = leaf.node;
    for (int32_t place = depth - 1; place >= 0; --place) {
      const int32_t token = node == kRoot ? choice.token : tree(leaf.choice)[node].token;
      look_up(draft_.embedding, token, draft_.embedding_scale, hidden, joined + place * hidden);
      if (node != kRoot) node = tree(leaf.choice)[node].parent;
    }
  }

  void multiply_first_layer(const SwHydraHead &head, int64_t count) const {
    const int64_t bytes = packed_bytes(head.linear) + packed_bytes(head.res_connection);
    const Store set{s_.states, s_.state_width};
    const auto activate_and_add = [&](int64_t row, int64_t first, int64_t count, const float *results) {
      float *to = state(row) + first;
      transform(to, count, [](Vec x, Vec result) { return result + silu(x); }, to, results);
    };
    share_product(pool_, num_panels(head.linear), bytes, count,
                  [&](int64_t row, int64_t end_row, int64_t panel, int64_t end) {
                    multiply_unit(head.linear, s_.quantized, row, end_row, panel, end, set);
                    multiply_unit(head.res_connection, s_.quantized, row, end_row, panel, end, activate_and_add);
                  });
  }

  void find_children(int32_t depth, int64_t count) const {
    const SwWeight &weight = hydra_.heads[depth - 1].logits;
    for (int64_t start = 0; start < count; start += kLogitsRows) {
      const int64_t rows = std::min(kLogitsRows, count - start);
      QuantizedRows quantized = s_.quantized;
      quantized.data += start * quantized.stride;
      quantized.scales += start;
      multiply_rows(pool_, weight, quantized, rows, Store{s_.logits, s_.logits_width});
      for_rows(pool_, rows, [&](int64_t row) {
        const LogitsRow logits{s_.logits + row * s_.logits_width, outputs_of_all(weight), nullptr};
        find_children_of(start + row, depth, logits, s_.highest + row * s_.num_blocks);
      });
    }
  }

  // The children of a frontier node, best first, as far as they are probable enough.
  void find_children_of(int64_t row, int32_t depth, const LogitsRow &logits, float *highest) const {
    const FrontierNode &leaf = s_.frontier[row];
    const SwDraftChoice &choice = draft_.choices[leaf.choice];
    Candidate *found = s_.candidates + row * draft_.candidates;
    const int64_t count = find_candidates(logits, highest, found);
    const int64_t wanted = std::min<int64_t>(draft_.branches, count);
    const double temperature = choice.temperature > 0 ? choice.temperature : 1;
    for (int64_t i = 0; i < count; ++i)
      found[i].score = (static_cast<double>(found[i].logit) - found[0].logit) / temperature;
    if (choice.temperature > 0) {
      const uint64_t key = noise_key(choice.seed, choice.choice, choice.position + depth - 1);
      for (int64_t i = 0; i < count; ++i) found[i].score += gumbel(splitmix(key, token_of(found[i])));
      std::partial_sort(found, found + wanted, found + count, has_higher_score);
    }
    double total = 0;
    for (int64_t i = 0; i < count; ++i) total += exp_not_positive(found[i].score - found[0].score);
    const double above = leaf.node == kRoot ? 1.0 : node_of(leaf)->probability;
    Child *children = s_.children + row * draft_.branches;
    int32_t &size = s_.num_children[row] = 0;
    for (int64_t i = 0; i < wanted; ++i) {
      const double confidence = exp_not_positive(found[i].score - found[0].score) / total;
      if (above * confidence < draft_.least) break;
      children[size++] = {token_of(found[i]), confidence};
    }
  }

  int32_t token_of(const Candidate &candidate) const {
    return hydra_.draft_ids ? hydra_.draft_ids[candidate.column] : candidate.column;
  }

  // The highest logits, best first, the lowest column among equals; none if some logit is not finite.
  //
  // The maxima of `wanted` blocks are `wanted` entries, so the lowest of the `wanted` highest maxima is a lower bound
  // for the candidates.
  int64_t find_candidates(const LogitsRow &logits, float *highest, Candidate *found) const {
    int64_t num_blocks = 0;
    bool is_finite = true;
    logits.each_block([&](int64_t, int count, const float *block) {
      highest[num_blocks] = highest_of({block, count, nullptr});
      is_finite &= std::isfinite(highest[num_blocks++]);
    });
    if (!is_finite) return 0;
    const int64_t wanted = std::min<int64_t>(draft_.candidates, logits.width);
    float floor = -__builtin_inff();
    if (num_blocks >= wanted) {
      std::nth_element(highest, highest + wanted - 1, highest + num_blocks, std::greater<float>());
      floor = highest[wanted - 1];
    }
    int64_t size = 0;
    logits.each_block([&](int64_t first, int count, const float *block) {
      if (!any_reaches(block, count, floor)) return;
      for (int i = 0; i < count; ++i) {
        if (block[i] < floor || (size == wanted && block[i] == found->logit)) continue;
        if (size == wanted) std::pop_heap(found, found + size--, has_higher_logit);
        found[size++] = {block[i], static_cast<int32_t>(first + i), 0};
        std::push_heap(found, found + size, has_higher_logit);
        if (size == wanted) floor = found->logit;
      }
    });
    std::sort_heap(found, found + size, has_higher_logit);
    return size;
  }

  // Adds the children of frontier nodes to their trees; returns the size of the next frontier.
  int64_t add_children(int64_t count, bool expands) const {
    int64_t num_next = 0;
    for (int64_t row = 0; row < count;) {
      const int32_t choice = s_.frontier[row].choice;
      int32_t &size = s_.tree_size[choice];
      const int32_t num_before = size;
      for (; row < count && s_.frontier[row].choice == choice; ++row) {
        const DraftNode *parent = node_of(s_.frontier[row]);
        const Child *children = s_.children + row * draft_.branches;
        for (int32_t i = 0; i < s_.num_children[row]; ++i)
          tree(choice)[size++] = {children[i].token, s_.frontier[row].node, children[i].confidence,
                                  children[i].confidence * (parent ? parent->probability : 1.0)};
      }
      if (expands && size > num_before) num_next = follow(choice, num_before, num_next);
    }
    return num_next;
  }

  // The nodes of a tree by descending probability. Parents are never less probable, and come before their children.
  const int32_t *in_order(int32_t choice) const {
    const DraftNode *nodes = tree(choice);
    int32_t *order = s_.order + choice * s_.nodes;
    const int32_t size = s_.tree_size[choice];
    for (int32_t node = 0; node < size; ++node) order[node] = node;
    std::sort(order, order + size, [&](int32_t a, int32_t b) {
      return nodes[a].probability > nodes[b].probability || (nodes[a].probability == nodes[b].probability && a < b);
    });
    return order;
  }

  // Appends the nodes from `first` on that are worth expanding to the next frontier. A child is at most as probable as
  // its parent, so a node is expanded only if it is more probable than the last node that would be kept.
  int64_t follow(int32_t choice, int32_t first, int64_t num_next) const {
    const DraftNode *nodes = tree(choice);
    const int32_t *order = in_order(choice);
    const int32_t max_nodes = draft_.choices[choice].max_nodes;
    const bool is_full = s_.tree_size[choice] >= max_nodes;
    const double floor = is_full ? nodes[order[max_nodes - 1]].probability : 0.0;
    const int64_t end = num_next + draft_.front;
    for (int32_t rank = 0; rank < s_.tree_size[choice] && num_next < end; ++rank) {
      const DraftNode &node = nodes[order[rank]];
      if (node.probability < draft_.followed || node.probability <= floor) break;
      if (order[rank] >= first) s_.next_frontier[num_next++] = {choice, order[rank]};
    }
    return num_next;
  }

  // Writes the most probable nodes.
  void write(int32_t choice) const {
    const DraftNode *nodes = tree(choice);
    const int32_t *order = in_order(choice);
    int32_t *place = s_.place + choice * s_.nodes;
    const int32_t size = std::min(s_.tree_size[choice], draft_.choices[choice].max_nodes);
    const int64_t start = choice * int64_t{draft_.width};
    for (int32_t rank = 0; rank < size; ++rank) {
      const DraftNode &node = nodes[order[rank]];
      place[order[rank]] = rank;
      draft_.tokens[start + rank] = node.token;
      draft_.parents[start + rank] = node.parent == kRoot ? kRoot : place[node.parent];
      draft_.confidence[start + rank] = node.confidence;
    }
    draft_.num_nodes[choice] = size;
  }

  samewise::ThreadPool &pool_;
  const SwHydra &hydra_;
  const SwDraft &draft_;
  DraftScratch s_;
  const int32_t depth_;
};

}  // namespace SW_ISA
