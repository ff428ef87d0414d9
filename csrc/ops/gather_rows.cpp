// gather_rows: checks of the row, the board and the table of boards; who was too late.
#include "algorithms/gather_rows.h"

#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "ops/op.h"
#include "rank_set.h"

namespace isoload::ops {

std::tuple<Tensor, Tensor> gather_rows(const Tensor& row, const std::vector<int64_t>& beside,
                                       const Tensor& boards, Tensor board, int64_t rank, int64_t timeout_ms) {
  require_dtype(row, "row", ScalarType::Int);
  require(row.dim() == 1 && row.numel() >= 1, "row must be [W] with W at least 1, got ", shape_text(row));
  require_dtype(boards, "boards", ScalarType::Long);
  const int64_t R = boards.numel(), W = row.numel(), F = static_cast<int64_t>(beside.size());
  require(boards.dim() == 1 && R >= 1 && R <= kMaxRanks, "boards must be [R] with R in 1..", kMaxRanks,
          ", got ", shape_text(boards));
  require(F <= kMostBeside, "beside must have at most ", kMostBeside, " integers, got ", F);
  for (const int64_t value : beside)
    require(value >= INT32_MIN && value <= INT32_MAX, "beside must be 32-bit integers, got ", value);
  require(R * (W + F) <= INT32_MAX, "row must have fewer than 2^31 / R entries, got ", W);
  require(rank >= 0 && rank < R, "rank must be in 0..", R - 1, ", got ", rank);
  require(timeout_ms >= 1, "timeout_ms must be at least 1, got ", timeout_ms);
  require_dtype(board, "board", ScalarType::Int);
  require_shape(board, "board", {Board::words(static_cast<int>(R), static_cast<int>(W + F))});
  require(board.is_contiguous(), "board must be contiguous");
  require_device(boards, "boards", row, "row");
  require_device(board, "board", row, "row");

  const Tensor own_row = dense(row), addresses = dense(boards);
  Tensor rows = new_empty(row, {R, W}), told = new_empty(row, {R, F});
  RowGather in{
      data<int32_t>(own_row), data<int64_t>(addresses), mutable_data<int32_t>(board), {},
      static_cast<int>(R),    static_cast<int>(W),      static_cast<int>(F),          static_cast<int>(rank),
      timeout_ms * 1000000};
  for (int64_t f = 0; f < F; ++f) in.beside[f] = static_cast<int32_t>(beside[f]);
  const GatheredRows out{mutable_data<int32_t>(rows), mutable_data<int32_t>(told), in.W, in.F};
  if (on_cuda(row, [&](auto stream) { return cuda::gather_rows(in, out, stream); })) return {rows, told};
  for (int64_t r = 0; r < R; ++r)
    require(in.boards[r] != 0, "boards must hold an address for rank ", r, ", got 0");
  SerialTeam team;
  if (const int late = isoload::gather_rows(team, in, out))
    throw std::runtime_error("gather_rows: rank " + std::to_string(late - 1) + " put no row within " +
                             std::to_string(timeout_ms) + " ms; this group gathers no more");
  return {rows, told};
}

}  // namespace isoload::ops

ISOLOAD_OP(gather_rows)
