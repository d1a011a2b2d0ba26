// The C interface between Python and the suffix automata. Pointers are borrowed for the call. A function that returns
// null, or 1, has run out of memory; the object it was to change may then only be freed. Python parses this file
// (kernels/interface.py), so it is plain C.
#pragma once
#include <stdint.h>

#define SW_PUBLIC __attribute__((visibility("default")))

#ifdef __cplusplus
extern "C" {
#endif

typedef struct SwAutomaton SwAutomaton;  // automaton of past outputs
typedef struct SwChoice SwChoice;     // one running choice with its own automaton

// The end of a sequence in an automaton; zeros at first.
typedef struct SwWriter {
  int32_t last;
  int32_t end_state;
  int32_t end_length;
} SwWriter;

// The result of a step for one choice.
typedef struct SwChoiceStep {
  SwChoice *choice;
  const SwAutomaton *past[2];  // automata of past outputs to draft from in addition to its own tokens; null for none
  int64_t num_taken_in;        // tokens to add to its own automaton, in order
  int64_t is_whole;            // whether its own automaton then has all known tokens
  int64_t is_running;          // 0 while the prompt is computed; all following fields are then 0
  int64_t num_new;             // tokens since the last such step
  int64_t max_nodes;
} SwChoiceStep;

SW_PUBLIC SwAutomaton *sw_create_automaton(int32_t depth);
SW_PUBLIC void sw_destroy_automaton(SwAutomaton *automaton);

// Adds tokens to a sequence. If they are not counted, strings that end in them do not count as occurrences.
SW_PUBLIC int32_t sw_extend(SwAutomaton *automaton, SwWriter *writer, const int32_t *tokens, int64_t count,
                            int32_t counted);

// Creates a choice that continues after these tokens. Its own automaton is still empty.
SW_PUBLIC SwChoice *sw_create_choice(int32_t depth, const int32_t *tokens, int64_t count);
SW_PUBLIC void sw_destroy_choice(SwChoice *choice);

// Drafts a tree for each choice of a step. `tokens` holds, for each choice, the tokens to add to its own automaton and
// then its new tokens. The trees' nodes, num_nodes[count] each, are stored one tree after another, with room for
// max_nodes each.
SW_PUBLIC int32_t sw_propose(const SwChoiceStep *choices, int64_t count, const int32_t *tokens, int32_t *num_nodes,
                             int32_t *node_tokens, int32_t *node_parents, double *node_confidence);

// The size of a struct by name, or -1. Python compares it with the size it computed from this file.
SW_PUBLIC int64_t sw_size_of(const char *name);

#ifdef __cplusplus
}
#endif
