// The CUDA side of every op on plain device pointers; the problems are those of csrc/cpu.
//
// A launcher enqueues one to three kernels on `stream` (a cudaStream_t), reads nothing back and allocates
// nothing. It returns null, or what CUDA refused. Values are not checked before: an id, slot or rank out of
// range counts as -1, a copy beyond its share goes to slot -1, and a problem that the planner refuses gets
// quota 0, peak and bound -1; of plan_lp: split 0, primal and dual -1, status broke_down; of plan_fill:
// the placement as it was. Each sets its bit of the device's error word. `global` is the
// caller's buffer; the functions in bytes give its size, 0 where shared memory does.
#pragma once

#include <cstdint>

#include "algorithms/plan_exact_share.h"
#include "cpu/cpu.h"
#include "ops/list.h"

namespace isoload::cuda {

using cpu::Route;
using cpu::SharedAppend;
using cpu::SharedRoute;

// The current device's error word, for kernels.
int32_t* error_word();
// taken [1] becomes the error word, which becomes 0.
const char* device_errors(int32_t* taken, void* stream);

// out.counts: or null, where the parts are wanted alone.
template <class Id>
const char* count(const Id* ids, int64_t T, int K, int num_routed, int num_shared, Id* columns,
                  const cpu::Counts& out, void* stream);

// Planners (planner.h, planner.cuh). B layers, one block each; a problem and its result are those of layer 0,
// the others follow without a gap. bytes: of all B.
template <class Planner>
int64_t plan_bytes(const typename Planner::Problem& problem, int64_t B);
template <class Planner>
const char* plan(const typename Planner::Problem& problem, const typename Planner::Result& result, int64_t B,
                 void* global, void* stream);

// The launcher of a planner, here or (extern) in another file.
#define ISOLOAD_LAUNCHER(extern_, Planner)                                                             \
  extern_ template int64_t plan_bytes<Planner>(const Planner::Problem&, int64_t);                      \
  extern_ template const char* plan<Planner>(const Planner::Problem&, const Planner::Result&, int64_t, \
                                             void*, void*);

// spare, totals: [W] on the host. At most `blocks` blocks, so that a GEMM beside them keeps its processors.
const char* borrow(const Borrowing& in, const Rows* spare, int64_t blocks, void* stream);

// totals: num_rows rows each; a home beyond them gets nothing.
template <class Value, class Total>
const char* borrow_backward(const Borrowing& in, const Rows* totals, int64_t num_rows, int64_t blocks,
                            void* stream);

// ids [T, K] to counts [E] and slots, as cpu::balance_own: few of them in one kernel.
int64_t balance_own_bytes(int64_t T, int K, const OwnProblem& in);
template <class Id>
const char* balance_own(const Id* ids, int64_t T, int K, const OwnProblem& in, int32_t* counts, Id* slots,
                        void* global, void* stream);
int64_t balance_same_bytes(int64_t T, int K, const ExactProblem& in);
template <class Id>
const char* balance_same(const Id* ids, int64_t T, int K, const ExactProblem& in, int32_t* loads,
                         const ExactResult& out, Id* slots, void* global, void* stream);

int64_t route_bytes(const Route& in);
template <class Id>
const char* route(const Route& in, const Id* ids, Id* slots, void* global, void* stream);

template <class Id>
const char* route_sampled(const Id* ids, int64_t n, int E, const ReplicaTables& tables, const float* weights,
                          const Stream& words, Id* slots, void* stream);

int64_t route_shared_bytes(const SharedRoute& problem);
template <class Id, class Out>
const char* route_shared(const SharedRoute& problem, const Id* slots, Out* out, void* global, void* stream);

template <class Id>
const char* route_shared_sampled(const Id* slots, int64_t T, int K, const SharedDraw& draw, int32_t* ranks,
                                 void* stream);

template <class Id, class Weight>
const char* append_shared_expert(const SharedAppend<Id, Weight>& in, void* stream);

int64_t number_rows_bytes(const cpu::RowSpace& space);
template <class Slot>
const char* number_rows(const Slot* slots, const cpu::RowSpace& space, int32_t* ranks, int32_t* numbers,
                        int64_t* counts, void* global, void* stream);

template <class Slot, class Weight>
const char* pack_rows(const cpu::Packing<Slot, Weight>& in, void* stream);

// More copies than places: those are absent, and the error word says so.
int64_t group_copies_bytes(const cpu::CopyGroup& group);
template <class Slot>
const char* group_copies(const Slot* slots, const cpu::CopyGroup& group, const cpu::Groups& out, void* global,
                         void* stream);

}  // namespace isoload::cuda
