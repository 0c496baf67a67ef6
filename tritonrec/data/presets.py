"""Well-known logs, as they are published: the word of a source, the files, and their format.

A path is the file itself, or a folder with it. A preset stands for settings that a user could write behind
the path, and what is written there wins over it::

    movielens-1m:~/ml-1m
    lastfm-1k:~/lastfm/userid-timestamp-artid-artname-traid-traname.tsv?item=track
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from tritonrec.data.log_files import PACKED
from tritonrec.data.log_format import LogFormat


@dataclass(frozen=True)
class Preset:
    """A published log.

    Args:
        about: what it is.
        files: patterns of the names of its files between spaces, the first of which there are any.
        query: settings of its format, as `LogFormat.parse` takes them. kind: of its files.
        features: the module that reads features of users and items beside the log.
        selected: what a file's name has more where the file holds some of another one's events, a regex.
        item_length: of every item's id, where users' ids have others; 0: any.
    """

    about: str
    files: str
    query: str
    kind: str = "csv"
    features: Literal["", "kuairand"] = ""
    selected: str = ""
    item_length: int = 0

    @cached_property
    def format(self) -> LogFormat:
        """The settings."""
        return LogFormat.parse(self.query)

    def check_files(self, files: Sequence[str]) -> None:
        """Raise ValueError where two of a folder's files hold the same events."""
        known: dict[str, str] = {}
        for file in files:
            folder, _, name = file.rpartition("/")
            for end in PACKED:
                name = name.removesuffix(end)
            name = f"{folder}/{re.sub(self.selected, '', name)}"
            if name in known:
                raise ValueError(f"{known[name]} and {file} hold the same events: name one of them")
            known[name] = file


ASIN = 10
"""Characters of an item's id at Amazon; a user's has more."""
CORE = r"_5(?=\.)"
"""In the names of Amazon's reviews of users and items that have five."""
CRITEO_COUNTS = tuple(f"I{number}" for number in range(1, 14))
CRITEO_CATEGORIES = tuple(f"C{number}" for number in range(1, 27))
CRITEO = LogFormat(
    label=("label",), dense=CRITEO_COUNTS, categories=CRITEO_CATEGORIES, hexadecimal=CRITEO_CATEGORIES,
    log_counts=True,
)  # fmt: skip
_AVAZU = (
    "C1,banner_pos,site_id,site_domain,site_category,app_id,app_domain,app_category,device_id,device_ip,"
    "device_model,device_type,device_conn_type,C14,C15,C16,C17,C18,C19,C20,C21"
)
AVAZU_CATEGORIES = tuple(_AVAZU.split(","))
_WORDS = "ids=words&label=none"
_IN_ORDER = "header=no&time_unit=s"
_RATINGS = f"columns=user,item,rating,timestamp&{_IN_ORDER}"
_MOVIES = "user=userId&item=movieId&rating=rating&timestamp=timestamp&time_unit=s"
_REVIEWS = f"user=reviewerID&item=asin&rating=overall&timestamp=unixReviewTime&time_unit=s&{_WORDS}"
_AMAZON = f"user=user_id&item=parent_asin&rating=rating&timestamp=timestamp&time_unit=ms&{_WORDS}"
_KUAIREC = "user=user_id&item=video_id&timestamp=timestamp&time_unit=s&rating=watch_ratio&drop_missing=true"
_YOOCHOOSE = "user=session&item=item&timestamp=timestamp&time_unit=ms&header=no&delimiter=comma"

