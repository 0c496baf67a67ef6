"""Promise: each well-known log is read as it is published, by its name alone, whole and in parts."""

# ruff: noqa: E501 - published lines are long
import gzip
import re
from pathlib import Path

import pytest

from tritonrec.data import ClickLog, LogFormat, load
from tritonrec.data.grouped import clicks_of, sequences_of
from tritonrec.data.log_format import described
from tritonrec.data.parquet import concat
from tritonrec.data.presets import AVAZU_CATEGORIES, PRESETS
from tritonrec.data.sources import source_of

MOVIES = "1,296,5.0,1147880044\n1,306,3.5,1147868817\n"
RATINGS = ([1, 1], [296, 306], [1147880044, 1147868817])
REVIEW = '{{"overall": 5.0, "verified": true, "reviewTime": "03 11, 2014", "reviewerID": "{}", "asin": "{}", ' \
    '"reviewText": "so \\"good\\"", "unixReviewTime": {}}}\n'  # fmt: skip
REVIEWS = REVIEW.format("A2", "0528", 1394496000) + REVIEW.format("A1", "B0A", 1394496001)
WORDS = ([0, 1], [0, 1], [1394496000, 1394496001])
LOGS = {
    "movielens-100k": ("u.data", "196\t242\t3\t881250949\n186\t302\t3\t891717742\n",
                       ([196, 186], [242, 302], [881250949, 891717742])),
    "movielens-1m": ("ratings.dat", "1::1193::5::978300760\n1::661::3::978302109\n",
                     ([1, 1], [1193, 661], [978300760, 978302109])),
    "movielens-10m": ("ratings.dat", "1::122::5::838985046\n1::185::4.5::838983525\n",
                      ([1, 1], [122, 185], [838985046, 838983525])),
    "movielens-20m": ("ratings.csv", '"userId","movieId","rating","timestamp"\n' + MOVIES, RATINGS),
    "movielens-25m": ("ratings.csv", "userId,movieId,rating,timestamp\n" + MOVIES, RATINGS),
    "movielens-32m": ("ratings.csv", "userId,movieId,rating,timestamp\n" + MOVIES, RATINGS),
    "amazon-2014": ("ratings_Beauty.csv", "A2,0528,5.0,1394496000\nA1,B0A,1.0,1394496001\n", WORDS),
    "amazon-2014-reviews": ("reviews_Beauty_5.json.gz", REVIEWS, WORDS),
    "amazon-2018": ("All_Beauty.csv", "0528,A2,5.0,1394496000\nB0A,A1,1.0,1394496001\n", WORDS),
    "amazon-2018-reviews": ("All_Beauty_5.json.gz", REVIEWS, WORDS),
    "amazon-2023": ("All_Beauty.csv.gz", "user_id,parent_asin,rating,timestamp\nAE,B0,5.0,1588687728923\n"
                    "AF,B1,1.0,1588687728924\n", ([0, 1], [0, 1], [1588687728923, 1588687728924])),
    "amazon-2023-reviews": (
        "All_Beauty.jsonl.gz", '{"rating": 5.0, "title": "Such", "text": "x", "images": [{"a": "b"}], "asin": "B00Y", '
        '"parent_asin": "B00X", "user_id": "AG", "timestamp": 1588687728923, "helpful_vote": 0, '
        '"verified_purchase": true}\n', ([0], [0], [1588687728923])),
    "yelp": ("yelp_academic_dataset_review.json", '{"review_id":"KU_","user_id":"mh_","business_id":"XQf","stars":3.0,'
             '"useful":0,"text":"If\\nyou","date":"2018-07-07 22:09:11"}\n', ([0], [0], [1531001351])),
    "goodreads": ("goodreads_interactions_poetry.json.gz", '{"user_id": "8842281e", "book_id": "24375664", '
                  '"review_id": "5cd4", "is_read": true, "rating": 5, "date_added": "Fri Aug 25 13:55:02 -0700 2017", '
                  '"date_updated": "Mon Oct 09 08:55:59 -0700 2017"}\n', ([0], [0], [1507564559])),
    "goodreads-csv": ("goodreads_interactions.csv", "user_id,book_id,is_read,rating,is_reviewed\n0,948,1,5,0\n0,947,1,5,1\n",
                      ([0, 0], [948, 947], [0, 1])),
    "steam": ("steam_reviews.json.gz", "{u'username': u'Chaos Syren', u'hours': 0.1, u'product_id': u'725280', "
              "u'date': u'2017-12-17', u'text': u'This \\u2661 \"x\"', u'early_access': False}\n"
              "{u'username': u\"\u2654 O'Ne\", u'product_id': u'328100', u'date': u'2017-08-02', u'early_access': True}\n",
              ([0, 1], [0, 1], [1513468800, 1501632000])),
    "retailrocket": ("events.csv", "timestamp,visitorid,event,itemid,transactionid\n1433221332117,257597,view,355908,\n"
                     "1433224214164,992329,addtocart,248676,\n", ([257597, 992329], [355908, 248676], [1433221332117, 1433224214164])),
    "lastfm-1k": ("userid-timestamp-artid-artname-traid-traname.tsv",
                  "user_000001\t2009-05-04T23:08:57Z\tf1b1cf71\tDeep Dish\t\tFuck Me \"Im Famous\n"
                  "user_000001\t2009-05-04T13:54:10Z\ta7f7df4a\t\u5742\u672c\t\tComposition 0919\n",
                  ([0, 0], [0, 1], [1241478537, 1241445250])),
    "lastfm-360k": ("usersha1-artmbid-artname-plays.tsv", "00000c289a\t3bd73256\tbetty blowtorch\t2137\n"
                    "00000c289a\t\tdie \u00c4rzte\t1099\n", ([0, 0], [0, 1], [0, 1])),
    "lastfm-hetrec": ("user_artists.dat", "userID\tartistID\tweight\n2\t51\t13883\n2\t52\t352698\n", ([2, 2], [51, 52], [0, 1])),
    "yoochoose": ("yoochoose-clicks.dat", "1,2014-04-07T10:51:09.277Z,214536502,0\n1,2014-04-07T10:54:09.868Z,214536500,S\n",
                  ([1, 1], [214536502, 214536500], [1396867869277, 1396868049868])),
    "yoochoose-buys": ("yoochoose-buys.dat", "420374,2014-04-06T18:44:58.314Z,214537888,12462,1\n",
                       ([420374], [214537888], [1396809898314])),
    "diginetica": ("train-item-views.csv", "sessionId;userId;itemId;timeframe;eventdate\n1;NA;81766;526309;2016-05-09\n"
                   "1;NA;31331;1031018;2016-05-09\n", ([1, 1], [81766, 31331], [1462752000, 1462752000])),
    "kuairec": ("big_matrix.csv", "user_id,video_id,play_duration,video_duration,time,date,timestamp,watch_ratio\n"
                "0,3649,13838,10867,2020-07-05 00:08:23.438,20200705,1593878903.438,1.2733965215\n"
                "0,9598,13665,10984,,,,1.2440823015\n", ([0], [3649], [1593878903])),
    "kuairec-small": ("small_matrix.csv", "user_id,video_id,play_duration,video_duration,time,date,timestamp,watch_ratio\n"
                      "14,148,4381,6067,2020-07-05 05:27:48.378,20200705.0,1593898068.378,0.722103\n", ([14], [148], [1593898068])),
    "kuairand": ("data/log_standard_4_08_to_4_21_pure.csv", "user_id,video_id,date,hourmin,time_ms,is_click,is_like,long_view\n"
                 "3,1071,20220408,1600,1649408076860,1,0,1\n", ([3], [1071], [1649408076860])),
    "taobao": ("UserBehavior.csv", "1,2268318,2520377,pv,1511544070\n1,2333346,2520771,buy,-2134949234\n",
               ([1, 1], [2268318, 2333346], [1511544070, -2134949234])),
    "tenrec": ("QB-video.csv", "user_id,item_id,click,follow,like,share,video_category,watching_times,gender,age\n"
               "1,5,1,0,0,1,1,1,1,3\n1,3,0,0,1,0,1,0,1,3\n", ([1, 1], [5, 3], [0, 1])),
    "mind": ("behaviors.tsv", "1\tU13740\t11/11/2019 9:05:58 AM\tN55189 N42782\tN55689-1 N35729-0\n"
             "2\tU91836\t11/12/2019 6:11:30 PM\t\tN35729-0\n", ([0, 0, 1], [0, 1, 1], [1573463158, 1573463158, 1573582290])),
    "gowalla": ("loc-gowalla_totalCheckins.txt.gz", "0\t2010-10-19T23:55:27Z\t30.2359091167\t-97.7951395833\t22847\n"
                "0\t2010-10-18T22:17:43Z\t30.2691029532\t-97.7493953705\t420315\n", ([0, 0], [22847, 420315], [1287532527, 1287440263])),
}  # fmt: skip


