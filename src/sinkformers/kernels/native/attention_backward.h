// The backward pass of a head: A again, then the steps walked back, each leaving one rank-one term, so that the
// gradient of the scores is A∘(X Yᵀ): one product, with n_iters more columns than SoftMax attention has.
#pragma once
#include "attention.h"

namespace ISA {

template <class T> struct Backward : Head<T> {
    using Head<T>::Head;
    T d_tau, gain; // gain: how much of the scale is in Y
    T left, right; // the largest entries of X, and of Y before the gain
    int term;      // columns of X and Y filled so far

    void run(int64_t item, int64_t place) {
        this->enter(item, place);
        if (!prepare()) return;
        const bool ends_on_rows = this->args.n_iters % 2;
        const int last_col = this->col_steps - 1;
        begin(ends_on_rows);
        first_pass(ends_on_rows);
        values(ends_on_rows);
        for (int step = last_col; step >= 0; step--) {
            column_step(step);
            if (step) pass(step, step == last_col && !ends_on_rows);
        }
        last_pass(last_col == 0 && !ends_on_rows);
        finish();
    }
    // Whether there is anything to differentiate.
    bool prepare() {
        if (this->team.id == 0 && (this->live_n < this->n || this->live_m < this->m)) clear();
        if (this->team.id == 0 && this->first_of_item && !bias_in_whole()) clear_bias();
        this->team.barrier();
        d_tau = 0;
        gain = this->args.d_bias.data ? 1 : (T)this->args.scale;
        left = right = 0;
        term = this->ep;
        return this->live_n > 0;
    }
    void clear() {
        const auto &args = this->args;
        const size_t sizes[] = {(size_t)(args.n * args.d), (size_t)(args.m * args.d), (size_t)(args.m * args.e)};
        void *const bases[] = {args.d_query, args.d_key, args.d_value};
        for (int t = 0; t < 3; t++) this->zero(bases[t], this->index * sizes[t], sizes[t]);
        ((T *)args.d_tau)[this->index] = 0;
        args.safe[this->index] = 1;
    }
    // Whether the gradient of the bias is written, and not added to zeros: by the first head of an item, if all entries
    // are valid.
    bool bias_in_whole() const {
        return !this->args.d_bias.data ||
               (this->all_rows() && this->all_cols() && !this->masks.windowed && this->first_of_item);
    }
    T *bias_row(int i) const {
        const Strided &t = this->args.d_bias;
        return (T *)t.data + this->b * t.b + this->h * t.h + (size_t)i * this->m;
    }
    void clear_bias() { std::fill_n(bias_row(0), (size_t)this->n * this->m, (T)0); }
    T *x_row(int i) const { return this->x + (size_t)i * this->width; }
    // One column of X and of Y, over a member's share.
    void put_x(int t, T sign, const T *values, int from, int to) {
        for (int i = from; i < to; i++) x_row(i)[t] = sign * values[i];
        see(left, values, from, to);
    }
    void put_y(int t, const T *values, int from, int to) {
        for (int j = from, next; j < to; j = next) {
            next = std::min(to, j / PANEL<T> * PANEL<T> + PANEL<T>);
            T *y = y_term(j, t);
            for (int l = 0; l < next - j; l++) y[l] = gain * values[j + l];
        }
        see(right, values, from, to);
    }
    static void see(T &top, const T *values, int from, int to) {
        top = bigger(top, largest(values + from, std::max(0, to - from)));
    }
    // Y is packed in panels, one row per term.
    T *y_term(int j, int t) const {
        return this->y + (size_t)(j / PANEL<T>)*PANEL<T> * this->width + (size_t)t * PANEL<T> + j % PANEL<T>;
    }
    void put_v(T *to, int step) const { // v after a column step, by members' shares
        int from, until;
        this->share_columns(from, until);
        const int live = std::min(until, this->live_m);
        if (step < 0) {
            std::fill(to + from, to + std::max(from, live), (T)1);
            std::fill(to + std::max(from, live), to + std::max(from, until), (T)0);
        } else {
            this->take(to, this->saved(this->args.s, this->col_steps, step, this->m), this->col_at, this->all_cols(),
                       from, live);
            if (!this->at_limit()) this->scalings(to, to, from, until);
            else std::fill(to + std::max(from, live), to + std::max(from, until), (T)0); // saved as they are
        }
    }
    void get_u(int step) {
        int from, to;
        this->team.share(this->live_n, from, to);
        this->take(this->u, this->saved(this->args.u, this->rows_steps, step, this->n), this->row_at, this->all_rows(),
                   from, to);
    }
    // The last scalings; df = rowsum(dO∘O), which needs no pass; X's first columns.
    void begin(bool ends_on_rows) {
        const auto &args = this->args;
        get_u(this->rows_steps - 1);
        put_v(this->vv, this->col_steps - 1);
        int from, to;
        this->team.share(this->live_n, from, to);
        Largest<T> seen;
        const T *out = (const T *)args.out + (size_t)this->index * this->n * this->e;
        for (int i = from; i < to; i++) {
            const T *d_out = this->template at<const T>(args.d_out) + this->row_at[i] * args.d_out.i;
            const T df = dot_plain(d_out, out + (size_t)this->row_at[i] * this->e, this->e);
            scaled(x_row(i), d_out, this->u[i], this->e, &seen);
            if constexpr (IN_PAIRS) {
                this->last_u[i] = gain * this->u[i];
                pack_row(d_out, this->e, this->d_left + (size_t)i * (this->ep / 2), this->ep / 2);
            }
            this->alpha[i] = ends_on_rows ? df * this->u[i] : df;
        }
        left = seen.found();
        if (ends_on_rows) put_x(term, -1, this->alpha, from, to);
        this->team.barrier();
    }
    // A again, and what the values and the last row step need of it.
    void first_pass(bool ends_on_rows) {
        T *sum = this->own_part(), *z = where_values();
        std::fill(sum, sum + this->cols, (T)0);
        bool fresh = true;
        this->blocks(false, [&](int i0, int rows) {
            this->again(i0, rows);
            const T *c = this->dropped(i0, rows);
            sum_over_rows(fresh, rows, c, this->plain(x_row(i0), this->width), z, this->ep);
            if (ends_on_rows && this->col_steps)
                add(rows, this->alpha + i0, this->rows_of_kernel(i0), this->ld, sum + this->columns.from,
                    this->columns.count());
        });
        if (fresh) std::fill(z, z + (size_t)this->live_m * this->ep, (T)0);
        gather<T>(this->team, this->part, this->mp, this->s, this->cols);
        if (this->team.size > 1)
            gather<T>(this->team, this->z, (size_t)this->mp * this->ep, this->z, this->live_m * this->ep);
    }
    // Where a member adds up its share of dV: at its final place where it has it for itself.
    bool values_in_place() const { return this->team.size == 1 && this->all_cols() && this->e == this->ep; }
    bool keys_in_place() const {
        return this->team.size == 1 && this->all_cols() && this->d == this->dp && !this->args.d_bias.data;
    }
    T *d_value() const { return (T *)this->args.d_value + (size_t)this->index * this->m * this->e; }
    T *d_key() const { return (T *)this->args.d_key + (size_t)this->index * this->m * this->d; }
    T *where_values() const {
        return values_in_place() ? d_value() : this->z + (size_t)this->team.id * this->mp * this->ep;
    }
    T *where_keys() const {
        return keys_in_place() ? d_key() : this->grad + (size_t)this->team.id * this->mp * this->dp;
    }
    // to (+)= cᵀ b over `depth` rows or pairs of rows, in the columns at hand of c.
    template <class E> void sum_over_rows(bool &fresh, int depth, const E *c, Right<E> b, T *to, int width) {
        if (fresh && this->masks.windowed) {
            std::fill(to, to + (size_t)this->live_m * width, (T)0);
            fresh = false;
        }
        T *at = to + (size_t)this->columns.from * width;
        const int count = this->live_columns();
        if (fresh) product<E, SET>(count, width, depth, c, 1, this->ld, b, nullptr, at, width);
        else product<E, ADD>(count, width, depth, c, 1, this->ld, b, nullptr, at, width);
        fresh = false;
    }
    // dV, the adjoint of the column potentials, and Y's first columns.
    void values(bool ends_on_rows) {
        const T *z = values_in_place() ? d_value() : this->z;
        int from, to;
        this->share_columns(from, to);
        for (int j = from; j < to; j += 4) {
            const T *rows[4];
            T by[4];
            for (int l = 0; l < 4; l++) {
                const bool live = j + l < this->live_m;
                const T v = this->vv[j + l];
                rows[l] = this->value_row(j + l);
                by[l] = live ? gain * v : 0;
                T sum = 0;
                if (live) {
                    const T *from_z = z + (size_t)(j + l) * this->ep;
                    T *to_value = d_value() + (size_t)this->col_at[j + l] * this->e;
                    sum = v * dot_plain(from_z, rows[l], this->e);
                    for (int c = 0; c < this->e; c++) to_value[c] = v * from_z[c];
                }
                this->dg[j + l] = ends_on_rows ? sum - v * this->s[j + l] : sum;
            }
            if (IN_PAIRS) continue;
            transpose_four(rows, by, this->e, y_term(j, 0), PANEL<T>);
            for (int c = this->e; c < this->ep; c++) std::fill(y_term(j, c), y_term(j, c) + 4, (T)0);
        }
        right = bigger(right, this->largest_value(from, to));
        if (ends_on_rows) put_y(term++, this->vv, from, to);
        this->team.barrier();
    }
    // y = τ·dg/s and x = u; the row step before it is known up to its α.
    void column_step(int step) {
        int from, to;
        this->share_columns(from, to);
        const int live = std::min(to, this->live_m);
        T *y = this->s;
        this->take(y, this->saved(this->args.s, this->col_steps, step, this->m), this->col_at, this->all_cols(), from,
                   live);
        if (this->relaxed)
            for (int j = from; j < live; j++) d_tau -= this->dg[j] * std::log(y[j] / this->rho);
        for (int j = from; j < live; j++) y[j] = this->tau * this->dg[j] / y[j];
        std::fill(y + std::max(from, live), y + std::max(from, to), (T)0);
        put_v(this->vprev, step - 1);
        put_y(term++, y, from, to);
        put_y(term++, this->vprev, from, to);
        get_u(step);
        this->team.share(this->live_n, from, to);
        put_x(term - 2, -1, this->u, from, to);
        this->team.barrier();
    }
    // α of a row step: its df is −u∘(A y), plus the part of the output in the last row step.
    void row_step(int i0, int rows, const T *c, bool first) {
        T through[Head<T>::FEW];
        for (int i = 0; i < rows; i += this->FEW) {
            const int some = std::min<int>(this->FEW, rows - i);
            dot(some, c + (size_t)i * this->ld, this->ld, this->s + this->columns.from, through, this->columns.count());
            for (int r = 0; r < some; r++) {
                const int row = i0 + i + r;
                const T df = (first ? this->alpha[row] : 0) - this->u[row] * through[r];
                this->alpha[row] = df * this->u[row];
            }
        }
        put_x(term - 1, -1, this->alpha, i0, i0 + rows);
    }
    void pass(int step, bool first) {
        T *sum = this->own_part();
        std::fill(sum, sum + this->cols, (T)0);
        this->blocks(step & 1, [&](int i0, int rows) {
            if (!this->is_stored(i0)) this->again(i0, rows);
            const T *c = this->rows_of_kernel(i0);
            for (int i = 0; i < rows; i += this->FEW) {
                const int some = std::min<int>(this->FEW, rows - i);
                row_step(i0 + i, some, c + (size_t)i * this->ld, first);
                add(some, this->alpha + i0 + i, c + (size_t)i * this->ld, this->ld, sum + this->columns.from,
                    this->columns.count());
            }
        });
        this->team.barrier();
        // dg replaces the sum it came from only once all members are done with y.
        gather<T>(this->team, this->part, this->mp, this->s, this->cols);
        int from, to;
        this->share_columns(from, to);
        for (int j = from; j < to; j++) this->dg[j] = -this->vprev[j] * this->s[j];
        this->team.barrier();
    }
    // dC = A∘(X Yᵀ), times what is in Y of the scale, block by block, and what becomes of it.
    void last_pass(bool first) {
        const auto &args = this->args;
        T *sum = this->own_part(), *grad = where_keys();
        std::fill(sum, sum + this->cols, (T)0);
        bool fresh = true;
        this->blocks(this->col_steps & 1, [&](int i0, int rows) {
            const Right<T> y = this->packed_at(this->y, this->width);
            if (!this->is_stored(i0)) this->again(i0, rows);
            T *c = this->rows_of_kernel(i0);
            if (this->col_steps) row_step(i0, rows, c, first);
            if constexpr (IN_PAIRS) gradient_in_pairs(i0, rows, c, y);
            else if (!args.drops)
                product<T, TIMES>(rows, this->columns.count(), term, x_row(i0), this->width, 1, y, nullptr, c,
                                  this->ld);
            else gradient_under_dropout(i0, rows, c, y);
            for (int i = 0; args.l2 && i < rows; i++) {
                const T one = 1;
                add(1, &one, c + (size_t)i * this->ld, this->ld, sum + this->columns.from, this->columns.count());
            }
            if (args.d_bias.data) put_bias(i0, rows, c);
            queries(i0, rows, c);
            if constexpr (IN_PAIRS) {
                zip_block(rows, this->columns.count(), c, this->ld, this->pairs);
                sum_over_rows(fresh, (rows + 1) / 2, this->pairs, this->tokens_at(this->q_tokens, i0, this->dp), grad,
                              this->dp);
            } else
                sum_over_rows(fresh, rows, c, this->plain(this->q + (size_t)i0 * this->dp, this->dp), grad, this->dp);
        });
        if (fresh) std::fill(grad, grad + (size_t)this->live_m * this->dp, (T)0);
        gather<T>(this->team, this->part, this->mp, this->s, this->cols);
        if (this->team.size > 1)
            gather<T>(this->team, this->grad, (size_t)this->mp * this->dp, this->grad, this->live_m * this->dp);
    }
    // The same where dO and V are in pairs. The terms of the steps stay float32: they cancel.
    void gradient_in_pairs(int i0, int rows, T *c, Right<T> y) {
        if (this->args.drops) this->drop_rows(i0, rows);
        const Right<T> steps{y.base + (size_t)this->ep * PANEL<T>, y.stride, y.ld};
        GradientProduct{this->ep / 2,
                        term - this->ep,
                        this->d_left + (size_t)i0 * (this->ep / 2),
                        this->last_u + i0,
                        this->vv + this->columns.from,
                        x_row(i0) + this->ep,
                        (size_t)this->width,
                        this->columns_at(this->v_columns, this->ep),
                        steps,
                        this->args.drops ? this->drop : nullptr,
                        c,
                        (size_t)this->ld}
            .run(rows, this->columns.count());
    }
    // Dropout multiplies what comes from the values, not what comes from the steps.
    void gradient_under_dropout(int i0, int rows, T *c, Right<T> y) {
        const int steps = term - this->ep;
        this->drop_rows(i0, rows);
        product<T, TIMES>(rows, this->columns.count(), this->ep, x_row(i0), this->width, 1, y, nullptr, this->drop,
                          this->ld);
        const Right<T> rest{y.base + (size_t)this->ep * PANEL<T>, y.stride, y.ld};
        product<T, ADD>(rows, this->columns.count(), steps, x_row(i0) + this->ep, this->width, 1, rest, nullptr,
                        this->drop, this->ld);
        for (int i = 0; i < rows; i++)
            multiply(c + (size_t)i * this->ld, this->drop + (size_t)i * this->ld, this->columns.count());
    }
    void put_bias(int i0, int rows, const T *c) const {
        const bool whole = bias_in_whole();
        const int from = this->columns.from, count = this->live_columns();
        for (int i = 0; i < rows; i++, c += this->ld) {
            T *to = bias_row(this->row_at[i0 + i]);
            if (whole) std::copy(c, c + count, to);
            else if (this->masks.prefix)
                for (int j = 0; j < count; j++) to[from + j] += c[j];
            else
                for (int j = 0; j < count; j++) to[this->col_at[from + j]] += c[j];
        }
    }
    void queries(int i0, int rows, const T *c) const {
        T *d_query = (T *)this->args.d_query + (size_t)this->index * this->n * this->d;
        if constexpr (IN_PAIRS) {
            pack_block(rows, this->columns.count(), c, this->ld, this->pairs);
            put_queries(i0, rows, this->pairs, this->ld / 2, this->column_depth(),
                        this->tokens_at(this->k_tokens, this->columns.from, this->dp), d_query,
                        this->args.d_bias.data ? this->scales : nullptr); // otherwise it is in c
        } else
            put_queries(i0, rows, c, this->ld, this->live_columns(),
                        this->plain(this->k + (size_t)this->columns.from * this->dp, this->dp), d_query, nullptr);
    }
    template <class E>
    void put_queries(int i0, int rows, const E *c, size_t apart, int depth, Right<E> keys, T *to, const T *by) const {
        if (this->all_rows() && this->d == this->dp)
            return product<E, SET>(rows, this->dp, depth, c, apart, 1, keys, nullptr, to + (size_t)i0 * this->d,
                                   this->d, by);
        this->product_to_rows(i0, rows, c, apart, depth, keys, this->dp, this->d, to, by);
    }
    void finish() {
        const auto &args = this->args;
        if (args.l2 || !keys_in_place()) {
            const T *grad = keys_in_place() ? d_key() : this->grad;
            const T by = args.d_bias.data ? (T)args.scale : 1; // otherwise it is in Y
            int from, to;
            this->team.share(this->live_m, from, to);
            for (int j = from; j < to; j++)
                for (int f = 0; f < this->d; f++) {
                    T g = by * grad[(size_t)j * this->dp + f];
                    if (args.l2) g -= this->s[j] * this->k[(size_t)j * this->dp + f];
                    d_key()[(size_t)this->col_at[j] * this->d + f] = g;
                }
        }
        T *mine = this->tops + (size_t)this->team.id * (args.n_iters + 4);
        mine[0] = d_tau;
        mine[1] = left;
        mine[2] = right;
        this->team.barrier();
        if (this->team.id == 0) conclude();
        this->team.barrier();
    }
    // Where the kernel is zero the product of two large factors would still overflow: 0 · inf. NaN is not safe either.
    void conclude() {
        T d_tau = 0, left = 0, right = 0;
        for (int t = 0; t < this->team.size; t++) {
            const T *each = this->tops + (size_t)t * (this->args.n_iters + 4);
            d_tau += each[0];
            left = bigger(left, each[1]);
            right = bigger(right, each[2]);
        }
        ((T *)this->args.d_tau)[this->index] = d_tau;
        this->args.safe[this->index] =
            left * right * std::max((T)1, std::fabs(gain)) * term < std::numeric_limits<T>::max() / 4;
    }
    static T bigger(T a, T b) { return a != a || b <= a ? a : b; } // NaN stays
};
} // namespace ISA
