// The C interface.
#include "suffix.h"

#include <new>

#include "automaton.h"
#include "choice.h"
#include "tree.h"

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
