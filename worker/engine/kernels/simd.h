// Vectors of floats as wide as the CPU's registers, by the vector extensions of GCC and Clang.
// Intrinsics appear only where the extensions give poor code; every one has a portable twin beside it.
#pragma once

#include <cstdint>
#include <cstring>
#include <limits>

#if defined(__AVX512F__) && defined(__AVX512BW__)
#define HORDE_AVX512 1
#include <immintrin.h>
#endif

namespace horde {

#if defined(HORDE_AVX512)
constexpr int kLanes = 16;
#elif defined(__AVX__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

typedef float Vec __attribute__((vector_size(4 * kLanes)));
typedef int32_t IntVec __attribute__((vector_size(4 * kLanes)));
typedef uint32_t BitVec __attribute__((vector_size(4 * kLanes)));
typedef uint16_t HalfVec __attribute__((vector_size(2 * kLanes)));

struct bf16 {
    uint16_t bits;
};

constexpr float kInfinity = std::numeric_limits<float>::infinity();

#define HORDE_INLINE inline __attribute__((always_inline))

// Keeps a vector in its register: compilers like to load it anew for each use, and loads are what a loop is short of.
HORDE_INLINE void keep(Vec& v) {
#if defined(__x86_64__)
    asm("" : "+v"(v));
#elif defined(__aarch64__)
    asm("" : "+w"(v));
#else
    (void)v;
#endif
}

template <typename To, typename From>
HORDE_INLINE To bit_cast(From from) {
    static_assert(sizeof(To) == sizeof(From), "same size");
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}

HORDE_INLINE Vec broadcast(float x) {
#if defined(HORDE_AVX512)
    return _mm512_set1_ps(x);
#elif defined(__AVX__)
    return Vec{x, x, x, x, x, x, x, x};
#else
    return Vec{x, x, x, x};
#endif
}

HORDE_INLINE IntVec broadcast_int(int32_t x) { return IntVec{} + x; }

HORDE_INLINE IntVec lane_numbers() {
#if defined(HORDE_AVX512)
    return IntVec{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
#elif defined(__AVX__)
    return IntVec{0, 1, 2, 3, 4, 5, 6, 7};
#else
    return IntVec{0, 1, 2, 3};
#endif
}

HORDE_INLINE Vec load(const float* from) {
    Vec v;
    std::memcpy(&v, from, sizeof v);
    return v;
}

HORDE_INLINE Vec load(const bf16* from) {
#if defined(HORDE_AVX512)
    // Puts each half into the upper part of its lane: one instruction where widening and shifting take two.
    const __m512i places = _mm512_set_epi16(15, 0, 14, 0, 13, 0, 12, 0, 11, 0, 10, 0, 9, 0, 8, 0,  //
                                            7, 0, 6, 0, 5, 0, 4, 0, 3, 0, 2, 0, 1, 0, 0, 0);
    const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    return _mm512_castsi512_ps(_mm512_maskz_permutexvar_epi16(0xAAAAAAAAu, places, _mm512_castsi256_si512(halves)));
#else
    HalfVec halves;
    std::memcpy(&halves, from, sizeof halves);
    return bit_cast<Vec>(__builtin_convertvector(halves, BitVec) << 16);
#endif
}

HORDE_INLINE void store(float* to, Vec v) { std::memcpy(to, &v, sizeof v); }

// To the nearest, ties to even; NaN stays NaN.
HORDE_INLINE void store(bf16* to, Vec v) {
    const BitVec bits = bit_cast<BitVec>(v);
    const BitVec rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    const BitVec quiet = (bits >> 16) | 0x40;
    const HalfVec halves = __builtin_convertvector(v != v ? quiet : rounded, HalfVec);
    std::memcpy(to, &halves, sizeof halves);
}

HORDE_INLINE float to_float(float x) { return x; }
HORDE_INLINE float to_float(bf16 x) { return bit_cast<float>(static_cast<uint32_t>(x.bits) << 16); }

template <typename T>
HORDE_INLINE T from_float(float x);
template <>
HORDE_INLINE float from_float<float>(float x) {
    return x;
}
template <>
HORDE_INLINE bf16 from_float<bf16>(float x) {
    const uint32_t bits = bit_cast<uint32_t>(x);
    const uint32_t rounded = x != x ? (bits >> 16) | 0x40 : (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return bf16{static_cast<uint16_t>(rounded)};
}

// The first `count` lanes, the others 0; nothing behind them is touched.
template <typename T>
HORDE_INLINE Vec load_part(const T* from, int64_t count) {
    T lanes[kLanes] = {};
    std::memcpy(lanes, from, static_cast<size_t>(count) * sizeof(T));
    return load(lanes);
}

template <typename T>
HORDE_INLINE void store_part(T* to, Vec v, int64_t count) {
    T lanes[kLanes];
    store(lanes, v);
    std::memcpy(to, lanes, static_cast<size_t>(count) * sizeof(T));
}

// The second operand where one is NaN.
HORDE_INLINE Vec larger(Vec a, Vec b) { return a > b ? a : b; }
HORDE_INLINE Vec smaller(Vec a, Vec b) { return a < b ? a : b; }

HORDE_INLINE float largest_lane(Vec v) {
#if defined(HORDE_AVX512)
    return _mm512_reduce_max_ps(v);
#else
    float best = v[0];
    for (int i = 1; i < kLanes; ++i) best = v[i] > best ? v[i] : best;
    return best;
#endif
}

HORDE_INLINE float sum_of_lanes(Vec v) {
#if defined(HORDE_AVX512)
    return _mm512_reduce_add_ps(v);
#else
    float lanes[kLanes];
    store(lanes, v);
    for (int half = kLanes / 2; half > 0; half /= 2)
        for (int i = 0; i < half; ++i) lanes[i] += lanes[i + half];
    return lanes[0];
#endif
}

// e to the x, within 3e-7 of the value; below -87.3 it is 0 (no denormals), exp(0) is exactly 1, NaN stays NaN.
// x = n ln 2 + r with |r| <= ln 2 / 2, then 2^n times the Taylor series of e^r to r^6.
HORDE_INLINE Vec exp(Vec x) {
    const Vec lowest = broadcast(-87.3f), highest = broadcast(100.0f);
    const Vec bounded = smaller(highest, larger(lowest, x));
    const Vec magic = broadcast(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
    const Vec shifted = bounded * broadcast(1.44269504f) + magic;
    const Vec n = shifted - magic;
    Vec r = bounded - n * broadcast(0.693359375f);
    r = r - n * broadcast(-2.12194440e-4f);
    Vec e = broadcast(1.0f / 720) * r + broadcast(1.0f / 120);
    e = e * r + broadcast(1.0f / 24);
    e = e * r + broadcast(1.0f / 6);
    e = e * r + broadcast(0.5f);
    e = e * r + broadcast(1.0f);
    e = e * r + broadcast(1.0f);
#if defined(HORDE_AVX512)
    return _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(x, lowest, _CMP_NLT_UQ), e, n);
#else
    // In two halves: 2^n alone does not fit where the result overflows.
    const IntVec power = bit_cast<IntVec>(shifted) - bit_cast<IntVec>(magic);
    const IntVec half = power >> 1;
    const Vec low = bit_cast<Vec>((half + 127) << 23), high = bit_cast<Vec>((power - half + 127) << 23);
    return x < lowest ? Vec{} : e * low * high;
#endif
}

HORDE_INLINE float exp(float x) { return exp(broadcast(x))[0]; }

// Absolute error below 1e-6 near 1; relative error below 1e-6 near 0, where the series is used.
HORDE_INLINE Vec tanh(Vec x) {
    const Vec square = x * x;
    Vec series = broadcast(62.0f / 2835) * square + broadcast(-17.0f / 315);
    series = series * square + broadcast(2.0f / 15);
    series = series * square + broadcast(-1.0f / 3);
    series = series * square * x + x;
    const Vec one = broadcast(1.0f);
    const Vec by_exp = one - broadcast(2.0f) / (exp(x + x) + one);
    return square < broadcast(0.0625f) ? series : by_exp;
}

}  // namespace horde
