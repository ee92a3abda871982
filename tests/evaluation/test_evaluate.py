"""Evaluations: fresh draws, rows that repeat, kills and resumptions, shards."""

import copy
import json
import os
import subprocess
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch
from evaluation_models import KILLED, RESTARTED, THREAT, attack_runs, network
from torch import nn

from menet import seeding
from menet.attacks import FGSM, PGD, Attack, AttackResult, ThreatModel
from menet.baselines import ResizePad
from menet.errors import ConfigurationError, RecordError
from menet.estimators import NuclearNorm
from menet.evaluation import AttackRun, EvaluationSettings, Worker, accuracy, evaluate, jsonl, parse_attack, score
from menet.evaluation.records import read, shard_path, shards
from menet.evaluation.snapshots import pack, unpack
from menet.report.narrative import attack_words

SMALL = EvaluationSettings(stop=24, batch_size=8, draws=6, seed=3)


def plain(records) -> list[dict]:
    return [{**row, "seconds": None} for row in records.rows]


def pgd(model, **changes) -> list[AttackRun]:
    return [AttackRun("pgd", PGD(threat=THREAT, steps=2, **changes), model, "bpda")]


@pytest.fixture(scope="module")
def whole(defended, digits, tmp_path_factory):
    """The evaluation that is killed below, never killed."""
    folder = tmp_path_factory.mktemp("whole")
    (found,) = evaluate(defended, digits, attack_runs(defended), folder, KILLED).values()
    return found


def test_a_row_has_all_that_the_report_needs(whole):
    assert [row["index"] for row in whole.rows] == list(range(3, 63))
    assert whole.missing == ()
    first = whole.rows[0]
    assert len(first["clean"]["predictions"]) == len(first["adversarial"]["ranks"]) == 5
    assert len(first["restarts"]) == 2
    assert len(first["loss_history"]) == RESTARTED.steps + 1
    assert {"clean", "adversarial", "clean_seen", "adversarial_seen"} == first["snapshots"].keys()
    assert "snapshots" not in whole.rows[1]
    shown = [unpack(first["snapshots"][name]["image"]) for name in ("clean", "adversarial")]
    assert (shown[1] - shown[0]).abs().max().item() == pytest.approx(first["perturbation"]["linf"])
    for row in whole.rows:
        assert 0 < row["perturbation"]["linf"] <= THREAT.epsilon + 1e-6
        # The first eight images of a batch are also asked whether the model is random.
        queries = 2 * 2 * (RESTARTED.steps + 1) + 2 * (row["index"] % KILLED.batch_size < 8)
        assert row["queries"] == queries
    evaluation = whole.evaluation
    assert evaluation["attack"]["threat"]["epsilon"] == evaluation["threat"]["epsilon"] == THREAT.epsilon
    assert evaluation["model"]["defense"]["estimator"]["name"] == "usvt"
    assert whole.header["made"]["versions"]["torch"] == torch.__version__


def test_scoring_draws_are_fresh(whole, defended, digits):
    """Seeds differ by purpose, and so do the masks that are drawn from them."""
    used = [seed for row in whole.rows for seed in row["seeds"].values()]
    per_row = [set(row["seeds"].values()) for row in whole.rows]
    assert all(len(seeds) == 3 for seeds in per_row)
    batches = 16
    assert len(set(used)) == 3 * batches
    images, _ = digits.batch(slice(0, 4))
    masks = []
    for name in ("attack", "scoring", "clean"):
        generator = torch.Generator().manual_seed(whole.rows[0]["seeds"][name])
        masks.append(defended.sample_mask(images, generator))
    for one, other in ((0, 1), (0, 2), (1, 2)):
        # Independent masks of p = 0.5 agree on about half of their 3,136 entries.
        assert 0.45 < (masks[one] == masks[other]).float().mean() < 0.55


