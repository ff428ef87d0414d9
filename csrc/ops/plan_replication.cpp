// plan_replication: checks of the forecast, the placement and the rules.
#include "algorithms/plan_replication.h"

#include "ops/fill_batch.h"
#include "ops/op.h"

namespace isoload::ops {

std::tuple<Tensor, Tensor> plan_replication(const Tensor& loads, const Tensor& slots, const Tensor& home,
                                            int64_t num_ranks, int64_t ranks_per_node, int64_t spare_slots,
                                            const Maybe& fixed, const Maybe& alive, int64_t local_slots,
                                            bool printed) {
  const FillBatch batch(slots, home, num_ranks, ranks_per_node, spare_slots, loads, fixed, alive, true,
                        false);
  require_in("local_slots", local_slots, 0, spare_slots);
  return batch.fill<ReplicationPlanner>({{}, static_cast<int>(local_slots), printed}, true);
}

}  // namespace isoload::ops

ISOLOAD_OP(plan_replication)
