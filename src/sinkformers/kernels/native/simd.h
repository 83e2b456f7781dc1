// Vectors, exp, and the one matrix product that everything is made of. Compiled once per instruction set: the including
// file sets VECTOR_BYTES and the namespace, and the compiler's vector extensions do the rest on any processor.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <utility>

#define FLATTEN _Pragma("GCC unroll 16")

namespace ISA {

template <class T> struct Simd;
template <> struct Simd<float> {
    typedef float V __attribute__((vector_size(VECTOR_BYTES)));
    typedef float Loose __attribute__((vector_size(VECTOR_BYTES), aligned(4), may_alias));
    typedef int32_t I __attribute__((vector_size(VECTOR_BYTES)));
    typedef uint32_t U __attribute__((vector_size(VECTOR_BYTES)));
    typedef uint8_t Bytes __attribute__((vector_size(VECTOR_BYTES / 4)));
};
template <> struct Simd<double> {
    typedef double V __attribute__((vector_size(VECTOR_BYTES)));
    typedef double Loose __attribute__((vector_size(VECTOR_BYTES), aligned(8), may_alias));
    typedef int64_t I __attribute__((vector_size(VECTOR_BYTES)));
    typedef uint64_t U __attribute__((vector_size(VECTOR_BYTES)));
    typedef uint8_t Bytes __attribute__((vector_size(VECTOR_BYTES / 8)));
};
template <class T> using Vec = typename Simd<T>::V;
template <class T> constexpr int LANES = VECTOR_BYTES / sizeof(T);
// A tile is MR rows by NV vectors of accumulators: as many as the registers hold.
constexpr int MR = 6, NV = VECTOR_BYTES == 64 ? 4 : 2;
template <class T> constexpr int PANEL = NV * LANES<T>;
// Columns are filled up to whole vectors, and to fours, which is how they are transposed.
template <class T> constexpr int COLUMNS = LANES<T> < 4 ? 4 : LANES<T>;

template <class T> static inline Vec<T> load(const T *p) { return *(const typename Simd<T>::Loose *)p; }
template <class T> static inline void store(T *p, Vec<T> x) { *(typename Simd<T>::Loose *)p = x; }
template <class T> static inline Vec<T> splat(T x) { return x - Vec<T>{}; } // x + 0 would be an addition: −0 + 0 is 0
template <class T> static inline Vec<T> larger(Vec<T> a, Vec<T> b) { return a > b ? a : b; }
// Sums and maxima over the lanes, by halves: one by one they would cost more than a row's products.
template <class T, int bytes> struct Halves {
    typedef T V __attribute__((vector_size(bytes)));
    typedef T Half __attribute__((vector_size(bytes / 2)));
    static inline T total(V x) {
        Half a, b;
        std::memcpy(&a, &x, sizeof a);
        std::memcpy(&b, (const char *)&x + sizeof a, sizeof b);
        return Halves<T, bytes / 2>::total(a + b);
    }
    static inline T most(V x) {
        Half a, b;
        std::memcpy(&a, &x, sizeof a);
        std::memcpy(&b, (const char *)&x + sizeof a, sizeof b);
        return Halves<T, bytes / 2>::most(a > b ? a : b);
    }
};
template <> struct Halves<float, 8> {
    typedef float V __attribute__((vector_size(8)));
    static inline float total(V x) { return x[0] + x[1]; }
    static inline float most(V x) { return x[0] > x[1] ? x[0] : x[1]; }
};
template <> struct Halves<double, 16> {
    typedef double V __attribute__((vector_size(16)));
    static inline double total(V x) { return x[0] + x[1]; }
    static inline double most(V x) { return x[0] > x[1] ? x[0] : x[1]; }
};
template <class T> static inline T total(Vec<T> x) { return Halves<T, VECTOR_BYTES>::total(x); }
template <class T> static inline T most(Vec<T> x) { return Halves<T, VECTOR_BYTES>::most(x); } // without NaN

// Lanes of a and b, counted through both, in the order of the last arguments.
#ifdef __clang__
#define SHUFFLE(Order, a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(Order, a, b, ...) __builtin_shuffle(a, b, Order{__VA_ARGS__})
#endif
// Groups of 2·G lanes in a and b, each folded onto G lanes.
template <class T, int G, size_t... O> static inline Vec<T> fold(Vec<T> a, Vec<T> b, std::index_sequence<O...>) {
    typedef typename Simd<T>::I Order [[maybe_unused]];
    return SHUFFLE(Order, a, b, (O / G * 2 * G + O % G)...) + SHUFFLE(Order, a, b, (O / G * 2 * G + G + O % G)...);
}
// The totals of as many vectors as one has lanes, all at once; `sums` is used up.
template <class T, int G = LANES<T> / 2> static inline Vec<T> totals(Vec<T> *sums) {
    FLATTEN
    for (int p = 0; p < G; p++)
        sums[p] = fold<T, G>(sums[2 * p], sums[2 * p + 1], std::make_index_sequence<LANES<T>>());
    if constexpr (G > 1) return totals<T, G / 2>(sums);
    return sums[0];
}
static inline int round_up(int x, int to) { return (x + to - 1) / to * to; }

// Four rows of `count` features, times `by`, become columns j to j + 3 of a matrix with rows `ld` apart.
static inline void transpose_four(const float *const *rows, const float *by, int count, float *to, size_t ld) {
    typedef float Four __attribute__((vector_size(16)));
    typedef float Loose __attribute__((vector_size(16), aligned(4), may_alias));
    typedef int32_t At [[maybe_unused]] __attribute__((vector_size(16)));
    int c = 0;
    for (; c + 4 <= count; c += 4) {
        const Four p = by[0] * *(const Loose *)(rows[0] + c), q = by[1] * *(const Loose *)(rows[1] + c);
        const Four r = by[2] * *(const Loose *)(rows[2] + c), s = by[3] * *(const Loose *)(rows[3] + c);
        const Four pq = SHUFFLE(At, p, q, 0, 4, 1, 5), rs = SHUFFLE(At, r, s, 0, 4, 1, 5);
        const Four pq2 = SHUFFLE(At, p, q, 2, 6, 3, 7), rs2 = SHUFFLE(At, r, s, 2, 6, 3, 7);
        *(Loose *)(to + c * ld) = SHUFFLE(At, pq, rs, 0, 1, 4, 5);
        *(Loose *)(to + (c + 1) * ld) = SHUFFLE(At, pq, rs, 2, 3, 6, 7);
        *(Loose *)(to + (c + 2) * ld) = SHUFFLE(At, pq2, rs2, 0, 1, 4, 5);
        *(Loose *)(to + (c + 3) * ld) = SHUFFLE(At, pq2, rs2, 2, 3, 6, 7);
    }
    for (; c < count; c++)
        for (int j = 0; j < 4; j++) to[c * ld + j] = by[j] * rows[j][c];
}
static inline void transpose_four(const double *const *rows, const double *by, int count, double *to, size_t ld) {
    for (int c = 0; c < count; c++)
        for (int j = 0; j < 4; j++) to[c * ld + j] = by[j] * rows[j][c];
}

// As many vectors as one has lanes become each other's lanes: blocks of G lanes change places, G from half a vector
// down to 1.
template <class T, int G, size_t... O> static inline void exchange(Vec<T> &a, Vec<T> &b, std::index_sequence<O...>) {
    constexpr int L = LANES<T>;
    typedef typename Simd<T>::I Order [[maybe_unused]];
    const Vec<T> left = SHUFFLE(Order, a, b, (O / G % 2 ? L + O - G : O)...);
    b = SHUFFLE(Order, a, b, (O / G % 2 ? L + O : O + G)...);
    a = left;
}
template <class T, int G = LANES<T> / 2> static inline void transpose(Vec<T> *x) {
    FLATTEN
    for (int i = 0; i < LANES<T>; i++)
        if (i / G % 2 == 0) exchange<T, G>(x[i], x[i + G], std::make_index_sequence<LANES<T>>());
    if constexpr (G > 1) transpose<T, G / 2>(x);
}
#undef SHUFFLE

// exp is an exact zero below these; a test compares them with those of Python.
template <class T> constexpr T SMALLEST_EXPONENT = sizeof(T) == 4 ? (T)-87 : (T)-708;
// exp for arguments up to 0: within 2 ulp, an exact zero where the result would be denormal, NaN for NaN.
static inline Vec<float> exponential(Vec<float> x) {
    const Vec<float> magic = splat(12582912.f), t = x * splat(1.44269504f) + magic, k = t - magic;
    const Vec<float> r = (x - k * splat(0.693359375f)) + k * splat(2.12194440e-4f);
    // In pairs: half as many operations wait for one another as in Horner's order.
    const Vec<float> square = r * r, high = splat(1.9875691500e-4f) * r + splat(1.3981999507e-3f),
                     middle = splat(8.3334519073e-3f) * r + splat(4.1665795894e-2f),
                     low = splat(1.6666665459e-1f) * r + splat(5.0000001201e-1f);
    const Vec<float> p = (((high * square + middle) * square + low) * square + r) + splat(1.f);
    const Vec<float> y = p * (Vec<float>)(((Simd<float>::I)t + 127) << 23);
    return x < splat(SMALLEST_EXPONENT<float>) ? Vec<float>{} : y;
}
static inline Vec<double> exponential(Vec<double> x) {
    const Vec<double> magic = splat(6755399441055744.0), t = x * splat(1.4426950408889634074) + magic, k = t - magic;
    const Vec<double> r = (x - k * splat(6.93145751953125e-1)) - k * splat(1.42860682030941723212e-6);
    Vec<double> p = splat(1.0 / 6227020800.0);
    constexpr double inverse_factorial[] = {
        1.0 / 479001600, 1.0 / 39916800, 1.0 / 3628800, 1.0 / 362880, 1.0 / 40320, 1.0 / 5040, 1.0 / 720,
        1.0 / 120,       1.0 / 24,       1.0 / 6,       0.5,          1.0,         1.0};
    FLATTEN
    for (double c : inverse_factorial) p = p * r + splat(c);
    const Vec<double> y = p * (Vec<double>)(((Simd<double>::I)t + 1023) << 52);
    return x < splat(SMALLEST_EXPONENT<double>) ? Vec<double>{} : y;
}

// log for positive normal numbers, within 2 ulp; infinity for infinity, NaN for NaN.
static inline Vec<float> logarithm(Vec<float> x) {
    typedef Simd<float>::I Int;
    // x = 2^k·y with y in [√½, √2): the bits of √½ are subtracted before the exponent is cut off.
    const Int bits = (Int)x, k = (bits - 0x3f3504f3) >> 23;
    const Vec<float> y = (Vec<float>)(bits - (k << 23)) - splat(1.f), square = y * y;
    Vec<float> p = splat(7.0376836292e-2f);
    constexpr float coefficients[] = {-1.1514610310e-1f, 1.1676998740e-1f, -1.2420140846e-1f, 1.4249322787e-1f,
                                      -1.6668057665e-1f, 2.0000714765e-1f, -2.4999993993e-1f, 3.3333331174e-1f};
    FLATTEN
    for (float c : coefficients) p = p * y + splat(c);
    const Vec<float> e = __builtin_convertvector(k, Vec<float>);
    const Vec<float> log =
        ((p * square * y + e * splat(-2.12194440e-4f)) - splat(.5f) * square + y) + e * splat(0.693359375f);
    return x < splat(std::numeric_limits<float>::infinity()) ? log : x;
}
static inline Vec<double> logarithm(Vec<double> x) {
    for (int l = 0; l < LANES<double>; l++) x[l] = std::log(x[l]);
    return x;
}

// The operands of a product, and the type of its sums; half.h has one of another type than its sums.
typedef uint32_t Pair;
template <class E> struct Operand {
    typedef E Sum;
    typedef Vec<E> V;
    static V load(const E *p) { return ISA::load(p); }
    static V splat(E x) { return ISA::splat(x); }
    static V add(V sum, V x, V y) { return sum + x * y; }
};
template <class E> using Sum = typename Operand<E>::Sum;
// sum[R×C vectors] += a (element (i, k) at a[i·rs + k·cs]) · b (row k at b + k·ldb).
template <class E, int R, int C> static inline void accumulate(Vec<Sum<E>> (&sum)[R][C], int depth, const E *a,
                                                               size_t rs, size_t cs, const E *b, size_t ldb) {
    typedef Operand<E> Type;
    constexpr int L = LANES<typename Type::Sum>;
    for (int k = 0; k < depth; k++, a += cs, b += ldb) {
        typename Type::V row[C];
        FLATTEN
        for (int j = 0; j < C; j++) row[j] = Type::load(b + j * L);
        FLATTEN
        for (int i = 0; i < R; i++) {
            const typename Type::V x = Type::splat(a[i * rs]);
            FLATTEN
            for (int j = 0; j < C; j++) sum[i][j] = Type::add(sum[i][j], x, row[j]);
        }
    }
}

// What a tile starts from and what becomes of it.
enum Mode { SET, ADD, TIMES }; // c = ab (+ start), c += ab, c *= ab

// c[R×C vectors] from a and b as in `accumulate`, rows times `by` if given.
template <class E, int R, int C, Mode mode> static void tile(int depth, const E *a, size_t rs, size_t cs, const E *b,
                                                             size_t ldb, const Sum<E> *start, const Sum<E> *by,
                                                             Sum<E> *c, size_t ldc) {
    typedef Sum<E> T;
    constexpr int L = LANES<T>;
    Vec<T> acc[R][C];
    FLATTEN
    for (int i = 0; i < R; i++) FLATTEN
    for (int j = 0; j < C; j++)
        acc[i][j] = mode == ADD ? load(c + i * ldc + j * L) : mode == SET && start ? load(start + j * L) : Vec<T>{};
    accumulate<E, R, C>(acc, depth, a, rs, cs, b, ldb);
    if (mode != TIMES && by) FLATTEN
    for (int i = 0; i < R; i++) FLATTEN
    for (int j = 0; j < C; j++) acc[i][j] *= splat(by[i]);
    FLATTEN
    for (int i = 0; i < R; i++) FLATTEN
    for (int j = 0; j < C; j++)
        store(c + i * ldc + j * L, mode == TIMES ? acc[i][j] * load(c + i * ldc + j * L) : acc[i][j]);
}
template <class E, Mode mode, int C> static void tile_rows(int rows, int depth, const E *a, size_t rs, size_t cs,
                                                           const E *b, size_t ldb, const Sum<E> *start,
                                                           const Sum<E> *by, Sum<E> *c, size_t ldc) {
    switch (rows) {
    case 1:
        return tile<E, 1, C, mode>(depth, a, rs, cs, b, ldb, start, by, c, ldc);
    case 2:
        return tile<E, 2, C, mode>(depth, a, rs, cs, b, ldb, start, by, c, ldc);
    case 3:
        return tile<E, 3, C, mode>(depth, a, rs, cs, b, ldb, start, by, c, ldc);
    case 4:
        return tile<E, 4, C, mode>(depth, a, rs, cs, b, ldb, start, by, c, ldc);
    case 5:
        return tile<E, 5, C, mode>(depth, a, rs, cs, b, ldb, start, by, c, ldc);
    default:
        return tile<E, 6, C, mode>(depth, a, rs, cs, b, ldb, start, by, c, ldc);
    }
}

// The right-hand side of a product: panels of PANEL columns, `stride` apart, rows `ld` apart within one. A row-major
// matrix is {p, PANEL, its own ld}; one packed in panels keeps a short ld, which the caches like.
template <class T> struct Right {
    const T *base;
    size_t stride, ld;
};

// c (rows × cols, cols a multiple of the lanes) from a and b over `depth`. Long sums go in slices that stay in cache;
// the last of them multiplies row i by by[i].
template <class E, Mode mode> static void product(int rows, int cols, int depth, const E *a, size_t rs, size_t cs,
                                                  Right<E> b, const Sum<E> *start, Sum<E> *c, size_t ldc,
                                                  const Sum<E> *by = nullptr) {
    typedef Sum<E> T;
    constexpr int P = PANEL<T>, SLICE = 192;
    for (int j = 0; j < cols; j += P) {
        const int vectors = std::min(P, cols - j) / LANES<T>;
        for (int k = 0; k < depth || (k == 0 && depth == 0); k += SLICE) {
            const int part = mode == TIMES ? depth : std::min(SLICE, depth - k);
            const E *right = b.base + (j / P) * b.stride + k * b.ld;
            for (int i = 0; i < rows; i += MR) {
                const int some = std::min(MR, rows - i);
                const E *left = a + i * rs + k * cs;
                T *out = c + i * ldc + j;
                const T *from = start ? start + j : nullptr, *factor = by && k + part == depth ? by + i : nullptr;
#define TILE(C)                                                                                             \
    (mode == SET && k ? tile_rows<E, ADD, C>(some, part, left, rs, cs, right, b.ld, from, factor, out, ldc) \
                      : tile_rows<E, mode, C>(some, part, left, rs, cs, right, b.ld, from, factor, out, ldc))
                switch (vectors) {
                case 1:
                    TILE(1);
                    break;
                case 2:
                    TILE(2);
                    break;
                case 3:
                    TILE(NV < 3 ? 2 : 3);
                    break;
                default:
                    TILE(NV < 4 ? 2 : 4);
                    break;
                }
#undef TILE
            }
            if (mode == TIMES) break;
        }
    }
}
} // namespace ISA
