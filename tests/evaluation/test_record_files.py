"""Record files: atomic appends, torn ends, damage that is named, shards that merge."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from menet.errors import RecordError
from menet.evaluation import jsonl, read, read_folder
from menet.evaluation.records import FORMAT, Shard, shard_path, shards

EVALUATION = {"label": "pgd", "start": 0, "stop": 100, "attack": {"steps": 40}, "dataset": {"name": "digits"}}
MADE = {"versions": {"torch": "2"}}


def rows(*indices: int) -> list[dict]:
    return [{"index": index, "label": index % 10, "ranks": [0, 1]} for index in indices]


def shard(folder, rank: int = 0, evaluation: dict = EVALUATION, made: dict = MADE) -> Shard:
    return Shard(folder, evaluation, made, rank)


@pytest.fixture
def written(tmp_path):
    with shard(tmp_path) as file:
        file.append(rows(0, 1, 2))
        file.append(rows(3, 4))
    return shard_path(tmp_path, "pgd")


def test_rows_come_back_in_order_and_every_line_is_plain_json(written):
    assert [row["index"] for row in read(written).rows] == [0, 1, 2, 3, 4]
    assert read(written).rows == tuple(rows(0, 1, 2, 3, 4))
    assert read(written).evaluation == EVALUATION
    assert [json.loads(line).get("index") for line in written.read_text().splitlines()] == [None, 0, 1, 2, 3, 4]


values = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()


@given(st.dictionaries(st.text(max_size=8), values | st.lists(values, max_size=3), min_size=1, max_size=5))
def test_any_content_survives_a_line(content):
    line = jsonl.encode(content)
    assert line.count(b"\n") == 1
    assert jsonl.decode(1, line[:-1]) == jsonl.Line(1, content)


@given(st.data())
def test_any_changed_byte_of_a_line_is_noticed(data):
    raw = jsonl.encode(rows(7)[0])[:-1]
    place = data.draw(st.integers(0, len(raw) - 1))
    other = data.draw(st.integers(0, 255).filter(lambda byte: byte not in (raw[place], 10)))
    assert jsonl.decode(1, raw[:place] + bytes([other]) + raw[place + 1 :]).fault


@pytest.mark.parametrize("size", range(1, 40, 3))
def test_a_torn_end_is_named_by_readers_and_cut_by_the_next_writer(written, tmp_path, size):
    written.write_bytes(written.read_bytes()[:-size])
    with pytest.raises(RecordError, match=r"pgd\.rank0\.jsonl:6 is torn"):
        read(written)
    with shard(tmp_path) as file:
        assert file.done == {0, 1, 2, 3}
        file.append(rows(4))
        assert file.records().rows == tuple(rows(0, 1, 2, 3, 4))
    assert read(written).rows == tuple(rows(0, 1, 2, 3, 4))


def test_a_torn_header_is_begun_again(tmp_path):
    shard_path(tmp_path, "pgd").write_bytes(b'{"format":"menet.rec')
    with shard(tmp_path) as file:
        file.append(rows(0))
    assert len(read(shard_path(tmp_path, "pgd")).rows) == 1


def test_a_damaged_line_is_named_and_the_rest_used_only_if_asked(written, tmp_path):
    text = written.read_text().splitlines(keepends=True)
    written.write_text("".join([*text[:3], text[3].replace('"label":2', '"label":3'), *text[4:]]))
    with pytest.raises(RecordError, match=r"pgd\.rank0\.jsonl:4 is damaged or was edited"):
        read(written)
    with pytest.raises(RecordError, match=r":4 is damaged"):
        shard(tmp_path)
    found = read(written, damaged=True)
    assert [row["index"] for row in found.rows] == [0, 1, 3, 4]
    assert found.damage == (f"{written}:4 is damaged or was edited: its checksum does not match",)
    assert 2 in found.missing


@pytest.mark.parametrize(
    "line, words",
    [
        (b"\n", "damaged"),
        (b"[1,2]\n", "damaged"),
        (b"\xff\xfe\x00\n", "damaged"),
        (jsonl.encode({"index": "4", "label": 1}), "index = '4'"),
        (jsonl.encode({"index": True, "label": 1}), "index = True"),
        (jsonl.encode({"index": 5}), "label = None"),
        (jsonl.encode({"index": 100, "label": 1}), "outside 0 to 100"),
        (jsonl.encode({"index": 2, "label": 1}), "repeats example 2"),
    ],
)
def test_lines_that_are_no_rows_are_named(written, line, words):
    written.write_bytes(written.read_bytes() + line)
    with pytest.raises(RecordError, match=rf":7 .*{words}"):
        read(written)
    assert len(read(written, damaged=True).rows) == 5


def test_without_a_sound_header_nothing_is_used(written, tmp_path):
    written.write_bytes(b"x" + written.read_bytes())
    with pytest.raises(RecordError, match=":1 is damaged"):
        read(written, damaged=True)
    empty = tmp_path / "other.rank0.jsonl"
    empty.touch()
    with pytest.raises(RecordError, match="empty"):
        read(empty)
    with pytest.raises(RecordError, match="cannot be read"):
        read(tmp_path / "absent.jsonl")


def test_a_file_of_another_evaluation_is_refused_by_the_field_that_differs(written, tmp_path):
    other = {**EVALUATION, "attack": {"steps": 20}}
    with pytest.raises(RecordError, match=r"expected attack\.steps 40, got 20"):
        shard(tmp_path, evaluation=other)
    with pytest.raises(RecordError, match=r"expected attack\.steps 40, got 20"):
        shard(tmp_path, rank=1, evaluation=other)
    assert read(*shards(tmp_path, "pgd")).evaluation == EVALUATION, "nothing was written by the one refused"
    with shard(tmp_path / "other", evaluation=other) as file:
        file.append(rows(50))
    with pytest.raises(RecordError, match="another evaluation"):
        read(written, *shards(tmp_path / "other", "pgd"))


def test_files_of_an_older_format_are_refused_with_a_remedy(tmp_path):
    header = {"format": "menet.records/1", "evaluation": EVALUATION, "made": MADE}
    shard_path(tmp_path, "pgd").write_bytes(jsonl.encode(header) + jsonl.encode(rows(0)[0]))
    for use in (lambda: read_folder(tmp_path), lambda: shard(tmp_path)):
        with pytest.raises(
            RecordError, match=rf"menet\.records/1 of another version.*{FORMAT}.*run the evaluation"
        ):
            use()


def test_resuming_reads_every_shard_once(written, tmp_path, monkeypatch):
    with shard(tmp_path, rank=1) as file:
        file.append(rows(50))
    opened = []
    whole = jsonl.read
    monkeypatch.setattr(jsonl, "read", lambda path: opened.append(path) or whole(path))
    with shard(tmp_path) as file:
        file.append(rows(5))
        found = file.records()
    assert sorted(opened) == shards(tmp_path, "pgd")
    assert [row["index"] for row in found.rows] == [0, 1, 2, 3, 4, 5, 50]


def test_shards_merge_and_an_example_in_two_of_them_is_an_error(written, tmp_path):
    with shard(tmp_path, rank=1) as file:
        file.append(rows(50, 51))
    shard_path(tmp_path, "pgd", 2).touch()
    found = read_folder(tmp_path)
    assert [row["index"] for row in found["pgd"].rows] == [0, 1, 2, 3, 4, 50, 51]
    with shard(tmp_path, rank=1) as file:
        file.append(rows(3))
    with pytest.raises(RecordError, match=r"rank1\.jsonl:4 repeats example 3"):
        read_folder(tmp_path)


def test_a_change_of_machine_between_sessions_is_written_down(written, tmp_path):
    shard(tmp_path).__exit__()
    with shard(tmp_path, made={"versions": {"torch": "3"}}) as file:
        file.append(rows(5))
    text = written.read_text().splitlines()
    assert [json.loads(line)["made"] for line in text if "made" in line] == [MADE, {"versions": {"torch": "3"}}]
    assert len(read(written).rows) == 6


def test_a_second_writer_is_refused(written, tmp_path):
    with shard(tmp_path), pytest.raises(RecordError, match="another evaluation"):
        shard(tmp_path)
    shard(tmp_path).__exit__()
