"""The listings of the papers, line by line in plain Python, in the order and with the names of the listings.

What a listing leaves open is decided as in isoload: equal values go by the lowest index, LLEP's capacity is rounded
down and Libra's balanced load up to whole copies, and an expert that nobody asks for is no hot one. CRAFT's PLACEMENT
and GRACE-MoE's SPECTRALCLUSTERING are inputs.
"""

from __future__ import annotations

from math import ceil, inf

Matrix = list[list[float]]
Segments = list[tuple[int, int, int]]


def lla(l: list[int], M: int, m_alpha: int, m: int) -> dict[int, Segments]:  # noqa: E741
    """papers/003, Algorithm 2: (GPU, from, to) of every expert."""
    P = len(l) // M
    I_sorted = sorted(range(len(l)), key=lambda i: -l[i])
    g_n = [sum(l[g * M : (g + 1) * M]) for g in range(P)]
    g_p = list(g_n)
    g_a = [0] * P
    A_map: dict[int, Segments] = {}
    for i in I_sorted:
        e = l[i]
        ng = i // M
        g_p[ng] = g_p[ng] - e
        na = m_alpha - g_a[ng] - g_p[ng]
        A: Segments = []
        if na >= e:
            A.append((ng, 0, e))
            g_a[ng] += e
        elif na > 0:
            nc = min(na, e)
            to = nc
            A.append((ng, 0, nc))
            g_a[ng] += nc
            r = e - nc
            llas(ng, r, to, A, g_a, g_p, m_alpha, m)
        else:
            llas(ng, e, 0, A, g_a, g_p, m_alpha, m)
        A_map[i] = A
    return A_map


def llas(
    ng: int,
    r: int,
    to: int,
    A: Segments,
    g_a: list[int],
    g_p: list[int],
    m_alpha: int,
    m: int,
) -> None:
    """papers/003, Algorithm 3."""
    while r > 0:
        others = sorted((g for g in range(len(g_a)) if g != ng), key=lambda g: g_a[g] + g_p[g])
        assigned = False
        for o in others:
            c = min(r, m_alpha - g_a[o] - g_p[o])
            if c < m and r > c:
                continue  # chunk too small
            A.append((o, to, to + c))
            g_a[o] += c
            r -= c
            to += c
            assigned = True
            break
        if not assigned:
            o = others[0]
            A.append((o, to, to + r))
            g_a[o] += r
            r = 0


def expert_replication(
    ExpertLoad: list[list[int]],
    home: list[int],
    N: int,
    L: int,
) -> list[set[int]]:
    """papers/004, Algorithm 1: the experts of every GPU."""
    G, E = len(ExpertLoad), len(home)
    M_next = [{e for e in range(E) if home[e] == g} for g in range(G)]  # 2
    for g_s in range(G):  # 3
        remote = [e for e in range(E) if e not in M_next[g_s] and ExpertLoad[g_s][e] > 0]
        M_next[g_s].update(sorted(remote, key=lambda e: -ExpertLoad[g_s][e])[:L])  # 4, 5
    B = ceil(sum(map(sum, ExpertLoad)) / G)  # 8
    for _ in range((N - L) * G):  # 9
        Load = [0] * G  # 7 and 17: by the current mapping
        for g in range(G):
            for e in range(E):
                Load[g if e in M_next[g] else home[e]] += ExpertLoad[g][e]
        overloaded = [g for g in range(G) if Load[g] > B]
        if not overloaded:  # 11
            break
        g_src = max(overloaded, key=lambda g: Load[g])  # 10
        part = {
            e: sum(ExpertLoad[g][e] for g in range(G) if e not in M_next[g])
            for e in range(E)
            if home[e] == g_src
        }
        e = max(part, key=lambda e: part[e], default=-1)  # 13
        if e < 0 or part[e] == 0:
            continue
        extra = [len(M_next[g]) - home.count(g) for g in range(G)]
        candidates = [g for g in range(G) if e not in M_next[g] and extra[g] < N]
        if candidates:
            g_dst = min(candidates, key=lambda g: Load[g])  # 14
            if Load[g_dst] + ExpertLoad[g_dst][e] <= B:  # 15
                M_next[g_dst].add(e)  # 16
    return M_next


def token_sharding(
    M: list[set[int]],
    L: list[int],
    R: list[list[int]],
    B: int,
    epsilon: float,
) -> tuple[list[list[int]], list[int]]:
    """papers/004, Algorithm 2: R [G, E] and G [G]."""
    R = [list(row) for row in R]
    G = [L[g] + sum(R[g]) for g in range(len(L))]  # 1
    while max(G) > (1 + epsilon) * B:  # 2
        moved = False  # 3
        for g_s in sorted((g for g in range(len(G)) if G[g] > B), key=lambda g: -G[g]):  # 4
            for e in sorted((e for e in range(len(R[g_s])) if R[g_s][e] > 0), key=lambda e: -R[g_s][e]):  # 5
                C = [g for g in range(len(G)) if g != g_s and e in M[g]]  # 6
                if C:  # 7
                    g_d = min(C, key=lambda g: G[g])  # 8
                    cap = B - G[g_d]  # 9
                    if cap > 0:  # 10
                        amount = min(R[g_s][e], cap)  # 11
                        R[g_s][e] -= amount  # 12
                        R[g_d][e] += amount
                        G[g_s] -= amount  # 13
                        G[g_d] += amount
                        moved = True  # 14
                        break  # 15
        if not moved:  # 20
            break
    return R, G  # 24


