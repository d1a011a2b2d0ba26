// Moving keys and values of single tokens within the paged cache, in all layers.
#pragma once
#include "kv_cache.h"
#include "samewise.h"
#include "threads.h"

namespace SW_ISA {

template <typename T>
inline void move_token(const SwKvCache &cache, const SwMove &move) {
  for (int64_t head = 0; head < cache.kv_heads; ++head)
    copy_place(cache, tile_of<T>(cache, move.from_block, head), move.from_offset,
               tile_of<T>(cache, move.to_block, head), move.to_offset);
}

// Each layer makes the moves in their order. No place is read after it was written, see sw_move_kv, so that is the same
// as reading all before writing any.
inline void move_kv(samewise::ThreadPool &pool, const SwKvCache *layers, int32_t num_layers, const SwMove *moves,
                    int32_t count) {
  pool.for_each(num_layers, [&](int64_t layer) {
    const SwKvCache &cache = layers[layer];
    const auto move = cache.type == SW_KV_FLOAT32    ? move_token<float>
                      : cache.type == SW_KV_BFLOAT16 ? move_token<Bfloat16>
                                                     : move_token<int8_t>;
    for (int32_t i = 0; i < count; ++i) move(cache, moves[i]);
  });
}

}  // namespace SW_ISA
