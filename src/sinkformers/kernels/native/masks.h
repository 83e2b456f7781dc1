// Which entries of a head are valid, and what is added to their scores. A mask is read once for all heads that share it
// and follow each other; see `Order`.
#pragma once
#include "arguments.h"
#include "rows.h"
#include "team.h"

namespace ISA {

// The columns [from, to) of a few rows of the kernel.
struct Columns {
    int from, to;
    int count() const { return to - from; }
};

template <class T> struct Masks {
    typedef typename Simd<T>::I Int;
    static constexpr int WINDOW_ROWS = 8 * MR;
    const AttentionArguments &args;
    const Team team;
    const int n, m;
    // The current head's; null where there is none.
    const T *bias = nullptr;
    const uint8_t *entries = nullptr, *queries = nullptr, *keys = nullptr;
    bool known = false;
    // Shared by the team: valid rows and columns; of each row the first and the last valid column and how many there
    // are; and by member the columns with a valid entry.
    int32_t *row_at, *col_at, *place, *first, *last, *number, *counts;
    uint8_t *key_flags;
    Int *seen;
    const int vectors;
    // A member's own: one row of bias and of entries, where they are not adjacent in memory.
    T *line;
    uint8_t *bytes;
    int live_n = 0, live_m = 0;
    bool masked;   // an entry between a valid row and a valid column is masked
    bool prefix;   // the valid columns are the first ones
    bool windowed; // the valid entries of a few rows lie in few columns

    Masks(const AttentionArguments &args, Team team, int padded, Arena &arena)
        : args(args), team(team), n((int)args.n), m((int)args.m), vectors((m + LANES<T> - 1) / LANES<T>) {
        row_at = arena.take<int32_t>(n);
        col_at = arena.take<int32_t>(padded);
        counts = arena.take<int32_t>(16);
        if (!args.bias.data && !args.entries.data) return;
        place = arena.take<int32_t>(m);
        first = arena.take<int32_t>(n);
        last = arena.take<int32_t>(n);
        number = arena.take<int32_t>(n);
        key_flags = arena.take<uint8_t>(m);
        seen = arena.take<Int>((size_t)team.size * vectors);
        T *lines = arena.take<T>((size_t)team.size * padded);
        uint8_t *all = arena.take<uint8_t>((size_t)team.size * padded);
        if (!lines) return;
        line = lines + (size_t)team.id * padded;
        bytes = all + (size_t)team.id * padded;
    }

    template <class P> const P *at(const Strided &t, int64_t b, int64_t h) const {
        return t.data ? (const P *)t.data + b * t.b + h * t.h : nullptr;
    }
    // Find the valid rows and columns of a head; every member of the team calls it.
    void read(int64_t b, int64_t h) {
        const T *its_bias = at<T>(args.bias, b, h);
        const uint8_t *its_entries = at<uint8_t>(args.entries, b, h), *its_queries = at<uint8_t>(args.queries, b, h),
                      *its_keys = at<uint8_t>(args.keys, b, h);
        if (known && its_bias == bias && its_entries == entries && its_queries == queries && its_keys == keys) return;
        known = true;
        bias = its_bias;
        entries = its_entries;
        queries = its_queries;
        keys = its_keys;
        if (bias || entries) scan();
        team.barrier();
        if (team.id == 0) {
            if (bias || entries) compact();
            else tokens();
        }
        team.barrier();
        live_n = counts[0];
        live_m = counts[1];
        masked = counts[2];
        windowed = counts[3];
        prefix = live_m == 0 || col_at[live_m - 1] == live_m - 1;
    }
    bool query_valid(int i) const { return !queries || queries[i * args.queries.i]; }
    bool key_valid(int j) const { return !keys || keys[j * args.keys.i]; }
    void conclude(int rows, int cols, bool some_masked, bool narrow) {
        if (!rows || !cols) rows = cols = 0;
        counts[0] = rows;
        counts[1] = cols;
        counts[2] = some_masked;
        counts[3] = narrow;
    }
    void tokens() {
        int rows = 0, cols = 0;
        for (int i = 0; i < n; i++)
            if (query_valid(i)) row_at[rows++] = i;
        for (int j = 0; j < m; j++)
            if (key_valid(j)) col_at[cols++] = j;
        conclude(rows, cols, false, false);
    }

    // `count` entries of row i from a column on, counted among the given columns or all: where they lie, or copied.
    template <class P> static const P *part(const P *matrix, const Strided &t, int i, const int32_t *columns, int from,
                                            int count, P *copy) {
        if (!matrix) return nullptr;
        const P *row = matrix + i * t.i;
        if (t.j == 1 && !columns) return row + from;
        for (int j = 0; j < count; j++) copy[j] = row[(columns ? columns[from + j] : from + j) * t.j];
        return copy;
    }
    const T *bias_row(int i, const int32_t *columns, int from, int count) const {
        return part(bias, args.bias, i, columns, from, count, line);
    }
    const uint8_t *entries_row(int i, const int32_t *columns, int from, int count) const {
        return part(entries, args.entries, i, columns, from, count, bytes);
    }
    // All bits set in the lanes of valid entries, from column j on; only `count` lanes are read. NaN is valid.
    Int valid(const T *row, const uint8_t *flags, int j, int count) const {
        const bool whole = count == LANES<T>;
        const T lowest = -std::numeric_limits<T>::infinity();
        Int yes = ~Int{};
        if (row) yes &= ~((whole ? load(row + j) : load_some(row + j, count, lowest)) <= splat((T)args.masked_bias));
        if (flags) yes &= nonzero<T>(flags + j, count);
        return yes;
    }
    // A member's share of the rows: the first and the last valid column of each, how many are valid, and the columns
    // seen.
    void scan() {
        Int *mine = seen + team.id * vectors;
        std::fill(mine, mine + vectors, Int{});
        int from, to;
        team.share(n, from, to);
        if (keys && team.id == 0)
            for (int j = 0; j < m; j++) key_flags[j] = key_valid(j);
        if (keys) team.barrier();
        for (int i = from; i < to; i++) {
            number[i] = 0;
            if (query_valid(i)) scan_row(i, mine);
        }
    }
    void scan_row(int i, Int *mine) {
        const T *row = bias_row(i, nullptr, 0, m);
        const uint8_t *flags = entries_row(i, nullptr, 0, m);
        Int index, low = Int{} + m, high = ~Int{}, found = {};
        for (int l = 0; l < LANES<T>; l++) index[l] = l;
        for (int j = 0; j < m; j += LANES<T>, index += LANES<T>) {
            const int count = std::min(LANES<T>, m - j);
            Int yes = valid(row, flags, j, count);
            if (keys) yes &= nonzero<T>(key_flags + j, count);
            if (count < LANES<T>) yes &= index < m;
            mine[j / LANES<T>] |= yes;
            found -= yes;
            low = (yes & (index < low)) != 0 ? index : low;
            high = yes != 0 ? index : high;
        }
        int begin = m, end = -1, sum = 0;
        for (int l = 0; l < LANES<T>; l++) {
            begin = std::min(begin, (int)low[l]);
            end = std::max(end, (int)high[l]);
            sum += (int)found[l];
        }
        first[i] = begin;
        last[i] = end;
        number[i] = sum;
    }
    // By one member, after all have scanned.
    void compact() {
        int rows = 0, cols = 0;
        int64_t all = 0;
        for (int j = 0; j < m; j++) {
            bool any = false;
            for (int t = 0; t < team.size; t++) any |= seen[t * vectors + j / LANES<T>][j % LANES<T>] != 0;
            place[j] = cols;
            if (any) col_at[cols++] = j;
        }
        for (int i = 0; i < n; i++) {
            if (!number[i]) continue;
            all += number[i];
            first[rows] = place[first[i]];
            last[rows] = place[last[i]];
            row_at[rows++] = i;
        }
        const bool some_masked = all != (int64_t)rows * cols;
        conclude(rows, cols, some_masked, some_masked && narrow(rows, cols));
    }
    // Whether it is worth while to take few rows at a time, and only the columns between their first and last ones.
    bool narrow(int rows, int cols) const {
        int64_t area = 0;
        for (int i = 0; i < rows; i += WINDOW_ROWS) {
            const int some = std::min(WINDOW_ROWS, rows - i);
            const Columns own = columns(i, some, cols);
            area += (int64_t)some * (own.to - own.from);
        }
        return area < 0.8 * rows * cols;
    }
    // The columns that some rows need: from a whole panel to a whole vector; `cols` is the number of valid ones.
    Columns columns(int i0, int rows, int cols) const {
        int from = cols, to = 0;
        for (int i = i0; i < i0 + rows; i++) {
            from = std::min<int>(from, first[i]);
            to = std::max<int>(to, last[i] + 1);
        }
        return {from / PANEL<T> * PANEL<T>, std::min(round_up(to, COLUMNS<T>), round_up(cols, COLUMNS<T>))};
    }
    // Whether scores need more than a product.
    bool needed() const { return masked || bias; }
    // Calls f(j, scores) along the scores c of valid row i in some of the columns, with the bias added, and minus
    // infinity where masked.
    template <class F> void along_row(int i, const T *c, Columns which, F &&f) const {
        const int count = std::min(which.to, live_m) - which.from, whole = count / LANES<T> * LANES<T>;
        const int32_t *columns = prefix ? nullptr : col_at;
        const T *row = bias_row(row_at[i], columns, which.from, count);
        const uint8_t *flags = masked ? entries_row(row_at[i], columns, which.from, count) : nullptr;
        const T lowest = -std::numeric_limits<T>::infinity();
        if (!masked)
            for (int j = 0; j < whole; j += LANES<T>) f(j, load(c + j) + load(row + j));
        else if (!row)
            for (int j = 0; j < whole; j += LANES<T>)
                f(j, nonzero<T>(flags + j, LANES<T>) != 0 ? load(c + j) : splat(lowest));
        else
            for (int j = 0; j < whole; j += LANES<T>)
                f(j, valid(row, flags, j, LANES<T>) != 0 ? load(c + j) + load(row + j) : splat(lowest));
        if (whole == count) return;
        const Vec<T> x = load(c + whole) + (row ? load_some(row + whole, count - whole, (T)0) : Vec<T>{});
        f(whole, masked ? valid(row, flags, whole, count - whole) != 0 ? x : splat(lowest) : x);
    }
    // The scores c of valid row i completed; returns the largest.
    T complete(int i, T *c, Columns which) const {
        Vec<T> top = splat(-std::numeric_limits<T>::infinity());
        along_row(i, c, which, [&](int j, Vec<T> x) {
            store(c + j, x);
            top = larger<T>(x, top);
        });
        return most<T>(top);
    }
    // The same, and their exponentials.
    void complete_and_exponentiate(int i, T *c, Columns which, T shift) const {
        const Vec<T> by = splat(shift);
        along_row(i, c, which, [&](int j, Vec<T> x) { store(c + j, exponential(x - by)); });
        for (int j = round_up(std::min(which.to, live_m) - which.from, LANES<T>); j < which.count(); j++) c[j] = 0;
    }
};
} // namespace ISA
