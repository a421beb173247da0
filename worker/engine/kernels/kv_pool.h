// The paged pools of keys and values, and the step that works on them. The structs are mirrored in bindings.py.
//
//   keys    [block][kv head][key size][block size]    a vector holds one value of several neighbouring keys, so that
//                                                     scores need no sum across lanes
//   values  [block][kv head][block size][value size]
#pragma once

#include "simd.h"

namespace horde {

extern "C" {

struct HordeStep {
    const int32_t* query_starts;     // [sequences + 1]
    const int32_t* context_lengths;  // [sequences]
    const int32_t* block_tables;     // [sequences, table_stride]
    const int64_t* slots;            // [tokens]
    int64_t sequences;
    int64_t tokens;
    int64_t table_stride;
};

struct HordePool {
    void* keys;
    void* values;
    int64_t blocks;
    int64_t block_size;
    int64_t query_heads;
    int64_t kv_heads;
    int64_t key_size;
    int64_t value_size;
    int64_t is_bf16;
};

// Rows are [tokens, heads, size] of floats, or of bf16; strides count values. `key` is null where the step's keys and
// values are stored already; `window` and `softcap` are 0 for none, `sinks` [query heads] is null for none.
struct HordeCall {
    const HordeStep* step;
    const HordePool* pool;
    const void* query;
    int64_t query_token_stride;
    int64_t query_head_stride;
    const void* key;
    int64_t key_token_stride;
    int64_t key_head_stride;
    const void* value;
    int64_t value_token_stride;
    int64_t value_head_stride;
    void* out;  // [tokens, query heads, value size], dense
    const float* sinks;
    int64_t window;
    int64_t is_bf16;
    float scale;
    float softcap;
};

}  // extern "C"

// [tokens, heads, size] with any strides, counted in values, between tokens and between heads.
template <typename T>
struct Rows {
    T* data;
    int64_t token_stride;
    int64_t head_stride;

    T* at(int64_t token, int64_t head) const { return data + token * token_stride + head * head_stride; }
};

// First value of the key at `place` of a block; its next value is `block_size` further.
template <typename P>
HORDE_INLINE P* key_at(const HordePool& pool, int64_t block, int64_t head, int64_t place) {
    return static_cast<P*>(pool.keys) + (block * pool.kv_heads + head) * pool.key_size * pool.block_size + place;
}

template <typename P>
HORDE_INLINE P* value_at(const HordePool& pool, int64_t block, int64_t head, int64_t place) {
    return static_cast<P*>(pool.values) + ((block * pool.kv_heads + head) * pool.block_size + place) * pool.value_size;
}

template <typename T, typename P>
HORDE_INLINE void store_key(const HordePool& pool, int64_t slot, int64_t head, const T* key) {
    P* to = key_at<P>(pool, slot / pool.block_size, head, slot % pool.block_size);
    for (int64_t d = 0; d < pool.key_size; ++d) to[d * pool.block_size] = from_float<P>(to_float(key[d]));
}

template <typename T, typename P>
HORDE_INLINE void store_value(const HordePool& pool, int64_t slot, int64_t head, const T* value) {
    P* to = value_at<P>(pool, slot / pool.block_size, head, slot % pool.block_size);
    int64_t d = 0;
    for (; d + kLanes <= pool.value_size; d += kLanes) store(to + d, load(value + d));
    for (; d < pool.value_size; ++d) to[d] = from_float<P>(to_float(value[d]));
}

}  // namespace horde
