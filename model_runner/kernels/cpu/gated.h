// The activation of a gated MLP.
#pragma once
#include <cstdint>
#include <cstring>

#include "samewise.h"
#include "simd.h"

namespace SW_ISA {

inline Vec silu(Vec x) { return x / (exp(-x) + 1.0f); }

inline Vec gelu_tanh(Vec x) {
  const Vec inner = 0.7978845608f * fma(x * x * x, broadcast(0.044715f), x);
  return 0.5f * x * (tanh(inner) + 1.0f);
}

// gate[i] = activation(gate[i]) * up[i].
template <Vec (*Activation)(Vec)>
inline void gated(float *gate, const float *up, int64_t n) {
  int64_t i = 0;
  for (; i + kWidth <= n; i += kWidth) store(gate + i, Activation(load(gate + i)) * load(up + i));
  if (i == n) return;
  float g[kWidth] = {}, u[kWidth] = {};
  std::memcpy(g, gate + i, (n - i) * sizeof(float));
  std::memcpy(u, up + i, (n - i) * sizeof(float));
  store(g, Activation(load(g)) * load(u));
  std::memcpy(gate + i, g, (n - i) * sizeof(float));
}

// Of a row [2 * n], gate first: gate[i] = activation(gate[i]) * up[i].
inline void gate_row(int32_t activation, float *row, int64_t n) {
  if (activation == SW_SILU)
    gated<silu>(row, row + n, n);
  else
    gated<gelu_tanh>(row, row + n, n);
}

}  // namespace SW_ISA
