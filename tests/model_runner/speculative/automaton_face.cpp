// Queries of suffix automata for tests; the library itself drafts with them.
#include "automaton.h"

#define PUBLIC extern "C" __attribute__((visibility("default")))

using suffix::Automaton;
using suffix::Match;

PUBLIC int64_t face_size(const Automaton *automaton) { return automaton->size(); }

PUBLIC void face_advance(const Automaton *automaton, Match *match, int32_t token) {
  *match = automaton->advance(*match, token);
}

PUBLIC void face_shorter(const Automaton *automaton, Match *match) { *match = automaton->shorter(*match); }

PUBLIC int32_t face_count(const Automaton *automaton, const Match *match) { return automaton->count(*match); }

PUBLIC int32_t face_num_following(const Automaton *automaton, const Match *match) {
  return automaton->num_following(*match);
}

// Calls back with each token, its count, and the state and length of the child.
PUBLIC void face_following(const Automaton *automaton, const Match *match,
                           void (*visit)(int32_t token, int32_t count, int32_t state, int32_t length)) {
  automaton->each_following(*match, [&](int32_t token, int32_t count, Match child) {
    visit(token, count, child.state, child.length);
  });
}
