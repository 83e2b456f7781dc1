// Products in bfloat16 with sums in float32. Two numbers that a sum takes together lie side by side as a pair, so that
// one instruction multiplies and adds both; all else in a head stays float32.
#pragma once
#include "rows.h"
#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

namespace ISA {

typedef Simd<float>::U Pairs; // the first number of a pair in the low half
static inline Pairs load_pairs(const Pair *p) {
    Pairs x;
    std::memcpy(&x, p, sizeof x);
    return x;
}
static inline void store_pairs(Pair *p, Pairs x) { std::memcpy(p, &x, sizeof x); }

#ifdef __AVX512BF16__
static_assert(VECTOR_BYTES == 64, "the instructions are used on whole vectors of 64 bytes");
static inline Vec<float> dot_pairs(Vec<float> sum, Pairs x, Pairs y) {
    return (Vec<float>)_mm512_dpbf16_ps((__m512)sum, (__m512bh)x, (__m512bh)y);
}
// The numbers of a, then those of b, in their order.
static inline Pairs adjacent(Vec<float> a, Vec<float> b) { return (Pairs)_mm512_cvtne2ps_pbh((__m512)b, (__m512)a); }
// Lane by lane, a number of a and one of b.
static inline Pairs zipped(Vec<float> a, Vec<float> b) {
    const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6,
                                           21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    return (Pairs)_mm512_permutexvar_epi16(order, (__m512i)adjacent(a, b));
}
#else
// The same in plain operations, to compile and test everything around the instructions on any processor.
static inline Pairs rounded(Vec<float> x) { // to nearest even, in the upper half
    const Pairs bits = (Pairs)x, up = bits + 0x7fffu + (bits >> 16 & 1u);
    return (x == x ? up : bits | 0x400000u) & 0xffff0000u;
}
static inline Vec<float> dot_pairs(Vec<float> sum, Pairs x, Pairs y) {
    return sum + (Vec<float>)(x << 16) * (Vec<float>)(y << 16) +
           (Vec<float>)(x & 0xffff0000u) * (Vec<float>)(y & 0xffff0000u);
}
static inline Pairs zipped(Vec<float> a, Vec<float> b) { return rounded(a) >> 16 | rounded(b); }
static inline Pairs adjacent(Vec<float> a, Vec<float> b) {
    Vec<float> even, odd;
    for (int l = 0; l < LANES<float>; l++) {
        const int at = 2 * l % LANES<float>;
        even[l] = 2 * l < LANES<float> ? a[at] : b[at];
        odd[l] = 2 * l < LANES<float> ? a[at + 1] : b[at + 1];
    }
    return zipped(even, odd);
}
#endif
template <> struct Operand<Pair> {
    typedef float Sum;
    typedef Pairs V;
    static V load(const Pair *p) { return load_pairs(p); }
    static V splat(Pair x) { return x - V{}; }
    static Vec<float> add(Vec<float> sum, V x, V y) { return dot_pairs(sum, x, y); }
};

// As many pairs as a vector has lanes, from the numbers of a row from 2·`at` on; zeros from `count` on.
static inline Pairs pairs_of_row(const float *row, int at, int count) {
    constexpr int L = LANES<float>;
    const float *from = row + 2 * at;
    const int left = count - 2 * at;
    const auto half = [&](int skip) {
        return left >= skip + L ? load(from + skip) : load_some(from + skip, std::max(0, left - skip), 0.f);
    };
    return adjacent(half(0), half(L));
}
// A row of `count` numbers as `pairs` pairs.
static inline void pack_row(const float *row, int count, Pair *to, int pairs) {
    for (int at = 0; at < pairs; at += LANES<float>) {
        const Pairs x = pairs_of_row(row, at, count);
        if (at + LANES<float> <= pairs) store_pairs(to + at, x);
        else std::memcpy(to + at, &x, sizeof(Pair) * (pairs - at));
    }
}
// Two rows, the second zero where it is null, as `padded` pairs, a whole number of vectors.
static inline void zip_two(const float *first, const float *second, int count, Pair *to, int padded) {
    for (int at = 0; at < padded; at += LANES<float>) {
        const int some = std::min(LANES<float>, std::max(0, count - at));
        const auto part = [&](const float *row) {
            return !row ? Vec<float>{} : some == LANES<float> ? load(row + at) : load_some(row + at, some, 0.f);
        };
        store_pairs(to + at, zipped(part(first), part(second)));
    }
}
// As many rows of `count` numbers as a vector has lanes become lanes of the pairs 0 to `pairs` − 1, `apart` from each
// other; a row that is null is zero.
static inline void transpose_pairs(const float *const *rows, int count, int pairs, Pair *to, size_t apart) {
    constexpr int L = LANES<float>;
    for (int at = 0; at < pairs; at += L) {
        Vec<float> x[L];
        for (int l = 0; l < L; l++) x[l] = rows[l] ? (Vec<float>)pairs_of_row(rows[l], at, count) : Vec<float>{};
        transpose<float>(x);
        for (int p = 0; p < L && at + p < pairs; p++) store_pairs(to + (at + p) * apart, (Pairs)x[p]);
    }
}
// A block of the gradient of the scores in pairs of columns: `to` has rows half as long.
[[maybe_unused]] static void pack_block(int rows, int cols, const float *from, size_t ld, Pair *to) {
    constexpr int L = LANES<float>;
    for (int i = 0; i < rows; i++, from += ld, to += ld / 2) {
        int j = 0;
        for (; j + 2 * L <= cols; j += 2 * L) store_pairs(to + j / 2, adjacent(load(from + j), load(from + j + L)));
        if (j >= cols) continue;
        const Pairs last = adjacent(load(from + j), Vec<float>{});
        std::memcpy(to + j / 2, &last, sizeof last / 2);
    }
}
// The same in pairs of rows: `to` has half as many rows, and the last one of an odd number is paired with zeros.
[[maybe_unused]] static void zip_block(int rows, int cols, const float *from, size_t ld, Pair *to) {
    for (int i = 0; i < rows; i += 2, from += 2 * ld, to += ld)
        for (int j = 0; j < cols; j += LANES<float>)
            store_pairs(to + j, zipped(load(from + j), i + 1 < rows ? load(from + ld + j) : Vec<float>{}));
}

// c ∘= (by_row·by_col ∘ (a b) ∘ drop) + x y: a and b in pairs over `depth`, x and y in float32 over `terms`.
struct GradientProduct {
    int depth, terms;
    const Pair *a; // rows `depth` apart
    const float *by_row, *by_col, *x;
    size_t x_ld;
    Right<Pair> b;
    Right<float> y;
    const float *drop; // null without dropout; rows as far apart as those of c
    float *c;
    size_t ld;

