"""Complete thousands of small matrices at once, and differentiate through the completion."""

import torch

from menet import masks, nuclear_norm, soft_impute, usvt


def main() -> None:
    random = torch.Generator().manual_seed(0)
    # 1,000 matrices of rank 3 with a little noise, 40 % of their entries missing.
    truth = torch.randn(1000, 30, 3, generator=random) @ torch.randn(1000, 3, 40, generator=random)
    noisy = truth + 0.1 * torch.randn(truth.shape, generator=random)
    seen = masks.bernoulli(truth.shape, p=0.6, generator=random)

    spread = truth[~seen].square().mean().sqrt()
    print(f"root mean square of the hidden entries {spread:.3f}; relative error of each estimate there:")
    for estimator in (usvt, soft_impute, nuclear_norm):
        error = (estimator(noisy, seen) - truth)[~seen].square().mean().sqrt()
        print(f"  {estimator.__name__:13} {error / spread:.3f}")

    # Which observed entries does one hidden entry depend on?
    one = noisy[:1].clone().requires_grad_()
    hidden = (~seen[0]).nonzero()[0]
    nuclear_norm(one, seen[:1])[0, hidden[0], hidden[1]].backward()
    assert one.grad is not None
    row, column = divmod(int(one.grad[0].abs().argmax()), one.shape[-1])
    print(f"hidden entry {tuple(hidden.tolist())} depends most on the observed entry ({row}, {column})")


if __name__ == "__main__":
    main()
