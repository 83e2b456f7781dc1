// What is done to rows of the kernel between the products: exponentials, and the two halves of an iteration.
#pragma once
#include "simd.h"

namespace ISA {

// The first `count` lanes from memory, `fill` in the others; and back.
template <class T> static inline Vec<T> load_some(const T *p, int count, T fill) {
    Vec<T> x = splat(fill);
    for (int l = 0; l < count; l++) x[l] = p[l];
    return x;
}
template <class T> static inline void store_some(T *p, Vec<T> x, int count) {
    for (int l = 0; l < count; l++) p[l] = x[l];
}
// All bits set in the lanes whose byte is not zero; only `count` bytes are read.
template <class T> static inline typename Simd<T>::I nonzero(const uint8_t *p, int count) {
    typename Simd<T>::Bytes x = {};
    if (count == LANES<T>) std::memcpy(&x, p, sizeof x);
    else
        for (int l = 0; l < count; l++) x[l] = p[l];
    return __builtin_convertvector(x, typename Simd<T>::I) != 0;
}
// Calls f(j) for whole vectors, then rest(j, count) for what is left of a row.
template <class T, class F, class G> static inline void along(int cols, F &&f, G &&rest) {
    int j = 0;
    for (; j + LANES<T> <= cols; j += LANES<T>) f(j);
    if (j < cols) rest(j, cols - j);
}

// The largest of a row, NaN or not; a NaN shows in the sum of exponentials.
template <class T> static T row_max(const T *x, int cols) {
    const T lowest = -std::numeric_limits<T>::infinity();
    Vec<T> top = splat(lowest);
    along<T>(
        cols, [&](int j) { top = larger<T>(load(x + j), top); },
        [&](int j, int count) { top = larger<T>(load_some(x + j, count, lowest), top); });
    return most<T>(top);
}
// to = exp(from − shift) for R rows, and the sums of each. In short rows one alone would wait for its own exponentials
// most of the time.
template <class T, int R>
static void exponentiate_rows(const T *from, size_t from_ld, T *to, size_t to_ld, const T *shifts, T *sums, int cols) {
    Vec<T> sum[R] = {}, by[R];
    FLATTEN
    for (int i = 0; i < R; i++) by[i] = splat(shifts[i]);
    along<T>(
        cols,
        [&](int j) {
            FLATTEN
            for (int i = 0; i < R; i++) {
                const Vec<T> y = exponential(load(from + i * from_ld + j) - by[i]);
                store(to + i * to_ld + j, y);
                sum[i] += y;
            }
        },
        [&](int j, int count) {
            for (int i = 0; i < R; i++) {
                const Vec<T> x = load_some(from + i * from_ld + j, count, -std::numeric_limits<T>::infinity());
                const Vec<T> y = exponential(x - by[i]);
                store_some(to + i * to_ld + j, y, count);
                sum[i] += y;
            }
        });
    FLATTEN
    for (int i = 0; i < R; i++) sums[i] = total<T>(sum[i]);
}
// The same for one row; returns the sum.
template <class T> static T exponentiate(const T *from, T *to, T shift, int cols) {
    T sum;
    exponentiate_rows<T, 1>(from, 0, to, 0, &shift, &sum, cols);
    return sum;
}
// out[i] = row i · v, several rows at once, so that v is loaded once for all of them.
template <class T, int R> static void dot_rows(const T *a, size_t ld, const T *v, T *out, int cols) {
    Vec<T> sum[R] = {};
    T rest[R] = {};
    along<T>(
        cols,
        [&](int j) {
            const Vec<T> x = load(v + j);
            FLATTEN
            for (int i = 0; i < R; i++) sum[i] += load(a + i * ld + j) * x;
        },
        [&](int j, int count) {
            for (int i = 0; i < R; i++)
                for (int l = j; l < j + count; l++) rest[i] += a[i * ld + l] * v[l];
        });
    FLATTEN
    for (int i = 0; i < R; i++) out[i] = total<T>(sum[i]) + rest[i];
}
// y += Σ w[i] · row i.
template <class T, int R> static void add_rows(const T *w, const T *a, size_t ld, T *y, int cols) {
    Vec<T> by[R];
    FLATTEN
    for (int i = 0; i < R; i++) by[i] = splat(w[i]);
    along<T>(
        cols,
        [&](int j) {
            Vec<T> sum = by[0] * load(a + j);
            FLATTEN
            for (int i = 1; i < R; i++) sum += by[i] * load(a + i * ld + j);
            store(y + j, load(y + j) + sum);
        },
        [&](int j, int count) {
            for (int i = 0; i < R; i++)
                for (int l = j; l < j + count; l++) y[l] += w[i] * a[i * ld + l];
        });
}
template <class T> static void dot(int rows, const T *a, size_t ld, const T *v, T *out, int cols) {
    int i = 0;
    for (; cols % LANES<T> == 0 && i + LANES<T> <= rows; i += LANES<T>) {
        Vec<T> sum[LANES<T>] = {};
        for (int j = 0; j < cols; j += LANES<T>) {
            const Vec<T> x = load(v + j);
            FLATTEN
            for (int r = 0; r < LANES<T>; r++) sum[r] += load(a + (i + r) * ld + j) * x;
        }
        store(out + i, totals<T>(sum));
    }
    for (; i + 4 <= rows; i += 4) dot_rows<T, 4>(a + i * ld, ld, v, out + i, cols);
    for (; i < rows; i++) dot_rows<T, 1>(a + i * ld, ld, v, out + i, cols);
}
template <class T> static void add(int rows, const T *w, const T *a, size_t ld, T *y, int cols) {
    int i = 0;
    for (; VECTOR_BYTES == 64 && i + 16 <= rows; i += 16) add_rows<T, 16>(w + i, a + i * ld, ld, y, cols);
    for (; i + 8 <= rows; i += 8) add_rows<T, 8>(w + i, a + i * ld, ld, y, cols);
    for (; i + 4 <= rows; i += 4) add_rows<T, 4>(w + i, a + i * ld, ld, y, cols);
    for (; i < rows; i++) add_rows<T, 1>(w + i, a + i * ld, ld, y, cols);
}
template <class T> static void multiply(T *x, const T *y, size_t count) {
    for (size_t j = 0; j < count; j += LANES<T>) store(x + j, load(x + j) * load(y + j));
}
template <class T> static T dot_plain(const T *x, const T *y, int count) {
    Vec<T> sum = {};
    int c = 0;
    for (; c + LANES<T> <= count; c += LANES<T>) sum += load(x + c) * load(y + c);
    T s = total<T>(sum);
    for (; c < count; c++) s += x[c] * y[c];
    return s;
}
// The largest absolute value of all that it saw, NaN if there was NaN or infinity among them.
template <class T> struct Largest {
    Vec<T> top = {}, mark = {};
    void see(Vec<T> x) {
        top = larger<T>(x < Vec<T>{} ? -x : x, top);
        mark += x - x;
    }
    T found() const { return total<T>(mark) == 0 ? most<T>(top) : std::numeric_limits<T>::quiet_NaN(); }
};
// to = by · from, filled up with zeros to whole vectors.
template <class T> static void scaled(T *to, const T *from, T by, int count, Largest<T> *seen = nullptr) {
    const auto put = [&](int c, Vec<T> x) {
        store(to + c, x);
        if (seen) seen->see(x);
    };
    along<T>(
        count, [&](int c) { put(c, splat(by) * load(from + c)); },
        [&](int c, int some) { put(c, splat(by) * load_some(from + c, some, (T)0)); });
}
template <class T> static T largest(const T *x, int count) {
    Largest<T> seen;
    along<T>(
        count, [&](int j) { seen.see(load(x + j)); }, [&](int j, int some) { seen.see(load_some(x + j, some, (T)0)); });
    return seen.found();
}

// Dropout: every entry has its own hash of (seed, head, row, column), so that backward, other thread counts and other
// backends draw the same.
static inline uint32_t mix(uint32_t x) {
    x ^= x >> 16;
    x *= 0x7feb352du;
    x ^= x >> 15;
    x *= 0x846ca68bu;
    x ^= x >> 16;
    return x;
}
struct Dropout {
    uint32_t key;
    uint32_t below;
    double keep;
    Dropout(uint64_t seed, int64_t head, double p)
        : key(mix(mix(mix((uint32_t)seed) ^ (uint32_t)(seed >> 32)) + (uint32_t)head * 0x9E3779B9u)),
          below((uint32_t)std::min(4294967295.0, std::floor(p * 4294967296.0))), keep(p < 1 ? 1 / (1 - p) : 0) {}
    // out = 0 or 1/(1 − p) for one row; columns as they stand in the original matrix.
    template <class T> void row(int64_t i, const int32_t *column, int live, int cols, T *out) const {
        const uint32_t at = mix(key + (uint32_t)i * 0x85EBCA6Bu);
        const T value = (T)keep;
        for (int j = 0; j < live; j++) out[j] = mix(at + (uint32_t)column[j] * 0xC2B2AE35u) < below ? (T)0 : value;
        for (int j = live; j < cols; j++) out[j] = 0;
    }
};
} // namespace ISA
