// gather_rows: every rank's row, and the integers beside it.
#include "ops/row_gather.h"

namespace isoload::ops {

std::tuple<Tensor, Tensor> gather_rows(const Tensor& row, const std::vector<int64_t>& beside,
                                       const Tensor& boards, Tensor board, int64_t rank, int64_t timeout_ms) {
  const RowGathering gather(row, beside, boards, board, rank, timeout_ms);
  if (!on_cuda(row, [&](auto stream) { return cuda::gather_rows(gather.in, gather.out, stream); }))
    gather.run();
  return {gather.rows, gather.beside};
}

}  // namespace isoload::ops

ISOLOAD_OP(gather_rows)
