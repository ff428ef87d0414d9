// share: one block of eight warps per layer of the batch. A quota that was not made from the loads gives 0.
//
// The algorithm reads loads, quota and tables over and over, a value at a time. Where they fit, the block
// fetches all of them into shared memory first, so that global memory is waited for once.
#include "algorithms/share.h"
#include "cuda/cuda.h"
#include "cuda/fetch.cuh"
#include "cuda/launch.cuh"

namespace isoload::cuda {
namespace {

using ShareTeam = BlockTeam<8, true>;

struct Sizes {  // in int32
  int64_t workspace, loads, quota, tables;
  int64_t left;  // of the workspace the last ones: what sources still have, where loads are not used up
  bool fetched;  // all fits into shared memory

  static Sizes of(const ShareProblem& in, ShareOf of) {
    const int64_t E = in.E, P = int64_t(in.R) * in.S;
    Sizes s{share_workspace(in), in.R * E, P, ReplicaTables::size(E, P), 0, false};
    s.fetched = s.bytes() + s.input_bytes() <= shared_limit();
    if (!s.fetched && of != ShareOf::one_row) s.left = s.loads, s.workspace += s.left;
    return s;
  }
  __host__ __device__ int64_t bytes() const { return workspace * int64_t(sizeof(int32_t)); }
  int64_t input_bytes() const { return (loads + quota + tables) * int64_t(sizeof(int32_t)); }
};

// The problem with its inputs in shared memory, `at` on.
__device__ void fetch_inputs(ShareTeam& team, ShareProblem& problem, const Sizes& sizes, int32_t* at) {
  int32_t *const quota = at + sizes.loads, *const tables = quota + sizes.quota;
  fetch(team, problem.loads, sizes.loads, at);
  fetch(team, problem.quota, sizes.quota, quota);
  fetch(team, problem.tables.header, sizes.tables, tables);
  wait_for_fetched(team);
  problem.loads = at, problem.quota = quota;
  problem.tables = ReplicaTables::at(tables, problem.E, sizes.quota);
}

__global__ void __launch_bounds__(ShareTeam::kLanes, 1)
    share_kernel(ShareProblem problem, Sizes sizes, ShareOf of, int rank, const int64_t* peaks, int32_t* out,
                 void* global, int32_t* errors) {
  take_turn();
  __shared__ ShareTeam::Group group;
  ShareTeam team(group);
  const int64_t b = blockIdx.x, R = problem.R, E = problem.E, P = R * problem.S;
  problem.tables = problem.tables.layer(b, E, P);
  problem.loads += b * R * E;
  problem.quota += b * P;
  const int64_t size = of == ShareOf::one_row ? P : of == ShareOf::all_rows ? R * P : R * R;
  out += b * size;
  auto* const workspace = static_cast<int32_t*>(block_workspace(global, sizes.bytes()));
  int32_t* const behind = workspace + sizes.workspace;
  int32_t* const left = sizes.fetched ? behind : behind - sizes.left;
  if (sizes.fetched) fetch_inputs(team, problem, sizes, behind);
  Share<ShareTeam> solver(team, problem, workspace);
  const bool refused = peaks ? peaks[b] < 0 : solver.check() >= 0;
  if (refused) {
    team.for_each(size, [&](int i) { out[i] = 0; });
    if (team.rank() == 0 && !peaks) report(errors, kShareQuota);
    return;
  }
  if (peaks) solver.trust();
  if (of == ShareOf::one_row) {
    solver.one_row(rank, out);
  } else if (of == ShareOf::all_rows) {
    solver.all_rows(out, left);
  } else {
    solver.all_ranks(out, left);
  }
}

}  // namespace

int64_t share_bytes(const ShareProblem& problem, ShareOf of, int64_t B) {
  return global_bytes(B, Sizes::of(problem, of).bytes());
}

const char* share(const ShareProblem& problem, ShareOf of, int rank, const int64_t* peaks, int32_t* out,
                  int64_t B, void* global, void* stream) {
  const Sizes sizes = Sizes::of(problem, of);
  const int64_t bytes = global ? 0 : sizes.bytes() + (sizes.fetched ? sizes.input_bytes() : 0);
  return launch(share_kernel, B, ShareTeam::kLanes, bytes, stream, problem, sizes, of, rank, peaks, out,
                global, error_word());
}

}  // namespace isoload::cuda
