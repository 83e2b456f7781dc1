// The arguments of the kernels. Each list below is the one description of a structure: C++ declares it from the list,
// and Python builds its own from the text that the compiled library states (`sinkformers_structure`), field by field
// and by name.
#pragma once
#include <cstdint>

extern "C" {
struct Strided { // element (b, h, i) or (b, h, i, j), strides in elements; unit stride along features
    void *data;
    int64_t b, h, i, j;
};
}

// half: the tokens are bfloat16 numbers, and products may be computed in that precision.
// workspace: bytes that stored kernels may take. masked_bias: a bias at or below means masked. safe_product: a head is
// unsafe once max u · max v reaches it. Contiguous: out (b, h, n, e), u (b, h, row steps, n), s (b, h, column steps,
// m), r (b, h, n), safe (b, h) and the gradients. d_bias (b, h, n, m) may be null; it is a sum over b or over h where
// that stride is 0, and its matrices are contiguous. With max_products > 0 the call is one of the limit: n_iters is 2,
// the weights are u·exp(C + lift − r)·s, lift (b, h, m), and `residual` and `products` (b, h) say how each head
// converged. With block > 0 the call is causal, in blocks of so many rows: with `triangle`, query i sees the keys up to
// i + m − n; target (b, h, n, m) is what uniform attention would have given, needed where entries are masked; received
// (b, h, steps, m), logarithms, and expected (b, h, m) come from earlier queries, and are written for later ones;
// starts (b, h, blocks, steps, m) holds what keys had received before each block.
// clang-format off
#define ATTENTION_FIELDS(INT, REAL, BITS, STRIDED, DATA, BYTES)                                            \
    INT(batch) INT(heads) INT(n) INT(m) INT(d) INT(e) INT(n_iters) INT(threads) INT(workspace)             \
    STRIDED(query) STRIDED(key) STRIDED(value)                                                             \
    STRIDED(bias) STRIDED(entries) STRIDED(queries) STRIDED(keys) STRIDED(tau)                             \
    REAL(scale) REAL(dropout_p) REAL(masked_bias) REAL(safe_product) BITS(seed) INT(l2) INT(drops)         \
    INT(half)                                                                                              \
    STRIDED(d_out) DATA(out) DATA(u) DATA(s) DATA(r) BYTES(safe)                                           \
    DATA(d_query) DATA(d_key) DATA(d_value) STRIDED(d_bias) DATA(d_tau)                                    \
    INT(max_products) REAL(tol) DATA(lift) DATA(residual) DATA(products)                                   \
    INT(block) INT(triangle) STRIDED(target) STRIDED(received) STRIDED(expected)                           \
    DATA(starts) DATA(received_after) DATA(expected_after)

// Contiguous: scores and weights (batch, n, m), row_weight (batch, n), col_target (batch, m), tau (batch).
#define OPERATOR_FIELDS(INT, REAL, BITS, STRIDED, DATA, BYTES)                                             \
    INT(batch) INT(n) INT(m) INT(n_iters) INT(threads) REAL(safe_product)                                  \
    DATA(scores) DATA(row_weight) DATA(col_target) DATA(tau) DATA(d_weights)                               \
    DATA(weights) DATA(u) DATA(s) DATA(r) BYTES(safe) DATA(d_scores) DATA(d_tau)
// clang-format on

#define DECLARE_INT(name) int64_t name;
#define DECLARE_REAL(name) double name;
#define DECLARE_BITS(name) uint64_t name;
#define DECLARE_STRIDED(name) Strided name;
#define DECLARE_DATA(name) void *name;
#define DECLARE_BYTES(name) uint8_t *name;
extern "C" {
struct AttentionArguments {
    ATTENTION_FIELDS(DECLARE_INT, DECLARE_REAL, DECLARE_BITS, DECLARE_STRIDED, DECLARE_DATA, DECLARE_BYTES)
};
struct OperatorArguments {
    OPERATOR_FIELDS(DECLARE_INT, DECLARE_REAL, DECLARE_BITS, DECLARE_STRIDED, DECLARE_DATA, DECLARE_BYTES)
};
}
