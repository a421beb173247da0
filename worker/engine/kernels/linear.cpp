// Linear layers on prepacked weights: y = x W^T (+ bias) (+ residual), sums in fp32.
//
// Packing cuts W [n, k] into panels of PANEL outputs. Inside a panel the inner index k runs slowest, so that one step
// over k reads PANEL neighbouring weights, and a panel is one unbroken stream of memory:
//   fp32: panel[k][PANEL] floats.
//   bf16: panel[k / 2][PANEL] words of 32 bits, an even k in the low half and the odd one after it in the high half.
//         Widening either to fp32 is exact and takes one instruction; a dot product of pairs takes the word as it is.
//   int8: panel[k][PANEL] bytes, times one scale an output.
// A last panel is filled up with zeros, as is an odd k.
//
// Each output is summed in the same order, whatever the number of rows and of threads: slices of DEPTH, one after the
// other, each a chain over its k. So the result of a row does not depend on the rows beside it, bit for bit, and rounding
// grows with the length of a slice and their number, not with k.

#include <omp.h>
#include <stdint.h>
#include <string.h>

#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

#if defined(__AVX512F__)
constexpr int LANES = 16, ROWS = 8;
#elif defined(__AVX__)
constexpr int LANES = 8, ROWS = 4;
#elif defined(__aarch64__)
constexpr int LANES = 4, ROWS = 8;
#else
constexpr int LANES = 4, ROWS = 4;
#endif
constexpr int VECTORS = 3;  // ROWS * VECTORS sums, as many weights and an activation just fill the registers
constexpr int PANEL = LANES * VECTORS;

constexpr int GROUP = 8;       // steps over k between two rounds of prefetches; even
constexpr int DEPTH = 96;      // k of a slice: its weights stay in the first-level cache while the rows pass by
constexpr int BAND = 256;      // rows whose sums wait in the second-level cache
constexpr int AHEAD = 4096;    // bytes between reading weights and asking for those to come, for a single tile
constexpr int NARROWEST = 32;  // rows that a band keeps when it is cut to give every thread work
static_assert(DEPTH % GROUP == 0 && GROUP % 2 == 0, "groups start at even k");

typedef float vfloat __attribute__((vector_size(LANES * 4)));
typedef uint32_t vword __attribute__((vector_size(LANES * 4)));
typedef int32_t vint __attribute__((vector_size(LANES * 4)));
typedef int8_t vbyte __attribute__((vector_size(LANES)));
typedef vfloat vfloat_anywhere __attribute__((aligned(4)));

// PAIRS: packed like BF16; activations are rounded to bf16 too and multiplied two by two.
enum Format { FP32 = 0, BF16 = 1, INT8 = 2, PAIRS = 3 };

constexpr int64_t bytes_of_step(int format) { return PANEL * (format == FP32 ? 4 : format == INT8 ? 1 : 2); }
inline int64_t panel_bytes(int format, int64_t k) { return (k + k % 2) * bytes_of_step(format); }
inline int64_t panels_of(int64_t n) { return (n + PANEL - 1) / PANEL; }

inline vfloat low_half(vword pair) { return (vfloat)(pair << 16); }
inline vfloat high_half(vword pair) { return (vfloat)(pair & 0xffff0000u); }

inline vfloat widened(const int8_t* q) {
#if defined(__AVX512F__)
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_load_si128((const __m128i*)q)));
#elif defined(__AVX2__)
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)q)));
#else
    return __builtin_convertvector(*(const vbyte*)q, vfloat);
#endif
}

// Weights of step `i` after `w`, as fp32; `i` is a constant where it counts.
template <int FORMAT>
inline vfloat weight(const char* w, int i, int v) {
    if constexpr (FORMAT == FP32) {
        return *(const vfloat*)(w + (i * PANEL + v * LANES) * 4);
    } else if constexpr (FORMAT == BF16) {
        const vword pair = *(const vword*)(w + (i / 2 * PANEL + v * LANES) * 4);
        return i % 2 ? high_half(pair) : low_half(pair);
    } else {
        return widened((const int8_t*)w + i * PANEL + v * LANES);
    }
}

inline vfloat add_products(vfloat sum, vword weights, uint32_t activations) {
#if defined(__AVX512BF16__) && defined(__AVX512F__)
    return _mm512_dpbf16_ps((__m512)sum, (__m512bh)weights, (__m512bh)_mm512_set1_epi32(int(activations)));
#else
    const vword both = vword{} + activations;
    sum += low_half(weights) * low_half(both);
    return sum + high_half(weights) * high_half(both);
#endif
}