def written(tmp_path, name, text):
    path = tmp_path / "published" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    data = text.encode()
    path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    (tmp_path / "published" / "README.md").write_text("none of it")
    return path


@pytest.mark.parametrize("word", LOGS)
def test_a_published_log_is_read_by_its_name(tmp_path, word, monkeypatch):
    name, text, expected = LOGS[word]
    path = written(tmp_path, name, text)
    for place in (path, tmp_path / "published"):
        log = load(f"{word}:{place}")
        assert (log.user.tolist(), log.item.tolist(), log.timestamp.tolist()) == expected
    monkeypatch.setattr("tritonrec.data.text_tables.BLOCK_BYTES", 40)
    monkeypatch.setenv("TRITONREC_CACHE", str(tmp_path / "cache"))
    parts = concat(list(source_of(f"{word}:{path}").events().parts()))
    assert (parts.user.tolist(), parts.item.tolist(), parts.timestamp.tolist()) == expected
    assert sequences_of(f"{word}:{path}").is_dir()


def test_what_else_they_say(tmp_path):
    def read(word, more=""):
        name, text, _expected = LOGS[word]
        return load(f"{word}:{written(tmp_path / word, name, text)}{more}")

    assert read("movielens-10m").rating.tolist() == [5.0, 4.5] and read("amazon-2018").rating.tolist() == [
        5.0,
        1.0,
    ]
    assert read("mind").feedback["click"].tolist() == [1, 0, 0]
    assert read("mind").words["item"].words.to_pylist() == ["N55689", "N35729"]
    assert {name: own.tolist() for name, own in read("tenrec").feedback.items()} == {
        "click": [1, 0], "follow": [0, 0], "like": [0, 1], "share": [1, 0],
    }  # fmt: skip
    assert read("lastfm-1k").words["item"].words.to_pylist()[0] == "Deep Dish"
    assert read("lastfm-1k", "?item=track").words["item"].words.to_pylist()[0] == 'Fuck Me "Im Famous'
    assert read("lastfm-360k").rating.tolist() == [2137.0, 1099.0] and read("lastfm-360k").time_unit == "step"
    assert read("lastfm-hetrec").rating.tolist() == [13883.0, 352698.0]
    assert read("steam").words["user"].words.to_pylist() == ["Chaos Syren", "\u2654 O'Ne"]
    assert read("goodreads").feedback["is_read"].tolist() == [1] and read("yelp").rating.tolist() == [3.0]
    assert read("kuairec").rating.tolist() == [1.2733965215] and read("retailrocket").time_unit == "ms"
    for word in (
        "amazon-2018-reviews",
        "amazon-2023-reviews",
        "steam",
    ):  # verified, early_access: no feedback
        assert not read(word).feedback
    assert set(read("steam", "?label=early_access").feedback) == {"early_access"}
    assert read("diginetica").sequences.items.tolist() == [81766, 31331]


