// The C interface between Python and the suffix automata. Pointers are borrowed for the call. A function that returns
// null, or 1, has run out of memory; what it was to change can only be freed then. Python reads this file
// (kernels/interface.py), so it is plain C.
#pragma once
#include <stdint.h>

#define SW_PUBLIC __attribute__((visibility("default")))

#ifdef __cplusplus
extern "C" {
#endif

typedef struct SwAutomaton SwAutomaton;  // of past outputs
typedef struct SwChoice SwChoice;     // one running choice, its own automaton included

// A sequence on its way into an automaton; zeros at first.
typedef struct SwWriter {
  int32_t last;
  int32_t end_state;
  int32_t end_length;
} SwWriter;

// What a step brought one choice.
typedef struct SwChoiceStep {
  SwChoice *choice;
  const SwAutomaton *past[2];  // in which drafts are looked for beside its own tokens; null for none
  int64_t num_taken_in;        // tokens for its own automaton, in order
  int64_t is_whole;            // after which it has all that are known
  int64_t is_running;          // 0 while the prompt is computed: all that follows is 0 as well then
  int64_t num_new;             // tokens since the last such step
  int64_t max_nodes;
} SwChoiceStep;

SW_PUBLIC SwAutomaton *sw_create_automaton(int32_t depth);
SW_PUBLIC void sw_destroy_automaton(SwAutomaton *automaton);

// Adds tokens to a sequence. Where they are not counted, strings that end in them have not occurred.
SW_PUBLIC int32_t sw_extend(SwAutomaton *automaton, SwWriter *writer, const int32_t *tokens, int64_t count,
                            int32_t counted);

// Begins a choice after the last of its tokens; those that are to be drafted from, too, are still to be taken in.
SW_PUBLIC SwChoice *sw_create_choice(int32_t depth, const int32_t *tokens, int64_t count);
SW_PUBLIC void sw_destroy_choice(SwChoice *choice);

// Drafts a tree for each choice of a step. `tokens` are, for each choice, those that it takes in, then those that are
// new. The nodes of the trees, num_nodes[count] of each, come one tree after the other; there is room for max_nodes of
// each.
SW_PUBLIC int32_t sw_propose(const SwChoiceStep *choices, int64_t count, const int32_t *tokens, int32_t *num_nodes,
                             int32_t *node_tokens, int32_t *node_parents, double *node_confidence);

// The size of a struct by its name, or -1: Python compares it with what it reads here.
SW_PUBLIC int64_t sw_size_of(const char *name);

#ifdef __cplusplus
}
#endif
