"""What the ops of tokens and of weights refuse, as support/refusals.py reads it."""

REFUSED = """
[balance_own]
recent=NONE[:2].long() | recent must be contiguous with 4 numbers, got [2]
topk_ids=ONE_ID.expand(2**21, 1), tables=ops.replica_tables(NONE.repeat(256), 1024, 1), recent=None,
    offset=NONE.repeat(256) | topk_ids must have at most 2093063 entries on 1024 ranks, got 2097152
[count balance_own balance_same route_sampled]
topk_ids=topk_ids.float() | topk_ids must be int32 or int64, got float32
topk_ids=topk_ids[0] | topk_ids must be [T, K], got [2]
topk_ids=torch.tensor([[0, 4]]) | topk_ids must be in -1..3, got 4
topk_ids=int32([0, 4]) | topk_ids must be in -1..3, got 4
topk_ids=int32([0, -2]) | topk_ids must be in -1..3, got -2
topk_ids=torch.tensor([[0, -2]]) | topk_ids must be in -1..3, got -2
topk_ids=torch.tensor([[2**32 + 1]]) | topk_ids must be in -1..3, got 4294967297
[count]
topk_ids=topk_ids.short() | topk_ids must be int32 or int64, got another dtype
num_shared=1, topk_ids=torch.tensor([[0, 4]]) | topk_ids must be in -1..3, got 4
num_shared=1, topk_ids=torch.tensor([[0, -2]]) | topk_ids must be in -1..3, got -2
num_shared=1, topk_ids=int32([0, 4]) | topk_ids must be in -1..3, got 4
num_shared=1, topk_ids=torch.tensor([[2**32 + 1]]) | topk_ids must be in -1..3, got 4294967297
num_experts=0 | num_experts must be at least 1, got 0
num_shared=-1 | num_shared must be in 0..1024, got -1
num_shared=1025 | num_shared must be in 0..1024, got 1025
topk_ids=ONE_ID.expand(2**30, 2) | topk_ids must have fewer than 2^31 entries, its num_shared=0 more columns
    included, got 2147483648
topk_ids=ONE_ID.expand(2**21, 1), num_shared=1024 | topk_ids must have fewer than 2^31 entries, its
    num_shared=1024 more columns included, got 2149580800
[balance_own balance_same]
topk_ids=topk_ids + 1 | topk_ids must be of experts with a replica, got 3
[balance_own balance_same route route_sampled]
tables=OF_LAYERS | tables must be of one layer, got [3, 48]
[route]
counted=uncounted(IDS.float()) | topk_ids must be int32 or int64, got float32
counted=uncounted(IDS[0]) | topk_ids must be [T, K], got [2]
counted=uncounted(torch.tensor([[0, 4], [0, -1]])) | topk_ids must be in -1..3, got 4
counted=uncounted(torch.tensor([[0, -2], [0, -1]])) | topk_ids must be in -1..3, got -2
counted=uncounted(torch.tensor([[2**32, 1], [0, -1]])) | topk_ids must be in -1..3, got 4294967296
counted=uncounted(ONE_ID.int().expand(2**30, 2)) | topk_ids must have fewer than 2^31 entries, got 2147483648
send_counts=send_counts.long() | send_counts must be int32, got int64
send_counts=send_counts.view(1, 8) | send_counts must be [P], got [1, 8]
send_counts=send_counts[:7] | tables must be those of 4 experts in 7 slots
counted=counted._replace(numbers=counted.numbers.long()) | numbers must be int32, got int64
counted=counted._replace(numbers=int32([0, 0])) | numbers must have shape [2, 2], got [1, 2]
counted=counted._replace(parts=counted.parts.long()) | parts must be int32, got int64
counted=counted._replace(parts=int32([2, 1, 0])) | parts must have shape [1, 4], got [1, 3]
counted=counted._replace(parts=counted.parts.repeat_interleave(2, 1)[:, ::2]) | parts must have rows without
    gaps, got stride 2
counted=ops.count(torch.tensor([[0, 1], [0, 0]]), 4) | topk_ids must hold each expert as often as its share
    says, expert 0 does not
counted=ops.count(torch.tensor([[0, -1], [0, -1]]), 4) | topk_ids must hold each expert as often as its share
    says, expert 1 does not
send_counts=send_counts + 1 | topk_ids must hold each expert as often as its share says, expert 0 does not
send_counts=send_counts * 0 | topk_ids must hold each expert as often as its share says, expert 0 does not
[route]
counted=ops.count(ONE_ID, 1), send_counts=NONE, tables=empty_tables(0, 0, 4) | tables must be of at least 1
    expert, got 0
[route_sampled]
weights=weights.double() | weights must be float32, got float64
weights=weights[None] | weights must be [P], got [1, 8]
weights=weights[:7] | tables must be those of 4 experts in 7 slots
weights=changed(weights, 5, -1) | weights must be finite and not negative, got -1 for slot 5
weights=weights * NAN | weights must be finite and not negative, got nan for slot 0
weights=weights * INF | weights must be finite and not negative, got inf for slot 0
weights=reals(1, 0, 0, 1, 1, 1, 1, 1) | weights must be positive for a replica of every expert that is routed,
    expert 1 has none
step=torch.tensor(1).int() | step must be int64, got int32
step=torch.tensor([1, 2]) | step must have one element, got [2]
rank=-1 | rank must be in 0..1023, got -1
rank=1024 | rank must be in 0..1023, got 1024
[share]
quota=quota.float() | quota must be int32, got float32
quota=quota[:4] | tables must be those of 4 experts in 4 slots
tables=OF_LAYERS | tables must be of one layer, or of as many as
loads=loads[0] | loads must be per source rank, [..., 4, 4], got [4]
loads=loads[:2] | loads must be per source rank, [..., 4, 4], got [2, 4]
loads=loads[:, :3] | loads must be per source rank, [..., 4, 4], got [4, 3]
loads=loads[:0, :0], quota=NONE, tables=empty_tables(0, 0, 4) | loads must be of 1..1024 source ranks, got 0
loads=loads[None, None] | loads must be [R, E] or [L, R, E], got [1, 1, 4, 4]
quota=quota[None] | quota must be [P] or [L, P] like loads, got [1, 8]
loads=loads.expand(2, 4, 4), quota=quota.expand(2, 8), tables=OF_LAYERS | loads and quota must have one entry
    per layer (3), got [2, 4, 4] and [2, 8]
order='random' | order must be locality or rank_major, got 'random'
quota=changed(quota, 0, 2) | quota must conserve loads: that of expert 0 was not made from these loads
quota=changed(quota, 6, 0) | quota must conserve loads: that of expert 3 was not made from these loads
quota=changed(quota, 6, 8) | quota must conserve loads: that of expert 3 was not made from these loads
loads=loads - 100 | quota must conserve loads: that of expert 0 was not made from these loads
[route_shared]
slots=slots.float() | slots must be int32 or int64, got float32
slots=slots + 1 | slots must be in -1..7, got 8
slots=slots - 1 | slots must be in -1..7, got -2
source_quota=source_quota.long() | source_quota must be int32, got int64
source_quota=source_quota[None] | source_quota must be [R], got [1, 4]
source_quota=source_quota[:0] | source_quota must have 1..1024 ranks, got 0
source_quota=source_quota.new_zeros(1025) | source_quota must have 1..1024 ranks, got 1025
source_quota=-source_quota | source_quota must not be negative, got -1 for rank 0
source_quota=source_quota + 1 | source_quota must sum to num_shared copies of every token with a slot, 3, got
    7
num_shared=2 | source_quota must sum to num_shared copies of every token with a slot, 6, got 3
slots_per_rank=0 | slots_per_rank must be in 1..536870911, got 0
slots_per_rank=2**30 | slots_per_rank must be in 1..536870911, got 1073741824
num_shared=0 | num_shared must be in 1..1024, got 0
num_shared=1025 | num_shared must be in 1..1024, got 1025
slots=slots[:1, :0].expand(2**21, 0), num_shared=1024 | slots must have fewer than 2^31 shared copies
    (num_shared=1024 of every token), got 2147483648
[route_shared append_shared_expert number_rows route_shared_sampled]
slots=slots[0] | slots must be [T, K], got [2]
[route_shared_sampled append_shared_expert number_rows group_copies]
slots=slots.float() | slots must be int32 or int64, got float32
[route_shared_sampled]
slots=torch.empty(2**31, 0).int() | slots must have fewer than 2^31 tokens, got 2147483648
slots=slots - 2 | slots must be in -1..5, got -2
slots=slots + 1 | slots must be in -1..5, got 6
slots=slots + 2**32 | slots must be in -1..5, got 4294967296
load=load.float() | load must be int32 or int64, got float32
load=load[None] | load must be [R] with R in 1..1024, got [1, 3]
load=load[:0] | load must be [R] with R in 1..1024, got [0]
load=load.new_zeros(1025) | load must be [R] with R in 1..1024, got [1025]
load=int32(2, -1, 0) | load must be in 0..2^31-1, got -1 for rank 1
load=load.long() + 2**31 | load must be in 0..2^31-1, got 2147483650 for rank 0
tokens=None | tokens must be given for rule dynamic, got None
tokens=tokens.long() | tokens must be int32, got int64
tokens=tokens[:2] | tokens must have shape [3], got [2]
tokens=int32(0, 0, -4) | tokens must be in 0..2^31-1, got -4 for rank 2
slots_per_rank=0 | slots_per_rank must be in 1..715827882, got 0
rank=-1 | rank must be in 0..2, got -1
rank=3 | rank must be in 0..2, got 3
step=torch.ones(1) | step must be int64, got float32
step=ONE_ID[:0] | step must have one element, got [0, 1]
rule='exact' | rule must be static, dynamic, blog or blog_all, got exact
[append_shared_expert]
slots=slots - 2 | slots must be in -1..2^31-1, got -2
slots=slots + 2**31 | slots must be in -1..2^31-1, got 2147483648
weights=weights.half() | weights must be float32 or float64, got another dtype
weights=slots | weights must be float32 or float64, got int64
weights=weights[:1] | weights must have shape [2, 2], got [1, 2]
ranks=ranks.long() | ranks must be int32, got int64
ranks=ranks[:, 0] | ranks must be [2, n], got [2]
ranks=ranks[:1] | ranks must be [2, n], got [1, 1]
ranks=ranks - 2 | ranks must be -1 or more, got -2
routed_per_rank=0 | routed_per_rank must be in 1..2147483646, got 0
slots_per_rank=2 | slots_per_rank must be in 3..2^31-1 (routed_per_rank + 1 shared), got 2
slots_per_rank=2**31 | slots_per_rank must be in 3..2^31-1 (routed_per_rank + 1 shared), got 2147483648
slots_per_rank=2**30 | slots_per_rank must leave every slot below 2^31, got 1073741824, which makes slot
    2147483649
slots_per_rank=2**30, slots=slots % 2 | slots_per_rank must leave every slot below 2^31, got 1073741824, which
    makes slot 2147483650
slots=ONE_ID[:, :0].expand(2**21, 0), weights=torch.empty(2**21, 0), ranks=ranks[:1].expand(2**21, 1024) |
    slots and ranks must have fewer than 2^31 copies together, got 2147483648
weight=NAN | weight must be a finite float32, got nan
weight=1e300 | weight must be a finite float32, got 1e+300
[number_rows]
num_ranks=0 | num_ranks must be in 1..1024, got 0
slots_per_rank=0 | slots_per_rank must be at least 1 and leave every slot below 2^31, got 0
slots_per_rank=2**30 | slots_per_rank must be at least 1 and leave every slot below 2^31, got 1073741824
[group_copies]
slots=slots[0] | slots must be [N, K], got [2]
first=-1 | first must be at least 0, got -1
num_slots=-1 | num_slots must be in 0..2^31-1, got -1
num_places=5 | num_places must be in 0..4 (N*K), got 5
num_places=3 | num_places must be at least the number of copies present (4), got 3
[borrow borrow_backward]
slot_to_expert=slot_to_expert.view(2, 4) | slot_to_expert must be [P], got [2, 4]
slot_to_expert=slot_to_expert[:7] | slot_to_expert must have a multiple of num_ranks=2 slots, got 7
slot_to_expert=changed(slot_to_expert, 2, 4) | slot_to_expert must be in -1..3, got 4 in slot 2
slot_to_expert=changed(slot_to_expert, 2, -2) | slot_to_expert must be in -1..3, got -2 in slot 2
home=home.long() | home must be int32, got int64
home=home.flatten() | home must be [E, 2], got [8]
slot_to_expert=changed(slot_to_expert, 2, 3) | home must be (0..1, a row) for the borrowed expert 3, got (-1,
    -1)
home=changed(home, (2, 0), 2) | home must be (0..1, a row) for the borrowed expert 2, got (2, 0)
home=changed(home, (2, 1), -1) | home must be (0..1, a row) for the borrowed expert 2, got (1, -1)
peers=peers.int() | peers must be int64, got int32
peers=peers.view(1, 2) | peers must have shape [2, 1], got [1, 2]
peers=changed(peers, 1, 0) | peers must hold an address for rank 1, stack 0, got 0
rank=2 | rank must be in 0..1, got 2
blocks=0 | blocks must be in 1..65535, got 0
blocks=65536 | blocks must be in 1..65535, got 65536
[borrow_backward]
home=changed(home, (1, 1), 2) | home must be a row of totals (2 rows), got row 2 for expert 1
totals=[] | totals must hold at least one stack, got none
totals=[torch.ones(())] | totals must be [rows, ...], got [] in stack 0
totals=[torch.ones(2, 2).t()] | totals must be contiguous, got other strides in stack 0
totals=[torch.ones(2, 2), torch.ones(3, 2)] | totals must have as many rows in every stack (2), got 3 in stack
    1
spare_slots=5 | spare_slots must be in 0..4, got 5
dtype=torch.int32 | dtype must be float64, float32, bfloat16 or float16, got int32
totals=[torch.ones(2, 2).half()] | totals must be float32, got another dtype
totals=[torch.ones(2, 2).double()] | totals must be float32, got float64
dtype=torch.float64 | totals must be float64, got float32
[borrow]
spare=[] | spare must hold at least one stack, got none
spare=[torch.ones(())] | spare must be [rows, ...], got [] in stack 0
spare=[torch.ones(2, 2).t()] | spare must be contiguous, got other strides in stack 0
spare=[torch.ones(2, 2), torch.ones(3, 2)] | spare must have as many rows in every stack (2), got 3 in stack 1
spare=[torch.ones(5, 2)] | spare_slots must be in 0..4, got 5
[pack_rows]
slots=slots.float() | slots must be int32 or int64, got float32
slots=slots[0] | slots must be [T, K], got [4]
x=x[1:] | x must be [4, H], got [3, 16]
weights=weights.half() | weights must be float32 or float64, got another dtype
weights=weights[:, 1:] | weights must have shape [4, 4], got [4, 3]
rows=rows._replace(counts=rows.counts.int()) | counts must be int64, got int32
rows=rows._replace(counts=rows.counts[0]) | counts must be [2, R], got [2]
rows=rows._replace(ranks=rows.ranks.long()) | ranks must be int32, got int64
rows=rows._replace(ranks=rows.ranks + 2) | ranks must be in 0..2, got 3
rows=rows._replace(numbers=rows.numbers[1:]) | numbers must have shape [4, 2], got [3, 2]
rows=rows._replace(numbers=rows.numbers + 9) | numbers must be in 0..2 for rank 0, got 9
num_rows=7 | num_rows must be 6 (the rows of all ranks), got 7
capacity=1, num_rows=2 | counts must be in 0..1 rows to each rank, got 3
capacity=-1 | capacity and num_rows must be at least 0, got -1 and 6
slots_per_rank=0 | slots_per_rank must be at least 1 and leave every slot below 2^31, got 0
"""
