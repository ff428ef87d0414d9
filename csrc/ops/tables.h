// The replica tables that an op is given. Their numbers are indices into other tensors: made-up ones would
// lead anywhere, so what costs nothing is checked always, all of it under ISOLOAD_CHECK=1.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <string_view>
#include <vector>

#include "algorithms/replica_tables.h"
#include "check.h"
#include "ops/tensors.h"
#include "rank_set.h"
#include "team.h"

namespace isoload::ops {

// The tables of a batch of layers: [..., size], with P slots each.
struct Tables {
  // num_ranks: 0 where the op is not told. written: by replica_tables before; else it is about to.
  Tables(const Tensor& tensor, int64_t num_slots, int64_t num_experts, int64_t num_ranks = 0,
         bool written = true)
      : owner(dense(tensor)), P(num_slots), E(num_experts), R(num_ranks) {
    require_dtype(tensor, "tables", ScalarType::Int);
    require(E >= 1, "tables must be of at least 1 expert, got ", E);
    const int64_t size = ReplicaTables::size(E, P);
    require(tensor.dim() == 1 || tensor.dim() == 2, "tables must have 1 or 2 dimensions, got ", tensor.dim());
    require(tensor.size(tensor.dim() - 1) == size, "tables must be those of ", E, " experts in ", P,
            " slots (", size, " ints), got ", tensor.size(tensor.dim() - 1));
    batch = tensor.dim() == 2 ? tensor.size(0) : 1;
    if (written && owner.is_cpu()) check_values();
  }
  ReplicaTables layer(int64_t b) const {
    return ReplicaTables::at(data<int32_t>(owner) + b * ReplicaTables::size(E, P), E, P);
  }

  Tensor owner;
  int64_t P, E, R, batch;

 private:
  void check_values() const {
    const char* const asked = std::getenv("ISOLOAD_CHECK");
    const bool all = asked != nullptr && std::string_view(asked) == "1";
    for (int64_t b = 0; b < batch; ++b) {
      const ReplicaTables t = layer(b);
      const int split = t.num_split(), classes = t.num_classes(), first = t.offsets[0], last = t.offsets[E];
      require(0 <= classes && classes <= split && split <= E,
              "tables must be made by replica_tables, which finds 0..", E,
              " replicated experts in no more classes", ", got ", split, " in ", classes);
      require(first == 0 && last >= 0 && last <= P, "tables must be made by replica_tables, which lists 0..",
              P, " replicas, got ", first, "..", last);
      if (all) require(is_made(t), "tables must be made by replica_tables, got others in layer ", b);
    }
  }

  // Whether a placement has these tables: that of their lists has, if any.
  bool is_made(const ReplicaTables& t) const {
    std::vector<int32_t> slot_to_expert(P, -1);
    for (int e = 0; e < E; ++e) {
      if (t.offsets[e] > t.offsets[e + 1] || t.offsets[e + 1] > P) return false;
      for (int j = t.offsets[e]; j < t.offsets[e + 1]; ++j) {
        if (t.slots[j] < 0 || t.slots[j] >= P) return false;
        slot_to_expert[t.slots[j]] = e;
      }
    }
    for (int64_t ranks = R > 0 ? R : 1; ranks <= (R > 0 ? R : std::min<int64_t>(P, kMaxRanks)); ++ranks)
      if (P % ranks == 0 && are_of(slot_to_expert, ranks, t)) return true;
    return false;
  }

  bool are_of(const std::vector<int32_t>& slot_to_expert, int64_t ranks, const ReplicaTables& t) const {
    std::vector<int32_t> made(ReplicaTables::size(E, P));
    std::vector<uint64_t> workspace(replica_tables_workspace(ranks, E));
    SerialTeam team;
    isoload::replica_tables(team, slot_to_expert.data(), static_cast<int>(ranks), static_cast<int>(E),
                            static_cast<int>(P / ranks), MutableReplicaTables::at(made.data(), E, P),
                            workspace.data());
    return std::equal(made.begin(), made.end(), t.header);
  }
};

}  // namespace isoload::ops
