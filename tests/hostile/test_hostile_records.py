"""Files from a stranger, full disks and killed writers: one clear error, bounded memory, nothing lost."""

import base64
import errno
import json
import os
import re
import subprocess
import sys
import time
import zlib
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from menet import cli, files
from menet.errors import CheckpointError, ConfigurationError, RecordError
from menet.evaluation import jsonl, read
from menet.evaluation.snapshots import pack, unpack
from menet.files import ABANDONED, require_writable, write_atomically
from menet.report.page import Report, Section, write_markdown
from menet.training import TrainingConfig, train
from menet.training.pretrained import training_of

HEADER = {
    "format": "menet.records/2",
    "evaluation": {"label": "pgd", "start": 0, "stop": 3, "scoring": {"draws": 2}},
    "made": {},
}
SCORES = {"predictions": [1, 2], "ranks": [0, 1], "mean": {"prediction": 1, "rank": 0, "probability": 0.5}}
ROW = {"index": 0, "label": 1, "clean": SCORES, "adversarial": SCORES}


def test_an_image_that_unpacks_to_more_than_it_says_is_refused():
    image = torch.rand(3, 4, 5)
    assert torch.equal(unpack(pack(image)), image)
    bomb = base64.b64encode(zlib.compress(bytes(2**28), 9)).decode()
    assert len(bomb) < 400_000
    for packed in (
        {"shape": [3, 4, 5], "zlib": bomb},
        {"shape": [1, 10**6, 10**6], "zlib": bomb},
        {"shape": [4], "zlib": bomb},
        {"shape": "abc", "zlib": ""},
        {"shape": [1, 1, 1], "zlib": "!"},
        {"zlib": ""},
    ):
        with pytest.raises(RecordError, match="image that cannot be read"):
            unpack(packed)


@pytest.mark.parametrize(
    "wrong",
    [
        {"clean": None},
        {"adversarial": 3},
        {"adversarial": {**SCORES, "predictions": "12"}},
        {"adversarial": {**SCORES, "ranks": [0, 1.5]}},
        {"adversarial": {**SCORES, "ranks": [0]}},
        {"adversarial": {**SCORES, "ranks": [], "predictions": []}},
        {"clean": {**SCORES, "predictions": [-1, 2]}},
        {"clean": {**SCORES, "mean": [0]}},
        {"label": True},
        {"label": 2**31},
        {"label": -1},
        {"clean": {**SCORES, "predictions": [2**31, 2]}},
        {"index": 99},
        {"seconds": "long"},
        {"queries": None},
        {"failed": 1},
        {"perturbation": [1]},
        {"loss_history": [1, "x"]},
        {"restarts": {"a": 1}},
        {"counts": ["x"]},
        {"radius": 10**12},
        {"radius": 1.5},
        {"snapshots": {"clean": {"image": "x"}}},
        {"snapshots": {"clean": {"image": {}, "prediction": "1", "probability": 0.5}}},
        {"seeds": 3},
    ],
)
def test_a_record_with_a_valid_checksum_and_wrong_values_is_named(tmp_path, wrong):
    path = tmp_path / "pgd.rank0.jsonl"
    path.write_bytes(jsonl.encode(HEADER) + jsonl.encode(ROW) + jsonl.encode({**ROW, "index": 1, **wrong}))
    with pytest.raises(RecordError, match=r"rank0\.jsonl:3 has "):
        read(path)
    assert len(read(path, damaged=True).rows) == 1


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity"])
def test_numbers_that_are_none_are_a_damaged_line(tmp_path, number):
    path = tmp_path / "pgd.rank0.jsonl"
    text = b'{"index":0,"label":0,"seconds":' + number.encode() + b"}"
    line = text[:-1] + f',"crc":"{zlib.crc32(text):08x}"}}\n'.encode()
    path.write_bytes(jsonl.encode(HEADER) + line)
    with pytest.raises(RecordError, match=r":2 is not JSON"):
        read(path)


@pytest.mark.parametrize("command", ["report", "compare"])
def test_records_that_cannot_be_shown_are_one_line(tmp_path, command, capsys):
    evaluation = {
        **HEADER["evaluation"],
        "model": {"kind": "Network"},
        "dataset": {"name": "digits", "split": "test"},
        "attack": {"kind": "PGD", "restarts": {}, "steps": 3},
        "gradient": "exact",
        "seed": 0,
    }
    row = {**ROW, "adversarial": {**SCORES, "mean": {"rank": 0}}, "perturbation": {"linf": "far"}}
    for number in range(3):
        evaluation["attack"]["restarts"] = [{}, "many", 3][number]
        line = jsonl.encode({**HEADER, "evaluation": evaluation})
        (tmp_path / "pgd.rank0.jsonl").write_bytes(line + jsonl.encode(row))
        assert cli.main([command, str(tmp_path), *([str(tmp_path)] if command == "compare" else [])]) in (0, 2)
        told = capsys.readouterr().err
        assert "Traceback" not in told


