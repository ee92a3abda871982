"""`make soak`: thousands of damaged files, kills, full disks and races, counted; the table goes into a document.

    python tests/hostile/soak.py                              all of it, about a quarter of an hour of one core
    python tests/hostile/soak.py --size 5                     a small try
    python tests/hostile/soak.py --only kill-train two-at-once
    python tests/hostile/soak.py --write docs/reliability.md  also replace the table there

Every case must end in the project's own error, or in a right answer; anything else is a finding, printed with
what is needed to repeat it. Counts are kept in a file and belong to one state of the sources: stopped and started
again, a stage continues with its next case, and each run adds to the same table. The exit code is 1 if there are
findings.
"""

import argparse
import contextlib
import hashlib
import io
import json
import multiprocessing
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "data")]
# Read by every process that is started here; threads would also make a process that was forked hang.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(ROOT), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
)

from menet.errors import MenetError  # noqa: E402 (from this tree)
from menet.files import write_atomically  # noqa: E402
from menet.progress import Reporter, format_duration, reporting  # noqa: E402

MEMORY = 3 * 2**30
"""Bytes that a case may take beyond what is there before it."""
SECONDS = 30
"""Seconds that reading one file may take."""
BEGIN, END = "<!-- soak -->", "<!-- /soak -->"
SIZE = 500
KILLS_PER_MUTATION = 20 / 500
DISK = "20m"
TRAIN = (
    "train", "digits", "--limit", "120", "--epochs", "3", "--batch-size", "40", "--defense", "me-net",
    "--model", "small",
)  # fmt: skip
"""A network of which checkpoints fit the small disk several times."""

Words = tuple[str, ...]


def commands(run: Path) -> dict[str, Callable[[Path], Words]]:
    """The commands that work long and are safe to interrupt, each by the folder that it writes."""
    on = str(run)
    return {
        "prepare": lambda out: (
            "prepare", "digits", "--limit", "200", "--per-shard", "20", "--masks", "4", "--out", str(out),
        ),
        "train": lambda out: (*TRAIN, "--out", str(out)),
        "evaluate": lambda out: (
            "evaluate", on, "--attacks", "pgd:steps=3", "--stop", "24", "--batch-size", "4", "--draws", "5",
            "--out", str(out),
        ),
        "certify": lambda out: (
            "certify", on, "--stop", "12", "--batch-size", "2", "--selection", "10", "--estimation", "60",
            "--out", str(out),
        ),
        "audit": lambda out: (
            "audit", on, "--quick", "--examples", "4", "--steps", "3", "--eot", "2", "--draws", "3",
            "--out", str(out / "audit.json"),
        ),
        "reproduce": lambda out: (
            "reproduce", "table15", "--scale", "smoke", "--match", "0.4→0.6", "--examples", "4",
            "--without-extensions", "--workers", "1", "--out", str(out),
        ),
    }  # fmt: skip


@dataclass
class Tally:
    """What was tried of one kind, what did not survive, and the processor time of it."""

    name: str
    tried: int = 0
    findings: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def row(self) -> str:
        return f"| {self.name} | {self.tried:,} | {self.tried - len(self.findings):,} | {len(self.findings)} |"


