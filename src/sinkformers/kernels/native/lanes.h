// Matrices of one size, a matrix in each lane of the vectors: a vector holds the same entry of all of them.
#pragma once
#include "arguments.h"
#include "rows.h"
#include "team.h"

namespace ISA {

template <class T> static inline Vec<T> pick(typename Simd<T>::I yes, Vec<T> x) { return yes ? x : Vec<T>{}; }
// `count` matrices of `size` entries, from `first` on; missing lanes are zeros.
template <class T> static inline void read_lanes(const void *from, int64_t first, int count, int size, Vec<T> *to) {
    constexpr int L = LANES<T>;
    const T *base = (const T *)from + (size_t)first * size;
    int k = 0;
    for (; count == L && k + L <= size; k += L) {
        FLATTEN
        for (int l = 0; l < L; l++) to[k + l] = load(base + (size_t)l * size + k);
        transpose<T>(to + k);
    }
    for (; k < size; k++) {
        Vec<T> x = {};
        for (int l = 0; l < count; l++) x[l] = base[(size_t)l * size + k];
        to[k] = x;
    }
}
// The other way round; `from` is used up.
template <class T> static inline void write_lanes(void *to, int64_t first, int count, int size, Vec<T> *from) {
    constexpr int L = LANES<T>;
    T *base = (T *)to + (size_t)first * size;
    int k = 0;
    for (; count == L && k + L <= size; k += L) {
        transpose<T>(from + k);
        FLATTEN
        for (int l = 0; l < L; l++) store(base + (size_t)l * size + k, from[k + l]);
    }
    for (; k < size; k++)
        for (int l = 0; l < count; l++) base[(size_t)l * size + k] = from[k][l];
}
} // namespace ISA
