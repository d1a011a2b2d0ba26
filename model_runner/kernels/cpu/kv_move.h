// Moving keys and values of single tokens within the paged cache, in all layers.
#pragma once
#include <cstring>

#include "kv_cache.h"
#include "samewise.h"
#include "threads.h"

namespace SW_ISA {

template <typename T>
inline void move_token(const SwKvCache &cache, const SwMove &move) {
  const int64_t places = cache.block_size, value_dim = cache.value_dim;
  for (int64_t head = 0; head < cache.kv_heads; ++head) {
    const Tile<T> from = tile_of<T>(cache, move.from_block, head), to = tile_of<T>(cache, move.to_block, head);
    for (int64_t d = 0; d < cache.key_dim; ++d)
      to.keys[d * places + move.to_offset] = from.keys[d * places + move.from_offset];
    std::memmove(to.values + move.to_offset * value_dim, from.values + move.from_offset * value_dim,
                 value_dim * sizeof(T));
    if (cache.key_scales) to.key_scales[move.to_offset] = from.key_scales[move.from_offset];
    if (cache.value_scales) to.value_scales[move.to_offset] = from.value_scales[move.from_offset];
  }
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
