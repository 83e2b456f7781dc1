// The operator on very many tiny matrices, a matrix in each lane as in small.h: here the sizes are constants, so that
// everything stays in registers or the first cache.
#pragma once
#include "lanes.h"

namespace ISA {

template <class T, int N, int M> struct TinyMatrices {
    static constexpr int n = N, m = M, SIZE = N * M;
    typedef Vec<T> V;
    const OperatorArguments &args;
    const int n_iters;
    V *us, *vs, *ss; // a row per step; ss only where there is a tau
    V a[SIZE], v[M], tau, rho;
    typename Simd<T>::I live_row[N], live_col[M], wrong;

    TinyMatrices(const OperatorArguments &args, char *base) : args(args), n_iters((int)args.n_iters) {
        Arena arena{base};
        us = arena.take<V>((size_t)(n_iters + 1) / 2 * n);
        vs = arena.take<V>((size_t)(n_iters / 2 + 1) * m);
        ss = arena.take<V>((size_t)(n_iters / 2 + 1) * m);
    }
    static size_t bytes(const OperatorArguments &args) {
        return 192 + sizeof(V) * ((args.n_iters + 1) / 2 * args.n + 2 * (args.n_iters / 2 + 1) * args.m);
    }

    // f(0) to f(count − 1), unrolled: then everything stays in registers.
    template <int count, class F> static void repeat(F &&f) {
        FLATTEN
        for (int k = 0; k < count; k++) f(k);
    }
    template <class F> void each_row(F &&f) const { repeat<N>(f); }
    template <class F> void each_column(F &&f) const { repeat<M>(f); }
    template <class F> void each_entry(F &&f) const { repeat<SIZE>(f); }

    void begin(int64_t first, int count) {
        const V lowest = splat(-std::numeric_limits<T>::infinity());
        read_lanes<T>(args.scores, first, count, SIZE, a);
        tau = splat((T)1);
        if (args.tau)
            for (int l = 0; l < count; l++) tau[l] = ((const T *)args.tau)[first + l];
        V rows = {}, cols = {};
        const typename Simd<T>::I none = {};
        wrong = none;
        for (int j = 0; j < m; j++) live_col[j] = none;
        for (int i = 0; i < n; i++) {
            V top = lowest;
            typename Simd<T>::I alive = none;
            for (int j = 0; j < m; j++) {
                const V x = a[i * m + j];
                const typename Simd<T>::I in = x != lowest;
                alive |= in;
                live_col[j] |= in;
                top = larger<T>(x, top);
            }
            live_row[i] = alive;
            rows += pick<T>(alive, splat((T)1));
            top = top == lowest ? V{} : top;
            for (int j = 0; j < m; j++) a[i * m + j] = exponential(a[i * m + j] - top);
        }
        for (int j = 0; j < m; j++) cols += pick<T>(live_col[j], splat((T)1));
        rho = rows / (cols == V{} ? splat((T)1) : cols);
    }
    V scaling(V s) const {
        V x = rho / s;
        if (args.tau)
            for (int l = 0; l < LANES<T>; l++) x[l] = std::exp(tau[l] * std::log(x[l]));
        return x;
    }
    // Whether Σu · Σv stayed in range; as they are positive it bounds every product, and NaN shows in it.
    void watch(V sum_u, V sum_v) {
        const T limit = (T)args.safe_product;
        wrong |= ~(sum_u * sum_v < splat(limit));
    }
    void iterate() {
        V kernel[SIZE], u[N] = {}, v[M], sum_u = {}, sum_v = {};
        each_entry([&](int k) { kernel[k] = a[k]; });
        each_column([&](int j) {
            vs[j] = v[j] = splat((T)1);
            sum_v += v[j];
        });
        for (int step = 0; step < n_iters; step++) {
            const int half = step / 2;
            if (step % 2 == 0) {
                V *to = us + (size_t)half * n;
                sum_u = V{};
                each_row([&](int i) {
                    V sum = {};
                    each_column([&](int j) { sum += kernel[i * m + j] * v[j]; });
                    to[i] = u[i] = pick<T>(live_row[i], splat((T)1) / sum);
                    sum_u += u[i];
                });
            } else {
                sum_v = V{};
                each_column([&](int j) {
                    V sum = {};
                    each_row([&](int i) { sum += kernel[i * m + j] * u[i]; });
                    if (args.tau) ss[(size_t)half * m + j] = sum;
                    vs[(size_t)(half + 1) * m + j] = v[j] = pick<T>(live_col[j], scaling(sum));
                    sum_v += v[j];
                });
            }
            watch(sum_u, sum_v);
        }
        wrong &= rho != V{};
        each_column([&](int j) { this->v[j] = v[j]; });
    }
    void tell(int64_t first, int count) const {
        for (int l = 0; l < count; l++) args.safe[first + l] = !wrong[l];
    }
    void forward(int64_t first, int count) {
        begin(first, count);
        iterate();
        const V *u = us + (size_t)((n_iters - 1) / 2) * n;
        each_row([&](int i) { each_column([&](int j) { a[i * m + j] *= u[i] * v[j]; }); });
        write_lanes<T>(args.weights, first, count, SIZE, a);
        tell(first, count);
    }
    // A relaxed column step: y = τ·dg/s, and the gradient of τ.
    __attribute__((noinline)) void relaxed_adjoint(int half, const V *dg, V *y, V &d_tau) const {
        each_column([&](int j) {
            const V s = ss[(size_t)half * m + j];
            y[j] = pick<T>(live_col[j], tau * dg[j] / s);
            for (int l = 0; l < LANES<T>; l++)
                if (live_col[j][l]) d_tau[l] -= dg[j][l] * std::log(s[l] / rho[l]);
        });
    }
    // Every step leaves one term x·y of a sum S, and the gradient is g∘P − A∘S.
    void backward(int64_t first, int count) {
        begin(first, count);
        iterate();
        V grad[SIZE], terms[SIZE] = {}, df[N] = {}, dg[M] = {}, x[N], y[M], d_tau = {};
        const V *last = us + (size_t)((n_iters - 1) / 2) * n;
        read_lanes<T>(args.d_weights, first, count, SIZE, grad);
        each_row([&](int i) {
            each_column([&](int j) {
                V &g = grad[i * m + j];
                g = pick<T>(a[i * m + j] != V{}, g * (a[i * m + j] * last[i] * v[j]));
                df[i] += g;
                dg[j] += g;
            });
        });
        const V per_rho = splat((T)1) / rho;
        for (int step = n_iters - 1; step >= 0; step--) {
            const V *u = us + (size_t)(step / 2) * n, *before = vs + (size_t)(step / 2) * m, *after = before + m;
            if (step % 2 == 0) { // rows: x = df·u, y = v
                each_row([&](int i) { x[i] = df[i] * u[i]; });
                each_row([&](int i) { df[i] = V{}; });
                each_column([&](int j) {
                    const V right = before[j];
                    V back = {};
                    each_row([&](int i) {
                        terms[i * m + j] += x[i] * right;
                        back += a[i * m + j] * x[i];
                    });
                    dg[j] -= back * right;
                });
            } else { // columns: x = u, y = τ·dg/s, where without a relaxation 1/s is v/ρ
                if (args.tau) relaxed_adjoint(step / 2, dg, y, d_tau);
                else each_column([&](int j) { y[j] = dg[j] * after[j] * per_rho; });
                each_column([&](int j) { dg[j] = V{}; });
                each_row([&](int i) {
                    const V left = u[i];
                    V back = {};
                    each_column([&](int j) {
                        terms[i * m + j] += left * y[j];
                        back += a[i * m + j] * y[j];
                    });
                    df[i] -= back * left;
                });
            }
        }
        V mark = {};
        each_entry([&](int k) {
            mark += pick<T>(a[k] != V{}, terms[k] - terms[k]);
            grad[k] = pick<T>(a[k] != V{}, grad[k] - a[k] * terms[k]);
        });
        wrong |= mark != V{};
        write_lanes<T>(args.d_scores, first, count, SIZE, grad);
        for (int l = 0; l < count; l++) ((T *)args.d_tau)[first + l] = d_tau[l];
        tell(first, count);
    }
};
} // namespace ISA
