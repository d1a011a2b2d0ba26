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

namespace SW_ISA::entry {

decltype(sw_linears) linears;
decltype(sw_attention) attention;
decltype(sw_forward) forward;
decltype(sw_recur) recur;
decltype(sw_scan) scan;
decltype(sw_convolve) convolve;
decltype(sw_select) select;

int32_t pack(SwContext *context, int32_t kind, const float *weight, int32_t outputs, int32_t inputs, int8_t *packed,
             float *scales) {
  with_panels(kind, [&](auto panels) {
    if constexpr (requires { panels.pack(weight, outputs, inputs, 0, packed, scales); })
      context->pool.for_each(round_up(outputs, kPanel) / kPanel,
                             [&](int64_t panel) { panels.pack(weight, outputs, inputs, panel, packed, scales); });
  });
  return 0;
}

int64_t packed_size(const SwContext *, int32_t kind, int32_t outputs, int32_t inputs) {
  return packed_bytes({kind, outputs, inputs, nullptr, nullptr, nullptr, nullptr, nullptr});
}

int32_t repack(SwContext *context, int32_t type, const uint8_t *blocks, int64_t row_bytes, const int32_t *order,
               int32_t outputs, int32_t inputs, int8_t *packed) {
  const BlockFormat &format = *find_block_format(type);
  std::atomic<bool> is_finite{true};
  with_panels(sw_repacked_kind(type), [&](auto panels) {
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

int32_t unpack(SwContext *context, int32_t format, const uint8_t *blocks, int64_t row_bytes, const int32_t *rows,
               int32_t count, int32_t inputs, float *y) {
  context->pool.for_each(count, [&](int64_t i) {
    unpack_row(format, blocks + (rows ? rows[i] : i) * row_bytes, inputs, y + i * inputs);
  });
  return 0;
}

int32_t linear(SwContext *context, const SwWeight *weight, const float *x, int32_t num_rows, float *y) {
  const int64_t inputs = weight->inputs, outputs = outputs_of_all(*weight);
  char *scratch = context->reserve(num_rows * (row_bytes(inputs) + sizeof(float)));
  if (!scratch) return 1;
  float *scales = reinterpret_cast<float *>(scratch + num_rows * row_bytes(inputs));
  const QuantizedRows rows = lay_out_rows(inputs, scratch, scales);
  context->pool.for_each(num_rows, [&](int64_t row) { quantize_row(x + row * inputs, *weight, rows, row); });
  const auto store = [&](int64_t row, int64_t first, int64_t count, const float *results) {
    copy(results, count, y + row * outputs + first);
  };
  multiply_rows(context->pool, *weight, rows, num_rows, store);
  return 0;
}

// Lays out scratch memory of the experts and returns the rows that they share.
static QuantizedRows lay_out_experts(const SwExperts &experts, int32_t num_rows, ScratchAllocator &memory,
                                     ExpertsScratch *scratch) {
  const int64_t hidden = experts.gate_up[0].inputs;
  char *data = memory(num_rows * row_bytes(hidden));
  float *scales = reinterpret_cast<float *>(memory(num_rows * sizeof(float)));
  *scratch = ExpertsScratch::lay_out(experts, num_rows, memory);
  return lay_out_rows(hidden, data, scales);
}

int32_t experts(SwContext *context, const SwExperts *experts, const float *x, const int32_t *chosen,
                const float *weights, int32_t num_rows, float *output) {
  ExpertsScratch scratch;
  ScratchAllocator needed{}, memory{};
  lay_out_experts(*experts, num_rows, needed, &scratch);
  memory.place = context->reserve(needed.used);
  if (!memory.place) return 1;
  const QuantizedRows rows = lay_out_experts(*experts, num_rows, memory, &scratch);
  const SwWeight &first = experts->gate_up[0];
  const int64_t hidden = first.inputs;
  context->pool.for_each(num_rows, [&](int64_t row) { quantize_row(x + row * hidden, first, rows, row); });
  ExpertsRun run(context->pool, *experts, num_rows, scratch);
  run.set_choices(chosen, weights);
  run.multiply(rows);
  context->pool.for_each(num_rows, [&](int64_t row) { run.add(row, nullptr, output + row * hidden); });
  return 0;
}

int32_t pick(SwContext *context, const float *logits, int64_t width, const SwPick *picks, int32_t count,
             int64_t *tokens) {
  context->pool.for_each(count, [&](int64_t i) {
    const LogitsRow row{logits + picks[i].row * width, width, picks[i].mask};
    tokens[i] = SW_ISA::pick(row, picks[i].temperature, picks[i].key);
  });
  return 0;
}

int32_t draft(SwContext *context, const SwHydra *hydra, const SwDraft *draft) {
  char *memory = context->reserve(DraftScratch::lay_out(*hydra, *draft, nullptr, nullptr));
  if (!memory) return 1;
  DraftScratch scratch;
  DraftScratch::lay_out(*hydra, *draft, memory, &scratch);
  DraftRun(context->pool, *hydra, *draft, scratch).run();
  return 0;
}

int32_t truncate(SwContext *context, const float *logits, int32_t rows, int64_t width, const SwTruncation *steps,
                 const int32_t *first_step, float *output) {
  char *scratch = context->reserve(truncate_scratch(context->pool.size(), width));
  if (!scratch) return 1;
  SW_ISA::truncate(context->pool, logits, rows, width, steps, first_step, output, scratch);
  return 0;
}

int32_t move_kv(SwContext *context, const SwKvCache *layers, int32_t num_layers, const SwMove *moves, int32_t count) {
  SW_ISA::move_kv(context->pool, layers, num_layers, moves, count);
  return 0;
}

}  // namespace SW_ISA::entry

#define SW_TEXT_OF(name) #name
#define SW_TEXT(name) SW_TEXT_OF(name)
#define SW_JOIN_OF(a, b) a##b
#define SW_JOIN(a, b) SW_JOIN_OF(a, b)

namespace samewise {

namespace entry = SW_ISA::entry;

extern const Kernels SW_JOIN(SW_ISA, _kernels) = {
    SW_TEXT(SW_ISA), entry::packed_size, entry::pack,      entry::repack,        entry::unpack,
    entry::linear,   entry::linears,     entry::attention, entry::forward,
    entry::experts,  entry::pick,        entry::draft,     entry::truncate,      entry::move_kv,
    entry::recur,    entry::scan,        entry::convolve,  entry::select};

}  // namespace samewise
