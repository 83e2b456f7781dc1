// What an instruction set offers to the library around it.
#pragma once
#include "arguments.h"
#include <cstddef>

// A member's part in a call: who it is, its team's workspace, and where the next head comes from.
struct Share {
    int id, size;
    bool backward, stored;
    char *workspace;
    void (*wait)();
    int64_t (*next)(void *queue);
    void *queue;
};
// Tiny matrices are distributed so many at a time.
constexpr int TINY_PORTION = 512;

struct Kernels { // [0] float, [1] double
    double smallest_exponent[2];
    size_t (*attention_bytes[2])(const AttentionArguments &, int size, bool backward, bool stored);
    void (*attention_heads[2])(const AttentionArguments &, const Share &);
    size_t (*operator_bytes[2])(const OperatorArguments &, int size, bool backward);
    void (*operator_matrices[2])(const OperatorArguments &, const Share &);
    size_t (*tiny_bytes[2])(const OperatorArguments &);
    void (*tiny_matrices[2])(const OperatorArguments &, const Share &);
};