class Counts:
    """The tallies of one state of the sources, in a file that is written after every second."""

    def __init__(self, file: Path) -> None:
        self.file, self.sources, self.tallies = file, fingerprint(), dict[str, Tally]()
        self.saved = time.monotonic()
        if not file.is_file():
            return
        found = json.loads(file.read_text(encoding="utf-8"))
        if found["sources"] != self.sources:
            print(f"the sources have changed since {file} was written: counting from 0", file=sys.stderr)
            return
        self.tallies = {one["name"]: Tally(**one) for one in found["tallies"]}

    @contextlib.contextmanager
    def cases(self, name: str, count: int) -> Iterator[Iterator[tuple[int, random.Random, list[str]]]]:
        """The cases of a kind that are left: the number of each, its own randomness, and where findings go."""
        tally = self.tallies.setdefault(name, Tally(name))

        def left(progress: Reporter) -> Iterator[tuple[int, random.Random, list[str]]]:
            progress.skip(tally.tried)
            while tally.tried < count:
                found, began = list[str](), processor_time()
                yield tally.tried, random.Random(f"{name}: {tally.tried}"), found
                tally.findings += [f"case {tally.tried}: {one}" for one in found]
                tally.tried += 1
                tally.seconds += processor_time() - began
                if time.monotonic() - self.saved > 1:
                    self.save()
                progress.advance(1, findings=str(len(tally.findings)))

        try:
            with reporting(name, count) as progress:
                yield left(progress)
        finally:
            self.save()
        print(f"{tally.row()}  {format_duration(tally.seconds)} of processor time", flush=True)
        for finding in tally.findings[:5]:
            print(f"    {finding}", flush=True)

    def save(self) -> None:
        tallies = [asdict(one) for one in self.tallies.values()]
        write_atomically(self.file, json.dumps({"sources": self.sources, "tallies": tallies}, indent=1))
        self.saved = time.monotonic()

    def total(self) -> Tally:
        every = list(self.tallies.values())
        findings = [f"{one.name}, {finding}" for one in every for finding in one.findings]
        return Tally("**all**", sum(one.tried for one in every), findings, sum(one.seconds for one in every))

    def table(self) -> str:
        lines = ["| what | tried | survived | findings |", "|---|---:|---:|---:|"]
        lines += [one.row() for one in (*self.tallies.values(), self.total())]
        spent = format_duration(self.total().seconds)
        when = time.strftime("%Y-%m-%d")
        return "\n".join([*lines, "", f"Sources `{self.sources[:12]}`, {when}, {spent} of processor time."])

    def write(self, document: Path) -> None:
        text = document.read_text(encoding="utf-8")
        before, after = text.split(BEGIN)[0], text.split(END)[1]
        write_atomically(document, f"{before}{BEGIN}\n{self.table()}\n{END}{after}")


