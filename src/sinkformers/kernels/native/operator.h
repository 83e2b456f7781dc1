// The operator alone: scores in, weights out, and the gradient back. The kernel lives in the result's own memory, one
// row per query, and is turned into weights, or into the gradient, by the last pass.
#pragma once
#include "arguments.h"
#include "rows.h"
#include "team.h"

namespace ISA {

template <class T> struct Matrix {
    const OperatorArguments &args;
    const Team team;
    const int n, m, mp, rows_steps, col_steps, terms;
    static constexpr int BLOCK = 4 * MR;
    size_t measured;
    int64_t index;
    T tau;
    bool relaxed;
    T *v, *vprev, *part, *aside, *sum, *dg, *alpha, *x, *y, *scratch, *notes;

    Matrix(const OperatorArguments &args, Team team, bool backward, char *base)
        : args(args), team(team), n((int)args.n), m((int)args.m), mp(round_up(m, COLUMNS<T>)),
          rows_steps((int)(args.n_iters + 1) / 2), col_steps((int)args.n_iters / 2), terms((int)args.n_iters) {
        Arena arena{base};
        v = arena.take<T>(mp);
        part = arena.take<T>((size_t)team.size * mp);
        aside = arena.take<T>((size_t)team.size * mp);
        sum = arena.take<T>(mp);
        notes = arena.take<T>((size_t)team.size * (terms + 4));
        if (backward) {
            const size_t panels = (mp + PANEL<T> - 1) / PANEL<T>;
            vprev = arena.take<T>(mp);
            dg = arena.take<T>(mp);
            alpha = arena.take<T>(n);
            x = arena.take<T>((size_t)n * terms);
            y = arena.take<T>(panels * PANEL<T> * terms);
            T *own = arena.take<T>((size_t)team.size * BLOCK * mp);
            scratch = own ? own + (size_t)team.id * BLOCK * mp : nullptr;
        }
        measured = arena.used;
    }
    static size_t bytes(const OperatorArguments &args, int size, bool backward) {
        return Matrix(args, Team{0, size, nullptr}, backward, nullptr).measured;
    }

    void enter(int64_t at) {
        index = at;
        relaxed = args.tau != nullptr;
        tau = relaxed ? ((const T *)args.tau)[index] : 1;
    }
    const T *scores(int i) const { return (const T *)args.scores + ((size_t)index * n + i) * m; }
    T *saved(void *base, int steps, int step, int count) const {
        return (T *)base + ((size_t)index * steps + step) * count;
    }
    T weight(int i) const { return args.row_weight ? ((const T *)args.row_weight)[(size_t)index * n + i] : 1; }
    T *own_part() const { return part + (size_t)team.id * mp; }
    T *note() const { return notes + (size_t)team.id * (terms + 4); }
    // What a column aims at: its mass, or rows over columns, of valid ones. A sum of zero is an empty
    // column.
    T target(int j, T ratio) const {
        return args.col_target ? ((const T *)args.col_target)[(size_t)index * m + j] : ratio;
    }
    T ratio(const T *s) const {
        const T *u = saved(args.u, rows_steps, 0, n);
        int rows = 0, cols = 0;
        for (int i = 0; i < n; i++) rows += u[i] != 0;
        for (int j = 0; j < m; j++) cols += s[j] != 0;
        return cols ? (T)rows / (T)cols : 1;
    }
    T scaling(T s, T aim) const { return s == 0 ? 0 : relaxed ? std::exp(tau * std::log(aim / s)) : aim / s; }
    template <class F> void blocks(F &&f) const {
        int from, to;
        team.share(n, from, to);
        Aside<T> sums(own_part(), aside + (size_t)team.id * mp, m, to - from);
        for (int i = from; i < to; i += BLOCK) {
            f(i, std::min(BLOCK, to - i));
            sums.added(BLOCK);
        }
        sums.finish();
    }
    // Always the same share of the columns: what a member wrote it may read before the others are done.
    void share_columns(int &from, int &to) const { team.share(mp, from, to, 4); }
    void put_v(T *to, int step) const {
        int from, end;
        share_columns(from, end);
        end = std::min(end, m);
        const T *s = step < 0 ? nullptr : saved(args.s, col_steps, step, m);
        const T aim = s ? ratio(saved(args.s, col_steps, 0, m)) : 1;
        for (int j = from; j < end; j++) to[j] = s ? scaling(s[j], target(j, aim)) : 1;
    }
    static T bigger(T a, T b) { return a != a || b <= a ? a : b; } // NaN stays
};

template <class T> struct MatrixForward : Matrix<T> {
    MatrixForward(const OperatorArguments &args, Team team, char *base) : Matrix<T>(args, team, false, base) {}
    T *kernel(int i) const { return (T *)this->args.weights + ((size_t)this->index * this->n + i) * this->m; }
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
                this->put_v(this->v, step / 2);
                int from, to;
                this->share_columns(from, to);
                this->note()[step + 1] = largest(this->v + from, std::max(0, std::min(to, this->m) - from));
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
        std::fill(sum, sum + this->m, (T)0);
        this->blocks([&](int i0, int rows) {
            T *a = kernel(i0), *scale = u(step) + i0, weighted[Matrix<T>::BLOCK];
            if (step == 0)
                for (int i = 0; i < rows; i++) first(i0 + i);
            else {
                dot(rows, a, this->m, this->v, scale, this->m);
                for (int i = 0; i < rows; i++) scale[i] = scale[i] == 0 && u(0)[i0 + i] == 0 ? 0 : 1 / scale[i];
            }
            this->note()[2 * step] = Matrix<T>::bigger(this->note()[2 * step], largest(scale, rows));
            if (last) return finish_rows(i0, rows, step);
            for (int i = 0; i < rows; i++) weighted[i] = scale[i] * this->weight(i0 + i);
            add(rows, weighted, a, this->m, sum, this->m);
        });
    }
    void first(int i) {
        T *r = this->saved(this->args.r, 1, 0, this->n) + i, top = row_max(this->scores(i), this->m);
        const bool dead = top == -std::numeric_limits<T>::infinity();
        *r = dead ? 0 : top;
        const T sum = exponentiate(this->scores(i), kernel(i), *r, this->m);
        u(0)[i] = dead && sum == 0 ? 0 : 1 / sum;
    }
    void finish(int step) {
        this->blocks([&](int i0, int rows) { finish_rows(i0, rows, step); });
    }
    void finish_rows(int i0, int rows, int step) {
        for (int i = i0; i < i0 + rows; i++) {
            T *a = kernel(i), by = u(step)[i];
            for (int j = 0; j < this->m; j++) a[j] *= by * this->v[j];
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
    T *kernel(int i) const { return (T *)this->args.d_scores + ((size_t)this->index * this->n + i) * this->m; }
    const T *d_weights(int i) const {
        return (const T *)this->args.d_weights + ((size_t)this->index * this->n + i) * this->m;
    }
    const T *u(int step) const { return this->saved(this->args.u, this->rows_steps, step, this->n); }
    T *y_term(int j, int t) const {
        return this->y + (size_t)(j / PANEL<T>)*PANEL<T> * this->terms + (size_t)t * PANEL<T> + j % PANEL<T>;
    }

    void run(int64_t at) {
        this->enter(at);
        const bool ends_on_rows = this->terms % 2;
        d_tau = left = right = 0;
        term = 0;
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
    // The kernel again; df and dg of the last potentials; and Aᵀα where the last step was over rows.
    void first_pass(bool ends_on_rows) {
        T *to_g = this->own_part();
        std::fill(to_g, to_g + this->m, (T)0);
        const T *last = u(this->rows_steps - 1);
        this->blocks([&](int i0, int rows) {
            for (int i = i0; i < i0 + rows; i++) {
                T *a = kernel(i), df = 0;
                const T *dw = d_weights(i), by = last[i];
                exponentiate(this->scores(i), a, this->saved(this->args.r, 1, 0, this->n)[i], this->m);
                if (u(0)[i] == 0) std::fill(a, a + this->m, (T)0);
                for (int j = 0; j < this->m; j++) {
                    const T local = a[j] == 0 ? 0 : a[j] * by * this->v[j] * dw[j];
                    df += local;
                    to_g[j] += local;
                }
                this->alpha[i] = ends_on_rows ? df * by : df;
                if (!ends_on_rows) continue;
                this->x[(size_t)i * this->terms] = this->alpha[i];
                left = Matrix<T>::bigger(left, std::fabs(this->alpha[i]));
                // dg also loses v∘(Aᵀα): one more row of the same sum.
                if (this->col_steps)
                    for (int j = 0; j < this->m; j++) to_g[j] -= this->alpha[i] * a[j] * this->v[j];
            }
        });
        gather<T>(this->team, this->part, this->mp, this->dg, this->m);
        int from, to;
        this->share_columns(from, to);
        for (int j = from; ends_on_rows && j < to; j++) {
            *y_term(j, 0) = j < this->m ? this->v[j] : 0;
            right = Matrix<T>::bigger(right, *y_term(j, 0));
        }
        if (ends_on_rows) term = 1;
        this->team.barrier();
    }
    void column_step(int step) {
        const T *s = this->saved(this->args.s, this->col_steps, step, this->m), *scale = u(step);
        const T aim = this->ratio(this->saved(this->args.s, this->col_steps, 0, this->m));
        this->put_v(this->vprev, step - 1);
        int from, to;
        this->share_columns(from, to);
        for (int j = from; j < to; j++) {
            const bool live = j < this->m && s[j] != 0;
            if (live && this->relaxed) d_tau -= this->dg[j] * std::log(s[j] / this->target(j, aim));
            const T beta = live ? this->tau * this->dg[j] / s[j] : 0, before = j < this->m ? this->vprev[j] : 0;
            if (j < this->m) this->sum[j] = beta;
            *y_term(j, term) = beta;
            *y_term(j, term + 1) = before;
            right = Matrix<T>::bigger(right, Matrix<T>::bigger(std::fabs(beta), before));
        }
        this->team.share(this->n, from, to);
        for (int i = from; i < to; i++) {
            this->x[(size_t)i * this->terms + term] = scale[i] * this->weight(i);
            left = Matrix<T>::bigger(left, scale[i]);
        }
        term += 2;
        this->team.barrier();
    }
    void row_step(int i0, int rows, int step, bool first) {
        T through[Matrix<T>::BLOCK];
        dot(rows, kernel(i0), this->m, this->sum, through, this->m);
        for (int i = 0; i < rows; i++) {
            const T by = u(step)[i0 + i],
                    df = (first ? this->alpha[i0 + i] : 0) - by * this->weight(i0 + i) * through[i];
            this->alpha[i0 + i] = df * by;
            this->x[(size_t)(i0 + i) * this->terms + term - 1] = df * by;
            left = Matrix<T>::bigger(left, std::fabs(df * by));
        }
    }
    void pass(int step, bool first) {
        T *to_g = this->own_part();
        std::fill(to_g, to_g + this->m, (T)0);
        this->blocks([&](int i0, int rows) {
            row_step(i0, rows, step, first);
            add(rows, this->alpha + i0, kernel(i0), this->m, to_g, this->m);
        });
        gather<T>(this->team, this->part, this->mp, this->sum, this->m);
        int from, to;
        this->share_columns(from, to);
        for (int j = from; j < std::min(to, this->m); j++) this->dg[j] = -this->vprev[j] * this->sum[j];
        this->team.barrier();
    }
    // dC = weights∘dW − A∘(X Yᵀ).
    void last_pass(bool first) {
        const T *last = u(this->rows_steps - 1);
        const Right<T> y{this->y, (size_t)PANEL<T> * this->terms, (size_t)PANEL<T>};
        this->blocks([&](int i0, int rows) {
            if (this->col_steps) row_step(i0, rows, 0, first);
            product<T, SET>(rows, this->mp, term, this->x + (size_t)i0 * this->terms, this->terms, 1, y, nullptr,
                            this->scratch, this->mp);
            for (int i = 0; i < rows; i++) {
                T *a = kernel(i0 + i);
                const T *dw = d_weights(i0 + i), *steps = this->scratch + (size_t)i * this->mp, by = last[i0 + i];
                for (int j = 0; j < this->m; j++)
                    a[j] = a[j] == 0 ? 0 : a[j] * by * this->v[j] * dw[j] - a[j] * steps[j];
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
