// route_shared: checks of slots and the row of the share.
#include "cpu/route_shared.h"

#include "ops/op.h"
#include "ops/route_checks.h"

namespace isoload::ops {

Tensor route_shared(const Tensor& slots_in, const Tensor& share_row_in, int64_t slots_per_rank, int64_t rank,
                    int64_t num_shared) {
  require_columns(slots_in, "slots");
  require_dtype(share_row_in, "source_quota", ScalarType::Int);
  require(share_row_in.dim() == 1, "source_quota must be [R], got ", shape_text(share_row_in));
  const Tensor slots = dense(slots_in), source_quota = dense(share_row_in);
  const int64_t T = slots.size(0), R = source_quota.size(0), most = INT32_MAX / (R > 0 ? R : 1);
  require(R >= 1 && R <= kMaxRanks, "source_quota must have 1..", kMaxRanks, " ranks, got ", R);
  require_in("slots_per_rank", slots_per_rank, 1, most);
  require_in("rank", rank, 0, R - 1);
  require_in("num_shared", num_shared, 1, 1024);
  require(T * num_shared <= INT32_MAX,
          "slots must have fewer than 2^31 shared copies (num_shared=", num_shared, " of every token), got ",
          T * num_shared);
  require_device(source_quota, "source_quota", slots, "slots");
  if (slots.is_cpu()) require_copies_of_ranks(source_quota);
  cpu::SharedRoute problem{};
  problem.T = T, problem.K = problem.slots_width = static_cast<int>(slots.size(1));
  problem.R = static_cast<int>(R), problem.S = static_cast<int>(slots_per_rank);
  problem.home = static_cast<int>(rank), problem.first_shared = -1;
  problem.num_shared = problem.width = static_cast<int>(num_shared);
  problem.source_quota = data<int32_t>(source_quota);
  const Tensor ranks = new_tensor(slots, {T, num_shared});
  int32_t* const to = mutable_data<int32_t>(ranks);
  if (on_cuda(slots, [&](auto stream) {
        const Scratch scratch(slots, cuda::route_shared_bytes(problem));
        return with_ids(
            slots, [&](auto* from) { return cuda::route_shared(problem, from, to, scratch.data(), stream); });
      }))
    return ranks;
  const cpu::SharedFault fault =
      with_ids(slots, [&](auto* from) { return cpu::route_shared(problem, from, to); });
  check_shared(fault, problem);
  return ranks;
}

}  // namespace isoload::ops

ISOLOAD_OP(route_shared)
