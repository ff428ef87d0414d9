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
  // The edges of a right node are in the order of their left nodes. A barrier last.
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

  // conductance [edges], grounds per node; all from before the last barrier. A barrier last.
  ISOLOAD_HD void factor(const Real* conductance, const Real* left_ground, const Real* right_ground) {
    const Real* hub_ground = left_kept_ ? right_ground : left_ground;
    stars_.conductance = conductance, stars_.part = ws_.part;
    stars_.kept_ground = left_kept_ ? left_ground : right_ground, stars_.hub_ground = hub_ground;
    team_.for_each(hubs_.size, [&](int h) {
      Real star = hub_ground[h];
      for (int i = hubs_.first[h]; i < hubs_.first[h + 1]; ++i) star += conductance[hubs_.list[i]];
      ws_.star[h] = star;
      for (int i = hubs_.first[h]; i < hubs_.first[h + 1]; ++i)
        ws_.part[hubs_.list[i]] = conductance[hubs_.list[i]] / star;
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
    team_.for_each(kept_.size, [&](int a) {
      Real current[kFlows];
      for (int f = 0; f < kFlows; ++f) current[f] = f < flows ? kept[f][a] : 0;
      for (int i = kept_.first[a]; i < kept_.first[a + 1]; ++i) {
        const int k = kept_.list[i], h = hubs_.node[k];
        const Real part = ws_.part[k];
        for (int f = 0; f < kFlows; ++f)
          if (f < flows) current[f] += part * hub[f][h];
      }
      for (int f = 0; f < kFlows; ++f)
        if (f < flows) kept[f][a] = current[f];
    });
    team_.sync();
    mesh_.solve(kept, flows);
    team_.for_each(hubs_.size, [&](int h) {
      Real current[kFlows];
      for (int f = 0; f < kFlows; ++f) current[f] = f < flows ? hub[f][h] : 0;
      for (int i = hubs_.first[h]; i < hubs_.first[h + 1]; ++i) {
        const int k = hubs_.list[i], a = kept_.node[k];
        const Real conductance = stars_.conductance[k];
        for (int f = 0; f < kFlows; ++f)
          if (f < flows) current[f] += conductance * kept[f][a];
      }
      for (int f = 0; f < kFlows; ++f)
        if (f < flows) hub[f][h] = current[f] / ws_.star[h];
    });
    team_.sync();
  }

 private:
  Team& team_;
  const bool left_kept_;
  const NetworkSide kept_, hubs_;
  const NetworkWorkspace<Real> ws_;
  Stars<Real> stars_{};
  Mesh mesh_;
};

}  // namespace isoload