struct Prefetch {
    const char* at;
    int lines;  // each GROUP
};

// What a tile reads and where its sums stay. A step is one k, or two for PAIRS; x counts steps.
template <typename X>
struct Tile {
    const X* x;
    int64_t ldx;
    const char* w;
    int steps;
    bool first;    // there are no sums yet to add to
    float* sums;   // [rows][PANEL]
    float* kept;   // the widened weights go here, for the tiles that follow
    Prefetch ahead;
};

template <int FORMAT, int M, bool KEEP, typename X>
__attribute__((always_inline)) inline void compute(Tile<X> t) {
    constexpr int group = FORMAT == PAIRS ? GROUP / 2 : GROUP;
    vfloat s[M][VECTORS];
#pragma GCC unroll 16
    for (int r = 0; r < M; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; ++v)
            s[r][v] = vfloat{};

    auto step = [&](int i) __attribute__((always_inline)) {
        if constexpr (FORMAT == PAIRS) {
            vword a[VECTORS];
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; ++v) a[v] = *(const vword*)(t.w + (i * PANEL + v * LANES) * 4);
#pragma GCC unroll 16
            for (int r = 0; r < M; ++r)
#pragma GCC unroll 4
                for (int v = 0; v < VECTORS; ++v) s[r][v] = add_products(s[r][v], a[v], t.x[r * t.ldx + i]);
        } else {
            vfloat a[VECTORS];
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; ++v) {
                a[v] = weight<FORMAT>(t.w, i, v);
                if (KEEP) *(vfloat*)(t.kept + i * PANEL + v * LANES) = a[v];
            }
#pragma GCC unroll 16
            for (int r = 0; r < M; ++r) {
                const float b = t.x[r * t.ldx + i];
#pragma GCC unroll 4
                for (int v = 0; v < VECTORS; ++v) s[r][v] += a[v] * b;
            }
        }
    };
    for (; t.steps >= group; t.steps -= group) {
        for (int line = 0; line < t.ahead.lines; ++line, t.ahead.at += 64) __builtin_prefetch(t.ahead.at, 0, 2);
#pragma GCC unroll 8
        for (int i = 0; i < group; ++i) step(i);
        t.w += GROUP * bytes_of_step(FORMAT);
        t.x += group;
        if (KEEP) t.kept += GROUP * PANEL;
    }
    for (int i = 0; i < t.steps; ++i) step(i);

#pragma GCC unroll 16
    for (int r = 0; r < M; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; ++v) {
            vfloat* const sum = (vfloat*)(t.sums + r * PANEL + v * LANES);
            *sum = t.first ? s[r][v] : *sum + s[r][v];
        }
}

template <int FORMAT, bool KEEP, typename X>
__attribute__((noinline)) void compute_rows(int rows, const Tile<X>& t) {
    switch (rows) {
        case 1: return compute<FORMAT, 1, KEEP>(t);
        case 2: return compute<FORMAT, 2, KEEP>(t);
        case 3: return compute<FORMAT, 3, KEEP>(t);
        case 4: return compute<FORMAT, 4, KEEP>(t);
    }
    if constexpr (ROWS == 8) {
        switch (rows) {
            case 5: return compute<FORMAT, 5, KEEP>(t);
            case 6: return compute<FORMAT, 6, KEEP>(t);
            case 7: return compute<FORMAT, 7, KEEP>(t);
            case 8: return compute<FORMAT, 8, KEEP>(t);
        }
    }
}

struct Layer {
    int64_t n, k;
    const char* packed;
    const float* scales;
    const float* bias;
};

template <typename X>
struct Rows {
    int64_t count;
    const X* x;
    int64_t ldx;  // in elements of X
    const float* residual;
    int64_t ldr;
    float* y;
    int64_t ldy;
};

template <typename X>
void finish(const Layer& layer, int64_t column, const Rows<X>& rows, const float* sums) {
    const int width = int(layer.n - column < PANEL ? layer.n - column : PANEL);
    for (int64_t r = 0; r < rows.count; ++r, sums += PANEL) {
        float* y = rows.y + r * rows.ldy + column;
        const float* residual = rows.residual ? rows.residual + r * rows.ldr + column : nullptr;
        auto total = [&](auto sum, int at, auto load) {
            if (layer.scales) sum = sum * load(layer.scales + column + at);
            if (layer.bias) sum = sum + load(layer.bias + column + at);
            if (residual) sum = sum + load(residual + at);
            return sum;
        };
        if (width == PANEL) {
            auto load = [](const float* from) { return vfloat(*(const vfloat_anywhere*)from); };
            for (int at = 0; at < PANEL; at += LANES)
                *(vfloat_anywhere*)(y + at) = total(*(const vfloat*)(sums + at), at, load);
        } else {
            for (int at = 0; at < width; ++at) y[at] = total(sums[at], at, [](const float* from) { return *from; });
        }
    }
}

