"""What the page shows is what the library computes, and what a browser sends is checked."""

import base64
import io
import struct
import zlib

import pytest
import torch
from PIL import Image

import menet
from menet.errors import ConfigurationError, DataError
from menet.evaluation.certify import CertificateSettings, certificates
from menet.web.explorer import ATTACKS, ESTIMATORS, Explorer, Networks
from menet.web.images import LONGEST_SIDE, decoded
from menet.web.workers import MAX_UPLOAD


@pytest.fixture(scope="session")
def explorer(networks: Networks) -> Explorer:
    return Explorer(networks)


@pytest.fixture(scope="session")
def digit(explorer: Explorer) -> str:
    return next(iter(explorer.samples))


def encoded(image: Image.Image, kind: str = "PNG", **options: object) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


NOISE = Image.effect_noise((80, 80), 60)


def bomb(width: int, height: int) -> bytes:
    """A small PNG file that would be large when decoded."""

    def chunk(name: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    data = zlib.compress(bytes(1 << 20), 9)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


def shown(address: str) -> torch.Tensor:
    with Image.open(io.BytesIO(base64.b64decode(address.partition(",")[2]))) as image:
        pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
        return pixels.view(image.height, image.width, -1).permute(2, 0, 1).float() / 255


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("channels", ["joint", "separate"])
def test_a_reconstruction_is_that_of_the_defense(explorer: Explorer, estimator: str, channels: str) -> None:
    request = {
        "image": "photo-roof",
        "p": 0.6,
        "estimator": estimator,
        "channels": channels,
        "draws": 1,
        "seed": 3,
    }
    found = explorer.answer("reconstruct", request)
    image = explorer.samples["photo-roof"].image[None]
    model = menet.MENet(torch.nn.Identity(), estimator, 0.6, channels=channels)  # type: ignore[arg-type]
    shape = (1, 3 if channels == "joint" else 1, 64, 64)
    mask = menet.masks.bernoulli(shape, 0.6, torch.Generator().manual_seed(3))
    torch.testing.assert_close(shown(found["estimate"]), model.estimate(image, mask)[0], atol=1 / 255, rtol=0)
    masked = shown(found["masked"])
    hidden = ~mask[0].expand(3, -1, -1)
    assert ((masked - 0.5).abs() < 1 / 255)[hidden].all()
    assert len(found["before"]["values"]) == 64
    assert 1 <= found["before"]["rank"] <= 64


def test_everything_seen_is_left_as_it_is(explorer: Explorer) -> None:
    found = explorer.answer("reconstruct", {"image": "photo-roof", "p": 1, "estimator": "mask-only"})
    assert found["psnr"] is None
    assert found["masked"] == found["estimate"]


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_starts_clean_and_stays_in_its_budget(explorer: Explorer, digit: str, name: str) -> None:
    request = {"image": digit, "attack": name, "epsilon": 0.2, "steps": 4, "draws": 3}
    found = explorer.answer("attack", request)
    clean = explorer.samples[digit].image
    assert found["label"] == explorer.samples[digit].label
    torch.testing.assert_close(shown(found["frames"][0]["image"]), clean, atol=1 / 255, rtol=0)
    last = shown(found["frames"][-1]["image"])
    assert 0 < float((last - clean).abs().max()) <= 0.2 + 1 / 255
    assert found["steps"] == sorted(set(found["steps"]))
    assert len(found["frames"]) == len(found["steps"]) >= (2 if name == "fgsm" else 5)
    for frame in found["frames"]:
        assert sum(frame["defended"]["votes"]) == 3
        assert abs(sum(frame["bare"]["probabilities"]) - 1) < 1e-2
    assert explorer.answer("attack", request) == found


def test_without_a_budget_nothing_is_perturbed(explorer: Explorer, digit: str) -> None:
    found = explorer.answer("attack", {"image": digit, "attack": "pgd", "epsilon": 0, "steps": 2, "draws": 2})
    assert found["largest"] == 0
    assert len(found["frames"]) == 1


def test_a_certificate_is_the_librarys(explorer: Explorer, digit: str) -> None:
    found = explorer.answer("certificate", {"image": digit})
    assert explorer.certified is not None
    settings = CertificateSettings(selection=50, estimation=500, decision="plurality")
    expected = certificates(explorer.certified, explorer.samples[digit].image[None], settings, 0, 1)
    assert found["radius"] == int(expected.radius)
    assert (found["votes"], found["draws"]) == (int(expected.votes), int(expected.draws))


def test_painting_counts_the_pixels_that_differ(explorer: Explorer, digit: str) -> None:
    clean = explorer.samples[digit].image
    dark = [int(at) for at in (clean[0] == 0).nonzero()[0]]
    request = {"image": digit, "pixels": [[*dark, 1], [*dark, 0], [*dark, 1]], "draws": 5}
    found = explorer.answer("paint", request)
    assert found["painted"] == 1
    assert sum(found["votes"]) == 5
    assert explorer.answer("paint", {**request, "pixels": [[*dark, 0]]})["painted"] == 0


@pytest.mark.parametrize(
    ("action", "request_", "words"),
    [
        ("reconstruct", {"p": 2}, "expected 0 <= p <= 1"),
        ("reconstruct", {"p": "half"}, "got 'half'"),
        ("reconstruct", {"p": True}, "expected 0 <= p <= 1"),
        ("reconstruct", {"p": float("nan")}, "expected 0 <= p <= 1"),
        ("reconstruct", {"estimator": "magic"}, "unknown estimator 'magic'; choose from nuclear-norm"),
        ("reconstruct", {"estimator": ["usvt"]}, "unknown estimator"),
        ("reconstruct", {"draws": 10**9}, "expected 1 <= draws <= 20"),
        ("reconstruct", {"draws": 1.5}, "expected a whole draws"),
        ("reconstruct", {"image": None}, "expected `image`"),
        ("attack", {"attack": "os:system"}, "unknown attack"),
        ("attack", {"epsilon": -1}, "expected 0 <= epsilon <= 1"),
        ("attack", {"steps": 1000}, "expected 1 <= steps <= 50"),
        ("paint", {"pixels": [[0, 28, 1]]}, "inside the 28×28 image"),
        ("paint", {"pixels": [[0, 0, 7]]}, "inside the 28×28 image"),
        ("paint", {"pixels": [[0, "0", 1]]}, "expected each painted pixel"),
        ("paint", {"pixels": [[0, 0, 1]] * 785}, "at most 784 painted pixels"),
    ],
)
def test_requests_are_checked(
    explorer: Explorer, digit: str, action: str, request_: dict[str, object], words: str
) -> None:
    with pytest.raises(ConfigurationError) as refused:
        explorer.answer(action, {"image": digit, **request_})
    assert words in str(refused.value)


def test_a_photograph_is_fitted_to_the_network(explorer: Explorer) -> None:
    found = explorer.answer("attack", {"image": "photo-roof", "attack": "fgsm", "draws": 2})
    assert shown(found["frames"][0]["image"]).shape == (1, 28, 28)
    assert found["label"] == found["frames"][0]["bare"]["prediction"]


def test_images_of_all_kinds_are_read() -> None:
    gradient = Image.linear_gradient("L")
    for image, kind in (
        (gradient, "PNG"),
        (gradient.convert("RGB"), "JPEG"),
        (gradient.convert("P"), "GIF"),
        (gradient.convert("1"), "BMP"),
        (gradient.convert("I;16"), "PNG"),
        (gradient.convert("RGBA"), "PNG"),
        (gradient.convert("CMYK"), "JPEG"),
        (gradient.convert("LA"), "WEBP"),
    ):
        found = decoded(encoded(image, kind))
        assert found.shape == (1, 3, LONGEST_SIDE, LONGEST_SIDE), (image.mode, kind)
        assert 0 <= float(found.min()) <= float(found.max()) <= 1
    narrow = decoded(encoded(Image.new("RGB", (4000, 2))))
    assert narrow.shape == (1, 3, 1, LONGEST_SIDE)
    assert decoded(encoded(Image.new("RGB", (5, 7)))).shape == (1, 3, 7, 5)


def test_transparent_pixels_are_white_and_photographs_upright() -> None:
    assert decoded(encoded(Image.new("RGBA", (4, 4), (0, 0, 0, 0)))).min() == 1
    turned = Image.new("RGB", (20, 10))
    exif = turned.getexif()
    exif[0x0112] = 6
    assert decoded(encoded(turned, "JPEG", exif=exif)).shape == (1, 3, 20, 10)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "not an image"),
        (b"GIF89a", "not an image"),
        (b"%PDF-1.4 " * 100, "not an image"),
        (encoded(NOISE)[:2000], "damaged or incomplete"),
        (encoded(NOISE, "JPEG")[:2000], "damaged or incomplete"),
        (bomb(50_000, 50_000), "too many pixels; please choose one of at most 24 million"),
        (bomb(6_000, 6_000), "too many pixels; please choose one of at most 24 million"),
        (bomb(4_000, 4_000), "damaged or incomplete"),
        (bytes(MAX_UPLOAD + 1), "8 MB"),
    ],
)
def test_bad_files_get_a_friendly_message(data: bytes, words: str) -> None:
    with pytest.raises(DataError) as refused:
        decoded(data)
    assert words in str(refused.value)
    assert "please" in str(refused.value)


def test_formats_that_run_other_programs_are_not_tried() -> None:
    with pytest.raises(DataError):
        decoded(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\nshowpage\n")


def test_a_text_that_is_no_image_is_refused(explorer: Explorer) -> None:
    for text in ("photo-nowhere", "data:image/png;base64,AAAA", "å"):
        with pytest.raises(DataError):
            explorer.answer("reconstruct", {"image": text})


def test_without_bare_and_certified_runs_the_defense_stands_for_them(networks: Networks) -> None:
    found = Explorer(Networks(networks.defended))
    assert found.bare is found.defended.classifier
    assert found.certified is found.defended
    plain = Explorer(Networks(str(networks.bare)))
    assert isinstance(plain.defended, menet.MENet)
    assert plain.bare is plain.defended.classifier
