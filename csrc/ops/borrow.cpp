// borrow, borrow_backward: checks of the plan's slots, the homes, the table of addresses and this rank's
// stacks.
#include "cpu/borrow.h"

#include <vector>

#include "ops/op.h"
#include "rank_set.h"

namespace isoload::ops {

namespace {

// What both ops read, checked but for values.
struct Borrowed {
  Borrowed(const Tensor& slots_in, const Tensor& home_in, const Tensor& peers_in, int64_t R, int64_t rank,
           int64_t spare_slots, int64_t stacks, int64_t blocks)
      : slots(dense(slots_in)), home(dense(home_in)), peers(dense(peers_in)) {
    require_dtype(slots, "slot_to_expert", ScalarType::Int);
    require_dtype(home, "home", ScalarType::Int);
    require_dtype(peers, "peers", ScalarType::Long);
    require_in("num_ranks", R, 1, kMaxRanks);
    require_in("rank", rank, 0, R - 1);
    require(slots.dim() == 1, "slot_to_expert must be [P], got ", shape_text(slots));
    const int64_t P = slots.size(0);
    require(P >= R && P % R == 0, "slot_to_expert must have a multiple of num_ranks=", R, " slots, got ", P);
    require_in("spare_slots", spare_slots, 0, P / R);
    require(home.dim() == 2 && home.size(1) == 2, "home must be [E, 2], got ", shape_text(home));
    require_shape(peers, "peers", {R, stacks});
    require_in("blocks", blocks, 1, 65535);
    require_device(home, "home", slots, "slot_to_expert");
    require_device(peers, "peers", slots, "slot_to_expert");
    in = {data<int32_t>(slots),     static_cast<const Home*>(home.const_data_ptr()),
          data<int64_t>(peers),     static_cast<int>(R),
          static_cast<int>(P / R),  static_cast<int>(home.size(0)),
          static_cast<int>(stacks), static_cast<int>(spare_slots),
          static_cast<int>(rank)};
  }

  // Rank r's j-th spare slot holds nothing, or an expert with a home.
  void check_slot(int r, int j) const {
    const int32_t e = in.slot_to_expert[in.slot(r, j)];
    require(e >= -1 && e < in.E, "slot_to_expert must be in -1..", in.E - 1, ", got ", e, " in slot ",
            in.slot(r, j));
    if (e < 0) return;
    const Home at = in.home[e];
    require(at.rank >= 0 && at.rank < in.R && at.row >= 0, "home must be (0..", in.R - 1,
            ", a row) for the borrowed expert ", e, ", got (", at.rank, ", ", at.row, ")");
  }
  void check_peer(int r, int w) const {
    require(in.peer(r, w) != 0, "peers must hold an address for rank ", r, ", stack ", w, ", got 0");
  }

