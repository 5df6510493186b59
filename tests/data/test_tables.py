"""CSV files: numbers, words, labels; what is standardised, and by what."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfed import Split, datasets, partitions
from perfed.core.errors import ConfigError
from perfed.core.notices import say_once
from perfed.data import Federation, build_federation
from perfed.data.datasets import Samples
from perfed.data.tables import is_number
from perfed.flower.settings import raw_numbers
from tests.data import own_files
from tests.data.own_files import HEADER


def load(path: Path, **options: Any) -> Samples:
    return datasets.build({"name": "csv", "path": str(path), **options}).load(0)


ROWS: list[list[object]] = [
    [30, 1.5, "red", "b"],
    [40, -2, "green", "a"],
    ["1e1", 0, "red", "b"],
    [20, 7, "blue", "c"],
]


def test_numbers_words_and_labels(tmp_path: Path) -> None:
    path = own_files.table(tmp_path / "a.csv", ROWS, HEADER)
    samples = load(path, target="kind", scale="none")
    assert samples.x.tolist() == [
        [30, 1.5, 0, 0, 1],
        [40, -2, 0, 1, 0],
        [10, 0, 0, 0, 1],
        [20, 7, 1, 0, 0],
    ]
    assert samples.y.tolist() == [1, 0, 1, 2]
    assert samples.origin["classes"] == ["a", "b", "c"]
    columns = ["age", "income", "colour=blue", "colour=green", "colour=red"]
    assert samples.origin["columns"] == columns
    samples = load(path, target="kind", ignore=["income", "colour"], categories=["age"])
    assert samples.origin["columns"] == ["age=1e1", "age=20", "age=30", "age=40"]
    assert samples.unscaled is None
    by_age = load(path, target="age", scale="none")
    assert by_age.origin["classes"] == ["1e1", "20", "30", "40"]  # as numbers, in their order


def federation(path: Path, **options: Any) -> Federation:
    data = datasets.build({"name": "csv", "path": str(path), "target": "kind", **options})
    partition = partitions.build("given" if options.get("by_client") else "iid")
    return build_federation(data, partition, Split(), 4, 0)


def test_training_rows_alone_say_what_the_scale_is(tmp_path: Path) -> None:
    rows = own_files.people(200)
    path = own_files.table(tmp_path / "a.csv", rows, HEADER)
    made = federation(path, public=40)
    training = np.concatenate([split.train for split in made.splits])
    numbers = made.samples.x[training][:, :2]
    assert np.allclose(numbers.mean(axis=0), 0, atol=1e-5)
    assert np.allclose(numbers.std(axis=0), 1, atol=1e-4)
    assert set(np.unique(made.samples.x[:, 2:])) == {0.0, 1.0}
    facts = made.record()["standardised"]
    raw = np.array([row[:2] for row in rows], dtype=float)
    mean, deviation = np.array(facts["mean"]), np.array(facts["deviation"])
    assert np.allclose(mean[:2], raw[made.samples.index[training]].mean(axis=0))
    public = made.samples.public_x[:, :2] * deviation[:2] + mean[:2]
    assert np.allclose(public, raw[made.samples.public_index], atol=1e-2)

    # Whatever stands in other rows changes no training row.
    for row in set(range(200)) - set(made.samples.index[training].tolist()):
        rows[row][:2] = [1e6, -1e6]
    other = federation(own_files.table(tmp_path / "b.csv", rows, HEADER), public=40)
    assert np.array_equal(other.samples.x[training], made.samples.x[training])


def test_large_numbers_keep_their_digits(tmp_path: Path) -> None:
    rows = [[1_700_000_000 + second, "ab"[second % 2]] for second in range(60)]
    path = own_files.table(tmp_path / "a.csv", rows, ["time", "kind"])
    made = federation(path)
    assert len(np.unique(made.samples.x)) == 60


def test_a_constant_column_is_no_division_by_zero(tmp_path: Path) -> None:
    rows = [[7, number, "ab"[number % 2]] for number in range(40)]
    made = federation(own_files.table(tmp_path / "a.csv", rows, ["same", "n", "kind"]))
    assert (made.samples.x[:, 0] == 0).all()


def test_a_public_table_is_written_as_the_private_one(tmp_path: Path) -> None:
    path = own_files.table(tmp_path / "a.csv", ROWS, HEADER)
    rows = [["violet", 5, 3], ["red", 6, 4]]  # another order of columns, no label, a new word
    public = own_files.table(tmp_path / "p.csv", rows, ["colour", "income", "age"])
    options = {"name": "csv", "path": str(public)}
    samples = load(path, target="kind", scale="none", public=options)
    assert samples.public_x.tolist() == [[3, 5, 0, 0, 0, 1], [4, 6, 0, 0, 1, 0]]
    assert samples.x.shape == (4, 6)
    assert samples.origin["public"]["hash"]
    one = load(path, target="kind", scale="none", public=options | {"samples": 1})
    (row,) = one.public_index
    assert one.public_x.tolist() == samples.public_x[[row]].tolist()
    with pytest.raises(ConfigError, match=r"data.public.samples: 3 samples of the 2 there are"):
        load(path, target="kind", public=options | {"samples": 3})
    own_files.table(public, [[1]], ["age"])
    with pytest.raises(ConfigError, match=r"data.path: .*p.csv has no column 'income'"):
        load(path, target="kind", public=options)


def test_clients_by_column_and_by_file(tmp_path: Path) -> None:
    rows = [[number, f"site {number % 3}", "ab"[number % 2]] for number in range(30)]
    path = own_files.table(tmp_path / "a.csv", rows, ["n", "where", "kind"])
    samples = load(path, target="kind", client="where")
    assert samples.client_ids is not None
    assert samples.client_ids.tolist() == [row[1] for row in rows]
    assert samples.x.shape == (30, 1)
    for number in range(4):
        own_files.table(tmp_path / "by" / f"s{number}.csv", own_files.people(30, number), HEADER)
    made = federation(tmp_path / "by", by_client=True)
    assert made.record()["client_names"] == ["s0", "s1", "s2", "s3"]


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("", {}, "is empty: the first line must name the columns"),
        ("a,label\n", {}, "has a header and no rows"),
        ("a,label\n1,x\n2\n", {}, "line 3: 1 cells, the header has 2"),
        ("a,a,label\n1,2,x\n", {}, "column 1 is named 'a', like another"),
        ("a,,label\n1,2,x\n", {}, "column 2 has no name"),
        ("a,label\n1,x\n\nabc,x\n", {}, "line 4, column 'a': 'abc' is not a number; if the column"),
        ("a,label\n1,x\n,x\n", {}, "line 3, column 'a' is empty: fill in a value, or delete"),
        ("a,label\n1,x\n,x\n,x\n,x\n", {}, "line 3, column 'a' is empty, like 2 more of"),
        ("a,label\nu,x\n,x\n", {}, "line 3, column 'a' is empty"),
        ("a,label\n1,x\nnan,x\n", {}, "line 3, column 'a': 'nan' is not a number"),
        ("a,label\n1,x\n2,\n", {}, "line 3, column 'label' is empty: a row needs a label"),
        ("a,kind\n1,x\n", {}, "data.target: "),
        ("a,label\n1,x\n", {"ignore": ["b"]}, "data.ignore: "),
        ("a,label\n1,x\n", {"ignore": ["a"]}, "has no column beside the label"),
        ("a,label\n1,x\n", {"client": "who"}, "data.client: "),
        ('a,label\n"1,x\n', {}, "cannot be read"),
        ("a,label\n\xff,x\n", {}, "cannot be read: it is not UTF-8; save it"),
        ("1,1\n2,3\n", {}, "column 1 is named '1', like another; the first line must name"),
        ("a;label\n1,5;x\n", {}, "line 2: 2 cells, the header has 1; set data.separator to ';'"),
        ("a;label\n1,5;x\n", {"separator": ";"}, "line 2, column 'a': 1,5 has a decimal comma"),
        ("a;label\n1;x\n", {"separator": ";;"}, "separator: ';;' is not one character"),
    ],
)
def test_a_bad_table_is_one_line_with_row_and_column(
    tmp_path: Path, text: str, options: dict[str, Any], message: str
) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError) as caught:
        load(path, **options)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("rows", [19, 40])
def test_names_of_rows_are_no_classes(rows: int, tmp_path: Path) -> None:
    path = own_files.table(
        tmp_path / "a.csv", [[20 + row, f"p{row:02}"] for row in range(rows)], ["age", "patient"]
    )
    if rows < 20:
        assert load(path, target="patient").classes == rows
        return
    with pytest.raises(ConfigError, match="column 'patient' has another value in every row"):
        load(path, target="patient")


def test_names_and_measurements_are_no_categories(tmp_path: Path) -> None:
    rows = [[f"person {n}", n / 7, "ab"[n % 2]] for n in range(1500)]
    path = own_files.table(tmp_path / "a.csv", rows, ["who", "n", "kind"])
    with pytest.raises(ConfigError, match=r"column 'who' .* 1,500 different words.*'ignore'"):
        load(path, target="kind")
    with pytest.raises(ConfigError, match="column 'n' has 1,500 different values"):
        load(path, target="n", ignore=["who"])


def test_many_numbers_with_a_decimal_comma_are_called_so_unless_they_are_categories(
    tmp_path: Path,
) -> None:
    """A large table has more of them than there may be words in a column."""
    path = tmp_path / "a.csv"
    lines = [f"{n // 10},{n % 10};{'ab'[n % 2]}" for n in range(1500)]
    path.write_text("\n".join(["n;kind", *lines]))
    with pytest.raises(ConfigError, match="line 2, column 'n': 0,0 has a decimal comma"):
        load(path, target="kind", separator=";")
    path.write_text("\n".join(["n;kind", *lines[:20]]))
    codes = load(path, target="kind", separator=";", categories=["n"])
    assert codes.x.shape == (20, 20)


def test_words_that_are_no_categories_are_spoken_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    say_once.cache_clear()
    rows = [[f"comment {n}", "red", "ab"[n % 2]] for n in range(60)]
    path = own_files.table(tmp_path / "a.csv", rows, ["comment", "colour", "kind"])
    load(path, target="kind")
    (line,) = caplog.messages
    assert "column 'comment'" in line
    assert "60 different words in 60 rows" in line


words = st.text(st.characters(codec="utf-8", exclude_characters="\x00\r\n"), min_size=1).map(
    str.strip
)
cells = st.one_of(
    st.floats(allow_nan=False, allow_infinity=False, width=32).map(str), words.filter(bool)
)


@given(st.lists(st.tuples(cells, cells), min_size=1, max_size=12))
def test_any_table_is_read_exactly_or_refused_in_one_line(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[str, str]]
) -> None:
    path = own_files.table(tmp_path_factory.mktemp("any") / "a.csv", rows, ["a", "label"])
    mixed = {is_number(cell) for cell, _ in rows} == {True, False}
    if mixed:
        with pytest.raises(ConfigError, match=r"line .*column 'a': .* is not a number"):
            load(path, scale="none")
        return
    samples = load(path, scale="none")
    titles = samples.origin["columns"]
    for row, (cell, label) in enumerate(rows):
        assert samples.origin["classes"][samples.y[row]] == label.strip()
        if titles == ["a"]:
            assert samples.x[row, 0] == np.float32(cell)
        else:
            assert titles[int(samples.x[row].argmax())] == f"a={cell.strip()}"
            assert samples.x[row].sum() == 1


def test_a_site_alone_cannot_standardise(tmp_path: Path) -> None:
    path = own_files.table(tmp_path / "a.csv", own_files.people(20), HEADER)
    with pytest.raises(ConfigError, match="which no site knows: set 'scale: none'"):
        raw_numbers(load(path, target="kind"), "data.dataset")
    assert len(raw_numbers(load(path, target="kind", scale="none"), "").x) == 20


def test_pixels_in_a_table_are_pictures(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (8, 2, 3), dtype=np.uint8)
    rows = [",".join(map(str, [*one.ravel(), n % 2])) for n, one in enumerate(pixels)]
    header = ",".join([*(f"p{n}" for n in range(6)), "label"])
    path = tmp_path / "pixels.csv"
    path.write_text("\n".join([header, *rows]))
    how = {"name": "csv", "path": str(path), "shape": [1, 2, 3]}
    x = datasets.build({**how, "scale": "pixels"}).load(0).x
    assert np.array_equal(x, pixels[:, None])
    assert x.dtype == np.uint8
    assert datasets.build({**how, "scale": "none"}).load(0).x.shape == (8, 1, 2, 3)
    with pytest.raises(ConfigError, match="6 columns beside the label, a picture of 1×2×2 has 4"):
        datasets.build({**how, "shape": [1, 2, 2]}).load(0)
    path.write_text(path.read_text().replace(rows[3], "1,2,3,4,5,256,1"))
    with pytest.raises(ConfigError, match="line 5, column 'p5': '256' is no pixel"):
        datasets.build({**how, "scale": "pixels"}).load(0)
