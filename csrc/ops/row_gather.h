// A gather through boards: the inputs of gather_rows and plan_exact_share_gathered, checked, and its results.
#pragma once

#include <stdexcept>
#include <string>
#include <vector>

#include "algorithms/gather_rows.h"
#include "ops/op.h"
#include "rank_set.h"
#include "team.h"

namespace isoload::ops {

class RowGathering {
 public:
  RowGathering(const Tensor& row, const std::vector<int64_t>& values, const Tensor& boards, Tensor board,
               int64_t rank, int64_t timeout_ms)
      : row_(dense(row)), boards_(dense(boards)), timeout_ms_(timeout_ms) {
    require_dtype(row, "row", ScalarType::Int);
    require(row.dim() == 1 && row.numel() >= 1, "row must be [W] with W at least 1, got ", shape_text(row));
    require_dtype(boards, "boards", ScalarType::Long);
    const int64_t R = boards.numel(), W = row.numel(), F = static_cast<int64_t>(values.size());
    require(boards.dim() == 1 && R >= 1 && R <= kMaxRanks, "boards must be [R] with R in 1..", kMaxRanks,
            ", got ", shape_text(boards));
    require(F <= kMostBeside, "beside must have at most ", kMostBeside, " integers, got ", F);
    for (const int64_t value : values)
      require(value >= INT32_MIN && value <= INT32_MAX, "beside must be 32-bit integers, got ", value);
    require(R * (W + F) <= INT32_MAX, "row must have fewer than 2^31 / R entries, got ", W);
    require(rank >= 0 && rank < R, "rank must be in 0..", R - 1, ", got ", rank);
    require(timeout_ms >= 1, "timeout_ms must be at least 1, got ", timeout_ms);
    require_dtype(board, "board", ScalarType::Int);
    require_shape(board, "board", {Board::words(static_cast<int>(R), static_cast<int>(W + F))});
    require(board.is_contiguous(), "board must be contiguous");
    require_device(boards, "boards", row, "row");
    require_device(board, "board", row, "row");

    rows = new_empty(row, {R, W}), beside = new_empty(row, {R, F});
    in = {data<int32_t>(row_), data<int64_t>(boards_), mutable_data<int32_t>(board), {},
          static_cast<int>(R), static_cast<int>(W),    static_cast<int>(F),          static_cast<int>(rank),
          timeout_ms * 1000000};
    for (int64_t f = 0; f < F; ++f) in.beside[f] = static_cast<int32_t>(values[f]);
    out = {mutable_data<int32_t>(rows), mutable_data<int32_t>(beside), in.W, in.F};
  }

  // On the CPU.
  void run() const {
    for (int r = 0; r < in.R; ++r)
      require(in.boards[r] != 0, "boards must hold an address for rank ", r, ", got 0");
    SerialTeam team;
    if (const int late = isoload::gather_rows(team, in, out))
      throw std::runtime_error("gather_rows: rank " + std::to_string(late - 1) + " put no row within " +
                               std::to_string(timeout_ms_) + " ms; this group gathers no more");
  }

  Tensor rows, beside;
  RowGather in;
  GatheredRows out;

 private:
  Tensor row_, boards_;
  int64_t timeout_ms_;
};

}  // namespace isoload::ops