def test_attacks_in_bfloat16_are_scored_in_float32(defended, digits, tmp_path):
    seen = []
    hook = defended.classifier.register_forward_hook(
        lambda module, given, logits: seen.append((torch.is_autocast_enabled("cpu"), logits.dtype)), prepend=True
    )
    settings = replace(SMALL, stop=8)
    rounded, exact = (
        evaluate(defended, digits, pgd(defended), tmp_path / name, replace(settings, bfloat16=chosen))["pgd"]
        for name, chosen in (("rounded", True), ("exact", False))
    )
    hook.remove()
    assert (True, torch.bfloat16) in seen
    assert {dtype for rounding, dtype in seen if not rounding} == {torch.float32}
    assert [row["clean"] for row in rounded.rows] == [row["clean"] for row in exact.rows]
    assert rounded.evaluation["bfloat16"] is True
    assert "bfloat16" not in exact.evaluation
    assert attack_words(rounded) == attack_words(exact) + ", in bfloat16"
    assert len(defended.classifier._forward_hooks) == 0


def test_a_deterministic_model_is_not_attacked_in_bfloat16(digits, tmp_path):
    """Its attacks compare losses that differ by less than bfloat16 can tell apart."""
    plain = network()
    with pytest.raises(ConfigurationError, match="expected a random model with bfloat16"):
        evaluate(plain, digits, pgd(plain), tmp_path, replace(SMALL, stop=8, bfloat16=True))


def test_seeds_of_purposes_attacks_and_places_do_not_meet():
    purposes = ("attack", "scoring", "clean", "restarts", "pictures", "source")
    found = {
        seeding.batch_seed(seed, purpose, label, place)
        for seed in range(5)
        for purpose in purposes
        for label in ("pgd", "pgd:steps=4", "")
        for place in range(0, 400, 4)
    }
    assert len(found) == 5 * len(purposes) * 3 * 100


def test_rows_say_what_scoring_by_hand_finds(whole, defended, digits):
    row = whole.rows[5]
    first = row["index"] // 4 * 4
    images, labels = digits.batch(slice(first, first + 4))
    defended.reseed(row["seeds"]["clean"])
    with torch.no_grad():
        answers = torch.stack([defended(images).argmax(1) for _ in range(5)])
    assert answers[:, row["index"] - first].tolist() == row["clean"]["predictions"]
    assert row["label"] == int(labels[row["index"] - first])


def test_scores_do_not_depend_on_how_many_images_share_a_pass(defended, some):
    images, labels = some
    outcomes = []
    for rows in (60, 130, 1000):
        defended.reseed(1)
        outcomes.append(score(defended, images, labels, 5, rows).predictions)
    assert torch.equal(outcomes[0], outcomes[1])
    assert torch.equal(outcomes[0], outcomes[2])


def test_an_attack_lowers_accuracy_and_a_deterministic_model_needs_one_draw(defended, digits, tmp_path):
    (found,) = evaluate(defended, digits, pgd(defended, eot=5), tmp_path, SMALL).values()
    assert accuracy(found).value < accuracy(found, "clean").value - 0.1
    bare = defended.classifier
    (found,) = evaluate(bare, digits, pgd(bare), tmp_path / "bare", SMALL).values()
    assert found.evaluation["scoring"]["draws"] == 1
    assert found.evaluation["model"]["defense"] == {}


def test_it_resumes_and_refuses_other_settings(defended, digits, tmp_path):
    (first,) = evaluate(defended, digits, pgd(defended), tmp_path, SMALL).values()
    file = shard_path(tmp_path, "pgd")
    text = file.read_bytes().splitlines(keepends=True)
    # The header, four rows of the first batch and a part of the fifth: as after a kill in a large write.
    file.write_bytes(b"".join(text[:5]) + text[5][:30])
    (second,) = evaluate(defended, digits, pgd(defended), tmp_path, SMALL).values()
    assert plain(first) == plain(second)
    stamp = file.stat().st_mtime_ns
    evaluate(defended, digits, pgd(defended), tmp_path, SMALL)
    assert file.stat().st_mtime_ns == stamp
    with pytest.raises(RecordError, match="expected seed 3, got 4"):
        evaluate(defended, digits, pgd(defended), tmp_path, replace(SMALL, seed=4))
    with pytest.raises(RecordError, match=r"expected attack\.eot 10, got 2"):
        evaluate(defended, digits, pgd(defended, eot=2), tmp_path, SMALL)
    other = type(defended)(network(), defended.estimator)
    with pytest.raises(RecordError, match=r"model\.weights"):
        evaluate(other, digits, pgd(other), tmp_path, SMALL)


