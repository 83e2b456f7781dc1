// Attention at the limit of Sinkhorn's algorithm: the weights u·exp(C + lift − r)·v with rows and columns that hold.
//
// The iterations of attention.h go on until the columns hold; where that would take long, by Newton's method (see
// core/limit_newton.py, which says why, and whose schedule this is). Everything is a sweep over the rows of the kernel,
// which serves one product with it and one with its transpose. The scalings are absorbed into the columns' lift when
// they have drifted far, and the kernel is computed again.
//
// The gradient is that of the limit: one linear system, solved by conjugate gradients on the same kernel, leaves two
// rank-one terms beside those of the values.
#pragma once
#include "attention_backward.h"
#include "attention_forward.h"

namespace ISA {

// Base is Forward or Backward.
template <class T, class Base> struct AtLimit : Base {
    T *const diagonal, *const precondition, *const rest, *const direction, *const solution, *const image, *const factor;
    bool back = false; // direction of the next sweep
    static constexpr T EPS = std::numeric_limits<T>::epsilon();

    AtLimit(const AttentionArguments &args, Team team, bool backward, int64_t stored, char *base)
        : Base(args, team, backward, stored, base), diagonal(column(0)), precondition(column(1)), rest(column(2)),
          direction(column(3)), solution(column(4)), image(column(5)), factor(column(6)) {}
    T *column(int number) const { return this->limit_columns + (size_t)number * this->mp; }

    // What one member does for all; each gets the number that f returns.
    template <class F> T alone(F &&f) {
        if (this->team.size == 1) return f();
        if (this->team.id == 0) this->notes[this->team.size] = f();
        this->team.barrier();
        const T found = this->notes[this->team.size];
        this->team.barrier();
        return found;
    }
    // The sum of the members' numbers, in their order.
    T added_up(T mine) {
        if (this->team.size == 1) return mine;
        this->notes[this->team.id] = mine;
        this->team.barrier();
        T sum = 0;
        for (int t = 0; t < this->team.size; t++) sum += this->notes[t];
        this->team.barrier();
        return sum;
    }
    // into = Aᵀ x, where x[i] = f(i, (A w)[i]).
    template <class F> void sweep(const T *w, T *into, F &&f) {
        T *sum = this->own_part();
        std::fill(sum, sum + this->cols, (T)0);
        this->blocks(back = !back, [&](int i0, int rows) {
            if (!this->is_stored(i0)) this->again(i0, rows);
            const T *c = this->rows_of_kernel(i0);
            const int from = this->columns.from, count = this->columns.count();
            T x[Head<T>::FEW];
            for (int i = 0; i < rows; i += this->FEW) {
                const int some = std::min<int>(this->FEW, rows - i);
                if (w) dot(some, c + (size_t)i * this->ld, this->ld, w + from, x, count);
                for (int r = 0; r < some; r++) x[r] = f(i0 + i + r, w ? x[r] : (T)0);
                add(some, x, c + (size_t)i * this->ld, this->ld, sum + from, count);
            }
        });
        gather<T>(this->team, this->part, this->mp, into, this->cols);
    }
    // into = (A∘A)ᵀ u².
    void squares(T *into) {
        T *sum = this->own_part();
        std::fill(sum, sum + this->cols, (T)0);
        this->blocks(back = !back, [&](int i0, int rows) {
            if (!this->is_stored(i0)) this->again(i0, rows);
            const T *c = this->rows_of_kernel(i0);
            for (int i = 0; i < rows; i++, c += this->ld)
                for (int j = 0; j < this->columns.count(); j += LANES<T>) {
                    const Vec<T> x = splat(this->u[i0 + i]) * load(c + j);
                    T *to = sum + this->columns.from + j;
                    store(to, load(to) + x * x);
                }
        });
        gather<T>(this->team, this->part, this->mp, into, this->cols);
    }
    // Conjugate gradients on diag(diagonal) − by·Pᵀ P, from 0, for the right-hand side in `rest`. `own` is the diagonal
    // of Pᵀ P. The goal is relative to the first energy; `noise` is one that rounding leaves. Where the curvature of
    // the first direction is rounding, the solution is that direction, `farthest` in its largest entry. Returns the
    // steps.
    int solve(T by, const T *own, int most_steps, T ratio, T farthest, const T *noise = nullptr) {
        const int m = this->live_m;
        const T *v = this->vv;
        T goal = 0;
        T energy = alone([&] {
            T sum = 0;
            for (int j = 0; j < m; j++) {
                const T least = 32 * EPS * diagonal[j];
                precondition[j] = diagonal[j] > 0 ? 1 / std::max(diagonal[j] - by * own[j], least) : 0;
                solution[j] = 0;
                direction[j] = precondition[j] * rest[j];
                factor[j] = v[j] * direction[j];
                sum += rest[j] * direction[j];
            }
            std::fill(factor + m, factor + this->cols, (T)0);
            return sum;
        });
        goal = ratio * ratio * energy;
        if (noise)
            goal = std::max(goal, alone([&] {
                                T sum = 0;
                                for (int j = 0; j < m; j++) sum += precondition[j] * noise[j] * noise[j];
                                return sum;
                            }));
        int steps = 0;
        while (steps < most_steps && energy > goal) {
            steps++;
            sweep(factor, image, [&](int i, T z) { return this->u[i] * this->u[i] * z; });
            energy = alone([&] { return advance(by, energy, steps == 1 ? farthest : 0); });
        }
        return steps;
    }
    // One step; returns the new energy, or -1 along a null vector, whose curvature is rounding.
    T advance(T by, T energy, T farthest) {
        const int m = this->live_m;
        const T *v = this->vv;
        T curvature = 0, size = 0;
        for (int j = 0; j < m; j++) {
            image[j] = diagonal[j] * direction[j] - by * v[j] * image[j];
            curvature += direction[j] * image[j];
            size += diagonal[j] * direction[j] * direction[j];
        }
        if (!(curvature > 16 * EPS * size)) {
            const T top = largest(direction, m);
            for (int j = 0; farthest > 0 && j < m; j++) solution[j] = direction[j] * (farthest / top);
            return -1;
        }
        const T length = energy / curvature;
        T next = 0;
        for (int j = 0; j < m; j++) {
            solution[j] += length * direction[j];
            rest[j] -= length * image[j];
            next += precondition[j] * rest[j] * rest[j];
        }
        const T beta = next / energy;
        for (int j = 0; j < m; j++) {
            direction[j] = precondition[j] * rest[j] + beta * direction[j];
            factor[j] = v[j] * direction[j];
        }
        return next;
    }
};

template <class T> struct LimitForward : AtLimit<T, Forward<T>> {
    T *const lift, *const gap, *const best_v, *const best_lift, *const base, *const steady, *new_v;
    T *new_u;
    // base: the columns' part of the scores, without lift. steady: the column sums that would leave v as it is, tau
    // < 1.
    T bend, goal; // λ = 1/τ − 1

    LimitForward(const AttentionArguments &args, Team team, bool backward, int64_t stored, char *base)
        : AtLimit<T, Forward<T>>(args, team, backward, stored, base), lift(this->column(7)), gap(this->column(8)),
          best_v(this->column(9)), best_lift(this->column(10)), base(this->column(12)), steady(this->column(13)),
          new_v(this->column(11)), new_u(this->limit_rows) {}

    // As in core/limit_solver.py and core/limit_newton.py.
    static constexpr int FIRST_PAIRS = 8, NEAR = 8, MOST_SOLVER_STEPS = 25, MOST_TRIALS = 5;
    static constexpr T DRIFT = (T)1e10, LARGEST_CHANGE = 35, COARSEST = (T)0.3;

    void run(int64_t item, int64_t place) {
        this->enter(item, place);
        if (this->team.id == 0) clear();
        this->team.barrier();
        if (!this->live_n) return;
        bend = this->relaxed ? 1 / this->tau - 1 : 0;
        goal = (T)this->args.tol;
        this->values = this->packed_v;
        this->first_pass();
        int products = 1;
        const T residual = converge(products);
        const T top = take_values();
        this->pass(1, false, true);
        if (this->team.id == 0) conclude(residual, products, top);
        this->team.barrier();
    }
    void clear() {
        const auto &args = this->args;
        std::fill(lift, lift + this->cols, (T)0);
        std::fill(steady, steady + this->cols, this->rho);
        std::copy(this->start, this->start + this->cols, base);
        if (this->live_n < this->n || this->live_m < this->m) {
            Forward<T>::clear();
            this->zero(args.lift, this->index * args.m, args.m);
        }
        ((T *)args.residual)[this->index] = 0;
        ((T *)args.products)[this->index] = 1;
    }
    // Vectors that no pass has written; and whether the numbers stayed in range, which NaN did not.
    void conclude(T residual, int products, T top) {
        const auto &args = this->args;
        this->give(this->vv, this->saved(args.s, 1, 0, this->m), this->col_at, this->all_cols(), 0, this->live_m);
        this->give(lift, this->saved(args.lift, 1, 0, this->m), this->col_at, this->all_cols(), 0, this->live_m);
        this->give(this->u, this->saved(args.u, 1, 0, this->n), this->row_at, this->all_rows(), 0, this->live_n);
        ((T *)args.residual)[this->index] = residual;
        ((T *)args.products)[this->index] = (T)products;
        const T u = largest(this->u, this->live_n), v = largest(this->vv, this->live_m);
        args.safe[this->index] = residual == residual && u * v < (T)args.safe_product &&
                                 top * this->live_m < std::numeric_limits<T>::max() / 4;
    }
    T take_values() {
        int from, to;
        this->share_columns(from, to);
        Largest<T> seen;
        for (int j = from; j < std::min(to, this->live_m); j++)
            scaled(this->packed_v + (size_t)j * this->ep, this->value_row(j), this->vv[j], this->e, &seen);
        return this->added_up(seen.found());
    }

    // Returns the residual reached.
    T converge(int &products) {
        const int most = (int)this->args.max_products;
        T residual = measure(), best = residual;
        keep_best();
        int pairs = FIRST_PAIRS, failures = 0;
        while (residual > goal && products + 2 <= most) { // NaN will not get better
            const T before = residual;
            if (pairs > 0) {
                step_pair();
                products += 2;
                residual = measure_absorbed();
                const T rate = std::min(std::max(residual / before, (T)0.01), (T)(1 - 1e-6));
                if (--pairs == 0 && std::log(goal / residual) / std::log(rate) < NEAR) pairs = 2;
            } else {
                const int steps = std::min({MOST_SOLVER_STEPS, this->live_m, (most - products - MOST_TRIALS - 2) / 2});
                if (steps < 1) {
                    pairs = most;
                    continue;
                }
                bool accepted, visible;
                const int used = newton(residual, steps, accepted, visible);
                products += used;
                residual = measure_absorbed();
                if (!visible && !(accepted && residual < before / 2)) pairs = used * (1 + ++failures);
            }
            if (residual < best) {
                best = residual;
                keep_best();
            }
        }
        if (residual > goal && best < residual) {
            go_to_best();
            residual = best;
        }
        return residual;
    }
    void keep_best() {
        this->alone([&] {
            std::copy(this->vv, this->vv + this->cols, best_v);
            std::copy(lift, lift + this->cols, best_lift);
            return (T)0;
        });
    }
    void go_to_best() {
        this->alone([&] {
            for (int j = 0; j < this->live_m; j++) {
                lift[j] = best_lift[j] + std::log(best_v[j]);
                this->start[j] = base[j] + lift[j]; // as backward adds them
            }
            return (T)0;
        });
        this->first_pass();
    }
    // What column j aims at: ρ·exp(−λg) for tau < 1. Taken from potentials, it would multiply their rounding by λ.
    T target(int j) const { return bend > 0 ? this->vv[j] * steady[j] : this->rho; }
    T measure() {
        return this->alone([&] {
            T top = 0;
            for (int j = 0; j < this->live_m; j++) {
                const T ratio = bend > 0 ? this->s[j] / steady[j] : this->s[j] * this->vv[j] / this->rho;
                const T error = std::fabs(ratio - 1);
                top = error <= top ? top : error;
                if (error != error) return error;
            }
            return top;
        });
    }
    T measure_absorbed() {
        const bool far = this->alone([&] {
            const T reach = largest(this->u, this->live_n) * largest(this->vv, this->live_m);
            const bool far = reach > DRIFT || reach < 1 / DRIFT;
            for (int j = 0; far && j < this->live_m; j++) {
                lift[j] += std::log(this->vv[j]);
                this->start[j] = base[j] + lift[j];
                steady[j] *= this->vv[j];
            }
            return (T)far;
        }) != 0;
        if (far) this->first_pass();
        return measure();
    }
    void step_pair() {
        this->alone([&] {
            T *v = this->vv;
            if (bend > 0)
                for (int j = 0; j < this->live_m; j++) {
                    v[j] = std::exp(this->tau * std::log(this->rho / this->s[j]) - (1 - this->tau) * lift[j]);
                    steady[j] = this->s[j];
                }
            else
                for (int j = 0; j < this->live_m; j++) v[j] = this->rho / this->s[j];
            std::fill(v + this->live_m, v + this->cols, (T)0);
            return (T)0;
        });
        this->sweep(this->vv, this->s, [&](int i, T z) { return this->u[i] = 1 / z; });
    }
    // One step; returns the products it took.
    int newton(T residual, int most_steps, bool &accepted, bool &visible) {
        this->squares(this->image);
        T *own = new_v; // free until the search
        this->alone([&] {
            for (int j = 0; j < this->live_m; j++) {
                const T v = this->vv[j], sum = this->s[j] * v, aim = target(j);
                own[j] = v * v * this->image[j];
                this->diagonal[j] = sum + bend * aim;
                gap[j] = this->rest[j] = aim - sum;
            }
            return (T)0;
        });
        const T ratio = std::min(COARSEST, std::max((T)1e-6, std::sqrt(residual)));
        const int steps = this->solve(1, own, most_steps, ratio, LARGEST_CHANGE);
        return 2 * steps + 2 + search(accepted, visible);
    }
    // Along the solution until D falls as it should, up to rounding; returns the trials.
    int search(bool &accepted, bool &visible) {
        const T downhill = this->alone([&] {
            T sum = 0;
            for (int j = 0; j < this->live_m; j++) sum += gap[j] * this->solution[j];
            return sum;
        });
        accepted = visible = false;
        int trials = 0;
        for (T length = 1; downhill > 0 && !accepted && trials < MOST_TRIALS; length /= 3) {
            trials++;
            T by_col = 0, size = 0, slope = 0;
            try_columns(length, by_col, size, slope);
            T by_row = 0, row_size = 0;
            this->sweep(new_v, this->image, [&](int i, T z) {
                const T change = std::log(this->u[i] * z);
                by_row += change;
                row_size += std::fabs(change);
                return new_u[i] = 1 / z;
            });
            const T fall = -(this->added_up(by_row) + by_col);
            const T noise = 4 * this->EPS * (this->added_up(row_size) + size);
            accepted = fall >= (T)1e-4 * std::max(slope, (T)0) - noise;
            visible = accepted && fall > noise + 4 * this->EPS * this->live_n;
        }
        if (accepted) {
            std::swap(this->u, new_u);
            std::swap(this->vv, new_v);
            this->alone([&] {
                std::copy(this->image, this->image + this->cols, this->s);
                for (int j = 0; bend > 0 && j < this->live_m; j++)
                    steady[j] = this->rho * std::exp(-bend * lift[j] - std::log(this->vv[j]) / this->tau);
                return (T)0;
            });
        }
        return trials;
    }
    // The scalings at a point of the search, what the columns change D by, and how fast D falls at first on the way.
    void try_columns(T length, T &by_col, T &size, T &slope) {
        T total_size = 0, total_slope = 0;
        by_col = this->alone([&] {
            T sum = 0;
            for (int j = 0; j < this->live_m; j++) {
                const T wanted = length * this->solution[j];
                const T change = std::min(LARGEST_CHANGE, std::max(-LARGEST_CHANGE, wanted));
                const T gain = -target(j) * (bend > 0 ? -std::expm1(-bend * change) / bend : change);
                new_v[j] = this->vv[j] * std::exp(change);
                sum += gain;
                total_size += std::fabs(gain);
                total_slope += gap[j] * change;
            }
            std::fill(new_v + this->live_m, new_v + this->cols, (T)0);
            return sum;
        });
        size = this->alone([&] { return total_size; });
        slope = this->alone([&] { return total_slope; });
    }
};

template <class T> struct LimitBackward : AtLimit<T, Backward<T>> {
    T *const sums, *const own, *const noise;

    LimitBackward(const AttentionArguments &args, Team team, bool backward, int64_t stored, char *base)
        : AtLimit<T, Backward<T>>(args, team, backward, stored, base), sums(this->column(7)), own(this->column(8)),
          noise(this->column(9)) {}

    void run(int64_t item, int64_t place) {
        this->enter(item, place);
        if (!this->prepare()) return;
        this->begin(false);
        this->first_pass(false);
        this->values(false);
        solve_for_columns();
        this->last_pass(true);
        this->finish();
    }
    // The adjoint of the column potentials y, and with it the last two columns of X and Y: u·(v∘y)ᵀ and, from the row
    // step in the last pass, (u∘x)·vᵀ.
    void solve_for_columns() {
        const int m = this->live_m;
        const T *v = this->vv;
        this->sweep(nullptr, sums, [&](int i, T) { return this->u[i]; });
        this->sweep(nullptr, this->image, [&](int i, T) { return this->u[i] * this->alpha[i]; });
        this->alone([&] {
            for (int j = 0; j < m; j++) {
                this->diagonal[j] = v[j] * sums[j];
                this->rest[j] = this->dg[j] - v[j] * this->image[j];
            }
            return (T)0;
        });
        measure_noise();
        this->squares(this->image);
        // Near tau = 1 its gradient needs the sum of c∘z, which the preconditioner 1/c keeps (core/implicit.py).
        const bool bounded = !this->relaxed || this->tau <= (T)0.9;
        this->alone([&] {
            for (int j = 0; j < m; j++) own[j] = bounded ? v[j] * v[j] * this->image[j] : 0;
            return (T)0;
        });
        // Conjugate gradients square what they work on, which may be as small or as large as numbers are.
        const T top = this->alone([&] { return largest(this->rest, m); });
        const T size = top > 0 ? top : 1;
        this->alone([&] {
            for (int j = 0; j < m; j++) {
                this->rest[j] /= size;
                noise[j] /= size;
            }
            return (T)0;
        });
        const T least = sizeof(T) == 8 ? (T)1e-14 : (T)1e-6, ratio = std::max((T)(0.1 * this->args.tol), least);
        this->solve(this->tau, own, std::min(2 * m + 50, 2000), ratio, 0, noise);
        this->alone([&] {
            T *y = this->s;
            for (int j = 0; j < m; j++) {
                const T z = size * this->solution[j];
                y[j] = this->tau * z * v[j];
                if (this->relaxed) {
                    const T g = this->saved(this->args.lift, 1, 0, this->m)[this->col_at[j]] + std::log(v[j]);
                    const T sum = this->diagonal[j], excess = std::log(sum / this->rho) - g;
                    this->d_tau -= z * sum * excess;
                }
            }
            std::fill(y + m, y + this->cols, (T)0);
            return (T)0;
        });
        int from, to;
        this->share_columns(from, to);
        this->put_y(this->term++, this->s, from, to);
        this->put_y(this->term++, v, from, to);
        this->team.share(this->live_n, from, to);
        this->put_x(this->term - 2, -1, this->u, from, to);
        this->team.barrier();
    }
    // What rounding leaves of the right-hand side, whose terms are bounded by the largest of d_out and of the values.
    void measure_noise() {
        const auto &args = this->args;
        T *lengths = this->factor, *by_row = this->limit_rows;
        const T keep = args.drops && args.dropout_p < 1 ? (T)(1 / (1 - args.dropout_p)) : 1;
        const T root = std::sqrt((T)this->e);
        this->alone([&] {
            for (int j = 0; j < this->live_m; j++) {
                lengths[j] = keep * root * largest(this->value_row(j), this->e) * this->vv[j];
            }
            std::fill(lengths + this->live_m, lengths + this->cols, (T)0);
            return (T)0;
        });
        this->sweep(lengths, noise, [&](int i, T z) {
            const T *d_out = this->template at<const T>(args.d_out) + this->row_at[i] * args.d_out.i;
            by_row[i] = this->u[i] * largest(d_out, this->e);
            return by_row[i] * this->u[i] * z;
        });
        this->sweep(nullptr, this->image, [&](int i, T) { return by_row[i]; });
        this->alone([&] {
            for (int j = 0; j < this->live_m; j++)
                noise[j] = 4 * this->EPS * (this->vv[j] * noise[j] + lengths[j] * this->image[j]);
            return (T)0;
        });
    }
};
} // namespace ISA
