"""The published estimators as published: one image at a time, NumPy, and a cone solver for the nuclear norm.

These are the other side of every ratio. They follow what the paper's released code computes (its constants, its
stopping rules), written plainly.
"""

import numpy as np
from numpy.typing import NDArray

Matrix = NDArray[np.float64]


def usvt(matrix: Matrix, mask: NDArray[np.bool_]) -> Matrix:
    """Keep the top int(0.8·h) singular values of the zero-filled matrix, divide by the observed fraction."""
    left, values, right = np.linalg.svd(np.where(mask, matrix, 0.0))
    keep = int(0.8 * matrix.shape[0])
    return np.dot(left[:, :keep] * values[:keep], right[:keep]) / mask.mean()


def soft_impute(
    matrix: Matrix, mask: NDArray[np.bool_], tolerance: float = 1e-3, iterations: int = 100
) -> Matrix:
    """Soft-Impute with λ = σ₁/50, stopping when the missing entries change by less than 1e-3."""
    filled = np.where(mask, matrix, 0.0)
    shrinkage = np.linalg.svd(filled, compute_uv=False)[0] / 50
    missing = ~mask
    for _ in range(iterations):
        left, values, right = np.linalg.svd(filled, full_matrices=False)
        values = np.maximum(values - shrinkage, 0)
        rank = int((values > 0).sum())
        estimate = np.dot(left[:, :rank] * values[:rank], right[:rank])
        old, new = filled[missing], estimate[missing]
        norm = np.linalg.norm(old)
        change = np.linalg.norm(old - new) / norm if norm > 0 else np.inf
        filled[missing] = new
        if change < tolerance:
            break
    return filled


def soft_impute_limit(matrix: Matrix, mask: NDArray[np.bool_], iterations: int = 20_000) -> Matrix:
    """Where that iteration goes when it is not stopped early: its fixed point, to 1e-9."""
    return soft_impute(matrix, mask, tolerance=1e-9, iterations=iterations)


def nuclear_norm(matrix: Matrix, mask: NDArray[np.bool_], mu: float = 1.0, **options: object) -> Matrix:
    """Minimize mu·‖X‖_* + ‖mask∘(X − A)‖² with SCS through cvxpy, its default accuracy."""
    import cvxpy

    unknown = cvxpy.Variable(matrix.shape)
    weights = mask.astype(float)
    objective = mu * cvxpy.norm(unknown, "nuc") + cvxpy.sum_squares(cvxpy.multiply(weights, unknown - matrix))
    cvxpy.Problem(cvxpy.Minimize(objective)).solve(solver=cvxpy.SCS, **options)
    return np.asarray(unknown.value)


def nuclear_objective(estimate: Matrix, matrix: Matrix, mask: NDArray[np.bool_], mu: float = 1.0) -> float:
    """The value of the objective that `nuclear_norm` minimizes."""
    residual = np.where(mask, estimate - matrix, 0.0)
    return float(mu * np.linalg.svd(estimate, compute_uv=False).sum() + (residual**2).sum())
