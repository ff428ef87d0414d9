#include "latency.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <utility>

#include "findings.h"

namespace simt {
namespace {

// Cycles, about an H100's.
constexpr double kShared = 33, kL1 = 40, kL2 = 280, kSector = 32;
constexpr double kUse = 12;  // of a loaded value: address arithmetic, a compare
constexpr double kIssue = 4, kAtomic = 12, kCopy = 60;
constexpr double kBlockBarrier = 32, kWarpBarrier = 12, kShuffle = 26;

}  // namespace

Latency& latency() {
  static Latency all;
  return all;
}

void Latency::begin_launch() { worst_time_ = worst_high_ = 0, worst_barriers_ = 0, worst_.clear(); }

void Latency::begin_block() {
  lanes_.assign(machine.lanes, Lane{});
  warps_.assign((machine.lanes + 31) / 32, Path{});
  in_l1_.clear(), block_.clear();
  barriers_ = 0;
}

void Latency::spend(Lane& lane, double cycles, double high, void* pc) {
  lane.time += cycles, lane.high += high;
  lane.path.push_back({pc, cycles});
}

void Latency::access(const Access& access, Space space) {
  Lane& me = lanes_[machine.lane];
  const bool hit = space == Space::global && !in_l1_.insert(access.address / uintptr_t(kSector)).second;
  const double latency = space == Space::shared ? kShared : hit && !access.atomic ? kL1 : kL2;
  if (access.atomic || access.write) {
    me.group = -1;
    return spend(me, access.atomic ? kAtomic : kIssue, access.atomic ? latency : kIssue, access.pc);
  }
  const double more = me.group < 0 ? latency : std::max(latency - me.group, 0.0);
  me.group = std::max(me.group, latency);
  spend(me, more + kUse, latency + kUse, access.pc);
}

void Latency::start_copy(int lane, void* pc) {
  Lane& me = lanes_[lane];
  spend(me, kIssue, kIssue, pc);
  me.arrival = std::max(me.arrival, me.time + kL2 + kCopy);
}

void Latency::wait_for_copies(int lane) {
  Lane& me = lanes_[lane];
  const double more = std::max(me.arrival - me.time, 0.0);
  me.time += more, me.high += more, me.arrival = 0;
  if (more > 0 && !me.path.empty()) me.path.back().cycles += more;
}

void Latency::arrive(int lane, Meeting meeting, void* pc) {
  const double cost = meeting == Meeting::block  ? kBlockBarrier
                      : meeting == Meeting::warp ? kWarpBarrier
                                                 : kShuffle;
  lanes_[lane].group = -1;
  spend(lanes_[lane], cost, cost, pc);
}

int Latency::slowest(const std::vector<int>& of) const {
  return *std::max_element(of.begin(), of.end(),
                           [&](int a, int b) { return lanes_[a].time < lanes_[b].time; });
}

void Latency::open(Meeting meeting, const std::vector<int>& members) {
  const int last = slowest(members);
  const double time = lanes_[last].time;
  double high = 0;
  for (const int i : members) high = std::max(high, lanes_[i].high);
  if (meeting == Meeting::block) {
    ++barriers_;
    join_block(last);
  } else {
    Path& warp = warps_[last / 32];
    warp.insert(warp.end(), lanes_[last].path.begin(), lanes_[last].path.end());
    for (const int i : members) lanes_[i].path.clear();
  }
  for (const int i : members) lanes_[i].time = time, lanes_[i].high = high;
}

// The block's path goes on with what the slowest lane and, before, its warp did.
void Latency::join_block(int slowest) {
  for (const Path* path : {&warps_[slowest / 32], &lanes_[slowest].path})
    block_.insert(block_.end(), path->begin(), path->end());
  for (Path& path : warps_) path.clear();
  for (Lane& lane : lanes_) lane.path.clear();
}

void Latency::end_block() {
  std::vector<int> all(lanes_.size());
  std::iota(all.begin(), all.end(), 0);
  const int last = slowest(all);
  join_block(last);
  for (const Lane& lane : lanes_) worst_high_ = std::max(worst_high_, lane.high);
  if (lanes_[last].time <= worst_time_) return;
  worst_time_ = lanes_[last].time, worst_barriers_ = barriers_;
  std::swap(worst_, block_);
}

void Latency::end_launch() {
  std::map<void*, double> places;
  for (const Step& step : worst_) places[step.pc] += step.cycles;
  auto whole = [](double cycles) { return std::to_string(static_cast<int64_t>(cycles)); };
  paths_ += "launch|" + offset_of(machine.kernel) + '|' + std::to_string(machine.blocks) + '|' +
            std::to_string(machine.lanes) + '|' + whole(worst_time_) + '|' + whole(worst_high_) + '|' +
            std::to_string(worst_barriers_) + '\n';
  for (const auto& [pc, cycles] : places) paths_ += "place|" + offset_of(pc) + '|' + whole(cycles) + '\n';
}

std::string Latency::take_paths() { return std::exchange(paths_, {}); }

}  // namespace simt