// One panel for one band of rows: a slice of DEPTH of the weights at a time, tile after tile of rows over it.
template <int FORMAT, typename X>
void compute_panel(const Layer& layer, int64_t panel, const Rows<X>& rows, float* sums, float* kept) {
    constexpr int per_step = FORMAT == PAIRS ? 2 : 1;
    const char* w = layer.packed + panel * panel_bytes(FORMAT, layer.k);
    const int tiles = int((rows.count + ROWS - 1) / ROWS);
    constexpr int64_t slice = DEPTH * bytes_of_step(FORMAT);
    // The slice after this one is fetched in shares, one a tile.
    const int lines = int((GROUP * bytes_of_step(FORMAT) / 64 + tiles - 1) / tiles);
    const int64_t share = lines * (DEPTH / GROUP) * 64;
    for (int64_t at = 0; at < layer.k; at += DEPTH, w += slice) {
        const int64_t here = layer.k - at < DEPTH ? layer.k - at : DEPTH;
        int64_t row = 0;
        for (int tile = 0; tile < tiles; ++tile) {
            const int count = int(rows.count * (tile + 1) / tiles - row);
            Prefetch ahead{tiles == 1 ? w + AHEAD : w + slice + tile * share, tile * share < slice ? lines : 0};
            Tile<X> t{rows.x + row * rows.ldx + at / per_step, rows.ldx, w, int((here + per_step - 1) / per_step),
                      at == 0, sums + row * PANEL, kept, ahead};
            if constexpr (FORMAT == FP32 || FORMAT == PAIRS) {
                compute_rows<FORMAT, false>(count, t);
            } else if (tiles == 1) {
                compute_rows<FORMAT, false>(count, t);
            } else if (tile == 0) {
                compute_rows<FORMAT, true>(count, t);
            } else {
                t.w = (const char*)kept;
                compute_rows<FP32, false>(count, t);
            }
            row += count;
        }
    }
    finish(layer, panel * PANEL, rows, sums);
}

// This thread's part: neighbouring panels, so that it reads one stream.
template <int FORMAT, typename X>
void compute_share(const Layer& layer, const Rows<X>& rows) {
    alignas(64) static thread_local float sums[BAND * PANEL];
    alignas(64) static thread_local float kept[DEPTH * PANEL];
    const int64_t me = omp_get_thread_num(), threads = omp_get_num_threads(), panels = panels_of(layer.n);
    int64_t bands = (rows.count + BAND - 1) / BAND;
    while (panels * bands < 4 * threads && rows.count / (bands + 1) >= NARROWEST) ++bands;
    for (int64_t item = panels * bands * me / threads; item < panels * bands * (me + 1) / threads; ++item) {
        const int64_t band = item % bands, first = rows.count * band / bands;
        Rows<X> part = rows;
        part.count = rows.count * (band + 1) / bands - first;
        part.x += first * rows.ldx;
        part.y += first * rows.ldy;
        if (part.residual) part.residual += first * rows.ldr;
        compute_panel<FORMAT>(layer, item / bands, part, sums, kept);
    }
}

inline uint32_t rounded_to_bf16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    const uint32_t to_even = (bits + 0x7fffu + ((bits >> 16) & 1)) >> 16;
    return value == value ? to_even : (bits >> 16) | 0x40u;  // a NaN stays one
}

void round_row(const float* x, int64_t k, uint32_t* pairs) {
    for (int64_t i = 0; i < k / 2; ++i)
        pairs[i] = rounded_to_bf16(x[2 * i]) | rounded_to_bf16(x[2 * i + 1]) << 16;
    if (k % 2) pairs[k / 2] = rounded_to_bf16(x[k - 1]);
}