  Tensor slots, home, peers;
  Borrowing in;
};

int64_t row_size(const Tensor& stack) {
  int64_t size = 1;
  for (int64_t d = 1; d < stack.dim(); ++d) size *= stack.size(d);
  return size;
}

// At least one stack; all contiguous with the same number of rows, which is returned.
int64_t check_stacks(const std::vector<Tensor>& stacks, const char* name, const Tensor& slots) {
  require(!stacks.empty(), name, " must hold at least one stack, got none");
  for (std::size_t w = 0; w < stacks.size(); ++w) {
    const Tensor& stack = stacks[w];
    require(stack.dim() >= 1, name, " must be [rows, ...], got [] in stack ", w);
    require(stack.is_contiguous(), name, " must be contiguous, got other strides in stack ", w);
    require(stack.size(0) == stacks[0].size(0), name, " must have as many rows in every stack (",
            stacks[0].size(0), "), got ", stack.size(0), " in stack ", w);
    require_device(stack, name, slots, "slot_to_expert");
  }
  return stacks[0].size(0);
}

std::vector<Rows> rows_of(const std::vector<Tensor>& stacks, bool in_bytes) {
  std::vector<Rows> rows;
  for (const Tensor& stack : stacks) {
    const int64_t bytes = in_bytes ? static_cast<int64_t>(stack.element_size()) : 1;
    rows.push_back({stack.mutable_data_ptr(), row_size(stack) * bytes});
  }
  return rows;
}

// f(value, total) with values of the pools' dtype and of the totals', which are a pair that may be.
template <class F>
auto with_values(ScalarType dtype, bool rounds, F&& f) {
  if (dtype == ScalarType::Double) return f(double(), double());
  if (dtype == ScalarType::Float) return f(float(), float());
  if (dtype == ScalarType::BFloat16) return rounds ? f(BFloat16(), BFloat16()) : f(BFloat16(), float());
  return rounds ? f(Float16(), Float16()) : f(Float16(), float());
}

// Whether the totals are of the pools' dtype and not of the wider one that sums are made in.
bool check_dtypes(const std::vector<Tensor>& totals, ScalarType dtype) {
  const bool wide = dtype == ScalarType::Double;
  require(wide || dtype == ScalarType::Float || dtype == ScalarType::BFloat16 || dtype == ScalarType::Half,
          "dtype must be float64, float32, bfloat16 or float16, got ", dtype_name(dtype));
  const bool rounds = totals[0].scalar_type() == dtype;
  const ScalarType expected = rounds || wide ? dtype : ScalarType::Float;
  for (const Tensor& total : totals) require_dtype(total, "totals", expected);
  return rounds;
}

}  // namespace

void borrow(const Tensor& slot_to_expert, const Tensor& home, const Tensor& peers, std::vector<Tensor> spare,
            int64_t num_ranks, int64_t rank, int64_t blocks) {
  const int64_t spare_slots = check_stacks(spare, "spare", slot_to_expert);
  const Borrowed borrowed(slot_to_expert, home, peers, num_ranks, rank, spare_slots,
                          static_cast<int64_t>(spare.size()), blocks);
  const Borrowing& in = borrowed.in;
  const std::vector<Rows> rows = rows_of(spare, true);
  if (on_cuda(slot_to_expert, [&](auto stream) { return cuda::borrow(in, rows.data(), blocks, stream); }))
    return;
  for (int j = 0; j < in.spare_slots; ++j) {
    borrowed.check_slot(in.rank, j);
    const Home from = in.home_of(in.rank, j);
    for (int w = 0; w < in.W && from.rank >= 0; ++w)
      if (rows[w].size > 0) borrowed.check_peer(from.rank, w);
  }
  cpu::borrow(in, rows.data());
}

void borrow_backward(const Tensor& slot_to_expert, const Tensor& home, const Tensor& peers,
                     std::vector<Tensor> totals, int64_t num_ranks, int64_t rank, int64_t spare_slots,
                     ScalarType dtype, int64_t blocks) {
  const int64_t num_rows = check_stacks(totals, "totals", slot_to_expert);
  const bool rounds = check_dtypes(totals, dtype);
  const Borrowed borrowed(slot_to_expert, home, peers, num_ranks, rank, spare_slots,
                          static_cast<int64_t>(totals.size()), blocks);
  const Borrowing& in = borrowed.in;
  const std::vector<Rows> rows = rows_of(totals, false);
  if (on_cuda(slot_to_expert, [&](auto stream) {
        return with_values(dtype, rounds, [&](auto value, auto total) {
          return cuda::borrow_backward<decltype(value), decltype(total)>(in, rows.data(), num_rows, blocks,
                                                                         stream);
        });
      }))
    return;
  for (int i = 0; i < in.R * in.spare_slots; ++i) {
    const int r = i / in.spare_slots, j = i % in.spare_slots;
    borrowed.check_slot(r, j);
    const Home at = in.home_of(r, j);
    if (at.rank != in.rank) continue;
    require(at.row < num_rows, "home must be a row of totals (", num_rows, " rows), got row ", at.row,
            " for expert ", in.slot_to_expert[in.slot(r, j)]);
    for (int w = 0; w < in.W; ++w)
      if (rows[w].size > 0) borrowed.check_peer(r, w);
  }
  with_values(dtype, rounds, [&](auto value, auto total) {
    cpu::borrow_backward<decltype(value), decltype(total)>(in, rows.data(), num_rows);
  });
}

}  // namespace isoload::ops

ISOLOAD_OP(borrow)
ISOLOAD_OP(borrow_backward)
