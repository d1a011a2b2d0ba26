// The kernels for the instruction set SW_ISA, which the compiler options define; layers.cpp has attention and layers.
#include <algorithm>
#include <atomic>

#include "block_formats.h"
#include "gumbel_max.h"
#include "hydra.h"
#include "kv_cache.h"
#include "products.h"
#include "runtime.h"
#include "truncate.h"

namespace SW_ISA {

#define SW_FUNCTION(result, name, arguments) result name arguments;
#include "functions.h"

int32_t sw_pack(SwContext *context, int32_t kind, const float *weight, int32_t outputs, int32_t inputs, int8_t *packed,
                float *scales) {
  with_panels(kind, [&](auto panels) {
    if constexpr (requires { panels.pack(weight, outputs, inputs, 0, packed, scales); })
      context->pool.for_each(round_up(outputs, kPanel) / kPanel,
                             [&](int64_t panel) { panels.pack(weight, outputs, inputs, panel, packed, scales); });
  });
  return 0;
}

int64_t sw_packed_size(int32_t kind, int32_t outputs, int32_t inputs) {
  return packed_bytes({kind, outputs, inputs, nullptr, nullptr, nullptr, nullptr, nullptr});
}

int32_t sw_repacked_kind(int32_t format) {
  const BlockFormat *known = find_block_format(format);
  return known ? known->packed_kind : -1;
}

int32_t sw_repack(SwContext *context, int32_t type, const uint8_t *blocks, int64_t row_bytes, const int32_t *order,
                  int32_t outputs, int32_t inputs, int8_t *packed) {
  const BlockFormat &format = *find_block_format(type);
  std::atomic<bool> is_finite{true};
  with_panels(format.packed_kind, [&](auto panels) {
    if constexpr (requires { panels.repack(format, &blocks, inputs, packed); })
      context->pool.for_each(round_up(outputs, kPanel) / kPanel, [&](int64_t panel) {
        const uint8_t *rows[kPanel] = {};
        for (int64_t lane = 0, output = panel * kPanel; lane < kPanel && output < outputs; ++lane, ++output)
          rows[lane] = blocks + (order ? order[output] : output) * row_bytes;
        if (!panels.repack(format, rows, inputs, packed + panel * panels.panel_bytes(inputs))) is_finite = false;
      });
  });
  return is_finite ? 0 : 2;
}

int32_t sw_unpack(SwContext *context, int32_t format, const uint8_t *blocks, int64_t row_bytes, const int32_t *rows,
                  int32_t count, int32_t inputs, float *y) {
  context->pool.for_each(count, [&](int64_t i) {
    unpack_row(format, blocks + (rows ? rows[i] : i) * row_bytes, inputs, y + i * inputs);
  });
  return 0;
}

int32_t sw_linear(SwContext *context, const SwWeight *weight, const float *x, int32_t num_rows, float *y) {
  if (num_rows == 0) return 0;
  const int64_t inputs = weight->inputs, outputs = outputs_of_all(*weight);
  const QuantizedRows rows = laid_out_in(context->memory, [&](ScratchAllocator &take) {
    return take_rows(take, inputs, num_rows);
  });
  context->pool.for_each(num_rows, [&](int64_t row) { quantize_row(x + row * inputs, *weight, rows, row); });
  multiply_rows(context->pool, *weight, rows, num_rows, Store{y, outputs});
  return 0;
}

int32_t sw_experts(SwContext *context, const SwExperts *experts, const float *x, const int32_t *chosen,
                   const float *weights, int32_t num_rows, float *output) {
  if (num_rows == 0) return 0;
  const SwWeight &first = experts->gate_up[0];
  const int64_t hidden = first.inputs;
  QuantizedRows rows;
  const ExpertsScratch scratch = laid_out_in(context->memory, [&](ScratchAllocator &take) {
    rows = take_rows(take, hidden, num_rows);
    return ExpertsScratch::lay_out(*experts, num_rows, take);
  });
  context->pool.for_each(num_rows, [&](int64_t row) { quantize_row(x + row * hidden, first, rows, row); });
  ExpertsRun run(context->pool, *experts, num_rows, scratch);
  run.set_choices(chosen, weights);
  run.multiply(rows);
  context->pool.for_each(num_rows, [&](int64_t row) { run.add(row, nullptr, output + row * hidden); });
  return 0;
}

int32_t sw_pick(SwContext *context, const float *logits, int64_t width, const SwPick *picks, int32_t count,
                int64_t *tokens) {
  context->pool.for_each(count, [&](int64_t i) {
    const LogitsRow row{logits + picks[i].row * width, width, picks[i].mask};
    tokens[i] = pick(row, picks[i].temperature, picks[i].key);
  });
  return 0;
}

int32_t sw_draft(SwContext *context, const SwHydra *hydra, const SwDraft *draft) {
  const DraftScratch scratch = laid_out_in(context->memory, [&](ScratchAllocator &take) {
    return DraftScratch::lay_out(*hydra, *draft, take);
  });
  DraftRun(context->pool, *hydra, *draft, scratch).run();
  return 0;
}

int32_t sw_truncate(SwContext *context, const float *logits, int32_t rows, int64_t width, const SwTruncation *steps,
                    const int32_t *first_step, float *output) {
  char *scratch = context->memory.reserve(truncate_scratch(context->pool.size(), width));
  truncate(context->pool, logits, rows, width, steps, first_step, output, scratch);
  return 0;
}

// Each layer makes the moves in order. No place is read after it was written, so the result is the same as reading
// everything before writing.
int32_t sw_move_kv(SwContext *context, const SwKvCache *layers, int32_t num_layers, const SwMove *moves, int32_t count) {
  context->pool.for_each(num_layers, [&](int64_t layer) {
    for (int32_t i = 0; i < count; ++i) move_kv(layers[layer], moves[i]);
  });
  return 0;
}

}  // namespace SW_ISA

#define SW_TEXT_OF(name) #name
#define SW_TEXT(name) SW_TEXT_OF(name)
#define SW_JOIN_OF(a, b) a##b
#define SW_JOIN(a, b) SW_JOIN_OF(a, b)

namespace samewise {

extern const SwKernels SW_JOIN(SW_ISA, _kernels) = {
    SW_TEXT(SW_ISA),
#define SW_FUNCTION(result, name, arguments) Guarded<SW_ISA::name>::call,
#include "functions.h"
};

}  // namespace samewise
