"""The mean around the median in one file outside the package: a robust mean.

    Δ̄_j = mean of the m − f values of v_1j, …, v_mj that are nearest to their median;      f   attackers

Reference: Xie, Koyejo, Gupta, "Generalized Byzantine-tolerant SGD", 2018, Definition 8.
"""

from __future__ import annotations

from hpcfed import RobustMean


class MeanAroundMedian(RobustMean):
    attackers: int

    @property
    def least(self):
        return self.attackers + 1

    def of(self, vectors, context):
        rows = vectors.rows().double()  # (m, d), the clients in the cohort's order, on each rank
        ordered = rows.sort(dim=0, stable=True).values
        median = (ordered[(len(rows) - 1) // 2] + ordered[len(rows) // 2]) / 2
        nearest = (rows - median).abs().argsort(dim=0, stable=True)[: len(rows) - self.attackers]
        return sum(rows.gather(0, nearest)) / len(nearest)
