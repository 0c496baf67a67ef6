"""KuaiRand's CSV files become a log with two tasks, user features and tags; bad columns are named."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tritonrec.data.convert import write
from tritonrec.data.impression_loader import ImpressionLoader
from tritonrec.data.sources import load

HEADER = (
    "user_id,video_id,date,hourmin,time_ms,is_click,is_like,is_follow,is_comment,is_forward,is_hate,long_view,"
    "play_time_ms,duration_ms,profile_stay_time,comment_stay_time,is_profile_enter,is_rand,tab"
)
USERS = "user_id,user_active_degree,is_lowactive_period,follow_user_num,follow_user_num_range,onehot_feat0"
VIDEOS = "video_id,author_id,video_type,upload_dt,upload_type,visible_status,video_duration,tag"


def row(user: int, video: int, time: int, click: int, like: int, view: int) -> str:
    return f"{user},{video},20220408,1600,{time},{click},{like},0,0,0,0,{view},175045,87433,0,0,0,0,1"


EARLY = [row(3, 1071, 1649408076860, 1, 0, 1), row(3, 15, 1649408076850, 0, 1, 0), row(0, 8, 7, 1, 1, 0)]
LATE = [row(0, 15, 9, 0, 0, 1), row(3, 8, 1649408076860, 1, 0, 0)]


@pytest.fixture
def folder(tmp_path) -> Path:
    """A small dataset in the layout of the published ones."""
    data = tmp_path / "KuaiRand-Pure" / "data"
    data.mkdir(parents=True)
    (data / "log_standard_4_08_to_4_21_pure.csv").write_text("\n".join([HEADER, *EARLY]) + "\n")
    (data / "log_standard_4_22_to_5_08_pure.csv").write_text("\n".join([HEADER, *LATE]) + "\n")
    (data / "log_random_4_22_to_5_08_pure.csv").write_text("\n".join([HEADER, row(9, 9, 9, 1, 1, 1)]) + "\n")
    (data / "user_features_pure.csv").write_text(
        f'{USERS}\n3,high_active,0,5,"(0,10]",7\n0,UNKNOWN,1,0,0,\n7,full_active,0,600,500+,1\n'
    )
    (data / "video_features_basic_pure.csv").write_text(
        f'{VIDEOS}\n1071,1,NORMAL,2022-04-01,Long,1.0,87433.0,"12,65"\n8,2,AD,2022-04-01,Pic,1.0,,\n'
        "15,2,NORMAL,,Short,1.0,5000.0,12\n"
    )
    return tmp_path / "KuaiRand-Pure"


def test_the_logs_of_a_folder(folder):
    for path in (folder, folder / "data"):
        log = load(f"kuairand:{path}")
        assert log.user.tolist() == [3, 3, 0, 0, 3] and log.item.tolist() == [1071, 15, 8, 15, 8]
        assert log.timestamp.tolist() == [1649408076860, 1649408076850, 7, 9, 1649408076860]
        assert {name: column.tolist() for name, column in log.feedback.items()} == {
            "is_click": [1, 0, 1, 0, 1],
            "long_view": [1, 0, 0, 1, 0],
        }
        assert log.rating is None


def test_features_of_users_and_tags_of_videos(folder):
    log = load(f"kuairand:{folder}")
    assert log.user_features.user_ids.tolist() == [0, 3, 7]
    assert {name: column.tolist() for name, column in log.user_features.columns.items()} == {
        "user_active_degree": [1, 3, 2],
        "follow_user_num_range": [2, 1, 3],
    }
    assert log.genres.item_ids.tolist() == [8, 15, 1071] and log.genres.offsets.tolist() == [0, 0, 1, 3]
    assert log.genres.genres.tolist() == [1, 1, 2]


def test_impressions_have_its_tasks(folder):
    loads = ImpressionLoader(load(f"kuairand:{folder}"), 4, max_history=5, max_exposed=1, seed=0)
    assert loads.tasks == ("is_click", "long_view")
    (held_out,) = loads.evaluation_batches()
    assert held_out.features["user_id"].ids.tolist() == [0, 3] and held_out.exposed_items.tolist() == [15, 8]
    assert held_out.history_items.tolist() == [8, 15, 1071] and held_out.history_actions.tolist() == [1, 0, 3]
    assert held_out.labels.tolist() == [[0, 1], [1, 0]]


def test_parquet_keeps_everything(folder, tmp_path):
    log = load(f"kuairand:{folder}")
    write(log, tmp_path / "out")
    back = load(f"parquet:{tmp_path / 'out'}")
    assert list(back.feedback) == ["is_click", "long_view"]
    for name in ("user", "item", "timestamp"):
        assert np.array_equal(getattr(back, name), getattr(log, name))
    assert np.array_equal(back.feedback["long_view"], log.feedback["long_view"])
    assert np.array_equal(back.genres.genres, log.genres.genres)


@pytest.mark.parametrize(
    "old, new, message",
    [
        (",time_ms,", ",time,", r"4_08_to_4_21_pure\.csv: no column 'time_ms'"),
        ("is_click", "clicked", r"4_08_to_4_21_pure\.csv: no column 'is_click'"),
        ("3,15,", "3,x,", r"4_08_to_4_21_pure\.csv, line 3: column video_id has 'x', expected an int64"),
        ("3,15,", "3,,", r"4_08_to_4_21_pure\.csv, line 3: column video_id has an empty field"),
        ("1649408076850,0,1", "1649408076850,2,1", r"line 3: column is_click has '2', expected 0 or 1"),
        (",1\n3,15", "\n3,15", r"4_08_to_4_21_pure\.csv, line 2: 18 columns, but 19 are expected"),
    ],
)
def test_a_bad_log_is_named(folder, old, new, message):
    path = folder / "data" / "log_standard_4_08_to_4_21_pure.csv"
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new, 1))
    with pytest.raises(ValueError, match=message):
        load(f"kuairand:{folder}")


@pytest.mark.parametrize("old, new", [(b",tab", b",t\xe1b"), (b",15,", b",\xe15,")])
def test_bytes_that_are_no_text_are_refused_with_the_name_of_the_file(folder, old, new):
    path = folder / "data" / "log_standard_4_08_to_4_21_pure.csv"
    path.write_bytes(path.read_bytes().replace(old, new, 1))
    with pytest.raises(ValueError, match=r"4_08_to_4_21_pure\.csv, line [13]: not UTF-8 text") as raised:
        load(f"kuairand:{folder}")
    assert not isinstance(raised.value, UnicodeDecodeError)


def test_a_missing_or_empty_log_is_named(tmp_path, folder):
    with pytest.raises(FileNotFoundError, match="nowhere: no such file or folder"):
        load(f"kuairand:{tmp_path / 'nowhere'}")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "log.csv").write_text(HEADER)
    with pytest.raises(FileNotFoundError, match=r"holds no log_standard_\*\.csv"):
        load(f"kuairand:{tmp_path / 'empty'}")
    (folder / "copy").mkdir()
    (folder / "copy" / "log_standard_a.csv").write_text(HEADER)
    with pytest.raises(ValueError, match=r"several folders have such files: name one of .*copy, .*data"):
        load(f"kuairand:{folder}")
    path = tmp_path / "log.csv"
    path.write_text(HEADER + "\n")
    with pytest.raises(ValueError, match="holds no interactions"):
        load(f"kuairand:{path}")
    path.write_text("")
    with pytest.raises(ValueError, match=r"log\.csv: the file is empty"):
        load(f"kuairand:{path}")