def fingerprint() -> str:
    """A hash of the package and of this program: counts of other sources prove nothing about these."""
    digest = hashlib.sha256()
    for path in (*sorted((ROOT / "menet").rglob("*.py")), Path(__file__)):
        digest.update(path.relative_to(ROOT).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()


def processor_time() -> float:
    used = [resource.getrusage(kind) for kind in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    forked = 0.0 if Forked.server is None else seconds_of(Forked.server)
    return forked + sum(one.ru_utime + one.ru_stime for one in used)


class TooSlow(Exception):
    """A case that hangs."""


@contextlib.contextmanager
def bounded() -> Iterator[None]:
    """Limit the time and the memory of what is inside."""

    def stop(*_: object) -> None:
        raise TooSlow

    pages = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    before = resource.getrlimit(resource.RLIMIT_AS)
    signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    resource.setrlimit(resource.RLIMIT_AS, (pages + MEMORY, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
        signal.alarm(0)


def damaged(content: bytes, chance: random.Random) -> bytes:
    """Truncated, lengthened, or with bytes flipped, zeroed or exchanged."""
    kind = chance.randrange(5)
    if kind == 0 or not content:
        return content[: chance.randrange(len(content) + 1)]
    changed = bytearray(content)
    place = chance.randrange(len(changed))
    if kind == 1:
        changed[place] ^= 1 << chance.randrange(8)
    elif kind == 2:
        changed[place : place + chance.randint(1, 64)] = bytes(chance.randint(1, 64))
    elif kind == 3:
        changed[place:place] = chance.randbytes(chance.randint(1, 64))
    else:
        for _ in range(chance.randint(1, 8)):
            changed[chance.randrange(min(len(changed), 400))] = chance.randrange(256)
    return bytes(changed)


HOSTILE = (
    None, True, -1, 0, 3, 0.5, 10**30, 1e300, "", "x", "$x^{$", "<script>", "../../x", "a\0b", "é" * 10_000,
    [], [[]], [None], {}, {"x": {}}, [0] * 1000,
)  # fmt: skip


def wrong(content: Any, chance: random.Random) -> Any:
    """Plain values in which one, anywhere, is missing or another."""
    content = json.loads(json.dumps(content))
    places: list[tuple[Any, Any]] = []
    inner = [content]
    while inner:
        one = inner.pop()
        keys = list(one) if isinstance(one, dict) else range(len(one)) if isinstance(one, list) else ()
        places += [(one, key) for key in keys]
        inner += [one[key] for key in keys]
    where, key = chance.choice(places)
    if chance.random() < 0.2:
        del where[key]
    else:
        where[key] = chance.choice(HOSTILE)
    return content


def wrong_json(content: bytes, chance: random.Random) -> bytes:
    return json.dumps(wrong(json.loads(content), chance)).encode()


def wrong_line(content: bytes, chance: random.Random) -> bytes:
    """A line of records with a wrong value and a right checksum."""
    from menet.evaluation import jsonl

    lines = content.splitlines(keepends=True)
    # Half of the time the header, which more depends on.
    number = chance.choice((0, chance.randrange(len(lines))))
    lines[number] = jsonl.encode(wrong(jsonl.decode(0, lines[number][:-1]).content, chance))
    return b"".join(lines)


def wrong_header(content: bytes, chance: random.Random) -> bytes:
    """Weights whose header has a wrong value, and the right digest of it."""
    from menet.models import weights
    from menet.training.checkpoint import save_with_digest

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "file.safetensors"
        file.write_bytes(content)
        tensors, header = weights.load(file)
        del header[weights.DIGEST]
        save_with_digest(file, tensors, wrong(header, chance))
        return file.read_bytes()


def wrong_column(content: bytes, chance: random.Random) -> bytes:
    """Compact results with a wrong value in the header, or a column of wrong values."""
    import numpy as np

    with np.load(io.BytesIO(content)) as archive:
        columns = {name: archive[name] for name in archive.files}
    if chance.random() < 0.5:
        header = wrong_json(columns["header"].tobytes(), chance)
        columns["header"] = np.frombuffer(header, np.uint8)
    else:
        name = chance.choice(sorted(columns))
        values = columns.pop(name)
        with np.errstate(all="ignore"), warnings.catch_warnings(action="ignore"):
            if chance.random() < 0.8:
                columns[name] = chance.choice((
                    values.astype(str), values.astype(float), values[:-1], values[None], -values.astype(float),
                    np.full(values.shape, 2**31), np.full(values.shape, np.nan), np.zeros(values.shape, np.uint8),
                ))  # fmt: skip
    file = io.BytesIO()
    np.savez_compressed(file, **columns)
    return file.getvalue()


def mutate(
    counts: Counts,
    name: str,
    file: Path,
    use: Callable[[], Any],
    mutations: int,
    loses: bool = False,
    damage: Callable[[bytes, random.Random], bytes] = damaged,
) -> None:
    """Damage `file` again and again; `use` must refuse it, or return what it returns of the intact one.

    With `loses` another answer is allowed: the format has no checksum of its own, or the damage keeps it.
    """
    intact = file.read_bytes()
    with warnings.catch_warnings(action="ignore"):
        expected = use()
    with counts.cases(name, mutations) as cases:
        for _, chance, findings in cases:
            content = damage(intact, chance)
            file.write_bytes(content)
            try:
                with (
                    warnings.catch_warnings(action="ignore"),
                    bounded(),
                    contextlib.redirect_stdout(io.StringIO()),
                    contextlib.redirect_stderr(io.StringIO()),
                ):
                    found = use()
                if content != intact and found != expected and not loses:
                    findings.append("accepted with another content")
            except MenetError:
                pass
            except KeyboardInterrupt:
                raise
            except BaseException as error:
                findings.append(f"{type(error).__name__}: {error!s:.200}")
    file.write_bytes(intact)


class Forked:
    """One command in a process of its own, forked from one that has imported everything (`preloaded`).

    A new interpreter would spend most of its time on imports, and most kills would hit those. What is used of
    `subprocess.Popen` is here too.
    """

    server: int | None = None
    """The process that all commands are forked from."""

    def __init__(self, words: Words) -> None:
        handle, name = tempfile.mkstemp()
        os.close(handle)
        self.told = Path(name)
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["preloaded"])
        self.process = context.Process(target=_run_command, args=(words, name))
        self.process.start()
        self.pid = self.process.pid or 0
        if Forked.server is None:
            Forked.server = int(_stat(self.pid)[1])

    @property
    def returncode(self) -> int | None:
        return self.process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def communicate(self) -> tuple[None, str]:
        self.process.join()
        told = self.told.read_text(encoding="utf-8", errors="replace") if self.told.exists() else ""
        self.told.unlink(missing_ok=True)
        return None, told


def _run_command(words: Words, told: str) -> None:
    os.setsid()
    os.chdir(ROOT)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.dup2(os.open(told, os.O_WRONLY), 2)
    sys.argv = ["menet", *words]
    from menet.cli import run

    run()


def _stat(pid: int) -> list[str]:
    """What Linux tells of a process: its state, its parent, and after more of that its times."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def seconds_of(pid: int) -> float:
    """Processor time of a process and of its children that have ended."""
    return sum(map(int, _stat(pid)[11:15])) / os.sysconf("SC_CLK_TCK")


def menet(words: Words, environment: dict[str, str] | None = None) -> Any:
    """One command, in a process of its own with one thread; with an `environment`, in a new interpreter."""
    if environment is None:
        return Forked(words)
    return subprocess.Popen(
        [sys.executable, "-m", "menet.cli", *words],
        cwd=ROOT, env={**os.environ, **environment}, text=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        start_new_session=True,
    )  # fmt: skip


def finished(words: Words, **options: Any) -> tuple[int, str]:
    """The exit code of a command that is left alone, and what it said on standard error."""
    process = menet(words, **options)
    told = process.communicate()[1]
    return process.returncode, told.strip()


def runs_for(process: Any, seconds: float) -> bool:
    """Whether a command still runs when it has spent so much processor time, which others do not change."""
    while process.poll() is None:
        with contextlib.suppress(OSError):  # it has just ended
            if seconds_of(process.pid) >= seconds:
                return True
        time.sleep(0.005)
    return False


def succeeded(words: Words, code: int) -> bool:
    """Whether an exit code is that of a command that did its work; an audit may find that checks fail."""
    return code == 0 or (words[0] == "audit" and code == 1)


def killed(process: Any) -> None:
    """Kill a process and its children."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def outcome(folder: Path) -> str:
    """A hash of what a command has produced: weights, estimates, findings, and rows without their times."""
    from menet.evaluation import jsonl
    from menet.models import weights

    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.name == "best.safetensors":
            for name, tensor in sorted(weights.load(path)[0].items()):
                digest.update(name.encode() + tensor.numpy().tobytes())
        elif path.name.endswith(".jsonl") and ".rank" in path.name:
            lines = [line.content for line in jsonl.read(path)]
            rows = sorted(
                json.dumps({key: value for key, value in line.items() if "seconds" not in key}, sort_keys=True)
                for line in lines
                if "index" in line
            )
            digest.update("\n".join(rows).encode())
        elif path.name == "audit.json":
            digest.update(json.dumps(json.loads(path.read_text())["findings"], sort_keys=True).encode())
        elif path.suffix == ".npy":
            digest.update(path.read_bytes())
    return digest.hexdigest()


class Soak:
    """All stages, in a working folder."""

    def __init__(self, work: Path, counts: Counts, mutations: int, kills: int) -> None:
        self.work, self.counts, self.mutations, self.kills = work, counts, mutations, kills
        self._undisturbed: dict[str, tuple[float, str]] = {}

    @cached_property
    def run(self) -> Path:
        """A trained run that was not disturbed, which most commands work on."""
        folder = self.work / "run"
        code, told = finished((*TRAIN, "--out", str(folder)))
        if code:
            raise SystemExit(f"menet train fails undisturbed: {told}")
        return folder

    def undisturbed(self, name: str) -> tuple[float, str]:
        """The processor time of a command that is left alone, and its outcome."""
        if name not in self._undisturbed:
            run = self.run
            words, began = commands(run)[name](self.work / f"{name}-alone"), processor_time()
            code, told = finished(words)
            if not succeeded(words, code):
                raise SystemExit(f"menet {name} fails undisturbed: {told}")
            self._undisturbed[name] = processor_time() - began, outcome(self.work / f"{name}-alone")
        return self._undisturbed[name]

    def own_files(self) -> None:
        """Damaged files of our own formats."""
        from menet.commands.options import dataset_of
        from menet.data import load
        from menet.evaluation import accuracies, publish, read_folder, read_result
        from menet.evaluation.snapshots import load_features
        from menet.models import weights
        from menet.report.accuracy_tables import overview
        from menet.report.board import _rendered, certificates, entries
        from menet.report.collect import collect, showing
        from menet.report.narrative import answer, findings
        from menet.report.page import _all_numbers, _audit, _made
        from menet.training import TrainingConfig, load_model
        from menet.training.checkpoint import read_checkpoint
        from menet.training.monitoring import read_log
        from menet.training.prepared import open_prepared, shard_path

        run, prepared = self.run, self.work / "prepared"
        defense = load_model(run)
        for words in (
            ("evaluate", str(run), "--attacks", "fgsm", "--stop", "20", "--draws", "5", "--snapshots", "4"),
            ("certify", str(run), "--stop", "3", "--selection", "10", "--estimation", "20"),
            commands(run)["audit"](run),
            ("prepare", "digits", "--limit", "20", "--masks", "2", "--out", str(prepared)),
        ):
            code, told = finished(words)
            if not succeeded(words, code):
                raise SystemExit(f"menet {words[0]} fails undisturbed: {told}")

        def try_it(name: str, file: Path, use: Callable[[], Any], loses: bool = False, **how: Any) -> None:
            mutate(self.counts, name, file, use, self.mutations, loses, **how)

        records = run / "evaluation" / "fgsm.rank0.jsonl"
        try_it("records", records, lambda: read_folder(run / "evaluation")["fgsm"].rows)
        published = {**read_folder(run / "evaluation"), **read_folder(run / "certificate")}
        (packed, proven, *_) = publish("soak", published, {}, self.work / "results")
        try_it("compact results", packed, lambda: read_result(packed).rows)

        def board() -> int:
            with showing(packed.parent):
                return len(_rendered(entries(self.work / "results"), certificates(self.work / "results")))

        made = packed.with_name("model.json")
        made.write_text(json.dumps({"config": json.loads((run / "config.json").read_text()), "seconds": 3}))
        try_it("board: wrong values in compact results", packed, board, loses=True, damage=wrong_column)
        try_it("board: wrong values in certificates", proven, board, loses=True, damage=wrong_column)
        try_it("board: wrong values in model.json", made, board, loses=True, damage=wrong_json)

        def hashed(tensors: Any) -> str:
            content = b"".join(tensors[name].numpy().tobytes() for name in sorted(tensors))
            return hashlib.sha256(content).hexdigest()

        best, last = run / "best.safetensors", run / "last.safetensors"
        try_it("weights", best, lambda: (hashed(load_model(best).state_dict()), hashed(weights.load(best)[0])))
        config = TrainingConfig.from_dict(json.loads((run / "config.json").read_text()))
        try_it("checkpoint", last, lambda: hashed(read_checkpoint(last, config).tensors))

        described = {"name": "me-net", **defense.settings(), "masks": 2}  # type: ignore[operator]

        def estimates() -> str:
            found = open_prepared(prepared, load("digits"), described).dataset.images
            return hashlib.sha256(found[slice(None)].numpy().tobytes()).hexdigest()

        for name, file in (
            ("prepared set: description", prepared / "prepared.json"),
            ("prepared set: shard", shard_path(prepared, 0)),
            ("prepared set: checksum", shard_path(prepared, 0).with_suffix(".sha256")),
        ):
            try_it(name, file, estimates)

        def loaded() -> str:
            return hashed(load_model(best).state_dict())

        def resumed() -> str:
            return hashed(read_checkpoint(last, config).tensors)

        try_it("weights: wrong values in the header", best, loaded, loses=True, damage=wrong_header)
        try_it("checkpoint: wrong values in the header", last, resumed, loses=True, damage=wrong_header)

        def reported() -> int:
            return len(collect(run).subjects)

        def shown() -> int:
            """All of a report but its figures, which take long."""
            with showing(run):
                found = collect(run)
                for records in found.subjects[0].records:
                    if "scoring" in records.evaluation and records.label != "certificate":
                        accuracies(records)
                return len([part(found) for part in (answer, findings, overview, _audit, _all_numbers, _made)])

        from menet.evaluation.snapshots import features_of, save_features

        features = save_features(
            features_of(load_model(run), read_folder(run / "evaluation")["fgsm"]), run / "evaluation"
        )
        certificate = next((run / "certificate").glob("*.rank0.jsonl"))
        notes = run / "report.json"
        notes.write_text(json.dumps({"title": "soak", "names": {"a": "b"}, "seconds": 3}))
        for name, file, use in (
            ("log", run / "log.jsonl", lambda: len(read_log(run))),
            ("configuration", run / "config.json", lambda: dataset_of(None, str(run), "test").name),
            ("certificates, in a report", certificate, reported),
            ("records, in a report", records, reported),
            ("audit, in a report", run / "audit.json", reported),
            ("notes of a report", notes, reported),
            ("features", features, lambda: load_features(features).label),
        ):
            try_it(name, file, use, loses=True)
        for name, file, damage in (
            ("report: wrong values in records", records, wrong_line),
            ("report: wrong values in certificates", certificate, wrong_line),
            ("report: wrong values in an audit", run / "audit.json", wrong_json),
            ("report: wrong values in its notes", notes, wrong_json),
        ):
            try_it(name, file, shown, loses=True, damage=damage)

    def published_files(self) -> None:
        """Damaged files of datasets, in their publishers' formats."""
        import made_files  # noqa: F401 - on the path of the tests of data
        from test_fuzzed_files import FORMATS, check_whole

        from menet import data

        for name, (make, dataset, file) in FORMATS.items():
            with tempfile.TemporaryDirectory() as folder:
                root = make(Path(folder) / "data")
                words = f"folder:{root}" if dataset == "folder" else dataset
                place = None if dataset == "folder" else root.parent

                def use(words: str = words, place: Path | None = place) -> bool:
                    found = data.load(words, "test", root=place)
                    check_whole(found, found)
                    return True

                mutate(self.counts, name, root / file, use, self.mutations, loses=True)

    def kill(self, name: str) -> None:
        """Kill a command at random moments, let it resume, and compare with an undisturbed one."""
        with self.counts.cases(f"kill −9: {name}", self.kills) as cases:
            for number, chance, findings in cases:
                seconds, expected = self.undisturbed(name)
                folder, moment = self.work / f"{name}-{number}", chance.random() * seconds
                words = commands(self.run)[name](folder)
                while not runs_for(process := menet(words), moment):
                    # Faster now than it was: that was no kill.
                    killed(process)
                    shutil.rmtree(folder, ignore_errors=True)
                    moment *= 0.9
                killed(process)
                code, told = finished(words)
                if not succeeded(words, code):
                    findings.append(f"killed after {moment:.2f} s, then exit code {code}: {told[-300:]}")
                elif outcome(folder) != expected:
                    findings.append(f"killed after {moment:.2f} s: another outcome")
                shutil.rmtree(folder, ignore_errors=True)

    def two_at_once(self) -> None:
        """The same command twice at the same time: refused, or done with the same outcome."""
        for name in ("train", "evaluate", "certify", "prepare", "audit"):
            with self.counts.cases(f"two at once: {name}", max(1, self.kills // 4)) as cases:
                for number, chance, findings in cases:
                    _, expected = self.undisturbed(name)
                    folder = self.work / f"both-{name}-{number}"
                    words = commands(self.run)[name](folder)
                    first = menet(words)
                    time.sleep(chance.random())
                    second = menet(words)
                    ends = []
                    for process in (first, second):
                        told = process.communicate()[1].strip()
                        done = succeeded(words, process.returncode)
                        ends.append(done)
                        if not done and not (process.returncode == 2 and "locked" in told):
                            findings.append(f"exit code {process.returncode}: {told[-200:]}")
                    if not any(ends):
                        findings.append("both were refused")
                    elif outcome(folder) != expected:
                        findings.append("another outcome")
                    shutil.rmtree(folder, ignore_errors=True)

    def caches(self) -> None:
        """Compile caches that are cold, warm, damaged or lost in a kill: the same weights."""
        with self.counts.cases("compile cache: cold, warm, damaged, killed", max(1, self.kills // 20)) as cases:
            for number, chance, findings in cases:
                seconds, expected = self.undisturbed("train")
                home = self.work / f"cache-{number}"
                words = commands(self.run)["train"]
                environment = {"XDG_CACHE_HOME": str(home)}
                for state in ("cold", "warm", "damaged", "killed while cold, resumed"):
                    folder = self.work / f"cached-{number}"
                    if state == "damaged":
                        for path in (one for one in home.rglob("*") if one.is_file()):
                            path.write_bytes(damaged(path.read_bytes(), chance))
                    elif state.startswith("killed"):
                        shutil.rmtree(home, ignore_errors=True)
                        process = menet(words(folder), environment=environment)
                        runs_for(process, seconds * (0.5 + 2 * chance.random()))
                        killed(process)
                    code, told = finished(words(folder), environment=environment)
                    if code or outcome(folder) != expected:
                        findings.append(f"cache {state}: {told[-200:] if code else 'other weights'}")
                    shutil.rmtree(folder, ignore_errors=True)
                shutil.rmtree(home, ignore_errors=True)

    def full_disk(self) -> None:
        """Every command on a disk of 20 MB, full or read-only: one line; then, with space, the right outcome."""
        disk, run = self.work / "disk", self.run
        disk.mkdir()
        size = ["mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", str(disk)]
        if subprocess.run(size, check=False).returncode:
            print("no right to mount a small disk; left out", file=sys.stderr)
            return
        evaluated = self.work / "evaluate-alone"
        if not evaluated.exists():
            self.undisturbed("evaluate")
        some: dict[str, Words] = {
            "report": ("report", str(evaluated), "--markdown", "--tables", "csv",
                       "--out", str(disk / "out/report.html")),
            "publish": ("publish", str(run), "--name", "soak", "--evaluation", str(evaluated),
                        "--out", str(disk / "out")),
            "compare": ("compare", str(evaluated), str(evaluated), "--out", str(disk / "out/table.csv")),
            "demo": ("demo", "--quick", "--out", str(disk / "out")),
        }  # fmt: skip
        # Space for nothing, for what comes first, and for nearly all of it; None is a disk that is read-only. A
        # small soak has the first of these alone, and a demo takes minutes unless it ends early.
        kibibytes = (0, None, 64, 2048)[: self.kills]
        try:
            for name in (*commands(run), *some):
                words = some[name] if name in some else commands(run)[name](disk / "out")
                rooms = kibibytes[:3] if name == "demo" else kibibytes
                with self.counts.cases(f"disk of 20 MB, full or read-only: {name}", len(rooms)) as cases:
                    for number, _, findings in cases:
                        with _little_space(disk, rooms[number]):
                            code, told = finished(words)
                        # 1 is an audit whose checks are done, one of which fails, or a job of a reproduction.
                        done = name == "reproduce" or (disk / "out" / "audit.json").is_file()
                        if "Traceback" in told or code not in ((0, 1, 2) if done else (0, 2)):
                            findings.append(f"{rooms[number]} KiB left, exit code {code}: {told[-300:]}")
                        if name not in some and name != "reproduce":
                            code, told = finished(words)
                            if not succeeded(words, code) or outcome(disk / "out") != self.undisturbed(name)[1]:
                                findings.append(f"with space again, exit code {code}: {told[-300:]}")
                        for path in disk.iterdir():
                            shutil.rmtree(path) if path.is_dir() else path.unlink()
        finally:
            subprocess.run(["umount", str(disk)], check=False)


@contextlib.contextmanager
def _little_space(disk: Path, kibibytes: int | None) -> Iterator[None]:
    """A disk that is full but for some space, or read-only."""
    if kibibytes is None:
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        yield
        subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)
        return
    filler = disk / "filler"
    with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    os.truncate(filler, max(0, filler.stat().st_size - kibibytes * 1024))
    yield
    filler.unlink()


STAGES: dict[str, tuple[str, Callable[[Soak], None]]] = {
    "own-files": ("damaged files of our own formats", Soak.own_files),
    "published-files": ("damaged files of datasets", Soak.published_files),
    **{
        f"kill-{name}": (f"kill −9 in `menet {name}`, which resumes", lambda soak, name=name: soak.kill(name))
        for name in commands(Path())
    },
    "two-at-once": ("two processes in one folder", Soak.two_at_once),
    "caches": ("cold, warm and damaged compile caches", Soak.caches),
    "full-disk": ("a disk of 20 MB, full or read-only (needs the right to mount one)", Soak.full_disk),
}


def main() -> int:
    """Run the stages, print the table, and write it where asked."""
    listed = "\n".join(f"  {name:<16} {words}" for name, (words, _) in STAGES.items())
    parser = argparse.ArgumentParser(
        description=f"{__doc__}\nstages:\n{listed}", formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=STAGES, metavar="STAGE", help="these stages alone")
    parser.add_argument(
        "--size",
        type=int,
        default=SIZE,
        metavar="N",
        help="damaged files per format (500), 25 for each kill",
    )
    parser.add_argument("--kills", type=int, help="kills per command; two at once are a quarter of it (20)")
    parser.add_argument(
        "--counts", type=Path, default=ROOT / "runs" / "soak.json", help="where counts are kept (runs/soak.json)"
    )
    parser.add_argument("--write", type=Path, help="document whose table is replaced")
    options = parser.parse_args()
    kills = max(1, round(options.size * KILLS_PER_MUTATION)) if options.kills is None else options.kills
    counts = Counts(options.counts)
    with tempfile.TemporaryDirectory(prefix="menet-soak-") as folder:
        soak = Soak(Path(folder), counts, options.size, kills)
        for name in options.only or STAGES:
            STAGES[name][1](soak)
            if options.write is not None:
                counts.write(options.write)
    print(counts.table())
    return int(bool(counts.total().findings))


if __name__ == "__main__":
    sys.exit(main())
