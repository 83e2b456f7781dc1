// The forward pass of a head.
#pragma once
#include "attention.h"

namespace ISA {

template <class T> struct Forward : Head<T> {
    using Head<T>::Head;
    const T *values; // as the output needs them, rows ep apart

    void run(int64_t item, int64_t place) {
        this->enter(item, place);
        if (this->team.id == 0 && (this->live_n < this->n || this->live_m < this->m)) clear();
        this->team.barrier();
        if (!this->live_n) return;
        values = this->packed_v;
        first_pass();
        for (int step = 1; step < this->args.n_iters; step += 2) {
            column_step(step / 2);
            pass(step / 2 + 1, step + 1 < this->args.n_iters, step + 2 >= this->args.n_iters);
        }
        if (this->team.id == 0) this->args.safe[this->index] = safe();
        this->team.barrier();
    }
    // Whether max u · max v stayed in range at every step, and sums of v∘V stay in range. NaN is not safe.
    bool safe() const {
        const T limit = (T)this->args.safe_product;
        T u = 0, v = 1;
        for (int step = 0; step < this->args.n_iters; step++) {
            T &top = step % 2 ? v : u;
            top = 0;
            for (int t = 0; t < this->team.size; t++) {
                const T share = this->tops[t * (this->args.n_iters + 4) + step];
                top = share <= top ? top : share;
                if (share != share) return false;
            }
            if (!(u * v < limit)) return false;
        }
        T most = 0;
        for (int t = 0; this->col_steps && t < this->team.size; t++) {
            const T share = this->tops[t * (this->args.n_iters + 4) + this->args.n_iters];
            most = share <= most ? most : share;
            if (share != share) return false;
        }
        return most * this->live_m < std::numeric_limits<T>::max() / 4;
    }
    void note(int step, const T *scalings, int from, int to) {
        this->tops[this->team.id * (this->args.n_iters + 4) + step] = largest(scalings + from, std::max(0, to - from));
    }
    void note_rows(int step) {
        int from, to;
        this->team.share(this->live_n, from, to);
        note(step, this->u, from, to);
    }

    void clear() {
        const auto &args = this->args;
        const size_t sizes[] = {(size_t)(args.n * args.e), (size_t)(this->rows_steps * args.n),
                                (size_t)(this->col_steps * args.m), (size_t)args.n};
        void *const bases[] = {args.out, args.u, args.s, args.r};
        for (int t = 0; t < 4; t++) this->zero(bases[t], this->index * sizes[t], sizes[t]);
        args.safe[this->index] = 1;
    }
    // Scores, exponentials, iterations 1 and 2; with one iteration, the output too.
    void first_pass() {
        const bool only = this->args.n_iters == 1;
        if (only) take_values();
        T *sum = this->own_part();
        std::fill(sum, sum + this->cols, (T)0);
        for (int j = 0; j < this->cols; j++) this->vv[j] = 1;
        this->blocks(false, [&](int i0, int rows) {
            this->products(i0, rows);
            T *c = this->rows_of_kernel(i0);
            for (int i = 0; i < rows; i++) {
                T *row = c + (size_t)i * this->ld;
                const T top = this->masks.needed() ? this->masks.complete(i0 + i, row, this->columns)
                                                   : row_max(row, this->columns.count());
                this->saved(this->args.r, 1, 0, this->n)[this->row_at[i0 + i]] = top;
                this->u[i0 + i] = 1 / exponentiate(row, row, top, this->columns.count());
            }
            keep_u(0, i0, rows);
            if (only) output(i0, rows);
            else add(rows, this->u + i0, c, this->ld, sum + this->columns.from, this->columns.count());
        });
        note_rows(0);
        if (!only) gather<T>(this->team, this->part, this->mp, this->s, this->cols);
        else this->team.barrier();
    }
    // SoftMax takes the values as they are.
    void take_values() {
        const auto &value = this->args.value;
        values = this->all_cols() && this->lies_packed(value, this->e, this->ep) ? this->template at<const T>(value)
                                                                                 : this->packed_v;
        int from, to;
        this->team.share(this->live_m, from, to);
        if (values == this->packed_v)
            for (int j = from; j < to; j++)
                scaled(this->packed_v + (size_t)j * this->ep, this->value_row(j), (T)1, this->e);
        this->team.barrier();
    }
    void keep_u(int step, int i0, int rows) {
        this->give(this->u, this->saved(this->args.u, this->rows_steps, step, this->n), this->row_at, this->all_rows(),
                   i0, i0 + rows);
    }
    // v from the column sums.
    void column_step(int step) {
        T *s = this->saved(this->args.s, this->col_steps, step, this->m);
        int from, to;
        this->share_columns(from, to);
        const bool last = step + 1 == this->col_steps; // the values go into the last pass times v
        const int live = std::min(to, this->live_m);
        this->give(this->s, s, this->col_at, this->all_cols(), from, live);
        this->scalings(this->s, this->vv, from, to);
        T &top = this->tops[this->team.id * (this->args.n_iters + 4) + this->args.n_iters];
        if (last) {
            Largest<T> seen;
            for (int j = from; j < live; j++)
                scaled(this->packed_v + (size_t)j * this->ep, this->value_row(j), this->vv[j], this->e, &seen);
            top = seen.found();
        }
        note(2 * step + 1, this->vv, from, to);
        this->team.barrier();
    }
    // A row step, and the next column sums or the output.
    void pass(int step, bool row_step, bool last) {
        T *sum = this->own_part();
        std::fill(sum, sum + this->cols, (T)0);
        this->blocks(step & 1, [&](int i0, int rows) {
            if (!this->is_stored(i0)) this->again(i0, rows);
            const T *c = this->rows_of_kernel(i0);
            const int from = this->columns.from, count = this->columns.count();
            if (row_step) {
                for (int i = 0; i < rows; i += this->FEW) {
                    const int some = std::min<int>(this->FEW, rows - i);
                    dot(some, c + (size_t)i * this->ld, this->ld, this->vv + from, this->u + i0 + i, count);
                    for (int r = i0 + i; r < i0 + i + some; r++) this->u[r] = 1 / this->u[r];
                    if (!last) add(some, this->u + i0 + i, c + (size_t)i * this->ld, this->ld, sum + from, count);
                }
                keep_u(step, i0, rows);
            }
            if (last) output(i0, rows);
        });
        if (row_step) note_rows(2 * step);
        if (!last) gather<T>(this->team, this->part, this->mp, this->s, this->cols);
        else this->team.barrier();
    }
    void output(int i0, int rows) {
        const T *c = this->dropped(i0, rows), *u = this->u + i0;
        T *out = (T *)this->args.out + (size_t)this->index * this->n * this->e;
        const Right<T> values = this->plain(this->values + (size_t)this->columns.from * this->ep, this->ep);
        if (this->all_rows() && this->e == this->ep)
            return product<T, SET>(rows, this->ep, this->live_columns(), c, this->ld, 1, values, nullptr,
                                   out + (size_t)i0 * this->e, this->e, u);
        this->product_to_rows(i0, rows, c, this->ld, this->live_columns(), values, this->ep, this->e, out, u);
    }
};
} // namespace ISA
