// Runs every single-source planner with one lane and with N threads on random instances: the answers must be
// the same bits and keep what a plan promises. Under ThreadSanitizer a missing barrier is a data race.
//   teams THREADS INSTANCES SEED ROOM
// Prints one line. On the first wrong answer that line names the instance, and the exit code is 1.
#include <cstdio>
#include <cstdlib>
#include <thread>

#include "answers.h"
#include "fill.h"
#include "filling.h"
#include "team.h"
#include "waterfill.h"

namespace isoload {

// One lane's way through an instance.
template <class Team>
class Lane {
 public:
  Lane(Team& team, const Instance& in, Answers& answers) : team_(team), in_(in), to_(answers) {}

  void run() {
    replica_tables(team_, in_.slot_to_expert.data(), in_.R, in_.E, in_.S,
                   MutableReplicaTables::at(to_.tables.data(), in_.E, in_.P()),
                   reinterpret_cast<uint64_t*>(to_.workspace.data()));
    finish(to_.tables, 0);
    if (Answers::fits(in_, 0)) solve<1>(0);
    if (Answers::fits(in_, 1)) solve<2>(1);
    solve<4>(2);
    solve<4>(Answers::kCut);
    for (int i = 0; i < 6 && to_.exact().ok(); ++i) share(i);
    if (to_.exact().ok()) solve_active();
    finish(to_.own, split_own(team_, in_, tables(), to_.workspace.data(), to_.own.data()));
    relax(to_.relaxed);
    relax(to_.relaxed_double);
  }

  void run(const Filling& filling, Filled& filled) {
    LevelFillProblem problem{fill_of(filling)};
    problem.start = filling.start.empty() ? nullptr : filling.start.data();
    problem.capacity_ppm = filling.capacity_ppm, problem.threshold_ppm = filling.threshold_ppm;
    problem.per_expert = filling.per_expert, problem.min_chunk = filling.min_chunk;
    problem.near_import = filling.near_import, problem.far_import = filling.far_import;
    problem.near_export = filling.near_export, problem.far_export = filling.far_export;
    problem.within = filling.within;
    const auto workspace =
        LevelFillWorkspace::at(to_.workspace.data(), in_.R, in_.E, in_.R * filling.S, filling.spare);
    const FillResult out{filled.slot_to_expert.data(), filled.telemetry};
    const bool fits = LevelFill<Team>(team_, problem, workspace, out).run();
    if (team_.rank() == 0) filled.fits = fits;
    finish(filled.slot_to_expert, fits ? 1 + uint64_t(filled.telemetry[0]) : 0);
  }

  // top_up of what plan_fill left.
  void run(const Filling& filling, const Filled& begun, ToppedUp& topped) {
    FillProblem problem = fill_of(filling);
    if (begun.fits) problem.slot_to_expert = begun.slot_to_expert.data();
    const FillWorkspace workspace = FillWorkspace::at(to_.workspace.data(), in_.R, in_.E);
    problem.within = filling.within;
    const FillResult out{topped.slots.data(), topped.telemetry};
    const bool fits = TopUp<Team>(team_, problem, workspace, out).run();
    if (team_.rank() == 0) topped.fits = fits;
    finish(topped.slots, fits ? 1 + uint64_t(topped.telemetry[0]) : 0);
  }

  void run(const Pouring& pour, AllPoured& all) {
    if (Answers::fits(in_, 0))
      solve<1>(pour, all[0]);
    else if (Answers::fits(in_, 1))
      solve<2>(pour, all[0]);
    else
      solve<4>(pour, all[0]);
    solve<4>(pour, all[1]);
  }

 private:
  SplitProblem split() const { return {in_.R, in_.E, in_.S, tables(), in_.loads.data(), in_.R}; }
  const int32_t* fixed() const { return in_.fixed.empty() ? nullptr : in_.fixed.data(); }
  const int32_t* ticks() const { return in_.ticks.empty() ? nullptr : in_.ticks.data(); }

