// Hash maps of C++ behind the calls of the key index, for cpp_maps.py; with -DBOOST or -DANKERL.
// Each map hashes as it does by default. A map of key to row number; rows are numbered in order of insertion.
#include <cstdint>
#ifdef BOOST
#include <boost/unordered/unordered_flat_map.hpp>
using Map = boost::unordered_flat_map<int64_t, int64_t>;
#else
#include <ankerl/unordered_dense.h>
using Map = ankerl::unordered_dense::map<int64_t, int64_t>;
#endif

extern "C" {
Map *make() { return new Map; }

void release(Map *map) { delete map; }

void insert(Map *map, const int64_t *keys, int64_t count, int64_t *rows) {
    for (int64_t i = 0; i < count; i++) rows[i] = map->try_emplace(keys[i], int64_t(map->size())).first->second;
}

void find(const Map *map, const int64_t *keys, int64_t count, int64_t *rows) {
    for (int64_t i = 0; i < count; i++) {
        auto found = map->find(keys[i]);
        rows[i] = found == map->end() ? -1 : found->second;
    }
}

// Distinct keys in order of first occurrence, their number, each key's place among them and their counts.
int64_t unique(const int64_t *keys, int64_t count, int64_t *distinct, int64_t *inverse, int64_t *counts) {
    Map map;
    for (int64_t i = 0; i < count; i++) {
        auto [place, is_new] = map.try_emplace(keys[i], int64_t(map.size()));
        int64_t at = place->second;
        if (is_new) distinct[at] = keys[i], counts[at] = 0;
        inverse[i] = at;
        counts[at]++;
    }
    return int64_t(map.size());
}
}
