"""Compact results: nothing that a number is computed from is lost, and a damaged file is refused."""

import io
import json
import zipfile

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from menet.errors import RecordError
from menet.evaluation import accuracies, compare, publish, read_result, read_results
from menet.evaluation.records import FORMAT as RECORDS
from menet.evaluation.records import Records
from menet.evaluation.results import write_results
from menet.report.board import entries, results_markdown, write_board

CLASSES, DRAWS = 12, 7


def scores(random: np.random.Generator, label: int) -> dict:
    ranks = random.integers(0, CLASSES, DRAWS) * random.integers(0, 2, DRAWS)
    predictions = [label if rank == 0 else int((label + 1 + rank) % CLASSES) for rank in ranks]
    predictions = [one if one != label or rank == 0 else (label + 1) % CLASSES
                   for one, rank in zip(predictions, ranks, strict=True)]  # fmt: skip
    rank = int(random.integers(0, CLASSES))
    mean = {"prediction": label if rank == 0 else (label + 1) % CLASSES, "rank": rank, "probability": 0.25}
    return {"predictions": predictions, "ranks": ranks.tolist(), "mean": mean}


def records(seed: int = 0, label: str = "pgd", count: int = 9, epsilon: float = 0.1) -> Records:
    random = np.random.default_rng(seed)
    rows = []
    for index in range(count):
        true = int(random.integers(0, CLASSES))
        rows.append(
            {
                "index": index,
                "label": true,
                "clean": scores(random, true),
                "adversarial": scores(random, true),
                "perturbation": {"linf": 0.125, "l2": 1.5, "l0": 40},
                "queries": int(random.integers(1, 10**6)),
                "gradients": 400,
                "member": ["exact", "bpda"][index % 2],
                "restarts": random.integers(0, 3, 4).tolist(),
                "image": f"{int(random.integers(2**62)):016x}",
                "failed": bool(index % 3 == 0),
                "unusable_gradients": False,
                "seconds": 0.5,
                "seeds": {"attack": 2**62 + index, "scoring": 5, "clean": 7},
            }
        )
    evaluation = {
        "label": label,
        "start": 0,
        "stop": count,
        "model": {"kind": "MENet", "architecture": {"name": "lenet"}, "defense": {"name": "me-net"}},
        "dataset": {
            "name": "mnist",
            "split": "test",
            "classes": CLASSES,
            "class_names": None,
            "shape": [1, 2, 2],
        },
        "attack": {"kind": "PGD", "steps": 40, "eot": 10},
        "gradient": "exact",
        "fixed_draws": None,
        "threat": {"norm": "linf", "epsilon": epsilon, "low": 0.0, "high": 1.0},
        "scoring": {"draws": DRAWS, "restart_draws": 2, "max_batch": 512},
        "seed": 3,
    }
    header = {"format": RECORDS, "evaluation": evaluation, "made": {"python": "3.12", "versions": {"torch": "2"}}}
    return Records(header, tuple(rows))


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10**6), count=st.integers(1, 12))
def test_every_accuracy_comes_out_the_same(tmp_path_factory, seed, count):
    original = records(seed, count=count)
    path = tmp_path_factory.mktemp("results") / "pgd.npz"
    write_results(path, original)
    found = read_result(path)
    assert found.header == original.header
    assert accuracies(found) == accuracies(original)
    for mine, theirs in zip(found.rows, original.rows, strict=True):
        assert sorted(mine["adversarial"]["predictions"]) == sorted(theirs["adversarial"]["predictions"])
        assert {**mine, "clean": 0, "adversarial": 0} == {**theirs, "clean": 0, "adversarial": 0}


def test_results_of_several_models_compare_as_their_records_do(tmp_path):
    one, other = records(0), records(1)
    shared = ("label", "image", "clean", "adversarial")
    rows = tuple(
        {**row, **{name: mine[name] for name in shared}} for row, mine in zip(other.rows, one.rows, strict=True)
    )
    publish("mnist/a", {"pgd": one}, {}, tmp_path)
    publish("mnist/b", {"pgd": Records(other.header, rows)}, {"config": {"seed": 1}}, tmp_path)
    found = read_results(tmp_path)
    assert set(found) == {"mnist/a", "mnist/b"}
    assert compare(found["mnist/a"]["pgd"], found["mnist/b"]["pgd"]).p_value == 1


def test_rendering_again_changes_nothing(tmp_path):
    publish("mnist/me-net", {"pgd": records(0), "cw": records(1, "cw")}, {"config": {"epochs": 2}}, tmp_path)
    first = {path.name: path.read_bytes() for path in write_board(tmp_path)}
    again = {path.name: path.read_bytes() for path in write_board(tmp_path)}
    assert first == again
    assert set(first) == {"RESULTS.md", "board.json", "board.html"}
    line = json.loads(first["board.json"])[0]
    (entry,) = entries(tmp_path)
    assert line["robust"]["low"] < line["robust"]["value"] < line["robust"]["high"]
    assert line["attacks"] == 2
    assert f"{100 * line['robust']['value']:.1f}%" in results_markdown([entry])


def test_a_name_cannot_leave_the_page_or_the_folder(tmp_path):
    for name in ("../a", "/etc/a", "a//b", "A", "<b>", ""):
        with pytest.raises(RecordError, match="expected a name"):
            publish(name, {"pgd": records()}, {}, tmp_path)
    hostile = records(label="</script><script>alert(1)</script>")
    hostile.header["evaluation"]["attack"]["kind"] = "</script><b>"
    publish("mnist/a", {"x": hostile}, {}, tmp_path)
    page = write_board(tmp_path)[2].read_text()
    assert "</script><b>" not in page
    assert page.count("</script>") == 2


def test_incomplete_records_are_not_published(tmp_path):
    short = records()
    with pytest.raises(RecordError, match="expected all rows of 'pgd', got 1 missing"):
        write_results(tmp_path / "a.npz", Records(short.header, short.rows[:-1]))


@pytest.mark.parametrize("seed", range(30))
def test_damage_is_refused_or_harmless(tmp_path, seed):
    path = tmp_path / "a.npz"
    write_results(path, records())
    content = bytearray(path.read_bytes())
    random = np.random.default_rng(seed)
    if seed % 3 == 0:
        content = content[: int(random.integers(0, len(content)))]
    else:
        for place in random.integers(0, len(content), 3):
            content[place] ^= 1 << int(random.integers(8))
    path.write_bytes(content)
    try:
        found = read_result(path)
    except RecordError:
        return
    # What is not covered by a checksum, such as a name's date, changes no number.
    assert accuracies(found) == accuracies(records())


def test_a_bomb_is_refused_before_it_unpacks(tmp_path):
    path = tmp_path / "bomb.npz"
    buffer = io.BytesIO()
    np.save(buffer, np.zeros(2**29, np.uint8))
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("index.npy", buffer.getvalue())
    with pytest.raises(RecordError, match="unpacks to"):
        read_result(path)
    with pytest.raises(RecordError, match="found none"):
        read_results(tmp_path / "empty")
