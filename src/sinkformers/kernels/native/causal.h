// Causal attention by the streaming definition: one scan over blocks of rows, with what every key has received so far
// carried along; and its gradient, a scan in reverse. See core/causal.py.
//
// Within a block, a column step is a pass down the columns: s += u·A, v = (t/s)^τ, w = A∘v, where t is what uniform
// attention under the same mask would have given the key by that row. Rows of one block are normalised before the next
// column step, so that a block is as parallel as attention itself. A head belongs to one thread.
//
// Where no entries are masked, a row sees the first `reach` valid columns, and t = D_i − E_j + t0_j with sums D and E
// of 1/reach; each is kept as two numbers, since their difference may be a thousandth of them. Otherwise t is given.
#pragma once
#include "attention_backward.h"
#include "attention_forward.h"

namespace ISA {

// Base is Forward or Backward.
template <class T, class Base> struct InOrder : Base {
    using V = Vec<T>;
    static constexpr T TINY = sizeof(T) == 4 ? (T)1e-37 : (T)1e-300;     // smaller products would be denormal
    static constexpr T MOST_RATIO = sizeof(T) == 4 ? (T)1e22 : (T)1e250; // of t/s; beyond, exponentials were lost
    T top;                                                               // the largest ratio seen
    bool in_range;

    InOrder(const AttentionArguments &args, Team team, bool backward, int64_t stored, char *base)
        : Base(args, team, backward, stored, base) {}
    size_t block_size() const { return (size_t)this->most_rows * Head<T>::row_length(this->mp); }
    T *running(int level) const { return this->causal_columns + (size_t)level * this->mp; }
    T *carried(int level) const { return running(this->col_steps + level); }
    T *seen_high() const { return running(2 * this->col_steps); }
    T *seen_low() const { return running(2 * this->col_steps + 1); }
    T *first_expected() const { return running(2 * this->col_steps + 2); }
    T *given_high() const { return this->causal_rows; }
    T *given_low() const { return this->causal_rows + this->n; }
    T *matrix(int number) const { return this->causal_blocks + number * block_size(); }
    T *target() const { return matrix(0); }
    T *row_scaling(int level) const { return this->causal_scalings + (size_t)level * this->most_rows; }
    T *lanes(int row) const { return this->causal_lanes + (size_t)row * LANES<T>; }
    T *start_of(int number, int level) const {
        const size_t blocks = (this->n + this->args.block - 1) / this->args.block;
        return (T *)this->args.starts + ((this->index * blocks + number) * this->col_steps + level) * this->m;
    }

    // How far each row sees, and what uniform attention gives.
    void prepare_expected() {
        const auto &args = this->args;
        const T *before = args.expected.data ? this->template at<const T>(args.expected) : nullptr;
        for (int j = 0; j < this->cols; j++) {
            const bool live = j < this->live_m;
            first_expected()[j] = live && before ? before[this->col_at[j] * args.expected.i] : 0;
        }
        if (args.target.data) return;
        double given = 0;
        int reach = 0, unseen = 0;
        const int64_t offset = (int64_t)this->m - this->n;
        for (int i = 0; i < this->live_n; i++) {
            const int64_t last = args.triangle ? this->row_at[i] + offset : this->m;
            while (reach < this->live_m && this->col_at[reach] <= last) reach++;
            for (; unseen < reach; unseen++) put_two(given, seen_high()[unseen], seen_low()[unseen]);
            if (reach) given += 1.0 / reach;
            put_two(given, given_high()[i], given_low()[i]);
            this->reaches[i] = reach;
        }
        for (int j = unseen; j < this->cols; j++) { // seen by no row
            seen_high()[j] = std::numeric_limits<T>::infinity();
            seen_low()[j] = 0;
        }
    }
    static void put_two(double x, T &high, T &low) {
        high = (T)x;
        low = (T)(x - high);
    }
    Columns columns_of(int i0, int rows) const {
        if (this->args.target.data)
            return this->masks.windowed ? this->masks.columns(i0, rows, this->live_m) : Columns{0, this->cols};
        return {0, round_up(this->reaches[i0 + rows - 1], COLUMNS<T>)};
    }
    // The scores of a few rows, where transposing all keys would take longer than the products. So few rows are never
    // taken by windows: all columns are at hand.
    void direct_products(int i0, int rows) {
        for (int i = 0; i < rows; i++) {
            T *c = this->a + (size_t)i * this->ld;
            const T *q = this->q + (size_t)(i0 + i) * this->dp;
            const int count = this->live_columns();
            if (this->all_cols()) dot(count, this->key_row(0), this->args.key.i, q, c, this->d);
            else
                for (int j = 0; j < count; j++) c[j] = dot_plain(q, this->key_row(j), this->d);
            for (int j = 0; j < count; j++) c[j] = (T)this->args.scale * c[j] + this->start[j];
            std::fill(c + count, c + this->columns.count(), -std::numeric_limits<T>::infinity());
        }
    }
    // A = exp(C − max) of a block, and u = 1 over its row sums.
    void exponentials(int i0, int rows) {
        if (this->few_rows()) direct_products(i0, rows);
        else
            product<T, SET>(rows, this->columns.count(), this->d, this->q + (size_t)i0 * this->dp, this->dp, 1,
                            this->packed_at(this->kt, this->d), this->start + this->columns.from, this->a, this->ld);
        T *u = row_scaling(0);
        for (int i = 0; i < rows; i++) {
            T *c = this->a + (size_t)i * this->ld;
            int count = this->columns.count();
            T highest;
            if (this->args.target.data) {
                highest = this->masks.needed() ? this->masks.complete(i0 + i, c, this->columns) : row_max(c, count);
                tail(c, count);
            } else {
                const int reach = this->reaches[i0 + i], whole = round_up(reach, LANES<T>);
                std::fill(c + whole, c + count, (T)0);
                std::fill(c + reach, c + whole, -std::numeric_limits<T>::infinity());
                count = whole;
                highest = row_max(c, count);
            }
            u[i] = count ? 1 / exponentiate(c, c, highest, count) : 0;
        }
    }
    // Columns that only fill up a vector, which `complete` does not reach.
    void tail(T *c, int count) const {
        for (int j = round_up(this->live_columns(), LANES<T>); j < count; j++)
            c[j] = -std::numeric_limits<T>::infinity();
    }
    void read_target(int i0, int rows) {
        if (!this->args.target.data) return;
        const T *given = this->template at<const T>(this->args.target);
        const int count = this->live_columns(), from = this->columns.from;
        for (int i = 0; i < rows; i++) {
            const T *row = given + this->row_at[i0 + i] * this->args.target.i;
            T *to = target() + (size_t)i * this->ld;
            const size_t step = this->args.target.j;
            if (this->masks.prefix && step == 1) std::copy(row + from, row + from + count, to);
            else
                for (int j = 0; j < count; j++) to[j] = row[this->col_at[from + j] * step];
            std::fill(to + count, to + this->columns.count(), (T)0);
        }
    }
    // A column step of a block, and the row step after it: w = A∘v, and the scalings of its rows. `logs` becomes the
    // logarithm of t/s, and `parts` says how much of what a key has received comes from its row, and how much from
    // those before it. The two add up to 1, and one may be tiny, so the smaller one is kept, with a minus for the rest.
    template <bool keeps> void column_step(int level, int i0, int rows, T *w, T *parts, T *logs) {
        if (this->args.target.data) descend<keeps, true>(level, i0, rows, w, parts, logs);
        else descend<keeps, false>(level, i0, rows, w, parts, logs);
        T *next = row_scaling(level + 1);
        for (int i = 0; i < rows; i++) {
            const T sum = total<T>(load(lanes(i)));
            next[i] = sum == 0 ? 0 : 1 / sum;
            if (level + 1 < this->col_steps && !(next[i] < MOST_RATIO)) in_range = false;
        }
    }
    template <bool keeps, bool given> void descend(int level, int i0, int rows, T *w, T *parts, T *logs) {
        const int from = this->columns.from, count = this->columns.count();
        const T *u = row_scaling(level), *high = given_high() + i0, *low = given_low() + i0;
        T *run = running(level) + from;
        std::fill(lanes(0), lanes(rows), (T)0);
        V most_seen = splat(top);
        for (int j = 0; j < count; j += LANES<T>) {
            V s = load(run + j);
            const V seen_h = given ? V{} : load(seen_high() + from + j),
                    seen_l = given ? V{} : load(seen_low() + from + j);
            const V before = load(first_expected() + from + j);
            for (int i = 0; i < rows; i++) {
                const size_t at = (size_t)i * this->ld + j;
                const V x = load(this->a + at), mine = splat(u[i]) * x, others = s;
                s += mine;
                const V t =
                    given ? load(target() + at) : ((splat(high[i]) - seen_h) + (splat(low[i]) - seen_l)) + before;
                const V inverse = splat((T)1) / s;
                V ratio = t > V{} ? t * inverse : V{};
                most_seen = larger<T>(ratio, most_seen);
                if (this->relaxed) {
                    const V log = t > V{} ? logarithm(ratio) : V{};
                    if (keeps) store(logs + at, log);
                    ratio = t > V{} ? exponential(splat(this->tau) * log) : V{};
                }
                V y = x * ratio;
                y = y < splat(TINY) ? V{} : y;
                store(w + at, y);
                if (keeps) store(parts + at, t > V{} ? smaller_part(mine * inverse, others * inverse) : V{});
                store(lanes(i), load(lanes(i)) + y);
            }
            store(run + j, s);
        }
        top = most<T>(most_seen);
    }
    static V smaller_part(V own, V rest) {
        return own > splat((T)0.5) ? -larger<T>(rest, splat((T)1e-30)) : own; // 0 would lose its sign
    }
    bool is_safe() const { return in_range && top < MOST_RATIO; }
    void begin_head() {
        top = 0;
        in_range = true;
        prepare_expected();
    }
};

template <class T> struct CausalForward : InOrder<T, Forward<T>> {
    using InOrder<T, Forward<T>>::InOrder;
    using V = Vec<T>;

    void run(int64_t item, int64_t place) {
        this->enter(item, place);
        const auto &args = this->args;
        args.safe[this->index] = 1;
        this->zero(args.starts, (size_t)(this->start_of(0, 0) - (T *)args.starts),
                   (size_t)((this->n + args.block - 1) / args.block) * this->col_steps * this->m);
        if (this->live_n < this->n)
            this->zero(args.out, (size_t)this->index * this->n * this->e, (size_t)this->n * this->e);
        if (!this->live_n) return put_sums();
        this->begin_head();
        take_sums();
        this->take_values();
        for (int i0 = 0, number = 0; i0 < this->live_n; i0 += (int)args.block, number++)
            block(i0, std::min((int)args.block, this->live_n - i0), number);
        if (!this->is_safe()) args.safe[this->index] = 0;
        put_sums();
    }
    void block(int i0, int rows, int number) {
        this->columns = this->columns_of(i0, rows);
        for (int level = 0; level < this->col_steps; level++)
            std::copy(this->running(level), this->running(level) + this->live_m, this->start_of(number, level));
        if (!this->columns.count()) return no_output(i0, rows);
        this->exponentials(i0, rows);
        this->read_target(i0, rows);
        T *w = this->a;
        for (int level = 0; level < this->col_steps; level++) { // the last one writes over the exponentials
            w = level + 1 < this->col_steps ? this->matrix(1) : this->a;
            this->template column_step<false>(level, i0, rows, w, nullptr, nullptr);
        }
        if (this->args.drops) {
            this->drop_rows(i0, rows);
            for (int i = 0; i < rows; i++)
                multiply(w + (size_t)i * this->ld, this->drop + (size_t)i * this->ld, this->columns.count());
        }
        T *out = (T *)this->args.out + (size_t)this->index * this->n * this->e;
        const T *by = this->row_scaling(this->col_steps);
        const Right<T> values = this->plain(this->values + (size_t)this->columns.from * this->ep, this->ep);
        if (this->all_rows() && this->e == this->ep)
            product<T, SET>(rows, this->ep, this->live_columns(), w, this->ld, 1, values, nullptr,
                            out + (size_t)i0 * this->e, this->e, by);
        else this->product_to_rows(i0, rows, w, this->ld, this->live_columns(), values, this->ep, this->e, out, by);
        // Rows are divided by their sums after the product, which may have left the range.
        for (int i = i0; i < i0 + rows; i++) {
            const T found = largest(out + (size_t)this->row_at[i] * this->e, this->e);
            if (found != found) this->in_range = false;
        }
    }
    void no_output(int i0, int rows) {
        T *out = (T *)this->args.out + (size_t)this->index * this->n * this->e;
        for (int i = i0; i < i0 + rows; i++) std::fill_n(out + (size_t)this->row_at[i] * this->e, this->e, (T)0);
    }
    static constexpr T NEVER = std::numeric_limits<T>::lowest() / 4;
    const T *received(int level) const {
        const Strided &t = this->args.received;
        return t.data ? this->template at<const T>(t) + level * t.i : nullptr;
    }
    // Sums from the logarithms of earlier calls.
    void take_sums() {
        const V never = splat(NEVER / 2), lowest = splat((T)std::log(1 / this->MOST_RATIO) - 16);
        for (int level = 0; level < this->col_steps; level++) {
            const T *before = received(level);
            T *to = this->running(level);
            std::fill(to, to + this->cols, (T)0);
            if (!before) continue;
            const bool adjacent = this->all_cols() && this->args.received.j == 1;
            for (int j = 0; !adjacent && j < this->live_m; j++) to[j] = before[this->col_at[j] * this->args.received.j];
            const T *logs = adjacent ? before : to;
            typename Simd<T>::I lost = {};
            const auto sums = [&](V log) {
                lost |= (log > never) & (log < lowest);
                return log > never || log != log ? exponential(log) : V{};
            };
            along<T>(
                this->live_m, [&](int j) { store(to + j, sums(load(logs + j))); },
                [&](int j, int count) { store_some(to + j, sums(load_some(logs + j, count, NEVER)), count); });
            for (int l = 0; l < LANES<T>; l++) this->in_range &= !lost[l];
        }
    }
    // The logarithms of the sums that are not zero.
    void put_logarithms(const T *sums, T *to) const {
        const auto log = [&](V sum, V other) { return sum > V{} || sum != sum ? logarithm(sum) : other; };
        along<T>(
            this->m, [&](int j) { store(to + j, log(load(sums + j), load(to + j))); },
            [&](int j, int count) {
                const V old = load_some(to + j, count, NEVER), sum = load_some(sums + j, count, (T)0);
                store_some(to + j, log(sum, old), count);
            });
    }
    // Logarithms for later calls; keys that are masked keep what they had.
    void put_sums() {
        const auto &args = this->args;
        if (!args.received_after) return;
        for (int level = 0; level < this->col_steps; level++) {
            const T *before = received(level);
            T *to = (T *)args.received_after + ((size_t)this->index * this->col_steps + level) * this->m;
            for (int j = 0; j < this->m; j++) to[j] = before ? before[j * args.received.j] : NEVER;
            const T *sums = this->running(level);
            if (this->live_n && this->all_cols()) put_logarithms(sums, to);
            else
                for (int j = 0; this->live_n && j < this->live_m; j++)
                    if (sums[j] > 0 || sums[j] != sums[j]) to[this->col_at[j]] = std::log(sums[j]);
        }
        if (!args.expected_after) return;
        T *to = (T *)args.expected_after + (size_t)this->index * this->m;
        const T *before = args.expected.data ? this->template at<const T>(args.expected) : nullptr;
        for (int j = 0; j < this->m; j++) to[j] = before ? before[j * args.expected.i] : 0;
        if (!this->live_n) return;
        const int last = this->live_n - 1;
        for (int j = 0; j < this->reaches[last]; j++)
            to[this->col_at[j]] +=
                (this->given_high()[last] - this->seen_high()[j]) + (this->given_low()[last] - this->seen_low()[j]);
    }
};

template <class T> struct CausalBackward : InOrder<T, Backward<T>> {
    using InOrder<T, Backward<T>>::InOrder;
    using V = Vec<T>;

    void run(int64_t item, int64_t place) {
        this->enter(item, place);
        if (!this->prepare()) return;
        const auto &args = this->args;
        this->begin_head();
        this->term = 1;
        take_values();
        T *z = this->where_values(), *grad = this->where_keys(), *sum = this->own_part();
        std::fill(z, z + (size_t)this->live_m * this->ep, (T)0);
        std::fill(grad, grad + (size_t)this->live_m * this->dp, (T)0);
        std::fill(sum, sum + this->cols, (T)0);
        for (int level = 0; level < this->col_steps; level++)
            std::fill(this->carried(level), this->carried(level) + this->cols, (T)0);
        const int blocks = (int)((this->live_n + args.block - 1) / args.block);
        for (int number = blocks - 1; number >= 0; number--) {
            const int i0 = number * (int)args.block;
            block(i0, std::min((int)args.block, this->live_n - i0), number);
        }
        std::copy(sum, sum + this->cols, this->s);
        if (!this->values_in_place())
            for (int j = 0; j < this->live_m; j++)
                std::copy(z + (size_t)j * this->ep, z + (size_t)j * this->ep + this->e,
                          this->d_value() + (size_t)this->col_at[j] * this->e);
        this->left = this->is_safe() ? 0 : std::numeric_limits<T>::infinity(); // which is not safe
        this->right = 0;
        this->finish();
    }
    // Transposed, for products with the gradient of the output.
    void take_values() {
        for (int j = 0; j < this->cols; j += 4) {
            const T *rows[4];
            T by[4];
            for (int l = 0; l < 4; l++) {
                rows[l] = this->value_row(j + l);
                by[l] = j + l < this->live_m ? 1 : 0;
            }
            transpose_four(rows, by, this->e, value_column(j), PANEL<T>);
        }
    }
    T *value_column(int j) const { return this->y + (size_t)(j / PANEL<T>)*PANEL<T> * this->e + j % PANEL<T>; }
    T *level_weights(int level) const { return level ? this->matrix(1 + level) : this->a; }
    T *parts(int level) const { return this->matrix(2 + this->col_steps + level); }
    T *logs(int level) const { return this->matrix(2 + 2 * this->col_steps + level); }

    void block(int i0, int rows, int number) {
        this->columns = this->columns_of(i0, rows);
        if (!this->columns.count()) {
            T *d_query = (T *)this->args.d_query + (size_t)this->index * this->n * this->d;
            for (int i = i0; i < i0 + rows; i++)
                std::fill_n(d_query + (size_t)this->row_at[i] * this->d, this->d, (T)0);
            return;
        }
        for (int level = 0; level < this->col_steps; level++) {
            const T *start = this->start_of(number, level);
            T *run = this->running(level);
            std::copy(start, start + this->live_m, run);
            std::fill(run + this->live_m, run + this->cols, (T)0);
        }
        this->exponentials(i0, rows);
        this->read_target(i0, rows);
        for (int level = 0; level < this->col_steps; level++)
            this->template column_step<true>(level, i0, rows, level_weights(level + 1), parts(level), logs(level));
        T *grad = this->matrix(1);
        through_values(i0, rows, grad);
        for (int level = this->col_steps - 1; level >= 0; level--) ascend(level, rows, grad);
        finish_scores(rows, grad);
        finish_block(i0, rows, grad);
    }
    // G = P∘(dO Vᵀ − rowsum(dO∘O)), the gradient of the logarithms of the weights before the last row step; and dV.
    void through_values(int i0, int rows, T *grad) {
        const auto &args = this->args;
        T *w = level_weights(this->col_steps);
        const T *by = this->row_scaling(this->col_steps);
        const T *out = (const T *)args.out + (size_t)this->index * this->n * this->e;
        for (int i = 0; i < rows; i++)
            scaled(this->x_row(i0 + i), this->template at<const T>(args.d_out) + this->row_at[i0 + i] * args.d_out.i,
                   (T)1, this->e);
        product<T, SET>(rows, this->columns.count(), this->e, this->x_row(i0), this->width, 1,
                        this->packed_at(this->y, this->e), nullptr, grad, this->ld);
        if (args.drops) this->drop_rows(i0, rows);
        for (int i = 0; i < rows; i++) {
            const T d = dot_plain(this->x_row(i0 + i), out + (size_t)this->row_at[i0 + i] * this->e, this->e);
            const T *drop = args.drops ? this->drop + (size_t)i * this->ld : nullptr;
            for (int j = 0; j < this->columns.count(); j += LANES<T>) {
                const size_t at = (size_t)i * this->ld + j;
                const V p = splat(by[i]) * load(w + at);
                V through = load(grad + at);
                if (drop) through *= load(drop + j);
                store(grad + at, p != V{} ? p * (through - splat(d)) : V{});
                store(w + at, drop ? p * load(drop + j) : p);
            }
        }
        bool fresh = false;
        this->sum_over_rows(fresh, rows, w, this->plain(this->x_row(i0), this->width), this->where_values(), this->ep);
    }
    // A column step walked back. `grad` is the gradient of the scores so far. What reaches log s goes to all rows that
    // it is a sum over, in proportion to their parts: down the columns in reverse, y = −τ·G + rest·y of the row below.
    void ascend(int level, int rows, T *grad) {
        const bool last = level + 1 == this->col_steps;
        T *own = last ? grad : level_weights(level + 1); // G of this step
        const T *kept = parts(level), *log = logs(level);
        T *carry = this->carried(level) + this->columns.from;
        std::fill(this->lanes(0), this->lanes(rows), (T)0);
        V d_tau{};
        for (int j = 0; j < this->columns.count(); j += LANES<T>) {
            V below = load(carry + j);
            for (int i = rows - 1; i >= 0; i--) {
                const size_t at = (size_t)i * this->ld + j;
                const V g = load(own + at), y = below - splat(this->tau) * g;
                const V part = load(kept + at), small = part < V{} ? -part : part, large = splat((T)1) - small;
                const V h = (part < V{} ? large : small) * y;
                below = (part < V{} ? small : large) * y;
                store(grad + at, (last ? g : load(grad + at)) + h);
                store(this->lanes(i), load(this->lanes(i)) + h);
                if (this->relaxed) d_tau += g * load(log + at);
            }
            store(carry + j, below);
        }
        this->d_tau += total<T>(d_tau);
        // The row step before it: G = −h·u·w.
        T *w = level_weights(level);
        const T *u = this->row_scaling(level);
        for (int i = 0; i < rows; i++) {
            const V by = splat(-total<T>(load(this->lanes(i))) * u[i]);
            for (int j = 0; j < this->columns.count(); j += LANES<T>) {
                const size_t at = (size_t)i * this->ld + j;
                const V g = by * load(w + at);
                if (level) store(w + at, g);
                store(grad + at, load(grad + at) + g);
            }
        }
    }
    void finish_scores(int rows, T *grad) const {
        if (this->gain == 1) return;
        for (int i = 0; i < rows; i++)
            for (int j = 0; j < this->columns.count(); j += LANES<T>) {
                T *at = grad + (size_t)i * this->ld + j;
                store(at, splat(this->gain) * load(at));
            }
    }
    void finish_block(int i0, int rows, T *grad) {
        const T one = 1;
        for (int i = 0; this->args.l2 && i < rows; i++)
            add(1, &one, grad + (size_t)i * this->ld, this->ld, this->own_part() + this->columns.from,
                this->columns.count());
        if (this->args.d_bias.data) this->put_bias(i0, rows, grad);
        this->queries(i0, rows, grad);
        bool fresh = false;
        this->sum_over_rows(fresh, rows, grad, this->plain(this->q + (size_t)i0 * this->dp, this->dp),
                            this->where_keys(), this->dp);
    }
};
} // namespace ISA
