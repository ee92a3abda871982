"""The audit passes an honest evaluation, and catches each planted fault."""

import copy
import json
import re
import sys
from dataclasses import dataclass

import pytest
import torch
from evaluation_models import THREAT, network
from torch import Tensor, nn

from menet import cli, progress
from menet.attacks import PGD, AttackResult, ThreatModel
from menet.errors import ConfigurationError
from menet.evaluation import AuditSettings, audit, score
from menet.evaluation.audit import CHECKS, AuditedModel, failed, planned_passes

SETTINGS = AuditSettings(
    threat=THREAT,
    steps=10,
    eot=5,
    step_sweep=(1, 4, 10),
    eot_sweep=(1, 5),
    epsilon_sweep=(0.0, 1.0),
    draws=20,
    max_queries=60,
)


def found(model, examples, settings: AuditSettings = SETTINGS, checks: tuple[str, ...] = tuple(CHECKS)):
    chosen = {name: CHECKS[name] for name in checks}
    return {finding.name: finding for finding in audit(model, *examples, settings, checks=chosen)}


@pytest.fixture(scope="module")
def plain(defended, digits):
    """An undefended network, trained on clean digits."""
    from menet.data import load

    images, labels = load("digits").batch(slice(0, 2000))
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for index in torch.randperm(6000, generator=torch.Generator().manual_seed(0)).remainder(2000).split(100):
        optimizer.zero_grad(set_to_none=True)
        nn.functional.cross_entropy(model(images[index]), labels[index]).backward()
        optimizer.step()
    return model.eval()


class Quantized(nn.Module):
    """Rounds pixels before it looks at them: hardly another network, but without gradients."""

    def __init__(self, classifier: nn.Module) -> None:
        super().__init__()
        self.classifier = classifier

    def forward(self, images: Tensor) -> Tensor:
        return self.classifier((images * 8).round() / 8)


class GlobalMasks(nn.Module):
    """Drops pixels by torch's global generator."""

    def __init__(self, classifier: nn.Module) -> None:
        super().__init__()
        self.classifier = classifier

    def forward(self, images: Tensor) -> Tensor:
        return self.classifier(images * (torch.rand(images.shape) < 0.7))


@dataclass(frozen=True)
class Cheating:
    """PGD in a ball twice as large as it says."""

    threat: ThreatModel

    def __call__(self, model, images, labels, *, generator) -> AttackResult:
        wider = ThreatModel("linf", 2 * self.threat.epsilon)
        return PGD(threat=wider, steps=4)(model, images, labels, generator=generator)


def score_on_the_attacks_draws(model, images, labels, draws, seed):
    model.reseed(seed)
    return score(model, images, labels, draws)


def test_an_honest_evaluation_of_an_undefended_network_passes(plain, some):
    findings = found(plain, some)
    assert list(findings) == list(CHECKS)
    assert {name: one.status for name, one in findings.items() if one.status == "fail"} == {}
    assert findings["epsilon"].numbers["accuracy"][-1] == 0
    assert findings["reproducibility"].status == "pass"
    for finding in findings.values():
        assert finding.meaning.endswith(".")
        json.dumps(finding.numbers)


def test_an_honest_evaluation_of_a_me_net_passes(defended, some):
    smaller = {"steps": 6, "step_sweep": (1, 6), "max_queries": 30}
    settings = AuditSettings(**{**vars(SETTINGS), **smaller})
    findings = found(defended, (some[0][:40], some[1][:40]), settings)
    assert {name: one.status for name, one in findings.items() if one.status == "fail"} == {}
    numbers = findings["fresh scoring"].numbers
    assert numbers["draws shared with the attack"] == 0
    assert numbers["reported"] == pytest.approx(numbers["fresh draws"], abs=0.06)
    assert findings["own generator"].numbers["generators used"] == []