CRITEO = (
    "1\t1\t-1\t\t5" + "\t0" * 9 + "\t68fd1e64\t\t7e5c2ff4" + "\tfb936136" * 23 + "\n" + "0" + "\t" * 39 + "\n"
)
AVAZU = (
    "id,click,hour,C1,banner_pos,site_id,site_domain,site_category,app_id,app_domain,app_category,device_id,"
    "device_ip,device_model,device_type,device_conn_type,C14,C15,C16,C17,C18,C19,C20,C21\n"
    "1000009418151094273,0,14102100,1005,0,1fbe01fe,f3845767,28905ebd,ecad2386,7801e8d9,07d7df22,a99f214a,"
    "ddd2926e,44956a24,1,2,15706,320,50,1722,0,35,-1,79\n"
)


def test_published_clicks(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITONREC_CACHE", str(tmp_path / "cache"))
    log = load(f"criteo-tsv:{written(tmp_path, 'train.txt', CRITEO).parent}")
    assert isinstance(log, ClickLog) and log.labels.tolist() == [1, 0] and log.dense.shape == (2, 13)
    assert log.categories[0, :3].tolist() == [0x68FD1E64, 2**32, 0x7E5C2FF4]
    assert clicks_of(f"criteo-tsv:{tmp_path}/published").is_dir()
    with pytest.raises(
        ValueError, match="line 2: column C20 has '-1', expected one to eight hexadecimal digits"
    ):
        load(f"avazu-csv:{written(tmp_path / 'avazu', 'train.csv', AVAZU)}?categories=C20&hexadecimal=C20")
    log = load(f"avazu-csv:{written(tmp_path / 'avazu', 'train.gz', AVAZU)}")
    assert log.features == AVAZU_CATEGORIES and log.labels.tolist() == [0] and log.dense.shape == (1, 0)
    assert log.categories[0, [0, 2, 19]].tolist() == [1005, 0x1FBE01FE, -1]


def test_every_preset_has_its_test_and_its_row_on_the_page():
    page = (Path(__file__).parents[2] / "docs" / "data.md").read_text()
    for word, preset in PRESETS.items():
        assert f"| `{word}:` | {preset.about} |" in page
    assert set(PRESETS) == {*LOGS, "criteo-tsv", "criteo-parquet", "avazu-csv"}


def test_articles_of_tenrec_are_not_read_as_its_videos(tmp_path):
    folder = written(
        tmp_path, "QK-article.csv", "user_id,item_id,click,follow,like,share\n1,5,1,0,0,1\n"
    ).parent
    with pytest.raises((ValueError, OSError), match=r"QB-video\.csv"):
        load(f"tenrec:{folder}")


def test_settings_win_over_the_preset_and_each_other(tmp_path):
    path = written(tmp_path, "u.data", "196\t242\t3\t881250949\n")
    assert load(f"movielens-100k:{path}", LogFormat(user="item", item="user")).item.tolist() == [196]
    log = load(f"movielens-100k:{path}?item=rating", LogFormat(item="timestamp"))
    assert log.item.tolist() == [3]
    path = written(tmp_path, "ratings_Books.csv", "7,9,5.0,1400000000\n8,9,3.0,1400000001\n")
    assert load(f"amazon-2014:{path}").user.tolist() == [0, 1]
    assert load(f"amazon-2014:{path}?ids=integers").user.tolist() == [7, 8]  # the default of a format
    assert described(f"amazon-2014:{path}?ids=integers", LogFormat(ids="hashed")).endswith("?ids=integers")
    with pytest.raises(FileNotFoundError, match=r"the folder holds no ratings\.csv"):
        load(f"movielens-25m:{tmp_path}/published")


AMAZON = "A2SUAM1J3GNN3B,0000013714,5.0,1394496000\nAKM1MP6P0OYPR,B00005N7P0,1.0,1394496001\n"


def test_ratings_of_amazon_with_user_and_item_the_other_way_round_are_refused(tmp_path):
    path = written(tmp_path, "ratings_Beauty.csv", AMAZON)
    assert load(f"amazon-2014:{path}").words["item"].words.to_pylist() == ["0000013714", "B00005N7P0"]
    for place in (path, path.parent):
        with pytest.raises(ValueError, match=r"ratings_Beauty\.csv: .* other way round"):
            load(f"amazon-2018:{place}")
    with pytest.raises(ValueError, match="other way round"):
        sequences_of(f"amazon-2018:{path}")
    swapped = "\n".join(
        ",".join([b, a, *rest]) for a, b, *rest in (line.split(",") for line in AMAZON.split())
    )
    path = written(tmp_path / "later", "All_Beauty.csv.gz", swapped)
    assert load(f"amazon-2018:{path}").words["user"].words.to_pylist() == ["A2SUAM1J3GNN3B", "AKM1MP6P0OYPR"]
    with pytest.raises(ValueError, match="other way round"):
        load(f"amazon-2014:{path}")


OTHER_UNITS = {
    "movielens-20m": ("userId,movieId,rating,timestamp\n1,2,3.5,1112486027000\n", "ms", "s"),
    "taobao": ("1,2,3,pv,1511544070000\n", "ms", "s"),
    "retailrocket": (
        "timestamp,visitorid,event,itemid,transactionid\n1433221332,257597,view,355908,\n",
        "s",
        "ms",
    ),
    "amazon-2023": ("user_id,parent_asin,rating,timestamp\nAFK,B00,5.0,1588687728\n", "s", "ms"),
}


@pytest.mark.parametrize("word", OTHER_UNITS)
def test_times_in_another_unit_than_a_log_has_are_refused_until_it_is_named(tmp_path, word):
    text, unit, own = OTHER_UNITS[word]
    source = f"{word}:{tmp_path / 'log.csv'}"
    (tmp_path / "log.csv").write_text(text)
    with pytest.raises(ValueError, match=f"are in {unit}, and files of this log have {own}: name time_unit"):
        load(source)
    assert load(f"{source}?time_unit={unit}").time_unit == unit
    (tmp_path / "log.csv").write_text(re.sub(r"\b1[0-9]{9,}", "17", text))  # of no unit: as the log says
    assert load(source).time_unit == own


@pytest.mark.parametrize(
    "word, names",
    [
        ("amazon-2018-reviews", ["All_Beauty.json.gz", "All_Beauty_5.json"]),
        ("amazon-2014-reviews", ["reviews_Beauty.json", "reviews_Beauty_5.json.gz"]),
        ("amazon-2018-reviews", ["All_Beauty.json.gz", "All_Beauty.json"]),
        ("movielens-25m", ["ratings.csv", "ratings.csv.gz"]),
    ],
)
def test_files_that_hold_the_same_events_are_not_read_twice(tmp_path, word, names):
    text = "userId,movieId,rating,timestamp\n" + MOVIES if word == "movielens-25m" else REVIEWS
    folder, _ = (written(tmp_path, name, text).parent for name in names)
    with pytest.raises(ValueError, match="hold the same events: name one of them"):
        load(f"{word}:{folder}")
    assert len(load(f"{word}:{folder}/{names[1]}")) == 2


REVIEW_2018 = (
    '{"overall": 5.0, "vote": "1,234", "verified": true, "reviewTime": "09 1, 2016", "reviewerID": "A3CIUOJXQ5VDQ2", '
    '"asin": "B0000530HU", "style": {"Size:": " 7.0 oz"}, "image": ["https://a"], "unixReviewTime": 1472688000}\n'
    '{"overall": 2.0, "verified": false, "reviewerID": "A3H7T87S984REU", "asin": "0000013714", '
    '"unixReviewTime": 1472688001}\n'
)
META = (
    '{"category": ["All Beauty"], "also_buy": ["B00"], "price": "$12.99", "asin": "B0000530HU", "title": "x", '
    '"categories": [["All"]], "rank": "1,234 in Beauty"}\n'
)


def test_fields_of_amazon_that_are_no_numbers_are_errors(tmp_path):
    path = written(tmp_path, "All_Beauty.json", REVIEW_2018)
    log = load(f"amazon-2018-reviews:{path}")
    assert log.rating.tolist() == [5.0, 2.0] and log.words["item"].words.to_pylist()[1] == "0000013714"
    assert load(f"amazon-2018-reviews:{path}?label=verified").feedback["verified"].tolist() == [1, 0]
    with pytest.raises(ValueError, match="line 1: column vote has '1,234', expected a finite number"):
        load(f"amazon-2018-reviews:{path}?rating=vote")
    meta = written(tmp_path / "meta", "meta_All_Beauty.json", META)
    with pytest.raises(ValueError, match=r"meta_All_Beauty\.json: no column 'reviewerID'; found category"):
        load(f"amazon-2018-reviews:{meta}")
    for settings, message in {
        "dense=price&categories=asin": "line 1: column price has '\\$12.99', expected a finite number",
        "dense=rank&categories=asin": "column rank has '1,234 in Beauty', expected a finite number",
        "categories=also_buy": "column 'also_buy' is of type .*list.*, expected words",
    }.items():
        with pytest.raises(ValueError, match=message):
            load(f"json:{meta}?label=title&label_threshold=1&{settings}&ids=words")
