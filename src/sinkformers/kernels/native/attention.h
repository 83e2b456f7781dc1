// Attention, one head at a time, on the pass plan: the kernel A = exp(C − rowmax) is made once per direction, in row
// blocks that stay in cache, each pass over it serves two iterations, and the first and the last pass carry the
// products.
//
// A head belongs to a team. A team of one is a thread with a head of its own; a larger team shares the rows of one
// head, and adds up column sums in the order of its members, so that a result depends on the size of the team and on
// nothing else. Masked tokens are left out when the head is packed: they cost nothing and cannot
// leak. Tokens without a mask that already lie as the products need them are read, and their gradients written,
// where they are.
#pragma once
#include "arguments.h"
#include "rows.h"
#include "team.h"

namespace ISA {

template <class T> struct Head {
    const AttentionArguments &args;
    const Team team;
    const bool backward;
    const int n, m, d, e, mp, dp, ep, rows_steps, col_steps, width, block;
    const bool stored;
    int64_t b, h, index;
    int live_n, live_m, cols,
        ld; // valid rows and columns; cols is live_m in whole vectors, ld a row of the kernel
    T rho, tau;
    bool relaxed;
    // shared by the team
    int32_t *row_at, *col_at, *counts;
    T *packed_q, *packed_k, *kt, *packed_v, *start, *a, *vv, *part, *aside, *u, *s, *tops;
    T *x, *y, *z, *alpha, *grad, *dg, *vprev;
    const T *q, *k; // packed or not, rows dp apart
    // a member's own
    T *scratch, *drop, *narrow;

    // Rows a power of two apart would share their places in the cache, and products over columns touch many rows.
    static int row_length(int cols) { return cols * sizeof(T) % 1024 ? cols : cols + LANES<T>; }
    static int block_rows(int n, int m, bool stored) {
        const int fit = std::min(SPAN, (int)((stored ? 512 : 1024) * 1024 / sizeof(T) / m / MR * MR));
        return std::min(round_up(n, MR), std::max(stored ? MR : 4 * MR, fit));
    }
    Head(const AttentionArguments &args, Team team, bool backward, bool stored, char *base)
        : args(args), team(team), backward(backward), n((int)args.n), m((int)args.m), d((int)args.d), e((int)args.e),
          mp(round_up(m, COLUMNS<T>)), dp(round_up(d, LANES<T>)), ep(round_up(e, LANES<T>)),
          rows_steps((int)(args.n_iters + 1) / 2), col_steps((int)args.n_iters / 2), width(ep + (int)args.n_iters),
          block(block_rows(n, mp, stored)), stored(stored) {
        Arena arena{base};
        carve(arena);
    }
    static size_t bytes(const AttentionArguments &args, int size, bool backward, bool stored) {
        return Head(args, Team{0, size, nullptr}, backward, stored, nullptr).measured;
    }
    size_t measured;

    void carve(Arena &arena) {
        const size_t panels = (mp + PANEL<T> - 1) / PANEL<T>;
        row_at = arena.take<int32_t>(n);
        col_at = arena.take<int32_t>(mp);
        counts = arena.take<int32_t>(16);
        packed_q = arena.take<T>((size_t)n * dp);
        kt = arena.take<T>(panels * PANEL<T> * d);
        packed_v = arena.take<T>((size_t)mp * ep);
        start = arena.take<T>(mp);
        vv = arena.take<T>(mp);
        part = arena.take<T>((size_t)team.size * mp);
        aside = arena.take<T>((size_t)team.size * mp);
        u = arena.take<T>(n);
        s = arena.take<T>(mp);
        tops = arena.take<T>((size_t)team.size * (args.n_iters + 4));
        if (backward) {
            packed_k = arena.take<T>((size_t)mp * dp);
            x = arena.take<T>((size_t)n * width);
            y = arena.take<T>(panels * PANEL<T> * width);
            z = arena.take<T>((size_t)team.size * mp * ep);
            grad = arena.take<T>((size_t)team.size * mp * dp);
            alpha = arena.take<T>(n);
            dg = arena.take<T>(mp);
            vprev = arena.take<T>(mp);
        }
        a = stored ? arena.take<T>((size_t)n * row_length(mp)) : nullptr;
        T *own = stored ? nullptr : arena.take<T>((size_t)team.size * block * row_length(mp));
        T *masks = args.drops ? arena.take<T>((size_t)team.size * block * row_length(mp)) : nullptr;
        scratch = own ? own + (size_t)team.id * block * row_length(mp) : nullptr;
        drop = masks ? masks + (size_t)team.id * block * row_length(mp) : nullptr;
        const size_t each = std::max((size_t)narrow_rows(dp) * dp, (size_t)narrow_rows(ep) * ep);
        narrow = arena.take<T>(team.size * each);
        narrow = narrow ? narrow + team.id * each : nullptr;
        measured = arena.used;
    }
    // Rows of a product that are computed in `narrow`, before each is copied without its padding to its place among all
    // rows: about 48 KiB of them, one tile at least.
    static int narrow_rows(int width) { return std::max(MR, std::min(8 * MR, 2048 / std::max(1, width) * MR)); }
    // to[row_at[i0 + i]] = the first `count` of `width` columns of row i of c·right, times by[i] where given.
    void product_to_rows(int i0, int rows, const T *c, Right<T> right, int width, int count, T *to,
                         const T *by = nullptr) const {
        const int most = narrow_rows(width);
        for (int i = 0; i < rows; i += most) {
            const int some = std::min(most, rows - i);
            product<T, SET>(some, width, live_m, c + (size_t)i * ld, ld, 1, right, nullptr, narrow, width,
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
    bool valid(int i, int j) const {
        if (args.entries.data && !at<const uint8_t>(args.entries)[i * args.entries.i + j * args.entries.j])
            return false;
        if (args.bias.data && at<const T>(args.bias)[i * args.bias.i + j * args.bias.j] <= (T)args.masked_bias)
            return false;
        return true;
    }
    void find_participants() {
        live_n = live_m = 0;
        const uint8_t *queries = args.queries.data ? at<const uint8_t>(args.queries) : nullptr;
        const uint8_t *keys = args.keys.data ? at<const uint8_t>(args.keys) : nullptr;
        for (int i = 0; i < n; i++)
            if (!queries || queries[i * args.queries.i]) row_at[live_n++] = i;
        for (int j = 0; j < m; j++)
            if (!keys || keys[j * args.keys.i]) col_at[live_m++] = j;
        if (args.entries.data || args.bias.data) {
            int rows = 0, kept = 0;
            uint8_t *seen = (uint8_t *)vv; // not needed yet
            std::memset(seen, 0, live_m);
            for (int i = 0; i < live_n; i++) {
                bool any = false;
                for (int j = 0; j < live_m; j++) {
                    const bool in = valid(row_at[i], col_at[j]);
                    any |= in;
                    seen[j] |= in;
                }
                if (any) row_at[rows++] = row_at[i];
            }
            for (int j = 0; j < live_m; j++)
                if (seen[j]) col_at[kept++] = col_at[j];
            live_n = rows;
            live_m = kept;
        }
        if (!live_n || !live_m) live_n = live_m = 0;
    }
    void enter(int64_t head) {
        index = head;
        b = head / args.heads;
        h = head % args.heads;
        if (team.id == 0) {
            find_participants();
            counts[0] = live_n;
            counts[1] = live_m;
        }
        team.barrier();
        live_n = counts[0];
        live_m = counts[1];
        cols = round_up(live_m, COLUMNS<T>);
        ld = row_length(cols);
        rho = live_m ? (T)live_n / (T)live_m : 1;
        relaxed = args.tau.data != nullptr;
        tau = relaxed ? *at<const T>(args.tau) : 1;
        // The scale goes into the transposed keys, and in backward into Y; only a gradient of the bias needs it
        // elsewhere.
        const bool apart = backward && args.d_bias;
        const T scale = apart ? (T)args.scale : 1;
        int from, to;
        team.share(live_n, from, to);
        q = all_rows() && !apart && lies_packed(args.query, d, dp) ? at<const T>(args.query) : packed_q;
        if (q == packed_q)
            for (int i = from; i < to; i++)
                scaled(packed_q + (size_t)i * dp, at<const T>(args.query) + row_at[i] * args.query.i, scale, d);
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
        for (int j = from; j < to; j += 4) transpose_keys(j, apart ? 1 : (T)args.scale);
        team.barrier();
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
    T *rows_of_kernel(int i0) const { return stored ? a + (size_t)i0 * ld : scratch; }
    void scores(int i0, int rows) {
        T *c = rows_of_kernel(i0);
        product<T, SET>(rows, cols, d, q + (size_t)i0 * dp, dp, 1, packed(kt, d), start, c, ld);
        if (!args.entries.data && !args.bias.data) return;
        for (int i = 0; i < rows; i++)
            for (int j = 0; j < live_m; j++) {
                const int at_row = row_at[i0 + i], at_col = col_at[j];
                T &score = c[(size_t)i * ld + j];
                if (!valid(at_row, at_col)) score = -std::numeric_limits<T>::infinity();
                else if (args.bias.data) score += at<const T>(args.bias)[at_row * args.bias.i + at_col * args.bias.j];
            }
    }
    // Scores and exponentials with known maxima: the kernel a second time.
    void again(int i0, int rows) {
        scores(i0, rows);
        for (int i = 0; i < rows; i++)
            exponentiate(rows_of_kernel(i0) + (size_t)i * ld, rows_of_kernel(i0) + (size_t)i * ld,
                         ((T *)args.r)[(size_t)index * n + row_at[i0 + i]], cols);
    }
    template <class F> void blocks(bool back, F &&f) const {
        int from, to;
        team.share(live_n, from, to);
        const int count = (to - from + block - 1) / block;
        Aside<T> sums(own_part(), aside + (size_t)team.id * mp, cols, to - from);
        for (int p = 0; p < count; p++) { // to and fro: the end of one pass is still in cache for the next
            const int i0 = from + (back ? count - 1 - p : p) * block;
            f(i0, std::min(block, to - i0));
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
        for (int i = 0; i < rows; i++) dropout.row<T>(row_at[i0 + i], col_at, live_m, cols, drop + (size_t)i * ld);
    }
    // The kernel's rows under dropout, where products with the values need them.
    const T *dropped(int i0, int rows) const {
        const T *c = rows_of_kernel(i0);
        if (!args.drops) return c;
        drop_rows(i0, rows);
        for (int i = 0; i < rows; i++) multiply(drop + (size_t)i * ld, c + (size_t)i * ld, cols);
        return drop;
    }
};
} // namespace ISA