def replication_benefit(
    W: list[Matrix],
    P: dict[int, list[list[list[int]]]],
    D: int,
) -> dict[int, list[float]]:
    """papers/000, Algorithm 1: T[r][l] for the GPUs P[r][l][e] with a copy of each expert; W is [B, L, E].

    The listing has one `base` for all layers, which its last line needs layer by layer.
    """
    B, L, E = len(W), len(W[0]), len(W[0][0])
    T, base = {}, [0.0] * L
    for r in sorted(P):
        BAL = [0.0] * L
        for b in range(B):
            for l in range(L):  # noqa: E741
                G = [0.0] * D
                for e in range(E):
                    g_el = P[r][l][e]
                    for g in g_el:
                        G[g] += W[b][l][e] / len(g_el)
                BAL[l] += sum(G) / D / max(G)
        if r == 0:
            base = [x / B for x in BAL]
        else:
            T[r] = [x / B - y for x, y in zip(BAL, base, strict=True)]
    return T


def replica_allocation(T: dict[int, list[float]], C: int) -> list[int]:
    """papers/000, Algorithm 2: the replicas x of every layer; C is counted in replicas."""
    R = list(T)
    L = len(T[R[0]])
    dp = [[-inf] * (C + 1) for _ in range(L + 1)]
    dp[0][0] = 0
    choice: list[list[int | None]] = [[None] * (C + 1) for _ in range(L + 1)]
    for l in range(1, L + 1):  # noqa: E741
        j = l - 1
        for c in range(C + 1):
            dp[l][c] = dp[l - 1][c]
            choice[l][c] = None
            for r in R:
                if c >= r and dp[l - 1][c - r] > -inf:
                    cand = dp[l - 1][c - r] + r * T[r][j]
                    if cand > dp[l][c]:
                        dp[l][c] = cand
                        choice[l][c] = r
    x, c = [0] * L, C
    for l in range(L, 0, -1):  # noqa: E741
        r_l = choice[l][c]
        if r_l is not None:
            x[l - 1] = r_l
            c -= r_l
    return x


def interleaved_assignment(D: int, R: list[int]) -> list[list[int]]:
    """papers/000, Algorithm 3: A[l][g] replicas; INTERLEAVESELECT takes indices rounded down between the endpoints."""
    A = [[n // D] * D for n in R]
    G = [sum(A[l][g] for l in range(len(R))) for g in range(D)]  # noqa: E741
    for l in range(len(R)):  # noqa: E741
        r = R[l] % D
        if r > 0:
            cutoff = sorted(G)[r - 1]
            M = [g for g in range(D) if G[g] < cutoff]
            q = r - len(M)
            if q > 0:
                K = [g for g in range(D) if G[g] == cutoff]
                J = [K[i * (len(K) - 1) // (q - 1)] if q > 1 else K[0] for i in range(q)]
                S = M + J
            else:
                S = M
            for g in S:
                A[l][g] += 1
                G[g] += 1
    return A


def intra_score(A: Matrix, S: list[int]) -> float:
    """papers/002, Algorithm 2."""
    return sum(A[i][j] for i in S for j in S)


def controlled_grouping(A: Matrix, C: list[list[int]], num_min: int, num_max: int) -> list[list[int]]:
    """papers/002, Algorithm 3 from line 5 on: the groups L of the clusters C."""
    L: list[list[int]] = []
    omega: list[int] = []
    for C_d in C:  # 5
        ranked = sorted(C_d, key=lambda i: (-sum(A[i][j] for j in C_d), i))
        if len(C_d) > num_max:  # 6
            L.append(ranked[:num_max])  # 7
            omega += ranked[num_max:]
        else:
            L.append(ranked)  # 9
    for e in omega:  # 12
        open_groups = [d for d in range(len(L)) if len(L[d]) < num_max]
        d_star = max(open_groups, key=lambda d: intra_score(A, [*L[d], e]))  # 13
        L[d_star].append(e)  # 14
    need = [max(0, num_min - len(L_d)) for L_d in L]  # 16
    if sum(need) > 0:  # 17
        collected = []
        for _ in range(sum(need)):  # 18
            giving = [(sum(A[e][j] for j in L_d), e, L_d) for L_d in L if len(L_d) > num_min for e in L_d]
            _, e, L_d = min(giving, key=lambda each: each[:2])
            L_d.remove(e)
            collected.append(e)
        for e in collected:  # 19
            needy = [d for d in range(len(L)) if len(L[d]) < num_min]
            L[max(needy, key=lambda d: intra_score(A, [*L[d], e]))].append(e)
    return L


def replicas_by_skew(
    groups: list[list[int]], load: list[float], n_replica: int | None = None
) -> tuple[list[list[int]], list[float]]:
    """papers/002, Equations 2 and 3: each GPU's copies and predicted load; n_replica: its FR of section 5.3."""
    W = [sum(load[e] for e in group) for group in groups]
    W_max, mean = max(W), sum(W) / len(W)
    heaviest = W.index(W_max)
    if n_replica is None:
        n_replica = min(max(1, int(W_max / mean)), len(groups) - 1)  # Eq. 2
    hot, cumulative = [], 0.0
    for e in sorted(groups[heaviest], key=lambda e: (-load[e], e)):
        hot.append(e)
        cumulative += load[e]
        if cumulative > W_max * n_replica / (1 + n_replica):
            break
    hosts = sorted((g for g in range(len(groups)) if g != heaviest), key=lambda g: W[g])[:n_replica]
    W_r, W_p = sum(load[e] for e in hot), W_max / (n_replica + 1)
    after = [W_i + W_p if g in hosts else W_i for g, W_i in enumerate(W)]  # Eq. 3
    after[heaviest] = W_max - W_r + W_p
    return [hot if g in hosts else [] for g in range(len(groups))], after
