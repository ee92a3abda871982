"""Graphs of jobs: finished jobs are not repeated, interrupted ones resume, a failure blocks only dependents."""

import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest

from menet.errors import ConfigurationError
from menet.experiments.jobs import DONE, Job, Workspace
from menet.experiments.plan import graph
from menet.experiments.runner import LOG, JobOutcome, Local, failures, finished


@dataclass(frozen=True, eq=False, kw_only=True)
class Step(Job):
    """Writes the sum of its own number and its needs'; counts how often it ran."""

    number: int
    after: tuple["Step", ...] = ()
    trouble: str = field(default="", compare=False)
    """What goes wrong while a file of this name lies in the root: `raise` or `die`."""

    kind: ClassVar[str] = "step"

    @property
    def needs(self) -> tuple[Job, ...]:
        return self.after

    def content(self) -> dict[str, Any]:
        return {"number": self.number, "after": [one.key for one in self.after]}

    def run(self, folder: Path, workspace: Workspace) -> None:
        runs = folder / "runs"
        runs.write_text(runs.read_text() + "x" if runs.exists() else "x")
        print(f"step {self.number} at work")
        if self.trouble and (workspace.root / self.trouble).exists():
            if self.trouble == "raise":
                raise ConfigurationError(f"expected another number, got {self.number}")
            (workspace.root / self.trouble).unlink()
            os._exit(9)
        total = self.number + sum(int((workspace.ready(one) / "sum").read_text()) for one in self.after)
        (folder / "sum").write_text(str(total))

    def title(self) -> str:
        return f"step {self.number}"


def diamond(trouble: str = "", left: int = 2) -> tuple[Step, Step, Step, Step]:
    first = Step(number=1)
    second, third = Step(number=left, after=(first,), trouble=trouble), Step(number=3, after=(first,))
    return first, second, third, Step(number=4, after=(second, third))


def run(jobs: tuple[Job, ...], workspace: Workspace, workers: int = 1) -> dict[str, JobOutcome]:
    return Local(workers)(graph(jobs), workspace, lambda outcome: None)


def times(job: Job, workspace: Workspace) -> int:
    return len((workspace.folder(job) / "runs").read_text())


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    return Workspace(tmp_path)


def test_each_job_runs_once_and_never_again(workspace: Workspace) -> None:
    jobs = diamond()
    assert {one.status for one in run(jobs, workspace).values()} == {"done"}
    assert (workspace.folder(jobs[3]) / "sum").read_text() == "11"
    assert {one.status for one in run(jobs, workspace).values()} == {"kept"}
    assert [times(job, workspace) for job in jobs] == [1, 1, 1, 1]


def test_a_changed_setting_repeats_just_what_depends_on_it(workspace: Workspace) -> None:
    run(diamond(), workspace)
    changed = diamond(left=20)
    outcomes = run(changed, workspace)
    statuses = [outcomes[job.key].status for job in changed]
    assert statuses == ["kept", "done", "kept", "done"]
    assert (workspace.folder(changed[3]) / "sum").read_text() == "29"


def test_a_failed_job_stops_only_what_needs_it_and_is_reported_with_its_log(workspace: Workspace) -> None:
    (workspace.root / "raise").touch()
    first, second, third, last = diamond("raise")
    outcomes = run((first, second, third, last), workspace)
    assert [outcomes[job.key].status for job in (first, second, third, last)] == [
        "done",
        "failed",
        "done",
        "blocked",
    ]
    (failed,) = failures(outcomes)
    assert "expected another number, got 2" in failed.message
    assert "step 2 at work" in (failed.log or Path()).read_text()
    assert "Traceback" in (failed.log or Path()).read_text()
    assert outcomes[last.key].message == "step 2 failed"
    (workspace.root / "raise").unlink()
    repaired = run((first, second, third, last), workspace)
    assert [repaired[job.key].status for job in (first, second, third, last)] == ["kept", "done", "kept", "done"]


def test_an_interrupted_job_is_not_done(workspace: Workspace) -> None:
    jobs = diamond()
    run(jobs, workspace)
    (workspace.folder(jobs[1]) / DONE).unlink()
    assert finished(jobs[1], workspace) is None
    assert run(jobs, workspace)[jobs[1].key].status == "done"
    assert times(jobs[1], workspace) == 2
    marker = workspace.folder(jobs[2]) / DONE
    marker.write_text(json.dumps({"key": "of another job", "seconds": 1}))
    assert finished(jobs[2], workspace) is None
    marker.write_text('{"key": "torn')
    assert finished(jobs[2], workspace) is None


