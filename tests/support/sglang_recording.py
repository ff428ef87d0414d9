"""What SGLang's recorder would write, made from known logical choices.

The truth (which expert every token chose) comes first and goes through a random map with replicas. So what is
read back is compared with the truth and not with another conversion.
"""

import numpy as np
import torch

LAYERS, DENSE, EXPERTS, SLOTS, RANKS, TOP_K, BUFFER_K = 5, (0, 3), 6, 12, 3, 2, 8
MOE = [layer for layer in range(LAYERS) if layer not in DENSE]


def random_map(rng):
    """[L, P]: every expert, replicas in the other slots, all shuffled."""
    replicas = rng.integers(0, EXPERTS, (LAYERS, SLOTS - EXPERTS))
    return rng.permuted(np.concatenate([np.tile(np.arange(EXPERTS), (LAYERS, 1)), replicas], axis=1), axis=1)


def random_choices(rng, tokens):
    """[tokens, L, BUFFER_K] experts as the recorder keeps them; every fifth token is padding."""
    ids = np.full((tokens, LAYERS, BUFFER_K), -1)
    shuffled = rng.permuted(np.tile(np.arange(EXPERTS), (tokens, len(MOE), 1)), axis=-1)
    ids[:, MOE, :TOP_K] = shuffled[..., :TOP_K]
    ids[4::5] = -1
    return ids


def to_slots(rng, ids, slot_map):
    """[L, tokens, BUFFER_K] a random replica's slot for every choice."""
    slots = np.full_like(ids, -1)
    for token, layer, k in np.argwhere(ids >= 0):
        slots[token, layer, k] = rng.choice(np.flatnonzero(slot_map[layer] == ids[token, layer, k]))
    return slots.transpose(1, 0, 2)


def slot_counts(slots):
    """[L, P] of slots [L, tokens, K]."""
    return np.stack([np.bincount(row[row >= 0], minlength=SLOTS) for row in slots.reshape(LAYERS, -1)])


def expert_counts(ids):
    """[MoE layers, E] of choices [tokens, L, K], by loops."""
    counts = np.zeros((len(MOE), EXPERTS), dtype=int)
    for token in ids:
        for position, layer in enumerate(MOE):
            for expert in token[layer]:
                counts[position, expert] += expert >= 0
    return counts


class Recording:
    """Forward passes on RANKS ranks, some of them idle: the truth, and the files that SGLang would write."""

    PASSES = (7, 8, 9, 11)

    def __init__(self, seed, folder):
        self.rng = np.random.default_rng(seed)
        self.folder = folder
        self.slot_map = random_map(self.rng)
        self.choices, self.slots = {}, {}
        for forward_pass in self.PASSES:
            for rank in range(RANKS):
                idle = forward_pass == 11 or (forward_pass, rank) == (8, 1)
                ids = random_choices(self.rng, 0 if idle else self.rng.integers(1, 12))
                self.choices[forward_pass, rank] = ids
                self.slots[forward_pass, rank] = to_slots(self.rng, ids, self.slot_map)

    def own_tokens(self, forward_pass, rank):
        """A rank counts the slots its tokens chose."""
        return slot_counts(self.slots[forward_pass, rank])

    def own_slots(self, forward_pass, rank):
        """A rank counts the tokens its slots received, as with DeepEP's low-latency mode."""
        total = sum(self.own_tokens(forward_pass, source) for source in range(RANKS))
        mine = np.arange(SLOTS) // (SLOTS // RANKS) == rank
        return np.where(mine, total, 0)

    def everything(self, forward_pass, rank):
        """Every rank routes all tokens, as under tensor-parallel attention."""
        return sum(self.own_tokens(forward_pass, source) for source in range(RANKS))

    def records(self, rank, view):
        common = {"rank": rank, "gatherer_key": "primary"}
        if view is None:
            return [
                {
                    **common,
                    "forward_pass_id": forward_pass,
                    "input_ids": list(range(slots.shape[1])),
                    "extend_seq_lens": self.seq_lens(slots.shape[1]) if forward_pass == 7 else None,
                    "topk_ids_of_layer": torch.from_numpy(slots).int(),
                    "global_physical_count": torch.from_numpy(slot_counts(slots)).int(),
                    "misc_objects": [],
                }
                for (forward_pass, r), slots in self.slots.items()
                if r == rank
            ]
        return [
            {**common, "forward_pass_id": p, "global_physical_count": torch.from_numpy(view(p, rank)).int()}
            for p in self.PASSES
        ]

    @staticmethod
    def seq_lens(tokens):
        return [tokens // 2, tokens - tokens // 2]

    def save(self, view=None, change=lambda rank, dump: dump):
        """Files of all ranks: per_token, or per_pass with a view."""
        paths = []
        for rank in range(RANKS):
            dump = {
                "records": self.records(rank, view),
                "last_physical_to_logical_map": torch.from_numpy(self.slot_map),
            }
            paths.append(self.folder / f"recorder_{rank}.pt")
            torch.save(change(rank, dump), paths[-1])
        return paths

    def true_counts(self, passes=(7, 8, 9)):
        return np.stack([sum(expert_counts(self.choices[p, rank]) for rank in range(RANKS)) for p in passes])


def without(*gone):
    """Ranks that did not record some passes."""

    def change(rank, dump):
        dump["records"] = [r for r in dump["records"] if (r["forward_pass_id"], rank) not in gone]
        return dump

    return change
