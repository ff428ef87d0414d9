// pack_rows on one core.
#pragma once

#include <cstring>
#include <vector>

#include "cpu/cpu.h"

namespace isoload::cpu {

template <class Slot, class Weight>
void write_copies(char* row, const Slot* slots, const Weight* weights, int rank, const RowPacking& in) {
  auto* const to_slots = reinterpret_cast<int32_t*>(row + in.slots_at);
  auto* const to_weights = reinterpret_cast<Weight*>(row + in.weights_at);
  for (int k = 0; k < in.space.K; ++k) {
    const bool here = slots != nullptr && in.space.rank_of(slots[k]) == rank;
    to_slots[k] = here ? static_cast<int32_t>(slots[k] - int64_t(rank) * in.space.S) : -1;
    to_weights[k] = here ? weights[k] : Weight(0);
  }
}

template <class Slot, class Weight>
void pack_rows(const Packing<Slot, Weight>& p) {
  const RowPacking& in = p.in;
  const PackedRows& out = p.out;
  const RowSpace& space = in.space;
  const int R = space.R, D = space.width();
  std::vector<int64_t> first(R + 1, 0);
  for (int r = 0; r < R; ++r) first[r + 1] = first[r] + (in.capacity > 0 ? in.capacity : p.counts[r]);
  for (int64_t t = 0; t < space.T; ++t)
    for (int64_t at = t * D; at < (t + 1) * D; ++at) {
      const int rank = p.ranks[at];
      out.token_to_rows[at] = rank == R ? in.num_rows : first[rank] + p.numbers[at];
      if (rank == R) continue;
      const int64_t row = out.token_to_rows[at];
      out.row_to_token[row] = t;
      out.row_to_rank[row] = rank;
      char* const to = out.payload + row * in.bytes;
      std::memcpy(to, p.x + t * in.row_bytes, in.row_bytes);
      write_copies(to, p.slots + t * space.K, p.weights + t * space.K, rank, in);
    }
  for (int r = 0; r < R; ++r)
    for (int64_t row = first[r] + p.counts[r]; row < first[r + 1]; ++row) {
      out.row_to_token[row] = space.T;
      out.row_to_rank[row] = R;
      char* const to = out.payload + row * in.bytes;
      std::memset(to, 0, in.row_bytes);
      write_copies<Slot, Weight>(to, nullptr, nullptr, r, in);
    }
}

}  // namespace isoload::cpu
