"""What the planners refuse, as support/refusals.py reads it."""

REFUSED = """
[plan_exact of_a_rank plan_active plan_lp round_split plan_joint]
loads=loads.long() | loads must be int32, got int64
[plan_fill top_up share]
loads=loads.long() | loads must be int32, got int64
[plan_exact plan_active plan_lp round_split]
loads=loads.view(1, 1, 4) | loads must be [E] or [4, E] per layer, got [1, 1, 4]
loads=loads[0] | loads must be [E] or [4, E] per layer, got []
loads=loads.expand(3, 4) | loads must be [E] or [4, E] per layer, got [3, 4]
[of_a_rank]
loads=loads[:2] | loads must be [E] or [4, E] per layer, got [2, 4]
loads=loads - 2 | loads must not be negative, got -1 for expert 0
loads=loads + MAX // 8 | loads, fixed and pour must sum to less than 2^31 copies
loads=loads[0] | loads must be per source rank, [4, 4] per layer, for send_counts, got the sum [4]
[plan_joint]
loads=loads[:2] | loads must be [E] or [4, E] per layer, got [2, 5]
loads=loads[:, :4] | tables must be those of 3 experts in 12 slots
loads=loads - int32(0, 1, 0, 0, 0) | loads must not be negative, got -1 for expert 1
loads=loads - int32(0, 0, 0, 0, 2) | loads must not be negative, got -2 for expert 4
loads=loads + MAX // 8 | loads must sum to less than 2^31 copies
tables=placed(0, 1, -1, 1, 2, -1, 2, 0, *[-1] * 4) | loads must be 0 for an expert without a replica, got
    copies for expert 3
loads=loads[0] | loads must be per source rank, [4, 4] per layer, got the sum [5]
num_shared=0 | num_shared must be in 1..1024, got 0
num_shared=1025 | num_shared must be in 1..1024, got 1025
first_shared=-1 | first_shared must be in 0..2 with num_shared=1, got -1
first_shared=3 | first_shared must be in 0..2 with num_shared=1, got 3
[plan_exact plan_active plan_lp]
loads=loads[:3] | tables must be those of 3 experts in 8 slots
loads=loads.expand(2, 4), tables=OF_LAYERS | loads must have one entry per layer (3), got [2, 4]
loads=int32(5, -1, 7, 8) | loads must not be negative, got -1 for expert 1
[round_split]
loads=loads.expand(3, 4, 4), tables=OF_LAYERS | split must have shape [3, 8], got [8]
loads=int32(5, 3, -2, 1) | loads must not be negative, got -2 for expert 2
loads=int32(MAX, 3, 2, 1) | loads must sum to less than 2^31 copies, got 2147483653
split=split.int() | split must be float32 or float64, got int32
split=split[:7] | split must have shape [8], got [7]
split=reals(2.5, NAN, 2, 2, 0, 2.5, 1, 0) | split must be finite and not negative, got nan for slot 1
split=reals(2.5, 1, 2, 3, -1, 2.5, 1, 0) | split must be finite and not negative, got -1 for slot 4
split=split / 5 | split must add up to the loads, got 1 for the 5 copies of expert 0
[plan_active plan_lp]
loads=int32(MAX, 1, 0, 0) | loads must sum to less than 2^31 copies, got 2147483648
[plan_exact]
loads=int32(MAX, 1, 0, 0) | loads, fixed and pour must sum to less than 2^31 copies
loads=int32(MAX, 0, 0, 0), fixed=int32(0, 0, 0, 1) | loads, fixed and pour must sum to less than 2^31 copies
pour=torch.tensor(MAX - 25).int() | loads, fixed and pour must sum to less than 2^31 copies, got 2147483648
fixed=torch.zeros(4) | fixed must be int32, got float32
fixed=int32(1, 2, 3) | fixed must have shape [4], got [3]
fixed=loads, loads=loads.expand(3, 4), tables=OF_LAYERS | fixed must have shape [3, 4], got [4]
tolerance=1001 | tolerance must be in 0..1000 (relative), got 1001
tolerance=NAN | tolerance must be in 0..1000 (relative), got nan
sweeps=2**31 | sweeps must be in 0..2^31-1, got 2147483648
objective='local' | loads must be per source rank, [4, 4] per layer, for objective local, got the sum [4]
pour=torch.tensor(1) | pour must be int32, got int64
pour=int32(1) | pour must have shape [], got [1]
pour=int32(1)[0], loads=loads.expand(3, 4), tables=OF_LAYERS | pour must have shape [3], got []
pour=int32(5, 0, -1), loads=loads.expand(3, 4), tables=OF_LAYERS | pour must not be negative, got -1
loads=loads.float() | loads must be int32, got float32
[plan_active]
loads=torch.stack([int32(MAX, 0, 0, 0)] * 4) | loads must sum to less than 2^31 copies, got 8589934588
[plan_exact of_a_rank plan_active plan_lp round_split]
tables=placed(*FEW) | loads must be 0 for an expert without a replica, got copies for expert 3
[plan_exact of_a_rank]
fixed=int32(0, 0, -1, 0) | fixed must not be negative, got -1 for rank 2
budget=-1 | budget must be at least 0, got -1
pour=torch.tensor(-3).int() | pour must not be negative, got -3
[plan_exact plan_waterfill plan_own]
ticks=torch.ones(4) | ticks must be int32, got float32
ticks=int32(1, 2) | ticks must have shape [4], got [2]
[plan_exact of_a_rank plan_joint plan_waterfill plan_own balance_own balance_same]
ticks=int32(1, 1, 0, 1) | ticks must be in 1..2^20, got 0 for rank 2
[plan_exact plan_waterfill]
ticks=int32(1, 1, 1, 2**20 + 1) | ticks must be in 1..2^20, got 1048577 for rank 3
[plan_exact of_a_rank plan_joint balance_same]
tolerance=-0.1 | tolerance must be in 0..1000 (relative), got -0.1
objective='best' | objective must be one of spread, local, got 'best'
[plan_exact of_a_rank plan_own balance_own]
sweeps=-1 | sweeps must be in 0..2^31-1, got -1
[plan_exact plan_waterfill share]
ranks_per_node=0 | ranks_per_node must divide 4, got 0
[plan_exact of_a_rank plan_joint balance_same plan_waterfill share]
ranks_per_node=3 | ranks_per_node must divide 4, got 3
[of_a_rank plan_joint share route_shared]
rank=-1 | rank must be in 0..3, got -1
rank=4 | rank must be in 0..3, got 4
[plan_lp]
dtype=torch.float16 | dtype must be torch.float32 or torch.float64, got torch.float16
base=reals(1, 1, 1, 1).double() | base must be float32, got float64
base=reals(1, 1, 1, 1), dtype=torch.float64 | base must be float64, got float32
base=reals(1, 1, INF, 1) | base must be finite and not negative, got inf for rank 2
base=loads | base must be float32, got int32
base=reals(1, 1, 1) | base must have shape [4], got [3]
base=reals(NAN, 0, 0, 0) | base must be finite and not negative, got nan for rank 0
base=reals(0, 0, -1, 0) | base must be finite and not negative, got -1 for rank 2
base=reals(1, 1, 1, 1), loads=loads.expand(3, 4), tables=OF_LAYERS | base must have shape [3, 4], got [4]
tolerance=-1e-3 | tolerance must be in 0..1 (relative), got -0.001
tolerance=1.5 | tolerance must be in 0..1 (relative), got 1.5
tolerance=NAN | tolerance must be in 0..1 (relative), got nan
iterations=-1 | iterations must be in 0..1000, got -1
iterations=1001 | iterations must be in 0..1000, got 1001
[plan_fill top_up]
loads=loads[:1] | loads must have shape [2, 4], got [1, 4]
home_slot=int32(0, 1, 3, 0) | home_slot must hold its expert, slot 0 does not hold expert 3
ranks_per_node=3 | ranks_per_node must divide 2, got 3
spare_slots=4 | spare_slots must be in 0..3, got 4
[plan_fill]
loads=int32(1, 2, 3) | loads must have shape [4], got [3]
slot_to_expert=slot_to_expert.view(1, 1, 6) | slot_to_expert must be [P] or [L, P], got [1, 1, 6]
home_slot=int32(0, 1, 3, 6) | home_slot must hold its expert, slot 6 does not hold expert 3
alive=torch.ones(3) > 0 | alive must have shape [2], got [3]
start=torch.zeros(6) | start must be int32, got float32
start=int32(9, 1) | start must have shape [6], got [2]
start=int32(4, -1, 0, 8, 10, 0) | start must not be negative, got -1 in slot 1
start=int32(3, 6, 1, 8, 10, 0) | start must be 0 in slots without a routed expert, got 1 in slot 2
start=int32(3, 6, 0, 8, 10, 0) | start must add up to the loads, got 1 copies too few of expert 0
within='rack' | within must be all or node, got 'rack'
capacity_factor=0.99 | capacity_factor must be in 1..1000, got 0.99
imbalance_threshold=-1.0 | imbalance_threshold must be in 0..1000, got -1.0
min_chunk=0 | min_chunk must be in 1..2147483647, got 0
import_costs=(-1, 0) | near_import must be in 0..1073741824, got -1
import_costs=(0, 2**31) | far_import must be in 0..1073741824, got 2147483648
export_costs=(-1, 0) | near_export must be in 0..1073741824, got -1
export_costs=(0, 2**31) | far_export must be in 0..1073741824, got 2147483648
[plan_fill top_up]
loads=-loads | loads must not be negative, got -1 for expert 1
loads=loads * 2**28 | loads and fixed must sum to less than 2^31 copies, got 7516192768
fixed=int32(0, -1) | fixed must not be negative, got -1 for rank 1
alive=NOBODY | alive must be true for at least one rank, got none
[plan_fill]
fixed=torch.zeros(2) | fixed must be int32, got float32
home_slot=home_slot.long() | home_slot must be int32, got int64
[plan_fill]
fixed=int32(1) | fixed must have shape [2], got [1]
slot_to_expert=int32(0, 1, 2, 2, 3, -1) | slot_to_expert must be -1 in the last spare_slots=1 slots of a rank,
    got 2 in slot 2
alive=int32(1, 1) | alive must be bool, got int32
[plan_fill top_up borrow borrow_backward]
slot_to_expert=slot_to_expert.long() | slot_to_expert must be int32, got int64
[plan_fill top_up]
slot_to_expert=slot_to_expert[:5] | slot_to_expert must have a multiple of num_ranks=2 slots, got 5
home_slot=home_slot[None] | home_slot must have as many dimensions as slot_to_expert
num_ranks=0, ranks_per_node=1 | num_ranks must be in 1..1024, got 0
[top_up]
within='rack' | within must be all or node, got 'rack'
spare_slots=-1 | spare_slots must be in 0..3, got -1
[plan_waterfill]
copies=copies.long() | copies must be int32, got int64
copies=copies[:3] | copies must be [R, R] or [L, R, R], got [3, 4]
copies=copies[0, 0] | copies must be [R, R] or [L, R, R], got []
copies=copies[:0, :0], tokens=tokens[:0] | copies must be of 1..1024 ranks, got 0
copies=copies.new_zeros(1025, 1025) | copies must be of 1..1024 ranks, got 1025
copies=copies - 4 | copies must not be negative, got -3 from rank 0 to 0
tokens=tokens.float() | tokens must be int32, got float32
tokens=tokens[:3] | tokens must have shape [4], got [3]
copies=copies.expand(3, 4, 4) | tokens must have shape [3, 4], got [4]
tokens=int32(1, 1, -5, 1) | tokens must not be negative, got -5 for rank 2
per_token=0 | per_token must be in 1..1024, got 0
per_token=1025 | per_token must be in 1..1024, got 1025
copies=changed(copies, (2, 1), MAX) | copies and per_token * tokens must sum to less than 2^31 copies, got
    2147483749
tokens=int32(2**30, 2**30, 0, 0), per_token=1024 | copies and per_token * tokens must sum to less than 2^31
    copies, got 2199023255625
limits=torch.ones(4) | limits must be int32, got float32
limits=int32(1, 2) | limits must have shape [4], got [2]
limits=int32(9, 9, 9, -1) | limits must not be negative, got -1 for rank 3
limits=int32(0, 9, 10, 10) | limits must hold the 30 shared copies of ranks 0..3, got 29
copies=copies.expand(40, 4, 4), tokens=changed(tokens.repeat(40, 1), (33, 1), -7) | tokens must not be
    negative, got -7 for rank 1
[plan_own]
counts=counts.long() | counts must be int32, got int64
counts=counts[None] | counts must be [E] per layer, got [1, 3]
counts=counts.expand(3, 3), tables=placed(0, 1, 2, 0, experts=3, layers=2), offset=offset.expand(2, 4) |
    counts must have one entry per layer (2), got [3, 3]
counts=-counts | counts must not be negative, got -3 for expert 0
counts=int32(1, 0, 0, 1), tables=LONE, recent=None, sent=None | counts must be 0 for an expert without a
    replica, got copies for expert 3
counts=int32(2**28, 2**28, 0) | counts and fixed must sum to at most 357913941 copies on 4 ranks, got
    536870912
offset=offset + 2**20 + 1 | offset must be in 0..2^20, got 1048577 for rank 0
fixed=NONE - 2 | fixed must not be negative, got -2 for rank 0
fixed=NONE[:3] | fixed must have shape [4], got [3]
recent=NONE | recent must be int64, got int32
recent=NONE.long() | recent must be contiguous with 3 numbers, got [4]
sent=NONE | sent must be int64, got int32
sent=NONE.long() | sent must be contiguous with 12 numbers, got [4]
[plan_own balance_own]
offset=offset - 1 | offset must be in 0..2^20, got -1 for rank 0
offset=offset[:3] | offset must have shape [4], got [3]
layer=-1 | layer must be in 0..2^31-1, got -1
source=4 | source must be in 0..3, got 4
[replica_tables]
slot_to_expert=slot_to_expert.float() | slot_to_expert must be int32, got float32
slot_to_expert=slot_to_expert.long() | slot_to_expert must be int32, got int64
slot_to_expert=slot_to_expert[0] | slot_to_expert must be [P] or [L, P], got []
slot_to_expert=slot_to_expert.view(1, 1, 4) | slot_to_expert must be [P] or [L, P], got [1, 1, 4]
num_ranks=1025 | num_ranks must be in 1..1024, got 1025
num_ranks=3 | slot_to_expert must have a multiple of num_ranks=3 slots, got 4
slot_to_expert=slot_to_expert[:0] | slot_to_expert must have a multiple of num_ranks=2 slots, got 0
num_experts=0 | num_experts must be at least 1, got 0
[replica_tables borrow borrow_backward]
num_ranks=0 | num_ranks must be in 1..1024, got 0
[plan_exact plan_lp]
loads=changed(loads.repeat(40, 1), (33, 1), -7), tables=placed(*SLOTS, layers=40) | loads must not be
    negative, got -7 for expert 1
"""
