"""Rows are written whole or not at all, and a file of another schema is refused by name."""

import json
import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from subquad.run_suite import HOME
from subquad.suite.identity import identity, likeness
from subquad.suite.store import documents, endings, storage
from subquad.suite.store.target import private_folder, replacing
from tests.processes import in_a_process
from tests.stored import made

ID = identity({"seed": 3})
(ROW,) = made([{"metric": "run"}], {"seed": 3}, experiment="e")
LIKE = likeness("paper", {"seed": 3})
LOSS = {**ROW, "metric": "loss", "unit": "nats"}


def place(root, experiment="e"):
    """The file of the run of ROW."""
    return storage.result_path(root, experiment, "paper", ID)


def test_rows_come_back_as_written(tmp_path):
    path = place(tmp_path, "e/x")
    storage.write(path, [{**row, "experiment": "e/x"} for row in (ROW, {**LOSS, "value": 0.5, "samples": [1.0, 2.0]})])
    frame = storage.read(storage.files([tmp_path], "e/x"))
    assert frame["metric"].tolist() == ["run", "loss"]
    assert frame["value"][1] == 0.5
    assert list(frame["samples"][1]) == [1.0, 2.0]
    assert endings.ending(path) == endings.Ending("ok", {}, like=LIKE)
    assert [file.name for file in path.parent.iterdir()] == [f"{ID}.parquet"]


def test_an_error_that_names_a_file_whose_bytes_are_no_text_is_stored(tmp_path):
    path = place(tmp_path)
    storage.write(
        path, [{**ROW, "status": "failed", "error": "no file " + b"caf\xe9.txt".decode(errors="surrogateescape")}]
    )
    assert storage.read([path])["error"][0] == "no file caf\\udce9.txt" == endings.ending(path).error


def test_a_count_of_operations_beyond_the_integers_of_a_float64_is_rounded(tmp_path):
    path = place(tmp_path)
    storage.write(path, [ROW, {**LOSS, "metric": "train_flops", "unit": "flop", "value": 2**53 + 1}])
    assert storage.read([path])["value"][1] == 2.0**53


def test_an_unknown_column_is_our_own_fault(tmp_path):
    with pytest.raises(AssertionError, match="colour"):
        storage.write(tmp_path / "a.parquet", [{**ROW, "colour": 1}])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("version", [0, 3])
def test_another_schema_version_is_refused_by_name(tmp_path, version):
    path = tmp_path / "old.parquet"
    storage.write(path, [ROW])
    table = pq.read_table(path).replace_schema_metadata(None)
    other = table.set_column(0, "schema", pa.array([version], pa.int32()))
    pq.write_table(other, path)
    with pytest.raises(storage.SchemaError, match=rf"old.parquet: results schema {version}, this version reads 1 to 2"):
        storage.read([path])


def test_rows_of_the_first_schema_are_read_with_null_in_the_columns_they_lack(tmp_path):
    path = place(tmp_path)
    storage.write(path, [ROW])
    table = pq.read_table(path).drop_columns(["threads", "operators"]).replace_schema_metadata(None)
    pq.write_table(table.set_column(0, "schema", pa.array([1], pa.int32())), path)
    frame = storage.read([path])
    assert list(frame.columns) == storage.SCHEMA.names
    assert frame["seed"].tolist() == [3]
    assert frame[["threads", "operators"]].isna().all(axis=None)
    assert endings.ending(path) == endings.Ending("ok", {}, like=LIKE)
    # the same file that calls itself of the second schema lacks two columns
    pq.write_table(table.set_column(0, "schema", pa.array([2], pa.int32())), path)
    with pytest.raises(storage.SchemaError, match=r"schema 2: the column threads \(int32\) is not in it; restore"):
        storage.read([path])


def test_a_column_of_another_type_is_named(tmp_path):
    """The version is one that is read, so that the commit which wrote the file would not help."""
    path = place(tmp_path)
    storage.write(path, [ROW])
    table = pq.read_table(path).replace_schema_metadata(None)
    column = table.schema.get_field_index("seed")
    pq.write_table(table.set_column(column, "seed", table["seed"].cast(pa.int8())), path)
    with pytest.raises(
        storage.SchemaError, match=r"schema 2: the column seed \(int64\) is int8 in it; restore the file"
    ):
        storage.read([path])


def used(**operators):
    """A row that records (version, backend) of operators."""
    record = {name: {"version": version, "backend": backend} for name, (version, backend) in operators.items()}
    return {**ROW, "operators": json.dumps(record)}


def test_equal_operators_are_no_mix():
    assert documents.operator_mix([]) is None
    assert documents.operator_mix([ROW, {**ROW, "operators": None}, {**ROW, "operators": float("nan")}]) is None
    # runs of several settings need not have the same operators
    rows = [used(scan=(1, "torch")), used(scan=(1, "torch"), conv=(3, "triton"))]
    assert documents.operator_mix(rows, alike=False) is None
    assert documents.operator_mix(rows) == "conv: version 3 (triton), not used in 1 of 2 rows"