def test_zero_gradients_are_caught(plain, some):
    findings = found(Quantized(plain), some, checks=("gradients", "loss", "black box", "epsilon"))
    assert findings["gradients"].status == "fail"
    assert findings["gradients"].numbers["margin: fraction zero"] == 1
    assert findings["loss"].status == "fail"
    assert findings["black box"].status == "fail"
    assert findings["black box"].numbers["black box"] < findings["black box"].numbers["white box"]
    assert failed(list(findings.values()))


def test_a_model_that_cannot_be_differentiated_is_caught(plain, some):
    def detached(images: Tensor) -> Tensor:
        return plain(images).detach()

    findings = found(detached, some, checks=("gradients", "threat model", "steps"))
    assert {one.status for one in findings.values()} == {"fail"}
    assert "not differentiable" in findings["gradients"].meaning


def test_a_shared_global_generator_is_caught(plain, defended, some):
    state = torch.get_rng_state()
    finding = found(GlobalMasks(plain), some, checks=("own generator",))["own generator"]
    assert finding.status == "fail"
    assert finding.numbers["generators used"] == ["torch"]
    assert torch.equal(torch.get_rng_state(), state), "the audit leaves the global generator as it was"
    for honest in (plain, defended):
        assert found(honest, some, checks=("own generator",))["own generator"].status == "pass"
    repeat = found(GlobalMasks(plain), some, checks=("reproducibility",))["reproducibility"]
    assert repeat.status == "warn"


def test_numpys_global_generator_is_caught_too(plain, some):
    import numpy as np

    def model(images: Tensor) -> Tensor:
        return plain(images * torch.from_numpy(np.random.rand(*images.shape) < 0.7))

    finding = found(model, some, checks=("own generator",))["own generator"]
    assert (finding.status, finding.numbers["generators used"]) == ("fail", ["numpy"])


def test_an_attack_outside_the_threat_model_is_caught(plain, some):
    settings = AuditSettings(**{**vars(SETTINGS), "attack": Cheating(THREAT)})
    finding = found(plain, some, settings, checks=("threat model",))["threat model"]
    assert finding.status == "fail"
    assert finding.numbers["largest perturbation"] > 1.5 * THREAT.epsilon
    assert "violates" in finding.meaning
    assert found(plain, some, checks=("threat model",))["threat model"].status == "pass"


def test_scores_on_the_attacks_own_draws_are_caught(defended, some):
    settings = AuditSettings(**{**vars(SETTINGS), "scorer": score_on_the_attacks_draws})
    finding = found(defended, some, settings, checks=("fresh scoring",))["fresh scoring"]
    assert finding.status == "fail"
    assert finding.numbers["draws shared with the attack"] > 0
    assert found(defended, some, checks=("fresh scoring",))["fresh scoring"].status == "pass"


def test_scores_that_flatter_are_caught_without_shared_draws(defended, some):
    def flattering(model, images, labels, draws, seed):
        outcome = score(model, images, labels, draws)
        outcome.ranks[:] = 0
        return outcome

    settings = AuditSettings(**{**vars(SETTINGS), "scorer": flattering})
    finding = found(defended, some, settings, checks=("fresh scoring",))["fresh scoring"]
    assert (finding.status, finding.numbers["reported"]) == ("fail", 1.0)


def test_an_attack_with_too_few_draws_is_caught(defended, digits):
    """One step of one draw, against few steps of twenty."""
    weak = {"attack": PGD(threat=THREAT, steps=1, random_start=False), "eot_sweep": (1, 20), "steps": 6}
    settings, model = AuditSettings(**{**vars(SETTINGS), **weak}), defended.with_gradient("exact")
    finding = found(model, digits.batch(slice(0, 80)), settings, checks=("draws (EOT)",))["draws (EOT)"]
    assert finding.status == "fail"
    assert finding.numbers["accuracy"][-1] < finding.numbers["audited attack"]


@pytest.mark.parametrize("settings", [AuditSettings(), AuditSettings().quick()], ids=["full", "quick"])
def test_checks_against_better_attacks_cost_at_most_thirty_percent(defended, some, settings):
    planned = planned_passes(AuditedModel(defended, some[0][:4], some[1][:4], settings, 1))
    added = ("better optimizer", "equal budget", "frozen draws", "low frequencies")
    new = sum(planned[name] for name in added)
    assert 0 < new <= 0.3 * (sum(planned.values()) - new)


