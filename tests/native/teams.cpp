// Runs every single-source planner with one lane and with N threads on random instances: the answers must be
// the same bits and keep what a plan promises. Under ThreadSanitizer a missing barrier is reported as a data
// race.
//   teams THREADS INSTANCES SEED ROOM
// Prints one line. On the first wrong answer that line names the instance, and the exit code is 1.
#include <cstdio>
#include <cstdlib>
#include <thread>

#include "answers.h"
#include "team.h"

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
    for (int i = 0; i < 4 && to_.exact().ok(); ++i) share(i);
    relax(to_.relaxed);
    relax(to_.relaxed_double);
  }

 private:
  template <int W>
  void solve(int i) {
    const bool cut = i == Answers::kCut;
    const ExactProblem problem{
        .R = in_.R,
        .E = in_.E,
        .S = in_.S,
        .tables = tables(),
        .loads = cut ? in_.summed.data() : in_.loads.data(),
        .num_sources = cut ? 1 : in_.R,
        .fixed = in_.fixed.empty() ? nullptr : in_.fixed.data(),
        .ticks = in_.ticks.empty() ? nullptr : in_.ticks.data(),
        .tolerance_ppm = cut ? in_.tolerance_ppm : 0,
        .sweeps = in_.sweeps,
        .budget = cut ? in_.budget : INT_MAX,
    };
    const auto workspace = ExactWorkspace<W>::at(to_.workspace.data(), in_.R, in_.E);
    SolvedPlan& plan = to_.plans[i];
    const ExactResult out{plan.quota.data(), &plan.certificate[0], &plan.certificate[1], plan.telemetry};
    const PlanStatus status = ExactSolver<W, Team>(team_, problem, workspace, out.quota).solve(out);
    const uint64_t seen = 3 * uint64_t(*out.peak) + 5 * uint64_t(*out.bound) + 7 * uint64_t(status);
    if (team_.rank() == 0) plan.status = status;
    finish(plan.quota, seen);
  }

  void share(int i) {
    const bool one_row = i % 2 == 1;
    const ShareProblem problem{
        .R = in_.R,
        .E = in_.E,
        .S = in_.S,
        .per_node = i < 2 ? in_.ranks_per_node : in_.R,
        .locality = i < 2,
        .tables = tables(),
        .loads = in_.loads.data(),
        .quota = to_.exact().quota.data(),
        .first_row = one_row ? in_.row : 0,
        .last_row = one_row ? in_.row + 1 : in_.R,
    };
    Buffer& out = to_.shares[i];
    auto* workspace = reinterpret_cast<int32_t*>(to_.workspace.data());
    const bool fits = Share<Team>(team_, problem, workspace, out.data()).run() < 0;
    if (team_.rank() == 0) to_.shared[i] = fits;
    finish(out, fits);
  }

  template <class Real>
  void relax(RelaxedPlan<Real>& plan) {
    const int P = in_.P();
    const std::vector<Real> base(in_.fixed.begin(), in_.fixed.end());
    std::vector<Real> speeds;  // every seventh rank stands still
    for (const int32_t ticks : in_.ticks) speeds.push_back(ticks % 7 ? 1024 / Real(ticks) : Real(0));
    const LpProblem<Real> problem{
        .R = in_.R,
        .E = in_.E,
        .S = in_.S,
        .tables = tables(),
        .loads = in_.loads.data(),
        .num_sources = in_.R,
        .speeds = speeds.empty() ? nullptr : speeds.data(),
        .base = base.empty() ? nullptr : base.data(),
        .tolerance = static_cast<Real>(in_.tolerance_ppm * 1e-6),
        .iterations = in_.sweeps,
    };
    const LpWorkspace<Real> workspace(to_.workspace.data(), in_.R, in_.E, P);
    Real *split = plan.split(), *certificate = split + P;
    int32_t* numbers = plan.numbers(P);
    const bool ok = LpSolver<Real, Team>(team_, problem, workspace)
                        .solve({split, certificate, certificate + 1, numbers, numbers + 1});
    const uint64_t seen = ok ? numbers[0] + 2 * numbers[1] + 4 : 0;
    if (team_.rank() == 0) plan.ok = ok;
    finish(plan.words, seen);
    if (!ok) return;
    const RoundingProblem<Real> rounding{in_.R, in_.E, in_.S, tables(), in_.loads.data(), in_.R, split};
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
  Answers one, many;
  int refused = 0, augmented = 0, raised = 0, cut = 0,
      converged = 0;  // instances on which this part of the solver had work
  bool failed = false;

  void start(int k) {
    instance = draw(seed * 1000003 + k, room);
    one.poison(instance, 0x7f);
    many.poison(instance, 0x80);  // another: equal answers must not come from equal leftovers
    SerialTeam alone;
    Lane<SerialTeam>(alone, instance, one).run();
  }

  void check(int k) {
    if (const char* wrong = answers_error(instance, one, many)) {
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
  }
};

// Lane 0 also draws, solves alone and compares, while the others sleep at a barrier.
void lane(Run& run, ThreadTeam::Group& group, int rank) {
  ThreadTeam team(group, rank);
  for (int k = 0; k < run.instances && !run.failed; ++k) {
    if (rank == 0) run.start(k);
    team.sync();
    Lane<ThreadTeam>(team, run.instance, run.many).run();
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
      "%d converged\n",
      threads, run.instances, run.refused, run.augmented, run.raised, run.cut, run.converged);
  return 0;
}
