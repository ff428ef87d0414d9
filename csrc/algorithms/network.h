// Network: potentials of a resistor network with two sides, factored once and solved for many currents.
//
// Every edge joins a node of one side to one of the other and conducts; a node may also conduct to ground. In
// equations, for every node i: ground_i u_i + sum over its edges of conductance (u_i - u_other) = current_i.
// The nodes of one side (hubs) touch only the other side (kept), so they go first; what is left is dense in
// the kept nodes alone: a mesh (mesh.h, mesh_columns.h).
#pragma once

#include <cstdint>

#include "algorithms/mesh.h"
#include "algorithms/ordered_sum.h"
#include "host_device.h"

namespace isoload {

template <class Real>
struct NetworkWorkspace {
  MeshWorkspace<Real> mesh;
  Real *star, *part;  // [hubs] all that a hub conducts; [edges] an edge's part of its hub's
};

// Per node of each side: currents that become potentials.
template <class Real>
struct Flow {
  Real *left, *right;
};

template <class Real, class Team, class Mesh>
class Network {
 public:
  // Edges are numbered right node by right node, and there by their left nodes. No barrier last.
  ISOLOAD_HD Network(Team& team, OrderedSum<Real, Team>& sum, NetworkSide left, NetworkSide right,
                     const NetworkWorkspace<Real>& workspace)
      : team_(team),
        left_kept_(left.size <= right.size),
        kept_(left_kept_ ? left : right),
        hubs_(left_kept_ ? right : left),
        ws_(workspace),
        mesh_(team, sum, kept_.size, workspace.mesh) {
    stars_.left = left, stars_.right = right;
    stars_.kept = kept_, stars_.hubs = hubs_, stars_.left_kept = left_kept_;
    mesh_.prepare(left, right);
  }

  // conductance [edges], grounds per node; all from before the last barrier. A barrier on the way.
  ISOLOAD_HD void factor(const Real* conductance, const Real* left_ground, const Real* right_ground) {
    const Real* hub_ground = left_kept_ ? right_ground : left_ground;
    stars_.conductance = conductance, stars_.part = ws_.part;
    stars_.kept_ground = left_kept_ ? left_ground : right_ground, stars_.hub_ground = hub_ground;
    team_.for_each(hubs_.size, [&](int h) {
      const Real star = hubs_.total(h, hub_ground[h], [&](int k) { return conductance[k]; });
      ws_.star[h] = star;
      ISOLOAD_ROLLED
      for (int i = hubs_.first[h]; i < hubs_.first[h + 1]; ++i) {
        const int k = hubs_.edge(i);
        ws_.part[k] = conductance[k] / star;
      }
    });
    team_.sync();
    mesh_.factor(stars_);
  }

  // Of the first `flows`, all from before the last barrier. A barrier last.
  ISOLOAD_HD void solve(const Flow<Real> (&of)[kFlows], int flows) {
    Real *kept[kFlows], *hub[kFlows];
    for (int f = 0; f < kFlows; ++f) {
      kept[f] = left_kept_ ? of[f].left : of[f].right;
      hub[f] = left_kept_ ? of[f].right : of[f].left;
    }
    for_nodes(kept_.size, flows, [&](int a, int f) {
      Real *const mine = f == 0 ? kept[0] : kept[1], *const other = f == 0 ? hub[0] : hub[1];
      mine[a] = kept_.total(a, mine[a], [&](int k) { return ws_.part[k] * other[hubs_.node[k]]; });
    });
    team_.sync();
    mesh_.solve(kept, flows);
    for_nodes(hubs_.size, flows, [&](int h, int f) {
      Real *const mine = f == 0 ? hub[0] : hub[1], *const other = f == 0 ? kept[0] : kept[1];
      const Real* conductance = stars_.conductance;
      mine[h] =
          hubs_.total(h, mine[h], [&](int k) { return conductance[k] * other[kept_.node[k]]; }) / ws_.star[h];
    });
    team_.sync();
  }

 private:
  // body(node, f) for nodes of one side and f < flows; each flow has warps of its own.
  template <class F>
  ISOLOAD_HD void for_nodes(int n, int flows, F&& body) {
    const int stride = team_.size() == 1 ? n : (n + 31) / 32 * 32;
    team_.for_each(flows == 1 ? n : stride + n, [&](int i) {
      const int f = i >= stride, node = f == 0 ? i : i - stride;
      if (node < n) body(node, f);
    });
  }

  Team& team_;
  const bool left_kept_;
  const NetworkSide kept_, hubs_;
  const NetworkWorkspace<Real> ws_;
  Stars<Real> stars_{};
  Mesh mesh_;
};

}  // namespace isoload
