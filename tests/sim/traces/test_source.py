"""Files of a trace: packed or plain, read line by line, and what is said of broken ones."""

import gzip
from itertools import islice

import pytest

from saga_sim.traces import TraceError
from saga_sim.traces.source import Record, Source
from tests.sim.traces.support import write_lines


def message_of(source):
    with pytest.raises(TraceError) as caught:
        list(source.records())
    return str(caught.value).replace(f"{source.path.parent}/", "")


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_records_carry_their_line_and_blank_lines_count(tmp_path, name):
    path = write_lines(tmp_path / name, [{"n": 1}, "", "  ", {"n": 2}])
    records = list(Source(path).records())
    assert [record.values["n"] for record in records] == [1, 2]
    assert [record.where for record in records] == [f"{path}:1", f"{path}:4"]


def test_gzip_is_told_by_its_bytes_not_by_its_name(tmp_path):
    packed = tmp_path / "packed.jsonl"
    packed.write_bytes(gzip.compress(b'{"n": 1}\n'))
    plain = tmp_path / "plain.gz"
    plain.write_bytes(b'{"n": 2}\n')
    assert [Source(path).first().values["n"] for path in (packed, plain)] == [1, 2]


def test_an_object_may_span_the_whole_file(tmp_path):
    path = write_lines(tmp_path / "a.json", ["{", '  "n": [1,', "  2]", "}"])
    assert [(r.values, r.where) for r in Source(path).records()] == [({"n": [1, 2]}, f"{path}:1")]


def test_a_byte_order_mark_and_a_missing_last_newline_are_fine(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"n": 1}\n{"n": 2}')
    assert [record.values["n"] for record in Source(path).records()] == [1, 2]


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_lines_are_read_as_they_are_asked_for(tmp_path, name):
    path = write_lines(tmp_path / name, [{"n": 1}, {"n": 2}, "oops"])
    assert Source(path).first().values == {"n": 1}
    assert [record.values["n"] for record in islice(Source(path).records(), 2)] == [1, 2]


def test_no_file(tmp_path):
    assert (
        message_of(Source(tmp_path / "none")) == "none: cannot be read: No such file or directory"
    )


@pytest.mark.parametrize("content", [b"", b"\n \n", gzip.compress(b"")])
def test_an_empty_file(tmp_path, content):
    path = tmp_path / "a.jsonl"
    path.write_bytes(content)
    with pytest.raises(TraceError, match=r"a\.jsonl: is empty; expected JSON objects, one a line"):
        Source(path).first()


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"n": }', "2: is not valid JSON: Expecting value at column 7"),
        ('{"n": 1', "2: is not valid JSON: Expecting ',' delimiter at column"),
        ("[1]", "2: is a list; expected a JSON object"),
        ("7", "2: is 7; expected a JSON object"),
        ('{"n": NaN}', "2: is not valid JSON: NaN is not a number of JSON"),
        ("[" * 200_000, "2: is not valid JSON: "),
        ('{"n": ' + "9" * 5000 + "}", "2: is not valid JSON: Exceeds the limit"),
    ],
    ids=["value", "end", "list", "number", "nan", "deep", "long"],
)
def test_a_broken_line(tmp_path, line, reason):
    path = write_lines(tmp_path / "a.jsonl", [{"n": 1}, line, {"n": 3}])
    assert message_of(Source(path)).startswith(f"a.jsonl:{reason}")


def test_a_broken_first_line_is_named(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", ['{"n": oops}', {"n": 3}])
    assert message_of(Source(path)) == "a.jsonl:1: is not valid JSON: Expecting value at column 7"


def test_a_broken_line_of_an_object_that_spans_lines(tmp_path):
    path = write_lines(tmp_path / "a.json", ["", "{", '  "n": 1,', '  "m": oops', "}"])
    assert message_of(Source(path)) == "a.json:4: is not valid JSON: Expecting value at column 8"


def test_bytes_that_are_not_text(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"n": 1}\n{"n": "\xff"}\n')
    assert message_of(Source(path)).startswith("a.jsonl:2: is not valid JSON: 'utf-8' codec can't")


def test_gzip_that_ends_too_early(tmp_path):
    path = write_lines(tmp_path / "a.gz", [{"n": i} for i in range(3)])
    path.write_bytes(path.read_bytes()[:-4])
    assert message_of(Source(path)) == (
        "a.gz:4: the gzip data ends too early; expected a whole file"
    )


def test_damaged_gzip(tmp_path):
    path = write_lines(tmp_path / "a.gz", [{"n": 1}])
    data = bytearray(path.read_bytes())
    data[-8] ^= 1
    path.write_bytes(data)
    assert message_of(Source(path)).startswith("a.gz:2: cannot be read: CRC check failed")


FIELDS = {"text": "x", "int": 3, "float": 2.5, "true": True, "null": None, "list": [{"a": 1}, 2]}


@pytest.mark.parametrize(
    ("read", "message"),
    [
        (lambda r: r.text("none"), "'none' is missing"),
        (lambda r: r.text("null"), "'null' is null"),
        (lambda r: r.text("int"), "'int' is 3; expected a string"),
        (lambda r: r.name("float"), "'float' is 2.5; expected a string or an integer"),
        (lambda r: r.integer("true"), "'true' is True; expected an integer of 0 or more"),
        (lambda r: r.integer("float"), "'float' is 2.5; expected an integer of 0 or more"),
        (lambda r: r.integer("int", at_least=4), "'int' is 3; expected an integer of 4 or more"),
        (lambda r: r.number("text"), "'text' is 'x'; expected a number of 0 or more"),
        (lambda r: r.number("list"), "'list' is a list; expected a number of 0 or more"),
        (lambda r: r.ids("list"), "'list' is a list; expected a list of integers of 0 or more"),
        (lambda r: r.records("int"), "'int' is 3; expected a list of objects"),
        (lambda r: r.records("list"), "list[1]: is 2; expected a JSON object"),
    ],
)
def test_a_field_that_is_wrong(read, message):
    with pytest.raises(TraceError) as caught:
        read(Record(FIELDS, "file:7"))
    assert str(caught.value).startswith("file:7")
    assert str(caught.value).endswith(message)


@pytest.mark.parametrize("value", [-0.5, -1, 10**400])
def test_a_number_out_of_range(value):
    with pytest.raises(TraceError, match="expected a number of 0 or more"):
        Record({"n": value}, "file:7").number("n")


def test_a_field_that_may_be_missing():
    record = Record(FIELDS, "file:7")
    assert record.text("none", "") == ""
    assert record.number("null", None) is None
    assert record.name("int", None) == "3"
    assert record.number("int") == 3.0
    assert (record.has("null"), record.has("int")) == (False, True)
