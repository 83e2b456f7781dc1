// The operator alone: scores in, weights out, and the gradient back. The kernel of a matrix that the caches hold is
// made in the workspace, with rows of whole vectors; that of a larger one in the result's own memory. The last pass
// turns it into weights, or into the gradient.
#pragma once
#include "arguments.h"
#include "rows.h"
#include "team.h"

namespace ISA {

template <class T> struct Matrix {
    const OperatorArguments &args;
    const Team team;
    const int n, m, mp, rows_steps, col_steps, terms;
    const bool cached;  // the kernel is in the workspace
    const int cols, ld; // columns of the kernel, and the length of its rows
    static constexpr int BLOCK = 4 * MR;
    static constexpr size_t CACHE = 256 * 1024;
    Arena arena;
    int64_t index;
    T tau, aim; // aim: what a column sums to, where there are no targets
    bool relaxed;
    T *v, *vprev, *part, *aside, *sum, *dg, *alpha, *x, *y, *scratch, *notes, *own;

    Matrix(const OperatorArguments &args, Team team, bool backward, char *base)
        : args(args), team(team), n((int)args.n), m((int)args.m), mp(round_up(m, COLUMNS<T>)),
          rows_steps((int)(args.n_iters + 1) / 2), col_steps((int)args.n_iters / 2), terms((int)args.n_iters),
          cached((size_t)n * mp * sizeof(T) <= CACHE), cols(cached ? mp : m), ld(cols), arena{base} {
        v = arena.take<T>(mp);
        part = arena.take<T>((size_t)team.size * mp);
        aside = arena.take<T>((size_t)team.size * mp);
        sum = arena.take<T>(mp);
        notes = arena.take<T>((size_t)team.size * (terms + 4));
        own = cached ? arena.take<T>((size_t)n * mp) : nullptr;
        if (backward) {
            const size_t panels = (mp + PANEL<T> - 1) / PANEL<T>;
            vprev = arena.take<T>(mp);
            dg = arena.take<T>(mp);
            alpha = arena.take<T>(n);
            x = arena.take<T>((size_t)n * terms);
            y = arena.take<T>(panels * PANEL<T> * terms);
            T *products = arena.take<T>((size_t)team.size * BLOCK * mp);
            scratch = products ? products + (size_t)team.id * BLOCK * mp : nullptr;
        }
    }
    static size_t bytes(const OperatorArguments &args, int size, bool backward) {
        return Matrix(args, Team{0, size, nullptr}, backward, nullptr).arena.used;
    }

    void enter(int64_t at) {
        index = at;
        relaxed = args.tau != nullptr;
        tau = relaxed ? ((const T *)args.tau)[index] : 1;
        for (int j = m; j < mp; j++) v[j] = 0; // by every member, alike
    }
    // Row i of a tensor of matrices.
    T *row(void *base, int i) const { return (T *)base + ((size_t)index * n + i) * m; }
    const T *scores(int i) const { return row(args.scores, i); }
    T *saved(void *base, int steps, int step, int count) const {
        return (T *)base + ((size_t)index * steps + step) * count;
    }
    T weight(int i) const { return args.row_weight ? ((const T *)args.row_weight)[(size_t)index * n + i] : 1; }
    T *own_part() const { return part + (size_t)team.id * mp; }
    T *note() const { return notes + (size_t)team.id * (terms + 4); }
    // What column j aims at: its mass, or rows over columns, of valid ones.
    T target(int j) const { return args.col_target ? ((const T *)args.col_target)[(size_t)index * m + j] : aim; }
    // A sum of zero is an empty column, and so is a first scaling of zero an empty row.
    void count_valid() {
        const auto count = [](const T *x, int size) {
            typename Simd<T>::I found = {};
            int number = 0, j = 0;
            for (; j + LANES<T> <= size; j += LANES<T>) found -= load(x + j) != Vec<T>{};
            for (; j < size; j++) number += x[j] != 0;
            for (int l = 0; l < LANES<T>; l++) number += (int)found[l];
            return number;
        };
        const int valid_cols = count(saved(args.s, col_steps, 0, m), m);
        aim = valid_cols ? (T)count(saved(args.u, rows_steps, 0, n), n) / (T)valid_cols : 1;
    }
    // exp(score − shift) of some rows and their sums, with zeros in the columns that fill up a vector.
    void make_rows(int i0, int rows, T *to, const T *shifts, T *sums) const {
        int i = 0;
        for (; i + 2 <= rows; i += 2)
            exponentiate_rows<T, 2>(scores(i0 + i), m, to + (size_t)i * ld, ld, shifts + i, sums + i, m);
        for (; i < rows; i++)
            exponentiate_rows<T, 1>(scores(i0 + i), m, to + (size_t)i * ld, ld, shifts + i, sums + i, m);
        for (i = 0; m < cols && i < rows; i++) std::fill(to + (size_t)i * ld + m, to + (size_t)i * ld + cols, (T)0);
    }
    template <class F> void blocks(F &&f) const {
        int from, to;
        team.share(n, from, to);
        Aside<T> sums(own_part(), aside + (size_t)team.id * mp, cols, to - from);
        for (int i = from; i < to; i += BLOCK) {
            f(i, std::min(BLOCK, to - i));
            sums.added(BLOCK);
        }
        sums.finish();
    }
    // Always the same share of the columns: what a member wrote it may read before the others are done.
    void share_columns(int &from, int &to) const {
        team.share(mp, from, to, 4);
        to = std::min(to, m);
        from = std::min(from, to);
    }
    // v after a column step, and 0 for an empty column; or ones before all steps.
    void put_v(T *to, int step) const {
        int from, end;
        share_columns(from, end);
        if (step < 0) return std::fill(to + from, to + end, (T)1);
        const T *s = saved(args.s, col_steps, step, m);
        if (relaxed)
            for (int j = from; j < end; j++) to[j] = s[j] == 0 ? 0 : std::exp(tau * std::log(target(j) / s[j]));
        else if (args.col_target)
            for (int j = from; j < end; j++) to[j] = s[j] == 0 ? 0 : target(j) / s[j];
        else {
            const T by = aim;
            for (int j = from; j < end; j++) to[j] = s[j] == 0 ? 0 : by / s[j];
        }
    }
    static T bigger(T a, T b) { return a != a || b <= a ? a : b; } // NaN stays
};

template <class T> struct MatrixForward : Matrix<T> {
    MatrixForward(const OperatorArguments &args, Team team, char *base) : Matrix<T>(args, team, false, base) {}
    T *kernel(int i) const {
        return this->cached ? this->own + (size_t)i * this->ld : this->row(this->args.weights, i);
    }
    T *u(int step) const { return this->saved(this->args.u, this->rows_steps, step, this->n); }

    void run(int64_t at) {
        this->enter(at);
        const int n_iters = this->terms;
        std::fill(this->note(), this->note() + n_iters + 4, (T)0);
        this->put_v(this->v, -1);
        this->team.barrier();
        for (int step = 0; step < n_iters; step += 2) {
            row_pass(step / 2, step + 1 >= n_iters);
            if (step + 1 < n_iters) {
                gather<T>(this->team, this->part, this->mp,
                          this->saved(this->args.s, this->col_steps, step / 2, this->m), this->m);
                if (step == 0) this->count_valid();
                this->put_v(this->v, step / 2);
                int from, to;
                this->share_columns(from, to);
                this->note()[step + 1] = largest(this->v + from, to - from);
                this->team.barrier();
                if (step + 2 >= n_iters) finish(step / 2);
            }
        }
        this->team.barrier();
        if (this->team.id == 0) this->args.safe[this->index] = safe();
        this->team.barrier();
    }
    // A row step, and the column sums after it; the first makes the kernel, the last makes the weights.
    void row_pass(int step, bool last) {
        T *sum = this->own_part();
        std::fill(sum, sum + this->cols, (T)0);
        this->blocks([&](int i0, int rows) {
            T *a = kernel(i0), *scale = u(step) + i0, weighted[Matrix<T>::BLOCK];
            if (step == 0) first(i0, rows);
            else {
                dot(rows, a, this->ld, this->v, scale, this->cols);
                const T *before = u(0) + i0;
                for (int i = 0; i < rows; i++) scale[i] = scale[i] == 0 && before[i] == 0 ? 0 : 1 / scale[i];
            }
            this->note()[2 * step] = Matrix<T>::bigger(this->note()[2 * step], largest(scale, rows));
            if (last) return finish_rows(i0, rows, step);
            if (!this->args.row_weight) return add(rows, scale, a, this->ld, sum, this->cols);
            for (int i = 0; i < rows; i++) weighted[i] = scale[i] * this->weight(i0 + i);
            add(rows, weighted, a, this->ld, sum, this->cols);
        });
    }
    // The kernel, and the scalings of the first step; 0 for an empty row.
    void first(int i0, int rows) {
        T *r = this->saved(this->args.r, 1, 0, this->n) + i0, *scale = u(0) + i0;
        for (int i = 0; i < rows; i++) {
            const T top = row_max(this->scores(i0 + i), this->m);
            r[i] = top == -std::numeric_limits<T>::infinity() ? 0 : top;
        }
        this->make_rows(i0, rows, kernel(i0), r, scale);
        for (int i = 0; i < rows; i++) scale[i] = scale[i] == 0 ? 0 : 1 / scale[i];
    }
    void finish(int step) {
        this->blocks([&](int i0, int rows) { finish_rows(i0, rows, step); });
    }
    void finish_rows(int i0, int rows, int step) {
        for (int i = i0; i < i0 + rows; i++) {
            const T *a = kernel(i), *v = this->v;
            T *to = this->row(this->args.weights, i);
            const Vec<T> by = splat(u(step)[i]);
            along<T>(
                this->m, [&](int j) { store(to + j, load(a + j) * (by * load(v + j))); },
                [&](int j, int count) {
                    for (int l = j; l < j + count; l++) to[l] = a[l] * (by[0] * v[l]);
                });
        }
    }
    // Whether max u · max v stayed in range, and no valid column has a sum of zero. NaN is not safe.
    bool safe() const {
        const T limit = (T)this->args.safe_product;
        T u = 0, v = 1;
        bool any = false;
        for (int i = 0; i < this->n && !any; i++) any = this->saved(this->args.u, this->rows_steps, 0, this->n)[i] != 0;
        if (!any) return true;
        for (int step = 0; step < this->terms; step++) {
            T top = 0;
            for (int t = 0; t < this->team.size; t++)
                top = Matrix<T>::bigger(top, this->notes[(size_t)t * (this->terms + 4) + step]);
            (step % 2 ? v : u) = top;
            if (!(u * v < limit)) return false;
        }
        const T *s = this->col_steps ? this->saved(this->args.s, this->col_steps, 0, this->m) : nullptr;
        for (int j = 0; s && j < this->m; j++)
            for (int i = 0; s[j] == 0 && i < this->n; i++)
                if (this->scores(i)[j] != -std::numeric_limits<T>::infinity()) return false;
        return true;
    }
};

template <class T> struct MatrixBackward : Matrix<T> {
    T d_tau, left, right;
    int term;
    MatrixBackward(const OperatorArguments &args, Team team, char *base) : Matrix<T>(args, team, true, base) {}
    T *kernel(int i) const {
        return this->cached ? this->own + (size_t)i * this->ld : this->row(this->args.d_scores, i);
    }
    const T *d_weights(int i) const { return this->row(this->args.d_weights, i); }
    const T *u(int step) const { return this->saved(this->args.u, this->rows_steps, step, this->n); }
    T *y_term(int j, int t) const {
        return this->y + (size_t)(j / PANEL<T>)*PANEL<T> * this->terms + (size_t)t * PANEL<T> + j % PANEL<T>;
    }
    // One row of Y, over a member's share of the columns; zeros fill up the last vector.
    void put_y(int t, const T *values) {
        int from, to;
        this->share_columns(from, to);
        for (int j = from, next; j < to; j = next) {
            next = std::min(to, j / PANEL<T> * PANEL<T> + PANEL<T>);
            std::copy(values + j, values + next, y_term(j, t));
        }
        if (from < to && to == this->m)
            for (int j = this->m; j < this->mp; j++) *y_term(j, t) = 0;
        right = Matrix<T>::bigger(right, largest(values + from, to - from));
    }
    void put_x(int t, const T *values, int from, int to) {
        for (int i = from; i < to; i++) this->x[(size_t)i * this->terms + t] = values[i];
        left = Matrix<T>::bigger(left, largest(values + from, std::max(0, to - from)));
    }

    void run(int64_t at) {
        this->enter(at);
        const bool ends_on_rows = this->terms % 2;
        d_tau = left = right = 0;
        term = 0;
        for (int j = this->m; j < this->mp; j++) this->vprev[j] = this->sum[j] = 0; // by every member, alike
        if (this->col_steps) this->count_valid();
        this->put_v(this->v, this->col_steps - 1);
        this->team.barrier();
        first_pass(ends_on_rows);
        for (int step = this->col_steps - 1; step >= 0; step--) {
            column_step(step);
            if (step) pass(step, step == this->col_steps - 1 && !ends_on_rows);
        }
        last_pass(this->col_steps == 1 && !ends_on_rows);
        T *mine = this->note();
        mine[0] = d_tau;
        mine[1] = left;
        mine[2] = right;
        this->team.barrier();
        if (this->team.id == 0) conclude();
        this->team.barrier();
    }
    // The kernel again; df and dg of the last potentials, less v∘(Aᵀα) where the last step was over rows.
    void first_pass(bool ends_on_rows) {
        T *to_g = this->own_part();
        std::fill(to_g, to_g + this->cols, (T)0);
        const T *last = u(this->rows_steps - 1);
        this->blocks([&](int i0, int rows) {
            T sums[Matrix<T>::BLOCK];
            this->make_rows(i0, rows, kernel(i0), this->saved(this->args.r, 1, 0, this->n) + i0, sums);
            for (int i = i0; i < i0 + rows; i++) {
                if (u(0)[i] == 0) std::fill(kernel(i), kernel(i) + this->cols, (T)0);
                const T df = through_weights(kernel(i), d_weights(i), last[i], to_g);
                this->alpha[i] = ends_on_rows ? df * last[i] : df;
            }
            if (!ends_on_rows) return;
            put_x(0, this->alpha, i0, i0 + rows);
            if (this->col_steps) subtract(rows, this->alpha + i0, kernel(i0), to_g);
        });
        gather<T>(this->team, this->part, this->mp, this->dg, this->m);
        if (ends_on_rows) put_y(term++, this->v);
        this->team.barrier();
    }
    // to_g += the weights of a row times their gradient; returns the sum over the row.
    T through_weights(const T *a, const T *dw, T by, T *to_g) const {
        const T *v = this->v;
        Vec<T> sum = {};
        T rest = 0;
        along<T>(
            this->m,
            [&](int j) {
                const Vec<T> x = load(a + j), all = x * splat(by) * load(v + j) * load(dw + j);
                const Vec<T> local = x == Vec<T>{} ? Vec<T>{} : all;
                sum += local;
                store(to_g + j, load(to_g + j) + local);
            },
            [&](int from, int count) {
                for (int j = from; j < from + count; j++) {
                    const T local = a[j] == 0 ? 0 : a[j] * by * v[j] * dw[j];
                    rest += local;
                    to_g[j] += local;
                }
            });
        return total<T>(sum) + rest;
    }
    // to_g −= v∘(Aᵀα) over some rows.
    void subtract(int rows, const T *alpha, const T *a, T *to_g) const {
        const T *v = this->v;
        constexpr int FEW = 4;
        for (int i = 0; i < rows; i += FEW) {
            const int some = std::min(FEW, rows - i);
            T by[FEW] = {};
            std::copy(alpha + i, alpha + i + some, by);
            const T *row[FEW];
            for (int r = 0; r < FEW; r++) row[r] = a + (size_t)(i + std::min(r, some - 1)) * this->ld;
            along<T>(
                this->m,
                [&](int j) {
                    const Vec<T> sum = (splat(by[0]) * load(row[0] + j) + splat(by[1]) * load(row[1] + j)) +
                                       (splat(by[2]) * load(row[2] + j) + splat(by[3]) * load(row[3] + j));
                    store(to_g + j, load(to_g + j) - load(v + j) * sum);
                },
                [&](int from, int count) {
                    for (int j = from; j < from + count; j++)
                        to_g[j] -=
                            v[j] * ((by[0] * row[0][j] + by[1] * row[1][j]) + (by[2] * row[2][j] + by[3] * row[3][j]));
                });
        }
    }
    void column_step(int step) {
        const T *s = this->saved(this->args.s, this->col_steps, step, this->m), *scale = u(step);
        this->put_v(this->vprev, step - 1);
        int from, to;
        this->share_columns(from, to);
        if (this->relaxed)
            for (int j = from; j < to; j++)
                if (s[j] != 0) d_tau -= this->dg[j] * std::log(s[j] / this->target(j));
        T *beta = this->sum;
        const T *dg = this->dg, tau = this->tau;
        for (int j = from; j < to; j++) beta[j] = s[j] == 0 ? 0 : tau * dg[j] / s[j];
        put_y(term, beta);
        put_y(term + 1, this->vprev);
        this->team.share(this->n, from, to);
        if (!this->args.row_weight) put_x(term, scale, from, to);
        else {
            for (int i = from; i < to; i++) this->x[(size_t)i * this->terms + term] = scale[i] * this->weight(i);
            left = Matrix<T>::bigger(left, largest(scale + from, std::max(0, to - from)));
        }
        term += 2;
        this->team.barrier();
    }
    void row_step(int i0, int rows, int step, bool first) {
        T through[Matrix<T>::BLOCK];
        dot(rows, kernel(i0), this->ld, this->sum, through, this->cols);
        for (int i = 0; i < rows; i++) {
            const T by = u(step)[i0 + i],
                    df = (first ? this->alpha[i0 + i] : 0) - by * this->weight(i0 + i) * through[i];
            this->alpha[i0 + i] = df * by;
        }
        put_x(term - 1, this->alpha, i0, i0 + rows);
    }
    void pass(int step, bool first) {
        T *to_g = this->own_part();
        std::fill(to_g, to_g + this->cols, (T)0);
        this->blocks([&](int i0, int rows) {
            row_step(i0, rows, step, first);
            add(rows, this->alpha + i0, kernel(i0), this->ld, to_g, this->cols);
        });
        gather<T>(this->team, this->part, this->mp, this->sum, this->m);
        int from, to;
        this->share_columns(from, to);
        for (int j = from; j < to; j++) this->dg[j] = -this->vprev[j] * this->sum[j];
        this->team.barrier();
    }
    // dC = weights∘dW − A∘(X Yᵀ).
    void last_pass(bool first) {
        const T *last = u(this->rows_steps - 1), *v = this->v;
        const Right<T> y{this->y, (size_t)PANEL<T> * this->terms, (size_t)PANEL<T>};
        this->blocks([&](int i0, int rows) {
            if (this->col_steps) row_step(i0, rows, 0, first);
            product<T, SET>(rows, this->mp, term, this->x + (size_t)i0 * this->terms, this->terms, 1, y, nullptr,
                            this->scratch, this->mp);
            for (int i = 0; i < rows; i++) {
                const T *a = kernel(i0 + i), *dw = d_weights(i0 + i), *steps = this->scratch + (size_t)i * this->mp;
                T *to = this->row(this->args.d_scores, i0 + i);
                const T by = last[i0 + i];
                along<T>(
                    this->m,
                    [&](int j) {
                        const Vec<T> x = load(a + j),
                                     all = x * splat(by) * load(v + j) * load(dw + j) - x * load(steps + j);
                        store(to + j, x == Vec<T>{} ? Vec<T>{} : all);
                    },
                    [&](int from, int count) {
                        for (int j = from; j < from + count; j++)
                            to[j] = a[j] == 0 ? 0 : a[j] * by * v[j] * dw[j] - a[j] * steps[j];
                    });
            }
        });
    }
    void conclude() {
        T total = 0, left = 0, right = 0;
        for (int t = 0; t < this->team.size; t++) {
            const T *each = this->notes + (size_t)t * (this->terms + 4);
            total += each[0];
            left = Matrix<T>::bigger(left, each[1]);
            right = Matrix<T>::bigger(right, each[2]);
        }
        ((T *)this->args.d_tau)[this->index] = total;
        this->args.safe[this->index] = left * right * this->terms < std::numeric_limits<T>::max() / 4;
    }
};
} // namespace ISA
