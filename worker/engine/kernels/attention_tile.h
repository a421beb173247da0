// Attention of a few query rows over one tile of keys: scores, softmax so far, weighted values, in registers and L1.
//
// A row is one query head of one token. Each row's sums run over the keys one after the other, whatever the number of
// rows beside it and whoever packed the tile, so a row's result does not depend on its company, to the last bit.
#pragma once

#include <utility>

#include "simd.h"

namespace horde {
namespace {  // nothing here is shared with another build of this code in the same process

#if defined(HORDE_AVX512) || defined(__aarch64__)
constexpr int kRows = 6;  // times kColumns: the sums that fit 32 registers beside their operands
#else
constexpr int kRows = 3;
#endif
constexpr int kColumns = 4;
constexpr int kTile = 64;  // keys
constexpr int kGroups = kTile / kLanes;

// Where `kLanes` neighbouring keys of a tile and their values lie, for each such group.
template <typename P>
struct Tile {
    const P* keys[kGroups];  // value d of the group's keys: keys[g] + d * key_stride
    int64_t key_stride;
    const P* values[kGroups];  // value of key j of the group: values[g] + j * value_stride
    int64_t value_stride;
    const P* next_keys[kGroups];  // the same of the tile that comes after it, fetched into the cache meanwhile
    const P* next_values[kGroups];
};

// What the softmax of some rows has come to: the largest score, the sum of exponentials by lanes, the weighted values.
struct Softmax {
    float* largest;  // [rows]
    float* sums;     // [rows, kLanes]
    float* values;   // [rows, width]
    int64_t width;   // of the values, a multiple of kLanes
};

struct Scoring {
    float softcap;  // 0: none
    int64_t window;  // 0: none
};

// The loops below test at their end, as there is always a first turn: the sums then stay in registers throughout.

// scores[r, c * kLanes ...] = sum over d of queries[r, d] * keys[c][d ...]
template <int R, int C, typename P>
void score_block(const float* queries, int64_t size, const P* const* keys, const P* const* next, int64_t key_stride,
                 float* scores) {
    Vec sums[R][C];
    const P *at[C], *ahead[C];
    for (int c = 0; c < C; ++c) {
        at[c] = keys[c];
        ahead[c] = next[c];
        for (int r = 0; r < R; ++r) sums[r][c] = Vec{};
    }
    int64_t d = 0;
    do {
        Vec key[C];
        for (int c = 0; c < C; ++c) {
            key[c] = load(at[c] + d * key_stride);
            __builtin_prefetch(ahead[c] + d * key_stride, 0, 2);
            keep(key[c]);
        }
        for (int r = 0; r < R; ++r) {
            const Vec query = broadcast(queries[r * size + d]);
            for (int c = 0; c < C; ++c) sums[r][c] += query * key[c];
        }
    } while (++d < size);
    for (int r = 0; r < R; ++r)
        for (int c = 0; c < C; ++c) store(scores + r * kTile + c * kLanes, sums[r][c]);
}

// out[r, c * kLanes ...] = out * fade[r] + sum over the keys j, first <= j < last, of weights[r, j] * values[j, ...]
template <int R, int C, typename P>
void value_block(const float* weights, const Tile<P>& tile, int64_t column, int first, int last, const float* fade,
                 float* out, int64_t width) {
    Vec sums[R][C];
    for (int r = 0; r < R; ++r)
        for (int c = 0; c < C; ++c) sums[r][c] = load(out + r * width + c * kLanes) * broadcast(fade[r]);
    int j = first;
    do {
        const int group = static_cast<int>(static_cast<unsigned>(j) / kLanes), after = (group + 1) * kLanes;
        const int end = after < last ? after : last;
        const int64_t offset = (j - group * kLanes) * tile.value_stride + column;
        const P *from = tile.values[group] + offset, *ahead = tile.next_values[group] + offset;
        do {
            Vec value[C];
            for (int c = 0; c < C; ++c) {
                value[c] = load(from + c * kLanes);
                __builtin_prefetch(ahead + c * kLanes, 0, 2);
                keep(value[c]);
            }
            for (int r = 0; r < R; ++r) {
                const Vec weight = broadcast(weights[r * kTile + j]);
                for (int c = 0; c < C; ++c) sums[r][c] += weight * value[c];
            }
            from += tile.value_stride;
            ahead += tile.value_stride;
        } while (++j < end);
    } while (j < last);
    for (int r = 0; r < R; ++r)
        for (int c = 0; c < C; ++c) store(out + r * width + c * kLanes, sums[r][c]);
}

template <typename P>
using ScoreBlock = void (*)(const float*, int64_t, const P* const*, const P* const*, int64_t, float*);
template <typename P>
using ValueBlock = void (*)(const float*, const Tile<P>&, int64_t, int, int, const float*, float*, int64_t);

// The block for `rows` and `columns` is at (rows - 1) * kColumns + columns - 1.
template <typename P, int... I>
ScoreBlock<P> pick_score_block(int index, std::integer_sequence<int, I...>) {
    static constexpr ScoreBlock<P> blocks[] = {score_block<I / kColumns + 1, I % kColumns + 1, P>...};
    return blocks[index];
}

template <typename P, int... I>
ValueBlock<P> pick_value_block(int index, std::integer_sequence<int, I...>) {
    static constexpr ValueBlock<P> blocks[] = {value_block<I / kColumns + 1, I % kColumns + 1, P>...};
    return blocks[index];
}

using Shapes = std::make_integer_sequence<int, kRows * kColumns>;

// Turns the scores of one row, those of the groups `from` to `to`, into weights; keys outside [first, last) weigh 0.
// Gives back what the row's earlier sums have to be multiplied with.
HORDE_INLINE float soften(float* scores, int from, int to, int first, int last, float softcap, float* largest,
                          float* sums) {
    const Vec nothing = broadcast(-kInfinity);
    Vec score[kGroups], best = nothing;
    for (int g = from; g < to; ++g) {
        Vec s = load(scores + g * kLanes);
        if (softcap != 0) s = broadcast(softcap) * tanh(s / broadcast(softcap));
        if (first > g * kLanes || last < (g + 1) * kLanes) {
            const IntVec key = lane_numbers() + g * kLanes;
            s = (key >= first) & (key < last) ? s : nothing;
        }
        score[g] = s;
        best = larger(best, s);
    }
    const float before = *largest, found = largest_lane(best);
    const float now = found > before ? found : before;
    // No key seen so far: every weight is exp(-infinity), not a difference of infinities.
    const float base = now == -kInfinity ? 0.0f : now;
    const float fade = before == now ? 1.0f : exp(before - base);  // seldom changes: mostly no exponential
    Vec sum = load(sums) * broadcast(fade);
    for (int g = from; g < to; ++g) {
        const Vec weight = exp(score[g] - broadcast(base));
        store(scores + g * kLanes, weight);
        sum += weight;
    }
    store(sums, sum);
    *largest = now;
    return fade;
}

// `rows` <= kRows rows over the keys [begin, end) of the tile that starts at key `start`. `positions`, of the rows'
// tokens, do not decrease.
template <typename P>
void attend_tile(const Tile<P>& tile, int64_t start, int64_t begin, int64_t end, const float* queries, int64_t key_size,
                 const int64_t* positions, int rows, const Scoring& scoring, const Softmax& state) {
    const int64_t last_seen = positions[rows - 1] + 1;
    const int64_t first_seen = scoring.window > 0 ? positions[0] + 1 - scoring.window : 0;
    const int first = static_cast<int>((first_seen > begin ? first_seen : begin) - start);
    const int last = static_cast<int>((last_seen < end ? last_seen : end) - start);
    if (first >= last) return;

    float scores[kRows * kTile], fades[kRows];
    const int from = first / kLanes, to = (last + kLanes - 1) / kLanes;
    for (int g = from; g < to; g += kColumns) {
        const int columns = to - g < kColumns ? to - g : kColumns;
        pick_score_block<P>((rows - 1) * kColumns + columns - 1, Shapes{})(
            queries, key_size, tile.keys + g, tile.next_keys + g, tile.key_stride, scores + g * kLanes);
    }
    for (int r = 0; r < rows; ++r) {
        const int64_t seen_from = scoring.window > 0 ? positions[r] + 1 - scoring.window - start : first;
        const int64_t seen_to = positions[r] + 1 - start;
        fades[r] = soften(scores + r * kTile, from, to, seen_from > first ? static_cast<int>(seen_from) : first,
                          seen_to < last ? static_cast<int>(seen_to) : last, scoring.softcap, state.largest + r,
                          state.sums + r * kLanes);
    }
    const int vectors = static_cast<int>(state.width / kLanes);
    for (int c = 0; c < vectors; c += kColumns) {
        const int columns = vectors - c < kColumns ? vectors - c : kColumns;
        pick_value_block<P>((rows - 1) * kColumns + columns - 1, Shapes{})(
            scores, tile, c * kLanes, first, last, fades, state.values + c * kLanes, state.width);
    }
}

}  // namespace
}  // namespace horde