PRESETS: dict[str, Preset] = {
    "movielens-100k": Preset("MovieLens-100K", "u.data", f"{_RATINGS}&delimiter=tab"),
    "movielens-1m": Preset("MovieLens-1M", "ratings.dat", f"{_RATINGS}&delimiter=::"),
    "movielens-10m": Preset("MovieLens-10M", "ratings.dat", f"{_RATINGS}&delimiter=::"),
    "movielens-20m": Preset("MovieLens-20M", "ratings.csv", _MOVIES),
    "movielens-25m": Preset("MovieLens-25M, -latest", "ratings.csv", _MOVIES),
    "movielens-32m": Preset("MovieLens-32M", "ratings.csv", _MOVIES),
    "amazon-2014": Preset(
        "Amazon 2014, ratings only", "ratings_*.csv", f"{_RATINGS}&delimiter=comma&ids=words",
        item_length=ASIN,
    ),
    "amazon-2014-reviews": Preset(
        "Amazon 2014, reviews", "reviews_*.json *.json", _REVIEWS, "json", selected=CORE
    ),
    "amazon-2018": Preset(
        "Amazon 2018, ratings only", "all_csv_files.csv *.csv",
        f"columns=item,user,rating,timestamp&{_IN_ORDER}&delimiter=comma&ids=words", item_length=ASIN,
    ),
    "amazon-2018-reviews": Preset(
        "Amazon 2018, reviews", "All_Amazon_Review.json *.json", _REVIEWS, "json", selected=CORE
    ),
    "amazon-2023": Preset("Amazon 2023, ratings only", "*.csv", _AMAZON),
    "amazon-2023-reviews": Preset("Amazon 2023, reviews", "*.jsonl", _AMAZON, "json"),
    "yelp": Preset(
        "Yelp Open Dataset, reviews", "yelp_academic_dataset_review.json review.json",
        "user=user_id&item=business_id&rating=stars&timestamp=date&time_unit=s&ids=words", "json",
    ),
    "goodreads": Preset(
        "Goodreads (UCSD), interactions in full", "goodreads_interactions*.json",
        "user=user_id&item=book_id&rating=rating&timestamp=date_updated&time_unit=s&ids=words"
        "&time_format=%a %b %d %H:%M:%S %z %Y", "json",
    ),
    "goodreads-csv": Preset(
        "Goodreads (UCSD), interactions as numbers, without times", "goodreads_interactions.csv",
        "user=user_id&item=book_id&rating=rating&timestamp=none",
    ),
    "steam": Preset(
        "Steam reviews (UCSD), version 2", "steam_reviews.json steam_new.json",
        "user=username&item=product_id&timestamp=date&time_unit=s&time_format=%Y-%m-%d&ids=words"
        "&rating=none&label=none", "json",
    ),
    "retailrocket": Preset(
        "RetailRocket, events", "events.csv",
        "user=visitorid&item=itemid&timestamp=timestamp&time_unit=ms&rating=none",
    ),
    "lastfm-1k": Preset(
        "Last.fm 1K, listening events; the item is the artist by name, track= the song",
        "userid-timestamp-artid-artname-traid-traname.tsv",
        f"columns=user,timestamp,artist_id,artist,track_id,track&{_IN_ORDER}&user=user&item=artist"
        "&timestamp=timestamp&delimiter=tab&ids=words",
    ),
    "lastfm-360k": Preset(
        "Last.fm 360K, plays by artist's name, without times", "usersha1-artmbid-artname-plays.tsv",
        "columns=user,artist_id,artist,plays&header=no&user=user&item=artist&rating=plays&timestamp=none"
        "&delimiter=tab&ids=words",
    ),
    "lastfm-hetrec": Preset(
        "Last.fm, HetRec 2011, listening counts, without times", "user_artists.dat",
        "user=userID&item=artistID&rating=weight&timestamp=none&delimiter=tab",
    ),
    "yoochoose": Preset(
        "Yoochoose (RecSys 2015), clicks; a session is a user", "yoochoose-clicks.dat",
        f"columns=session,timestamp,item,category&{_YOOCHOOSE}",
    ),
    "yoochoose-buys": Preset(
        "Yoochoose (RecSys 2015), purchases", "yoochoose-buys.dat",
        f"columns=session,timestamp,item,price,quantity&{_YOOCHOOSE}",
    ),
    "diginetica": Preset(
        "Diginetica (CIKM Cup 2016), views; a session is a user", "train-item-views.csv",
        "user=sessionId&item=itemId&timestamp=eventdate&time_unit=s&order=timeframe&delimiter=semicolon",
    ),
    "kuairec": Preset("KuaiRec, the big matrix; watch ratios as ratings", "big_matrix.csv", _KUAIREC),
    "kuairec-small": Preset("KuaiRec, the small matrix", "small_matrix.csv", _KUAIREC),
    "kuairand": Preset(
        "KuaiRand (Pure, 1K, 27K), standard exposure, with features of users and tags of videos",
        "log_standard_*.csv",
        "user=user_id&item=video_id&timestamp=time_ms&time_unit=ms&rating=none"
        "&label=is_click,long_view|is_like",
        features="kuairand",
    ),
    "taobao": Preset(
        "Taobao, UserBehavior", "UserBehavior.csv",
        f"columns=user,item,category,behavior,timestamp&{_IN_ORDER}&delimiter=comma",
    ),
    "tenrec": Preset(
        "Tenrec, videos, in the order of rows, which is a user's order of time",
        "QB-video.csv QK-video.csv sbr_data_1M.csv ctr_data_1M.csv",
        "user=user_id&item=item_id&timestamp=none&rating=none&label=click,follow,like,share",
    ),
    "mind": Preset(
        "MIND, impressions, each shown article an event with a click or none", "behaviors.tsv",
        f"columns=impression,user,timestamp,history,impressions&{_IN_ORDER}&user=user&timestamp=timestamp"
        "&time_format=%m/%d/%Y %I:%M:%S %p&shown=impressions&delimiter=tab&ids=words",
    ),
    "gowalla": Preset(
        "Gowalla, check-ins (SNAP)", "loc-gowalla_totalCheckins.txt Gowalla_totalCheckins.txt",
        f"columns=user,timestamp,latitude,longitude,item&{_IN_ORDER}&delimiter=tab",
    ),
    "criteo-tsv": Preset(
        "Criteo (Kaggle, Terabyte), text", "train.txt day_* *",
        f"{CRITEO.query()}&columns={','.join(('label', *CRITEO_COUNTS, *CRITEO_CATEGORIES))}&header=no"
        "&delimiter=tab",
    ),
    "criteo-parquet": Preset("Criteo's columns as Parquet", "", CRITEO.query(), "parquet"),
    "avazu-csv": Preset(
        "Avazu (Kaggle)", "train.csv train *.csv",
        f"label=click&categories={_AVAZU}&hexadecimal={','.join(AVAZU_CATEGORIES[2:11])}"
        "&delimiter=comma",
    ),
}  # fmt: skip
"""By the word of a source. Ali-CCP, two kinds of files that belong together, is `tritonrec.data.ali_ccp`."""