    template <int R, int C> void tile(int i, int j) const {
        constexpr int L = LANES<float>, P = PANEL<float>;
        Vec<float> sum[R][C] = {};
        accumulate<Pair, R, C>(sum, depth, a + (size_t)i * depth, depth, 1, b.base + (j / P) * b.stride, b.ld);
        FLATTEN
        for (int r = 0; r < R; r++) FLATTEN
        for (int v = 0; v < C; v++) {
            sum[r][v] *= splat(by_row[i + r]) * load(by_col + j + v * L);
            if (drop) sum[r][v] *= load(drop + (i + r) * ld + j + v * L);
        }
        accumulate<float, R, C>(sum, terms, x + i * x_ld, x_ld, 1, y.base + (j / P) * y.stride, y.ld);
        float *to = c + i * ld + j;
        FLATTEN
        for (int r = 0; r < R; r++) FLATTEN
        for (int v = 0; v < C; v++) store(to + r * ld + v * L, sum[r][v] * load(to + r * ld + v * L));
    }
    template <int C> void rows_of_tile(int some, int i, int j) const {
        switch (some) {
        case 1:
            return tile<1, C>(i, j);
        case 2:
            return tile<2, C>(i, j);
        case 3:
            return tile<3, C>(i, j);
        case 4:
            return tile<4, C>(i, j);
        case 5:
            return tile<5, C>(i, j);
        default:
            return tile<MR, C>(i, j);
        }
    }
    void run(int rows, int cols) const {
        for (int j = 0; j < cols; j += PANEL<float>)
            for (int i = 0; i < rows; i += MR) {
                const int some = std::min(MR, rows - i);
                switch (std::min(PANEL<float>, cols - j) / LANES<float>) {
                case 1:
                    rows_of_tile<1>(some, i, j);
                    break;
                case 2:
                    rows_of_tile<2>(some, i, j);
                    break;
                case 3:
                    rows_of_tile < NV<3 ? 2 : 3>(some, i, j);
                    break;
                default:
                    rows_of_tile < NV<4 ? 2 : 4>(some, i, j);
                    break;
                }
            }
    }
};
} // namespace ISA