def test_processes_share_the_batches_and_make_the_rows_of_one(defended, digits, tmp_path):
    (alone,) = evaluate(defended, digits, pgd(defended), tmp_path / "alone", SMALL).values()
    folder = tmp_path / "shared"
    for rank in range(2):
        (part,) = evaluate(defended, digits, pgd(defended), folder, SMALL, worker=Worker(rank, 2)).values()
        assert len(part.missing) == (8 if rank == 0 else 0)
    assert len(shards(folder, "pgd")) == 2
    assert plain(read(*shards(folder, "pgd"))) == plain(alone)
    # Three processes where two had begun: what is there is not made again.
    shard_path(folder, "pgd", 1).unlink()
    for rank in range(3):
        (part,) = evaluate(defended, digits, pgd(defended), folder, SMALL, worker=Worker(rank, 3)).values()
    assert plain(part) == plain(alone)


def test_a_range_that_cuts_batches_makes_the_same_rows(defended, digits, tmp_path):
    (all_rows,) = evaluate(defended, digits, pgd(defended), tmp_path / "all", SMALL).values()
    cut = replace(SMALL, start=5, stop=19)
    (some_rows,) = evaluate(defended, digits, pgd(defended), tmp_path / "cut", cut).values()
    assert plain(some_rows) == plain(all_rows)[5:19]


@pytest.mark.slow
def test_killed_ten_times_and_resumed_it_ends_with_the_same_rows(whole, defended, tmp_path):
    """kill -9 in the middle, ten times: no row lost, none twice, all identical."""
    weights, folder = tmp_path / "weights.pt", tmp_path / "rows"
    torch.save(defended.state_dict(), weights)
    program = [sys.executable, str(Path(__file__).with_name("evaluation_models.py")), str(folder), str(weights)]
    told = subprocess.check_output(program, env={**os.environ, "OMP_NUM_THREADS": "1"}, text=True)
    sizes, file = json.loads(told), shard_path(folder, "pgd:restarts=2")
    assert len(sizes) == 10
    assert len(set(sizes)) == 10, "each session wrote something before it was killed"
    assert sizes[-1] < file.stat().st_size
    indices = [line.content["index"] for line in jsonl.read(file) if "index" in line.content]
    assert sorted(indices) == list(range(3, 63))
    assert len(indices) == len(set(indices))
    assert plain(read(file)) == plain(whole)


def test_attack_specs(defended):
    found = parse_attack("bpda-eot:steps=7,eot=3,gradient=exact,epsilon=8/255", defended, epsilon=0.3, norm="l2")
    assert (found.attack.steps, found.attack.eot, found.gradient) == (7, 3, "exact")
    assert found.attack.threat.epsilon == pytest.approx(8 / 255)
    assert found.attack.threat.norm == "l2"
    assert found.model.gradient == "exact"
    assert found.model.generator is defended.generator
    gray = parse_attack("pgd:on=classifier,steps=3", defended)
    assert gray.source is defended.classifier
    source = network()
    assert parse_attack("fgsm:on=other", defended, lambda name: source).source is source
    assert parse_attack("classifier-only:steps=2", defended).attack.classifier is defended.classifier
    for words, message in [
        ("nothing", "choose from standard, fgsm"),
        ("pgd:steps", "expected SETTING=VALUE, got 'steps'"),
        ("pgd:gradient=nothing", "gradient=bpda, got .nothing"),
        ("pgd:on=elsewhere", "no `load` was given"),
        ("pgd:stepz=3", "unknown setting 'stepz'"),
    ]:
        with pytest.raises(ConfigurationError, match=message):
            parse_attack(words, defended)
    with pytest.raises(ConfigurationError, match="a model with preprocessing"):
        parse_attack("approximate-input", defended.classifier)


def test_a_gradient_in_the_spec_is_that_of_the_source(defended):
    source = type(defended)(defended.classifier, defended.estimator).eval()
    found = parse_attack("pgd:gradient=exact,on=other", defended, lambda name: source)
    assert found.source.gradient == found.attack.source.gradient == found.gradient == "exact"
    assert found.source.generator is source.generator
    assert source.gradient == "bpda"
    assert parse_attack("pgd:on=classifier", defended).gradient is None
    for spec in ("pgd:gradient=exact,on=classifier", "pgd:gradient=bpda,on=other"):
        with pytest.raises(
            ConfigurationError, match="needs an attacked model with preprocessing, got a Sequential"
        ):
            parse_attack(spec, defended, lambda name: network())


