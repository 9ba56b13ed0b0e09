"""The verdict: does compression pay on this network, and below which speed would it?"""

ALIKE = 0.05
"""Difference of two times, as a part of the larger, that is not told from noise."""


def verdict(
    seconds: tuple[float | None, float | None], sent: tuple[float | None, float | None], exchange_s: float | None
) -> str | None:
    """Return a sentence that says whether compression pays, given seconds and bytes of a dense and of a sparse step.

    `exchange_s` is the time that a dense step's bytes take here. A slower link makes both kinds of step longer, each by
    its bytes. That gives the speed at which they take the same time.
    """
    (dense_s, sparse_s), (dense_bytes, sparse_bytes) = seconds, sent
    if not (dense_s and sparse_s):
        return None
    took = f"sparse steps took {sparse_s:.3g} s, dense ones {dense_s:.3g} s: "
    if dense_bytes == 0:
        return took + "one rank sends nothing, so that compression cannot pay"
    if abs(sparse_s - dense_s) <= ALIKE * max(sparse_s, dense_s):
        return took + "on this network compression makes no difference"
    if sparse_s < dense_s:
        return took + f"compression pays, a step is {dense_s / sparse_s:.2g} times as fast"
    says = took + "on this network compression does not pay"
    if dense_bytes and sparse_bytes is not None and sparse_bytes < dense_bytes:
        per_byte = (exchange_s or 0.0) / dense_bytes + (sparse_s - dense_s) / (dense_bytes - sparse_bytes)
        says += f"; below about {float(f'{8e-6 / per_byte:.2g}'):,g} Mbit/s it would"
    return says
