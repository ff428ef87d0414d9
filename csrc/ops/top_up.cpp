// top_up: checks of the loads and the filled placement.
#include "algorithms/top_up.h"

#include "ops/fill_batch.h"
#include "ops/op.h"

namespace isoload::ops {

std::tuple<Tensor, Tensor> top_up(const Tensor& loads, const Tensor& slots, const Tensor& home,
                                  int64_t num_ranks, int64_t ranks_per_node, int64_t spare_slots,
                                  const Maybe& fixed, const Maybe& alive, bool within) {
  const FillBatch batch(slots, home, num_ranks, ranks_per_node, spare_slots, loads, fixed, alive, within);
  return batch.fill<TopUpPlanner>({}, false);
}

}  // namespace isoload::ops

ISOLOAD_OP(top_up)