  FillProblem fill_of(const Filling& filling) const {
    return {
        .R = in_.R,
        .E = in_.E,
        .S = filling.S,
        .per_node = in_.ranks_per_node,
        .spare = filling.spare,
        .loads = in_.loads.data(),
        .fixed = fixed(),
        .num_sources = in_.R,
        .slot_to_expert = filling.slot_to_expert.data(),
        .home_slot = filling.home_slot.data(),
        .alive = filling.alive.empty() ? nullptr : reinterpret_cast<const bool*>(filling.alive.data()),
        .within = false,
    };
  }

  template <int W>
  void solve(int i) {
    const bool cut = i == Answers::kCut;
    ExactProblem problem{split()};
    if (cut) problem.loads = in_.summed.data(), problem.num_sources = 1;
    problem.objective = cut && in_.objective == Objective::local ? Objective::spread : in_.objective;
    problem.per_node = in_.ranks_per_node, problem.fixed = fixed(), problem.ticks = ticks();
    problem.pour = in_.pour.empty() ? nullptr : in_.pour.data();
    problem.tolerance_ppm = cut ? in_.tolerance_ppm : 0;
    problem.sweeps = in_.sweeps, problem.budget = cut ? in_.budget : INT_MAX;
    const auto workspace = ExactWorkspace<W>::at(to_.workspace.data(), in_.R, in_.E);
    SolvedPlan& plan = to_.plans[i];
    const ExactResult out{plan.quota.data(), &plan.certificate[0], &plan.certificate[1], plan.telemetry};
    const bool planned = ExactSolver<W, Team>(team_, problem, workspace, out.quota).solve(out);
    if (team_.rank() == 0) plan.planned = planned;
    finish(plan.quota, 3 * uint64_t(*out.peak) + 5 * uint64_t(*out.bound) + 7 * uint64_t(planned));
  }

  template <int W>
  void solve(const Pouring& pour, Poured& poured) {
    const WaterfillProblem problem{
        .R = in_.R,
        .per_node = in_.ranks_per_node,
        .per_token = pour.per_token,
        .copies = pour.copies.data(),
        .tokens = pour.tokens.data(),
        .ticks = ticks(),
        .limits = pour.limits.empty() ? nullptr : pour.limits.data(),
    };
    const auto workspace = WaterfillWorkspace<W>::at(to_.workspace.data(), in_.R);
    const WaterfillResult out{poured.share.data(), &poured.certificate[0], &poured.certificate[1]};
    Waterfill<W, Team> solver(team_, problem, workspace, out);
    const WaterfillStatus status = solver.solve();
    const bool ok = status == WaterfillStatus::ok;
    if (team_.rank() == 0) poured.status = status, poured.paths = solver.paths();
    finish(poured.share, ok ? 3 * uint64_t(*out.peak) + 5 * uint64_t(*out.bound) : uint64_t(status));
  }

  void share(int i) {
    const bool near = i < 3;
    const ShareProblem problem{
        .R = in_.R,
        .E = in_.E,
        .S = in_.S,
        .per_node = near ? in_.ranks_per_node : in_.R,
        .locality = near,
        .tables = tables(),
        .loads = in_.loads.data(),
        .quota = to_.exact().quota.data(),
    };
    Buffer& out = to_.shares[i];
    auto* workspace = reinterpret_cast<int32_t*>(to_.workspace.data());
    Share<Team> solver(team_, problem, workspace);
    const bool fits = solver.check() < 0;
    if (fits && i % 3 == 0) solver.all_rows(out.data(), workspace + share_workspace(problem));
    if (fits && i % 3 == 1) solver.one_row(in_.row, out.data());
    if (fits && i % 3 == 2) solver.all_ranks(out.data(), workspace + share_workspace(problem));
    if (team_.rank() == 0) to_.shared[i] = fits;
    team_.sync();  // which all rows and all ranks leave to the caller
    finish(out, fits);
  }

