"""Why the costs of error feedback hold for the computed releases, and for which runs.

The unit is C1 / B, so what is fed back counts B / C1 times. The computed sums and withheld parts move by at most 1 +
ETA times 1 and rho (`dpx.sums.float_pair`), and the noise is 1 + ETA + ERROR times what the cost assumes. The bounds
scale: nu, shifts and error moves, all times 1 + ETA + ERROR, cost the same. So the rounding of the error may move a run
by ERROR times the shift, and rho, of its first participation.

A STEP, with v = 2^-53, from an error e with |e| <= M, which is two float32 numbers and exact in float64. The computed
norm is off by 32 v (`dpx.sums.doubles`), the scale of the part that is fed back by 36 v, that part by 37 v M, what is
remembered by 33 v M, and its difference, the division of the withheld part, their sum, and its two float32 numbers by
37 v M more: the next error by 107 v M in all. The released sum T + B fed is off by 72 v B M + 34 v |T|, |T| <= n for n
rows. The exact map is the projection onto a ball, where what is remembered has a largest norm, and then the firmly
non-expansive one of `energy`. So two runs with errors at distance D have

    S^2 + F^2 <= D^2,   release: S + a,  a = 144 v B M + 68 v n;   next D: F + b,  b = 214 v B M,

plus their participation. Runs of the same bits stay so, up to the first participation, and again after a reset.

A RUN of R steps between resets. Let x_T = 0 and x_t = sqrt(a^2 + (b + x_(t+1))^2), so x_1 <= R b + sqrt(R) a. For s^2 +
F^2 <= D^2, (s + a, F + b + x_(t+1)) has length D + x_t or less. So whatever bound V_t(D) follows from the maximum over
that disc and grows with s and F, as in `energy` and `renyi`, the computed run has V_t(D + x_t), by backward induction.
The first participation makes D, and with it x, from 0, and its cost covers rho ERROR more than it moves D. So x_1 <=
rho ERROR is enough.

|e| <= M = m W with W = n rho / B: each step adds at most W to what is not fed back. m = R in general. m = 2 if C2 >=
2 W, because an error of at most 2 W then leaves at most W. So x_1 <= 316 v R m n rho + 68 v sqrt(R) n, and this is at
most 3/4 of rho ERROR if

    R m n <= 2^29   and   sqrt(R) n <= 2^29 min(1, rho).

The rest is for the participation's own step, the factors of what is withheld, and the noise's deviation in float32:
2^-20 in all. If rho = 0, nothing is ever fed back.

THE TRIVIAL COST, for an infinite outer norm, bounds each shift by 2 C2. The computed part has a norm of at most C2 (1 +
72 v), and the released sum is off by 68 v n more. By Minkowski's inequality, the root of the energy of a stretch, which
is at least 1, grows by sqrt(R) 68 v n: only the second condition is needed, with 1 for rho.
"""

import math

ERROR = 2.0**-15
LARGEST = 2.0**29


def proof_covers(
    *, steps: int, reset_every: int | None, error_shift: float, feedback_shift: float, batch_size: float, examples: int
) -> bool:
    """Whether the conditions above hold. The arguments are as in `ErrorFeedbackDpEvent`.

    batch_size: the expected one, B. Fewer than one in 10^12 Poisson batches has more rows than are counted here.
    """
    rows = min(examples, batch_size + 8 * math.sqrt(batch_size) + 64)
    stretch = min(steps, reset_every or steps)
    if math.isinf(error_shift) or not error_shift:
        return not error_shift or math.sqrt(stretch) * rows <= LARGEST
    growth = 2 if feedback_shift >= 4 * rows * error_shift else stretch  # feedback_shift is 2 C2 in the unit
    return stretch * growth * rows <= LARGEST and math.sqrt(stretch) * rows <= LARGEST * min(1.0, error_shift)
