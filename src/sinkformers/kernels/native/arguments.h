// What Python hands over: plain structures, sizes and strides in elements, all pointers the caller's.
#pragma once
#include <cstdint>

extern "C" {
struct Strided {  // element (b, h, i) or (b, h, i, j); unit stride along features
    void *data;
    int64_t b, h, i, j;
};
struct AttentionArguments {
    int64_t batch, heads, n, m, d, e, n_iters, threads, workspace;  // workspace: bytes that stored kernels may take
    Strided query, key, value, bias, entries, queries, keys, tau;
    double scale, dropout, bias_floor;  // a bias at or below the floor is a mask
    uint64_t seed;
    int64_t l2, drops;
    Strided d_out;
    // contiguous: out (b, h, n, e), u (b, h, rows, n), s (b, h, cols, m), r (b, h, n), safe (b, h)
    void *out, *u, *s, *r;
    uint8_t *safe;
    void *d_query, *d_key, *d_value, *d_bias, *d_tau;  // contiguous; d_bias (b, h, n, m) may be null
};
struct OperatorArguments {
    int64_t batch, n, m, n_iters, threads;
    const void *scores, *row_weight, *col_target, *tau;  // contiguous (batch, n, m), (batch, n), (batch, m), (batch)
    const void *d_weights;
    void *weights, *u, *s, *r;
    uint8_t *safe;
    void *d_scores, *d_tau;
};
}