template <int FORMAT>
void run(const Layer& layer, const Rows<float>& rows, int threads) {
    if constexpr (FORMAT == PAIRS) {
        static thread_local std::vector<uint32_t> buffer;
        const int64_t ldx = (layer.k + 1) / 2;
        buffer.resize(size_t(rows.count * ldx));
        uint32_t* const pairs = buffer.data();
        const Rows<uint32_t> rounded{rows.count, pairs, ldx, rows.residual, rows.ldr, rows.y, rows.ldy};
#pragma omp parallel num_threads(threads)
        {
#pragma omp for schedule(static)
            for (int64_t r = 0; r < rows.count; ++r) round_row(rows.x + r * rows.ldx, layer.k, pairs + r * ldx);
            compute_share<FORMAT>(layer, rounded);
        }
    } else {
#pragma omp parallel num_threads(threads)
        compute_share<FORMAT>(layer, rows);
    }
}

// Where weight (output, k) lies in its panels, counted in weights.
inline int64_t place(int format, int64_t depth, int64_t output, int64_t k) {
    const int64_t panel = output / PANEL * depth * PANEL, column = output % PANEL;
    return panel + (format == BF16 || format == PAIRS ? (k / 2 * PANEL + column) * 2 + k % 2 : k * PANEL + column);
}

template <int FORMAT, typename W>
void pack(const W* source, int64_t n, int64_t k, int64_t stride_n, int64_t stride_k, W* packed, int threads) {
    const int64_t depth = k + k % 2;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t panel = 0; panel < panels_of(n); ++panel) {
        const int64_t first = panel * PANEL, last = first + PANEL < n ? first + PANEL : n;
        memset(packed + panel * depth * PANEL, 0, size_t(depth * PANEL) * sizeof(W));
        for (int64_t j = 0; j < k; ++j) {
            W* to = packed + place(FORMAT, depth, first, j);
            const W* from = source + first * stride_n + j * stride_k;
            for (int64_t i = first; i < last; ++i, to += FORMAT == BF16 ? 2 : 1, from += stride_n) *to = *from;
        }
    }
}

}  // namespace

extern "C" {

// Whether PAIRS is faster than BF16 on this machine: it has the instruction.
int horde_linear_multiplies_pairs() {
#if defined(__AVX512BF16__) && defined(__AVX512F__)
    return 1;
#else
    return 0;
#endif
}

int64_t horde_linear_bytes(int format, int64_t n, int64_t k) { return panels_of(n) * panel_bytes(format, k); }

// Weight (i, j) lies at source[i * stride_n + j * stride_k]: floats, bf16 or int8. `packed` is aligned to 64 bytes.
void horde_linear_pack(int format, const void* source, int64_t n, int64_t k, int64_t stride_n, int64_t stride_k,
                       void* packed, int threads) {
    if (format == FP32)
        pack<FP32>((const float*)source, n, k, stride_n, stride_k, (float*)packed, threads);
    else if (format == INT8)
        pack<INT8>((const int8_t*)source, n, k, stride_n, stride_k, (int8_t*)packed, threads);
    else
        pack<BF16>((const uint16_t*)source, n, k, stride_n, stride_k, (uint16_t*)packed, threads);
}

// Rows `ids` of a packed weight (an embedding that shares it), widened: y[count, k].
void horde_linear_gather(int format, const void* packed, int64_t k, const int64_t* ids, int64_t count, float* y,
                         int threads) {
    const int64_t depth = k + k % 2;
#pragma omp parallel for num_threads(threads) schedule(static) if (count > 1)
    for (int64_t r = 0; r < count; ++r) {
        for (int64_t j = 0; j < k; ++j) {
            const int64_t at = place(format, depth, ids[r], j);
            if (format == FP32) {
                y[r * k + j] = ((const float*)packed)[at];
            } else {
                const uint32_t bits = uint32_t(((const uint16_t*)packed)[at]) << 16;
                memcpy(&y[r * k + j], &bits, 4);
            }
        }
    }
}

// y[rows, n] = x[rows, k] W^T * scales + bias + residual; each of the last three may be null. y may be the residual.
void horde_linear(int format, const void* packed, int64_t n, int64_t k, const float* scales, const float* bias,
                  int64_t rows, const float* x, int64_t ldx, const float* residual, int64_t ldr, float* y, int64_t ldy,
                  int threads) {
    const Layer layer{n, k, (const char*)packed, scales, bias};
    const Rows<float> all{rows, x, ldx, residual, ldr, y, ldy};
    switch (format) {
        case FP32: return run<FP32>(layer, all, threads);
        case BF16: return run<BF16>(layer, all, threads);
        case INT8: return run<INT8>(layer, all, threads);
        case PAIRS: return run<PAIRS>(layer, all, threads);
    }
}

}  // extern "C"
