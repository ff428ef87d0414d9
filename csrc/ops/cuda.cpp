// The same functions for CUDA tensors. Compiled only where csrc/cuda is built in.
#include <torch/csrc/stable/library.h>

#include "ops/ops.h"

STABLE_TORCH_LIBRARY_IMPL(isoload, CUDA, m) {
  m.impl("count", TORCH_BOX(&isoload::ops::count));
  m.impl("replica_tables", TORCH_BOX(&isoload::ops::replica_tables));
  m.impl("plan_exact", TORCH_BOX(&isoload::ops::plan_exact));
  m.impl("plan_active", TORCH_BOX(&isoload::ops::plan_active));
  m.impl("plan_lp", TORCH_BOX(&isoload::ops::plan_lp));
  m.impl("round_split", TORCH_BOX(&isoload::ops::round_split));
  m.impl("plan_spill", TORCH_BOX(&isoload::ops::plan_spill));
  m.impl("borrow", TORCH_BOX(&isoload::ops::borrow));
  m.impl("borrow_backward", TORCH_BOX(&isoload::ops::borrow_backward));
  m.impl("share", TORCH_BOX(&isoload::ops::share));
  m.impl("share_by_rank", TORCH_BOX(&isoload::ops::share_by_rank));
  m.impl("share_alone", TORCH_BOX(&isoload::ops::share_alone));
  m.impl("route", TORCH_BOX(&isoload::ops::route));
  m.impl("plan_waterfill", TORCH_BOX(&isoload::ops::plan_waterfill));
  m.impl("route_shared", TORCH_BOX(&isoload::ops::route_shared));
  m.impl("route_sampled", TORCH_BOX(&isoload::ops::route_sampled));
  m.impl("append_shared_expert", TORCH_BOX(&isoload::ops::append_shared_expert));
  m.impl("route_shared_sampled", TORCH_BOX(&isoload::ops::route_shared_sampled));
  m.impl("device_errors", TORCH_BOX(&isoload::ops::device_errors));
}