  void solve_active() {
    const ActiveProblem problem{split()};
    SolvedPlan& plan = to_.active;
    const auto workspace = ActiveWorkspace<4>::at(to_.workspace.data(), in_.R, in_.E);
    const ActiveResult out{plan.quota.data(), &plan.certificate[0], &plan.certificate[1], plan.telemetry};
    const bool planned = ActiveSolver<4, Team>(team_, problem, workspace, out).solve();
    if (team_.rank() == 0) plan.planned = planned;
    finish(plan.quota, 3 * uint64_t(*out.peak) + 5 * uint64_t(*out.bound) + 7 * uint64_t(planned) +
                           11 * uint64_t(out.telemetry[3]));
  }

  template <class Real>
  void relax(RelaxedPlan<Real>& plan) {
    const int P = in_.P();
    const std::vector<Real> base(in_.fixed.begin(), in_.fixed.end());
    const LpProblem<Real> problem{split(), base.empty() ? nullptr : base.data(),
                                  static_cast<Real>(in_.tolerance_ppm * 1e-6), in_.sweeps};
    const LpWorkspace<Real> workspace(to_.workspace.data(), in_.R, in_.E, P);
    Real *values = plan.split(), *certificate = values + P;
    int32_t* numbers = plan.numbers(P);
    const LpResult<Real> result{values, certificate, certificate + 1, numbers, numbers + 1};
    const bool ok = LpSolver<Real, Team>(team_, problem, workspace).solve(result);
    const uint64_t seen = ok ? numbers[0] + 2 * numbers[1] + 4 : 0;
    if (team_.rank() == 0) plan.ok = ok;
    finish(plan.words, seen);
    if (!ok) return;
    const RoundingProblem<Real> rounding{split(), values};
    const bool fits = Rounding<Real, Team>(team_, rounding, numbers + 2).run();
    if (team_.rank() == 0) plan.fits = fits;
    finish(plan.words, fits);
  }

  // A routine that returned has ended with a barrier: any lane may read what it wrote and reuse its
  // workspace. So every lane at once reads what another one wrote and spoils another's workspace. `result`
  // must be the same in all lanes, and so must be what they see together and what each of them sees after a
  // barrier.
  void finish(const Buffer& written, uint64_t result) {
    const int lanes = team_.size(), next = (team_.rank() + 1) % lanes;
    auto digest = [&](int first, int stride) {
      int64_t sum = 0;
      for (int i = first; i < static_cast<int>(written.size()); i += stride)
        sum += int64_t(written[i]) * (i + 1);
      return sum;
    };
    const int64_t part = digest(next, lanes);
    for (int i = next; i < static_cast<int>(to_.workspace.size()); i += lanes) to_.workspace[i] = 0x7f7f7f7f;
    const int64_t seen = team_.sum(part);
    const uint64_t ones = team_.any(result), zeros = team_.any(~result);
    const bool diverged = team_.any(seen != digest(0, 1) || (ones & zeros) != 0);
    if (team_.rank() == 0) to_.diverged |= diverged;
  }

  ReplicaTables tables() const { return ReplicaTables::at(to_.tables.data(), in_.E, in_.P()); }

  Team& team_;
  const Instance& in_;
  Answers& to_;
};

struct Run {
  int instances, room;
  uint64_t seed;
  Instance instance;
  Pouring pouring;
  Answers one, many;
  AllPoured one_poured, many_poured;
  Filling filling;
  Filled one_leveled, many_leveled;
  ToppedUp one_topped, many_topped;
  int refused = 0, augmented = 0, raised = 0, cut = 0;  // instances on which this part of the solver had work
  int converged = 0;                                    // of plan_lp
  int poured = 0, moved = 0, rerouted = 0;              // of plan_waterfill
  int lent = 0, sought = 0, full = 0;                   // of plan_fill
  int topped = 0;                                       // of top_up
  bool failed = false;

  void start(int k) {
    instance = draw(seed * 1000003 + k, room);
    one.poison(instance, 0x7f);
    many.poison(instance, 0x80);  // another: equal answers must not come from equal leftovers
    SerialTeam alone;
    pouring = draw_pouring(instance, seed * 1000003 + k);
    poison(one_poured, instance, 0x7f);
    poison(many_poured, instance, 0x80);
    Lane<SerialTeam> lane(alone, instance, one);
    lane.run();
    lane.run(pouring, one_poured);
    filling = draw_filling(instance, seed * 1000003 + k);
    one_leveled.poison(instance, filling, 0x7f);
    many_leveled.poison(instance, filling, 0x80);
    lane.run(filling, one_leveled);
    one_topped.poison(instance, filling, 0x7f);
    many_topped.poison(instance, filling, 0x80);
    lane.run(filling, one_leveled, one_topped);
  }

