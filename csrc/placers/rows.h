// Rows that tokens send to other nodes, and by how much a change of slots changes their number.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "placers/layout.h"

namespace isoload::placers {

constexpr int kMaxNodes = 64;  // a set of nodes is one word
constexpr int kMaxTopK = 64;

// The choices of a layer's tokens.
struct Choices {
  const int32_t* ids;     // [tokens, top_k] experts, -1 = none
  const int32_t* weight;  // [tokens] how often a token counts
  const int32_t* node;    // [R] node of each rank, 0 .. nodes - 1
  int tokens, top_k, nodes;
};

// The sum, over tokens and over the nodes that a token may come from, of the other nodes that it is sent to.
// A token stays on its node for an expert with a copy there. Of an expert's nodes elsewhere it takes one by
// its position: shares of replicas are alike, and routing does not look at a token's other experts.
class Rows {
 public:
  Rows(const Layout& layout, const Choices& choices)
      : choices_(choices),
        copies_(static_cast<size_t>(layout.problem->experts) * choices.nodes),
        nodes_(layout.problem->experts),
        first_(layout.problem->experts + 1),
        seen_(choices.tokens, -1) {
    for (int p = 0; p < static_cast<int>(layout.slot.size()); ++p) {
      if (layout.slot[p] >= 0) note(layout.slot[p], choices.node[layout.rank_of(p)], 1);
    }
    each_choice([&](int, int e) { ++first_[e + 1]; });
    for (size_t e = 1; e < first_.size(); ++e) first_[e] += first_[e - 1];
    tokens_of_.resize(first_.back());
    std::vector<int64_t> next(first_.begin(), first_.end() - 1);
    each_choice([&](int t, int e) { tokens_of_[next[e]++] = t; });
    for (int t = 0; t < choices.tokens; ++t) rows_.push_back(count(t));
  }

  // A copy of expert e comes to a node, or (sign = -1) leaves it.
  void note(int e, int node, int sign) {
    int& copies = copies_[static_cast<size_t>(e) * choices_.nodes + node];
    copies += sign;
    const uint64_t bit = uint64_t{1} << node;
    nodes_[e] = copies > 0 ? nodes_[e] | bit : nodes_[e] & ~bit;
  }

  // By how many rows what was noted of experts a and b since the last keep() changes the sum.
  ISOLOAD_WIDE int64_t change(int a, int b) {
    ++turn_;
    changed_.clear();
    int64_t sum = 0;
    for (const int e : {a, b}) {
      for (int64_t i = first_[e]; i < first_[e + 1]; ++i) {
        const int t = tokens_of_[i];
        if (seen_[t] == turn_) continue;
        seen_[t] = turn_;
        const int64_t now = count(t);
        if (now == rows_[t]) continue;
        sum += now - rows_[t];
        changed_.emplace_back(t, now);
      }
    }
    return sum;
  }

  // What the last change() counted is made.
  void keep() {
    for (const auto& [t, now] : changed_) rows_[t] = now;
  }

  int64_t sum() const {
    int64_t sum = 0;
    for (const int64_t rows : rows_) sum += rows;
    return sum;
  }

 private:
  template <class Use>
  void each_choice(const Use& use) const {
    for (int t = 0; t < choices_.tokens; ++t) {
      for (int k = 0; k < choices_.top_k; ++k) {
        const int e = choices_.ids[static_cast<size_t>(t) * choices_.top_k + k];
        if (e >= 0) use(t, e);
      }
    }
  }

  // Inlined, so that change()'s version for AVX2 counts bits with one instruction.
  [[gnu::always_inline]] int64_t count(int t) const {
    const size_t begin = static_cast<size_t>(t) * choices_.top_k;
    uint64_t needed = 0, near[kMaxTopK], far[kMaxTopK];
    int replicated = 0;
    for (int k = 0; k < choices_.top_k; ++k) {
      const int e = choices_.ids[begin + k];
      const uint64_t nodes = e < 0 ? 0 : nodes_[e];
      if ((nodes & (nodes - 1)) == 0) {
        needed |= nodes;
      } else {
        near[replicated] = nodes;
        far[replicated++] = pick(nodes, static_cast<uint32_t>(begin + k));
      }
    }
    int64_t rows = 0;
    if (replicated == 0) {
      rows = static_cast<int64_t>(__builtin_popcountll(needed)) * (choices_.nodes - 1);
    } else {
      for (int node = 0; node < choices_.nodes; ++node) {
        const uint64_t own = uint64_t{1} << node;
        uint64_t sent = needed;
        for (int i = 0; i < replicated; ++i) sent |= near[i] & own ? 0 : far[i];
        rows += __builtin_popcountll(sent & ~own);
      }
    }
    return rows * choices_.weight[t];
  }

  // One of a set's nodes, by a number.
  static uint64_t pick(uint64_t nodes, uint32_t number) {
    const uint32_t size = static_cast<uint32_t>(__builtin_popcountll(nodes));
    for (uint32_t skipped = (number * 2654435769u >> 16) % size; skipped > 0; --skipped) nodes &= nodes - 1;
    return nodes & (~nodes + 1);
  }

  const Choices& choices_;
  std::vector<int> copies_;                           // [E, nodes]
  std::vector<uint64_t> nodes_;                       // [E] nodes with a copy
  std::vector<int64_t> first_;                        // [E + 1] where an expert's tokens begin
  std::vector<int32_t> tokens_of_;                    // tokens by expert
  std::vector<int64_t> rows_;                         // [tokens]
  std::vector<int64_t> seen_;                         // [tokens] the turn that last counted a token
  std::vector<std::pair<int32_t, int64_t>> changed_;  // tokens of the last change(), and their rows after it
  int64_t turn_ = 0;
};

}  // namespace isoload::placers
