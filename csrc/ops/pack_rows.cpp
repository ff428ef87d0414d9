// pack_rows: checks of the tokens, of what number_rows said of them, and of the payload's layout.
#include "cpu/pack_rows.h"

#include "ops/op.h"

namespace isoload::ops {

// The columns must not overlap, and be aligned to what they hold; rows to 16 bytes.
static void check_layout(const cpu::RowPacking& in, int64_t weight_bytes) {
  const int64_t K = in.space.K;
  require(in.slots_at >= in.row_bytes && in.slots_at % 4 == 0,
          "slots_at must be a multiple of 4 and at least ", in.row_bytes, " (the bytes of a row of x), got ",
          in.slots_at);
  require(in.weights_at >= in.slots_at + 4 * K && in.weights_at % weight_bytes == 0,
          "weights_at must be a multiple of ", weight_bytes, " and at least ", in.slots_at + 4 * K, ", got ",
          in.weights_at);
  require(in.bytes >= in.weights_at + weight_bytes * K && in.bytes % 16 == 0,
          "bytes must be a multiple of 16 and at least ", in.weights_at + weight_bytes * K, ", got ",
          in.bytes);
}

// What the CPU writes must lie within the rows there are.
static void check_values(const Tensor& ranks, const Tensor& numbers, const Tensor& counts,
                         const cpu::RowPacking& in) {
  const int32_t *const rank = data<int32_t>(ranks), *const number = data<int32_t>(numbers);
  const int64_t* const count = data<int64_t>(counts);
  int64_t rows = 0;
  for (int r = 0; r < in.space.R; ++r) {
    require(count[r] >= 0 && (in.capacity == 0 || count[r] <= in.capacity), "counts must be in 0..",
            in.capacity > 0 ? in.capacity : in.num_rows, " rows to each rank, got ", count[r]);
    rows += in.capacity > 0 ? in.capacity : count[r];
  }
  require(rows == in.num_rows, "num_rows must be ", rows, " (the rows of all ranks), got ", in.num_rows);
  for (int64_t i = 0; i < in.space.T * in.space.width(); ++i) {
    require(rank[i] >= 0 && rank[i] <= in.space.R, "ranks must be in 0..", in.space.R, ", got ", rank[i]);
    require(rank[i] == in.space.R || (number[i] >= 0 && number[i] < count[rank[i]]), "numbers must be in 0..",
            rank[i] == in.space.R ? 0 : count[rank[i]] - 1, " for rank ", rank[i], ", got ", number[i]);
  }
}

std::tuple<Tensor, Tensor, Tensor, Tensor> pack_rows(const Tensor& x_in, const Tensor& slots_in,
                                                     const Tensor& weights_in, const Tensor& ranks_in,
                                                     const Tensor& numbers_in, const Tensor& counts_in,
                                                     int64_t slots_per_rank, int64_t num_rows,
                                                     int64_t capacity, int64_t slots_at, int64_t weights_at,
                                                     int64_t bytes) {
  require_columns(slots_in, "slots");
  const int64_t T = slots_in.size(0), K = slots_in.size(1);
  require(x_in.dim() == 2 && x_in.size(0) == T, "x must be [", T, ", H], got ", shape_text(x_in));
  const ScalarType real = weights_in.scalar_type();
  require(real == ScalarType::Float || real == ScalarType::Double, "weights must be float32 or float64, got ",
          dtype_name(real));
  require_shape(weights_in, "weights", {T, K});
  require_dtype(counts_in, "counts", ScalarType::Long);
  require(counts_in.dim() == 2 && counts_in.size(0) == 2 && counts_in.size(1) >= 1,
          "counts must be [2, R], got ", shape_text(counts_in));
  const int64_t R = counts_in.size(1);
  require(R <= kMaxRanks, "counts must be of 1..", kMaxRanks, " ranks, got ", R);
  require(slots_per_rank >= 1 && slots_per_rank * R <= INT32_MAX,
          "slots_per_rank must be at least 1 and leave every slot below 2^31, got ", slots_per_rank);
  require(capacity >= 0 && num_rows >= 0, "capacity and num_rows must be at least 0, got ", capacity, " and ",
          num_rows);
  const Tensor x = dense(x_in), slots = dense(slots_in), weights = dense(weights_in);
  const Tensor ranks = dense(ranks_in), numbers = dense(numbers_in), counts = dense(counts_in);
  const cpu::RowSpace space{T, static_cast<int>(K), static_cast<int>(R), static_cast<int>(slots_per_rank)};
  const int64_t D = space.width();
  const cpu::RowPacking in{space,    num_rows,   capacity, x.size(1) * static_cast<int64_t>(x.element_size()),
                           slots_at, weights_at, bytes};
  check_layout(in, real == ScalarType::Float ? 4 : 8);
  for (const auto& [tensor, name] : {std::pair(&ranks, "ranks"), std::pair(&numbers, "numbers")}) {
    require_dtype(*tensor, name, ScalarType::Int);
    require_shape(*tensor, name, {T, D});
  }
  for (const auto& [tensor, name] :
       {std::pair(&x, "x"), std::pair(&weights, "weights"), std::pair(&ranks, "ranks"),
        std::pair(&numbers, "numbers"), std::pair(&counts, "counts")})
    require_device(*tensor, name, slots, "slots");
  if (slots.is_cpu()) check_values(ranks, numbers, counts, in);

  Tensor payload = new_tensor(slots, {num_rows, bytes}, ScalarType::Byte);
  Tensor row_to_token = new_tensor(slots, {num_rows}, ScalarType::Long);
  Tensor row_to_rank = new_tensor(slots, {num_rows}, ScalarType::Long);
  Tensor token_to_rows = new_tensor(slots, {T, D}, ScalarType::Long);
  const cpu::PackedRows out{mutable_data<char>(payload), mutable_data<int64_t>(row_to_token),
                            mutable_data<int64_t>(row_to_rank), mutable_data<int64_t>(token_to_rows)};
  // f(what is to be done, with the types of slots and weights)
  auto with_types = [&](auto&& f) {
    return with_ids(slots, [&](auto* slot) {
      auto run = [&](auto* weight) {
        return f(cpu::Packing<std::decay_t<decltype(*slot)>, std::decay_t<decltype(*weight)>>{
            data<char>(x), slot, weight, data<int32_t>(ranks), data<int32_t>(numbers), data<int64_t>(counts),
            in, out});
      };
      return real == ScalarType::Float ? run(data<float>(weights)) : run(data<double>(weights));
    });
  };
  if (!on_cuda(slots, [&](auto stream) {
        return with_types([&](const auto& packing) { return cuda::pack_rows(packing, stream); });
      }))
    with_types([](const auto& packing) { cpu::pack_rows(packing); });
  return {payload, row_to_token, row_to_rank, token_to_rows};
}

}  // namespace isoload::ops

ISOLOAD_OP(pack_rows)