  void check(int k) {
    const char* wrong = answers_error(instance, one, many);
    if (!wrong) wrong = all_poured_error(instance, pouring, one_poured, many_poured);
    if (!wrong && !(one_leveled == many_leveled)) wrong = "the two teams level otherwise";
    if (!wrong) wrong = filled_error(instance, filling, one_leveled);
    if (!wrong && !(one_topped == many_topped)) wrong = "the two teams top up otherwise";
    if (!wrong) wrong = topped_up_error(instance, filling, one_leveled, one_topped);
    if (wrong) {
      failed = true;
      std::printf("instance %d of seed %llu: %s: %s\n", k, static_cast<unsigned long long>(seed), wrong,
                  instance.name.c_str());
    }
    const bool ok = one.exact().ok();
    refused += !ok;
    augmented += ok && one.exact().telemetry[1] > 0;
    raised += ok && one.exact().telemetry[2] > 0;
    converged += one.relaxed.ok && one.relaxed.numbers(instance.P())[0] > 0 &&
                 one.relaxed.numbers(instance.P())[1] == 0;
    cut += ok && one.plans[Answers::kCut].telemetry[3];
    const bool all_ok = one_poured[0].status == WaterfillStatus::ok;
    poured += all_ok;
    const bool leveled = one_leveled.fits, lends = one_leveled.telemetry[0] > 0;
    lent += leveled && lends && !filling.far_import;
    sought += leveled && lends && filling.far_import;
    full += leveled && (one_leveled.telemetry[4] & kAboveCapacity);
    topped += one_topped.fits && one_topped.telemetry[0] > one_leveled.telemetry[0];
    for (int i = 0; i < instance.R && all_ok; ++i)
      if (one_poured[0].share[i * instance.R + i] < pouring.per_token * pouring.tokens[i]) {
        ++moved;
        break;
      }
    rerouted += all_ok && one_poured[0].paths > 0;
  }
};

// Lane 0 also draws, solves alone and compares, while the others sleep at a barrier.
void lane(Run& run, ThreadTeam::Group& group, int rank) {
  ThreadTeam team(group, rank);
  for (int k = 0; k < run.instances && !run.failed; ++k) {
    if (rank == 0) run.start(k);
    team.sync();
    Lane<ThreadTeam> lane(team, run.instance, run.many);
    lane.run();
    lane.run(run.pouring, run.many_poured);
    lane.run(run.filling, run.many_leveled);
    lane.run(run.filling, run.one_leveled, run.many_topped);
    if (rank == 0) run.check(k);
    team.sync();
  }
}

}  // namespace isoload

int main(int argc, char** argv) {
  if (argc != 5) return std::puts("usage: teams THREADS INSTANCES SEED ROOM"), 2;
  const int threads = std::atoi(argv[1]);
  isoload::Run run;
  run.instances = std::atoi(argv[2]);
  run.seed = std::strtoull(argv[3], nullptr, 10);
  run.room = std::atoi(argv[4]);
  isoload::ThreadTeam::Group group(threads);
  std::vector<std::thread> lanes;
  for (int rank = 0; rank < threads; ++rank)
    lanes.emplace_back([&, rank] { isoload::lane(run, group, rank); });
  for (std::thread& lane : lanes) lane.join();
  if (run.failed) return 1;
  std::printf(
      "1 and %d lanes agree on %d instances: %d refused, %d augmented, %d raised, %d cut, "
      "%d converged, %d poured, %d moved, %d rerouted, %d lent, %d sought, %d full, "
      "%d topped\n",
      threads, run.instances, run.refused, run.augmented, run.raised, run.cut, run.converged, run.poured,
      run.moved, run.rerouted, run.lent, run.sought, run.full, run.topped);
  return 0;
}