def test_a_worse_optimizer_than_the_suites_is_caught(defended, some):
    """The same number of gradients, spent on steps too small to arrive."""
    examples, model = (some[0][:40], some[1][:40]), defended.with_gradient("exact")
    slow = PGD(threat=THREAT, steps=10, eot=5, step_size=THREAT.epsilon / 100)
    settings = AuditSettings(**{**vars(SETTINGS), "attack": slow})
    finding = found(model, examples, settings, checks=("better optimizer",))["better optimizer"]
    assert finding.status == "fail"
    assert finding.numbers["suite"] < finding.numbers["audited attack"]
    assert finding.numbers["gradient passes"] == 50
    assert found(model, examples, checks=("better optimizer",))["better optimizer"].status == "pass"


def test_gradients_wasted_on_draws_are_caught(defended, some):
    """One step of forty draws, where ten steps of four would do."""
    examples, model = (some[0][:40], some[1][:40]), defended.with_gradient("exact")
    settings = AuditSettings(**{**vars(SETTINGS), "steps": 1, "eot": 40})
    finding = found(model, examples, settings, checks=("equal budget",))["equal budget"]
    assert finding.status == "fail"
    assert "4 steps of 10 draws" in finding.meaning
    assert found(model, examples, checks=("equal budget",))["equal budget"].status == "pass"