def test_fixed_draws_make_the_attacked_model_deterministic(defended, digits, some, tmp_path):
    images, _ = some
    runs = [parse_attack(f"boundary:steps=3,tries=5,draws=fixed:{bank}", defended) for bank in ("4", "4:7")]
    assert torch.equal(runs[0].model(images), defended.fixed(4, 0)(images))
    assert torch.equal(runs[1].model(images), defended.fixed(4, 7)(images))
    found = evaluate(defended, digits, runs, tmp_path, replace(SMALL, stop=8))
    suite = parse_attack("autoattack:steps=2,draws=fixed:4", defended, epsilon=0.2, attacks=("apgd-ce",))
    assert len(evaluate(defended, digits, [suite], tmp_path, replace(SMALL, stop=8))[suite.label].rows) == 8
    assert [one.evaluation["fixed_draws"] for one in found.values()] == [
        {"draws": 4, "seed": 0},
        {"draws": 4, "seed": 7},
    ]
    for one in found.values():
        assert one.evaluation["scoring"]["draws"] == 6, "scored on fresh draws of the defense itself"
        assert any(len(set(row["adversarial"]["predictions"])) > 1 for row in one.rows)
    surrogate = type(defended)(defended.classifier, defended.estimator).eval()
    transfer = parse_attack("pgd:draws=fixed:3,gradient=exact,on=other", defended, lambda name: surrogate)
    assert (transfer.model, transfer.gradient) == (defended, "exact")
    assert torch.equal(transfer.source(images), surrogate.fixed(3, 0)(images))


def test_frozen_draws_are_those_that_score(defended, digits, tmp_path):
    known, secret = (
        parse_attack(f"pgd:steps=10,draws={kind}:1", defended, epsilon=0.2) for kind in ("frozen", "fixed")
    )
    found = evaluate(defended, digits, [known, secret], tmp_path, replace(SMALL, stop=8))
    frozen, fixed = found[known.label], found[secret.label]
    assert frozen.evaluation["fixed_draws"] == {"draws": 1, "seed": 0, "scored": True}
    assert all(len(set(row["adversarial"]["predictions"])) == 1 for row in frozen.rows)
    assert any(len(set(row["adversarial"]["predictions"])) > 1 for row in fixed.rows)
    assert [row["clean"] for row in frozen.rows] == [row["clean"] for row in fixed.rows]
    with pytest.raises(ConfigurationError, match="frozen is of the evaluated model; leave on=other out"):
        parse_attack("pgd:draws=frozen:1,on=other", defended, lambda name: defended)


def test_fixed_draws_that_cannot_be_are_refused(defended):
    for draws, message in [
        ("10", "expected draws=fixed:N"),
        ("fixed", "expected draws=fixed:N"),
        ("fixed:ten", "expected draws=fixed:N"),
        ("fixed:0", "at least 1 fixed draw"),
    ]:
        with pytest.raises(ConfigurationError, match=message):
            parse_attack(f"boundary:draws={draws}", defended)
    for model in (defended.classifier, ResizePad(defended.classifier)):
        with pytest.raises(
            ConfigurationError, match=f"needs an attacked model with a mask bank.*{type(model).__name__}"
        ):
            parse_attack("boundary:draws=fixed:10", model)


@dataclass(frozen=True)
class Spy(Attack):
    """An attack that does nothing and notes the size of each batch."""

    sizes: list[int] = field(default_factory=list)

    @property
    def threat(self) -> ThreatModel:
        return THREAT

    def run(self, task) -> AttackResult:
        self.sizes.append(len(task.images))
        return AttackResult(images=task.images.clone(), queries=task.model.counts)


def test_only_the_examples_asked_for_are_attacked_unless_a_batch_size_is_chosen(defended, digits, tmp_path):
    bare = defended.classifier
    for number, (settings, sizes) in enumerate(
        [
            (EvaluationSettings(stop=4), [4]),
            (EvaluationSettings(start=8, stop=12), [4]),
            (EvaluationSettings(stop=250), [84, 84, 84]),
            (EvaluationSettings(stop=4, batch_size=8), [8]),
        ]
    ):
        spy = Spy()
        (found,) = evaluate(
            bare, digits, [AttackRun("spy", spy, bare)], tmp_path / str(number), settings
        ).values()
        assert spy.sizes == sizes
        assert found.evaluation["batch_size"] == sizes[0]
        assert len(found.rows) == settings.stop - settings.start