def test_a_name_is_never_a_formula(tmp_path):
    from menet.report import figures
    from menet.report.curves import Point, Series

    points = tuple(Point(at, 0.5, 0.4, 0.6) for at in (1.0, 2.0))
    # Long enough to be wrapped anywhere.
    for name in ("$x^{$", r"\$x^{\$", "$x^{" * 60, "x" * 47 + "$x^{$" * 20):
        for draw in (figures.votes, figures.certified, figures.losses):
            file = tmp_path / "figure.png"
            draw([Series(name, points)]).savefig(file)  # a formula that does not parse raises here
            assert file.read_bytes().startswith(b"\x89PNG")
            file.unlink()


def test_deep_json_is_a_damaged_line(tmp_path):
    path = tmp_path / "pgd.rank0.jsonl"
    deep = b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    line = deep[:-1] + f',"crc":"{zlib.crc32(deep):08x}"}}\n'.encode()
    path.write_bytes(jsonl.encode(HEADER) + line)
    with pytest.raises(RecordError, match=r":2 is not JSON"):
        read(path)


def test_deep_json_elsewhere_is_no_traceback(tmp_path):
    from menet.commands.train import json_object
    from menet.data.published import _read_json

    file = tmp_path / "origin.json"
    file.write_bytes(b"[" * 100_000)
    assert _read_json(file) == {}
    with pytest.raises(ConfigurationError, match="expected a JSON object for --settings"):
        json_object("[" * 100_000)


def test_html_in_names_does_not_reach_markdown(tmp_path):
    hostile = "<script>alert(1)</script>"
    section = Section("a", "A", (hostile,), findings=({"model": hostile, "name": hostile, "status": "fail",
                      "meaning": hostile, "numbers": [(hostile, hostile)]},))  # fmt: skip
    (file,) = write_markdown(Report(hostile, (hostile,), (section,)), tmp_path / "report.md")
    assert "<script>" not in file.read_text()


def test_what_a_killed_writer_left_is_removed_by_a_later_one(tmp_path):
    file = tmp_path / "a[1].json"
    program = (
        "import os, sys\nfrom menet.files import replacing\n"
        "with replacing(sys.argv[1]) as path:\n    path.write_text('half')\n    os._exit(9)\n"
    )
    subprocess.run([sys.executable, "-c", program, str(file)], check=False)
    (left,) = tmp_path.glob(".*.part")
    write_atomically(file, "new")
    assert left.exists(), "it may belong to a process that is still writing"
    old = time.time() - 2 * ABANDONED
    os.utime(left, (old, old))
    write_atomically(file, "newer")
    assert not left.exists()
    assert file.read_text() == "newer"


def test_a_full_disk_is_one_line_with_a_remedy(monkeypatch, capsys, tmp_path):
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(files.os, "fsync", full)
    rows = tmp_path / "run"
    rows.mkdir()
    (rows / "pgd.rank0.jsonl").write_bytes(jsonl.encode(HEADER))
    monkeypatch.setattr("menet.report.collect.collect", full)
    assert cli.main(["report", str(rows)]) == 2
    told = capsys.readouterr().err
    assert "No space left on device; free some space and rerun" in told
    assert "Traceback" not in told