class SecretSigns(nn.Module):
    """A linear score whose signs are drawn anew at each call: only who knows the draw can lower it."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator()

    def reseed(self, seed: int) -> None:
        self.generator.manual_seed(seed)

    def forward(self, images: Tensor) -> Tensor:
        signs = torch.randint(0, 2, images.shape, generator=self.generator) * 2 - 1
        score = 10 * ((images - 0.5) * signs).mean((1, 2, 3)) / THREAT.epsilon + 5
        return torch.stack([score, -score], 1)


def test_robustness_by_a_secret_draw_is_told(plain, some):
    images = 0.45 + 0.1 * some[0]
    finding = found(SecretSigns(), (images, torch.zeros_like(some[1])), checks=("frozen draws",))["frozen draws"]
    assert finding.status == "warn"
    assert finding.numbers["fresh draws"] > 0.95
    assert finding.numbers["frozen draws"] == 0
    assert found(plain, some, checks=("frozen draws",))["frozen draws"].status == "pass"


class _Checkered(torch.autograd.Function):
    """The identity, whose backward pass drowns the gradient in a checkerboard."""

    @staticmethod
    def forward(ctx, images):
        return images.clone()

    @staticmethod
    def backward(ctx, gradient):
        rows, columns = torch.arange(gradient.shape[2])[:, None], torch.arange(gradient.shape[3])
        checkers = 1 - 2.0 * ((rows + columns) % 2)
        return gradient + 2 * gradient.abs().amax((1, 2, 3), keepdim=True) * checkers


def test_an_attack_blind_to_smooth_perturbations_is_caught(plain, some):
    def model(images: Tensor) -> Tensor:
        return plain(_Checkered.apply(images))

    finding = found(model, some, checks=("low frequencies",))["low frequencies"]
    assert finding.status == "fail"
    assert finding.numbers["low frequencies"] < finding.numbers["audited attack"]
    assert found(plain, some, checks=("low frequencies",))["low frequencies"].status == "pass"


def test_a_model_that_does_not_repeat_is_caught(defended, some):
    class Restless(nn.Module):
        def reseed(self, seed: int) -> None:
            pass

        def forward(self, images: Tensor) -> Tensor:
            return defended(images)

    assert found(Restless(), some, checks=("reproducibility",))["reproducibility"].status == "fail"


def test_settings_that_cannot_work_are_refused(plain, some):
    with pytest.raises(ConfigurationError, match="max_queries >= 1, got 0"):
        AuditSettings(max_queries=0)
    with pytest.raises(ConfigurationError, match="empty"):
        audit(plain, some[0][:0], some[1][:0])


@pytest.mark.slow
@pytest.mark.parametrize("which", ["deterministic", "random"])
def test_the_time_left_is_estimated_by_counted_passes(plain, defended, some, which, monkeypatch, capsys):
    """By a clock that only forward passes and gradients move, it is right from the first lines on."""
    model = copy.deepcopy(plain if which == "deterministic" else defended)
    now, lines = [0.0], []

    def tick(_, arguments):
        (images, *_) = arguments
        now[0] += 0.01 * len(images) * (2 if images.requires_grad and torch.is_grad_enabled() else 1)

    model.register_forward_pre_hook(tick)
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 1.0)
    monkeypatch.setattr(progress, "format_duration", lambda seconds: lines.append((now[0], seconds)) or "some")
    settings = AuditSettings(**{**vars(SETTINGS), "max_queries": 20, "draws": 10, "steps": 6})
    audit(model, some[0][:5], some[1][:5], settings)
    end = now[0]
    assert len(lines) >= 5
    wrong = [(when, left, end - when) for when, left in lines if not 0.7 < (when + left) / end < 1.4]
    assert wrong == []
    assert re.search(r"audit \(forward passes\): [\d,.]+/[\d,.]+, some left, check \w+", capsys.readouterr().err)


def test_checks_of_what_is_no_module_are_counted_one_by_one(plain, some, monkeypatch, capsys):
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0.0)
    checks = {name: CHECKS[name] for name in ("reproducibility", "own generator", "gradients")}
    audit(lambda images: plain(images), some[0][:2], some[1][:2], SETTINGS, checks=checks)
    told = capsys.readouterr().err
    assert "audit (forward passes): 6/14" in told, told
    assert "audit (forward passes): 14/14" in told, told


@pytest.mark.slow
def test_an_audit_resumes_with_what_was_kept(defended, some, capsys):
    """The other findings are those of an audit that was never interrupted."""
    names = ("reproducibility", "threat model", "fresh scoring", "noise", "steps", "low frequencies")
    checks = {name: CHECKS[name] for name in names}
    examples = (some[0][:8], some[1][:8])
    kept: list[list] = []
    whole = audit(defended, *examples, SETTINGS, checks=checks, keep=kept.append)
    assert [len(one) for one in kept] == [1, 2, 3, 4, 5, 6]
    assert kept[-1] == whole

    def must_not_run(_):
        raise AssertionError("a finished check ran again")

    again = {**dict.fromkeys(names[:3], must_not_run), **{name: CHECKS[name] for name in names[3:]}}
    assert audit(defended, *examples, SETTINGS, checks=again, finished=kept[2]) == whole


def test_gradients_that_are_too_weak_are_told_with_the_remedy(plain, some):
    """A defense whose BPDA is useless: the check names the option that passes, and with it passes."""

    class Careless(nn.Module):
        def __init__(self, gradient: str) -> None:
            super().__init__()
            self.classifier, self.gradient = plain, gradient

        def forward(self, images: Tensor) -> Tensor:
            # As BPDA with a bad surrogate: the gradient of mirrored images.
            seen = images if self.gradient == "exact" else images.flip(-1) + (images - images.flip(-1)).detach()
            return self.classifier(seen)

        def with_gradient(self, gradient: str) -> "Careless":
            return Careless(gradient).eval()

    finding = found(Careless("bpda"), some, checks=("exact and BPDA",))["exact and BPDA"]
    assert finding.status == "fail"
    assert "To pass" in finding.meaning
    assert "--gradient exact" in finding.meaning
    assert found(Careless("exact"), some, checks=("exact and BPDA",))["exact and BPDA"].status == "pass"


FACTORY = """
import torch
from torch import nn

class Half(nn.Module):
    def forward(self, images):
        dark = images.mean((1, 2, 3))
        return torch.stack([0.5 - dark, dark - 0.5], 1) * 20

