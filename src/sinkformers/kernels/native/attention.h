// Attention, one head at a time, on the pass plan: the kernel A = exp(C − rowmax) is made once per direction, in row
// blocks that stay in cache, each pass over it serves two iterations, and the first and the last pass carry the
// products.
//
// As many rows of the kernel are stored as the workspace holds; the others are computed again in each pass.
//
// A head belongs to a team. A team of one is a thread with a head of its own; a larger team shares the rows of one
// head, and adds up column sums in the order of its members, so that a result depends on the size of the team and on
// nothing else. Masked tokens are left out when the head is packed: they cost nothing and cannot
// leak. Tokens without a mask that already lie as the products need them are read, and their gradients written,
// where they are.
#pragma once
#include "half.h"
#include "kernels.h"
#include "masks.h"

namespace ISA {

// Whether tokens are bfloat16 numbers, given in float32, and products are computed in bfloat16: those of tokens, which
// are exact, and those of the gradient of the scores with tokens, which round that gradient once. Products of the
// weights with values and with the gradient of the output stay float32: the adjoints of the steps begin as differences
// of these products and of others of the same size, and a rounding of the weights would be magnified there.
#ifdef PRODUCTS_IN_PAIRS
constexpr bool IN_PAIRS = true;
#else
constexpr bool IN_PAIRS = false;
#endif

template <class T> struct Head {
    const AttentionArguments &args;
    const Team team;
    const bool backward;
    const Order order;
    const int n, m, d, e, mp, dp, ep, rows_steps, col_steps, width, most_stored, most_rows;
    int64_t b, h, index;
    bool first_of_item; // the first of the heads whose gradients of the bias are added up
    int live_n, live_m; // valid rows and columns
    int cols, ld;       // live_m in whole vectors, and the length of a row of the kernel
    int block;          // rows that a pass takes at a time
    Columns columns;    // those of the rows at hand that may not be zero
    T rho, tau;
    bool relaxed;
    Arena arena;
    Masks<T> masks;
    const int32_t *const row_at, *const col_at;
    // shared by the team
    T *packed_q, *packed_k, *kt, *packed_v, *start, *a, *vv, *part, *aside, *u, *s, *tops;
    T *x, *y, *z, *alpha, *grad, *dg, *vprev;
    T *limit_columns, *limit_rows, *notes;                                            // of a call of the limit
    T *causal_columns, *causal_rows, *causal_blocks, *causal_scalings, *causal_lanes; // of a causal call
    // of products in pairs: tokens in pairs of features, side by side (`_left`) or as columns (`_columns`), and in
    // pairs of tokens (`_tokens`)
    Pair *q_left, *q_tokens, *k_columns, *k_tokens, *v_columns, *d_left;
    T *last_u;
    int32_t *reaches;
    const T *q, *k; // packed or not, rows dp apart
    // a member's own: rows from `first_row` on, `stored_rows` of them stored
    T *scratch, *drop, *narrow, *scales;
    Pair *pairs; // a block of the kernel
    int first_row, stored_rows;

    // Rows a power of two apart would share their places in the cache, and products over columns touch many rows.
    static int row_length(int cols) { return cols * sizeof(T) % 1024 ? cols : cols + LANES<T>; }
    // About what the second-level cache holds; more where the rows have to be computed again.
    static int block_rows(int n, int m, bool all_stored) {
        const int fit = std::min(SPAN, (int)((all_stored ? 512 : 1024) * 1024 / sizeof(T) / m / MR * MR));
        return std::min(round_up(n, MR), std::max(all_stored ? MR : 4 * MR, fit));
    }
    // `stored`: how many rows of the kernel the team may keep.
    Head(const AttentionArguments &args, Team team, bool backward, int64_t stored, char *base)
        : args(args), team(team), backward(backward), order(args, backward), n((int)args.n), m((int)args.m),
          d((int)args.d), e((int)args.e), mp(round_up(m, COLUMNS<T>)), dp(round_up(d, LANES<T>)),
          ep(round_up(e, LANES<T>)), rows_steps((int)(args.n_iters + 1) / 2), col_steps((int)args.n_iters / 2),
          width(ep + (int)args.n_iters), most_stored((int)std::min<int64_t>(stored, n)),
          most_rows(args.block ? std::min(n, (int)args.block) : block_rows(n, mp, stored >= n)), arena{base},
          masks(args, team, mp, arena), row_at(masks.row_at), col_at(masks.col_at) {
        carve();
    }
    static size_t bytes(const AttentionArguments &args, int size, bool backward, int64_t stored) {
        return Head(args, Team{0, size, nullptr}, backward, stored, nullptr).arena.used;
    }
    void carve() {
        const size_t panels = (mp + PANEL<T> - 1) / PANEL<T>;
        if constexpr (IN_PAIRS) carve_pairs(panels * PANEL<T>);
        else {
            packed_q = arena.take<T>((size_t)n * dp);
            kt = arena.take<T>(panels * PANEL<T> * d);
        }
        if (!IN_PAIRS || !backward) packed_v = arena.take<T>((size_t)mp * ep);
        start = arena.take<T>(mp);
        vv = arena.take<T>(mp);
        part = arena.take<T>((size_t)team.size * mp);
        aside = arena.take<T>((size_t)team.size * mp);
        u = arena.take<T>(n);
        s = arena.take<T>(mp);
        tops = arena.take<T>((size_t)team.size * (args.n_iters + 4));
        if (backward) {
            if constexpr (!IN_PAIRS) packed_k = arena.take<T>((size_t)mp * dp);
            x = arena.take<T>((size_t)n * width);
            y = arena.take<T>(panels * PANEL<T> * width);
            z = arena.take<T>((size_t)team.size * mp * ep);
            grad = arena.take<T>((size_t)team.size * mp * dp);
            alpha = arena.take<T>(n);
            dg = arena.take<T>(mp);
            vprev = arena.take<T>(mp);
        }
        if (at_limit()) {
            limit_columns = arena.take<T>((size_t)LIMIT_COLUMNS * mp);
            limit_rows = arena.take<T>(n);
            notes = arena.take<T>(team.size + 1);
        }
        if (in_order()) carve_causal();
        a = arena.take<T>((size_t)most_stored * row_length(mp));
        const size_t rows = (size_t)most_rows * row_length(mp);
        T *own = most_stored < n && !in_order() ? arena.take<T>(team.size * rows) : nullptr;
        T *factors = args.drops ? arena.take<T>(team.size * rows) : nullptr;
        scratch = own ? own + team.id * rows : nullptr;
        drop = factors ? factors + team.id * rows : nullptr;
        const size_t each = std::max((size_t)narrow_rows(dp) * dp, (size_t)narrow_rows(ep) * ep);
        narrow = arena.take<T>(team.size * each);
        narrow = narrow ? narrow + team.id * each : nullptr;
    }
    void carve_pairs(size_t padded) {
        const size_t half_d = dp / 2, half_e = ep / 2;
        q_left = arena.take<Pair>(n * half_d);
        k_columns = arena.take<Pair>(padded * half_d);
        scales = arena.take<T>(most_rows);
        if (!backward) return;
        v_columns = arena.take<Pair>(padded * half_e);
        k_tokens = arena.take<Pair>((size_t)mp / 2 * dp);
        q_tokens = arena.take<Pair>((size_t)(n + 1) / 2 * dp);
        d_left = arena.take<Pair>(n * half_e);
        last_u = arena.take<T>(n);
        const size_t block = (size_t)(most_rows + 1) / 2 * row_length(mp);
        pairs = arena.take<Pair>(team.size * block);
        pairs = pairs ? pairs + team.id * block : nullptr;
    }
    void carve_causal() {
        const int matrices = 2 + (backward ? (relaxed_call() ? 3 : 2) * col_steps : 0);
        causal_columns = arena.take<T>((size_t)(2 * col_steps + 3) * mp);
        causal_rows = arena.take<T>(2 * (size_t)n);
        causal_blocks = arena.take<T>(matrices * (size_t)most_rows * row_length(mp));
        causal_scalings = arena.take<T>((size_t)(col_steps + 1) * most_rows);
        causal_lanes = arena.take<T>((size_t)most_rows * LANES<T>);
        reaches = arena.take<int32_t>(n);
    }
    bool in_order() const { return args.block > 0; }
    bool relaxed_call() const { return args.tau.data != nullptr; }
    // So few rows that keys are not worth transposing.
    bool few_rows() const { return in_order() && !backward && live_n <= 4; }
    static constexpr int LIMIT_COLUMNS = 14;
    bool at_limit() const { return args.max_products > 0; }
    // Rows of a product that are computed in `narrow`, before each is copied without its padding to its place among all
    // rows: about 48 KiB of them, one tile at least.
    static int narrow_rows(int width) { return std::max(MR, std::min(8 * MR, 2048 / std::max(1, width) * MR)); }
    // to[row_at[i0 + i]] = the first `count` of `width` columns of row i of c·right, a sum over `depth`, times by[i]
    // where given.
    template <class E> void product_to_rows(int i0, int rows, const E *c, size_t apart, int depth, Right<E> right,
                                            int width, int count, T *to, const T *by = nullptr) const {
        const int most = narrow_rows(width);
        for (int i = 0; i < rows; i += most) {
            const int some = std::min(most, rows - i);
            product<E, SET>(some, width, depth, c + i * apart, apart, 1, right, nullptr, narrow, width,
                            by ? by + i : nullptr);
            for (int r = 0; r < some; r++)
                std::copy(narrow + (size_t)r * width, narrow + (size_t)r * width + count,
                          to + (size_t)row_at[i0 + i + r] * count);
        }
    }

    template <class P> P *at(const Strided &t) const { return (P *)t.data + b * t.b + h * t.h; }
    // An empty tensor may have no memory at all, which memset would not take.
    static void zero(void *base, size_t from, size_t count) { std::fill_n((T *)base + from, count, (T)0); }
    T *saved(void *base, int steps, int step, int count) const {
        return (T *)base + ((size_t)index * steps + step) * count;
    }

    // ---- valid tokens, and the packed copies
    // ------------------------------------------------------------------------
    void enter(int64_t item, int64_t place) {
        index = order.head(item, place);
        first_of_item = place == 0;
        b = index / args.heads;
        h = index % args.heads;
        masks.read(b, h);
        live_n = masks.live_n;
        live_m = masks.live_m;
        cols = round_up(live_m, COLUMNS<T>);
        ld = row_length(cols);
        block = masks.windowed ? std::min(most_rows, masks.WINDOW_ROWS) : most_rows;
        int begin, end;
        team.share(live_n, begin, end);
        first_row = begin;
        stored_rows = most_stored >= n ? end - begin : most_stored / team.size / block * block;
        rho = live_m ? (T)live_n / (T)live_m : 1;
        relaxed = relaxed_call();
        tau = relaxed ? *at<const T>(args.tau) : 1;
        if constexpr (IN_PAIRS) {
            enter_pairs();
            team.barrier();
            return;
        }
        // The scale goes into the transposed keys, in backward as in forward: where scores are large, another order of
        // the roundings would give other exponentials. It also goes into Y, unless there is a gradient of the bias.
        const bool apart = backward && args.d_bias.data;
        const T scale = apart ? (T)args.scale : 1;
        int from, to;
        team.share(live_n, from, to);
        q = all_rows() && lies_packed(args.query, d, dp) ? at<const T>(args.query) : packed_q;
        if (q == packed_q)
            for (int i = from; i < to; i++)
                scaled(packed_q + (size_t)i * dp, at<const T>(args.query) + row_at[i] * args.query.i, (T)1, d);
        share_columns(from, to);
        if (backward) {
            k = all_cols() && !apart && lies_packed(args.key, d, dp) ? at<const T>(args.key) : packed_k;
            if (k == packed_k)
                for (int j = from; j < std::min(to, live_m); j++)
                    scaled(packed_k + (size_t)j * dp, key_row(j), scale, d);
        }
        // A column that only fills up a vector has the score minus infinity, whatever the product adds.
        for (int j = from; j < to; j++)
            start[j] = j >= live_m ? -std::numeric_limits<T>::infinity()
                       : args.l2   ? (T)(-0.5 * args.scale) * dot_plain(key_row(j), key_row(j), d)
                                   : 0;
        if (at_limit() && backward)
            for (int j = from; j < std::min(to, live_m); j++) start[j] += saved(args.lift, 1, 0, m)[col_at[j]];
        for (int j = from; j < to && !few_rows(); j += 4) transpose_keys(j, (T)args.scale);
        team.barrier();
    }
    // The tokens in pairs. They are bfloat16 numbers, so that nothing is rounded; the scale is left to the scores.
    void enter_pairs() {
        std::fill(scales, scales + most_rows, (T)args.scale); // the same by every member
        int from, to;
        team.share(live_n, from, to);
        const auto query_row = [&](int i) {
            return i < live_n ? at<const T>(args.query) + row_at[i] * args.query.i : nullptr;
        };
        for (int i = from; i < to; i++) pack_row(query_row(i), d, q_left + (size_t)i * (dp / 2), dp / 2);
        for (int i = from; backward && i < to; i += 2)
            zip_two(query_row(i), query_row(i + 1), d, q_tokens + (size_t)(i / 2) * dp, dp);
        team.share(cols, from, to, COLUMNS<T>);
        const auto live_or_null = [&](const T *row, int j) { return j < live_m ? row : nullptr; };
        for (int j = from; j < to; j++) start[j] = j < live_m ? 0 : -std::numeric_limits<T>::infinity();
        for (int j = from; j < to; j += LANES<T>) {
            const T *keys[LANES<T>], *values[LANES<T>];
            for (int l = 0; l < LANES<T>; l++) {
                keys[l] = live_or_null(key_row(j + l), j + l);
                values[l] = live_or_null(value_row(j + l), j + l);
            }
            transpose_pairs(keys, d, dp / 2, column_pairs(k_columns, j, dp), PANEL<T>);
            if (!backward) continue;
            transpose_pairs(values, e, ep / 2, column_pairs(v_columns, j, ep), PANEL<T>);
            for (int l = 0; l < LANES<T>; l += 2)
                zip_two(keys[l], keys[l + 1], d, k_tokens + (size_t)(j + l) / 2 * dp, dp);
        }
    }
    // Where column j of a matrix with `depth` features begins among panels of pairs.
    Pair *column_pairs(Pair *base, int j, int depth) const {
        return base + (size_t)(j / PANEL<T>)*PANEL<T> * (depth / 2) + j % PANEL<T>;
    }
    Right<Pair> columns_at(const Pair *base, int depth) const {
        return {base + (size_t)columns.from * (depth / 2), (size_t)PANEL<T> * (depth / 2), (size_t)PANEL<T>};
    }
    Right<Pair> tokens_at(const Pair *base, int first, int width) const {
        return {base + (size_t)(first / 2) * width, (size_t)PANEL<T>, (size_t)width};
    }
    int column_depth() const { return (live_columns() + 1) / 2; }
    // The largest entry of v∘V in some columns; NaN where one is not finite.
    T largest_value(int from, int to) const {
        Largest<T> seen;
        for (int j = from; j < std::min(to, live_m); j++) {
            const Vec<T> by = splat(vv[j]);
            const T *value = value_row(j);
            along<T>(
                e, [&](int c) { seen.see(by * load(value + c)); },
                [&](int c, int some) { seen.see(by * load_some(value + c, some, (T)0)); });
        }
        return seen.found();
    }
    bool all_rows() const { return live_n == n; }
    bool all_cols() const { return live_m == m; }
    static bool lies_packed(const Strided &t, int count, int padded) { return count == padded && t.i == padded; }
    // Columns come in fours, the last of them filled up to whole vectors.
    void share_columns(int &from, int &to) const { team.share(cols, from, to, 4); }
    const T *key_row(int j) const { return at<const T>(args.key) + col_at[j < live_m ? j : 0] * args.key.i; }
    const T *value_row(int j) const { return at<const T>(args.value) + col_at[j < live_m ? j : 0] * args.value.i; }
    void transpose_keys(int j, T scale) {
        const T *rows[4] = {key_row(j), key_row(j + 1), key_row(j + 2), key_row(j + 3)},
                by[4] = {scale, scale, scale, scale};
        transpose_four(rows, by, d, kt + (size_t)(j / PANEL<T>)*PANEL<T> * d + j % PANEL<T>, PANEL<T>);
    }
    Right<T> packed(const T *base, int depth) const { return {base, (size_t)PANEL<T> * depth, (size_t)PANEL<T>}; }
    Right<T> plain(const T *base, int ld) const { return {base, (size_t)PANEL<T>, (size_t)ld}; }

    // ---- the kernel
    // ---------------------------------------------------------------------------------------------------
    bool is_stored(int i0) const { return i0 - first_row < stored_rows; }
    // The rows from i0 on, in the columns at hand.
    T *rows_of_kernel(int i0) const {
        if (!is_stored(i0)) return scratch + columns.from;
        const size_t at = most_stored >= n ? i0 : (size_t)team.id * (most_stored / team.size) + i0 - first_row;
        return a + at * ld + columns.from;
    }
    int live_columns() const { return std::min(columns.to, live_m) - columns.from; }
    // The columns at hand of a right-hand side that is packed in panels.
    Right<T> packed_at(const T *base, int depth) const { return packed(base + (size_t)columns.from * depth, depth); }
    // Without bias and masks of entries.
    void products(int i0, int rows) {
        T *c = rows_of_kernel(i0);
        if constexpr (IN_PAIRS)
            product<Pair, SET>(rows, columns.count(), dp / 2, q_left + (size_t)i0 * (dp / 2), dp / 2, 1,
                               columns_at(k_columns, dp), start + columns.from, c, ld, scales);
        else
            product<T, SET>(rows, columns.count(), d, q + (size_t)i0 * dp, dp, 1, packed_at(kt, d),
                            start + columns.from, c, ld);
    }
    // Scores and exponentials with known maxima: the kernel a second time.
    void again(int i0, int rows) {
        products(i0, rows);
        T *c = rows_of_kernel(i0);
        for (int i = 0; i < rows; i++, c += ld) {
            const T shift = ((T *)args.r)[(size_t)index * n + row_at[i0 + i]];
            if (masks.needed()) masks.complete_and_exponentiate(i0 + i, c, columns, shift);
            else exponentiate(c, c, shift, columns.count());
        }
    }
    template <class F> void blocks(bool back, F &&f) {
        int from, to;
        team.share(live_n, from, to);
        const int count = (to - from + block - 1) / block;
        Aside<T> sums(own_part(), aside + (size_t)team.id * mp, cols, to - from);
        for (int p = 0; p < count; p++) { // to and fro: the end of one pass is still in cache for the next
            const int i0 = from + (back ? count - 1 - p : p) * block, rows = std::min(block, to - i0);
            columns = masks.windowed ? masks.columns(i0, rows, live_m) : Columns{0, cols};
            f(i0, rows);
            sums.added(block);
        }
        sums.finish();
    }
    // Rows that a pass takes at a time, to use them twice while they are close.
    static constexpr int FEW = LANES<T> < 8 ? 8 : LANES<T>;
    T *own_part() const { return part + (size_t)team.id * mp; }
    // v from column sums, over a share of the columns; 0 where there is none.
    void scalings(const T *sums, T *to, int from, int until) const {
        const int live = std::min(until, live_m);
        if (relaxed)
            for (int j = from; j < live; j++) to[j] = std::exp(tau * std::log(rho / sums[j]));
        else
            for (int j = from; j < live; j++) to[j] = rho / sums[j];
        std::fill(to + std::max(from, live), to + std::max(from, until), (T)0);
    }
    // Between the caller's vectors, which have all tokens, and ours, which have the valid ones.
    void take(T *to, const T *all, const int32_t *places, bool whole, int from, int until) const {
        if (whole) std::copy(all + from, all + std::max(from, until), to + from);
        else
            for (int i = from; i < until; i++) to[i] = all[places[i]];
    }
    void give(const T *from_ours, T *all, const int32_t *places, bool whole, int from, int until) const {
        if (whole) std::copy(from_ours + from, from_ours + std::max(from, until), all + from);
        else
            for (int i = from; i < until; i++) all[places[i]] = from_ours[i];
    }
    void drop_rows(int i0, int rows) const {
        const Dropout dropout(args.seed, index, args.dropout_p);
        for (int i = 0; i < rows; i++)
            dropout.row<T>(row_at[i0 + i], col_at + columns.from, live_columns(), columns.count(),
                           drop + (size_t)i * ld);
    }
    // The kernel's rows under dropout, where products with the values need them.
    const T *dropped(int i0, int rows) const {
        const T *c = rows_of_kernel(i0);
        if (!args.drops) return c;
        drop_rows(i0, rows);
        for (int i = 0; i < rows; i++) multiply(drop + (size_t)i * ld, c + (size_t)i * ld, columns.count());
        return drop;
    }
};
} // namespace ISA