def test_a_batch_of_the_dataset_is_read_once(defended, digits, tmp_path):
    read_slices = []

    class Counted:
        def __len__(self) -> int:
            return len(digits)

        def __getattr__(self, name):
            return getattr(digits, name)

        def batch(self, index):
            read_slices.append((index.start, index.stop))
            return digits.batch(index)

    evaluate(defended, Counted(), pgd(defended), tmp_path, SMALL)
    probe, *batches = read_slices
    assert probe == (0, 8)
    assert batches == [(0, 8), (8, 16), (16, 24)]


def test_a_model_in_training_mode_is_evaluated_and_left_as_it_was(defended, digits, tmp_path):
    def rows(folder, train: bool):
        model, source = (copy.deepcopy(defended).train(train) for _ in range(2))
        model.classifier[1].eval()
        runs = [
            *pgd(model),
            parse_attack("fgsm:gradient=exact", model),
            parse_attack("fgsm:on=other", model, lambda name: source),
        ]
        modes = [module.training for module in (*model.modules(), *source.modules())]
        found = evaluate(model, digits, runs, folder, SMALL)
        assert [module.training for module in (*model.modules(), *source.modules())] == modes
        return [plain(one) for one in found.values()]

    assert rows(tmp_path / "train", True) == rows(tmp_path / "eval", False)


def test_the_source_of_a_transfer_is_moved_to_the_device(defended, digits, tmp_path):
    class Elsewhere(nn.Module):
        """A model that works only after it was moved to the device of the images."""

        def __init__(self) -> None:
            super().__init__()
            self.network, self.device = network(), None

        def to(self, device):
            self.device = torch.device(device)
            return self

        def forward(self, images):
            assert self.device == images.device
            return self.network(images)

    runs = [parse_attack("fgsm:on=other", defended, lambda name: Elsewhere())]
    evaluate(defended, digits, runs, tmp_path, replace(SMALL, stop=8), device="cpu")


def test_transfer_from_a_random_source_repeats(defended, digits, tmp_path):
    source = type(defended)(defended.classifier, defended.estimator, p=0.7)

    def rows(folder):
        words = [parse_attack("pgd:steps=2,on=other", defended, lambda name: source, epsilon=0.2)]
        return plain(*evaluate(defended, digits, words, folder, replace(SMALL, stop=16)).values())

    assert rows(tmp_path / "one") == rows(tmp_path / "two")


def test_settings_that_cannot_work_are_refused(defended, digits, tmp_path):
    for changes, message in [
        ({"start": 9, "stop": 9}, "got start 9 and stop 9"),
        ({"stop": 1001}, "stop <= 1000"),
    ]:
        with pytest.raises(ConfigurationError, match=message):
            evaluate(defended, digits, pgd(defended), tmp_path, replace(SMALL, **changes))
    with pytest.raises(ConfigurationError, match="batch_size >= 1, got 0"):
        EvaluationSettings(batch_size=0)
    with pytest.raises(ConfigurationError, match="twice"):
        evaluate(defended, digits, pgd(defended) * 2, tmp_path, SMALL)


def test_a_minimum_norm_threat_and_other_estimators_can_be_described(defended, digits, tmp_path):
    model = type(defended)(defended.classifier, NuclearNorm(), channels="separate")
    words = [AttackRun("fgsm", FGSM(threat=THREAT), model), parse_attack("cw-l2:steps=2", model)]
    found = evaluate(model, digits, words, tmp_path, replace(SMALL, stop=2, draws=1))
    assert found["cw-l2:steps=2"].evaluation["threat"]["epsilon"] == "inf"


def test_snapshots_survive_to_the_last_bit(some):
    image = some[0][0] + 1e-7
    assert torch.equal(unpack(pack(image)), image)


def test_the_name_of_an_attack_is_no_attack(defended, digits, tmp_path, without_annotation_checks):
    with pytest.raises(ConfigurationError, match=r"as parse_attack\('pgd', model, .*\) returns them, got 'fgsm'"):
        evaluate(defended, digits, ["fgsm"], tmp_path, SMALL)