def honest():
    return Half()

class Blind(Half):
    def forward(self, images):
        return super().forward((images * 4).round() / 4)
"""


@pytest.fixture
def workplace(tmp_path, monkeypatch):
    """A user's folder: a module with models, and images in class folders."""
    from PIL import Image

    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "their_models.py").write_text(FACTORY)
    random = torch.Generator().manual_seed(0)
    for kind, level in (("dark", 60), ("light", 190)):
        folder = tmp_path / "pictures" / "test" / kind
        folder.mkdir(parents=True)
        (tmp_path / "pictures" / "train" / kind).mkdir(parents=True)
        for number in range(12):
            pixels = (level + torch.randint(-25, 25, (8, 8, 3), generator=random)).to(torch.uint8)
            Image.fromarray(pixels.numpy()).save(folder / f"{number}.png")
            if number < 2:
                Image.fromarray(pixels.numpy()).save(folder.parents[1] / "train" / kind / f"{number}.png")
    yield tmp_path
    sys.modules.pop("their_models", None)


def run(*words: str) -> int:
    return cli.main(["audit", *words, "--data", "pictures", "--quick", "--epsilon", "0.2"])


def test_the_command_audits_a_users_own_model(workplace, capsys):
    assert run("their_models:honest", "--out", "found.json") == 0
    told = capsys.readouterr().out
    assert "draws (EOT)" in told
    assert "fail" not in told
    written = json.loads((workplace / "found.json").read_text())
    assert [one["name"] for one in written["findings"]] == list(CHECKS)
    assert written["dataset"]["class_names"] == ["dark", "light"]
    assert run("their_models:Blind") == 1
    assert "fail" in capsys.readouterr().out
    assert (workplace / "runs" / "their_models.Blind" / "audit.json").is_file()


@pytest.mark.slow
def test_an_interrupted_command_keeps_the_findings_of_finished_checks(workplace, capsys, monkeypatch):
    calls = []

    def interrupted(audited):
        calls.append("interrupted")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setitem(CHECKS, "epsilon", interrupted)
        assert run("their_models:honest", "--out", "found.json") == 130
    assert "the findings of finished checks are kept; rerun the same command to resume" in capsys.readouterr().err
    kept = workplace / "found.unfinished.json"
    before = json.loads(kept.read_text())["findings"]
    assert [one["name"] for one in before] == list(CHECKS)[: list(CHECKS).index("epsilon")]
    monkeypatch.setitem(CHECKS, "gradients", lambda _: pytest.fail("a finished check ran again"))
    assert run("their_models:honest", "--out", "found.json") == 0
    after = json.loads((workplace / "found.json").read_text())["findings"]
    assert after[: len(before)] == before
    assert not kept.exists()
    assert run("their_models:honest", "--gradient", "exact") == 2
    assert "--gradient exact needs a model with preprocessing, got a Half" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("change", ["damaged", "other seed"])
def test_kept_findings_of_another_audit_or_damaged_ones_are_not_used(workplace, capsys, monkeypatch, change):
    def interrupted(audited):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setitem(CHECKS, "threat model", interrupted)
        assert run("their_models:honest", "--out", "found.json") == 130
    kept, other = workplace / "found.unfinished.json", []
    if change == "damaged":
        kept.write_bytes(kept.read_bytes().replace(b'"pass"', b'"fail"'))
    else:
        other = ["--seed", "1"]
    assert run("their_models:honest", "--out", "found.json", *other) == 0
    assert "fail" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "target, words",
    [
        ("their_models:absent", "cannot be imported"),
        ("no_such_module_here:thing", "cannot be imported"),
        ("their_models", "expected a run folder"),
        ("their_models:torch.nn.ReLU.forward.__doc__.title", "a str"),
    ],
)
def test_the_command_says_what_it_cannot_use(workplace, capsys, target, words):
    assert run(target) == 2
    assert words in capsys.readouterr().err
