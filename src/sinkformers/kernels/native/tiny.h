// The operator on very many tiny matrices: one matrix a lane, everything in registers or the first cache. Nothing but the
// scores is kept for backward: making the steps again is cheaper than reading them.
#pragma once
#include "arguments.h"
#include "rows.h"
#include "team.h"

namespace ISA {

// N and M are the sizes, or 0 where they are known only at run time; then they are at most TINY.
template <class T, int N, int M> struct Lanes {
    static constexpr int TINY = 16, ROWS = N ? N : TINY, COLS = M ? M : TINY;
    typedef Vec<T> V;
    const OperatorArguments &args;
    const int n, m, n_iters;
    V *us, *ss;  // a row per step
    V a[ROWS * COLS], v[COLS], tau, rho;
    typename Simd<T>::I live_row[ROWS], live_col[COLS], wrong;

    Lanes(const OperatorArguments &args, char *base) : args(args), n(N ? N : (int)args.n), m(M ? M : (int)args.m), n_iters((int)args.n_iters) {
        Arena arena{base};
        us = arena.take<V>((size_t)(n_iters + 1) / 2 * n);
        ss = arena.take<V>((size_t)(n_iters / 2 + 1) * m);
    }
    static size_t bytes(const OperatorArguments &args) { return 128 + sizeof(V) * ((args.n_iters + 1) / 2 * args.n + (args.n_iters / 2 + 1) * args.m); }

    static V pick(typename Simd<T>::I yes, V x) { return yes ? x : V{}; }
    // `count` matrices from `first` on, turned so that a vector holds one entry of each; missing lanes are zeros.
    void read(const void *from, int64_t first, int count, V *to) const {
        const T *base = (const T *)from + (size_t)first * n * m;
        for (int k = 0; k < n * m; k++) {
            V x = {};
            for (int l = 0; l < count; l++) x[l] = base[(size_t)l * n * m + k];
            to[k] = x;
        }
    }
    void write(void *to, int64_t first, int count, const V *from) const {
        T *base = (T *)to + (size_t)first * n * m;
        for (int k = 0; k < n * m; k++)
            for (int l = 0; l < count; l++) base[(size_t)l * n * m + k] = from[k][l];
    }
    void begin(int64_t first, int count) {
        const V lowest = splat(-std::numeric_limits<T>::infinity());
        read(args.scores, first, count, a);
        tau = splat((T)1);
        if (args.tau) for (int l = 0; l < count; l++) tau[l] = ((const T *)args.tau)[first + l];
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
            rows += pick(alive, splat((T)1));
            top = top == lowest ? V{} : top;
            for (int j = 0; j < m; j++) a[i * m + j] = exponential(a[i * m + j] - top);
        }
        for (int j = 0; j < m; j++) {
            cols += pick(live_col[j], splat((T)1));
            v[j] = splat((T)1);
        }
        rho = rows / (cols == V{} ? splat((T)1) : cols);
    }
    V scaling(V s) const {
        V x = rho / s;
        if (args.tau) for (int l = 0; l < LANES<T>; l++) x[l] = std::exp(tau[l] * std::log(x[l]));
        return x;
    }
    void watch(const V *u) {
        const T limit = sizeof(T) == 4 ? (T)1e30 : (T)1e280;
        V high_u = {}, high_v = {}, mark = {};
        for (int i = 0; i < n; i++) { high_u = larger<T>(u[i], high_u); mark += u[i] - u[i]; }
        for (int j = 0; j < m; j++) { high_v = larger<T>(v[j], high_v); mark += v[j] - v[j]; }
        const V reach = high_u * high_v;
        wrong |= (rho != V{}) & ~((reach < splat(limit)) & (mark == V{}));
    }
    void iterate() {
        const V *u = us;
        for (int step = 0; step < n_iters; step++) {
            const int half = step / 2;
            if (step % 2 == 0) {
                V *to = us + (size_t)half * n;
                for (int i = 0; i < n; i++) {
                    V sum = {};
                    for (int j = 0; j < m; j++) sum += a[i * m + j] * v[j];
                    to[i] = pick(live_row[i], splat((T)1) / sum);
                }
                u = to;
            } else {
                for (int j = 0; j < m; j++) {
                    V sum = {};
                    for (int i = 0; i < n; i++) sum += a[i * m + j] * u[i];
                    ss[(size_t)half * m + j] = sum;
                    v[j] = pick(live_col[j], scaling(sum));
                }
            }
            watch(u);
        }
    }
    void tell(int64_t first, int count) const {
        for (int l = 0; l < count; l++) args.safe[first + l] = !wrong[l];
    }
    void forward(int64_t first, int count) {
        begin(first, count);
        iterate();
        const V *u = us + (size_t)((n_iters - 1) / 2) * n;
        for (int i = 0; i < n; i++)
            for (int j = 0; j < m; j++) a[i * m + j] *= u[i] * v[j];
        write(args.weights, first, count, a);
        tell(first, count);
    }
    void backward(int64_t first, int count) {
        begin(first, count);
        iterate();
        V grad[ROWS * COLS], df[ROWS], dg[COLS], d_tau = {};
        const V *last = us + (size_t)((n_iters - 1) / 2) * n;
        read(args.d_weights, first, count, grad);
        for (int i = 0; i < n; i++) df[i] = V{};
        for (int j = 0; j < m; j++) dg[j] = V{};
        for (int i = 0; i < n; i++)
            for (int j = 0; j < m; j++) {
                V &g = grad[i * m + j];
                g = a[i * m + j] == V{} ? V{} : g * (a[i * m + j] * last[i] * v[j]);
                df[i] += g;
                dg[j] += g;
            }
        for (int step = n_iters - 1; step >= 0; step--) {
            const V *u = us + (size_t)(step / 2) * n;
            if (step % 2 == 0) {
                for (int j = 0; j < m; j++) {
                    const V y = step ? pick(live_col[j], scaling(ss[(size_t)(step / 2 - 1) * m + j])) : splat((T)1);
                    V back = {};
                    for (int i = 0; i < n; i++) {
                        const V change = a[i * m + j] * df[i] * u[i] * y;
                        grad[i * m + j] -= change;
                        back += change;
                    }
                    dg[j] -= back;
                }
                for (int i = 0; i < n; i++) df[i] = V{};
            } else {
                V y[COLS];
                for (int j = 0; j < m; j++) {
                    const V s = ss[(size_t)(step / 2) * m + j];
                    y[j] = pick(live_col[j], tau * dg[j] / s);
                    if (args.tau) for (int l = 0; l < LANES<T>; l++) if (live_col[j][l]) d_tau[l] -= dg[j][l] * std::log(s[l] / rho[l]);
                    dg[j] = V{};
                }
                for (int i = 0; i < n; i++) {
                    V back = {};
                    for (int j = 0; j < m; j++) {
                        const V change = a[i * m + j] * u[i] * y[j];
                        grad[i * m + j] -= change;
                        back += change;
                    }
                    df[i] -= back;
                }
            }
        }
        write(args.d_scores, first, count, grad);
        for (int l = 0; l < count; l++) ((T *)args.d_tau)[first + l] = d_tau[l];
        tell(first, count);
    }
};
}  // namespace ISA
