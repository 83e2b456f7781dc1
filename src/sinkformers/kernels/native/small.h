// The operator on many small matrices, a matrix in each lane: no sum is ever taken across a vector. The kernel and the
// gradient are in the workspace, which the second cache holds. The state is that of operator.h; or nothing is saved,
// and backward repeats the steps.
#pragma once
#include "lanes.h"
#include <type_traits>

namespace ISA {

template <class T> struct SmallMatrices {
    static constexpr int MOST = SMALL, BLOCK = 8;
    typedef Vec<T> V;
    typedef typename Simd<T>::I Valid;
    const OperatorArguments &args;
    const bool saves; // the state
    const int n, m, size, row_steps, col_steps;
    V *a, *grad;         // the kernel; the gradient of the weights, and what becomes of it
    V *us, *vs, *ss, *r; // a row per step, vs beginning with ones, ss the column sums; and the rows' maxima
    V *xs, *ys;          // the terms of row steps and of column steps
    V *sum, *dg, *df;    // of columns, of columns, of rows
    Valid row[MOST], col[MOST], wrong;
    V tau, rho, sum_u;

    SmallMatrices(const OperatorArguments &args, bool backward, bool saves, char *base, size_t *used = nullptr)
        : args(args), saves(saves), n((int)args.n), m((int)args.m), size(n * m), row_steps((int)(args.n_iters + 1) / 2),
          col_steps((int)args.n_iters / 2) {
        Arena arena{base};
        a = arena.take<V>(size);
        us = arena.take<V>((size_t)row_steps * n);
        vs = arena.take<V>((size_t)(col_steps + 1) * m);
        ss = arena.take<V>((size_t)col_steps * m);
        r = arena.take<V>(n);
        sum = arena.take<V>(m);
        if (backward) {
            grad = arena.take<V>(size);
            xs = arena.take<V>((size_t)row_steps * n);
            ys = arena.take<V>((size_t)col_steps * m);
            dg = arena.take<V>(m);
            df = arena.take<V>(n);
        }
        if (used) *used = arena.used;
    }
    static size_t bytes(const OperatorArguments &args, bool backward, bool saves) {
        size_t used;
        SmallMatrices(args, backward, saves, nullptr, &used);
        return used;
    }
    // f(i, R) for blocks of R rows, R a constant.
    template <class F> void blocks(F &&f) const {
        int i = 0;
        for (; i + BLOCK <= n; i += BLOCK) f(i, std::integral_constant<int, BLOCK>());
        for (; i < n; i++) f(i, std::integral_constant<int, 1>());
    }
    // to[r] = row r · v, and sum += Σ w[r] · row r, for R rows of the kernel.
    template <int R> void dots(const V *rows, const V *v, V *to) const {
        V total[R] = {};
        for (int j = 0; j < m; j++) {
            const V x = v[j];
            FLATTEN
            for (int r = 0; r < R; r++) total[r] += rows[r * m + j] * x;
        }
        FLATTEN
        for (int r = 0; r < R; r++) to[r] = total[r];
    }
    template <int R> void add(const V *rows, const V *w) const {
        for (int j = 0; j < m; j++) {
            V x = w[0] * rows[j];
            FLATTEN
            for (int r = 1; r < R; r++) x += w[r] * rows[r * m + j];
            sum[j] += x;
        }
    }
    void clear(V *x, int count) const { std::fill(x, x + count, V{}); }

    V scaling(V s) const {
        V x = rho / s;
        if (args.tau)
            for (int l = 0; l < LANES<T>; l++) x[l] = std::exp(tau[l] * std::log(x[l]));
        return x;
    }
    // Whether Σu · Σv stayed in range; as they are positive it bounds every product, and NaN shows in it.
    void watch(V sum_v) { wrong |= ~(sum_u * sum_v < splat((T)args.safe_product)); }

    // The scores, and what is valid.
    void read(int64_t first, int count) {
        const V lowest = splat(-std::numeric_limits<T>::infinity()), one = splat((T)1);
        const Valid none = {};
        read_lanes<T>(args.scores, first, count, size, a);
        tau = one;
        if (args.tau)
            for (int l = 0; l < count; l++) tau[l] = ((const T *)args.tau)[first + l];
        V rows = {}, cols = {};
        wrong = none;
        std::fill(col, col + m, none);
        for (int i = 0; i < n; i++) {
            V top = lowest;
            Valid valid = none;
            for (int j = 0; j < m; j++) {
                const V x = a[i * m + j];
                const Valid in = x != lowest;
                valid |= in;
                col[j] |= in;
                top = larger<T>(x, top);
            }
            row[i] = valid;
            rows += pick<T>(valid, one);
            r[i] = top == lowest ? V{} : top;
        }
        for (int j = 0; j < m; j++) {
            vs[j] = one;
            cols += pick<T>(col[j], one);
        }
        rho = rows / (cols == V{} ? one : cols);
    }
    // All steps; the first makes the kernel.
    void iterate() {
        clear(sum, m);
        sum_u = V{};
        for (int i = 0; i < n; i++) {
            V *x = a + i * m, total = {};
            for (int j = 0; j < m; j++) total += x[j] = exponential(x[j] - r[i]);
            const V u = us[i] = pick<T>(row[i], splat((T)1) / total);
            sum_u += u;
            if (col_steps) add<1>(x, &u);
        }
        watch(splat((T)m));
        for (int step = 0; step < col_steps; step++) {
            V *s = ss + (size_t)step * m, *v = vs + (size_t)(step + 1) * m, sum_v = {};
            for (int j = 0; j < m; j++) {
                s[j] = sum[j];
                v[j] = pick<T>(col[j], scaling(s[j]));
                sum_v += v[j];
            }
            watch(sum_v);
            if (step + 1 == row_steps) break;
            const bool more = step + 1 < col_steps;
            V *u = us + (size_t)(step + 1) * n;
            clear(sum, m);
            sum_u = V{};
            blocks([&](int i, auto rows) {
                const V *x = a + (size_t)i * m;
                dots<rows>(x, v, u + i);
                for (int k = i; k < i + rows; k++) sum_u += u[k] = pick<T>(row[k], splat((T)1) / u[k]);
                if (more) add<rows>(x, u + i);
            });
            watch(sum_v);
        }
        wrong &= rho != V{};
    }
    // The kernel and the scalings from the state.
    void restore(int64_t first, int count) {
        read_lanes<T>(args.u, first, count, row_steps * n, us);
        read_lanes<T>(args.s, first, count, col_steps * m, ss);
        for (int step = 0; step < col_steps; step++)
            for (int j = 0; j < m; j++)
                vs[(size_t)(step + 1) * m + j] = pick<T>(col[j], scaling(ss[(size_t)step * m + j]));
        for (int i = 0; i < n; i++)
            for (int j = 0; j < m; j++) a[i * m + j] = exponential(a[i * m + j] - r[i]);
    }
    const V *last_u() const { return us + (size_t)(row_steps - 1) * n; }
    const V *last_v() const { return vs + (size_t)col_steps * m; }
    void tell(int64_t first, int count) const {
        for (int l = 0; l < count; l++) args.safe[first + l] = !wrong[l];
    }
    void forward(int64_t first, int count) {
        read(first, count);
        iterate();
        const V *v = last_v();
        for (int i = 0; i < n; i++)
            for (int j = 0; j < m; j++) a[i * m + j] *= last_u()[i] * v[j];
        write_lanes<T>(args.weights, first, count, size, a);
        tell(first, count);
        if (!saves) return;
        write_lanes<T>(args.u, first, count, row_steps * n, us);
        write_lanes<T>(args.s, first, count, col_steps * m, ss);
        write_lanes<T>(args.r, first, count, n, r);
    }

    // A relaxed column step: y = τ·dg/s, and the gradient of τ.
    __attribute__((noinline)) void relaxed_adjoint(const V *s, V *y, V &d_tau) const {
        for (int j = 0; j < m; j++) {
            y[j] = pick<T>(col[j], tau * dg[j] / s[j]);
            for (int l = 0; l < LANES<T>; l++)
                if (col[j][l]) d_tau[l] -= dg[j][l] * std::log(s[j][l] / rho[l]);
        }
    }
    // g = dW∘P in place of dW, its sums, and the last row step where that came last.
    void through_weights() {
        const bool ends_on_rows = row_steps > col_steps;
        const V *u = last_u(), *v = last_v();
        V *x = xs + (size_t)(row_steps - 1) * n;
        clear(dg, m);
        clear(sum, m);
        for (int i = 0; i < n; i++) {
            V *g = grad + i * m, total = {};
            const V *kernel = a + i * m, by = u[i];
            for (int j = 0; j < m; j++) {
                g[j] = pick<T>(kernel[j] != V{}, g[j] * (kernel[j] * by * v[j]));
                total += g[j];
                dg[j] += g[j];
            }
            df[i] = total;
            if (!ends_on_rows) continue;
            x[i] = total * by;
            add<1>(kernel, x + i);
        }
        for (int j = 0; ends_on_rows && j < m; j++) dg[j] -= v[j] * sum[j];
    }
    // Every step leaves one term x·y of a sum S, and the gradient is g − A∘S.
    void backward(int64_t first, int count) {
        read(first, count);
        if (saves) restore(first, count);
        else iterate();
        read_lanes<T>(args.d_weights, first, count, size, grad);
        through_weights();
        V d_tau = {};
        const V per_rho = splat((T)1) / rho;
        for (int step = col_steps - 1; step >= 0; step--) {
            const bool first_step = step == row_steps - 1; // nothing came after this row step but the column step
            const V *before = vs + (size_t)step * m, *after = before + m, *u = us + (size_t)step * n;
            V *x = xs + (size_t)step * n, *y = ys + (size_t)step * m;
            if (args.tau) relaxed_adjoint(ss + (size_t)step * m, y, d_tau);
            else // 1/s is v/ρ
                for (int j = 0; j < m; j++) y[j] = dg[j] * after[j] * per_rho;
            clear(sum, m);
            blocks([&](int i, auto rows) {
                const V *kernel = a + (size_t)i * m;
                V through[rows];
                dots<rows>(kernel, y, through);
                for (int r = 0; r < rows; r++)
                    x[i + r] = ((first_step ? df[i + r] : V{}) - u[i + r] * through[r]) * u[i + r];
                if (step) add<rows>(kernel, x + i);
            });
            for (int j = 0; j < m; j++) dg[j] = -before[j] * sum[j];
        }
        finish();
        write_lanes<T>(args.d_scores, first, count, size, grad);
        for (int l = 0; l < count; l++) ((T *)args.d_tau)[first + l] = d_tau[l];
        tell(first, count);
    }
    // s += x·y over some steps, for R rows and C columns.
    template <int R, int C> void accumulate(V (&s)[R][C], int steps, const V *x, const V *y) const {
        for (int k = 0; k < steps; k++, x += n, y += m) {
            FLATTEN
            for (int i = 0; i < R; i++) FLATTEN
            for (int j = 0; j < C; j++) s[i][j] += x[i] * y[j];
        }
    }
    // grad = g − A∘S for R rows and C columns.
    template <int R, int C> void subtract(int i0, int j0, V &mark) {
        V s[R][C] = {};
        accumulate<R, C>(s, row_steps, xs + i0, vs + j0);
        accumulate<R, C>(s, col_steps, us + i0, ys + j0);
        FLATTEN
        for (int i = 0; i < R; i++) FLATTEN
        for (int j = 0; j < C; j++) {
            const size_t at = (size_t)(i0 + i) * m + j0 + j;
            mark += pick<T>(a[at] != V{}, s[i][j] - s[i][j]);
            grad[at] = pick<T>(a[at] != V{}, grad[at] - a[at] * s[i][j]);
        }
    }
    void finish() {
        constexpr int WIDE = VECTOR_BYTES == 64 ? 4 : 2; // as many sums as the registers hold
        V mark = {};
        int i = 0;
        for (; i + 4 <= n; i += 4) {
            int j = 0;
            for (; j + WIDE <= m; j += WIDE) subtract<4, WIDE>(i, j, mark);
            for (; j < m; j++) subtract<4, 1>(i, j, mark);
        }
        for (; i < n; i++)
            for (int j = 0; j < m; j++) subtract<1, 1>(i, j, mark);
        wrong |= mark != V{};
    }
};
} // namespace ISA