def test_an_output_that_cannot_be_written_is_known_before_the_work(tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(OSError, match=r"Not a directory|File exists"):
        require_writable(file / "audit.json")
    require_writable(tmp_path / "new" / "audit.json")
    assert list((tmp_path / "new").iterdir()) == []


def test_a_log_that_is_not_text_does_not_stop_a_run(tmp_path):
    from menet.training.monitoring import read_log

    good = {"kind": "epoch", "step": 3, "epoch": 1}
    (tmp_path / "log.jsonl").write_bytes(
        b"\xff\xfe\x00\n" + json.dumps(good).encode() + b"\n" + b"[" * 10**5 + b"\n"
    )
    assert read_log(Path(tmp_path)) == [good]


@pytest.mark.parametrize(
    "wrong",
    [
        {"start": "0"},
        {"stop": 10**12},
        {"start": -1},
        {"start": 5, "stop": 2},
        {"label": ["pgd"]},
        {"attack": "PGD"},
        {"attack": {"kind": 3}},
        {"attack": {"kind": "Transfer", "attack": {"kind": "PGD", "eot": "ten"}}},
        {"scoring": {"draws": "many"}},
        {"threat": {"norm": 2, "epsilon": 0.1}},
        {"threat": {"norm": "linf", "epsilon": [1]}},
        {"dataset": {"name": 7}},
        {"dataset": {"class_names": 7}},
        {"model": {"defense": "me-net"}},
        {"seed": True},
    ],
)
def test_a_header_with_a_valid_checksum_and_wrong_values_is_refused(tmp_path, wrong):
    path = tmp_path / "pgd.rank0.jsonl"
    evaluation = {**HEADER["evaluation"], **wrong}
    path.write_bytes(jsonl.encode({**HEADER, "evaluation": evaluation}) + jsonl.encode(ROW))
    with pytest.raises(RecordError, match=r"rank0\.jsonl:1 has "):
        read(path)


@pytest.mark.parametrize("lacking", ["model", "dataset", "attack", "scoring", "seed"])
def test_a_report_says_what_a_header_lacks(tmp_path, lacking, capsys):
    whole = {
        "model": {"kind": "Network"},
        "dataset": {"name": "digits", "split": "test"},
        "attack": {"kind": "PGD"},
        "seed": 0,
    }
    evaluation = {**HEADER["evaluation"], **whole}
    del evaluation[lacking]
    line = jsonl.encode({**HEADER, "evaluation": evaluation})
    (tmp_path / "pgd.rank0.jsonl").write_bytes(line + jsonl.encode(ROW))
    assert cli.main(["report", str(tmp_path)]) == 2
    assert f"menet report: expected '{lacking}" in capsys.readouterr().err


DEEP = b"[" * 100_000 + b"]" * 100_000
NO_TEXT = b'{"dataset": "\xff\xfe"}'


@pytest.mark.parametrize("content", [DEEP, NO_TEXT, b"3", b'{"findings": [{"name": 1}]}', b'{"findings": 1}'])
def test_an_audit_that_cannot_be_read_is_one_line(tmp_path, capsys, content):
    (tmp_path / "audit.json").write_bytes(content)
    assert cli.main(["report", str(tmp_path)]) == 2
    assert "expected an audit in" in capsys.readouterr().err


@pytest.mark.parametrize(
    "content",
    [DEEP, NO_TEXT, b"3", b'{"seconds": "x"}', b'{"paper": [{"model": "a", "attack": "b", "accuracy": "x"}]}'],
)
def test_notes_that_cannot_be_read_are_one_line(tmp_path, capsys, content):
    (tmp_path / "audit.json").write_text('{"findings": []}')
    (tmp_path / "report.json").write_bytes(content)
    assert cli.main(["report", str(tmp_path)]) == 2
    assert "expected the notes of a report in" in capsys.readouterr().err


@pytest.mark.parametrize("content", [DEEP, NO_TEXT, b"3", b"{}"])
def test_a_configuration_that_cannot_be_read_names_the_option_instead(tmp_path, content):
    from menet.commands.options import dataset_of

    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ConfigurationError, match="name the dataset with --data"):
        dataset_of(None, str(tmp_path), "test")
    if content in (DEEP, NO_TEXT):
        with pytest.raises(CheckpointError, match="restore it or remove it"):
            training_of(tmp_path)


@pytest.mark.slow
def test_a_damaged_test_row_of_a_log_is_measured_again(tmp_path):
    """The log has no checksum, so that what it says of the test is taken only if it can be true."""
    config = TrainingConfig(
        model="small", epochs=1, limit=16, batch_size=16, validation=0, precision="float32", dataset="digits"
    )
    first = train(config, tmp_path)
    log = tmp_path / "log.jsonl"
    lines = log.read_text().splitlines()
    kept = [line for line in lines if json.loads(line)["kind"] != "test"]
    for row in ({"epoch": "x", "accuracy": 0.5}, {"epoch": 1, "accuracy": 7.0}, {"epoch": 1}):
        log.write_text("\n".join([*kept, json.dumps({"kind": "test", "step": 1, **row})]) + "\n")
        assert train(config, tmp_path) == first


@pytest.mark.parametrize("content", [DEEP, NO_TEXT, b"[3]", b""])
def test_damaged_results_of_a_reproduction_are_one_line_or_measured_again(
    tmp_path, content, without_annotation_checks
):
    from menet.commands.demo import _first_time
    from menet.experiments.jobs import DONE, Workspace
    from menet.experiments.measures import Measurement
    from menet.experiments.plan import load_summary, summary_path
    from menet.experiments.runner import finished

    workspace, job = Workspace(tmp_path), SimpleNamespace(kind="ranks", key="0" * 20)
    summary = summary_path(workspace, "smoke", "table4")
    for path in (summary, workspace.folder(job) / "result.json", workspace.folder(job) / DONE):
        write_atomically(path, content)
    with pytest.raises(RecordError, match=re.escape(str(summary))):
        load_summary(workspace, "smoke", "table4")
    if content != b"[3]":
        with pytest.raises(RecordError, match=r"result\.json is damaged"):
            Measurement.result(job, workspace)
    assert finished(job, workspace) is None
    assert _first_time(summary, 3.0) == 3.0


def test_a_full_disk_is_told_with_the_name_of_the_records(tmp_path, monkeypatch):
    def full(handle, content):
        raise OSError(errno.ENOSPC, "No space left on device")

    with jsonl.Appender(tmp_path / "pgd.rank0.jsonl") as file:
        monkeypatch.setattr(jsonl.os, "write", full)
        with pytest.raises(OSError, match=r"No space left on device: '.*pgd\.rank0\.jsonl'"):
            file.append([ROW])