def test_parallel_processes_finish_although_one_dies(workspace: Workspace) -> None:
    (workspace.root / "die").touch()
    jobs = diamond("die")
    outcomes = run(jobs, workspace, workers=2)
    assert {one.status for one in outcomes.values()} == {"done"}
    assert (workspace.folder(jobs[3]) / "sum").read_text() == "11"
    assert times(jobs[1], workspace) == 2


@pytest.mark.slow
def test_ray_gives_what_one_process_gives_although_a_worker_dies(
    workspace: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ray", reason="needs the extra: pip install 'menet[ray]'")
    from menet.experiments.runner import Ray

    # Ray's workers must find the class of these jobs.
    here = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))
    monkeypatch.setenv("PYTHONPATH", here)
    (workspace.root / "die").touch()
    jobs = diamond("die")
    outcomes = Ray(cpus=2)(graph(jobs), workspace, lambda outcome: None)
    assert {one.status for one in outcomes.values()} == {"done"}
    assert times(jobs[1], workspace) == 2
    alone = Workspace(tmp_path / "alone")
    run(jobs, alone)
    for job in jobs:
        assert (workspace.folder(job) / "sum").read_text() == (alone.folder(job) / "sum").read_text()


@pytest.fixture
def stored(tmp_path: Path) -> Iterator[tuple[Workspace, Workspace]]:
    """Two machines that share nothing but a store."""
    address = f"memory://menet-{tmp_path.name}"
    here, there = (Workspace(tmp_path / name, address=address) for name in ("here", "there"))
    here.root.mkdir()
    there.root.mkdir()
    yield here, there
    fsspec.filesystem("memory").rm("/", recursive=True)


def test_machines_that_share_a_store_do_nothing_twice(stored: tuple[Workspace, Workspace]) -> None:
    here, there = stored
    first, second, third, last = diamond()
    run((first, second), here)
    outcomes = run((first, second, third, last), there)
    assert [outcomes[job.key].status for job in (first, second, third, last)] == ["kept", "kept", "done", "done"]
    assert (there.folder(last) / "sum").read_text() == "11"
    assert not here.folder(last).exists()
    assert (here.ready(last) / "sum").read_text() == "11"
    assert finished(last, here) is not None


def test_another_machine_resumes_a_failed_job(stored: tuple[Workspace, Workspace]) -> None:
    here, there = stored
    (here.root / "raise").touch()
    jobs = diamond("raise")
    assert run(jobs, here)[jobs[1].key].status == "failed"
    assert finished(jobs[1], there) is None
    assert run(jobs, there)[jobs[3].key].status == "done"
    assert times(jobs[1], there) == 2


def test_files_are_uploaded_while_a_job_runs_and_its_marker_last(
    stored: tuple[Workspace, Workspace], tmp_path: Path
) -> None:
    store = stored[0].store
    assert store is not None
    folder = tmp_path / "job"
    (folder / "run").mkdir(parents=True)
    with store.mirroring("job", folder, DONE, interval=0.01):
        (folder / "run" / "checkpoint").write_bytes(b"one")
        (folder / DONE).write_text("{}")
        (folder / "half.part").write_bytes(b"?")
        deadline = time.monotonic() + 20
        while store.read("job/run/checkpoint") is None and time.monotonic() < deadline:
            time.sleep(0.01)
        assert store.read("job/run/checkpoint") == b"one"
        assert store.read(f"job/{DONE}") is None
        (folder / "run" / "checkpoint").write_bytes(b"second")
    assert store.read("job/run/checkpoint") == b"second"
    assert store.read(f"job/{DONE}") == b"{}"
    assert store.read("job/half.part") is None


def test_a_plain_path_is_a_store_too(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path / "here", address=str(tmp_path / "shared"))
    jobs = diamond()
    run(jobs, workspace)
    assert (tmp_path / "shared" / workspace.name(jobs[3]) / "sum").read_text() == "11"


def test_an_address_that_cannot_be_opened_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="got 'nowhere://x'"):
        finished(diamond()[0], Workspace(tmp_path, address="nowhere://x"))


def test_the_log_is_in_the_jobs_folder(workspace: Workspace) -> None:
    jobs = diamond()
    run(jobs, workspace)
    assert (workspace.folder(jobs[0]) / LOG).read_text() == "step 1 at work\n"
    assert json.loads((workspace.folder(jobs[0]) / "job.json").read_text())["title"] == "step 1"


def test_zero_workers_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="expected workers >= 1, got 0"):
        Local(0)