def test_a_mix_names_the_operators_that_differ_and_how():
    rows = [used(scan=(2, "triton"), conv=(1, "torch")), used(scan=(1, "torch"), conv=(1, "torch"))]
    assert documents.operator_mix(rows) == "scan: version 1 (torch), version 2 (triton)"
    rows.append(used(conv=(1, "triton")))
    assert documents.operator_mix(rows, alike=False) == (
        "conv: version 1 (torch), version 1 (triton); scan: version 1 (torch), version 2 (triton)"
    )


def test_rows_without_a_record_among_rows_with_one_are_counted():
    assert documents.operator_mix([used(scan=(1, "torch")), ROW, ROW]) == "not recorded in 2 of 3 rows"


@pytest.mark.parametrize(
    ("name", "column"),
    [
        ("error", pa.DictionaryArray.from_arrays([0] * 2048, ["x" * (storage.MOST_TEXT // 2048 + 1)])),
        ("samples", pa.array([np.ones(storage.MOST_VALUES // 2048 + 1)] * 2048)),
    ],
)
def test_a_small_file_that_claims_much_memory_is_refused(tmp_path, name, column):
    storage.write(
        place(tmp_path), [{**ROW, "error": ""}, *[{**LOSS, "value": 1.0, "step": step} for step in range(2047)]]
    )
    table = pq.read_table(place(tmp_path)).replace_schema_metadata()
    table = table.set_column(table.column_names.index(name), name, column)
    pq.write_table(table, place(tmp_path), compression="zstd")
    assert place(tmp_path).stat().st_size < 2**20
    with pytest.raises(storage.SchemaError, match=r"(values, at most|has more than) [\d,]+ (are read|bytes of text)"):
        storage.load(place(tmp_path))


@pytest.mark.parametrize("content", [b"", b"PAR1 truncated"])
def test_a_file_that_is_not_parquet_is_refused_by_name(tmp_path, content):
    path = tmp_path / "half.parquet"
    path.write_bytes(content)
    with pytest.raises(storage.SchemaError, match=r"half\.parquet: damaged or not a parquet file"):
        storage.read([path])


def test_a_file_that_pandas_wrote_is_read(tmp_path):
    path = place(tmp_path)
    storage.write(path, [{**LOSS, "value": 0.5}])
    whole = storage.load(path)
    others = {pa.string(): pa.large_string(), pa.int64(): pa.float64()}
    fields = [pa.field(field.name, others.get(field.type, field.type)) for field in storage.SCHEMA]
    pq.write_table(whole.cast(pa.schema(fields)), path)
    assert storage.load(path).equals(whole)


def test_a_row_group_that_counts_fewer_rows_than_its_file_is_refused(tmp_path):
    """Files of before have no digest, and Arrow reads as many rows as the group says."""
    path = place(tmp_path)
    storage.write(path, [{**LOSS, "value": value} for value in (0.5, 0.25, 0.125)])
    pq.write_table(pq.read_table(path).replace_schema_metadata(None), path)
    content = path.read_bytes()
    # the last 6 behind a field's header is the group's count in Thrift, where integers are doubled
    at = content.rindex(b"\x16\x06")
    path.write_bytes(content[:at] + b"\x16\x04" + content[at + 2 :])
    with pytest.raises(storage.SchemaError, match="it has 2 of its 3 rows"):
        storage.load(path)


def test_committed_rows_are_believed(command_line):
    done = command_line("results", "verify", HOME / "results" / "reference")
    assert done.returncode == 0, done.stdout
    assert "no problems" in done.stdout


def test_a_flipped_bit_never_changes_a_value_unseen(tmp_path):
    path, damaged = place(tmp_path / "whole"), place(tmp_path / "damaged")
    damaged.parent.mkdir(parents=True)
    storage.write(path, [{**LOSS, "value": 0.25 * step, "step": step} for step in range(40)])
    content, whole = path.read_bytes(), storage.load(path)
    refused = 0
    for bit in np.random.default_rng(0).integers(0, 8 * len(content), 200).tolist():
        flipped = bytearray(content)
        flipped[bit // 8] ^= 1 << bit % 8
        damaged.write_bytes(flipped)
        try:
            found = storage.load(damaged)
        except storage.SchemaError:
            refused += 1
        else:
            # some bits of the description of the file mean nothing to a reader
            assert found.equals(whole)
    assert refused > 100


def test_an_ending_is_read_from_the_footer_and_where_there_is_none_from_the_rows(tmp_path, monkeypatch):
    path = place(tmp_path)
    used = {"scan": {"version": 2, "backend": "torch"}}
    row = {**ROW, "status": "failed", "error": "why", "operators": json.dumps(used)}
    storage.write(path, [{**LOSS, "value": 0.5, "operators": row["operators"]}, row])
    expected = endings.Ending("failed", used, "why", like=LIKE)
    with monkeypatch.context() as patch:
        patch.delattr(endings, "load")
        assert endings.ending(path) == expected
    content = path.read_bytes()
    table = pq.read_table(path)
    # in the ending, and in a page that only a reader of the rows reads
    for at in (content.rindex(documents.ENDING) + len(documents.ENDING) + 30, 100):
        path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        with pytest.raises(storage.SchemaError, match="its digest is not that of its content"):
            endings.ending(path)
    # a file of before there were endings
    pq.write_table(table.replace_schema_metadata(None), path, write_page_checksum=True)
    assert endings.ending(path) == expected


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: path.symlink_to("nowhere")])
def test_what_is_no_file_is_refused_by_name_and_nobody_waits(tmp_path, make):
    path = storage.result_path(tmp_path, "e", "paper", "ab")
    path.parent.mkdir(parents=True)
    make(path)
    with pytest.raises(storage.SchemaError, match=r"ab\.parquet: .*no regular file"):
        storage.read(storage.files([tmp_path], "e"))


def test_of_a_run_stored_twice_the_first_root_wins(tmp_path):
    for root, seed in (("mine", 1), ("theirs", 2)):
        storage.write(place(tmp_path / root), [{**ROW, "step": seed}])
    frame = storage.read(storage.files([tmp_path / "mine", tmp_path / "theirs"], "e"))
    assert frame["step"].tolist() == [1]


def test_no_rows_are_an_empty_frame_with_all_columns():
    assert list(storage.read([]).columns) == storage.SCHEMA.names


def test_endings_are_read_by_threads_in_a_process_that_has_read_nothing_yet():
    # pyarrow imports its functions at their first use, which failed where several threads came to it at once
    code = (
        "import sys; from upath import UPath; from subquad.suite.store import endings\n"
        "assert endings.endings([UPath('memory://none.parquet')]) == [None]\n"
        "assert 'pyarrow.compute' in sys.modules"
    )
    done = in_a_process(code)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("length", [0, 1, 50, 300, 20_000, 300_000])
def test_the_ending_is_found_in_the_bytes_of_a_file(tmp_path, length):
    path = tmp_path / "a.parquet"
    storage.write(path, [{"metric": "run", "status": "failed", "error": "e" * length}])
    content = path.read_bytes()
    assert endings.value_in(content) == pq.ParquetFile(path).metadata.metadata[documents.ENDING]
    assert endings.value_in(b"") == endings.value_in(documents.ENDING) == b""


def test_a_link_in_the_place_of_a_file_is_replaced_and_not_followed(tmp_path):
    (tmp_path / "precious").write_text("kept")
    (tmp_path / "rows").symlink_to("precious")
    with replacing(tmp_path / "rows") as temporary:
        temporary.write_text("new")
    assert (tmp_path / "precious").read_text() == "kept"
    assert not (tmp_path / "rows").is_symlink()
    assert (tmp_path / "rows").read_text() == "new"


def test_a_name_for_an_open_file_is_written_itself(tmp_path):
    with (tmp_path / "page").open("w") as file:
        with replacing(Path("/proc/self/fd", str(file.fileno()))) as temporary:
            temporary.write_text("new")
        assert (tmp_path / "page").read_text() == "new"


def test_a_link_planted_for_a_temporary_file_is_not_followed(tmp_path, monkeypatch):
    """Two writers of one file never share a temporary file, and its name cannot be known before."""
    names = []
    for _ in range(2):
        with replacing(tmp_path / "rows") as temporary:
            names.append(temporary.name)
            assert temporary.is_file()
    assert len(set(names)) == 2


def test_what_has_its_final_name_is_on_the_disk(tmp_path, monkeypatch):
    done = []
    flush, move = os.fsync, os.replace
    monkeypatch.setattr(
        os, "fsync", lambda handle: (done.append(os.readlink(f"/proc/self/fd/{handle}")), flush(handle))
    )
    monkeypatch.setattr(os, "replace", lambda old, new: (done.append("replace"), move(old, new)))
    with replacing(tmp_path / "rows") as temporary:
        temporary.write_text("new")
    assert done == [str(temporary), "replace", str(tmp_path)]


@pytest.mark.parametrize("kind", ["open", "link", "file"])
def test_rows_are_put_aside_in_a_folder_of_this_user_alone_or_nowhere(tmp_path, monkeypatch, kind):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    folder = private_folder("aside")
    assert folder.stat().st_mode & 0o777 == 0o700
    assert private_folder("aside") == folder
    folder.rmdir()
    if kind == "open":
        folder.mkdir()
        folder.chmod(0o777)
    elif kind == "link":
        (tmp_path / "precious").mkdir(mode=0o700)
        folder.symlink_to("precious")
    else:
        folder.touch()
    assert private_folder("aside") is None
