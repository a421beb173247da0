// What lies between a layer's matrix products: norms, rotary embedding, gates. Sums in fp32; rows are independent.

#include <omp.h>

#include <cmath>

#include "kv_pool.h"

namespace horde {
namespace {

constexpr int64_t kSerialValues = 1 << 14;  // below this, waking the threads costs more than they save

// Visits [0, size) vector by vector: whole(i) for full ones, then part(i, count) for what is left.
template <typename Whole, typename Part>
HORDE_INLINE void by_vector(int64_t size, const Whole& whole, const Part& part) {
    int64_t i = 0;
    for (; i + kLanes <= size; i += kLanes) whole(i);
    if (i < size) part(i, size - i);
}

template <typename T>
float sum_of_squares(const T* x, int64_t size) {
    Vec sums[4] = {};
    int64_t i = 0;
    for (; i + 4 * kLanes <= size; i += 4 * kLanes)
        for (int s = 0; s < 4; ++s) {
            const Vec v = load(x + i + s * kLanes);
            sums[s] += v * v;
        }
    by_vector(
        size - i, [&](int64_t j) { sums[0] += load(x + i + j) * load(x + i + j); },
        [&](int64_t j, int64_t count) {
            const Vec v = load_part(x + i + j, count);
            sums[1] += v * v;
        });
    return sum_of_lanes((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

// The value as a row of type T would keep it.
template <typename T>
HORDE_INLINE Vec rounded(Vec v) {
    T lanes[kLanes];
    store(lanes, v);
    return load(lanes);
}

template <typename T>
void norm_row(const T* x, const T* weight, T* out, int64_t size, float epsilon, float offset) {
    const float mean = sum_of_squares(x, size) / static_cast<float>(size);
    const Vec scale = broadcast(1.0f / std::sqrt(mean + epsilon));
    // With an offset (1 + w) the product is rounded once; without, the normed value is rounded before it is weighted.
    const auto weighted = [&](Vec v, Vec w) {
        return offset != 0 ? v * scale * (w + broadcast(offset)) : rounded<T>(v * scale) * w;
    };
    by_vector(
        size, [&](int64_t i) { store(out + i, weighted(load(x + i), load(weight + i))); },
        [&](int64_t i, int64_t n) { store_part(out + i, weighted(load_part(x + i, n), load_part(weight + i, n)), n); });
}

template <typename T>
void rms_norm(const T* x, T* residual, const T* weight, T* out, int64_t rows, int64_t size, float epsilon,
              float offset) {
#pragma omp parallel for schedule(static) if (rows * size > kSerialValues)
    for (int64_t r = 0; r < rows; ++r) {
        const T* from = x + r * size;
        if (residual != nullptr) {
            T* to = residual + r * size;
            by_vector(
                size, [&](int64_t i) { store(to + i, load(to + i) + load(from + i)); },
                [&](int64_t i, int64_t n) { store_part(to + i, load_part(to + i, n) + load_part(from + i, n), n); });
            from = to;
        }
        norm_row(from, weight, out + r * size, size, epsilon, offset);
    }
}

HORDE_INLINE Vec silu(Vec x) { return x / (broadcast(1.0f) + exp(-x)); }

// x / 2 * (1 + tanh(t)) = x / (1 + exp(-2 t)), which loses nothing where tanh is near -1.
HORDE_INLINE Vec gelu_tanh(Vec x) {
    const Vec twice = broadcast(2 * 0.79788456f) * (x + broadcast(0.044715f) * x * x * x);  // sqrt(2 / pi)
    return x / (broadcast(1.0f) + exp(-twice));
}

template <typename T, typename Gate>
void gate_mul(const T* gate_up, T* out, int64_t rows, int64_t size, const Gate& gate) {
#pragma omp parallel for schedule(static) if (rows * size > kSerialValues)
    for (int64_t r = 0; r < rows; ++r) {
        const T *g = gate_up + r * 2 * size, *up = g + size;
        T* to = out + r * size;
        by_vector(
            size, [&](int64_t i) { store(to + i, rounded<T>(gate(load(g + i))) * load(up + i)); },
            [&](int64_t i, int64_t n) {
                store_part(to + i, rounded<T>(gate(load_part(g + i, n))) * load_part(up + i, n), n);
            });
    }
}

// Turns value i and value i + half of a head by the angle of their column, in place.
template <typename T>
HORDE_INLINE void rotate(T* head, const float* cosines, const float* sines, int64_t half) {
    const auto turn = [&](Vec a, Vec b, Vec cos_a, Vec sin_a, Vec cos_b, Vec sin_b, Vec& to_a, Vec& to_b) {
        to_a = a * cos_a - b * sin_a;
        to_b = b * cos_b + a * sin_b;
    };
    Vec a, b;
    by_vector(
        half,
        [&](int64_t i) {
            turn(load(head + i), load(head + half + i), load(cosines + i), load(sines + i), load(cosines + half + i),
                 load(sines + half + i), a, b);
            store(head + i, a);
            store(head + half + i, b);
        },
        [&](int64_t i, int64_t n) {
            turn(load_part(head + i, n), load_part(head + half + i, n), load_part(cosines + i, n),
                 load_part(sines + i, n), load_part(cosines + half + i, n), load_part(sines + half + i, n), a, b);
            store_part(head + i, a, n);
            store_part(head + half + i, b, n);
        });
}

template <typename P, typename T>
void rope_store(const HordeStep& step, const HordePool& pool, T* qkv, const float* cosines, const float* sines,
                int64_t rotary) {
    const int64_t key_values = pool.kv_heads * pool.key_size, query_values = pool.query_heads * pool.key_size;
    const int64_t width = query_values + key_values + pool.kv_heads * pool.value_size;
#pragma omp parallel for schedule(static) if (step.tokens * width > kSerialValues)
    for (int64_t t = 0; t < step.tokens; ++t) {
        T *query = qkv + t * width, *key = query + query_values, *value = key + key_values;
        const float *cosine = cosines + t * rotary, *sine = sines + t * rotary;
        for (int64_t h = 0; h < pool.query_heads; ++h) rotate(query + h * pool.key_size, cosine, sine, rotary / 2);
        for (int64_t h = 0; h < pool.kv_heads; ++h) {
            rotate(key + h * pool.key_size, cosine, sine, rotary / 2);
            store_key<T, P>(pool, step.slots[t], h, key + h * pool.key_size);
            store_value<T, P>(pool, step.slots[t], h, value + h * pool.value_size);
        }
    }
}

template <typename T>
T* cast(const void* p) {
    return static_cast<T*>(const_cast<void*>(p));
}

}  // namespace
}  // namespace horde

using namespace horde;

extern "C" {

// out = x / sqrt(mean(x^2) + epsilon) * (weight + offset); with a residual: residual += x, then the norm of residual.
void horde_rms_norm(const void* x, void* residual, const void* weight, void* out, int64_t rows, int64_t size,
                    float epsilon, float offset, int is_bf16) {
    if (is_bf16)
        rms_norm(cast<bf16>(x), cast<bf16>(residual), cast<bf16>(weight), cast<bf16>(out), rows, size, epsilon, offset);
    else
        rms_norm(cast<float>(x), cast<float>(residual), cast<float>(weight), cast<float>(out), rows, size, epsilon,
                 offset);
}

// out = silu(gate) * up, for gate_up = [rows, gate then up].
void horde_silu_mul(const void* gate_up, void* out, int64_t rows, int64_t size, int is_bf16) {
    const auto gate = [](Vec x) { return silu(x); };
    if (is_bf16)
        gate_mul(cast<bf16>(gate_up), cast<bf16>(out), rows, size, gate);
    else
        gate_mul(cast<float>(gate_up), cast<float>(out), rows, size, gate);
}

// The same with the tanh approximation of gelu.
void horde_gelu_tanh_mul(const void* gate_up, void* out, int64_t rows, int64_t size, int is_bf16) {
    const auto gate = [](Vec x) { return gelu_tanh(x); };
    if (is_bf16)
        gate_mul(cast<bf16>(gate_up), cast<bf16>(out), rows, size, gate);
    else
        gate_mul(cast<float>(gate_up), cast<float>(out), rows, size, gate);
}

// qkv [tokens, query heads, then kv heads of keys, then of values]: the first `rotary` values of each query and key are
// turned in place (value i with value i + rotary / 2; cosines and sines are [tokens, rotary]), keys and values stored.
void horde_rope_store(const HordeStep* step, const HordePool* pool, void* qkv, const float* cosines, const float* sines,
                      int64_t rotary, int is_bf16) {
    const auto with = [&](auto* rows) {
        if (pool->is_bf16)
            rope_store<bf16>(*step, *pool, rows, cosines, sines, rotary);
        else
            rope_store<float>(*step, *pool, rows, cosines, sines, rotary);
    };
    if (is_bf16)
        with(static_cast<bf16*>(qkv));
    else
        with(static_cast<float*>(qkv));
}

// The exponential that the others use.
void horde_exp(const float* x, float* out, int64_t size) {
    by_vector(
        size, [&](int64_t i) { store(out + i, exp(load(x + i))); },
        [&](int64_t i, int64_t n) { store_part(out + i, exp(load_part(x + i, n)), n); });
}

}  // extern "C"
