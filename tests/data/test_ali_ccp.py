"""Promise: Ali-CCP's files are read as written, and a bad line is named."""

import numpy as np
import pytest

from tritonrec.data import load
from tritonrec.data.ali_ccp import FIELDS, AliCcp
from tritonrec.data.click_columns import MISSING

COMMON = ["u1,3,101\x0231\x031.0\x01127_14\x025\x032.5\x01127_14\x027\x033.5", "u2,1,101\x0290\x031.0"]
SKELETON = [
    "1,0,0,u1,2,216\x029342\x031.0\x01301\x0211\x031.0",
    "2,1,0,u2,2,216\x028\x030.5\x01216\x029\x030.5",
    "3,1,1,u1,2,999\x021\x031.0\x01301\x0212\x031.0",
    "4,0,0,u2,0,",
]


def write(folder, skeleton=SKELETON, common=COMMON):
    (folder / "sample_skeleton_train.csv").write_text("\n".join(skeleton) + "\n")
    (folder / "common_features_train.csv").write_text("\n".join(common) + "\n")
    return folder


def test_ids_stand_in_the_places_of_their_fields(tmp_path):
    log = load(f"ali-ccp:{write(tmp_path)}")
    expected = np.full((4, 23), MISSING)
    for row, given in enumerate(
        [
            {"101": 31, "127_14": 7, "216": 9342, "301": 11},
            {"101": 90, "216": 8},
            {"101": 31, "127_14": 7, "301": 12},
            {"101": 90},
        ]
    ):
        for field, id in given.items():
            expected[row, FIELDS.index(field)] = id
    assert np.array_equal(log.categories, expected)
    assert log.labels.tolist() == [0, 1, 1, 0] and log.trained == 3
    assert log.dense.shape == (4, 0) and log.features[0] == "f101" and len(log.features) == 23


@pytest.mark.parametrize(
    ("skeleton", "message"),
    [
        (["1,2,0,u1,0,"], "line 1: column click has '2', expected 0 or 1"),
        ([SKELETON[0], "1,0,0,u9,0,"], "line 2: column common has 'u9', expected one of the common features"),
        (
            [SKELETON[0], "1,0,0,u1,1,216\x02x\x031.0"],
            "line 2: column features, an id, has 'x', expected an int64",
        ),
        (["1,0,0,u1,1,216\x029223372036854775808\x031"], "line 1: .* an id, has '9223372036854775808'"),
        (["1,0,0,u1,1,216\x025\x03x"], "line 1: column features, a weight, has 'x'"),
        (["1,0,0,u1,1,216\x025"], "line 1: column features has .*, expected a field, an id and a weight"),
        (["1,0,0,u1"], "line 1: 4 columns, but 6 are named"),
        ([SKELETON[0], "1,0,0,u1"], "line 2: 4 columns, but 6 are expected"),
    ],
)
def test_a_bad_line_is_named(tmp_path, skeleton, message):
    with pytest.raises(ValueError, match=message):
        AliCcp(write(tmp_path, skeleton)).read()


def test_bytes_that_are_no_text_are_refused_with_the_name_of_the_file(tmp_path):
    file = write(tmp_path) / "sample_skeleton_train.csv"
    file.write_bytes(file.read_bytes() + b"\x88\n")
    with pytest.raises(ValueError, match=r"sample_skeleton_train\.csv, line 5: ") as raised:
        AliCcp(tmp_path).read()
    assert not isinstance(raised.value, UnicodeDecodeError)


def test_a_folder_without_the_files_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"holds no common_features\*.csv"):
        AliCcp(tmp_path).read()
    write(tmp_path)
    (tmp_path / "sample_skeleton_train.csv").write_text("")
    with pytest.raises(ValueError, match="holds no impressions"):
        AliCcp(tmp_path).read()
