"""Image quilting (Guo, Rana, Cissé & van der Maaten, 2018): rebuild an image from patches of clean ones.

Each patch of the image is replaced by one of its nearest neighbors in a bank of patches of clean training images.
Neighboring patches overlap, and are joined along the cut where they differ least (Efros & Freeman, 2001). Patches
are bytes, so that the errors along a cut are integers and every way to compute it finds the same one.
"""

from typing import Any, ClassVar, Self

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor, nn

from menet import kernels
from menet.baselines.feature_squeezing import sample_images
from menet.baselines.resize_pad import Cropped
from menet.errors import ConfigurationError
from menet.linalg import in_chunks
from menet.preprocessed import Gradient

IMAGES_TO_FIT = 10_000
MOST_LISTED = 2**24
"""Places of patches that are shuffled as a list; from more, patches are drawn with replacement."""
PATCHES_AT_ONCE = 2**15
DISTANCES = 2**23
"""Distances that are in memory at once."""
BLOCK = 64


def places(side: int, patch: int, overlap: int) -> list[int]:
    """Where patches begin along a side: at regular distances, and one that ends at the border."""
    last = side - patch
    regular = list(range(0, last + 1, patch - overlap))
    return regular if regular[-1] == last else [*regular, last]


def draw_patches(
    images: Float[Tensor, "n c h w"], count: int, patch: int, generator: torch.Generator
) -> UInt8[Tensor, "patches c patch patch"]:
    """Patches at random places of `images`, as bytes: `count` of them, or all if there are fewer."""
    number, channels, height, width = images.shape
    if min(height, width) < patch:
        raise ConfigurationError(f"expected images of at least {patch}×{patch}, a patch, got {height}×{width}")
    pixels = (images * 255).round().to(torch.uint8)
    rows, columns = height - patch + 1, width - patch + 1
    total = number * rows * columns
    if total <= max(count, MOST_LISTED):
        chosen = torch.randperm(total, generator=generator)[:count]
    else:
        chosen = torch.randint(total, (count,), generator=generator)
    chosen = chosen.sort().values.to(images.device)
    inside = torch.arange(patch, device=images.device)
    channel = torch.arange(channels, device=images.device).view(-1, 1, 1)
    bank = pixels.new_empty(len(chosen), channels, patch, patch)
    for start in range(0, len(chosen), PATCHES_AT_ONCE):
        some = chosen[start : start + PATCHES_AT_ONCE].view(-1, 1, 1, 1)
        top, left = some // columns % rows + inside.view(-1, 1), some % columns + inside
        bank[start : start + PATCHES_AT_ONCE] = pixels[some // (rows * columns), channel, top, left]
    return bank


@torch.no_grad()
def nearest_patches(
    queries: Float[Tensor, "q d"], bank: UInt8[Tensor, "n d"], count: int
) -> Int[Tensor, "q count"]:
    """The indices of the `count` patches of `bank`, of bytes, nearest to each query on [0, 1], nearest first.

    By matrix products with parts of the bank, so that memory does not grow with it.
    """
    if not 1 <= count <= len(bank):
        raise ConfigurationError(
            f"expected from 1 to {len(bank)} neighbors, the patches of the bank, got {count}"
        )
    best = queries.new_full((len(queries), 0), torch.inf)
    found = torch.zeros((len(queries), 0), dtype=torch.int64, device=queries.device)
    size = max(count, BLOCK, min(len(bank), PATCHES_AT_ONCE))
    for start in range(0, len(bank), size):
        part = bank[start : start + size].to(queries.dtype) / 255
        # ‖query‖² is the same for all patches, so the nearest minimize ‖patch‖² − 2·query·patch.
        length = part.square().sum(1)
        pieces = [
            _smallest(torch.addmm(length, some, part.mT, alpha=-2), min(count, len(part)))
            for some in queries.split(max(1, DISTANCES // size))
        ]
        distances, indices = (torch.cat(parts) for parts in zip(*pieces, strict=True))
        best, found = torch.cat([best, distances], 1), torch.cat([found, indices + start], 1)
        best, order = best.topk(min(count, best.shape[1]), largest=False)
        found = found.gather(1, order)
    return found


def _smallest(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` smallest values of each row and their indices.

    They lie in the `count` blocks of smallest minima, and finding these takes one pass over memory; `topk` over
    whole rows takes many times as long.
    """
    whole = values.shape[1] // BLOCK * BLOCK
    if whole // BLOCK <= 2 * count:
        smallest = values.topk(count, largest=False)
        return smallest.values, smallest.indices
    blocks = values[:, :whole].unflatten(1, (-1, BLOCK))
    chosen = blocks.amin(2).topk(count, largest=False).indices
    inside = torch.arange(BLOCK, device=values.device)
    indices = (chosen[..., None] * BLOCK + inside).flatten(1)
    rest = torch.arange(whole, values.shape[1], device=values.device).expand(len(values), -1)
    indices = torch.cat([indices, rest], 1)
    smallest = values.gather(1, indices).topk(count, largest=False)
    return smallest.values, indices.gather(1, smallest.indices)


def minimum_error_cut(errors: Int[Tensor, "b length overlap"]) -> Int[Tensor, "b length"]:
    """The path of least total error through an overlap: one entry of each line, at most one aside in the next.

    By dynamic programming; ties go to the lower index, from the last line on.
    """
    most = torch.iinfo(errors.dtype).max // 2
    cost = [errors[:, 0]]
    for line in errors.unbind(1)[1:]:
        wide = nn.functional.pad(cost[-1], (1, 1), value=most)
        cost.append(line + torch.stack([wide[:, :-2], wide[:, 1:-1], wide[:, 2:]]).amin(0))
    entry = torch.arange(errors.shape[2], device=errors.device)
    path = [cost[-1].argmin(1)]
    for line in cost[-2::-1]:
        near = (entry - path[-1][:, None]).abs() <= 1
        path.append(line.masked_fill(~near, most).argmin(1))
    return torch.stack(path[::-1], 1)


def quilt(
    patches: UInt8[Tensor, "b rows columns c patch patch"], height: int, width: int, overlap: int
) -> UInt8[Tensor, "b c h w"]:
    """Images of overlapping patches, placed row by row and joined along the cuts where they differ least.

    A new patch replaces what lies beyond its cut with the patches to its left and above.
    """
    side = patches.shape[-1]
    tops, lefts = places(height, side, overlap), places(width, side, overlap)
    if tuple(patches.shape[1:3]) != (len(tops), len(lefts)):
        raise ConfigurationError(
            f"expected {len(tops)}×{len(lefts)} patches for an image, got {patches.shape[1]}×{patches.shape[2]}"
        )
    if not len(patches):
        return patches.new_empty(0, patches.shape[3], height, width)
    join = _compiled if kernels.suit(patches) else _batched
    (images,) = in_chunks(lambda some: (join(some, tops, lefts),), [patches.contiguous()])
    return images


def _compiled(patches: Tensor, tops: list[int], lefts: list[int]) -> Tensor:
    from menet.kernels.quilting import quilt_each

    images = _canvas(patches, tops, lefts)
    quilt_each(patches.numpy(), torch.tensor(tops).numpy(), torch.tensor(lefts).numpy(), images.numpy())
    return images


def _batched(patches: Tensor, tops: list[int], lefts: list[int]) -> Tensor:
    side = patches.shape[-1]
    images = _canvas(patches, tops, lefts)
    entry = torch.arange(side, device=patches.device)
    for row, top in enumerate(tops):
        for column, left in enumerate(lefts):
            patch = patches[:, row, column]
            there = images[..., top : top + side, left : left + side]
            errors = (there.long() - patch.long()).square().sum(1)
            fresh = torch.ones_like(errors, dtype=torch.bool)
            before = lefts[column - 1] + side - left if column else 0
            above = tops[row - 1] + side - top if row else 0
            if before:
                fresh &= entry >= minimum_error_cut(errors[:, :, :before])[:, :, None]
            if above:
                fresh &= entry[:, None] >= minimum_error_cut(errors[:, :above].mT)[:, None, :]
            there.copy_(torch.where(fresh[:, None], patch, there))
    return images


def _canvas(patches: Tensor, tops: list[int], lefts: list[int]) -> Tensor:
    side = patches.shape[-1]
    return patches.new_zeros(len(patches), patches.shape[3], tops[-1] + side, lefts[-1] + side)


class ImageQuilting(Cropped):
    """Classify images rebuilt from the patches of a bank that `fit` draws from clean training images.

    Each patch becomes one of its `neighbors` nearest in the bank, drawn at random. The authors' bank holds a
    million patches of 5×5 and they draw among 10 neighbors, on ImageNet; they train the classifier on quilted
    images, as training here does. The bank is a buffer of bytes (75 MB for their numbers), so checkpoints contain
    it. `crop` < 1 adds their random crops at inference, see `Cropped`. `gradient="exact"` is zero, as the choice
    of patches jumps; `bpda` uses the identity.
    """

    name: ClassVar[str] = "image-quilting"
    bank: Tensor
    fitted: Tensor

    def __init__(
        self,
        classifier: nn.Module,
        patch: int = 5,
        overlap: int = 2,
        neighbors: int = 10,
        patches: int = 100_000,
        channels: int = 3,
        crop: float = 1.0,
        gradient: Gradient = "bpda",
        seed: int = 0,
    ) -> None:
        super().__init__(classifier, crop, gradient, seed)
        if not 1 <= patch <= 64:
            raise ConfigurationError(f"expected patch from 1 to 64, got {patch}")
        if not 0 <= overlap < patch:
            raise ConfigurationError(f"expected overlap from 0 to {patch - 1}, less than a patch, got {overlap}")
        if not 1 <= channels <= 4096:
            raise ConfigurationError(f"expected channels from 1 to 4096, got {channels}")
        if not 1 <= neighbors <= patches:
            raise ConfigurationError(
                f"expected neighbors from 1 to {patches}, the patches of the bank, got {neighbors}"
            )
        self.patch, self.overlap, self.neighbors = patch, overlap, neighbors
        self.register_buffer("bank", torch.zeros(patches, channels, patch, patch, dtype=torch.uint8))
        self.register_buffer("fitted", torch.tensor(False))

    def fit(self, images: Any, generator: torch.Generator) -> Self:
        """Draw the bank from images, as tensors on [0, 1] or bytes; adopt their channels.

        The bank is smaller than `patches` if the images have fewer.
        """
        chosen = sample_images(images, IMAGES_TO_FIT, generator)
        bank = draw_patches(chosen, len(self.bank), self.patch, generator)
        if len(bank) < self.neighbors:
            raise ConfigurationError(
                f"expected images of at least {self.neighbors} patches, the neighbors to draw from, "
                f"got {len(bank)}"
            )
        self.bank = bank.to(self.bank.device)
        self.fitted.fill_(True)
        return self

    def preprocess(
        self, images: Float[Tensor, "b c h w"], generator: torch.Generator
    ) -> Float[Tensor, "b c h w"]:
        self._check(images)
        height, width = images.shape[2:]
        seen, (rows, columns) = self._patches_of(images.detach())
        drawn = self.draw(
            lambda count: torch.randint(self.neighbors, (count, rows * columns), generator=generator), len(images)
        )
        near = nearest_patches(seen.flatten(1), self.bank.flatten(1), self.neighbors)
        chosen = near.gather(1, drawn.to(near.device).view(-1, 1)).view(-1, rows, columns)
        quilted = quilt(self.bank[chosen], height, width, self.overlap)
        return quilted.to(images.dtype) / 255 + 0 * images

    def settings(self) -> dict[str, Any]:
        return {
            "patch": self.patch,
            "overlap": self.overlap,
            "neighbors": self.neighbors,
            "patches": len(self.bank),
            "channels": self.bank.shape[1],
            "crop": self.crop,
            "gradient": self.gradient,
        }

    def _patches_of(self, images: Tensor) -> tuple[Tensor, tuple[int, int]]:
        """The patches of the images in reading order, and how many rows and columns of them an image has."""
        inside = torch.arange(self.patch, device=images.device)
        tops, lefts = (
            torch.tensor(places(side, self.patch, self.overlap), device=images.device)[:, None] + inside
            for side in images.shape[2:]
        )
        windows = images[:, :, tops[:, None, :, None], lefts[None, :, None, :]]
        return windows.permute(0, 2, 3, 1, 4, 5).flatten(0, 2), (len(tops), len(lefts))

    def _check(self, images: Tensor) -> None:
        if not bool(self.fitted):
            raise ConfigurationError("the bank has not been filled; call fit(images, generator) first")
        channels, (height, width) = images.shape[1], images.shape[2:]
        if channels != self.bank.shape[1]:
            raise ConfigurationError(
                f"expected images of {self.bank.shape[1]} channels, as in fit, got {channels}"
            )
        if min(height, width) < self.patch:
            raise ConfigurationError(
                f"expected images of at least {self.patch}×{self.patch}, a patch, got {height}×{width}"
            )
